"""Our Triton forward kernels: attention with sinks for packed sequences, windowed or full.

In: q, k, v, sinks and a Layout on one GPU (or on the CPU under Triton's interpreter). Out: output and log-sum-exp, as reference.forward, its
slow exact twin. Nothing here is differentiable; gradients are in triton_backward.py.

A program owns a tile of R = BP x G2 rows: BP neighbouring positions times the G query heads of one kv head (G2 is G rounded up to a power of
two). All its rows read the same keys, so each key is loaded once for all heads, and near the diagonal or a window's edge only 16 positions'
worth of keys are computed in vain instead of 128.

What a row may see is one interval of keys, lo..hi, whatever the mix of causality, window, packing and halo (layout.py); a tile walks from its
first row's lo to its last row's hi and masks only key tiles that some row does not see whole.

The sink is the softmax's initial state (highest score = sink, total = 1), so it costs nothing and a row without keys comes out right.

Shape legend: T queries, U keys, H query heads, K kv heads, G = H / K, D head dim (BD: rounded up to a power of two), R rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gptoss.attention.layout import Layout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOWHERE = tl.constexpr(1 << 30)  # a first key that no key tile reaches

ONE_SHOT_WINDOW = 129  # windows up to here fit the kernel that holds all scores of a row at once


class Tile(NamedTuple):
    """One kernel's shape: rows of a tile (positions x heads), keys of a tile, warps, software-pipelining stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen on an H200 by tools/tune_attention.py for head_dim 64, bfloat16; docs/performance.md has the figures.
FORWARD_FULL = Tile(rows=128, keys=128, warps=8, stages=2)
FORWARD_WINDOW = Tile(rows=128, keys=128, warps=8, stages=1)


