"""From rollout groups with advantages to training samples.

In: rollout groups. Out: samples, in the order of the groups. Rollouts without a sampled token, or aborted ones, give no sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gptoss.rl.advantages import group_advantages
from megatron_gptoss.types import RolloutGroup, Sample


def make_samples(groups: Sequence[RolloutGroup], *, divide_by_std: bool) -> list[Sample]:
    """One sample per rollout that can be trained on. The group's statistics count all of its rollouts, also those that give no sample."""
    samples = []
    for group in groups:
        advantages = group_advantages([r.reward for r in group.rollouts], divide_by_std=divide_by_std)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            if rollout.stop_reason == "aborted" or not any(rollout.sampled):
                continue
            rollout.check()
            samples.append(
                Sample(
                    name=f"{rollout.prompt.id}#{rollout.index}",
                    token_ids=rollout.token_ids,
                    trained=rollout.sampled,
                    engine_logp=rollout.logp,
                    advantage=advantage,
                )
            )
    return samples
