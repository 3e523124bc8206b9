"""The "fused" backend: cuBLAS products, and our Triton kernels for all that happens to a tile of logits.

In and out: as reference.py. The kernels are in fused_kernels.py; this file only says where they run: on a GPU, or anywhere under Triton's
interpreter (slow, for tests).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """What this machine lacks for the backend, in one line; None: nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA (pip install triton==3.6.0)"
    from triton import knobs

    if device.type != "cuda":
        if knobs.runtime.interpret:
            return None
        return f"its kernels run on a CUDA GPU, hidden is on {device}; on a CPU set TRITON_INTERPRET=1 (slow, for tests) or use 'reference'"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes bfloat16, float16 and float32 on a GPU, not {dtype}; use 'reference'"
    return None


def target_logit(*arguments: Any) -> Tensor:
    """As reference.target_logit."""
    from megatron_gptoss.logprob.fused_kernels import target_logit

    return target_logit(*arguments)


def statistics(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.statistics, with a part for each BLOCK columns."""
    from megatron_gptoss.logprob.fused_kernels import statistics

    return statistics(*arguments)


def rewrite_(*arguments: Any) -> None:
    """As reference.rewrite_."""
    from megatron_gptoss.logprob.fused_kernels import rewrite_

    rewrite_(*arguments)
