"""Our Triton kernel that splits and rotates queries and keys, and its way back, which rotates the other way and joins.

In and out: as rotary.reference and its gradient. A program owns one head of BLOCK tokens; nothing is read
or written twice, nothing added up.

Shape legend: as rotary.py.
"""

# Kernels are compiled by Triton, not run by Python: their constants and tuples mean nothing to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # tokens of a program
WARPS = 4


def split(qkv_TX: Tensor, table_TD: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q_THD, k_TKD, v_TKD), contiguous."""
    T, D = table_TD.shape
    group = qkv_TX.shape[1] // (num_kv_heads * D) - 2
    q, k, v = (qkv_TX.new_empty(T, heads, D) for heads in (num_kv_heads * group, num_kv_heads, num_kv_heads))
    _launch(qkv_TX, table_TD, q, k, v, back=False)
    return q, k, v


def join(dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, table_TD: Tensor) -> Tensor:
    """[T, X]: the gradient of qkv."""
    T, D = table_TD.shape
    dqkv_TX = dq_THD.new_empty(T, (dq_THD.shape[1] + 2 * dk_TKD.shape[1]) * D)
    _launch(dqkv_TX, table_TD, dq_THD, dk_TKD, dv_TKD, back=True)
    return dqkv_TX


def _launch(qkv_TX: Tensor, table_TD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, back: bool) -> None:
    (T, D), K = table_TD.shape, k_TKD.shape[1]
    group = q_THD.shape[1] // K
    if T > 0:
        _kernel[(triton.cdiv(T, BLOCK), K * (group + 2))](
            qkv_TX, table_TD.contiguous(), q_THD, k_TKD, v_TKD, T, G=group, K=K, HALF=D // 2, BACK=back, BLOCK=BLOCK,
            WIDE=tl.float64 if qkv_TX.dtype == torch.float64 else tl.float32, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _kernel(
    QKV, TABLE, QUERY, KEY, VALUE, T, G: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    slot = tl.program_id(1)
    kv, place = slot // (G + 2), slot % (G + 2)
    column = tl.arange(0, HALF)[None, :]
    exists = token < T
    joined = QKV + token * (K * (G + 2) * D) + slot * D + column
    if place < G:
        own = QUERY + token * (K * G * D) + (kv * G + place) * D + column
    elif place == G:
        own = KEY + token * (K * D) + kv * D + column
    else:
        own = VALUE + token * (K * D) + kv * D + column
    source, target = (own, joined) if BACK else (joined, own)
    a, b = tl.load(source, mask=exists), tl.load(source + HALF, mask=exists)
    if place <= G:
        cos = tl.load(TABLE + token * D + column, mask=exists).to(WIDE)
        sin = tl.load(TABLE + token * D + HALF + column, mask=exists).to(WIDE)
        if BACK:  # the inverse of a rotation is the rotation by the negative angle
            sin = -sin
        wide_a, wide_b = a.to(WIDE), b.to(WIDE)
        a, b = (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)
    tl.store(target, a, mask=exists)
    tl.store(target + HALF, b, mask=exists)
