"""The policy loss of one microbatch, as sums over its trained tokens.

In: current, old and engine log-probs with advantages. Out: the summed loss (the trainer divides by the number of tokens of the whole step,
so the loss does not depend on the packing) and per-token values for the diagnostics.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    loss_sum: Tensor  # scalar with gradient, nats-weighted sum over N
    ratio_N: Tensor  # detached
    clipped_N: Tensor  # bool: the clipped branch of the surrogate was the one that counted
    kl_ref_N: Tensor  # detached k3 estimate of KL(policy || reference), zeros without a reference


def ppo_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    entropy_N: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logp_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017) with separate bounds (DAPO, arXiv:2503.14476), weighted per token by the rollout correction.

    loss = sum_n  w_n * -min(r_n A_n, clip(r_n, 1-low, 1+high) A_n)  -  entropy_coef * H_n  +  kl_coef * k3_n,   r_n = exp(logp_n - old_n)

    All inputs [N]; `old_logp_N`, `advantage_N` and `weight_N` carry no gradient. The KL term is the k3 estimator of Schulman's note
    "Approximating KL divergence": exp(ref - logp) - (ref - logp) - 1.
    """
    ratio_N = torch.exp(logp_N - old_logp_N.detach())
    clipped_ratio_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_N = ratio_N * advantage_N
    bounded_N = clipped_ratio_N * advantage_N
    loss_sum = -(weight_N * torch.minimum(plain_N, bounded_N)).sum()
    if entropy_coef != 0.0:
        if entropy_N is None:
            raise ValueError("an entropy bonus needs the entropies")
        loss_sum = loss_sum - entropy_coef * entropy_N.sum()
    kl_ref_N = torch.zeros_like(logp_N)
    if ref_logp_N is not None:
        gap_N = ref_logp_N.detach() - logp_N
        kl_ref_N = torch.exp(gap_N) - gap_N - 1.0
        if kl_coef != 0.0:
            loss_sum = loss_sum + kl_coef * kl_ref_N.sum()
    return PolicyLoss(loss_sum, ratio_N.detach(), (bounded_N < plain_N).detach(), kl_ref_N.detach())


def nll_loss(logp_N: Tensor, weight_N: Tensor) -> Tensor:
    """Negative log-likelihood summed over N: the warm start's loss."""
    return -(weight_N * logp_N).sum()
