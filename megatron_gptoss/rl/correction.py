"""Rollout correction: the engine that sampled and the trainer that scores are two programs, and their log-probs differ.

In: log-probs of both for the trained tokens. Out: detached importance weights. Here are `none` and `tis`; the family grows later.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Weights for the loss, and which of them were cut."""

    weight_N: Tensor  # float32, detached
    truncated_N: Tensor  # bool


def correct(kind: str, trainer_logp_N: Tensor, engine_logp_N: Tensor, *, cap: float) -> Correction:
    """Importance weights of the trainer's policy over the engine's.

    `tis`: token-level truncated importance sampling, w = min(exp(trainer - engine), cap) (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"). The exponent is capped before exp, so a gap of any size stays finite.
    `none`: ones.

    Raises ValueError for another kind.
    """
    if kind == "none":
        return Correction(torch.ones_like(trainer_logp_N), torch.zeros_like(trainer_logp_N, dtype=torch.bool))
    if kind != "tis":
        raise ValueError(f"unknown rollout correction {kind!r}")
    log_ratio_N = (trainer_logp_N - engine_logp_N).detach()
    log_cap = torch.log(torch.tensor(cap, dtype=log_ratio_N.dtype))
    return Correction(torch.exp(torch.minimum(log_ratio_N, log_cap)), log_ratio_N > log_cap)
