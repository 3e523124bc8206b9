"""Our Triton backward kernels: gradients of attention with sinks, without atomics, so that the same inputs give the same bits.

In: what the forward pass saved and the cotangents of output and log-sum-exp. Out: dq, dk, dv, dsink, as reference.backward, their slow
exact twin. Tiles, row intervals and masks are those of triton_forward.py.

Two kernels. The first owns queries: it makes delta = rowsum(dO . O) - dlse on the way (and each tile's share of dsink), then walks over its
keys for dq. The second owns keys: it walks over the queries that see them, all G heads of its kv head in turn, and adds dk and dv up in
registers. Scores are computed twice, 7 matrix products instead of 5; for that there is no float32 accumulator in memory, no order in which
blocks race, and no reduction over the heads of a group.

Shape legend: as triton_forward.py.
"""

# Kernels are compiled by Triton, not run by Python: their constants and tuples mean nothing to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportCallIssue=false, reportIndexIssue=false
# ruff: noqa: C408

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_gptoss.attention.layout import Layout
from megatron_gptoss.attention.triton_forward import (
    LOG2E,
    NOWHERE,
    ONE_SHOT_WINDOW,
    Tile,
    aligned,
    has_strangers,
    hide,
    hide_strangers,
    is_visible,
    key_tiles,
    one_shot_keys,
    padded_rows,
    query_tile,
    row_interval,
    row_positions,
    row_start,
    row_tiles,
    shape_arguments,
    store_rows,
    tile_range,
)

