"""The room's front door: `attend`, causal attention with sinks, windows and packed sequences, on a backend that the caller names.

In: queries, keys, values, sinks. Out: attention output and log-sum-exp, differentiable in all four and through both. It checks its
arguments once, here, and never chooses a backend by itself. Context parallelism is context.py, Megatron's calling convention module.py.

Shape legend: T packed tokens, H query heads, K kv heads, D head dim, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gptoss.attention.layout import Layout, self_attention_layout
from megatron_gptoss.errors import MachineError

BACKENDS = ("reference", "triton", "flash", "te")


@dataclass(frozen=True)
class Backend:
    """Two raw passes, neither of them seen by autograd; signatures and meaning as in reference.py.

    They choose their own precision: torch.autocast, which would compute the reference's products in 16 bits, is off inside.
    """

    name: str
    raw_forward: Callable[..., tuple[Tensor, Tensor]]
    raw_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]

    def forward(self, q_THD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(q_THD.device.type, enabled=False):
            return self.raw_forward(q_THD, *rest)

    def backward(self, dout_THD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        with torch.autocast(dout_THD.device.type, enabled=False):
            return self.raw_backward(dout_THD, *rest)


def attend(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sink_H: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "reference",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each packed sequence, with one sink logit per query head.

    cu_seqlens: integers [S+1] from 0 to T, not decreasing; None: all of T is one sequence. Read once for each tensor: change it in place
    only by torch's own operations, which mark it as changed.
    window: visible keys, the token itself included (GPT-OSS: 128); None: all earlier ones.
    sink_H: one logit per query head in any float type; None: no sink. Query head h reads kv head h // (H / K).
    scale: factor on q.k, default 1/sqrt(D).
    backend: one of BACKENDS. deterministic: the same inputs give the same bits, backward too.

    Returns out_THD in q's dtype and lse_TH in float32 (float64 for float64 inputs): the logarithm (nats) of the softmax's whole
    denominator, the sink included, so that exp(score - lse) is a key's share and exp(sink - lse) the sink's.

    Raises ValueError for arguments that break a rule, MachineError for a backend that this machine cannot run. Inputs are never written.
    """
    check_arguments(q_THD, k_TKD, v_TKD, sink_H, window, scale)
    layout = self_attention_layout(cu_seqlens, q_THD.shape[0], q_THD.device)
    chosen = find_backend(backend, q_THD, deterministic=deterministic)
    return attend_layout(q_THD, k_TKD, v_TKD, sink_H, layout, window=window, scale=scale, backend=chosen, deterministic=deterministic)


def attend_layout(
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    sink_H: Tensor | None,
    layout: Layout,
    *,
    window: int | None,
    scale: float | None,
    backend: Backend,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`attend` for any Layout, arguments already checked: what context.py calls with a halo's keys in front."""
    sink_H, window, scale = usual_arguments(q_THD, sink_H, window, scale)
    return _Attend.apply(q_THD, k_UKD, v_UKD, sink_H, layout, window, scale, backend, deterministic)  # pyright: ignore[reportReturnType]


def find_backend(name: str, q_THD: Tensor, *, deterministic: bool = False) -> Backend:
    """The backend of that name, or an error that says what is missing for it on q's device and dtype."""
    if name not in BACKENDS:
        raise ValueError(f"backend = {name!r} is unknown; one of {', '.join(BACKENDS)}")
    module = import_module(f"megatron_gptoss.attention.{_MODULES[name]}")
    missing = module.missing(q_THD.device, q_THD.dtype, q_THD.shape[-1], deterministic)
    if missing:
        raise MachineError(f"attention backend {name!r} cannot run here: {missing}")
    return Backend(name, module.forward, module.backward)


_MODULES = {"reference": "reference", "triton": "triton_backend", "flash": "flash", "te": "te"}


class _Attend(torch.autograd.Function):
    """Saves q, k, v, the output and its log-sum-exp; weights are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_UKD: Tensor,
        v_UKD: Tensor,
        sink_H: Tensor | None,
        layout: Layout,
        window: int | None,
        scale: float,
        backend: Backend,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        out_THD, lse_TH = backend.forward(q_THD, k_UKD, v_UKD, sink_H, layout, window, scale)
        ctx.save_for_backward(q_THD, k_UKD, v_UKD, sink_H, out_THD, lse_TH)
        ctx.rest = (layout, window, scale, deterministic)
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor | None, dlse_TH: Tensor | None) -> tuple[Tensor | None, ...]:
        q_THD, k_UKD, v_UKD, sink_H, out_THD, lse_TH = ctx.saved_tensors
        if dout_THD is None:
            dout_THD = torch.zeros_like(out_THD)
        gradients = ctx.backend.backward(dout_THD, dlse_TH, q_THD, k_UKD, v_UKD, sink_H, out_THD, lse_TH, *ctx.rest)
        return (*gradients, None, None, None, None, None)


def usual_arguments(
    q_THD: Tensor, sink_H: Tensor | None, window: int | None, scale: float | None
) -> tuple[Tensor | None, int | None, float]:
    """Sinks side by side in memory, a window that 32 bits hold, and a scale: what raw passes may count on."""
    return (
        None if sink_H is None else sink_H.contiguous(),
        None if window is None else min(window, 1 << 30),
        q_THD.shape[-1] ** -0.5 if scale is None else scale,
    )


def check_arguments(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, window: int | None, scale: float | None) -> None:
    """Raises ValueError in one line that names the argument and the rule it breaks."""
    for name, x in (("q_THD", q_THD), ("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [tokens, heads, head dim]")
        if x.dtype != q_THD.dtype or not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype} and q_THD {q_THD.dtype}; q, k and v must share one float type")
        if x.device != q_THD.device:
            raise ValueError(f"{name} is on {x.device} and q_THD on {q_THD.device}; they must be on one device")
    if v_TKD.shape != k_TKD.shape:
        raise ValueError(f"v_TKD has shape {tuple(v_TKD.shape)} and k_TKD {tuple(k_TKD.shape)}; they must be the same")
    if k_TKD.shape[0] != q_THD.shape[0]:
        raise ValueError(f"k_TKD has {k_TKD.shape[0]} tokens and q_THD {q_THD.shape[0]}; they must have the same T")
    if k_TKD.shape[2] != q_THD.shape[2]:
        raise ValueError(f"k_TKD has head dim {k_TKD.shape[2]} and q_THD {q_THD.shape[2]}; they must be the same")
    H, K = q_THD.shape[1], k_TKD.shape[1]
    if K == 0 or H % K:
        raise ValueError(f"q_THD has {H} heads and k_TKD {K}; the query heads must be a multiple of the kv heads")
    if sink_H is not None:
        if sink_H.shape != (H,):
            raise ValueError(f"sink_H has shape {tuple(sink_H.shape)}; it must be [query heads] = ({H},)")
        if not sink_H.is_floating_point() or sink_H.device != q_THD.device:
            raise ValueError(f"sink_H is {sink_H.dtype} on {sink_H.device}; it must be a float type on q_THD's device {q_THD.device}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window = {window}; it counts keys, the token itself included, so it must be a whole number of at least 1")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale = {scale}; it must be positive")
