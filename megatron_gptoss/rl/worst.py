"""On which tokens do trainer and engine disagree most?

In: what objective.py left of each microbatch. Out: the few tokens with the largest gaps, by name of their sample and place, so that the
caller can add the text. Nothing here touches the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_gptoss.rl.objective import Objective
from megatron_gptoss.rl.tokens import Tokens
from megatron_gptoss.types import MicroBatch, WorstToken

NUM_WORST = 8


def worst_rows(found: Objective, tokens: Tokens, microbatch: int) -> Tensor:
    """float64 [K, 6], K <= NUM_WORST: gap, microbatch, sample, position, trainer's and engine's log-prob. Stays on the device: no wait."""
    gap_N = torch.where(found.usable_N, (found.before_N - found.engine_N).double().abs(), -1.0)
    place_K = gap_N.topk(min(NUM_WORST, gap_N.numel())).indices
    columns = (gap_N, torch.full_like(gap_N, microbatch), tokens.sample_N, tokens.position_N, found.before_N, found.engine_N)
    return torch.stack([column[place_K].double() for column in columns], dim=1)


def worst_tokens(rows: Sequence[Tensor], batches: Sequence[MicroBatch]) -> list[WorstToken]:
    """The worst of all microbatches, by name."""
    found = []
    for gap, j, sample, position, trainer, engine in torch.cat(list(rows)).tolist() if rows else []:
        if gap < 0.0:
            continue  # not usable; stood in because there was nothing else
        batch, s, place = batches[int(j)], int(sample), int(position)
        token = int(batch.tokens_T[int(batch.cu_seqlens[s]) + place])
        found.append(WorstToken(batch.names[s], place, token, trainer, engine))
    return worst_of(found)


def worst_of(tokens: Iterable[WorstToken]) -> list[WorstToken]:
    """The largest gaps, each token once however many ranks report it; ties by name and place, so that the order is always the same."""
    unique = {(t.name, t.position): t for t in tokens}
    return sorted(unique.values(), key=lambda t: (-abs(t.trainer_logp - t.engine_logp), t.name, t.position))[:NUM_WORST]
