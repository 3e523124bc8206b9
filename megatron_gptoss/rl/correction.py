"""Rollout correction: the engine that sampled and the trainer that scores are two programs, and their log-probs differ.

In: log-probs of both for the trained tokens. Out: a detached weight for each token's loss, and which tokens were cut, masked or rejected.
Every method is a `Recipe` of the same few parts; docs/rollout_correction.md has formulas and sources. All arithmetic is in log space.

Legend: N trained tokens of this rank, S sequences of the microbatch. rho = trainer / engine: of a token, of a sequence (product over its
tokens), or geometric (the product's n-th root).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_gptoss.rl.surrogates import LOG_LIMIT
from megatron_gptoss.rl.tokens import Tokens

Level = Literal["", "token", "sequence", "geometric"]


@dataclass(frozen=True)
class Recipe:
    weigh: Level = ""  # rho of this level is the weight; "": weights of 1
    above: Literal["keep", "truncate", "mask"] = "keep"  # a weight above `cap`: as it is, lowered to it, or 0
    below: Literal["keep", "mask"] = "keep"  # a weight below `floor`: as it is, or 0
    reject: Level = ""  # tokens (or sequences) whose rho of this level is outside [reject_low, reject_high] get 0; "": none
    cap: float = 2.0
    floor: float = 0.5
    reject_low: float = 0.999
    reject_high: float = 1.001
    veto: float = 0.0  # sequences with a token whose rho is below this are rejected; 0: none
    normalize: bool = False  # divide by the mean weight of the update; see `weight_sums`


# The methods by name: config key rl.correction.
PRESETS: dict[str, Recipe] = {
    "none": Recipe(),
    "tis": Recipe(weigh="token", above="truncate"),
    "mis": Recipe(weigh="token", above="mask"),
    "icepop": Recipe(weigh="token", above="mask", below="mask"),
    "seq-is": Recipe(weigh="sequence"),
    "seq-tis": Recipe(weigh="sequence", above="truncate"),
    "seq-mis": Recipe(weigh="sequence", above="mask"),
    "geo-tis": Recipe(weigh="geometric", above="truncate"),
    "geo-mis": Recipe(weigh="geometric", above="mask", below="mask"),
    "geo-rs": Recipe(reject="geometric"),
    "geo-rs-tis": Recipe(weigh="token", above="truncate", reject="geometric"),
    "geo-rs-seq-tis": Recipe(weigh="sequence", above="truncate", reject="geometric"),
}


def recipe(name: str, **numbers: float) -> Recipe:
    """A preset with its numbers. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"unknown rollout correction {name!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name], **numbers)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Correction:
    """Weights for the loss, and what was done to which token."""

    weight_N: Tensor  # dtype of the trainer's log-probs, detached; 0 where masked, rejected or not usable
    truncated_N: Tensor  # bool: lowered to the cap
    masked_N: Tensor  # bool: 0 because of its own rho
    rejected_S: Tensor  # bool: 0 because of its sequence


def correct(how: Recipe, trainer_logp_N: Tensor, engine_logp_N: Tensor, tokens: Tokens, usable_N: Tensor) -> Correction:
    """Importance weights of the trainer's policy over the engine's. `usable_N`: where both log-probs are finite; nowhere else are they
    read. Weights are exact up to e^40 and cut there; bounds are compared in log space, where no gap is too large."""
    zero_N, no_S = torch.zeros_like(usable_N), torch.zeros_like(tokens.owned_S)
    log_rho_N = torch.where(usable_N, (trainer_logp_N - engine_logp_N).detach(), 0.0)
    levels = _levels(log_rho_N, tokens, usable_N, {how.weigh, how.reject})

    masked_N, rejected_S, truncated_N = zero_N, no_S, zero_N
    weight_N = torch.ones_like(log_rho_N)
    if how.weigh:
        log_w = levels[how.weigh]
        over, under = log_w > _log(how.cap, log_w), log_w < _log(how.floor, log_w)
        wrong = (over & (how.above == "mask")) | (under & (how.below == "mask"))
        if how.weigh == "token":
            masked_N = wrong
        else:
            rejected_S = wrong
        if how.above == "truncate":
            truncated_N = over if how.weigh == "token" else tokens.spread(over)
            log_w = torch.minimum(log_w, _log(how.cap, log_w))
        weight = torch.exp(log_w.clamp(max=LOG_LIMIT))
        weight_N = weight if how.weigh == "token" else tokens.spread(weight).to(log_rho_N.dtype)
    if how.reject:
        log_r = levels[how.reject]
        outside = (log_r < _log(how.reject_low, log_r)) | (log_r > _log(how.reject_high, log_r))
        if how.reject == "token":
            masked_N = masked_N | outside
        else:
            rejected_S = rejected_S | outside
    if how.veto > 0.0:
        rejected_S = rejected_S | (tokens.sum(usable_N & (log_rho_N < _log(how.veto, log_rho_N))) > 0)

    rejected_S = rejected_S & (tokens.count_S > 0)
    rejected_N = tokens.spread(rejected_S)
    masked_N = masked_N & usable_N & ~rejected_N  # each token has one reason
    truncated_N = truncated_N & usable_N & ~rejected_N & ~masked_N
    weight_N = torch.where(usable_N & ~masked_N & ~rejected_N, weight_N, 0.0)
    return Correction(weight_N, truncated_N, masked_N, rejected_S)


def _levels(log_rho_N: Tensor, tokens: Tokens, usable_N: Tensor, wanted: set[Level]) -> dict[Level, Tensor]:
    """log rho: [N] for token, float64 [S] for sequence and geometric, 0 for a sequence without usable tokens."""
    found: dict[Level, Tensor] = {"token": log_rho_N}
    if wanted & {"sequence", "geometric"}:
        found["sequence"] = tokens.sum(log_rho_N)
        found["geometric"] = found["sequence"] / tokens.sum(usable_N).clamp(min=1.0)
    return found


def _log(bound: float, like: Tensor) -> Tensor:
    return torch.log(torch.tensor(bound, dtype=like.dtype))


def weight_sums(how: Recipe, found: Correction, tokens: Tokens) -> Tensor:
    """float64 [2]: the sum and the number of the weights above 0, that add up over microbatches and ranks. Their quotient is the mean
    that `normalize` divides by. A weight of a whole sequence counts once, not once for each of its tokens."""
    kept_N = (found.weight_N > 0).double()
    if how.weigh in ("sequence", "geometric"):
        kept_S = tokens.sum(kept_N)
        mean_S = tokens.sum(found.weight_N) / kept_S.clamp(min=1.0)
        counted_S = (kept_S > 0) & tokens.owned_S
        return torch.stack([torch.where(counted_S, mean_S, 0.0).sum(), counted_S.sum().double()])
    return torch.stack([found.weight_N.double().sum(), kept_N.sum()])


def mean_weight(sums: Tensor) -> float:
    """1.0 when no weight is left, or all have vanished: nothing to normalise."""
    total, number = sums.tolist()
    return total / number if number and total else 1.0
