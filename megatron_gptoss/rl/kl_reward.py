"""What does each token pay for its distance to the reference, when KL is taken off the rewards?

In: packed microbatches with what the policy and the reference said of their trained tokens, before any update. Out: by sample name a reward
for each trained token, not above 0 for k3, of either sign for k1. It makes no advantages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_gptoss.rl.kl import kl_estimate
from megatron_gptoss.rl.samples import by_sample
from megatron_gptoss.types import MicroBatch


def kl_rewards(scored: Iterable[tuple[MicroBatch, Tensor, Tensor]], *, estimator: str, coef: float) -> dict[str, list[float]]:
    """`scored`: microbatch, policy's and reference's log-probs [N]. A token with one that is not finite pays nothing."""

    def paid(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
        usable_N = logp_N.isfinite() & ref_logp_N.isfinite()
        return -coef * kl_estimate(estimator, torch.where(usable_N, logp_N, 0.0), torch.where(usable_N, ref_logp_N, 0.0)).double()

    return by_sample((batch, paid(logp_N, ref_logp_N)) for batch, logp_N, ref_logp_N in scored)
