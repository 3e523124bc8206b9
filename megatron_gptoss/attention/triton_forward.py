"""Our Triton forward kernels: attention with sinks for packed sequences, windowed or full.

In: q, k, v, sinks and a Layout on one GPU (or on the CPU under Triton's interpreter). Out: output and log-sum-exp, as reference.forward,
its slow exact twin. Nothing here is differentiable; gradients are in triton_backward.py.

A program owns a tile of R = BP x G2 rows: BP neighbouring positions times the G query heads of one kv head (G2 is G rounded up to a power
of two). All its rows read the same keys, so each key is loaded once for all heads, and near the diagonal or a window's edge only a few
positions' worth of keys are computed in vain instead of 128.

What a row may see is one interval of keys, whatever the mix of causality, window, packing and halo (layout.py). A tile walks from its first
row's first key to its last row's last key and masks only key tiles that some row does not see whole. In a packed batch the tiles of full
layers come from a table: each within one sequence, the longest walks first.

The sink is the softmax's initial state (highest score = sink, total = 1), so it costs nothing and a row without keys comes out right.

Everything big is read by the tensor memory accelerator, through descriptors made on the host: no address arithmetic, and rows outside a
tensor read as zeros.

Shape legend: T queries, U keys, H query heads, K kv heads, G = H / K, D head dim (a power of two), R rows of a tile, N keys of a tile.
"""

# Kernels are compiled by Triton, not run by Python: their constants and tuples mean nothing to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportCallIssue=false, reportIndexIssue=false
# ruff: noqa: C408

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_gptoss.attention.layout import Layout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOWHERE = tl.constexpr(1 << 30)  # a first key that no key tile reaches

ENOUGH_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
ONE_SHOT_WINDOW = 129  # windows up to here fit the kernel that holds all scores of a row at once


class Tile(NamedTuple):
    """One kernel's shape: rows of a tile (positions x heads), keys of a tile, warps, software-pipelining stages, tiles that one program of
    a one-shot kernel does in a row, and the registers a thread may have (None: the compiler's choice)."""

    rows: int
    keys: int
    warps: int
    stages: int
    run: int = 1
    registers: int | None = None

    def fit(self, row_bytes: int) -> Tile:
        """This tile, or a smaller one when a row of q has more bytes than head_dim 64 in 16 bits: shared memory holds 227 KiB."""
        if row_bytes <= 128:
            return self
        if row_bytes <= 256:  # float32 at 64, 16 bits at 128: no second tile under way
            return self if self.run == 1 else self._replace(run=1, stages=1)
        return self._replace(rows=min(self.rows, 32), keys=min(self.keys, 32), stages=1, run=1)

    def run_for(self, tiles: int) -> int:
        """`run`, or less where so few tiles would leave multiprocessors without a program."""
        run = self.run
        while run > 1 and tiles < run * ENOUGH_PROGRAMS:
            run //= 2
        return run

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        options = dict(num_warps=self.warps, num_stages=self.stages)
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# Chosen on an H200 by tools/tune_attention.py for head_dim 64, bfloat16; docs/performance.md has the figures.
FORWARD_FULL = Tile(rows=128, keys=64, warps=4, stages=3)
FORWARD_WINDOW = Tile(rows=128, keys=64, warps=4, stages=2, run=16)


