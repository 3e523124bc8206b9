"""Routes: which experts every token of a microbatch went to, as a value; to record, to replay, and to remember in recomputation.

In: rows from an engine or from an earlier forward pass. Out: `Routes`, and contexts around one forward pass:

    with record() as routing:                 # the routers choose; the choice comes out as a value
        loss = model(...)
    routes = routing.routes()
    with replay(routes) as routing:           # the routers take these experts; probabilities and gradients come from today's logits
        loss = model(...)
    loss.backward()                           # outside, later, in any order

A context belongs to ONE forward pass of ONE microbatch. Nothing of it is needed in backward: whatever `checkpoint` saves for recomputation
keeps the experts its own forward pass took, so that a recomputed router takes them again, replayed or not, however many microbatches are
under way. (Megatron's RouterReplay keeps class-level queues instead: left on REPLAY_FORWARD in backward it recomputes with the last
microbatch's routes, silently, and without recomputation its queues grow.)

A replay that did not use every row once is an error. Not for CUDA graphs and not for Transformer Engine's checkpoint, which have their own
ways to run a layer again.

Shape legend: L layers, T tokens, K experts per token, E experts. Layers are counted from 0 over the whole model, as vLLM counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.attention.context import shard_rows
from megatron_gptoss.errors import RunFailed

Own = Callable[[], Tensor]  # int64 [T, K], the experts that a router would choose
MISSING = ("refuse", "own")  # what to do about a token without routes: stop, or let the router choose for it


class ReplayError(RunFailed):
    """Routes that cannot be replayed, or were not replayed whole."""


# --- The value --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routes:
    """The chosen experts of one microbatch. A row of zeros is a missing row: the engine writes it for a token that it never ran."""

    experts_LTK: Tensor  # uint8, or int16 where E > 256
    layers: tuple[int, ...]  # [L] which layers these are
    num_experts: int  # E

    def __post_init__(self) -> None:
        if self.experts_LTK.ndim != 3 or self.experts_LTK.dtype not in (torch.uint8, torch.int16):
            raise ValueError(f"routes must be uint8 or int16 [L, T, K], not {self.experts_LTK.dtype} {tuple(self.experts_LTK.shape)}")
        if len(self.layers) != self.experts_LTK.shape[0] or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"routes of {self.experts_LTK.shape[0]} layers are named {self.layers}; every layer needs its own name")

    @property
    def num_tokens(self) -> int:
        return self.experts_LTK.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts_LTK.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.experts_LTK.numel() * self.experts_LTK.element_size()

    @property
    def missing_LT(self) -> Tensor:
        """bool [L, T]. With one expert per token a zero is expert 0, and nothing can be missing."""
        if self.top_k == 1:
            return torch.zeros_like(self.experts_LTK[..., 0], dtype=torch.bool)
        return (self.experts_LTK == 0).all(-1)

    def check(self, *, missing: str = "refuse") -> None:
        """Raises ReplayError, naming the first bad row: an expert out of range, one that comes twice, or a missing row where
        missing = "refuse". Waits for the device once."""
        if missing not in MISSING:
            raise ValueError(f"missing = {missing!r} is unknown; one of {', '.join(MISSING)}")
        rows = self.experts_LTK
        gone_LT = self.missing_LT
        bad_LT = ((rows < 0) | (rows >= self.num_experts)).any(-1)
        for i, j in combinations(range(self.top_k), 2):
            bad_LT |= (rows[..., i] == rows[..., j]) & ~gone_LT
        if missing == "refuse":
            bad_LT |= gone_LT
        num_bad = int(bad_LT.sum())
        if num_bad:
            place, token = (int(i) for i in bad_LT.nonzero()[0])
            raise ReplayError(
                f"routes refused at layer {self.layers[place]}, token {token}: {self._fault(rows[place, token].tolist())} "
                f"({num_bad} of {bad_LT.numel()} rows are bad)"
            )

    def _fault(self, row: list[int]) -> str:
        if not any(row) and self.top_k > 1:
            return 'all zero, which means that the engine has no routes for it; missing = "own" lets the router choose'
        outside = [e for e in row if not 0 <= e < self.num_experts]
        if outside:
            return f"expert {outside[0]} is outside 0..{self.num_experts - 1}"
        return f"experts {', '.join(map(str, row))} name one twice"

    def cut(self, *, layers: Sequence[int] | None = None, rows: slice | None = None) -> Routes:
        """The part that one rank needs: its pipeline stage's layers, its `rows_of_rank`. Raises ValueError for a layer that is not here."""
        cut = self.experts_LTK
        if layers is not None:
            absent = sorted(set(layers) - set(self.layers))
            if absent:
                raise ValueError(f"routes have no layer {absent[0]}; theirs are {_names(self.layers)}")
            cut = cut[[self.layers.index(layer) for layer in layers]]
        if rows is not None:
            cut = cut[:, rows]
        return replace(self, experts_LTK=cut, layers=self.layers if layers is None else tuple(layers))

    def pad_to(self, num_tokens: int) -> Routes:
        """With rows for padding tokens at the end, which no loss depends on: dealt out evenly over the experts."""
        extra = num_tokens - self.num_tokens
        if extra < 0:
            raise ValueError(f"routes of {self.num_tokens} tokens cannot be padded to {num_tokens}")
        padding = balanced_routes(extra, self.layers, num_experts=self.num_experts, top_k=self.top_k).experts_LTK
        return replace(self, experts_LTK=torch.cat([self.experts_LTK, padding.to(self.experts_LTK)], dim=1))

    def to(self, device: torch.device | str) -> Routes:
        return replace(self, experts_LTK=self.experts_LTK.to(device))


