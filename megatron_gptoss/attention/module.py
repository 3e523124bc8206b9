"""Sink attention in Megatron's calling convention: the drop-in for `core_attention`.

In: queries, keys and values as Megatron's SelfAttention hands them over (rotated, kv heads not repeated), "sbhd" or packed "thd". Out: the
attention output in the same layout. It stands in for Megatron-Core 0.19.2's DotProductAttention and for TransformerEngine's behind
TEDotProductAttention: constructor keywords, forward, parameter and checkpoint key are theirs. What it does not compute it refuses; the
mathematics is api.py's `attend`, and context.py's when the sequence lies on several ranks.

Shape legend: s sequence, b batch, T packed tokens, H query heads, K kv heads, D head dim (H and K of this tensor-parallel rank).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_gptoss.attention.api import attend, find_backend
from megatron_gptoss.attention.layout import version_of

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass(frozen=True)
class AttentionOptions:
    """How SinkAttention computes. It reads them from the field `sink_attention` of its config; a plain TransformerConfig has no such field
    and gets these defaults."""

    backend: str = "reference"  # of layers that see everything; one of api.BACKENDS
    backend_windowed: str = "reference"  # of layers with a window
    deterministic: bool = False  # Megatron's deterministic_mode asks for it too
    # Wrong on purpose, to find out where a fault comes from.
    ignore_sinks: bool = False  # plain softmax
    drop_sink_gradient: bool = False  # the forward pass is right, the sinks' gradient is None
    ignore_window: bool = False  # every layer sees everything, on the backend of layers that do


class SinkAttention(MegatronModule):
    """Causal self-attention with the sinks of `config.softmax_type`: "learnable" has the parameter `softmax_offset` [H], Megatron's and
    TransformerEngine's name; "off-by-one" a constant sink of 0; "vanilla" none.

    Context parallelism (a group of more than one rank): each rank holds a contiguous shard of the packed stream, and cu_seqlens are those
    of the whole stream. That is NOT Megatron's zigzag of 2 * cp chunks; whoever shards the batch must do it this way. Each rank's gradient
    of the sinks is its part, and the gradient is their sum, which Megatron's reduction over data and context ranks makes.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,  # from 1, counted over all pipeline stages
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,  # TransformerEngine's choice of messages; context.py makes its own, from the window
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_what_is_not_computed(config, attn_mask_type, attention_type, dropout, k_channels, v_channels, num_splits)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, _context_group(groups, config)
        self.layer_number = layer_number
        options: AttentionOptions = getattr(config, "sink_attention", AttentionOptions())

        head_dim = k_channels or config.kv_channels
        # apply_query_key_layer_scaling divides scores by the layer's number before the softmax and multiplies them again inside it, for
        # fp16's range. Scores are never held in 16 bits here, so there is nothing to do.
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.window = None if options.ignore_window else layer_window(config, layer_number)
        self.backend = options.backend if self.window is None else options.backend_windowed
        self.deterministic = options.deterministic or bool(config.deterministic_mode)
        self.ignore_sinks, self.drop_sink_gradient = options.ignore_sinks, options.drop_sink_gradient

        num_heads = _share(config.num_attention_heads, "num_attention_heads", self.tp_group.size())
        _share(config.num_query_groups, "num_query_groups", self.tp_group.size())
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        # A backend that cannot run here is refused now, and not in the first step.
        find_backend(
            self.backend, torch.empty(0, num_heads, head_dim, dtype=config.params_dtype, device=device), deterministic=self.deterministic
        )
        if self.backend == "te" and config.softmax_type != "vanilla":  # training packs
            import_module("megatron_gptoss.attention.te").refuse_packed_sinks()
        self._make_sinks(num_heads, device)
        self.register_load_state_dict_pre_hook(_drop_extra_state)

    def _make_sinks(self, num_heads: int, device: torch.device) -> None:
        sinks = torch.zeros(num_heads, dtype=self.config.params_dtype, device=device)
        if self.config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif self.config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", sinks, persistent=False)
        else:
            self.softmax_offset = torch.nn.Parameter(sinks)
            if self.config.perform_initialization and self.config.init_method is not None:
                self.config.init_method(self.softmax_offset)
            # Unmarked, Megatron takes it for a replica and counts only tensor-parallel rank 0's sinks in the gradient norm.
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,  # None: the constructor's
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """thd: [T, H, D] with [T, K, D] -> [T, H * D]; sbhd: [s, b, H, D] with [s, b, K, D] -> [s, b, H * D].

        Causal inside each sequence. Where cu_seqlens_q_padded is given, it says how the sequences lie in memory: padding then is the last
        rows of its sequence, which no real row sees, and whose outputs mean nothing. Raises ValueError for what is not computed.
        """
        if attention_mask is not None:
            raise ValueError("attention_mask is given; SinkAttention is causal inside each sequence and takes no other mask, so pass None")
        if attention_bias is not None:
            raise ValueError("attention_bias is given; SinkAttention has no bias on scores, so pass None")
        _refuse_mask_type(attn_mask_type or AttnMaskType.causal)
        _refuse_splits(num_splits)
        group = self.cp_group if packed_seq_params is None else _group_of_call(packed_seq_params, self.cp_group)
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._attend(query, key, value, _bounds(packed_seq_params), group).flatten(1)
        if packed_seq_params is not None and packed_seq_params.qkv_format not in (None, "sbhd"):
            raise ValueError(f"qkv_format = {packed_seq_params.qkv_format!r} is not read; SinkAttention takes 'sbhd' and 'thd'")

        s, b = query.shape[:2]
        if group is not None and b != 1:
            raise ValueError(f"query has batch {b}; with context parallelism sbhd holds one sequence, batch 1. Pack several as thd")
        if key.shape[:2] != (s, b):
            raise ValueError(f"key is [s, b] = {list(key.shape[:2])} and query {[s, b]}; self-attention has as many keys as queries")
        cu_seqlens = _equal_sequences(s if group is None else s * group.size(), b, query.device)
        q_THD, k_TKD, v_TKD = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out_THD = self._attend(q_THD, k_TKD, v_TKD, cu_seqlens, group)
        return out_THD.reshape(b, s, -1).transpose(0, 1).contiguous()

    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, group: Any) -> Tensor:
        sinks = None if self.ignore_sinks else self.softmax_offset
        if sinks is not None and self.drop_sink_gradient:
            sinks = sinks.detach()
        how: dict[str, Any] = {
            "cu_seqlens": cu_seqlens,
            "window": self.window,
            "scale": self.scale,
            "backend": self.backend,
            "deterministic": self.deterministic,
        }
        if group is None:
            return attend(q_THD, k_TKD, v_TKD, sinks, **how)[0]
        from megatron_gptoss.attention.context import attend_context

        return attend_context(q_THD, k_TKD, v_TKD, sinks, group=group, **how)[0]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """The same key and global shape as Megatron's own and TransformerEngine's attention: [layers, heads]."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def layer_window(config: Any, layer_number: int) -> int | None:
    """Visible keys of a layer, the token itself included; None: all earlier ones. Megatron's left window counts the keys before the token,
    and TransformerEngine's -1 means all of them."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if right != 0:
        raise ValueError(f"window_size = {(left, right)} looks ahead; SinkAttention is causal, so its right end must be 0")
    return None if left < 0 else left + 1