# Chosen on an H200 by tools/tune_attention.py for head_dim 64, bfloat16; docs/performance.md has the figures.
QUERIES_FULL = Tile(rows=64, keys=128, warps=4, stages=3)
QUERIES_WINDOW = Tile(rows=64, keys=64, warps=4, stages=2, run=16)
KEYS_FULL = Tile(rows=64, keys=64, warps=4, stages=3)
KEYS_WINDOW = Tile(rows=64, keys=64, warps=4, stages=3)


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
    q_THD, k_UKD, v_UKD, dout_THD, out_THD = (aligned(x) for x in (q_THD, k_UKD, v_UKD, dout_THD, out_THD))
    (T, H, _), U, K = q_THD.shape, layout.num_keys, k_UKD.shape[1]
    dq_THD, dk_UKD, dv_UKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_UKD, v_UKD))
    if T == 0 or U == 0:
        dsink_H = None if sink_H is None else sink_gradient(dout_THD, dlse_TH, out_THD, lse_TH, sink_H)
        return dq_THD.zero_(), dk_UKD.zero_(), dv_UKD.zero_(), dsink_H
    lse_HT = lse_TH.T
    if lse_HT.stride(1) != 1 or lse_HT.stride(0) % 8 or lse_HT.data_ptr() % 16:  # another backend's, or merged by a ring
        lse_HT = padded_rows(H, T, lse_TH.dtype, lse_TH.device).copy_(lse_HT)
    dlse_HT = None if dlse_TH is None else dlse_TH.T.contiguous()
    delta_HT = padded_rows(H, T, lse_TH.dtype, lse_TH.device)
    one_shot = window is not None and window <= ONE_SHOT_WINDOW and layout.causal
    shape = shape_arguments(H, k_UKD, layout, window, scale)
    strides = dict(k_sh=k_UKD.stride(1), v_sh=v_UKD.stride(1))

    row_bytes = q_THD.shape[2] * q_THD.element_size()
    tile = (QUERIES_WINDOW if one_shot else QUERIES_FULL).fit(row_bytes)
    positions = max(tile.rows // shape["G2"], 1)
    run = tile.run_for(triton.cdiv(T, positions) * K) if one_shot else 1
    packed = not layout.is_plain
    tiles_N3 = layout.query_tiles(positions) if packed and not one_shot else None
    num_tiles = triton.cdiv(T, positions * run) * run if tiles_N3 is None else len(tiles_N3)
    half, near = one_shot_keys(window, positions) if one_shot else (tile.keys, tile.keys)
    partial_NH = None if sink_H is None else torch.empty(num_tiles, H, dtype=lse_HT.dtype, device=lse_HT.device)
    q_rows, dout_rows, out_rows = (row_tiles(x, positions, shape["G2"]) for x in (q_THD, dout_THD, out_THD))
    arguments = dict(
        Q=q_rows,
        K=key_tiles(k_UKD, half),
        V=key_tiles(v_UKD, half),
        DOUT=dout_rows,
        OUT=out_rows,
        LSE=lse_HT,
        lse_sh=lse_HT.stride(0),
        DLSE=dlse_HT,
        SINK=sink_H,
        DQ=dq_THD,
        DELTA=delta_HT,
        delta_sh=delta_HT.stride(0),
        DSINK=partial_NH,
        BP=positions,
        HAS_SINK=sink_H is not None,
        HAS_DLSE=dlse_HT is not None,
        **strides,
        **shape,
        **tile.options,
    )
    if one_shot:
        _dq_window_kernel[num_tiles // run, K](
            **arguments,
            START=layout.start_T if packed else None,
            K_NEAR=key_tiles(k_UKD, near),
            V_NEAR=key_tiles(v_UKD, near),
            HALF=half,
            NEAR=near,
            RUN=run,
            STAGES=tile.stages,
        )
    else:
        _dq_kernel[num_tiles, K](**arguments, TILES=tiles_N3, BN=tile.keys)

    tile = (KEYS_WINDOW if one_shot else KEYS_FULL).fit(row_bytes)
    tiles_N3 = layout.key_tiles(tile.keys, window) if packed else None
    _dkv_kernel[triton.cdiv(U, tile.keys) if tiles_N3 is None else len(tiles_N3), K](
        Q=key_tiles(q_THD, tile.rows),
        DOUT=key_tiles(dout_THD, tile.rows),
        K=key_tiles(k_UKD, tile.keys),
        V=key_tiles(v_UKD, tile.keys),
        LSE=_vector(lse_HT, tile.rows),
        DELTA=_vector(delta_HT, tile.rows),
        lse_sh=lse_HT.stride(0),
        delta_sh=delta_HT.stride(0),
        TILES=tiles_N3,
        DK=dk_UKD,
        DV=dv_UKD,
        q_sh=q_THD.stride(1),
        do_sh=dout_THD.stride(1),
        KV=K,
        BP=tile.rows,
        BN=tile.keys,
        STAGES=tile.stages,
        **strides,
        **shape,
        **tile.options,
    )
    return dq_THD, dk_UKD, dv_UKD, None if partial_NH is None or sink_H is None else partial_NH.sum(0).to(sink_H.dtype)


def sink_gradient(dout_THD: Tensor, dlse_TH: Tensor | None, out_THD: Tensor, lse_TH: Tensor, sink_H: Tensor) -> Tensor:
    """dsink_H alone, for backends whose backward knows no sink: one pass over dO and O. Deterministic."""
    T, H, D = out_THD.shape
    if T == 0:
        return torch.zeros_like(sink_H)
    dout_THD, out_THD = (aligned(x) for x in (dout_THD, out_THD))
    lse_HT = lse_TH.T.contiguous()
    positions, heads = 16, min(triton.next_power_of_2(H), 8)
    partial_NH = torch.empty(triton.cdiv(T, positions), H, dtype=lse_HT.dtype, device=lse_HT.device)
    _dsink_kernel[triton.cdiv(T, positions), triton.cdiv(H, heads)](
        DOUT=row_tiles(dout_THD, positions, heads),
        OUT=row_tiles(out_THD, positions, heads),
        LSE=lse_HT,
        DLSE=None if dlse_TH is None else dlse_TH.T.contiguous(),
        SINK=sink_H,
        DSINK=partial_NH,
        T=T,
        H=H,
        D=D,
        BP=positions,
        BH=heads,
        HAS_DLSE=dlse_TH is not None,
        ACC=tl.float64 if lse_HT.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )
    return partial_NH.sum(0).to(sink_H.dtype)


def _vector(x_HT: Tensor, length: int) -> TensorDescriptor:
    """padded_rows as one long vector, read `length` at a time; behind a row come zeros and the next row."""
    return TensorDescriptor(x_HT, [(x_HT.shape[0] - 1) * x_HT.stride(0) + x_HT.shape[1]], [1], [length])


@triton.jit
def _dq_kernel(
    Q,
    K,
    V,
    k_sh,
    v_sh,
    DOUT,
    OUT,
    LSE,
    lse_sh,
    DLSE,
    SINK,
    TILES,
    DQ,
    DELTA,
    delta_sh,
    DSINK,
    T,
    U,
    H: tl.constexpr,
    G: tl.constexpr,
    G2: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    p0, stop, start = query_tile(TILES, T, BP, PACKED)
    kv = tl.program_id(1)
    position, head, exists = row_positions(p0, stop, kv, G, G2, BP)
    sink = _load_sinks(SINK, kv, G, G2, BP, HAS_SINK, ACC)
    q, dout, lse, delta = _start(
        Q,
        DOUT,
        OUT,
        LSE,
        lse_sh,
        DLSE,
        sink,
        DELTA,
        delta_sh,
        DSINK,
        p0,
        tl.program_id(0),
        kv,
        position,
        head,
        exists,
        T,
        H,
        G,
        G2,
        D,
        BP,
        HAS_SINK,
        HAS_DLSE,
        ACC,
    )
    dq = tl.zeros([BP * G2, D], dtype=ACC)
    first, more = row_interval(position, T, U, WINDOW, CAUSAL)
    begin, middle, edge, end = tile_range(p0, stop, start, T, U, WINDOW, CAUSAL, BP, BN)
    for n in tl.range(begin, middle, BN):
        dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, kv * k_sh, kv * v_sh, BN, SCALE, ACC, True)
    for n in tl.range(middle, edge, BN):
        dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, kv * k_sh, kv * v_sh, BN, SCALE, ACC, False)
    for n in tl.range(edge, end, BN):
        dq = _dq_step(n, q, dout, dq, lse, delta, first, more, K, V, kv * k_sh, kv * v_sh, BN, SCALE, ACC, True)
    store_rows(DQ, dq * SCALE, position, head, exists, H, D)


