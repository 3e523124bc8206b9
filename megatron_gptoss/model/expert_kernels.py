"""Triton kernels for the experts: what is left between and around the grouped matrix products.

In: rows sorted by expert, `offs_E` (int32, the end of each expert's rows), on one GPU or, under Triton's interpreter, the CPU. Out: the
clamped SwiGLU with biases and router weights, its gradient, the sums that are bias gradients, rows gathered and rows summed. The twin of
all this is expert_reference.py. Nothing here is differentiable by autograd; expert_grouped.py puts it together.

A tile is up to `rows` neighbouring rows of ONE expert. So a bias is read once for a tile, and a bias gradient is the tiles' sums added up
in their order: no atomics, no gathered [rows, width] copy of a bias, the same bits every time. How many tiles there are is known on the GPU
only; as many programs are started as there can be at most, rows / tile + experts, and those without a tile do nothing:
the host never waits.

All arithmetic is float32 (float64 for float64 inputs), whatever the tensors are; `limit` is the clamp of the activation.

Shape legend: N rows (tokens times experts per token), T tokens, K experts per token, E experts of this rank, C hidden size, I expert width.
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

LOG2E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """One kernel's shape: rows and columns that a program holds at once, its warps, and how many column blocks are on their way at once
    where a program walks over them."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


# Not tuned yet: wide enough for whole cache lines, small enough for a few programs on a multiprocessor. tools/bench_experts.py times them.
ACTIVATE = Tile(rows=16, columns=512, warps=8)
ACTIVATE_BACKWARD = Tile(rows=64, columns=64, warps=8, stages=3)  # 121 registers: two programs on a multiprocessor
ADD_BIAS = Tile(rows=16, columns=512, warps=8)
BIAS_BACKWARD = Tile(rows=64, columns=64, warps=8, stages=3)
SUM_TILES = Tile(rows=16, columns=64, warps=4, stages=3)
MOVE_ROWS = Tile(rows=1, columns=1024, warps=4)
ZERO_CHUNK = 65536  # elements of a program, almost all of which have nothing to do


def activate(h_N2I: Tensor, bias_E2I: Tensor, weight_N: Tensor, offs_E: Tensor, limit: float) -> Tensor:
    """[N, I]: weight * (up + 1) * gate * sigmoid(1.702 gate), of h + bias = [gate, up], both clamped."""
    N, I = h_N2I.shape[0], h_N2I.shape[1] // 2
    out_NI = h_N2I.new_empty(N, I)
    if N:
        tile = ACTIVATE
        grid = (_tiles(N, offs_E, tile), triton.cdiv(I, tile.columns))
        _activate_kernel[grid](h_N2I, bias_E2I, weight_N, offs_E, out_NI, I=I, LIMIT=limit, **_constants(h_N2I, offs_E, tile))
    return out_NI


