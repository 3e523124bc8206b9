"""How far is the policy from the reference, token by token?

In: log-probs of both for tokens that the policy sampled. Out: an estimate of KL(policy || reference) a token. It weighs and adds nothing.

Legend: N trained tokens, d = log pi - log ref, nats.
"""

from __future__ import annotations

from torch import Tensor

from megatron_gptoss.rl.surrogates import LOG_LIMIT, safe_exp


def kl_estimate(kind: str, logp_N: Tensor, ref_logp_N: Tensor, old_logp_N: Tensor | None = None) -> Tensor:
    """k1, k2, k3 are those of Schulman's note "Approximating KL divergence" (2020):

    k1 = d                     unbiased, may be negative; as a loss its expected gradient is 0, so it belongs into the reward
    k2 = d^2 / 2               biased; as a loss its on-policy gradient is exactly that of KL
    k3 = exp(-d) + d - 1       unbiased, never negative; as a loss its gradient is that of KL(reference || policy)
    unbiased = r * k3          r = exp(logp - old), with gradient: value and gradient are those of KL(policy || reference) also off-policy
                               (DeepSeek-V3.2, arXiv:2512.02556). On-policy r is 1, and its gradient is what k3 lacks: the sum is d.

    `unbiased` needs `old_logp_N`. Gaps beyond e^40 are cut, so that no value is infinite. Raises ValueError for another kind.
    """
    gap_N = ref_logp_N.detach() - logp_N
    if kind == "k1":
        return -gap_N
    if kind == "k2":
        return gap_N.square() / 2
    if kind == "k3":
        return _k3(gap_N)
    if kind == "unbiased":
        if old_logp_N is None:
            raise ValueError("the unbiased estimate of KL needs the log-probs of the policy that sampled")
        return safe_exp(logp_N - old_logp_N.detach()) * _k3(gap_N)
    raise ValueError(f"unknown estimate of KL {kind!r}")


def _k3(gap_N: Tensor) -> Tensor:
    gap_N = gap_N.clamp(max=LOG_LIMIT)
    return gap_N.exp() - gap_N - 1.0
