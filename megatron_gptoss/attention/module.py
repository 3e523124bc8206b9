"""Sink attention as Megatron's `core_attention`.

In: queries, keys and values as Megatron's SelfAttention hands them over (rotated, kv heads not repeated), "sbhd" or packed "thd".
Out: the attention output in the same layout. The mathematics is in reference.py; this file only translates. No context parallelism yet.

Shape legend: s sequence, b batch, T packed tokens, H query heads, K kv heads, D head dim (H and K of this tensor-parallel rank).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_gptoss.attention.api import attend


class SinkAttention(MegatronModule):
    """Drop-in for Megatron's DotProductAttention with softmax_type="learnable".

    The sinks are the parameter `softmax_offset` [H]: Megatron's name, so that checkpoints and its inference engine find them.
    `config.fault` ("none", "no-sinks", "window") breaks the computation on purpose, for the parity check; see build.py.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,  # from 1, counted over all pipeline stages
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_rest: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = groups.tp
        if groups.cp.size() != 1:
            raise ValueError(f"context parallel size is {groups.cp.size()}; SinkAttention computes whole sequences only (size 1)")
        if config.num_attention_heads % self.tp_group.size():
            raise ValueError(f"{config.num_attention_heads} heads cannot be divided over {self.tp_group.size()} tensor-parallel ranks")

        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            # Megatron's left window counts the keys before the token, ours counts the token too.
            self.window = config.window_size[0] + 1 + (config.fault == "window")
        self.use_sinks = config.fault != "no-sinks"

        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        num_heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype, device=device))
        # Unmarked, Megatron takes it for a replica and counts only tensor-parallel rank 0's sinks in the gradient norm.
        tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        self.softmax_offset = sinks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """thd: [T, H, D] with [T, K, D] -> [T, H * D]; sbhd: [s, b, H, D] with [s, b, K, D] -> [s, b, H * D]. Always causal."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SinkAttention is causal inside each sequence; other masks and biases are not supported")
        sinks = self.softmax_offset if self.use_sinks else None
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            cu_seqlens = packed_seq_params.cu_seqlens_q
            out_THD, _ = attend(query, key, value, sinks, cu_seqlens=cu_seqlens, window=self.window, scale=self.scale)
            return out_THD.flatten(1)

        s, b = query.shape[:2]
        cu_seqlens = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
        q_THD, k_TKD, v_TKD = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out_THD, _ = attend(q_THD, k_TKD, v_TKD, sinks, cu_seqlens=cu_seqlens, window=self.window, scale=self.scale)
        return out_THD.reshape(b, s, -1).transpose(0, 1).contiguous()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """The same key and global shape as Megatron's own and TransformerEngine's attention: [layers, heads]."""
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