def forward(
    q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sink_H: Tensor | None, layout: Layout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As reference.forward, for any strides whose last is 1."""
    q_THD, k_UKD, v_UKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_UKD, v_UKD))
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    if out_THD.numel() == 0:
        return out_THD, lse_TH
    shape = shape_arguments(q_THD, k_UKD, layout, window, scale)
    one_shot = window is not None and window <= ONE_SHOT_WINDOW and layout.causal
    tile = FORWARD_WINDOW if one_shot else FORWARD_FULL
    positions = max(tile.rows // shape["G2"], 1)
    common = dict(
        Q=q_THD, K=k_UKD, V=v_UKD, SINK=sink_H, START=None if layout.is_plain else layout.start_T, OUT=out_THD, LSE=lse_TH,
        q_st=q_THD.stride(0), q_sh=q_THD.stride(1), k_st=k_UKD.stride(0), k_sh=k_UKD.stride(1), v_st=v_UKD.stride(0), v_sh=v_UKD.stride(1),
        BP=positions, HAS_SINK=sink_H is not None, PACKED=not layout.is_plain, **shape,
    )  # fmt: skip
    grid = (triton.cdiv(layout.num_queries, positions), k_UKD.shape[1])
    if one_shot:
        _forward_window_kernel[grid](**common, **window_tiles(window, positions), num_warps=tile.warps, num_stages=tile.stages)
    else:
        _forward_kernel[grid](**common, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages)
    return out_THD, lse_TH


def shape_arguments(q_THD: Tensor, k_UKD: Tensor, layout: Layout, window: int | None, scale: float) -> dict[str, Any]:
    """What every kernel needs to know about sizes, visibility and number format."""
    G = q_THD.shape[1] // k_UKD.shape[1]
    D = q_THD.shape[2]
    return dict(
        T=layout.num_queries, U=layout.num_keys, H=q_THD.shape[1], G=G, G2=triton.next_power_of_2(G), D=D,
        BD=max(triton.next_power_of_2(D), 16), WINDOW=window or 0, CAUSAL=layout.causal, SCALE=scale,
        ACC=tl.float64 if q_THD.dtype == torch.float64 else tl.float32,
    )  # fmt: skip


def window_tiles(window: int | None, positions: int) -> dict[str, int]:
    """The one-shot kernels see FAR keys before the tile's first position and NEAR from it on."""
    return dict(FAR=max(triton.next_power_of_2((window or 1) - 1), 16), NEAR=max(positions, 16))


@triton.jit
def row_positions(p0, T, kv, G: tl.constexpr, G2: tl.constexpr, BP: tl.constexpr):
    """Row r of a tile: its position in the packed stream, its query head, and whether it exists."""
    row = tl.arange(0, BP * G2)
    position = p0 + row // G2
    head_in_group = row % G2
    return position, kv * G + head_in_group, (position < T) & (head_in_group < G)


@triton.jit
def row_interval(position, exists, START, T, U, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr):
    """First key of each row and how many more it sees; a row that sees nothing begins at NOWHERE."""
    last = position + (U - T) if CAUSAL else position * 0 + (U - 1)
    first = tl.load(START + position, mask=exists, other=0) if PACKED else position * 0
    if WINDOW > 0:
        first = tl.maximum(first, last - (WINDOW - 1))
    sees = exists & (last >= first)
    return tl.where(sees, first, NOWHERE), tl.where(sees, last - first, 0)


@triton.jit
def is_visible(first, more, key):
    """first <= key <= first + more, in one subtraction and one comparison: a key before `first` wraps to a huge unsigned number."""
    return (key - first).to(tl.uint32) <= more.to(tl.uint32)


@triton.jit
def load_tile(base, first, count, stride, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """[N, BD] rows first..first+N of a [count, D] matrix; rows outside it and columns past D are 0. WHOLE: all rows are inside."""
    row = tl.arange(0, N)
    column = tl.arange(0, BD)
    pointer = base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if WHOLE and D == BD:
        return tl.load(pointer)
    inside = (first + row >= 0) & (first + row < count)
    return tl.load(pointer, mask=inside[:, None] & (column[None, :] < D), other=0.0)


@triton.jit
def tile_range(p0, START, T, U, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """Keys that a tile of positions walks over: begin, middle, edge, end. Tiles in begin..middle and edge..end need a mask, middle..edge do not."""
    last = tl.minimum(p0 + BP, T) - 1
    begin = tl.load(START + p0) if PACKED else 0
    whole = tl.load(START + last) if PACKED else 0  # from here on every row's own sequence
    if CAUSAL:
        end = last + (U - T) + 1
        whole_end = p0 + (U - T) + 1
    else:
        end = U
        whole_end = U
    if WINDOW > 0:
        begin = tl.maximum(begin, p0 + (U - T) - (WINDOW - 1))
        whole = tl.maximum(whole, last + (U - T) - (WINDOW - 1))
    end = tl.maximum(end, begin)
    middle = begin + tl.cdiv(tl.maximum(whole - begin, 0), BN) * BN
    middle = tl.minimum(middle, begin + tl.cdiv(end - begin, BN) * BN)
    edge = middle + tl.maximum(whole_end - middle, 0) // BN * BN
    return begin, middle, edge, end


@triton.jit
def _forward_kernel(
    Q, K, V, SINK, START, OUT, LSE, q_st, q_sh, k_st, k_sh, v_st, v_sh, T, U, H: tl.constexpr, G: tl.constexpr, G2: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
    HAS_SINK: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    p0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BP  # the longest tiles first
    kv = tl.program_id(1)
    position, head, exists = row_positions(p0, T, kv, G, G2, BP)
    first, more = row_interval(position, exists, START, T, U, WINDOW, CAUSAL, PACKED)
    q, highest, total = _start(Q, SINK, q_st, q_sh, position, head, exists, D, BD, HAS_SINK, ACC)
    out = tl.zeros([BP * G2, BD], dtype=ACC)
    K += tl.cast(kv, tl.int64) * k_sh
    V += tl.cast(kv, tl.int64) * v_sh

    begin, middle, edge, end = tile_range(p0, START, T, U, WINDOW, CAUSAL, PACKED, BP, BN)
    for n in tl.range(begin, middle, BN):
        out, highest, total = _forward_step(n, q, out, highest, total, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, True)
    for n in tl.range(middle, edge, BN):
        out, highest, total = _forward_step(n, q, out, highest, total, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, False)
    for n in tl.range(edge, end, BN):
        out, highest, total = _forward_step(n, q, out, highest, total, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, True)
    _finish(OUT, LSE, out, highest, total, position, head, exists, H, D, BD)


@triton.jit
def _forward_step(
    n, q, out, highest, total, first, more, K, V, k_st, v_st, U, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One key tile of the online softmax. Scores are in base 2: exp2 is one instruction."""
    key = load_tile(K, n, U, k_st, BN, D, BD, not MASK)
    score = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=ACC)
    if MASK:
        score = tl.where(is_visible(first[:, None], more[:, None], n + tl.arange(0, BN)[None, :]), score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, 1) * (SCALE * LOG2E))
    finite = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASK else new_highest
    weight = tl.exp2(score * (SCALE * LOG2E) - finite[:, None])
    shrink = tl.exp2(highest - finite)
    total = total * shrink + tl.sum(weight, 1)
    value = load_tile(V, n, U, v_st, BN, D, BD, not MASK)
    out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None], input_precision="ieee", out_dtype=ACC)
    return out, new_highest, total


@triton.jit
def _forward_window_kernel(
    Q, K, V, SINK, START, OUT, LSE, q_st, q_sh, k_st, k_sh, v_st, v_sh, T, U, H: tl.constexpr, G: tl.constexpr, G2: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, FAR: tl.constexpr, NEAR: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SCALE: tl.constexpr, HAS_SINK: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A small window fits whole: all scores of a row at once, one softmax, no running maximum. FAR keys before the tile's first position and
    NEAR from it on; with 16 positions and a window of 128 that is 144 keys for 128 visible ones."""
    p0 = tl.program_id(0) * BP
    kv = tl.program_id(1)
    position, head, exists = row_positions(p0, T, kv, G, G2, BP)
    first, more = row_interval(position, exists, START, T, U, WINDOW, CAUSAL, PACKED)
    q, highest, total = _start(Q, SINK, q_st, q_sh, position, head, exists, D, BD, HAS_SINK, ACC)
    K += tl.cast(kv, tl.int64) * k_sh
    V += tl.cast(kv, tl.int64) * v_sh
    near = p0 + (U - T)
    far = near - FAR

    far_key = load_tile(K, far, U, k_st, FAR, D, BD, False)
    near_key = load_tile(K, near, U, k_st, NEAR, D, BD, False)
    far_score = tl.dot(q, tl.trans(far_key), input_precision="ieee", out_dtype=ACC)
    near_score = tl.dot(q, tl.trans(near_key), input_precision="ieee", out_dtype=ACC)
    far_value = load_tile(V, far, U, v_st, FAR, D, BD, False)
    near_value = load_tile(V, near, U, v_st, NEAR, D, BD, False)
    far_score = tl.where(is_visible(first[:, None], more[:, None], far + tl.arange(0, FAR)[None, :]), far_score, float("-inf"))
    near_score = tl.where(is_visible(first[:, None], more[:, None], near + tl.arange(0, NEAR)[None, :]), near_score, float("-inf"))
    new_highest = tl.maximum(highest, tl.maximum(tl.max(far_score, 1), tl.max(near_score, 1)) * (SCALE * LOG2E))
    finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    far_weight = tl.exp2(far_score * (SCALE * LOG2E) - finite[:, None])
    near_weight = tl.exp2(near_score * (SCALE * LOG2E) - finite[:, None])
    total = total * tl.exp2(highest - finite) + tl.sum(far_weight, 1) + tl.sum(near_weight, 1)
    out = tl.dot(far_weight.to(far_value.dtype), far_value, input_precision="ieee", out_dtype=ACC)
    out = tl.dot(near_weight.to(near_value.dtype), near_value, out, input_precision="ieee", out_dtype=ACC)
    _finish(OUT, LSE, out, new_highest, total, position, head, exists, H, D, BD)


@triton.jit
def _start(Q, SINK, q_st, q_sh, position, head, exists, D: tl.constexpr, BD: tl.constexpr, HAS_SINK: tl.constexpr, ACC: tl.constexpr):
    """The tile's queries, and the softmax's state before any key."""
    q = load_rows(Q, q_st, q_sh, position, head, exists, D, BD)
    if HAS_SINK:
        highest = tl.load(SINK + head, mask=exists, other=0.0).to(ACC) * LOG2E
        total = tl.where(exists, 1.0, 1.0).to(ACC)
    else:
        highest = tl.where(exists, float("-inf"), float("-inf")).to(ACC)
        total = tl.where(exists, 0.0, 0.0).to(ACC)
    return q, highest, total


@triton.jit
def load_rows(X, st, sh, position, head, exists, D: tl.constexpr, BD: tl.constexpr):
    """[R, BD] one row for each (position, head); 0 where it does not exist."""
    column = tl.arange(0, BD)
    pointer = X + position.to(tl.int64)[:, None] * st + head[:, None] * sh + column[None, :]
    return tl.load(pointer, mask=exists[:, None] & (column[None, :] < D), other=0.0)


@triton.jit
def _finish(OUT, LSE, out, highest, total, position, head, exists, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Normalise and store; no keys and no sink is output 0 and log-sum-exp -inf."""
    column = tl.arange(0, BD)
    place = position.to(tl.int64) * H + head
    out = out * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    lse = (highest + tl.log2(total)) * LN2
    tl.store(OUT + place[:, None] * D + column[None, :], out.to(OUT.dtype.element_ty), mask=exists[:, None] & (column[None, :] < D))
    tl.store(LSE + place, lse, mask=exists)
