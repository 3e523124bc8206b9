"""The critic's loss of one microbatch, a token at a time, and how good its values were.

In: values of now and of before the update, and the returns they should meet. Out: losses, not yet averaged, and what was clipped; of a
step's samples, two figures.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_gptoss.types import Sample


@dataclass(frozen=True)
class ValueLoss:
    loss_N: Tensor  # with gradient
    clipped_N: Tensor  # bool: the clipped value decided


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) (Schulman et al., OpenAI baselines' ppo2; arXiv:2005.12729 on its use).

    `clip` 0: 1/2 (V - R)^2. A return of nan marks a token that teaches nothing (turn credit: all but the first of a turn): its loss is 0.
    """
    taught_N = ~return_N.isnan()
    return_N = torch.where(taught_N, return_N, 0.0)
    value_N = torch.where(taught_N, value_N, 0.0)
    plain_N = (value_N - return_N).square()
    if not clip:
        return ValueLoss(plain_N / 2, torch.zeros_like(taught_N))
    old_N = torch.where(taught_N, old_value_N.detach(), 0.0)
    near_N = torch.maximum(torch.minimum(value_N, old_N + clip), old_N - clip)
    bounded_N = (near_N - return_N).square()
    return ValueLoss(torch.maximum(plain_N, bounded_N) / 2, (bounded_N > plain_N).detach())


@dataclass(frozen=True)
class ValueFigures:
    mean: float  # of the values
    explained_variance: float  # 1 - Var(target - value) / Var(target): 1 is perfect, 0 no better than a constant; 0 where targets are equal


def value_figures(samples: Sequence[Sample]) -> ValueFigures:
    """Of a step's values, before the critic learns from it. Tokens that teach nothing are left out."""
    taught = [
        (value, target)
        for sample in samples
        for value, target, trained in zip(sample.values, sample.value_targets, sample.trained, strict=True)
        if trained and not math.isnan(target)
    ]
    if not taught:
        return ValueFigures(0.0, 0.0)
    value_N, target_N = torch.tensor(taught, dtype=torch.float64).unbind(1)
    spread, left = float(target_N.var(correction=0)), float((target_N - value_N).var(correction=0))
    return ValueFigures(float(value_N.mean()), 1 - left / spread if spread > 0 else 0.0)