def forward(
    q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sink_H: Tensor | None, layout: Layout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As reference.forward."""
    q_THD, k_UKD, v_UKD = (aligned(x) for x in (q_THD, k_UKD, v_UKD))
    (T, H, _), U, K = q_THD.shape, layout.num_keys, k_UKD.shape[1]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = padded_rows(H, T, torch.promote_types(q_THD.dtype, torch.float32), q_THD.device)
    if T == 0 or U == 0:
        lse_HT.fill_(-torch.inf) if sink_H is None else lse_HT.copy_(sink_H.unsqueeze(1))
        return out_THD.zero_(), lse_HT.T

    one_shot = window is not None and window <= ONE_SHOT_WINDOW and layout.causal
    tile = (FORWARD_WINDOW if one_shot else FORWARD_FULL).fit(q_THD.shape[2] * q_THD.element_size())
    shape = shape_arguments(H, k_UKD, layout, window, scale)
    positions = max(tile.rows // shape["G2"], 1)
    num_tiles = triton.cdiv(T, positions)
    half, near = one_shot_keys(window, positions) if one_shot else (tile.keys, tile.keys)
    packed = not layout.is_plain
    arguments = dict(
        Q=row_tiles(q_THD, positions, shape["G2"]),
        K=key_tiles(k_UKD, half),
        V=key_tiles(v_UKD, half),
        k_sh=k_UKD.stride(1),
        v_sh=v_UKD.stride(1),
        SINK=sink_H,
        OUT=out_THD,
        LSE=lse_HT,
        lse_sh=lse_HT.stride(0),
        BP=positions,
        HAS_SINK=sink_H is not None,
        **shape,
        **tile.options,
    )
    if one_shot:
        run = tile.run_for(num_tiles * K)
        _forward_window_kernel[triton.cdiv(num_tiles, run), K](
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
        tiles_N3 = layout.query_tiles(positions) if packed else None
        _forward_kernel[num_tiles if tiles_N3 is None else len(tiles_N3), K](**arguments, TILES=tiles_N3, BN=tile.keys)
    return out_THD, lse_HT.T


def aligned(x_THD: Tensor) -> Tensor:
    """x, or a copy of it when it does not suit the tensor memory accelerator: strides of 16 bytes or a multiple, the last one 1."""
    strides = [stride * x_THD.element_size() for stride in x_THD.stride()[:2]]
    fits = x_THD.stride(-1) == 1 and all(b > 0 and b % 16 == 0 for b in strides) and x_THD.data_ptr() % 16 == 0
    return x_THD if fits else x_THD.clone(memory_format=torch.contiguous_format)


def padded_rows(H: int, T: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[H, T] whose rows begin at multiples of 16 bytes; the padding behind a row is 0, the row itself not yet written."""
    x = torch.empty(H, triton.cdiv(T, 8) * 8, dtype=dtype, device=device)
    x[:, T:].zero_()
    return x[:, :T]


def row_tiles(x_THD: Tensor, positions: int, heads: int) -> TensorDescriptor:
    """Queries as boxes of [positions, heads, D]."""
    return TensorDescriptor(x_THD, list(x_THD.shape), list(x_THD.stride()), [positions, heads, x_THD.shape[2]])


def key_tiles(x_UKD: Tensor, rows: int) -> TensorDescriptor:
    """All heads side by side as one matrix, read in boxes of [rows, D]; head h begins at column h * stride(1)."""
    columns = (x_UKD.shape[1] - 1) * x_UKD.stride(1) + x_UKD.shape[2]
    return TensorDescriptor(x_UKD, [x_UKD.shape[0], columns], [x_UKD.stride(0), 1], [rows, x_UKD.shape[2]])


def shape_arguments(H: int, k_UKD: Tensor, layout: Layout, window: int | None, scale: float) -> dict[str, Any]:
    """What every kernel must know of sizes, visibility and number format."""
    G = H // k_UKD.shape[1]
    return dict(
        T=layout.num_queries,
        U=layout.num_keys,
        H=H,
        G=G,
        G2=triton.next_power_of_2(G),
        D=k_UKD.shape[2],
        WINDOW=(window or 0) if layout.causal else 0,
        CAUSAL=layout.causal,
        PACKED=not layout.is_plain,
        SCALE=scale,
        ACC=tl.float64 if k_UKD.dtype == torch.float64 else tl.float32,
    )


def one_shot_keys(window: int | None, positions: int) -> tuple[int, int]:
    """The one-shot kernels see two halves of keys before the tile's first position, and `near` keys from it on."""
    return max(triton.next_power_of_2((window or 1) - 1) // 2, 16), max(positions, 16)


@triton.jit
def row_positions(p0, stop, kv, G: tl.constexpr, G2: tl.constexpr, BP: tl.constexpr):
    """Row r of a tile: its position in the packed stream, its query head, and whether it is the tile's to compute."""
    row = tl.arange(0, BP * G2)
    position = p0 + row // G2
    return position, kv * G + row % G2, (position < stop) & (row % G2 < G)


@triton.jit
def row_interval(position, T, U, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """What causality and window let each row see: its first key, and how many more; a row that sees nothing begins at NOWHERE. Where the
    row's sequence begins is another matter: row_start."""
    last = position + (U - T) if CAUSAL else position * 0 + (U - 1)
    first = tl.maximum(last - (WINDOW - 1), 0) if WINDOW > 0 else position * 0
    return tl.where(last >= first, first, NOWHERE), tl.where(last >= first, last - first, 0)


@triton.jit
def row_start(START, position, T, PACKED: tl.constexpr):
    """First key of each row's sequence."""
    return tl.load(START + position, mask=position < T, other=0) if PACKED else position * 0


@triton.jit
def is_visible(first, more, key):
    """first <= key <= first + more, in one subtraction and one comparison: a key before `first` wraps to a huge unsigned number."""
    return (key - first).to(tl.uint32) <= more.to(tl.uint32)


@triton.jit
def hide(x, value, key, first, more, EDGE: tl.constexpr, N: tl.constexpr):
    """x [R, N] with `value` where a row's interval does not hold its key, key..key+N. Every row is known to see the columns from EDGE on:
    the compiler decides their comparison, and they cost nothing."""
    if EDGE > 0:
        column = tl.arange(0, N)[None, :]
        visible = is_visible((first - key)[:, None], more[:, None], column)
        x = tl.where(visible | (column >= EDGE), x, value)
    return x


@triton.jit
def hide_strangers(x, value, key, start, N: tl.constexpr):
    """x [R, N] with `value` for keys before the row's own sequence."""
    return tl.where((key + tl.arange(0, N))[None, :] >= start[:, None], x, value)


@triton.jit
def has_strangers(key, p0, START, T, PACKED: tl.constexpr, BP: tl.constexpr):
    """Whether keys from `key` on come before the sequence of some row of the tile (or before all keys)."""
    start = tl.load(START + tl.minimum(p0 + BP, T) - 1) if PACKED else 0
    return key < start


@triton.jit
def query_tile(TILES, T, BP: tl.constexpr, PACKED: tl.constexpr):
    """This program's queries p0..stop, and the first key of their sequence; the longest walks first."""
    if PACKED:
        tile = TILES + 3 * tl.program_id(0)
        p0 = tl.load(tile)
        stop = tl.load(tile + 1)
        start = tl.load(tile + 2)
    else:
        p0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BP
        stop = T
        start = 0
    return p0, stop, start


@triton.jit
def tile_range(p0, stop, start, T, U, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """Keys that a tile of queries walks over: begin..end, in steps of BN; those in middle..edge are seen by all its rows."""
    last = tl.minimum(p0 + BP, stop) - 1
    begin = start
    middle = start
    end = last + (U - T) + 1 if CAUSAL else U
    whole = p0 + (U - T) + 1 if CAUSAL else U
    if WINDOW > 0:
        begin = tl.maximum(begin, p0 + (U - T) - (WINDOW - 1))
        middle = begin + tl.cdiv(tl.maximum(last + (U - T) - (WINDOW - 1) - begin, 0), BN) * BN
    end = tl.maximum(end, begin)
    middle = tl.minimum(middle, begin + tl.cdiv(end - begin, BN) * BN)
    edge = middle + tl.maximum(whole - middle, 0) // BN * BN
    return begin, middle, edge, end


@triton.jit
def _forward_kernel(
    Q,
    K,
    V,
    k_sh,
    v_sh,
    SINK,
    TILES,
    OUT,
    LSE,
    lse_sh,
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
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    p0, stop, start = query_tile(TILES, T, BP, PACKED)
    kv = tl.program_id(1)
    position, head, exists = row_positions(p0, stop, kv, G, G2, BP)
    q = tl.reshape(Q.load([p0, kv * G, 0]), [BP * G2, D])
    highest, total = _sink_state(SINK, kv, G, G2, BP, HAS_SINK, ACC)
    out = tl.zeros([BP * G2, D], dtype=ACC)
    first, more = row_interval(position, T, U, WINDOW, CAUSAL)
    begin, middle, edge, end = tile_range(p0, stop, start, T, U, WINDOW, CAUSAL, BP, BN)
    # Three loops and not one with a branch: around a branch Triton 3.6 computes wrong scores on a GPU (right ones in the interpreter).
    for n in tl.range(begin, middle, BN):
        out, highest, total = _forward_step(n, kv, q, out, highest, total, first, more, K, V, k_sh, v_sh, BN, SCALE, ACC, True)
    for n in tl.range(middle, edge, BN):
        out, highest, total = _forward_step(n, kv, q, out, highest, total, first, more, K, V, k_sh, v_sh, BN, SCALE, ACC, False)
    for n in tl.range(edge, end, BN):
        out, highest, total = _forward_step(n, kv, q, out, highest, total, first, more, K, V, k_sh, v_sh, BN, SCALE, ACC, True)
    _finish(OUT, LSE, lse_sh, out, highest, total, position, head, exists, H, D)


@triton.jit
def _forward_step(
    n,
    kv,
    q,
    out,
    highest,
    total,
    first,
    more,
    K,
    V,
    k_sh,
    v_sh,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    MASK: tl.constexpr,
):
    """One key tile of the online softmax. Scores are in base 2: exp2 is one instruction."""
    key = K.load([n, kv * k_sh])
    score = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=ACC)
    if MASK:
        score = hide(score, float("-inf"), n, first, more, BN, BN)
    new_highest = tl.maximum(highest, tl.max(score, 1) * (SCALE * LOG2E))
    finite = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASK else new_highest
    weight = tl.exp2(score * (SCALE * LOG2E) - finite[:, None])
    shrink = tl.exp2(highest - finite)
    total = total * shrink + tl.sum(weight, 1)
    value = V.load([n, kv * v_sh])
    out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None], input_precision="ieee", out_dtype=ACC)
    return out, new_highest, total


@triton.jit
def _forward_window_kernel(
    Q,
    K,
    V,
    K_NEAR,
    V_NEAR,
    k_sh,
    v_sh,
    SINK,
    START,
    OUT,
    LSE,
    lse_sh,
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
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A small window fits whole: all scores of a row at once, one softmax, no running maximum. Two HALFs of keys before the tile's first
    position and NEAR keys from it on; with 16 positions and a window of 128 that is 144 keys for 128 visible ones. RUN tiles in a row, so
    that the next tile's loads are under way while one computes."""
    kv = tl.program_id(1)
    sink, one = _sink_state(SINK, kv, G, G2, BP, HAS_SINK, ACC)
    for step in tl.range(0, RUN, num_stages=STAGES):
        p0 = (tl.program_id(0) * RUN + step) * BP
        position, head, exists = row_positions(p0, T, kv, G, G2, BP)
        first, more = row_interval(position, T, U, WINDOW, CAUSAL)
        near = p0 + (U - T)
        far, half = near - 2 * HALF, near - HALF
        q = tl.reshape(Q.load([p0, kv * G, 0]), [BP * G2, D])
        far_score = tl.dot(q, tl.trans(K.load([far, kv * k_sh])), input_precision="ieee", out_dtype=ACC)
        half_score = tl.dot(q, tl.trans(K.load([half, kv * k_sh])), input_precision="ieee", out_dtype=ACC)
        near_score = tl.dot(q, tl.trans(K_NEAR.load([near, kv * k_sh])), input_precision="ieee", out_dtype=ACC)
        far_value = V.load([far, kv * v_sh])
        half_value = V.load([half, kv * v_sh])
        near_value = V_NEAR.load([near, kv * v_sh])

        far_score = hide(far_score, float("-inf"), far, first, more, 2 * HALF + BP - WINDOW, HALF)
        half_score = hide(half_score, float("-inf"), half, first, more, HALF + BP - WINDOW, HALF)
        near_score = hide(near_score, float("-inf"), near, first, more, NEAR, NEAR)
        if has_strangers(far, p0, START, T, PACKED, BP):
            start = row_start(START, position, T, PACKED)
            far_score = hide_strangers(far_score, float("-inf"), far, start, HALF)
            half_score = hide_strangers(half_score, float("-inf"), half, start, HALF)
            near_score = hide_strangers(near_score, float("-inf"), near, start, NEAR)
        top = tl.maximum(tl.maximum(tl.max(far_score, 1), tl.max(half_score, 1)), tl.max(near_score, 1))
        highest = tl.maximum(sink, top * (SCALE * LOG2E))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        far_weight = tl.exp2(far_score * (SCALE * LOG2E) - finite[:, None])
        half_weight = tl.exp2(half_score * (SCALE * LOG2E) - finite[:, None])
        near_weight = tl.exp2(near_score * (SCALE * LOG2E) - finite[:, None])
        total = one * tl.exp2(sink - finite) + tl.sum(far_weight, 1) + tl.sum(half_weight, 1) + tl.sum(near_weight, 1)
        out = tl.dot(far_weight.to(far_value.dtype), far_value, input_precision="ieee", out_dtype=ACC)
        out = tl.dot(half_weight.to(half_value.dtype), half_value, out, input_precision="ieee", out_dtype=ACC)
        out = tl.dot(near_weight.to(near_value.dtype), near_value, out, input_precision="ieee", out_dtype=ACC)
        _finish(OUT, LSE, lse_sh, out, highest, total, position, head, exists, H, D)


@triton.jit
def _sink_state(SINK, kv, G: tl.constexpr, G2: tl.constexpr, BP: tl.constexpr, HAS_SINK: tl.constexpr, ACC: tl.constexpr):
    """The softmax's state before any key: highest base-2 score and total of a tile's rows."""
    in_group = tl.arange(0, BP * G2) % G2
    if HAS_SINK:
        highest = tl.load(SINK + kv * G + in_group, mask=in_group < G, other=0.0).to(ACC) * LOG2E
        total = tl.full([BP * G2], 1.0, ACC)
    else:
        highest = tl.full([BP * G2], float("-inf"), ACC)
        total = tl.full([BP * G2], 0.0, ACC)
    return highest, total


@triton.jit
def _finish(OUT, LSE, lse_sh, out, highest, total, position, head, exists, H: tl.constexpr, D: tl.constexpr):
    """Normalise and store; no keys and no sink is output 0 and log-sum-exp -inf."""
    out = out * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    tl.store(LSE + head * lse_sh + position, (highest + tl.log2(total)) * LN2, mask=exists)
    store_rows(OUT, out, position, head, exists, H, D)


@triton.jit
def store_rows(X, x, position, head, exists, H: tl.constexpr, D: tl.constexpr):
    """A tile's rows into contiguous [T, H, D]."""
    pointer = X + (position.to(tl.int64) * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(pointer, x.to(X.dtype.element_ty), mask=exists[:, None])