def activate_backward(
    dout_NI: Tensor, h_N2I: Tensor, bias_E2I: Tensor, weight_N: Tensor, offs_E: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `activate` and its output once more: (out [N, I], dh [N, 2I], dbias [E, 2I], dweight [N])."""
    N, I = dout_NI.shape
    out_NI, dh_N2I, dweight_N = torch.empty_like(dout_NI), torch.empty_like(h_N2I), torch.empty_like(weight_N)
    tile = ACTIVATE_BACKWARD
    sums = _tile_sums(N, 2 * I, offs_E, tile, h_N2I)
    if N:
        _activate_backward_kernel[(sums.shape[0],)](
            dout_NI, h_N2I, bias_E2I, weight_N, offs_E, out_NI, dh_N2I, dweight_N, sums,
            I=I, LIMIT=limit, **_constants(h_N2I, offs_E, tile),
        )  # fmt: skip
    return out_NI, dh_N2I, _sum_tiles(sums, offs_E, tile, bias_E2I), dweight_N


def add_bias_(y_NC: Tensor, bias_EC: Tensor, weight_N: Tensor, offs_E: Tensor) -> Tensor:
    """y += weight * bias of the row's expert, in place."""
    N, C = y_NC.shape
    if N:
        tile = ADD_BIAS
        grid = (_tiles(N, offs_E, tile), triton.cdiv(C, tile.columns))
        _add_bias_kernel[grid](y_NC, bias_EC, weight_N, offs_E, C=C, **_constants(y_NC, offs_E, tile))
    return y_NC


def bias_backward(dy_NC: Tensor, bias_EC: Tensor, weight_N: Tensor, offs_E: Tensor, dweight_N: Tensor) -> Tensor:
    """dbias [E, C] of `add_bias_`; what the weights get is added to dweight_N."""
    N, C = dy_NC.shape
    tile = BIAS_BACKWARD
    sums = _tile_sums(N, C, offs_E, tile, dy_NC)
    if N:
        _bias_backward_kernel[(sums.shape[0],)](dy_NC, bias_EC, weight_N, offs_E, dweight_N, sums, C=C, **_constants(dy_NC, offs_E, tile))
    return _sum_tiles(sums, offs_E, tile, bias_EC)


def zero_empty_(dw: Tensor, offs_E: Tensor) -> Tensor:
    """Zero the slices [E, ...] of experts without rows, in place; the others are not touched, nor read."""
    E, size = dw.shape[0], dw[0].numel()
    _zero_empty_kernel[(E, triton.cdiv(size, ZERO_CHUNK))](dw, offs_E, SIZE=size, CHUNK=ZERO_CHUNK, BLOCK=1024, num_warps=4)
    return dw


def gather_rows(x_TC: Tensor, token_N: Tensor) -> Tensor:
    """out[n] = x[token[n]]."""
    N, C = token_N.shape[0], x_TC.shape[1]
    out_NC = x_TC.new_empty(N, C)
    if N and C:
        _gather_rows_kernel[(N,)](x_TC, token_N, out_NC, C=C, COLUMNS=MOVE_ROWS.columns, num_warps=MOVE_ROWS.warps)
    return out_NC


def sum_rows(y_NC: Tensor, row_TK: Tensor) -> Tensor:
    """out[t] = y[row[t, 0]] + y[row[t, 1]] + ..., added in this order in float32 and rounded once; row -1 is none."""
    (T, K), C = row_TK.shape, y_NC.shape[1]
    out_TC = y_NC.new_empty(T, C)
    if T and C:
        _sum_rows_kernel[(T,)](y_NC, row_TK, out_TC, C=C, K=K, COLUMNS=MOVE_ROWS.columns, ACC=_accumulator(y_NC), num_warps=MOVE_ROWS.warps)
    return out_TC


def _accumulator(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _constants(x: Tensor, offs_E: Tensor, tile: Tile) -> dict[str, Any]:
    E = offs_E.shape[0]
    return dict(
        E=E,
        E2=max(triton.next_power_of_2(E), 2),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        ACC=_accumulator(x),
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def _tiles(N: int, offs_E: Tensor, tile: Tile) -> int:
    """How many tiles there can be at most: each expert's last one may be short."""
    return N // tile.rows + offs_E.shape[0]


def _tile_sums(N: int, width: int, offs_E: Tensor, tile: Tile, like: Tensor) -> Tensor:
    """Room for the column sums of every tile."""
    return torch.empty(_tiles(N, offs_E, tile), width, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _sum_tiles(sums: Tensor, offs_E: Tensor, tile: Tile, like: Tensor) -> Tensor:
    """Column sums of tiles -> of experts, added in the tiles' order; zeros for an expert without rows."""
    E, width = like.shape
    out = torch.empty_like(like)
    grid = (E, triton.cdiv(width, SUM_TILES.columns))
    _sum_tiles_kernel[grid](sums, offs_E, out, WIDTH=width, STEP=SUM_TILES.rows,
        **_constants(sums, offs_E, SUM_TILES._replace(rows=tile.rows)))  # fmt: skip
    return out


@triton.jit
def expert_tiles(OFFS, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr):
    """For every expert: its first row, the row behind its last, how many tiles it has, and the number of the tile behind its last."""
    e = tl.arange(0, E2)
    end = tl.load(OFFS + e, mask=e < E, other=0)
    begin = tl.load(OFFS + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    return begin, end, tl.where(e < E, tiles, 0), tl.cumsum(tl.where(e < E, tiles, 0), 0)


@triton.jit
def find_tile(OFFS, tile, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr):
    """A tile's expert (E when there is no such tile), its first row, and the row behind its expert's last."""
    begin, end, tiles, tiles_end = expert_tiles(OFFS, E, E2, ROWS)
    e = tl.arange(0, E2)
    expert = tl.sum(((tiles_end <= tile) & (e < E)).to(tl.int32), 0)
    first = tl.sum(tl.where(e == expert, begin + (tile - (tiles_end - tiles)) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def gate_up(H, BIAS, expert, row, stop, column, LIMIT: tl.constexpr, I: tl.constexpr, ACC: tl.constexpr):
    """A tile of h + bias, not yet clamped."""
    inside = column < I
    there = (row < stop)[:, None] & inside[None, :]
    place = H + row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
    gate_bias = tl.load(BIAS + expert * (2 * I) + column, mask=inside, other=0.0).to(ACC)
    up_bias = tl.load(BIAS + expert * (2 * I) + I + column, mask=inside, other=0.0).to(ACC)
    gate = tl.load(place, mask=there, other=0.0).to(ACC) + gate_bias[None, :]
    up = tl.load(place + I, mask=there, other=0.0).to(ACC) + up_bias[None, :]
    return gate, up, there


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-1.702 x)); for x far below 0 the exponential overflows to infinity and the quotient is 0, as it should be."""
    return 1.0 / (1.0 + tl.exp2(x * (-1.702 * LOG2E)))


@triton.jit
def _activate_kernel(
    H, BIAS, WEIGHT, OFFS, OUT,
    I: tl.constexpr, LIMIT: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, stop = find_tile(OFFS, tl.program_id(0), E, E2, ROWS)
    if expert < E:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gate, up, there = gate_up(H, BIAS, expert, row, stop, column, LIMIT, I, ACC)
        weight = tl.load(WEIGHT + row, mask=row < stop, other=0.0).to(ACC)
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
        out = (up + 1.0) * (gate * sigmoid(gate)) * weight[:, None]
        tl.store(OUT + row.to(tl.int64)[:, None] * I + column[None, :], out.to(OUT.dtype.element_ty), mask=there)


@triton.jit
def _activate_backward_kernel(
    DOUT, H, BIAS, WEIGHT, OFFS, OUT, DH, DWEIGHT, SUMS,
    I: tl.constexpr, LIMIT: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One pass over h and dout: everything that backward needs of them is made while they are in registers."""
    tile = tl.program_id(0)
    expert, first, stop = find_tile(OFFS, tile, E, E2, ROWS)
    if expert < E:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(WEIGHT + row, mask=row < stop, other=0.0).to(ACC)
        dweight = tl.zeros([ROWS], dtype=ACC)
        for c in tl.range(0, I, COLUMNS, num_stages=STAGES):
            column = c + tl.arange(0, COLUMNS)
            gate, up, there = gate_up(H, BIAS, expert, row, stop, column, LIMIT, I, ACC)
            place = row.to(tl.int64)[:, None] * I + column[None, :]
            dout = tl.load(DOUT + place, mask=there, other=0.0).to(ACC)
            # A clamp lets the gradient through up to the limit itself, as torch.clamp does.
            gate_moves, up_moves = gate <= LIMIT, (up <= LIMIT) & (up >= -LIMIT)
            gate = tl.minimum(gate, LIMIT)
            up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0
            share = sigmoid(gate)
            swish = gate * share
            dweight += tl.sum(dout * (up * swish), 1)
            tl.store(OUT + place, (up * swish * weight[:, None]).to(OUT.dtype.element_ty), mask=there)
            dout = dout * weight[:, None]
            dup = tl.where(up_moves, dout * swish, 0.0)
            # gate * share * (1 - share) must not be inf * 0 for huge negative gates: swish is 0 there.
            dgate = tl.where(gate_moves, dout * up * (share + 1.702 * swish * (1.0 - share)), 0.0)
            place = DH + row.to(tl.int64)[:, None] * (2 * I) + column[None, :]
            tl.store(place, dgate.to(DH.dtype.element_ty), mask=there)
            tl.store(place + I, dup.to(DH.dtype.element_ty), mask=there)
            sums = SUMS + tile.to(tl.int64) * (2 * I) + column
            tl.store(sums, tl.sum(dgate, 0), mask=column < I)
            tl.store(sums + I, tl.sum(dup, 0), mask=column < I)
        tl.store(DWEIGHT + row, dweight.to(DWEIGHT.dtype.element_ty), mask=row < stop)


@triton.jit
def _add_bias_kernel(
    Y, BIAS, WEIGHT, OFFS,
    C: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, stop = find_tile(OFFS, tl.program_id(0), E, E2, ROWS)
    if expert < E:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = (row < stop)[:, None] & (column < C)[None, :]
        place = Y + row.to(tl.int64)[:, None] * C + column[None, :]
        bias = tl.load(BIAS + expert * C + column, mask=column < C, other=0.0).to(ACC)
        weight = tl.load(WEIGHT + row, mask=row < stop, other=0.0).to(ACC)
        y = tl.load(place, mask=there, other=0.0).to(ACC) + weight[:, None] * bias[None, :]
        tl.store(place, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def _bias_backward_kernel(
    DY, BIAS, WEIGHT, OFFS, DWEIGHT, SUMS,
    C: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert, first, stop = find_tile(OFFS, tile, E, E2, ROWS)
    if expert < E:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(WEIGHT + row, mask=row < stop, other=0.0).to(ACC)
        dweight = tl.load(DWEIGHT + row, mask=row < stop, other=0.0).to(ACC)
        for c in tl.range(0, C, COLUMNS, num_stages=STAGES):
            column = c + tl.arange(0, COLUMNS)
            there = (row < stop)[:, None] & (column < C)[None, :]
            dy = tl.load(DY + row.to(tl.int64)[:, None] * C + column[None, :], mask=there, other=0.0).to(ACC)
            bias = tl.load(BIAS + expert * C + column, mask=column < C, other=0.0).to(ACC)
            dweight += tl.sum(dy * bias[None, :], 1)
            tl.store(SUMS + tile.to(tl.int64) * C + column, tl.sum(dy * weight[:, None], 0), mask=column < C)
        tl.store(DWEIGHT + row, dweight.to(DWEIGHT.dtype.element_ty), mask=row < stop)


@triton.jit
def _sum_tiles_kernel(
    SUMS, OFFS, OUT, WIDTH: tl.constexpr, STEP: tl.constexpr,
    E: tl.constexpr, E2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    _, _, tiles, tiles_end = expert_tiles(OFFS, E, E2, ROWS)
    e = tl.arange(0, E2)
    stop = tl.sum(tl.where(e == expert, tiles_end, 0), 0)
    first = stop - tl.sum(tl.where(e == expert, tiles, 0), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=ACC)
    for t in tl.range(first, stop, STEP, num_stages=STAGES):
        tile = t + tl.arange(0, STEP)
        there = (tile < stop)[:, None] & (column < WIDTH)[None, :]
        total += tl.sum(tl.load(SUMS + tile.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=there, other=0.0), 0)
    tl.store(OUT + expert * WIDTH + column, total.to(OUT.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _zero_empty_kernel(X, OFFS, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    begin = tl.load(OFFS + expert - 1, mask=expert > 0, other=0)
    if tl.load(OFFS + expert) == begin:
        for i in tl.range(0, CHUNK, BLOCK):
            place = tl.program_id(1) * CHUNK + i + tl.arange(0, BLOCK)
            tl.store(X + expert.to(tl.int64) * SIZE + place, tl.zeros([BLOCK], dtype=X.dtype.element_ty), mask=place < SIZE)


@triton.jit
def _gather_rows_kernel(X, TOKEN, OUT, C: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = X + tl.load(TOKEN + row).to(tl.int64) * C
    for c in tl.static_range(0, C, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        tl.store(OUT + row * C + column, tl.load(source + column, mask=column < C), mask=column < C)


@triton.jit
def _sum_rows_kernel(Y, ROW, OUT, C: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for c in tl.static_range(0, C, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], dtype=ACC)
        for k in tl.static_range(K):
            row = tl.load(ROW + token * K + k).to(tl.int64)
            total += tl.load(Y + row * C + column, mask=(column < C) & (row >= 0), other=0.0).to(ACC)
        tl.store(OUT + token * C + column, total.to(OUT.dtype.element_ty), mask=column < C)
