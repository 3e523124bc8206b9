"""Which sequence, which place and which assistant turn does each trained token belong to?

In: a packed microbatch, and which of its predictions this rank makes. Out: `Tokens`, from which everything that is added up over a sequence
is made, so that it does not depend on packing, and under context parallelism not on where a sequence was cut. No log-probs, no rewards.

Legend: N trained tokens of this rank, S sequences of the microbatch (padding or filler included: they have no trained token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_gptoss.types import MicroBatch

Across = Callable[[Tensor], Tensor]  # adds a tensor up over the ranks that hold other tokens of the same sequences


def alone(x: Tensor) -> Tensor:
    """One rank holds whole sequences."""
    return x


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of one microbatch on one rank, in the order of the packed stream: those of a sequence are neighbours."""

    sample_N: Tensor  # int64, 0..S-1, never falling
    position_N: Tensor  # int64, place of the token in its sequence; the first token of a sequence, never trained, has 0
    turn_N: Tensor  # int64, assistant turn in its sequence, from 0
    here_S: Tensor  # int64, how many of each sequence's trained tokens this rank has
    count_S: Tensor  # int64, how many there are on all ranks
    owned_S: Tensor  # bool, this rank has the sequence's first trained token, and counts it for all
    across: Across = alone

    @property
    def num_sequences(self) -> int:
        return self.count_S.numel()

    def sum(self, values_N: Tensor) -> Tensor:
        """float64 [S]: sums over whole sequences, on all ranks. 0 for a sequence without tokens. No gradient.

        segment_reduce adds in order, so the same tokens give the same bits wherever they were packed. Its checks would wait for the GPU.
        """
        values_N = values_N.detach().double()
        if values_N.numel() == 0:
            return self.across(values_N.new_zeros(self.num_sequences))
        return self.across(torch.segment_reduce(values_N, "sum", lengths=self.here_S, initial=0.0, unsafe=True))

    def spread(self, values_S: Tensor) -> Tensor:
        """[N]: to each token its sequence's value."""
        return values_S[self.sample_N]

    def to(self, device: torch.device | str, across: Across = alone) -> Tokens:
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved, across=across)


def tokens_of(batch: MicroBatch, mine_M: Tensor | None = None) -> Tokens:
    """`mine_M`: which of the microbatch's predictions this rank makes, ascending; None: all of them.

    A turn is a run of trained tokens without a gap: the engine samples a turn as a whole, and between two turns stand the tool's words.
    """
    owner_N, S, total = batch.sample_N, len(batch.names), batch.sample_N.numel()
    if total and bool((owner_N.diff() < 0).any()):
        raise ValueError("the trained tokens of a microbatch must come sequence by sequence")
    count_S = torch.bincount(owner_N, minlength=S)
    first_S = count_S.cumsum(0) - count_S  # index of each sequence's first trained token
    begins_N = torch.ones(total, dtype=torch.bool)
    begins_N[1:] = batch.predict_N[1:] != batch.predict_N[:-1] + 1  # across sequences too: a sequence's first token is never predicted
    run_N = begins_N.cumsum(0) - 1
    turn_N = run_N - run_N[first_S.clamp(max=max(total - 1, 0))][owner_N] if total else run_N
    position_N = batch.positions_T[batch.predict_N] + 1
    mine = torch.arange(total) if mine_M is None else mine_M
    return Tokens(
        sample_N=owner_N[mine],
        position_N=position_N[mine],
        turn_N=turn_N[mine],
        here_S=torch.bincount(owner_N[mine], minlength=S),
        count_S=count_S,
        owned_S=torch.isin(first_S, mine) & (count_S > 0),
    )
