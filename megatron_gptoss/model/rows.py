"""Which rows are which token's: tokens to the rows of their experts and back, in a fixed order.

In: the boolean map of which token visits which expert. Out: rows sorted by expert, and each token as the sum of its rows; each is the
other's gradient, and adds a token's K rows in the order of their experts, in float32. No sorting, no atomics, no waiting for a GPU.
It does not talk to other ranks (dispatch.py).

Shape legend: T tokens of this rank, E experts of all ranks, K experts per token, N = T K rows, C hidden size. Behind DeepEP (deepep.py) T
are the tokens that arrived, E this rank's experts, K how many of them a token visits at most, and N what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows are which token's."""

    token_N: Tensor  # int64, the token of a row; rows are sorted by expert, then by token
    cell_N: Tensor  # int64, token * E + expert
    row_TK: Tensor  # int64, the rows of a token, by expert; -1 where it has fewer than K


def find_rows(map_TE: Tensor, K: int, N: int | None = None) -> Rows:
    """map_TE: bool, exactly K entries true in every row; or at most K, and N in all. Sizes are known beforehand, so a GPU is not waited
    for."""
    T, E = map_TE.shape
    device = map_TE.device
    N = T * K if N is None else N
    map_ET = map_TE.T.contiguous()
    row_ET = map_ET.flatten().cumsum(0).view(E, T) - 1
    place_TE = map_TE.cumsum(1) - 1  # among the token's experts
    # What goes nowhere goes to one place more, which is cut off.
    cell_ET = torch.arange(T * E, device=device).view(T, E).T
    cell_N = torch.empty(N + 1, dtype=torch.int64, device=device)
    cell_N = cell_N.scatter_(0, row_ET.where(map_ET, N).flatten(), cell_ET.flatten())[:N]
    row_TK = torch.full((T, K + 1), -1, dtype=torch.int64, device=device)
    row_TK = row_TK.scatter_(1, place_TE.where(map_TE, K), row_ET.T)[:, :K].contiguous()
    return Rows(cell_N // E, cell_N, row_TK)


def to_experts(x_TC: Tensor, rows: Rows, backend: Any) -> Tensor:
    """[N, C]: each row is its token. `backend` has gather_rows and sum_rows: expert_reference or expert_kernels."""
    return _ToExperts.apply(x_TC, rows.token_N, rows.row_TK, backend)  # pyright: ignore[reportReturnType]


def from_experts(y_NC: Tensor, rows: Rows, backend: Any) -> Tensor:
    """[T, C]: each token is the sum of its rows, in the order of their experts."""
    return _FromExperts.apply(y_NC, rows.token_N, rows.row_TK, backend)  # pyright: ignore[reportReturnType]


def weight_of_rows(weight_TE: Tensor, rows: Rows) -> Tensor:
    """[N]: the router weight of every row. No two rows share a cell, so its gradient is written, not added."""
    return _WeightOfRows.apply(weight_TE, rows.cell_N)  # pyright: ignore[reportReturnType]


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, token, row, backend):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(row)
        ctx.backend = backend
        return backend.gather_rows(x.contiguous(), token)

    @staticmethod
    def backward(ctx: Any, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.backend.sum_rows(dout.contiguous(), *ctx.saved_tensors), None, None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y, token, row, backend):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(token)
        ctx.backend = backend
        return backend.sum_rows(y.contiguous(), row)

    @staticmethod
    def backward(ctx: Any, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.backend.gather_rows(dout.contiguous(), *ctx.saved_tensors), None, None, None


class _WeightOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_TE, cell):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cell)
        ctx.shape = weight_TE.shape
        return weight_TE.reshape(-1).index_select(0, cell)

    @staticmethod
    def backward(ctx: Any, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        (cell,) = ctx.saved_tensors
        return dout.new_zeros(ctx.shape.numel()).scatter_(0, cell, dout).view(ctx.shape), None
