"""How often does a policy succeed when it may try k times, and how sure is that?

In: successes of n rollouts for each of several prompts. Out: pass@k and means, each with its standard error over prompts. It samples
nothing, and what a success is was decided before. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    value: float
    error: float  # one standard error over prompts; nan where a single prompt leaves it unknown

    def words(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}" if math.isfinite(self.error) else f"{self.value:.3f}"


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the share of the k-subsets of n rollouts, c of them successes, that hold a success.

    Over rollouts its mean is 1 - (1 - p)^k for a prompt that succeeds with probability p, which 1 - (1 - c/n)^k is not (Chen et al. 2021,
    arXiv:2107.03374). Whole numbers until the one division, so nothing cancels or overflows. ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes in {n} rollouts: it needs 0 <= successes <= rollouts and 1 <= k <= rollouts")
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def over_prompts(values: Sequence[float]) -> Estimate:
    """The mean of one value for each prompt, and the standard error of that mean.

    Rollouts of one prompt are not independent of each other, prompts are: so prompts are the units, and more rollouts of the same prompts
    make the error no smaller than the prompts' own differences allow. ValueError without a prompt.
    """
    if not values:
        raise ValueError("a mean over prompts needs a prompt")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n))


def pass_rates(successes: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[int, Estimate]:
    """k -> pass@k over prompts, from (rollouts, successes) of each prompt."""
    return {k: over_prompts([pass_at_k(n, c, k) for n, c in successes]) for k in ks}


def unseen_share(num_prompts: int) -> float:
    """What a share may still be, with 95 % confidence, that did not occur in any of so many prompts: the p of (1 - p)^n = 0.05, about 3/n.

    For when all prompts came out alike and the standard error is 0, which is not what one knows.
    """
    return 1.0 - 0.05 ** (1.0 / num_prompts)