@triton.jit
def _dq_step(
    n,
    q,
    dout,
    dq,
    lse,
    delta,
    first,
    more,
    K,
    V,
    k_column,
    v_column,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    MASK: tl.constexpr,
):
    key, weight, dweight = _weights(n, q, dout, lse, K, V, k_column, v_column, SCALE, ACC)
    if MASK:
        weight = hide(weight, 0.0, n, first, more, BN, BN)
    dscore = weight * (dweight - delta[:, None])
    return tl.dot(dscore.to(key.dtype), key, dq, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _dq_window_kernel(
    Q,
    K,
    V,
    K_NEAR,
    V_NEAR,
    k_sh,
    v_sh,
    DOUT,
    OUT,
    LSE,
    lse_sh,
    DLSE,
    SINK,
    START,
    DQ,
    DELTA,
    delta_sh,
    DSINK,
    T,
    U,
    H: tl.constexpr,
    G: tl.constexpr,
    G2: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    HALF: tl.constexpr,
    NEAR: tl.constexpr,
    RUN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """RUN tiles in a row; keys as in _forward_window_kernel."""
    kv = tl.program_id(1)
    sink = _load_sinks(SINK, kv, G, G2, BP, HAS_SINK, ACC)
    for step in tl.range(0, RUN, num_stages=STAGES):
        tile = tl.program_id(0) * RUN + step
        p0 = tile * BP
        position, head, exists = row_positions(p0, T, kv, G, G2, BP)
        first, more = row_interval(position, T, U, WINDOW, CAUSAL)
        q, dout, lse, delta = _start(
            Q,
            DOUT,
            OUT,
            LSE,
            lse_sh,
            DLSE,
            sink,
            DELTA,
            delta_sh,
            DSINK,
            p0,
            tile,
            kv,
            position,
            head,
            exists,
            T,
            H,
            G,
            G2,
            D,
            BP,
            HAS_SINK,
            HAS_DLSE,
            ACC,
        )
        near = p0 + (U - T)
        far, half = near - 2 * HALF, near - HALF
        strangers = has_strangers(far, p0, START, T, PACKED, BP)
        dq = tl.zeros([BP * G2, D], dtype=ACC)
        for part in tl.static_range(3):
            if part == 2:
                n = near
                key, weight, dweight = _weights(n, q, dout, lse, K_NEAR, V_NEAR, kv * k_sh, kv * v_sh, SCALE, ACC)
                weight = hide(weight, 0.0, n, first, more, NEAR, NEAR)
                if strangers:
                    weight = hide_strangers(weight, 0.0, n, row_start(START, position, T, PACKED), NEAR)
            else:
                n = far if part == 0 else half
                key, weight, dweight = _weights(n, q, dout, lse, K, V, kv * k_sh, kv * v_sh, SCALE, ACC)
                weight = hide(weight, 0.0, n, first, more, (2 - part) * HALF + BP - WINDOW, HALF)
                if strangers:
                    weight = hide_strangers(weight, 0.0, n, row_start(START, position, T, PACKED), HALF)
            dscore = weight * (dweight - delta[:, None])
            dq = tl.dot(dscore.to(key.dtype), key, dq, input_precision="ieee", out_dtype=ACC)
        store_rows(DQ, dq * SCALE, position, head, exists, H, D)


@triton.jit
def _load_sinks(SINK, kv, G: tl.constexpr, G2: tl.constexpr, BP: tl.constexpr, HAS_SINK: tl.constexpr, ACC: tl.constexpr):
    in_group = tl.arange(0, BP * G2) % G2
    if HAS_SINK:
        sink = tl.load(SINK + kv * G + in_group, mask=in_group < G, other=float("-inf")).to(ACC)
    else:
        sink = tl.full([BP * G2], float("-inf"), ACC)
    return sink


@triton.jit
def _start(
    Q,
    DOUT,
    OUT,
    LSE,
    lse_sh,
    DLSE,
    sink,
    DELTA,
    delta_sh,
    DSINK,
    p0,
    tile,
    kv,
    position,
    head,
    exists,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    G2: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    ACC: tl.constexpr,
):
    """The tile's q, dO, base-2 log-sum-exp and delta; stores delta for the other kernel and the tile's share of dsink."""
    q = tl.reshape(Q.load([p0, kv * G, 0]), [BP * G2, D])
    dout = tl.reshape(DOUT.load([p0, kv * G, 0]), [BP * G2, D])
    out = tl.reshape(OUT.load([p0, kv * G, 0]), [BP * G2, D])
    lse = tl.load(LSE + head * lse_sh + position, mask=exists, other=float("inf"))
    delta = tl.sum(dout.to(ACC) * out.to(ACC), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + head * T + position, mask=exists, other=0.0)
    tl.store(DELTA + head * delta_sh + position, delta, mask=exists)
    if HAS_SINK:
        dsink = -tl.sum(tl.reshape(tl.exp2((sink - lse) * LOG2E) * delta, [BP, G2]), 0)
        group = tl.arange(0, G2)
        tl.store(DSINK + tl.cast(tile, tl.int64) * H + kv * G + group, dsink, mask=group < G)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)  # no key and no sink: every score is hidden
    return q, dout, lse, delta


@triton.jit
def _weights(n, q, dout, lse, K, V, k_column, v_column, SCALE: tl.constexpr, ACC: tl.constexpr):
    """One key tile: its keys, the softmax's weights before any mask, and their cotangents."""
    key = K.load([n, k_column])
    value = V.load([n, v_column])
    score = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=ACC)
    dweight = tl.dot(dout, tl.trans(value), input_precision="ieee", out_dtype=ACC)
    return key, tl.exp2(score * (SCALE * LOG2E) - lse[:, None]), dweight


