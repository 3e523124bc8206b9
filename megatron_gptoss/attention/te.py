"""The backend on Transformer Engine's fused attention (cuDNN), raw and with its own sinks: the peer that others are compared with.

In: what reference.py takes, in bfloat16 or float16 on a GPU, for plain self-attention. Out: the same outputs and gradients. It knows no
offset keys, no gradient through the log-sum-exp and no deterministic backward, and says so.

Shape legend: T packed tokens, H query heads, K kv heads, D head dim, S sequences.
Source: transformer_engine/pytorch/cpp_extensions/fused_attn.py of the version below, called as its DotProductAttention calls it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.attention.layout import Layout
from megatron_gptoss.errors import MachineError

PACKAGE = "transformer-engine[pytorch]==2.20.2"
# The cudnn-frontend in Transformer Engine refuses the backward of packed sequences with a sink below this: cuDNN read out of bounds.
CUDNN_FOR_PACKED_SINKS = 92600


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, layout: Layout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in q's dtype and lse_TH in float32."""
    if layout.offset or not layout.causal:
        raise ValueError(
            "attention backend 'te' does plain self-attention only; 'triton' and 'flash' take the layouts of context parallelism"
        )
    if len(layout.bounds) > 2 and sink_H is not None:
        refuse_packed_sinks()
    if q_THD.shape[0] == 0:
        return torch.zeros_like(q_THD), torch.zeros(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    batch, arguments, options, format = _calling_convention(layout, sink_H, window, scale)
    out, (stats, *_) = _extension().fused_attn_fwd(
        True,  # training: gives the log-sum-exp
        *arguments,
        *(batch(x.contiguous()) for x in (q_THD, k_TKD, v_TKD)),
        q_THD.dtype,
        _extension().FusedAttnBackend["F16_arbitrary_seqlen"],
        softmax_offset=_offset(sink_H),
        o_format=format,
        **options,
    )
    H = q_THD.shape[1]
    lse_TH = stats.view(H, -1).T if format == "bshd" else stats.view(-1, H)  # [1, H, T, 1], packed [T, H, 1]
    return out.view(q_THD.shape), lse_TH


def refuse_packed_sinks() -> None:
    """Raises MachineError where this machine's cuDNN has no backward for packed sequences with a sink."""
    cudnn = torch.backends.cudnn.version() or 0
    if cudnn < CUDNN_FOR_PACKED_SINKS:
        raise MachineError(f"attention backend 'te' needs cuDNN 9.26 for packed sequences with sinks, not {cudnn}; use 'triton' or 'flash'")


def backward(
    dout_THD: Tensor,
    dlse_TH: Tensor | None,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sink_H: Tensor | None,
    out_THD: Tensor,
    lse_TH: Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in their tensors' dtypes and dsink (None without a sink), summed in no fixed order."""
    if dlse_TH is not None:
        raise ValueError("attention backend 'te' has no gradient through lse; use 'triton', 'flash' or 'reference'")
    if q_THD.shape[0] == 0:
        dq_THD, dk_TKD, dv_TKD = (torch.zeros_like(x) for x in (q_THD, k_TKD, v_TKD))
        return dq_THD, dk_TKD, dv_TKD, None if sink_H is None else torch.zeros_like(sink_H)
    batch, arguments, options, format = _calling_convention(layout, sink_H, window, scale)
    stats = lse_TH.T.contiguous()[None, ..., None] if format == "bshd" else lse_TH.contiguous().unsqueeze(-1)
    # Random state: only dropout reads it.
    aux = [stats, torch.zeros(2, dtype=torch.int64, device=q_THD.device)] + ([] if sink_H is None else [_offset(sink_H)])
    dq, dk, dv, *rest = _extension().fused_attn_bwd(
        *arguments,
        *(batch(x.contiguous()) for x in (q_THD, k_TKD, v_TKD, out_THD, dout_THD)),
        q_THD.dtype,
        aux,
        _extension().FusedAttnBackend["F16_arbitrary_seqlen"],
        o_format=format,
        do_format=format,
        dqkv_layout=options["qkv_layout"],
        deterministic=False,
        **options,
    )
    dsink_H = None if sink_H is None else rest[1].view(-1).to(sink_H.dtype)
    return dq.view(q_THD.shape), dk.view(k_TKD.shape), dv.view(v_TKD.shape), dsink_H


def missing(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
    """What this machine, dtype or head dim lacks for the backend, in one line; None when nothing."""
    if device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {device}; 'reference' runs there"
    if deterministic:
        return "Transformer Engine has no deterministic backward with sinks; 'triton' and 'flash' have one"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}; 'triton' and 'reference' take that"
    if head_dim % 8 or not 8 <= head_dim <= 128:
        return f"head dim {head_dim} is not a multiple of 8 up to 128; 'reference' takes any"
    return _import_fault()


def _calling_convention(layout: Layout, sink_H: Tensor | None, window: int | None, scale: float) -> tuple[Any, tuple, dict[str, Any], str]:
    """How to hand tensors over, the leading arguments, the options that forward and backward share, and the format's name."""
    if len(set(layout.bounds)) < len(layout.bounds):  # empty sequences have no tokens to compute; cuDNN need not know of them
        layout = Layout(tuple(sorted(set(layout.bounds))), device=layout.device)
    options: dict[str, Any] = {
        "attn_scale": scale,
        "softmax_type": "vanilla" if sink_H is None else "learnable",
        # Inclusive, without the token itself; -1: all earlier keys.
        "window_size": (-1 if window is None else min(window - 1, layout.num_keys), 0),
    }
    if len(layout.bounds) == 2:
        options |= {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal"}
        arguments = (layout.max_queries, layout.max_keys, layout.cu_queries_S1, layout.cu_keys_S1)
        return (lambda x: x.unsqueeze(0)), arguments, options, "bshd"
    # Every length bound is one cuDNN graph; rounded up as Transformer Engine does it, so that packed batches share them.
    longest = -(-layout.max_queries // 64) * 64
    options |= {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"}
    options |= {"cu_seqlens_q_padded": layout.cu_queries_S1, "cu_seqlens_kv_padded": layout.cu_queries_S1}
    return (lambda x: x), (longest, longest, layout.cu_queries_S1, layout.cu_queries_S1), options, "thd"


def _offset(sink_H: Tensor | None) -> Tensor | None:
    return None if sink_H is None else sink_H.float().view(1, -1, 1, 1)


@cache
def _extension() -> ModuleType:
    import_module("transformer_engine.pytorch")  # loads the shared libraries
    return import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")


@cache
def _import_fault() -> str | None:
    try:
        _extension()
    except (ImportError, OSError) as error:  # absent, or a library that does not load
        return f"package transformer_engine.pytorch cannot be imported ({str(error).partition(chr(10))[0]}); pip install '{PACKAGE}'"
    return None
