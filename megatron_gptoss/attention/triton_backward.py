"""Our Triton backward kernels: gradients of attention with sinks, without atomics, so that the same inputs give the same bits.

In: what the forward pass saved and the cotangents of output and log-sum-exp. Out: dq, dk, dv, dsink, as reference.backward, their slow exact
twin. Tiles, row intervals and masks are those of triton_forward.py.

Two kernels. The first owns queries: it makes delta = rowsum(dO . O) - dlse on the way (and each tile's share of dsink), then walks over its
keys for dq. The second owns keys: it walks over the queries that see them, all G heads of its kv head in turn, and adds dk and dv up in
registers. Scores are computed twice, 7 matrix products instead of 5; for that there is no float32 accumulator in memory, no order in which
blocks race, and no reduction over the heads of a group.

Shape legend: as triton_forward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gptoss.attention.layout import Layout
from megatron_gptoss.attention.triton_forward import (
    LOG2E, ONE_SHOT_WINDOW, Tile, is_visible, load_rows, load_tile, row_interval, row_positions, shape_arguments, tile_range, window_tiles,
)  # fmt: skip

# Chosen on an H200 by tools/tune_attention.py for head_dim 64, bfloat16; docs/performance.md has the figures.
QUERIES_FULL = Tile(rows=128, keys=64, warps=4, stages=3)
QUERIES_WINDOW = Tile(rows=128, keys=64, warps=4, stages=1)
KEYS_FULL = Tile(rows=64, keys=128, warps=8, stages=3)
KEYS_WINDOW = Tile(rows=128, keys=64, warps=4, stages=2)


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
    """As reference.backward. Deterministic whether asked or not."""
    q_THD, k_UKD, v_UKD, dout_THD, out_THD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_UKD, v_UKD, dout_THD, out_THD))
    lse_TH = lse_TH.contiguous()
    dlse_TH = None if dlse_TH is None else dlse_TH.contiguous()
    (T, H, _), K = q_THD.shape, k_UKD.shape[1]
    dq_THD, dk_UKD, dv_UKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_UKD, v_UKD))
    if T == 0 or layout.num_keys == 0:
        dsink_H = None if sink_H is None else sink_gradient(dout_THD, dlse_TH, out_THD, lse_TH, sink_H)
        return dq_THD.zero_(), dk_UKD.zero_(), dv_UKD.zero_(), dsink_H

    shape = shape_arguments(q_THD, k_UKD, layout, window, scale)
    packed = not layout.is_plain
    one_shot = window is not None and window <= ONE_SHOT_WINDOW and layout.causal
    delta_TH = torch.empty_like(lse_TH)
    common = dict(
        Q=q_THD, K=k_UKD, V=v_UKD, DOUT=dout_THD, LSE=lse_TH, DELTA=delta_TH, START=layout.start_T if packed else None,
        q_st=q_THD.stride(0), q_sh=q_THD.stride(1), k_st=k_UKD.stride(0), k_sh=k_UKD.stride(1), v_st=v_UKD.stride(0), v_sh=v_UKD.stride(1),
        do_st=dout_THD.stride(0), do_sh=dout_THD.stride(1), PACKED=packed, **shape,
    )  # fmt: skip

    tile = QUERIES_WINDOW if one_shot else QUERIES_FULL
    positions = max(tile.rows // shape["G2"], 1)
    num_tiles = triton.cdiv(T, positions)
    partial_NH = None if sink_H is None else torch.empty(num_tiles, H, dtype=lse_TH.dtype, device=q_THD.device)
    _dq_kernel[(num_tiles, K)](
        **common, OUT=out_THD, DLSE=dlse_TH, SINK=sink_H, DQ=dq_THD, DSINK=partial_NH, o_st=out_THD.stride(0), o_sh=out_THD.stride(1),
        BP=positions, BN=tile.keys, ONE_SHOT=one_shot, HAS_SINK=sink_H is not None, HAS_DLSE=dlse_TH is not None,
        **window_tiles(window, positions), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip

    tile = KEYS_WINDOW if one_shot else KEYS_FULL
    _dkv_kernel[(triton.cdiv(layout.num_keys, tile.keys), K)](
        **common, STOP=layout.stop_U if packed else None, DK=dk_UKD, DV=dv_UKD, KV=K,
        BP=max(tile.rows // shape["G2"], 1), BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq_THD, dk_UKD, dv_UKD, None if partial_NH is None or sink_H is None else partial_NH.sum(0).to(sink_H.dtype)


def sink_gradient(dout_THD: Tensor, dlse_TH: Tensor | None, out_THD: Tensor, lse_TH: Tensor, sink_H: Tensor) -> Tensor:
    """dsink_H alone, for backends whose backward knows no sink: one pass over dO and O. Deterministic."""
    T, H, D = out_THD.shape
    dout_THD, out_THD = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout_THD, out_THD))
    positions = 32
    partial_NH = torch.empty(max(triton.cdiv(T, positions), 1), H, dtype=lse_TH.dtype, device=lse_TH.device)
    if T == 0:
        return torch.zeros_like(sink_H)
    _dsink_kernel[(triton.cdiv(T, positions), H)](
        DOUT=dout_THD, OUT=out_THD, DLSE=dlse_TH, LSE=lse_TH, SINK=sink_H, DSINK=partial_NH, T=T,
        do_st=dout_THD.stride(0), do_sh=dout_THD.stride(1), o_st=out_THD.stride(0), o_sh=out_THD.stride(1), l_st=lse_TH.stride(0),
        l_sh=lse_TH.stride(1), dl_st=0 if dlse_TH is None else dlse_TH.stride(0), dl_sh=0 if dlse_TH is None else dlse_TH.stride(1),
        D=D, BD=triton.next_power_of_2(D), BP=positions, H=H, HAS_DLSE=dlse_TH is not None,
        ACC=tl.float64 if lse_TH.dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip
    return partial_NH.sum(0).to(sink_H.dtype)


@triton.jit
def _dq_kernel(
    Q, K, V, DOUT, OUT, LSE, DLSE, SINK, START, DQ, DELTA, DSINK, q_st, q_sh, k_st, k_sh, v_st, v_sh, do_st, do_sh, o_st, o_sh, T, U,
    H: tl.constexpr, G: tl.constexpr, G2: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    FAR: tl.constexpr, NEAR: tl.constexpr, ONE_SHOT: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_DLSE: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    p0 = tile * BP
    kv = tl.program_id(1)
    position, head, exists = row_positions(p0, T, kv, G, G2, BP)
    first, more = row_interval(position, exists, START, T, U, WINDOW, CAUSAL, PACKED)
    place = position.to(tl.int64) * H + head

    q = load_rows(Q, q_st, q_sh, position, head, exists, D, BD)
    dout = load_rows(DOUT, do_st, do_sh, position, head, exists, D, BD)
    out = load_rows(OUT, o_st, o_sh, position, head, exists, D, BD)
    lse = tl.load(LSE + place, mask=exists, other=0.0)
    delta = tl.sum(dout.to(ACC) * out.to(ACC), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + place, mask=exists, other=0.0)
    tl.store(DELTA + place, delta, mask=exists)
    if HAS_SINK:
        sink = tl.load(SINK + head, mask=exists, other=float("-inf")).to(ACC)
        share = tl.exp2((sink - lse) * LOG2E)
        dsink = -tl.sum(tl.reshape(share * delta, [BP, G2]), 0)
        group = tl.arange(0, G2)
        tl.store(DSINK + tl.cast(tile, tl.int64) * H + kv * G + group, dsink, mask=group < G)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)  # no key and no sink: every score is masked
    dq = tl.zeros([BP * G2, BD], dtype=ACC)
    K += tl.cast(kv, tl.int64) * k_sh
    V += tl.cast(kv, tl.int64) * v_sh

    if ONE_SHOT:
        near = p0 + (U - T)
        FAR_STEP: tl.constexpr = BN if BN < FAR else FAR
        for step in tl.static_range(FAR // FAR_STEP):
            n = near - FAR + step * FAR_STEP
            dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D, BD, FAR_STEP, SCALE, ACC, True)
        dq = _dq_step(near, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D, BD, NEAR, SCALE, ACC, True)
    else:
        begin, middle, edge, end = tile_range(p0, START, T, U, WINDOW, CAUSAL, PACKED, BP, BN)
        for n in tl.range(begin, middle, BN):
            dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, True)
        for n in tl.range(middle, edge, BN):
            dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, False)
        for n in tl.range(edge, end, BN):
            dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D, BD, BN, SCALE, ACC, True)
    column = tl.arange(0, BD)
    tl.store(DQ + place[:, None] * D + column[None, :], (dq * SCALE).to(DQ.dtype.element_ty), mask=exists[:, None] & (column[None, :] < D))


@triton.jit
def _dq_step(
    n, q, dout, dq, lse, delta, first, more, K, V, k_st, v_st, U, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    key = load_tile(K, n, U, k_st, BN, D, BD, not MASK)
    value = load_tile(V, n, U, v_st, BN, D, BD, not MASK)
    score = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=ACC)
    dweight = tl.dot(dout, tl.trans(value), input_precision="ieee", out_dtype=ACC)
    weight = tl.exp2(score * (SCALE * LOG2E) - lse[:, None])
    if MASK:
        weight = tl.where(is_visible(first[:, None], more[:, None], n + tl.arange(0, BN)[None, :]), weight, 0.0)
    dscore = weight * (dweight - delta[:, None])
    return tl.dot(dscore.to(key.dtype), key, dq, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA, START, STOP, DK, DV, q_st, q_sh, k_st, k_sh, v_st, v_sh, do_st, do_sh, T, U, H: tl.constexpr, KV: tl.constexpr,
    G: tl.constexpr, G2: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN  # the first keys are seen by the most queries: the longest tiles first
    kv = tl.program_id(1)
    last = tl.minimum(n + BN, U) - 1
    key = load_tile(K + tl.cast(kv, tl.int64) * k_sh, n, U, k_st, BN, D, BD, False)
    value = load_tile(V + tl.cast(kv, tl.int64) * v_sh, n, U, v_st, BN, D, BD, False)
    dk = tl.zeros([BN, BD], dtype=ACC)
    dv = tl.zeros([BN, BD], dtype=ACC)

    # Queries begin..end see some of these keys; those in middle..edge see all of them.
    begin = 0
    middle = 0
    end = tl.load(STOP + last) if PACKED else T
    edge = tl.load(STOP + n) if PACKED else T
    if CAUSAL:
        begin = tl.maximum(n - (U - T), 0)
        middle = tl.maximum(last - (U - T), 0)
    if WINDOW > 0:
        end = tl.minimum(end, last - (U - T) + WINDOW)
        edge = tl.minimum(edge, n - (U - T) + WINDOW)
    end = tl.maximum(end, begin)
    middle = begin + tl.cdiv(middle - begin, BP) * BP
    middle = tl.minimum(middle, begin + tl.cdiv(end - begin, BP) * BP)
    if BN + BP > WINDOW and WINDOW > 0:
        edge = middle  # no tile is seen whole
    else:
        edge = middle + tl.maximum(edge - middle, 0) // BP * BP

    for p in tl.range(begin, middle, BP):
        dk, dv = _dkv_step(
            p, n, key, value, dk, dv, Q, DOUT, LSE, DELTA, START, q_st, q_sh, do_st, do_sh, T, U, kv, H, G, G2, D, BD, BP, BN, WINDOW, CAUSAL,
            SCALE, PACKED, ACC, True,
        )  # fmt: skip
    for p in tl.range(middle, edge, BP):
        dk, dv = _dkv_step(
            p, n, key, value, dk, dv, Q, DOUT, LSE, DELTA, START, q_st, q_sh, do_st, do_sh, T, U, kv, H, G, G2, D, BD, BP, BN, WINDOW, CAUSAL,
            SCALE, PACKED, ACC, False,
        )  # fmt: skip
    for p in tl.range(edge, end, BP):
        dk, dv = _dkv_step(
            p, n, key, value, dk, dv, Q, DOUT, LSE, DELTA, START, q_st, q_sh, do_st, do_sh, T, U, kv, H, G, G2, D, BD, BP, BN, WINDOW, CAUSAL,
            SCALE, PACKED, ACC, True,
        )  # fmt: skip

    row = n + tl.arange(0, BN)
    column = tl.arange(0, BD)
    place = (row.to(tl.int64) * KV + kv)[:, None] * D + column[None, :]
    inside = (row < U)[:, None] & (column[None, :] < D)
    tl.store(DK + place, (dk * SCALE).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + place, dv.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def _dkv_step(
    p, n, key, value, dk, dv, Q, DOUT, LSE, DELTA, START, q_st, q_sh, do_st, do_sh, T, U, kv, H: tl.constexpr, G: tl.constexpr,
    G2: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SCALE: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of queries; scores are held transposed, [BN, R], so that the weights are the left factor of both products."""
    position, head, exists = row_positions(p, T, kv, G, G2, BP)
    if not MASK:
        exists = head < (kv + 1) * G  # the tile lies inside
    q = load_rows(Q, q_st, q_sh, position, head, exists, D, BD)
    dout = load_rows(DOUT, do_st, do_sh, position, head, exists, D, BD)
    place = position.to(tl.int64) * H + head
    lse = tl.load(LSE + place, mask=exists, other=float("inf")) * LOG2E
    delta = tl.load(DELTA + place, mask=exists, other=0.0)
    weight = tl.exp2(tl.dot(key, tl.trans(q), input_precision="ieee", out_dtype=ACC) * (SCALE * LOG2E) - lse[None, :])
    if MASK:
        first, more = row_interval(position, exists, START, T, U, WINDOW, CAUSAL, PACKED)
        weight = tl.where(is_visible(first[None, :], more[None, :], n + tl.arange(0, BN)[:, None]), weight, 0.0)
    dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision="ieee", out_dtype=ACC)
    dweight = tl.dot(value, tl.trans(dout), input_precision="ieee", out_dtype=ACC)
    dscore = weight * (dweight - delta[None, :])
    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee", out_dtype=ACC)
    return dk, dv


@triton.jit
def _dsink_kernel(
    DOUT, OUT, DLSE, LSE, SINK, DSINK, T, do_st, do_sh, o_st, o_sh, l_st, l_sh, dl_st, dl_sh, D: tl.constexpr, BD: tl.constexpr,
    BP: tl.constexpr, H: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    position = tl.program_id(0) * BP + tl.arange(0, BP)
    exists = position < T
    dout = load_rows(DOUT, do_st, do_sh, position, position * 0 + head, exists, D, BD)
    out = load_rows(OUT, o_st, o_sh, position, position * 0 + head, exists, D, BD)
    row = position.to(tl.int64)
    lse = tl.load(LSE + row * l_st + head * l_sh, mask=exists, other=float("inf"))
    delta = tl.sum(dout.to(ACC) * out.to(ACC), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + row * dl_st + head * dl_sh, mask=exists, other=0.0)
    sink = tl.load(SINK + head).to(ACC)
    tl.store(DSINK + tl.program_id(0) * H + head, -tl.sum(tl.exp2((sink - lse) * LOG2E) * delta, 0))