@triton.jit
def _dkv_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    lse_sh,
    DELTA,
    delta_sh,
    TILES,
    DK,
    DV,
    q_sh,
    k_sh,
    v_sh,
    do_sh,
    T,
    U,
    H: tl.constexpr,
    KV: tl.constexpr,
    G: tl.constexpr,
    G2: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores are held transposed, [BN, BP], so that the weights are the left factor of both products."""
    if PACKED:
        tile = TILES + 3 * tl.program_id(0)
        n = tl.load(tile)
        key_stop = tl.load(tile + 1)
        stop = tl.load(tile + 2)
    else:
        n = tl.program_id(0) * BN  # the first keys are seen by the most queries: the longest tiles first
        key_stop = U
        stop = T
    kv = tl.program_id(1)
    last = tl.minimum(n + BN, key_stop) - 1
    keys = n + tl.arange(0, BN)
    key = K.load([n, kv * k_sh])
    value = V.load([n, kv * v_sh])
    dk = tl.zeros([BN, D], dtype=ACC)
    dv = tl.zeros([BN, D], dtype=ACC)

    # Queries begin..end see some of these keys; those in middle..edge see all of them.
    begin = 0
    middle = 0
    end = stop
    edge = stop
    if CAUSAL:
        begin = tl.maximum(n - (U - T), 0) // 8 * 8  # vectors are read from multiples of 16 bytes
        middle = tl.maximum(last - (U - T), 0)
    if WINDOW > 0:
        end = tl.minimum(end, last - (U - T) + WINDOW)
        edge = tl.minimum(edge, n - (U - T) + WINDOW)
    # Which queries see a key is an interval too.
    first = keys - (U - T) if CAUSAL else keys * 0
    more = stop - 1 - first
    if WINDOW > 0:
        more = tl.minimum(more, WINDOW - 1)
    first = tl.where(more >= 0, first, NOWHERE)
    more = tl.maximum(more, 0)
    steps = tl.cdiv(tl.maximum(end - begin, 0), BP) * G
    for step in tl.range(0, steps, num_stages=STAGES):
        p = begin + step // G * BP
        head = kv * G + step % G
        q = Q.load([p, head * q_sh])
        dout = DOUT.load([p, head * do_sh])
        lse = LSE.load([head * lse_sh + p]) * LOG2E  # past T comes another head's; such a tile is masked below
        delta = DELTA.load([head * delta_sh + p])
        weight = tl.exp2(tl.dot(key, tl.trans(q), input_precision="ieee", out_dtype=ACC) * (SCALE * LOG2E) - lse[None, :])
        if (p < middle) | (p + BP > edge):
            seen = is_visible((first - p)[:, None], more[:, None], tl.arange(0, BP)[None, :])
            weight = tl.where(seen, weight, 0.0)
        dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision="ieee", out_dtype=ACC)
        dweight = tl.dot(value, tl.trans(dout), input_precision="ieee", out_dtype=ACC)
        dscore = weight * (dweight - delta[None, :])
        dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee", out_dtype=ACC)

    head = keys * 0 + kv
    store_rows(DK, dk * SCALE, keys, head, keys < key_stop, KV, D)
    store_rows(DV, dv, keys, head, keys < key_stop, KV, D)


@triton.jit
def _dsink_kernel(
    DOUT,
    OUT,
    LSE,
    DLSE,
    SINK,
    DSINK,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    ACC: tl.constexpr,
):
    tile = tl.program_id(0)
    position = (tile * BP + tl.arange(0, BP))[:, None]
    head = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :]
    exists = (position < T) & (head < H)
    dout = DOUT.load([tile * BP, tl.program_id(1) * BH, 0]).to(ACC)
    delta = tl.sum(dout * OUT.load([tile * BP, tl.program_id(1) * BH, 0]).to(ACC), 2)
    if HAS_DLSE:
        delta -= tl.load(DLSE + head * T + position, mask=exists, other=0.0)
    lse = tl.load(LSE + head * T + position, mask=exists, other=float("inf"))
    sink = tl.load(SINK + head, mask=head < H, other=0.0).to(ACC)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    tl.store(DSINK + tl.cast(tile, tl.int64) * H + heads, -tl.sum(tl.exp2((sink - lse) * LOG2E) * delta, 0), mask=heads < H)