def pack_routes(rows: Sequence[Any], lengths: Sequence[int], *, layers: Sequence[int], num_experts: int, top_k: int) -> Routes:
    """An engine's rows as the routes of one packed stream.

    rows: for each sequence an integer array [tokens the engine ran, L, K] as vLLM returns it, or None for a sequence without routes. The
    last sampled token is never run, so a sequence's array is usually one row short; absent rows become missing ones.
    lengths: tokens of each sequence in the pack.

    Raises ReplayError for an array that is too long, of another shape, or with numbers that the packed type cannot hold.
    """
    if top_k == 1 and any(r is None or len(r) < n for r, n in zip(rows, lengths, strict=True)):
        raise ReplayError("with one expert per token a missing row cannot be told from expert 0; such rollouts cannot be replayed")
    stream_TLK = torch.zeros(sum(lengths), len(layers), top_k, dtype=compact_dtype(num_experts))
    begin = 0
    for place, (part, length) in enumerate(zip(rows, lengths, strict=True)):
        if part is not None:
            part_TLK = torch.as_tensor(part)
            wanted = (len(layers), top_k)
            if part_TLK.ndim != 3 or tuple(part_TLK.shape[1:]) != wanted or part_TLK.shape[0] > length:
                raise ReplayError(
                    f"routes of sequence {place} have shape {tuple(part_TLK.shape)}; "
                    f"its {length} tokens in {wanted[0]} layers with {wanted[1]} experts each need at most {(length, *wanted)}"
                )
            limit = torch.iinfo(stream_TLK.dtype).max
            if part_TLK.numel() and not 0 <= int(part_TLK.min()) <= int(part_TLK.max()) <= limit:
                raise ReplayError(f"routes of sequence {place} name expert {int(part_TLK.max())}; the model has 0..{num_experts - 1}")
            stream_TLK[begin : begin + part_TLK.shape[0]] = part_TLK
        begin += length
    return Routes(stream_TLK.transpose(0, 1).contiguous(), tuple(layers), num_experts)


def balanced_routes(num_tokens: int, layers: Sequence[int], *, num_experts: int, top_k: int) -> Routes:
    """All experts get as many tokens, to one: token t goes to experts K t, K t + 1, … modulo E. For padding and for benchmarks."""
    experts_TK = (torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts).to(compact_dtype(num_experts))
    return Routes(experts_TK.expand(len(layers), -1, -1).contiguous(), tuple(layers), num_experts)


