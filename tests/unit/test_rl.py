"""Laws of what stands around the loss: which groups are kept, which rollouts give samples, and the table of parity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.rl.advantages import AdvantageRule, keep_informative
from megatron_gptoss.rl.losses import nll_loss
from megatron_gptoss.rl.parity import gap_by_position, within
from megatron_gptoss.rl.samples import credit_groups, make_samples, turn_lengths
from megatron_gptoss.rl.shaping import overlong_penalty
from megatron_gptoss.rollout.versions import runs_of
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup


def rollout(reward: float, index: int = 0, *, stop: str = "final", sampled=(False, True, True)) -> Rollout:
    return Rollout(
        prompt=Prompt("p/1", "arithmetic", "1+1", "2"), index=index, token_ids=tuple(range(5, 5 + len(sampled))), sampled=sampled,
        logp=tuple(-0.5 if s else 0.0 for s in sampled), versions=runs_of([(0, sum(sampled))]), num_tool_calls=0,
        stop_reason=stop, answer="2", reward=reward, reward_parts=(),
    )  # fmt: skip


def group(*rewards: float) -> RolloutGroup:
    return RolloutGroup(Prompt("p/1", "arithmetic", "1+1", "2"), tuple(rollout(r, i) for i, r in enumerate(rewards)))


class TestGroups:
    def test_uniform_groups_are_dropped_and_counted_by_what_they_were(self):
        kept = keep_informative([group(1, 1), group(0, 1), group(0, 0), group(0, 0)], drop_uniform=True)
        assert [[r.reward for r in g.rollouts] for g in kept.groups] == [[0, 1]]
        assert (kept.dropped_uniform, kept.dropped_solved, kept.dropped_failed) == (3, 1, 2)
        assert keep_informative([group(1, 1)], drop_uniform=False).dropped_uniform == 0

    def test_aborted_rollouts_count_for_the_mean_but_are_not_trained(self):
        g = RolloutGroup(Prompt("p/1", "a", "", ""), (rollout(1.0, 0), rollout(0.0, 1, stop="aborted"), rollout(0.0, 2)))
        samples = make_samples([g], AdvantageRule("group-mean"))
        assert [s.name for s in samples] == ["p/1#0", "p/1#2"]
        assert samples[0].advantage == pytest.approx(2 / 3)

    def test_whitening_does_not_see_rollouts_that_are_not_trained(self):
        g = RolloutGroup(Prompt("p/1", "a", "", ""), (rollout(1.0, 0), rollout(0.0, 1), rollout(50.0, 2, stop="aborted")))
        a, b = make_samples([g], AdvantageRule("reinforce++"))
        # four tokens of 1, 1, 0, 0: mean 1/2, sample variance 1/3
        assert a.token_advantages == pytest.approx((0.0, 0.75**0.5, 0.75**0.5))
        assert b.token_advantages == pytest.approx((0.0, -(0.75**0.5), -(0.75**0.5)))


class TestTokens:
    def test_a_turn_is_a_run_of_sampled_tokens(self):
        assert turn_lengths((False, True, True, False, False, True, False)) == (2, 1)
        assert turn_lengths((False,)) == ()

    def test_rewards_of_single_tokens_reach_the_right_tokens(self):
        two_turns = rollout(1.0, 0, sampled=(False, True, False, True, True))
        other = rollout(0.0, 1, sampled=(False, True, False, False, False))
        g = RolloutGroup(Prompt("p/1", "a", "", ""), (two_turns, other))
        rule = AdvantageRule("group-mean", credit="token")
        a, b = make_samples([g], rule, token_rewards={"p/1#0": [-0.1, -0.2, -0.3]})
        # scores 0.4 and 0: baseline 0.2; from each token on: 0.4, 0.5, 0.7
        assert a.token_advantages == pytest.approx((0.0, 0.2, 0.0, 0.3, 0.5))
        assert b.token_advantages == pytest.approx((0.0, -0.2, 0.0, 0.0, 0.0))

    def test_a_critics_targets_come_with_the_advantages(self):
        g = RolloutGroup(Prompt("p/1", "a", "", ""), (rollout(1.0, 0),))
        found = credit_groups([g], AdvantageRule("gae", credit="token", gae_lambda=0.5), values={"p/1#0": [0.2, 0.6]})
        # deltas 0.6 - 0.2 and 1 - 0.6; advantages 0.4 + 0.5 * 0.4 and 0.4
        assert found.advantages == [pytest.approx([0.6, 0.4])]
        assert found.targets == [pytest.approx([0.8, 1.0])]


def test_overlong_punishment_by_hand():
    at = lambda n: overlong_penalty(n, limit=100, buffer=20, penalty=0.5)  # noqa: E731
    assert [at(n) for n in (10, 80, 85, 100, 120)] == [0.0, 0.0, -0.125, -0.5, -0.5]
    assert overlong_penalty(1000, limit=100, buffer=0) == 0.0


@settings(max_examples=1000, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 250), st.floats(0, 5))
def test_overlong_punishment_twin(length, limit, buffer, penalty):
    """The three cases of DAPO's equation 13."""
    expected = 0.0 if length <= limit - buffer else ((limit - buffer) - length) / buffer if length <= limit else -1.0
    assert overlong_penalty(length, limit=limit, buffer=buffer, penalty=penalty) == pytest.approx(penalty * expected)


def test_overlong_punishment_is_part_of_what_is_compared():
    g = RolloutGroup(Prompt("p/1", "a", "", ""), (rollout(1.0, 0), rollout(1.0, 1, sampled=(False, *[True] * 9))))
    rule = AdvantageRule("group-mean", overlong_buffer_tokens=4, max_sequence_tokens=12)
    assert [s.advantage for s in make_samples([g], rule)] == [0.25, -0.25]  # ten tokens of twelve: half way into the buffer


def test_nll():
    assert nll_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0])).item() == 3.0


class TestParity:
    def test_gaps_land_in_their_bins_and_nan_is_outside(self):
        rows = gap_by_position([0, 3, 4, 9], [-1.0, -1.0, -1.0, -1.0], [-1.0, -1.25, -1.5, -1.0], edges=[0, 4, 8])
        assert [(r.first, r.last, r.tokens, r.max) for r in rows] == [(0, 3, 2, 0.25), (4, 7, 1, 0.5), (8, 9, 1, 0.0)]
        assert within(rows, 0.5)
        assert not within(rows, 0.49)
        assert not within(gap_by_position([0, 0], [float("nan"), 0.0], [0.0, 0.0], edges=[0]), 1e9)
