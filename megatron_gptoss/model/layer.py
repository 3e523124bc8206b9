"""Parts of a layer in which Megatron-Core 0.19.2 stands in the way of parallelism, written again.

In: what Megatron hands its own parts. Out: the same numbers on one rank. tests/unit/test_model_megatron_bugs.py fails when Megatron mends
what is worked around here:
4. WrappedTorchNorm, the only norm without TransformerEngine or Apex, refuses sequence parallelism. All it takes is a mark on the weight,
   for finalize_model_grads to sum its gradient over tensor-parallel ranks.
5. Rotary embedding of packed sequences under context parallelism assumes zigzag shards of each sequence on its own. Our shards are
   contiguous pieces of the whole stream (attention/context.py), and the angles given are one per token already. So does
   YarnRotaryEmbedding, which slices its table while it is built.

Shape legend: T packed tokens of this rank (s, b: batched), H query heads, K kv heads of this tensor-parallel rank, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_gptoss.model.rotary import split_and_rotate


class Norm(torch.nn.RMSNorm):
    """RMSNorm as WrappedTorchNorm makes it, under sequence parallelism too."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class YarnAngles(YarnRotaryEmbedding):
    """The whole table of angles on every context-parallel rank: a shard may begin at any position."""

    @lru_cache(maxsize=32)  # noqa: B019  # as Megatron's, which clears it by name after building
    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """([max_seq_len, 1, 1, D], YaRN's factor)."""
        return self.get_emb(max_seq_len, offset)


class RotatedSelfAttention(SelfAttention):
    """SelfAttention that rotates queries and keys by one angle per token, [T, 1, 1, D], without looking at cu_seqlens.

    That also spares two waits for the GPU in every layer: Megatron's packed path reads cu_seqlens on the host. With the configuration's
    `rotary_backend` "fused", what comes as rotary_pos_emb is rotary.table_of the angles, and our kernel splits and rotates (packed only).
    """

    _angles: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        self._angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, *args, rotary_pos_emb=None, **kwargs)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """query [s, b, H, D], key and value [s, b, K, D]; packed: s = T, b = 1."""
        if self._angles is not None and getattr(self.config, "rotary_backend", "reference") == "fused":
            joined: Any = super().get_query_key_value_tensors(*args, **{**kwargs, "split_qkv": False})[0]
            K, D = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
            query, key, value = split_and_rotate(joined.flatten(1), self._angles, K, D)
            return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)  # pyright: ignore[reportAssignmentType]
        if self._angles is None:
            return query, key, value
        factor = self._yarn_concentration_factor
        query, key = (_apply_rotary_pos_emb_bshd(x, self._angles, mscale=factor) for x in (query, key))
        return query, key, value
