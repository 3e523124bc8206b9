"""From rollout groups to training samples with advantages.

In: rollout groups, and the rule for advantages. Out: samples, in the order of the groups. Rollouts without a sampled token, or aborted
ones, give no sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from megatron_gptoss.rl.advantages import AdvantageRule, Credited, Episode, credit
from megatron_gptoss.rl.shaping import overlong_penalty
from megatron_gptoss.types import MicroBatch, Rollout, RolloutGroup, Sample, SampleScores

PerToken = Mapping[str, Sequence[float]]  # sample name -> one number for each trained token


def sample_name(rollout: Rollout) -> str:
    return f"{rollout.prompt.id}#{rollout.index}"


def is_trained(rollout: Rollout) -> bool:
    return rollout.stop_reason != "aborted" and any(rollout.sampled)


def by_sample(found: Iterable[tuple[MicroBatch, Tensor]]) -> dict[str, list[float]]:
    """What was found of the trained tokens [N] of each microbatch, by sample name, in the order of a sample's tokens."""
    sorted_out: dict[str, list[float]] = {}
    for batch, value_N in found:
        # The tokens of a sample are neighbours.
        counts = torch.bincount(batch.sample_N, minlength=len(batch.names)).tolist()
        for name, own in zip(batch.names, value_N.split(counts), strict=True):
            if own.numel():
                sorted_out.setdefault(name, []).extend(own.tolist())
    return sorted_out


def sample_scores(batches: Sequence[MicroBatch], logp: Sequence[Tensor]) -> list[SampleScores]:
    """Advantages and log-probs [N] of each microbatch, by sample."""
    advantages = by_sample(zip(batches, (batch.advantage_N for batch in batches), strict=True))
    logps = by_sample(zip(batches, logp, strict=True))
    return [SampleScores(name, tuple(each), tuple(logps[name])) for name, each in advantages.items()]


def make_samples(
    groups: Sequence[RolloutGroup], rule: AdvantageRule, *, token_rewards: PerToken | None = None, values: PerToken | None = None
) -> list[Sample]:
    """One sample per rollout that can be trained on. A group's statistics count all of its rollouts, also those that give no sample.

    `token_rewards`: what is earned with each trained token beside the rollout's reward, for the samples that have any. `values`: what a
    critic expected before each trained token, of every sample; they come back in the samples, with what it should have expected.
    """
    credited = credit_groups(groups, rule, token_rewards=token_rewards, values=values)
    trained = [rollout for group in groups for rollout in group.rollouts if is_trained(rollout)]
    samples = [_sample(rollout, advantage) for rollout, advantage in zip(trained, credited.advantages, strict=True)]
    if values is None or not credited.targets:
        return samples
    return [
        replace(sample, values=_spread(values[sample.name], sample.trained), value_targets=_spread(targets, sample.trained))
        for sample, targets in zip(samples, credited.targets, strict=True)
    ]


def credit_groups(
    groups: Sequence[RolloutGroup], rule: AdvantageRule, *, token_rewards: PerToken | None = None, values: PerToken | None = None
) -> Credited:
    """Advantages, and a critic's targets, of the rollouts that give samples, in order. `values`: a critic's, by sample name."""
    rewards, expected = token_rewards or {}, values or {}

    def episode(rollout: Rollout) -> Episode:
        name = sample_name(rollout)
        shaping = overlong_penalty(
            len(rollout.token_ids), limit=rule.max_sequence_tokens, buffer=rule.overlong_buffer_tokens, penalty=rule.overlong_penalty
        )
        return Episode(
            reward=rollout.reward + shaping,
            turns=turn_lengths(rollout.sampled),
            token_rewards=tuple(rewards.get(name, ())),
            values=tuple(expected.get(name, ())),
            trained=is_trained(rollout),
        )

    return credit([[episode(r) for r in group.rollouts] for group in groups], rule)


def turn_lengths(sampled: Sequence[bool]) -> tuple[int, ...]:
    """Sampled tokens of each assistant turn. Between two turns stand tokens that were not sampled."""
    return tuple(sum(1 for _ in run) for flag, run in groupby(sampled) if flag)


def _sample(rollout: Rollout, advantage: float | list[float]) -> Sample:
    rollout.check()
    return Sample(
        name=sample_name(rollout),
        token_ids=rollout.token_ids,
        trained=rollout.sampled,
        engine_logp=rollout.logp,
        advantage=0.0 if isinstance(advantage, list) else advantage,
        token_advantages=_spread(advantage, rollout.sampled) if isinstance(advantage, list) else (),
        routes=rollout.routes,
    )


def _spread(each: Sequence[float], trained: Sequence[bool]) -> tuple[float, ...]:
    """A number for each trained token, at its place in the sequence; 0.0 elsewhere."""
    coming = iter(each)
    return tuple(next(coming) if flag else 0.0 for flag in trained)
