"""Which loss does a trained token have, given how far the policy has moved since it was sampled?

In: current and old log-probs with advantages. Out: one loss a token, not yet weighted, averaged or corrected, and what was clipped.

Legend: N trained tokens of a microbatch. Log-probs in nats; only `logp_N` carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gptoss.rl.tokens import Tokens

# exp of a larger number, squared and added up over a step, leaves float32. A token that far from where it was sampled has no gradient.
LOG_LIMIT = 40.0


@dataclass(frozen=True)
class Surrogate:
    loss_N: Tensor  # with gradient
    ratio_N: Tensor  # detached
    clipped_N: Tensor  # bool: a bound decided this token's loss


def safe_exp(log_N: Tensor) -> Tensor:
    """exp that stays finite, forward and backward, for a gap of any size."""
    return torch.exp(log_N.clamp(-LOG_LIMIT, LOG_LIMIT))


def ppo(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Surrogate:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with separate bounds (DAPO's clip-higher, arXiv:2503.14476).

    loss = -min(r A, clip(r, 1 - low, 1 + high) A),   r = exp(logp - old)

    `dual_clip` = c > 1: where A < 0 the loss is at most -c A (Ye et al. 2020, arXiv:1912.09729), so a token that became far more likely
    than it was cannot rule the update. 0: off.
    """
    return _clipped(safe_exp(logp_N - old_logp_N.detach()), advantage_N, clip_low, clip_high, dual_clip)


def gspo(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    tokens: Tokens,
    usable_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071), in the stop-gradient form of its GSPO-token:

    s_n = sg[exp(mean over the sequence of (logp - old))] * exp(logp_n) / sg[exp(logp_n)], then clipped as `ppo` clips its ratio.

    The mean is over the sequence's usable tokens, wherever they are. Its gradient is that of the sequence ratio when all advantages of a
    sequence are equal, and no rank needs another's gradient.
    """
    gap_N = torch.where(usable_N, logp_N - old_logp_N, 0.0)
    mean_S = tokens.sum(gap_N) / tokens.sum(usable_N).clamp(min=1.0)
    log_ratio_N = tokens.spread(mean_S).to(logp_N.dtype) + (logp_N - logp_N.detach())
    return _clipped(safe_exp(log_ratio_N), advantage_N, clip_low, clip_high, dual_clip)


def cispo(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv:2506.13585): the clipped ratio weighs REINFORCE, so a clipped token keeps its gradient.

    loss = -sg[clip(r, 1 - low, 1 + high)] A logp. The paper has no lower bound: clip_low = 1.
    """
    ratio_N = safe_exp(logp_N.detach() - old_logp_N.detach())
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Surrogate(-(bounded_N * advantage_N) * logp_N, ratio_N, ratio_N != bounded_N)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    plain_N = ratio_N * advantage_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    objective_N = torch.minimum(plain_N, bounded_N)
    clipped_N = bounded_N < plain_N
    if dual_clip:
        floor_N = dual_clip * advantage_N
        floored_N = (advantage_N < 0) & (objective_N < floor_N)
        objective_N, clipped_N = torch.where(floored_N, floor_N, objective_N), clipped_N | floored_N
    return Surrogate(-objective_N, ratio_N.detach(), clipped_N.detach())
