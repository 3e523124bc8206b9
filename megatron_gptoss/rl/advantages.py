"""From rewards to advantages: what is compared with what, and which groups are kept.

In: rewards of rollouts in groups, perhaps of single tokens, perhaps a critic's values. Out: an advantage for each trained token. It makes
no samples, and the recurrence over a sequence is in returns.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_gptoss.rl.returns import discounted, gae, whiten
from megatron_gptoss.types import RolloutGroup

NOTHING = torch.zeros(0, dtype=torch.float64)  # torch.cat takes no empty list
STD_FLOOR = 1e-4  # keeps a nearly uniform group from blowing up; the value of the demo recipe


@dataclass(frozen=True)
class AdvantageRule:
    """What the configuration says about advantages; the names are those of its keys."""

    advantage: str = "group"
    credit: str = "sequence"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten_advantages: bool = False
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    max_sequence_tokens: int = 0

    @property
    def whitens(self) -> bool:
        return self.whiten_advantages or self.advantage in ("reinforce++", "reinforce++-baseline")


@dataclass(frozen=True)
class Episode:
    """One rollout, as far as advantages are concerned. n is the number of its trained tokens."""

    reward: float  # for the whole, earned with the last token; shaping included
    turns: tuple[int, ...]  # trained tokens of each assistant turn; n in all
    token_rewards: tuple[float, ...] = ()  # [n] earned with each token besides, such as a KL penalty; (): none
    values: tuple[float, ...] = ()  # [n] what a critic expected before each token; (): no critic
    trained: bool = True  # False: counts in its group's statistics only

    @property
    def n(self) -> int:
        return sum(self.turns)

    def rewards(self) -> list[float]:
        """[n], the whole's at the end."""
        rewards = list(self.token_rewards) or [0.0] * self.n
        if rewards:
            rewards[-1] += self.reward
        return rewards

    def score(self) -> float:
        return math.fsum((self.reward, *self.token_rewards)) if self.token_rewards else self.reward


@dataclass
class Credited:
    """Of the trained episodes of a step, in order."""

    advantages: list[float | list[float]] = field(default_factory=list)  # one for all of an episode's tokens, or one for each
    targets: list[list[float]] = field(default_factory=list)  # what a critic should have said, nan where it learns nothing; [] without one


# -- within a group ----------------------------------------------------------------------------------------------------------------------


def comparisons(scores: Sequence[float], kind: str) -> list[tuple[float, float]]:
    """What each of a group's scores is measured against: (baseline, scale), for (score - baseline) / scale.

    group: mean and sample standard deviation (n-1) + 1e-4, as in GRPO's reference code (DeepSeekMath, arXiv:2402.03300)
    group-mean: the mean alone (Dr.GRPO, arXiv:2503.20783); so does reinforce++-baseline (arXiv:2501.03262)
    rloo: the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    reinforce++: nothing (Hu et al. 2025, arXiv:2501.03262); the whole step is whitened afterwards
    """
    n = len(scores)
    if kind == "reinforce++":
        return [(0.0, 1.0)] * n
    if n < 2:
        return [(score, 1.0) for score in scores]  # nothing to be compared with: an advantage of 0
    mean = math.fsum(scores) / n
    if kind in ("group-mean", "reinforce++-baseline"):
        return [(mean, 1.0)] * n
    if kind == "rloo":
        return [((math.fsum(scores) - score) / (n - 1), 1.0) for score in scores]
    if kind == "group":
        std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (n - 1))
        return [(mean, std + STD_FLOOR)] * n
    raise ValueError(f"unknown advantage {kind!r}")


def group_advantages(scores: Sequence[float], kind: str = "group") -> list[float]:
    """One advantage for each of a group's scores."""
    return [(score - baseline) / scale for score, (baseline, scale) in zip(scores, comparisons(scores, kind), strict=True)]


def is_uniform(group: RolloutGroup) -> bool:
    """True when all rewards are equal: every advantage is 0, the group carries no signal."""
    return len({r.reward for r in group.rollouts}) <= 1


@dataclass(frozen=True)
class Kept:
    """Which groups go on to training, and how many do not, by reason."""

    groups: tuple[RolloutGroup, ...]
    dropped_solved: int = 0  # uniform with a reward above 0: too easy
    dropped_failed: int = 0  # uniform with a reward of 0 or less: too hard

    @property
    def dropped_uniform(self) -> int:
        return self.dropped_solved + self.dropped_failed


def keep_informative(groups: Sequence[RolloutGroup], *, drop_uniform: bool) -> Kept:
    """Leave out groups without signal when asked to (DAPO's dynamic sampling, without drawing others in their place). What is dropped is
    counted. As in DAPO the task's rewards decide, before any shaping."""
    kept = tuple(g for g in groups if not (drop_uniform and is_uniform(g)))
    dropped = [g for g in groups if drop_uniform and is_uniform(g)]
    solved = sum(any(r.reward > 0 for r in g.rollouts) for g in dropped)
    return Kept(groups=kept, dropped_solved=solved, dropped_failed=len(dropped) - solved)


