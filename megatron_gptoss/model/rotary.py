"""From the joined output of linear_qkv to rotated queries and keys, and values, in one pass each way.

In: qkv as Megatron lays it out, for each kv head its G query heads, its key and its value; cosines and sines of every token. Out: queries,
keys, values, each contiguous. Megatron's own way reads and writes them about ten times (split, copy, negate, join, two products, a sum, for
queries and keys): about 90 of 1,200 ms of a training pass of the 20B on an H200, by its profile. `reference` is the same in plain PyTorch,
the kernel's twin.

Cosines and sines are rounded to the model's dtype, as Megatron and Hugging Face round them, and the rotation is then exact up to one
rounding of its result, where they round three times.

Shape legend: T tokens, K kv heads, G query heads of each, H = K G, D head dim, X = K (G + 2) D.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("reference", "fused")


def table_of(angles_T11D: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1, D]: cosines of the first half of the angles (the second repeats them), then sines, times YaRN's factor."""
    half = angles_T11D[..., : angles_T11D.shape[-1] // 2]
    return (torch.cat([half.cos(), half.sin()], dim=-1) * factor).to(dtype)


def split_and_rotate(qkv_TX: Tensor, table_T11D: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q_THD, k_TKD, v_TKD), by the kernel. Differentiable in qkv."""
    return _SplitAndRotate.apply(qkv_TX, table_T11D.view(len(qkv_TX), head_dim), num_kv_heads)  # pyright: ignore[reportReturnType]


def reference(qkv_TX: Tensor, table_T11D: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """split_and_rotate in plain PyTorch."""
    T, X = qkv_TX.shape
    heads = qkv_TX.view(T, num_kv_heads, X // (num_kv_heads * head_dim), head_dim)
    q, k, v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
    wide = torch.promote_types(qkv_TX.dtype, torch.float32)
    cos, sin = table_T11D.view(T, 1, head_dim).to(wide).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.to(wide).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return rotate(q.flatten(1, 2)), rotate(k), v.contiguous()


def missing(device: torch.device, head_dim: int) -> str | None:
    """What this machine lacks for the kernel, in one line; None: nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return (
            f"its kernel runs on a CUDA GPU, not on {device.type}; on a CPU use 'reference' (TRITON_INTERPRET=1 runs it there, for tests)"
        )
    if head_dim & (head_dim - 1) or head_dim < 2:
        return f"its kernel is written for head dims that are powers of two, not {head_dim}; use 'reference'"
    if device.type != "cuda":
        from megatron_gptoss.attention.triton_backend import _mend_interpreter

        _mend_interpreter()
    return None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TX, table_TD, num_kv_heads):  # pyright: ignore[reportIncompatibleMethodOverride]
        from megatron_gptoss.model.rotary_kernels import split

        ctx.save_for_backward(table_TD)
        return split(qkv_TX.contiguous(), table_TD, num_kv_heads)

    @staticmethod
    def backward(ctx: Any, dq, dk, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        from megatron_gptoss.model.rotary_kernels import join

        (table_TD,) = ctx.saved_tensors
        return join(dq.contiguous(), dk.contiguous(), dv.contiguous(), table_TD), None, None
