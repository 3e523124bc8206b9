"""The backend on flash-attn-4's kernels for Hopper and Blackwell, called raw: no autograd of theirs.

In: what reference.py takes, in bfloat16 or float16 on a GPU. Out: the same outputs and gradients. The forward folds the sink in itself. The
backward is their sink-unaware one, fed with the output and log-sum-exp that include the sink (docs/sink_attention.md), and the sink's own
gradient is ours: upstream tests its sink backward without packed sequences only. Kernels are compiled at their first use.

Shape legend: T packed queries, U packed keys, H query heads, K kv heads, D head dim, S sequences.
Source: `_flash_attn_fwd` and `_flash_attn_bwd` in flash_attn/cute/interface.py of the version below.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.attention.layout import Layout

PACKAGE = "flash-attn-4==4.0.0b36"


def forward(
    q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sink_H: Tensor | None, layout: Layout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in q's dtype and lse_TH in float32, a view of [H, T]."""
    if q_THD.shape[0] == 0 or k_UKD.shape[0] == 0:
        return torch.zeros_like(q_THD), _lse_of_no_keys(q_THD, sink_H)
    blind = _queries_without_keys(layout)
    if blind:
        out_THD, lse_TH = forward(q_THD[blind:], k_UKD, v_UKD, sink_H, _without_queries(layout, blind), window, scale)
        return torch.cat([torch.zeros_like(q_THD[:blind]), out_THD]), torch.cat([_lse_of_no_keys(q_THD[:blind], sink_H), lse_TH])

    batch, packed = _calling_convention(layout)
    used = slice(layout.first_key, None)
    out, lse, *_ = _interface()._flash_attn_fwd(
        *(batch(x) for x in (q_THD, k_UKD[used], v_UKD[used])),
        softmax_scale=scale,
        learnable_sink=None if sink_H is None else sink_H.float(),
        return_lse=True,
        **_mask(layout, window),
        **packed,
    )
    lse_HT = lse.view(q_THD.shape[1], -1)
    if sink_H is not None:
        # Upstream adds exp(sink - highest score), which overflows where the sink is 88 nats above. It then has all the weight.
        lse_HT = torch.where(lse_HT == math.inf, sink_H.float().unsqueeze(1), lse_HT)
    return out.view(q_THD.shape), lse_HT.T


def backward(
    dout_THD: Tensor,
    dlse_TH: Tensor | None,
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    sink_H: Tensor | None,
    out_THD: Tensor,
    lse_TH: Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in their tensors' dtypes and dsink (None without a sink). Unless deterministic, tiles are summed in no fixed order."""
    dout_THD = dout_THD.contiguous()
    dsink_H = None
    if sink_H is not None:
        from megatron_gptoss.attention.triton_backward import sink_gradient

        dsink_H = sink_gradient(dout_THD, dlse_TH, out_THD, lse_TH, sink_H)
    dq_THD, dk_UKD, dv_UKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_UKD, v_UKD))
    blind = _queries_without_keys(layout)
    if blind:
        layout = _without_queries(layout, blind)
        dq_THD[:blind] = 0.0
    if layout.num_queries == 0 or k_UKD.shape[0] == 0:
        return dq_THD.zero_(), dk_UKD.zero_(), dv_UKD.zero_(), dsink_H
    dk_UKD[: layout.first_key] = 0.0
    dv_UKD[: layout.first_key] = 0.0

    batch, packed = _calling_convention(layout)
    seeing, used = slice(blind, None), slice(layout.first_key, None)
    lse_HT = lse_TH[seeing].T.contiguous()
    dlse_HT = None if dlse_TH is None else dlse_TH[seeing].T.contiguous()
    _interface()._flash_attn_bwd(
        *(batch(x) for x in (q_THD[seeing], k_UKD[used], v_UKD[used], out_THD[seeing], dout_THD[seeing], lse_HT)),
        softmax_scale=scale,
        deterministic=deterministic,
        dq=batch(dq_THD[seeing]),
        dk=batch(dk_UKD[used]),
        dv=batch(dv_UKD[used]),
        dlse=None if dlse_HT is None else batch(dlse_HT),
        **_mask(layout, window),
        **packed,
    )
    return dq_THD, dk_UKD, dv_UKD, dsink_H


def missing(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
    """What this machine, dtype or head dim lacks for the backend, in one line; None when nothing."""
    if device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {device}; 'reference' runs there"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0) and capability[0] != 10:
        return f"it needs compute capability 9.0 (Hopper) or 10.x (Blackwell), not {capability[0]}.{capability[1]}; 'triton' runs there"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}; 'triton' and 'reference' take that"
    if head_dim not in (16, 32, 64, 128):
        return f"head dim {head_dim} is not 16, 32, 64 or 128; 'reference' takes any"
    return _import_fault()


def _mask(layout: Layout, window: int | None) -> dict[str, Any]:
    """Their windows are inclusive on both sides and do not count the token itself; causality is aligned at the last query and last key."""
    if not layout.causal or window is None:
        return {"causal": layout.causal}
    # A window wider than all keys must not overflow their 32-bit column index.
    return {"causal": True, "window_size_left": min(window - 1, layout.num_keys), "window_size_right": 0}


def _calling_convention(layout: Layout) -> tuple[Any, dict[str, Any]]:
    """How to hand tensors over: one sequence as a batch of one, several as a packed batch."""
    if len(layout.bounds) == 2:
        return (lambda x: x.unsqueeze(0)), {}
    # Keys that belong to nobody are cut off in front, so the table begins at 0 as upstream's tests have it.
    cu_keys_S1 = layout.cu_keys_S1 - layout.first_key if layout.first_key else layout.cu_keys_S1
    packed = {
        "cu_seqlens_q": layout.cu_queries_S1,
        "cu_seqlens_k": cu_keys_S1,
        "max_seqlen_q": layout.max_queries,
        "max_seqlen_k": layout.max_keys,
    }
    return (lambda x: x), packed


def _queries_without_keys(layout: Layout) -> int:
    """Their forward computes a tile of queries that sees no key against tile -1, before the first key, so such queries never reach it. In a
    causal layout they are the first -offset ones: every other query sees at least key i + offset, its own place."""
    return min(max(-layout.offset, 0), layout.num_queries) if layout.causal else 0


def _without_queries(layout: Layout, count: int) -> Layout:
    """The layout without its first `count` queries, where offset = -count: plain self-attention of the rest."""
    return Layout(tuple(max(b - count, 0) for b in layout.bounds), device=layout.device)


def _lse_of_no_keys(q_THD: Tensor, sink_H: Tensor | None) -> Tensor:
    if sink_H is None:
        return torch.full(q_THD.shape[:2], -math.inf, dtype=torch.float32, device=q_THD.device)
    return sink_H.float().expand(q_THD.shape[:2]).contiguous()


@cache
def _interface() -> ModuleType:
    return import_module("flash_attn.cute.interface")


@cache
def _import_fault() -> str | None:
    try:
        _interface()
    except (ImportError, OSError) as error:  # absent, or flash-attn 2, which has no cute, or a library that does not load
        return f"package flash_attn.cute cannot be imported ({str(error).partition(chr(10))[0]}); pip install {PACKAGE}"
    return None
