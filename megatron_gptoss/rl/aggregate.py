"""What does one token weigh in the loss of an update?

In: which sequences the tokens belong to, and how many tokens and sequences the whole update has, counted before it begins. Out: a factor
for each token's loss. As the counts are those of the whole update, the loss does not depend on packing, microbatches or ranks.

Legend: N trained tokens of this rank, S sequences of the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gptoss.rl.tokens import Tokens


@dataclass(frozen=True)
class UpdateTotals:
    """Of one optimizer update, over all its microbatches and ranks. Tokens that are masked later stay counted."""

    tokens: float
    sequences: float  # with at least one trained token
    weight_mean: float = 1.0  # of the correction's weights, when they are to be normalised


def count(batches: Iterable[Tokens]) -> Tensor:
    """float64 [2]: tokens and sequences of this rank's microbatches; adds up over ranks."""
    found = [torch.stack([t.here_S.sum(), t.owned_S.sum()]) for t in batches]
    return torch.stack(found).sum(0).double() if found else torch.zeros(2, dtype=torch.float64)


def token_scale(kind: str, tokens: Tokens, totals: UpdateTotals, *, length: int = 0) -> Tensor | None:
    """float64 [N] factors c with loss = (1 / tokens) sum_n c_n l_n; None for factors of 1. The trainer divides by the tokens in any case.

    token-mean:     mean over all tokens of the update (DAPO, arXiv:2503.14476)
    sequence-mean:  mean over sequences of the mean over a sequence's tokens (GRPO, arXiv:2402.03300; GSPO)
    sequence-sum:   mean over sequences of the sum over a sequence's tokens, divided by the constant `length` (Dr.GRPO, arXiv:2503.20783)

    Raises ValueError for another kind, or for sequence-sum without a length.
    """
    if kind == "token-mean":
        return None
    each = totals.tokens / max(totals.sequences, 1.0)
    if kind == "sequence-mean":
        return tokens.spread(each / tokens.count_S.double().clamp(min=1.0))
    if kind == "sequence-sum":
        if length < 1:
            raise ValueError("sequence-sum divides by a constant length, which must be at least 1")
        return torch.full(tokens.sample_N.shape, each / length, dtype=torch.float64, device=tokens.sample_N.device)
    raise ValueError(f"unknown aggregation {kind!r}")