def rows_of_rank(num_tokens: int, *, context: tuple[int, int] = (0, 1), sequence: tuple[int, int] = (0, 1)) -> slice:
    """The rows of a packed stream that this rank's routers see. Each pair is (rank, size).

    context: contiguous shards of the stream, as in attention/context.py. sequence: the tensor-parallel ranks, where sequence parallelism
    cuts that shard again; leave it out without sequence parallelism. Raises ValueError when the cut does not come out even.
    """
    shard = shard_rows(num_tokens, *context)
    within = shard_rows(shard.stop - shard.start, *sequence)
    return slice(shard.start + within.start, shard.start + within.stop)


def compact_dtype(num_experts: int) -> torch.dtype:
    """The smallest type that can name every expert: 1 byte for GPT-OSS's 32 and 128."""
    return torch.uint8 if num_experts <= 256 else torch.int16


# --- One forward pass -------------------------------------------------------------------------------------------------------------------


class RoutingPass:
    """What the routers do in one forward pass, and what they did. Made by `record` and `replay`."""

    def __init__(self, routes: Routes | None = None, *, missing: str = "refuse") -> None:
        """Raises ReplayError for rows that cannot be replayed, before anything is computed."""
        self.num_replayed = 0  # rows (one token in one layer) taken from `routes`
        self.num_own = 0  # rows that a router chose
        self._given = routes
        self._taken: dict[int, tuple[Tensor, int]] = {}  # layer -> experts [T, K] in the compact type, E
        self._missing_LT: Tensor | None = None
        self._num_missing_L: list[int] = []
        if routes is not None:
            routes.check(missing=missing)
            self._missing_LT = routes.missing_LT
            self._num_missing_L = self._missing_LT.sum(1).tolist()

    @property
    def replayed_fraction(self) -> float:
        """Share of the rows of this pass that were replayed; 0 before any router ran."""
        return self.num_replayed / max(self.num_replayed + self.num_own, 1)

    def routes(self) -> Routes:
        """The experts that this pass used, fallbacks included, on the device. Raises ReplayError when no router ran."""
        if not self._taken:
            raise ReplayError("no router ran inside this context, so there are no routes")
        layers = tuple(sorted(self._taken))
        return Routes(torch.stack([self._taken[layer][0] for layer in layers]), layers, self._taken[layers[0]][1])

    def take(self, layer: int, logits_TE: Tensor, top_k: int, own: Own) -> Tensor:
        """The experts [T, K] of a layer's router; `own` says which it would choose itself."""
        if layer in self._taken:
            raise ReplayError(f"the router of layer {layer} ran twice inside one context; a context is for one forward pass")
        num_tokens, num_experts = logits_TE.shape
        if self._given is None:
            experts_TK, num_own = own(), num_tokens
        else:
            experts_TK, num_own = self._replayed(self._given, layer, logits_TE, top_k, own)
        self._taken[layer] = (experts_TK.to(compact_dtype(num_experts)), num_experts)
        self.num_own += num_own
        self.num_replayed += num_tokens - num_own
        return experts_TK

    def _replayed(self, given: Routes, layer: int, logits_TE: Tensor, top_k: int, own: Own) -> tuple[Tensor, int]:
        """The given experts of a layer, the router's own where there are none, and how many of those there are."""
        num_tokens, num_experts = logits_TE.shape
        if layer not in given.layers:
            raise ReplayError(f"layer {layer} has a router and no routes to replay; there are routes for layers {_names(given.layers)}")
        if (given.num_tokens, given.top_k, given.num_experts) != (num_tokens, top_k, num_experts):
            raise ReplayError(
                f"the router of layer {layer} sends {num_tokens} tokens to {top_k} of {num_experts} experts; "
                f"the routes are of {given.num_tokens} tokens to {given.top_k} of {given.num_experts}"
            )
        place = given.layers.index(layer)
        given_TK = given.experts_LTK[place].to(logits_TE.device, torch.int64)
        num_own = self._num_missing_L[place]
        if num_own == 0:
            return given_TK, 0
        assert self._missing_LT is not None
        missing_T1 = self._missing_LT[place, :, None].to(given_TK.device)
        return torch.where(missing_T1, own(), given_TK), num_own

    def finish(self) -> None:
        """Raises ReplayError when the pass was to replay and some rows were never asked for."""
        if self._given is None:
            return
        expected = len(self._given.layers) * self._given.num_tokens
        if self.num_replayed + self.num_own != expected:
            unused = [layer for layer in self._given.layers if layer not in self._taken]
            raise ReplayError(
                f"replayed {self.num_replayed + self.num_own} rows of {expected} ({len(self._given.layers)} layers x "
                f"{self._given.num_tokens} tokens): no router asked for layers {_names(unused)}"
            )


