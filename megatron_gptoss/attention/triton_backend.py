"""The "triton" backend: our own kernels, on a Hopper or later GPU, or anywhere under Triton's interpreter (slow, for tests).

In and out: as reference.py. The kernels are in triton_forward.py and triton_backward.py; this file only says where they run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

_mended = False


def missing(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
    """What this machine lacks for the backend, in one line; None: nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA (pip install triton==3.6.0)"
    from triton import knobs

    if device.type == "cuda" and knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, and its kernels would be interpreted on the host, very slowly; unset it"
    if device.type != "cuda":
        if knobs.runtime.interpret:
            _mend_interpreter()
            return _wrong_head_dim(head_dim)
        return (
            f"its kernels run on a CUDA GPU, and q_THD is on {device}; on a CPU set TRITON_INTERPRET=1 (slow, for tests) or use 'reference'"
        )
    if torch.cuda.get_device_capability(device)[0] < 9:
        name = torch.cuda.get_device_name(device)
        return f"it reads through the tensor memory accelerator, which comes with Hopper, and {name} has none; use 'reference'"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes bfloat16, float16 and float32 on a GPU, not {dtype}; use 'reference'"
    return _wrong_head_dim(head_dim)


def _wrong_head_dim(head_dim: int) -> str | None:
    if head_dim in (16, 32, 64, 128):
        return None
    return f"its kernels are written for head dims 16, 32, 64 and 128, not {head_dim}; use 'reference'"


def forward(*arguments: Any) -> Any:
    """As reference.forward."""
    from megatron_gptoss.attention.triton_forward import forward

    return forward(*arguments)


def backward(*arguments: Any) -> Any:
    """As reference.backward."""
    from megatron_gptoss.attention.triton_backward import backward

    return backward(*arguments)


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter makes a loop bound out of a kernel's scalar, which it holds as an array of one element; numpy 2.5 refuses
    int() of that. tests/unit/test_attention_exact.py fails when Triton has mended it."""
    global _mended
    if _mended:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    _mended = True
