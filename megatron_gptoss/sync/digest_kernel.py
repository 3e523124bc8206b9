"""The weighted sum of verify.py as one Triton kernel: reads each word once, at the speed of the memory.

In: int32 words on a GPU. Out: their sum is added into one int64 word there. Sums modulo 2^64 do not depend on their order, so atomics are
exact. Its slow exact twin is `verify.weighted_sum`.
"""

# Kernels are compiled by Triton, not run by Python: their constants and tuples mean nothing to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # words of one step of a program: 16 KiB
STEPS = 16  # steps of a program: one atomic for each 256 KiB


def add_weighted_sum(words: Tensor, into: Tensor) -> None:
    """Add verify.weighted_sum(words) to `into` (int64, one element). Both on one GPU; nothing waits for it."""
    if words.numel():
        _kernel[(triton.cdiv(words.numel(), BLOCK * STEPS),)](words, into, words.numel(), BLOCK=BLOCK, STEPS=STEPS, num_warps=8)


@triton.jit
def _kernel(words_ptr, into_ptr, num_words, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for step in range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + at, mask=at < num_words, other=0).to(tl.int64)
        total += word * (2 * at + 1)
    tl.atomic_add(into_ptr, tl.sum(total), sem="relaxed")