def _refuse_what_is_not_computed(
    config: Any,
    attn_mask_type: AttnMaskType,
    attention_type: str,
    dropout: float,
    k_channels: int | None,
    v_channels: int | None,
    num_splits: int | None,
) -> None:
    _refuse_mask_type(attn_mask_type)
    _refuse_splits(num_splits)
    if attention_type != "self":
        raise ValueError(f"attention_type = {attention_type!r} is not computed; SinkAttention is self-attention, 'self'")
    if dropout:
        raise ValueError(f"attention_dropout = {dropout} is not computed; SinkAttention drops nothing, so set it to 0.0")
    keys, values = k_channels or config.kv_channels, v_channels or config.kv_channels
    if keys != values:
        raise ValueError(f"v_channels = {values} differs from k_channels = {keys}; SinkAttention has one head dim for both")
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise ValueError(f"softmax_type = {config.softmax_type!r} is unknown; one of 'vanilla', 'off-by-one', 'learnable'")
    for name in ("qk_clip", "log_max_attention_logit", "fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, name):
            raise ValueError(f"{name} = True is not computed by SinkAttention; set it to False")


def _refuse_mask_type(attn_mask_type: AttnMaskType) -> None:
    if attn_mask_type not in CAUSAL:
        raise ValueError(f"attn_mask_type = {attn_mask_type.name} is not computed; SinkAttention is causal: 'causal' or 'padding_causal'")


def _refuse_splits(num_splits: int | None) -> None:
    if num_splits not in (None, 1):
        raise ValueError(f"num_splits = {num_splits} is not computed; SinkAttention sums a row's keys in one piece: None or 1")


def _share(number: int, name: str, ranks: int) -> int:
    if number % ranks:
        raise ValueError(f"{name} = {number} cannot be divided over {ranks} tensor-parallel ranks")
    return number // ranks


def _context_group(groups: ProcessGroupCollection, config: Any) -> Any:
    """The ranks that share a sequence, None when each has its own."""
    group = getattr(groups, "cp", None)
    ranks = 1 if group is None else group.size()
    if ranks != config.context_parallel_size:
        raise ValueError(f"context_parallel_size = {config.context_parallel_size}, but the context-parallel group has {ranks} ranks")
    return group if ranks > 1 else None


def _group_of_call(packed: PackedSeqParams, usual: Any) -> Any:
    """A batch may bring its own context-parallel group, or say with local_cp_size = 1 that its sequences are whole; else the usual one."""
    if packed.cp_group is not None:
        return packed.cp_group if packed.cp_group.size() > 1 else None
    if packed.local_cp_size is not None:
        if packed.local_cp_size != 1:
            raise ValueError(f"local_cp_size = {packed.local_cp_size} comes without cp_group; give the group, or 1 for whole sequences")
        return None
    return usual


def _bounds(packed: PackedSeqParams) -> Tensor:
    """cu_seqlens of the sequences as they lie in memory."""
    if packed.cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is None; packed (thd) attention needs the bounds of its sequences")
    for name in ("cu_seqlens_{}", "cu_seqlens_{}_padded"):
        queries, keys = (getattr(packed, name.format(side)) for side in ("q", "kv"))
        if not _same(queries, keys):
            raise ValueError(
                f"{name.format('kv')} differs from {name.format('q')}; SinkAttention is self-attention, its keys are its queries'"
            )
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


_known_equal: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal values. Comparing tensors waits for the GPU, so a pair is compared once, not once per layer."""
    if a is None or b is None or a is b:
        return a is b
    known = _known_equal.get(a)
    if known is not None and known[0]() is b and known[1] == (version_of(a), version_of(b)):
        return True
    if not torch.equal(a, b):
        return False
    _known_equal[a] = (weakref.ref(b), (version_of(a), version_of(b)))
    return True


@lru_cache(maxsize=8)  # one tensor for all layers of a step: the layout that api.py makes of it lives as long as it does
def _equal_sequences(s: int, b: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the call, and training may meet it next
        return s * torch.arange(b + 1, dtype=torch.int32, device=device)


def _drop_extra_state(_module: Any, state_dict: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """TransformerEngine's state dict has one more entry, its fp8 scales; there is nothing here that they could scale."""
    state_dict.pop(f"{prefix}_extra_state", None)
