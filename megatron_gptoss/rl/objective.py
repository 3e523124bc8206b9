"""The policy's loss on one microbatch, put together: which log-probs can be used, correction, surrogate, entropy, KL, aggregation.

In: log-probs of the current, old, reference and engine's policies with advantages, for the trained tokens of this rank. Out: the loss as a
sum (the trainer divides it by the number of tokens of the whole update) and, detached, what diagnostics.py measures. It measures nothing.

Legend: N trained tokens of this rank, S sequences of the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_gptoss.rl.aggregate import UpdateTotals, token_scale
from megatron_gptoss.rl.correction import Correction, Recipe, correct, recipe
from megatron_gptoss.rl.kl import kl_estimate
from megatron_gptoss.rl.surrogates import Surrogate, cispo, gspo, ppo
from megatron_gptoss.rl.tokens import Tokens

if TYPE_CHECKING:
    from megatron_gptoss.config.schema import RlConfig


@dataclass(frozen=True)
class Objective:
    loss_sum: Tensor  # scalar with gradient
    usable_N: Tensor  # bool: every log-prob of the token is finite; the others are masked everywhere
    before_N: Tensor  # detached: the trainer's log-prob of the policy that sampled, i.e. before this step's updates; 0 where not usable
    engine_N: Tensor  # the engine's, 0 where not usable
    entropy_N: Tensor  # detached, 0 where not usable
    ratio_N: Tensor  # detached
    clipped_N: Tensor  # bool
    kl_ref_N: Tensor  # detached k3 estimate of KL(policy || reference), zeros without a reference
    correction: Correction


def correction_recipe(rl: RlConfig) -> Recipe:
    """What the configuration asks for, as `correct` wants it."""
    return recipe(
        rl.correction,
        cap=rl.correction_cap,
        floor=rl.correction_floor,
        reject_low=rl.reject_low,
        reject_high=rl.reject_high,
        veto=rl.correction_veto,
        normalize=rl.correction_normalize,
    )


def usable(*logps: Tensor | None) -> Tensor:
    """bool [N]: every log-prob that there is of a token is finite."""
    return torch.stack([logp_N.detach().isfinite() for logp_N in logps if logp_N is not None]).all(0)


def objective(
    rl: RlConfig,
    tokens: Tokens,
    totals: UpdateTotals,
    *,
    logp_N: Tensor,
    entropy_N: Tensor,
    old_logp_N: Tensor | None,
    engine_logp_N: Tensor,
    advantage_N: Tensor,
    ref_logp_N: Tensor | None = None,
) -> Objective:
    """loss_sum = sum_n c_n (w_n l_n - entropy_coef H_n + kl_coef KL_n), with c of aggregate.py, w of correction.py, l of surrogates.py.

    `old_logp_N` None: the update is on-policy, and the old log-prob is the current one, detached. Then the ratio is exactly 1 and nothing
    is clipped, however the forward pass rounds, for every surrogate (`require_on_policy` in diagnostics.py sees to it).

    A token with an infinite or NaN log-prob adds nothing: no loss, no gradient, no share in its sequence's ratio. It stays in the
    denominators, which were counted before any log-prob was known.
    """
    usable_N = usable(logp_N, engine_logp_N, old_logp_N, ref_logp_N)
    logp_N, engine_N = torch.where(usable_N, logp_N, 0.0), torch.where(usable_N, engine_logp_N, 0.0)
    entropy_N = torch.where(usable_N & entropy_N.detach().isfinite(), entropy_N, 0.0)
    before_N = logp_N.detach() if old_logp_N is None else torch.where(usable_N, old_logp_N, 0.0)

    how = correction_recipe(rl)
    correction = correct(how, before_N, engine_N, tokens, usable_N)
    surrogate = _surrogate(rl, logp_N, before_N, advantage_N, tokens, usable_N)
    weight_N = correction.weight_N / totals.weight_mean if how.normalize else correction.weight_N
    scale_N = token_scale(rl.aggregation, tokens, totals, length=rl.aggregation_length)

    def add_up(values_N: Tensor) -> Tensor:
        return values_N.sum() if scale_N is None else (scale_N.to(values_N.dtype) * values_N).sum()

    loss_sum = add_up(weight_N * surrogate.loss_N)
    if rl.entropy_coef != 0.0:
        loss_sum = loss_sum - rl.entropy_coef * add_up(entropy_N)
    kl_ref_N = torch.zeros_like(before_N)
    if ref_logp_N is not None:
        ref_N = torch.where(usable_N, ref_logp_N, 0.0)
        kl_ref_N = kl_estimate("k3", logp_N.detach(), ref_N)
        if rl.kl_coef != 0.0 and rl.kl_in == "loss":
            loss_sum = loss_sum + rl.kl_coef * add_up(kl_estimate(rl.kl_estimator, logp_N, ref_N, before_N))
    return Objective(
        loss_sum, usable_N, before_N, engine_N, entropy_N.detach(), surrogate.ratio_N, surrogate.clipped_N & usable_N, kl_ref_N, correction
    )


def _surrogate(rl: RlConfig, logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, tokens: Tokens, usable_N: Tensor) -> Surrogate:
    bounds = {"clip_low": rl.clip_low, "clip_high": rl.clip_high}
    if rl.surrogate == "gspo":
        return gspo(logp_N, old_N, advantage_N, tokens, usable_N, **bounds, dual_clip=rl.dual_clip)
    if rl.surrogate == "cispo":
        return cispo(logp_N, old_N, advantage_N, **bounds)
    return ppo(logp_N, old_N, advantage_N, **bounds, dual_clip=rl.dual_clip)
