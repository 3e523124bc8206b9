"""The "grouped" backend: all experts of a rank in one grouped matrix product each way, with our kernels in between.

In: rows sorted by expert, on a GPU in bfloat16 (on a CPU under Triton's interpreter, for tests). Out: as expert_reference.experts. The
order of every sum is fixed, so the same inputs give the same bits.

What is kept for backward: x [N, C] and h = x W1 [N, 2I] before its bias, nothing else of that length but the weights [N]. The activation is
computed again in backward, in the pass that makes its gradients. Never held: a bias gathered for every row, or anything of size
experts times tokens.

grouped_mm wants strides of 16 bytes or multiples, so C and I must be multiples of 8 in bfloat16 (2,880 is). The weights lie as Megatron has
them, [E, out, in]: forward reads them transposed, which is the layout that tensor cores like best, and the gradients come out the same way.

Shape legend: N rows (tokens times experts per token), E experts of this rank, C hidden size, I expert width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def missing(device: torch.device, dtype: torch.dtype, hidden: int, width: int) -> str | None:
    """What this machine lacks for the backend, in one line; None: nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"its kernels run on a CUDA GPU, not on {device.type}; on a CPU use 'loop' (TRITON_INTERPRET=1 runs them there, for tests)"
    if device.type == "cuda" and knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, and its kernels would be interpreted on the host, very slowly; unset it"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"torch.nn.functional.grouped_mm is fast in bfloat16 only, and this model is {dtype}; use 'loop'"
    step = 16 // dtype.itemsize
    if hidden % step or width % step:
        return f"grouped_mm needs sizes that are multiples of {step} in {dtype}: hidden size {hidden}, expert width {width}; use 'loop'"
    if device.type != "cuda":
        from megatron_gptoss.attention.triton_backend import _mend_interpreter

        _mend_interpreter()
    return None


def experts(
    x_NC: Tensor, weight_N: Tensor, offs_E: Tensor, w1_E2IC: Tensor, b1_E2I: Tensor, w2_ECI: Tensor, b2_EC: Tensor, limit: float
) -> Tensor:
    """expert_reference.experts, with offs_E (int32, the end of each expert's rows) on x's device instead of counts on the host."""
    if not torch.is_grad_enabled():
        return _forward(x_NC, weight_N, offs_E, w1_E2IC, b1_E2I, w2_ECI, b2_EC, limit)[0]
    return _Experts.apply(x_NC, weight_N, offs_E, w1_E2IC, b1_E2I, w2_ECI, b2_EC, limit)  # pyright: ignore[reportReturnType]


def grouped_mm(a: Tensor, b: Tensor, offs_E: Tensor) -> Tensor:
    """[N, A] x [E, A, B] -> [N, B] by expert; [A, N] x [N, B] -> [E, A, B], summed over each expert's rows."""
    return torch.nn.functional.grouped_mm(a, b, offs=offs_E)


def _forward(
    x: Tensor, weight: Tensor, offs: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, limit: float, keep_h: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(y, h). h is let go of before y is made, unless it is to be kept."""
    from megatron_gptoss.model import expert_kernels as kernels

    if len(x) == 0:
        return x.new_empty(0, w2.shape[1]), x.new_empty(0, w1.shape[1])
    h = grouped_mm(x.contiguous(), w1.mT, offs)
    a = kernels.activate(h, b1, weight, offs, limit)
    kept = h if keep_h else None
    del h
    return kernels.add_bias_(grouped_mm(a, w2.mT, offs), b2, weight, offs), kept


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, offs, w1, b1, w2, b2, limit):  # pyright: ignore[reportIncompatibleMethodOverride]
        y, h = _forward(x, weight, offs, w1, b1, w2, b2, limit, keep_h=True)
        ctx.limit = limit
        ctx.save_for_backward(x, h, weight, offs, w1, b1, w2, b2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        from megatron_gptoss.model import expert_kernels as kernels

        x, h, weight, offs, w1, b1, w2, b2 = ctx.saved_tensors
        if len(x) == 0:
            zeros = (torch.zeros_like(p) for p in (w1, b1, w2, b2))
            return torch.zeros_like(x), torch.zeros_like(weight), None, *zeros, None
        x, dy = x.contiguous(), dy.contiguous()
        out, dh, db1, dweight = kernels.activate_backward(grouped_mm(dy, w2, offs), h, b1, weight, offs, ctx.limit)
        db2 = kernels.bias_backward(dy, b2, weight, offs, dweight)
        # Zeroed, since grouped_mm leaves an expert without rows what was in memory, on some GPUs (Blackwell: pytorch issue 172439).
        dw2 = kernels.zero_empty_(grouped_mm(dy.mT, out, offs), offs)
        del out
        dw1 = kernels.zero_empty_(grouped_mm(dh.mT, x, offs), offs)
        return grouped_mm(dh, w1, offs), dweight, None, dw1, db1, dw2, db2, None
