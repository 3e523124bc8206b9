"""Our Triton kernels over a tile of logits: one pass that reads it (forward), one that rewrites it to gradients (backward).

In and out: as reference.py, the slow exact twin. A program owns BLOCK columns of one row and keeps them in registers, so each logit is read
once, and once more written in backward; there is no loop, no shared state and no atomic. Parts of a row are added up by api.py.

Shape legend: N tokens, C hidden size, V columns of the tile, P = V / BLOCK parts of a row.
"""

# Kernels are compiled by Triton, not run by Python: their constants and tuples mean nothing to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = 4096  # columns of a program: 32 a thread
WARPS = 4


def target_logit(hidden_NC: Tensor, weight_VC: Tensor, local_N: Tensor) -> Tensor:
    """As reference.target_logit; 0 where the target is not among the V rows."""
    (N, C), V = hidden_NC.shape, len(weight_VC)
    logit_N = torch.empty(N, dtype=torch.promote_types(hidden_NC.dtype, torch.float32), device=hidden_NC.device)
    if N > 0:
        _target_kernel[(N,)](hidden_NC, weight_VC, local_N, logit_N, V, C=C, C2=triton.next_power_of_2(C), ACC=_wide(logit_N))
    return logit_N


def statistics(logit_NV: Tensor, local_N: Tensor, target_N: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.statistics."""
    N, V = logit_NV.shape
    P = triton.cdiv(V, BLOCK)
    highest_PN, total_PN, weighted_PN = target_N.new_empty(3, P, N).unbind()
    if N > 0:
        _statistics_kernel[(N, P)](
            logit_NV, local_N, target_N, highest_PN, total_PN, weighted_PN, V,
            SCALE=scale, ACC=_wide(target_N), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return highest_PN, total_PN, weighted_PN


def rewrite_(
    logit_NV: Tensor,
    local_N: Tensor,
    target_N: Tensor,
    highest_N: Tensor,
    log_total_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor,
    scale: float,
) -> None:
    """As reference.rewrite_."""
    N, V = logit_NV.shape
    if N > 0:
        _rewrite_kernel[(N, triton.cdiv(V, BLOCK))](
            logit_NV, local_N, target_N, highest_N, log_total_N, entropy_N, dlogp_N.contiguous(), dentropy_N.contiguous(), V,
            SCALE=scale, ACC=_wide(target_N), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _target_kernel(HIDDEN, WEIGHT, LOCAL, LOGIT, V, C: tl.constexpr, C2: tl.constexpr, ACC: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    local = tl.load(LOCAL + n).to(tl.int64)
    c = tl.arange(0, C2)
    is_here = (c < C) & (local >= 0) & (local < V)
    hidden = tl.load(HIDDEN + n * C + c, mask=is_here, other=0.0).to(ACC)
    weight = tl.load(WEIGHT + local * C + c, mask=is_here, other=0.0).to(ACC)
    tl.store(LOGIT + n, tl.sum(hidden * weight, 0))


@triton.jit
def _load(LOGIT, LOCAL, TARGET, V, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """This program's logits with the target's own in its place, and where they are in the row and in memory."""
    n = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointer = LOGIT + n.to(tl.int64) * V + column
    x = tl.load(pointer, mask=column < V, other=float("-inf")).to(ACC)
    is_target = (column == tl.load(LOCAL + n).to(tl.int32)) & (column < V)
    return tl.where(is_target, tl.load(TARGET + n), x), is_target, column, pointer


@triton.jit
def _statistics_kernel(LOGIT, LOCAL, TARGET, HIGHEST, TOTAL, WEIGHTED, V, SCALE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    x, _, column, _ = _load(LOGIT, LOCAL, TARGET, V, ACC, BLOCK)
    highest = tl.max(x, 0)
    lower = tl.where(column < V, x - highest, 0.0)
    share = tl.where(column < V, tl.exp2(lower * (SCALE * LOG2E)), 0.0)  # base 2: exp2 is one instruction
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(HIGHEST + place, highest)
    tl.store(TOTAL + place, tl.sum(share, 0))
    tl.store(WEIGHTED + place, tl.sum(share * lower, 0))


@triton.jit
def _rewrite_kernel(
    LOGIT, LOCAL, TARGET, HIGHEST, LOG_TOTAL, ENTROPY, DLOGP, DENTROPY, V, SCALE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0)
    x, is_target, column, pointer = _load(LOGIT, LOCAL, TARGET, V, ACC, BLOCK)
    dlogp, dentropy = tl.load(DLOGP + n), tl.load(DENTROPY + n)
    logp = (x - tl.load(HIGHEST + n)) * SCALE - tl.load(LOG_TOTAL + n)
    both = dlogp + dentropy * (logp + tl.load(ENTROPY + n))
    gradient = tl.where(is_target, dlogp, 0.0) - tl.exp2(logp * LOG2E) * both
    tl.store(pointer, (gradient * SCALE).to(LOGIT.dtype.element_ty), mask=column < V)
