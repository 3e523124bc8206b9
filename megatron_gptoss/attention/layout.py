"""Which keys each query may see, before any window: one value that every backend and every context-parallel path shares.

In: where the packed sequences begin and end. Out: `Layout`, with its bounds on the host and what kernels read on the device, each made once
and kept as long as the caller's cu_seqlens lives. It knows nothing of windows, heads or numbers.

Shape legend: T packed queries, U packed keys (U = T in plain self-attention), S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, eq=False)
class Layout:
    """T queries and U = T + offset keys of the same packed stream.

    Causal: query i stands at key i + offset and sees the keys of its own sequence up to that one. The offset keys in front are what a
    context-parallel neighbour sent (a window's halo); first_key says where the first sequence's keys begin among them, and keys before it
    belong to nobody. Not causal: every query sees every key (a ring's earlier chunk); then there is one sequence.

    A query that sees no key is allowed (offset < 0, or no keys at all): its output is 0 and its log-sum-exp that of the sink alone.
    """

    bounds: tuple[int, ...]  # [S+1] queries of sequence s are bounds[s]:bounds[s+1]; first 0, last T
    offset: int = 0
    first_key: int = 0
    causal: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _tables: dict[tuple[str, int, int | None], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(b < a for a, b in pairwise(self.bounds)):
            raise ValueError(f"bounds = {self.bounds} must begin at 0 and not decrease")
        if not 0 <= self.first_key <= max(self.offset, 0):
            raise ValueError(f"first_key = {self.first_key} must lie in 0..offset = {self.offset}")
        if not self.causal and (len(self.bounds) != 2 or self.first_key):
            raise ValueError("a layout that is not causal has one sequence, which begins at key 0")

    @property
    def num_queries(self) -> int:
        return self.bounds[-1]

    @property
    def num_keys(self) -> int:
        return self.bounds[-1] + self.offset

    @property
    def is_plain(self) -> bool:
        """One sequence whose keys begin at key 0: kernels need no table of sequence starts."""
        return len(self.bounds) == 2 and self.first_key == 0

    @cached_property
    def key_bounds(self) -> tuple[int, ...]:
        """[S+1] keys of sequence s are key_bounds[s]:key_bounds[s+1]."""
        if not self.causal:
            return (0, self.num_keys)
        return (self.first_key, *(max(b + self.offset, 0) for b in self.bounds[1:]))

    @cached_property
    def max_queries(self) -> int:
        return max(b - a for a, b in pairwise(self.bounds))

    @cached_property
    def max_keys(self) -> int:
        return max(b - a for a, b in pairwise(self.key_bounds))

    @cached_property
    def cu_queries_S1(self) -> Tensor:
        return torch.tensor(self.bounds, dtype=torch.int32, device=self.device)

    @cached_property
    def cu_keys_S1(self) -> Tensor:
        return torch.tensor(self.key_bounds, dtype=torch.int32, device=self.device)

    @cached_property
    def start_T(self) -> Tensor:
        """int32 [T]: first key of the query's own sequence. Never decreases."""
        queries_T = torch.arange(self.num_queries, dtype=torch.int32, device=self.device)
        sequence_T = torch.searchsorted(self.cu_queries_S1[1:], queries_T, right=True)
        return self.cu_keys_S1[sequence_T].contiguous()

    def query_tiles(self, size: int) -> Tensor:
        """int32 [tiles, 3]: first query, one past the last query, first key of their sequence. Every query is in one tile, of at most
        `size` of one sequence. Those with the most keys come first: a long one at the end would leave a GPU waiting for it."""
        if ("queries", size, None) not in self._tables:
            tiles = _cut(zip(pairwise(self.bounds), self.key_bounds[:-1], strict=True), size)
            self._tables["queries", size, None] = self._table(sorted(tiles, key=lambda tile: tile[2] - tile[0]))
        return self._tables["queries", size, None]

    def key_tiles(self, size: int, window: int | None) -> Tensor:
        """int32 [tiles, 3]: first key, one past the last key, one past the last query of their sequence (0: they belong to nobody). Every
        key is in one tile, and those with the most queries come first. Where a window makes them alike, neighbours stay neighbours, and
        tiles begin at multiples of `size`, so that as few tiles of queries as possible see one."""
        if ("keys", size, window) not in self._tables:
            sequences = [((0, self.first_key), 0), *zip(pairwise(self.key_bounds), self.bounds[1:], strict=True)]
            tiles = _cut(sequences, size, aligned=window is not None)
            if window is None:
                tiles.sort(key=lambda tile: tile[0] - tile[2])
            self._tables["keys", size, window] = self._table(tiles)
        return self._tables["keys", size, window]

    def _table(self, rows: list[tuple[int, int, int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.device).view(-1, 3)


def _cut(sequences: Iterable[tuple[tuple[int, int], int]], size: int, *, aligned: bool = False) -> list[tuple[int, int, int]]:
    """Each ((begin, end), other) in pieces of at most `size`: (begin, end, other). Aligned: cut at multiples of `size`."""
    pieces = []
    for (begin, end), other in sequences:
        first = begin // size * size if aligned else begin
        pieces += [(max(i, begin), min(i + size, end), other) for i in range(first, end, size) if begin < end]
    return pieces


def self_attention_layout(cu_seqlens: Tensor | None, T: int, device: torch.device) -> Layout:
    """The layout of T packed tokens. Raises ValueError when cu_seqlens does not run from 0 to T without decreasing.

    Reading a GPU's cu_seqlens waits for the GPU, so it happens once per tensor, not once per layer.
    """
    if cu_seqlens is None:
        return _one_sequence(T, device)
    known = _layouts.get(cu_seqlens)
    if known is not None and known[0] == (version_of(cu_seqlens), T, device):
        return known[1]
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers of shape [sequences + 1], not {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != T:
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to T = {T}")
    for place, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"cu_seqlens decreases at place {place + 1}: {begin} -> {end}; sequence bounds must not decrease")
    layout = Layout(bounds, device=device)
    _layouts[cu_seqlens] = ((version_of(cu_seqlens), T, device), layout)
    return layout


def version_of(x: Tensor) -> int | None:
    """Changes when torch writes into x. Tensors of torch.inference_mode do not count theirs."""
    return None if x.is_inference() else x._version


_layouts: WeakIdKeyDictionary = WeakIdKeyDictionary()
_dense: dict[tuple[int, torch.device], Layout] = {}


def _one_sequence(T: int, device: torch.device) -> Layout:
    if (T, device) not in _dense:
        _dense.clear()  # lengths come and go; the last one is enough
        _dense[T, device] = Layout((0, T), device=device)
    return _dense[T, device]