# -- over a step -------------------------------------------------------------------------------------------------------------------------


def credit(groups: Sequence[Sequence[Episode]], rule: AdvantageRule) -> Credited:
    """Advantages of every trained token of a step.

    Credit `sequence`: all of a rollout's tokens get what its whole score deserves in its group.
    Credit `token`: a token gets the discounted reward from it on, less its rollout's baseline.
    Credit `turn`: so do the tokens of a turn, with turns as steps; turn k is compared with turn k of the group's other rollouts. A turn
    that only one rollout reached has nothing to be compared with, and gets 0.
    `gae`: no groups; a token's (or turn's) reward and value against what follows.
    """
    if rule.advantage == "gae":
        found = _gae(groups, rule)
    else:
        by_credit: dict[str, Callable[[Sequence[Episode], AdvantageRule], list[float | list[float]]]]
        by_credit = {"sequence": _by_sequence, "turn": _by_turn, "token": _by_token}
        found = Credited()
        for group in groups:
            advantages = by_credit[rule.credit](group, rule)
            found.advantages += [a for a, episode in zip(advantages, group, strict=True) if episode.trained]
    if rule.whitens:
        numbers = [episode.n for group in groups for episode in group if episode.trained]
        flat = [x for a, n in zip(found.advantages, numbers, strict=True) for x in (a if isinstance(a, list) else [a] * n)]
        white = whiten(torch.tensor(flat, dtype=torch.float64))
        found.advantages = [part.tolist() for part in white.split(numbers)]
    return found


def _by_sequence(group: Sequence[Episode], rule: AdvantageRule) -> list[float | list[float]]:
    return list(group_advantages([episode.score() for episode in group], rule.advantage))


def _by_token(group: Sequence[Episode], rule: AdvantageRule) -> list[float | list[float]]:
    lengths = [episode.n for episode in group]
    rewards = torch.cat([NOTHING, *map(_token_rewards, group)])
    to_go = discounted(rewards, lengths, gamma=rule.gamma).split(lengths)
    against = comparisons([episode.score() for episode in group], rule.advantage)
    if len(group) < 2 and rule.advantage != "reinforce++":
        return [[0.0] * n for n in lengths]
    return [((own - baseline) / scale).tolist() for own, (baseline, scale) in zip(to_go, against, strict=True)]


def _by_turn(group: Sequence[Episode], rule: AdvantageRule) -> list[float | list[float]]:
    numbers = [len(episode.turns) for episode in group]
    rewards = torch.cat([NOTHING, *map(_turn_sums, group)])
    to_go = [part.tolist() for part in discounted(rewards, numbers, gamma=rule.gamma).split(numbers)]
    found: list[list[float]] = [[] for _ in group]
    for k in range(max(numbers, default=0)):
        there = [i for i, number in enumerate(numbers) if number > k]
        for i, advantage in zip(there, group_advantages([to_go[i][k] for i in there], rule.advantage), strict=True):
            found[i] += [advantage] * group[i].turns[k]
    return list(found)


def _turn_sums(episode: Episode) -> Tensor:
    """float64 [K]: the rewards of each turn."""
    rewards = _token_rewards(episode)
    return torch.stack([part.sum() for part in rewards.split(episode.turns)]) if episode.turns else rewards


def _gae(groups: Sequence[Sequence[Episode]], rule: AdvantageRule) -> Credited:
    """Over tokens, or over turns: then a turn's value is that of its first token, which alone is taught."""
    episodes = [episode for group in groups for episode in group if episode.trained]
    for episode in episodes:
        if len(episode.values) != episode.n:
            raise ValueError(f"generalized advantages need a value for each of {episode.n} trained tokens, not {len(episode.values)}")
    by_turn = rule.credit == "turn"
    lengths = [len(episode.turns) if by_turn else episode.n for episode in episodes]
    reward = torch.cat([NOTHING, *map(_turn_sums if by_turn else _token_rewards, episodes)])
    value = torch.cat([NOTHING, *map(_first_values if by_turn else _token_values, episodes)])
    advantage = gae(reward, value, lengths, gamma=rule.gamma, lam=rule.gae_lambda)
    found = Credited()
    for episode, own, target in zip(episodes, advantage.split(lengths), (advantage + value).split(lengths), strict=True):
        if not by_turn:
            found.advantages.append(own.tolist())
            found.targets.append(target.tolist())
            continue
        found.advantages.append([a for a, n in zip(own.tolist(), episode.turns, strict=True) for _ in range(n)])
        found.targets.append([x for t, n in zip(target.tolist(), episode.turns, strict=True) for x in (t, *[math.nan] * (n - 1))])
    return found


def _token_rewards(episode: Episode) -> Tensor:
    return torch.tensor(episode.rewards(), dtype=torch.float64)


def _token_values(episode: Episode) -> Tensor:
    return torch.tensor(episode.values, dtype=torch.float64)


def _first_values(episode: Episode) -> Tensor:
    starts = [sum(episode.turns[:k]) for k in range(len(episode.turns))]
    return torch.tensor([episode.values[start] for start in starts], dtype=torch.float64)
