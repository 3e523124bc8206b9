"""Whose choice of experts the passes over a minibatch follow: an engine's, an earlier pass's, or the routers' own; and how much of it.

In: microbatches with the engine's routes, or scores that remember theirs. Out: a context for each forward pass, cut to the layers and rows
of this rank; the counts of rows; and, after scoring, the routes of whole microbatches, the same on all ranks that share them.
model/replay.py says what happens inside such a context and in recomputation.

An update that follows a scoring pass takes the scored routes, which are the engine's wherever it had any, and what the routers chose in
their place elsewhere. So both passes route alike to the last row, padding included, on which the shapes of the experts' products depend.

Shape legend: L layers, T tokens of a microbatch, G tokens with padding, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.model.replay import Routes, RoutingPass, compact_dtype, record, replay, rows_of_rank
from megatron_gptoss.model.router import router_layers
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.trainer.how import TokenScores
from megatron_gptoss.types import Measure, MicroBatch


@dataclass(frozen=True)
class Place:
    """Which part of a microbatch's routes the routers of this rank ask for."""

    model: ModelConfig
    module: GptOssModel
    shape: ParallelShape
    device: torch.device

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return router_layers(self.module)

    def padded(self, num_tokens: int) -> int:
        return num_tokens + -num_tokens % self.shape.padding_multiple

    def rows(self, num_tokens: int) -> slice:
        groups = self.module.pg_collection
        # Megatron shares a layer's tokens out over the tensor ranks whenever there are several: sequence parallelism is always on.
        context, sequence = ((group.rank(), group.size()) for group in (groups.cp, groups.tp))
        return rows_of_rank(self.padded(num_tokens), context=context, sequence=sequence)

    def cut(self, routes: Routes, num_tokens: int) -> Routes:
        return routes.pad_to(self.padded(num_tokens)).cut(layers=self.layers, rows=self.rows(num_tokens))


class Routing:
    """The routing of the passes over one minibatch. `counts`: rows (a token in a layer) of this rank that were [taken over, own]; no
    padding."""

    def __init__(
        self, place: Place, minibatch: Sequence[MicroBatch], mode: str, scored: Sequence[TokenScores] | None = None, *, keep: bool = False
    ) -> None:
        """mode: "engine" or "scored", as in rl.router_replay. scored: of the same microbatches, when they were scored before. keep: for
        `whole`."""
        self.place, self.minibatch, self.mode, self.keep = place, minibatch, mode, keep
        self.scored = [None if s is None else s.routes for s in scored or [None] * len(minibatch)]
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.taken: dict[int, Routes] = {}

    @contextmanager
    def around(self, j: int) -> Iterator[None]:
        """Around the forward pass of microbatch j."""
        num_tokens = self.minibatch[j].tokens_T.numel()
        given = self.scored[j] or self._engines(j)
        if given is None:
            with record() as routing:
                yield
        else:
            with replay(self.place.cut(given, num_tokens).to(self.place.device), missing="own") as routing:
                yield
        if self.keep:
            self.taken[j] = routing.routes()
        self.counts += self._count(j, routing, given is not None)

    def _engines(self, j: int) -> Routes | None:
        return self.minibatch[j].routes if self.mode == "engine" else None

    def _count(self, j: int, routing: RoutingPass, replayed: bool) -> Tensor:
        num_tokens = self.minibatch[j].tokens_T.numel()
        rows = self.place.rows(num_tokens)
        padding = len(self.place.layers) * len(range(max(rows.start, num_tokens), rows.stop))
        of_padding = torch.tensor([padding, 0] if replayed else [0, padding])
        counts = torch.tensor([routing.num_replayed, routing.num_own]) - of_padding
        if self.mode == "engine" and self.scored[j] is not None:
            # What the engine lacked was chosen when it was scored.
            engines = self._engines(j)
            own = int(counts.sum()) if engines is None else int(self.place.cut(engines, num_tokens).missing_LT.sum())
            counts += torch.tensor([-own, own])
        return counts

    def whole(self) -> list[Routes]:
        """What every microbatch's last pass took, where it was kept: all layers and rows, padding included, on the CPU. Collective."""
        model = self.place.model
        empty = torch.zeros(0, dtype=compact_dtype(model.num_local_experts), device=self.place.device)
        wholes = []
        for j, batch in enumerate(self.minibatch):
            num_tokens = batch.tokens_T.numel()
            whole_LGK = empty.new_zeros(model.num_hidden_layers, self.place.padded(num_tokens), model.num_experts_per_tok)
            whole_LGK[list(self.place.layers), self.place.rows(num_tokens)] = self.taken[j].experts_LTK
            wholes.append(whole_LGK)
        everything = torch.cat([empty, *(whole_LGK.flatten() for whole_LGK in wholes)])
        groups = self.place.module.pg_collection
        for group in (groups.tp, groups.cp, groups.pp):  # each row is one rank's; the others hold zeros
            if group.size() > 1:
                dist.all_reduce(everything, group=group)
        parts = everything.cpu().split([whole_LGK.numel() for whole_LGK in wholes])
        return [
            Routes(part.view(whole_LGK.shape), tuple(range(model.num_hidden_layers)), model.num_local_experts)
            for part, whole_LGK in zip(parts, wholes, strict=True)
        ]


def routing_measures(counts: Tensor, device: torch.device) -> tuple[Measure, ...]:
    """For metrics.jsonl, from this rank's counts. Collective over the world: each row was one rank's."""
    counts = counts.to(device)
    dist.all_reduce(counts)
    replayed, own = counts.tolist()
    return (
        Measure("router/replayed_fraction", replayed / max(replayed + own, 1)),
        Measure("router/missing_rows", float(own)),
    )
