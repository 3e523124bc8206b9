"""From rewards to advantages, group by group.

In: rewards of one group. Out: one advantage per rollout, the same for each of its tokens. Which groups are kept is decided here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gptoss.types import RolloutGroup

STD_FLOOR = 1e-4  # keeps a nearly uniform group from blowing up; the value of the demo recipe


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool = True) -> list[float]:
    """Advantages of one group, `(R - mean) / (std + 1e-4)`.

    `std` is the sample standard deviation (n-1), as in GRPO's reference code (DeepSeekMath, arXiv:2402.03300); without the division this is
    Dr.GRPO's form (arXiv:2503.20783). A group of one rollout has nothing to be compared with and gets 0.
    """
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    mean = math.fsum(rewards) / n
    centred = [r - mean for r in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
    return [c / (std + STD_FLOOR) for c in centred]


def is_uniform(group: RolloutGroup) -> bool:
    """True when all rewards are equal: every advantage is 0, the group carries no signal."""
    return len({r.reward for r in group.rollouts}) <= 1


@dataclass(frozen=True)
class Kept:
    """Which groups go on to training, and how many do not, by reason."""

    groups: tuple[RolloutGroup, ...]
    dropped_uniform: int


def keep_informative(groups: Sequence[RolloutGroup], *, drop_uniform: bool) -> Kept:
    """Leave out groups without signal when asked to. What is dropped is counted."""
    kept = tuple(g for g in groups if not (drop_uniform and is_uniform(g)))
    return Kept(groups=kept, dropped_uniform=len(groups) - len(kept))
