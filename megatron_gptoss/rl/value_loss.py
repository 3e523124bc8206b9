"""The critic's loss of one microbatch, a token at a time.

In: values of now and of before the update, and the returns they should meet. Out: losses, not yet averaged, and what was clipped.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
