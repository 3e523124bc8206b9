"""A critic: GPT-OSS's layers with one number for each token instead of logits.

In: token ids and positions, as in gpt_oss.py. Out: what the caller's `head` makes of the last hidden states and `ValueHead`; from a
pipeline stage that is not the last, hidden states. Parameters have the policy's names but for the head, `value_head.weight` [C] and
`value_head.bias` [1]. It knows no losses.

Shape legend: T packed tokens (of this context-parallel rank), C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_gptoss.model.gpt_oss import GptOssModel, Head


class ValueHead(torch.nn.Module):
    """value = w . h + b, multiplied and added up in float32 whatever the weights' dtype. Zero at first: no value is better known."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden_MC: Tensor) -> Tensor:
        """float32 [M]"""
        return hidden_MC.float() @ self.weight.float() + self.bias.float()


class GptOssValueModel(GptOssModel):
    """Made by build.build_model. Its head is whole on every tensor-parallel rank, as all else there that is small."""

    def _add_head(self, config: Any, vocab_size: int) -> None:
        self.value_head = ValueHead(config.hidden_size)

    def _use_head(self, hidden: Tensor, packed_seq_params: PackedSeqParams | None, head: Head | None) -> Any:
        """`head` gets hidden states, whole on each tensor-parallel rank, and the value head. Each of these ranks computes all values, so
        each has the whole gradient for the hidden states, and takes its own tokens' part; nothing is added up."""
        assert head is not None, "a value model says nothing without a head"
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return head(hidden if packed_seq_params is None else hidden.squeeze(1), self.value_head)  # pyright: ignore[reportArgumentType]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """GptOssModel's entries, with the value head in place of the output layer, which LanguageModule would look for."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)  # pyright: ignore[reportArgumentType]
