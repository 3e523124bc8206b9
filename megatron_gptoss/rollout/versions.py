"""Which policy sampled which token: the record of a rollout, read and added up.

In: policy versions in the order of the sampled tokens. Out: runs of them (`VersionRun`), their form in the archive, and how old they are
when they are trained. It corrects nothing; rl/correction.py does, token by token, from the log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_gptoss.types import PolicyVersion, Rollout, VersionRun


def runs_of(versions: Iterable[tuple[PolicyVersion, int]]) -> tuple[VersionRun, ...]:
    """(version, sampled tokens) in their order -> the shortest record. Turns without a token leave no trace."""
    some = [(version, count) for version, count in versions if count]
    return tuple(VersionRun(version, sum(n for _, n in run)) for version, run in groupby(some, key=lambda each: each[0]))


def token_versions(rollout: Rollout) -> Iterator[PolicyVersion]:
    """One for each sampled token."""
    return (run.version for run in rollout.versions for _ in range(run.num_tokens))


def oldest(rollouts: Iterable[Rollout]) -> PolicyVersion | None:
    """None when nothing was sampled."""
    return min((run.version for rollout in rollouts for run in rollout.versions), default=None)


def lags(rollouts: Sequence[Rollout], trained_from: PolicyVersion) -> tuple[float, int]:
    """Mean over sampled tokens, and the largest: policy versions between sampling and the update that starts from `trained_from`."""
    runs = [(trained_from - run.version, run.num_tokens) for rollout in rollouts for run in rollout.versions]
    tokens = sum(count for _, count in runs)
    return (sum(lag * count for lag, count in runs) / tokens, max(lag for lag, _ in runs)) if tokens else (0.0, 0)


def continued_turns(rollout: Rollout) -> int:
    """Assistant turns that one policy began and another went on with."""
    versions = token_versions(rollout)
    turns = [[next(versions) for _ in turn] for flag, turn in groupby(rollout.sampled) if flag]
    return sum(len(set(turn)) > 1 for turn in turns)


def versions_to_json(versions: Sequence[VersionRun]) -> list[list[int]]:
    return [[run.version, run.num_tokens] for run in versions]


def versions_from_json(value: Sequence[Any], sampled: Sequence[bool]) -> tuple[VersionRun, ...]:
    """Archives written before rollouts ran ahead have one version an assistant turn, the last turn perhaps without a token.

    Raises TypeError or ValueError for what is no such value.
    """
    if any(isinstance(each, int) for each in value):
        turns = [sum(turn) for flag, turn in groupby(sampled) if flag]
        if len(turns) not in (len(value), len(value) - 1):
            raise ValueError(f"{len(value)} policy versions for {len(turns)} assistant turns")
        return runs_of(zip(value, turns, strict=False))
    return tuple(VersionRun(version, count) for version, count in value)