@contextmanager
def record() -> Iterator[RoutingPass]:
    """Around one forward pass: the routers choose, and `routes()` of what this gives says what they chose."""
    with _entered(RoutingPass()) as routing:
        yield routing


@contextmanager
def replay(routes: Routes, *, missing: str = "refuse") -> Iterator[RoutingPass]:
    """Around one forward pass: the routers take `routes`, which hold this rank's layers and tokens (`Routes.cut`).

    missing: what becomes of missing rows, "refuse" or "own" (the router chooses; counted in num_own).
    Raises ReplayError for bad rows at entry, for a layer or a size that does not fit when its router runs, and for rows left over at exit.
    """
    with _entered(RoutingPass(routes, missing=missing)) as routing:
        yield routing
        routing.finish()


@contextmanager
def _entered(routing: RoutingPass) -> Iterator[RoutingPass]:
    token = _active.set(routing)
    try:
        yield routing
    finally:
        _active.reset(token)


def take_experts(layer: int, logits_TE: Tensor, top_k: int, own: Own) -> Tensor:
    """For a router in its forward pass: int64 [T, K], where its tokens go. That is `own()` unless a context or a recomputation knows it."""
    memories = _memories.get()
    known = next((memory.experts[layer] for memory in memories if memory.full), None)
    if known is not None:
        experts_TK = known.long()
    else:
        routing = _active.get()
        experts_TK = own() if routing is None else routing.take(layer, logits_TE, top_k, own)
    for memory in memories:
        if not memory.full:
            memory.experts[layer] = experts_TK.to(compact_dtype(logits_TE.shape[1]))
    return experts_TK


# --- Recomputation ----------------------------------------------------------------------------------------------------------------------


class _Memory:
    """The experts that a checkpointed stretch of layers took in its first run."""

    def __init__(self) -> None:
        self.experts: dict[int, Tensor] = {}  # layer -> [T, K], compact type
        self.full = False


# Context variables and not globals: autograd recomputes on threads of its own, where another microbatch's context must not be seen.
_active: ContextVar[RoutingPass | None] = ContextVar("routing of this forward pass", default=None)
_memories: ContextVar[tuple[_Memory, ...]] = ContextVar("of the checkpointed stretches around this layer", default=())


class _Remembering:
    """A checkpointed function whose routers take the same experts in every run. It lives as long as the graph that may run it again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.memory = function, _Memory()

    def __call__(self, *args: Any) -> Any:
        token = _memories.set((*_memories.get(), self.memory))
        try:
            return self.function(*args)
        finally:
            self.memory.full = True
            _memories.reset(token)


def remember_routes_in_checkpoints() -> None:
    """Make Megatron's `checkpoint` remember routes, once per process. Every way of recomputing whole layers or MoE layers ends there."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    known: Any = CheckpointFunction
    if getattr(known, "remembers_routes", False):
        return
    plain_forward = known.forward

    def forward(ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return plain_forward(ctx, _Remembering(run_function), distribute_saved_activations, *args)

    known.forward, known.remembers_routes = staticmethod(forward), True


def _names(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
