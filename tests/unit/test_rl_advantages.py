"""Advantages: values worked by hand, and twins in plain Python on 1,000 random steps, single rollouts and empty ones included."""

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.rl.advantages import AdvantageRule, Episode, credit, group_advantages
from megatron_gptoss.rl.returns import discounted, gae, whiten
from tests.helpers import rl_twins as twin
from tests.helpers.rl_twins import t

THOUSAND = settings(max_examples=1000, derandomize=True, deadline=None, database=None)
KINDS = ["group", "group-mean", "rloo", "reinforce++", "reinforce++-baseline"]
numbers = st.floats(-10, 10)


class TestGroups:
    def test_by_hand(self):
        # rewards 1,0,0,0: mean 1/4, sample variance (9/16 + 3/16)/3 = 1/4, std 1/2
        rewards = [1.0, 0.0, 0.0, 0.0]
        assert group_advantages(rewards, "group") == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3)
        assert group_advantages(rewards, "group-mean") == [0.75, -0.25, -0.25, -0.25]
        assert group_advantages(rewards, "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
        assert group_advantages(rewards, "reinforce++") == rewards

    @THOUSAND
    @given(st.lists(numbers, min_size=1, max_size=16), st.sampled_from(KINDS))
    def test_twin(self, rewards, kind):
        assert group_advantages(rewards, kind) == pytest.approx(twin.compared(rewards, kind), rel=1e-9, abs=1e-9)

    @given(st.lists(numbers, min_size=2, max_size=16), st.sampled_from(["group-mean", "rloo"]))
    def test_sum_is_zero_and_a_shift_changes_nothing(self, rewards, kind):
        a = group_advantages(rewards, kind)
        assert abs(sum(a)) < 1e-9
        assert group_advantages([r + 3.0 for r in rewards], kind) == pytest.approx(a, abs=1e-9)

    @pytest.mark.parametrize("kind", KINDS[:3])
    def test_a_group_of_one_has_no_signal_and_one_of_none_none(self, kind):
        assert group_advantages([1.0], kind) == [0.0]
        assert group_advantages([], kind) == []

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="unknown advantage 'grpo'"):
            group_advantages([0.0, 1.0], "grpo")


class TestGae:
    def test_by_hand(self):
        # gamma 0.5, lambda 0.5. deltas: 0 + .5*2 - 1 = 0; 1 - 2 = -1 | 3 - 1 = 2
        found = gae(t(0, 1, 3), t(1, 2, 1), [2, 0, 1], gamma=0.5, lam=0.5)
        assert found.tolist() == [-0.25, -1.0, 2.0]
        assert discounted(t(0, 1, 3), [2, 1], gamma=0.5).tolist() == [0.5, 1.0, 3.0]

    @THOUSAND
    @given(st.lists(st.lists(st.tuples(numbers, numbers), max_size=5), max_size=5), st.floats(0, 1), st.floats(0, 1))
    def test_twin(self, rows, gamma, lam):
        rewards, values = ([[x[k] for x in row] for row in rows] for k in (0, 1))
        flat = gae(t(*chain(*rewards)), t(*chain(*values)), [len(row) for row in rows], gamma=gamma, lam=lam)
        expected = [a for r, v in zip(rewards, values, strict=True) for a in twin.gae(r, v, gamma, lam)]
        assert flat.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_one_step(self):
        r, v = t(1, 2, 3), t(4, 5, 6)
        assert gae(r, v, [3], gamma=1.0, lam=1.0).tolist() == [6 - 4, 5 - 5, 3 - 6]
        assert gae(r, v, [3], gamma=1.0, lam=0.0).tolist() == [1 + 5 - 4, 2 + 6 - 5, 3 - 6]

    def test_lengths_must_fit(self):
        with pytest.raises(ValueError, match="2 rewards and 2 values for sequences of 3 entries"):
            gae(t(1, 2), t(1, 2), [3], gamma=1.0, lam=1.0)


class TestWhitening:
    def test_by_hand(self):
        assert whiten(t(1, 3)).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])  # mean 2, sample variance 2
        assert whiten(t(5, 5, 5)).tolist() == [0.0, 0.0, 0.0]
        assert whiten(t(5)).tolist() == [0.0] and whiten(t()).tolist() == []

    @THOUSAND
    @given(st.lists(numbers, max_size=8))
    def test_twin(self, values):
        assert whiten(t(*values)).tolist() == pytest.approx(twin.whitened(values), rel=1e-6, abs=1e-6)


# ---- which groups are left out --------------------------------------------------------------------------------------------------------

uniform_groups = st.tuples(
    numbers, st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=3), numbers), min_size=1, max_size=4)
)


def teaches(group, rl: RlConfig) -> bool:
    """Whether an advantage of these rollouts of one reward is not 0. Each is (turns, what its first token pays for KL in the reward)."""
    reward, rollouts = group
    pays = rl.kl_coef > 0 and rl.kl_in == "reward"
    episodes = [
        Episode(reward, tuple(turns), (kl, *[0.0] * (sum(turns) - 1)) if pays else (), (0.0,) * sum(turns)) for turns, kl in rollouts
    ]
    rule = AdvantageRule(rl.advantage, credit=rl.credited, gamma=rl.gamma)
    return any(abs(a) > 1e-6 for row in as_lists(credit([episodes], rule), episodes) for a in row)


class TestLeftOut:
    @THOUSAND
    @given(
        uniform_groups,
        st.builds(
            RlConfig,
            advantage=st.sampled_from(["group", "group-mean", "rloo", "gae"]),
            credit=st.sampled_from(["auto", "turn", "token"]),
            gamma=st.sampled_from([1.0, 0.5]),
            kl_coef=st.sampled_from([0.0, 0.1]),
            kl_in=st.sampled_from(["loss", "reward"]),
        ),
    )
    def test_a_group_that_could_teach_is_never_left_out(self, group, rl):
        assert not (rl.leaves_out_uniform_groups and teaches(group, rl))

    @pytest.mark.parametrize("kind", ["group", "group-mean", "rloo", "reinforce++-baseline"])
    def test_where_equal_rewards_teach_nothing_they_are_left_out_when_asked(self, kind):
        assert RlConfig(advantage=kind, kl_coef=0.1).leaves_out_uniform_groups
        assert not RlConfig(advantage=kind, drop_uniform_groups=False).leaves_out_uniform_groups

    def test_reinforce_learns_from_a_rollout_that_is_alone_in_its_group(self):
        assert not RlConfig(advantage="reinforce++").leaves_out_uniform_groups


# ---- a whole step -------------------------------------------------------------------------------------------------------------------


def as_lists(found, episodes):
    return [a if isinstance(a, list) else [a] * e.n for a, e in zip(found.advantages, episodes, strict=True)]


def of(episodes, **rule):
    return as_lists(credit([episodes], AdvantageRule(**rule)), episodes)


class TestCredit:
    LONG, SHORT = Episode(1.0, (2, 1)), Episode(0.0, (1,))

    def test_to_the_sequence_by_hand(self):
        assert of([self.LONG, self.SHORT], advantage="rloo") == [[1.0, 1.0, 1.0], [-1.0]]

    def test_to_tokens_by_hand(self):
        # to go 1/4, 1/2, 1; baseline of the scores 1 and 0 is 1/2
        assert of([self.LONG, self.SHORT], advantage="group-mean", credit="token", gamma=0.5) == [[-0.25, 0.0, 0.5], [-0.5]]

    def test_to_turns_by_hand(self):
        # to go of turns: 1/2, 1 | 0. Turn 0 is compared with turn 0, turn 1 with nothing
        assert of([self.LONG, self.SHORT], advantage="group-mean", credit="turn", gamma=0.5) == [[0.25, 0.25, 0.0], [-0.25]]

    def test_rewards_of_tokens_belong_to_their_turn(self):
        paid = Episode(1.0, (2, 1), token_rewards=(-0.5, 0.25, -0.25))
        # turns: -0.25, 0.75; to go 0.5, 0.75
        assert of([paid], advantage="reinforce++", credit="turn") == [pytest.approx(twin.whitened([0.5, 0.5, 0.75]))]

    def test_gae_over_turns_values_the_first_token_of_each(self):
        episode = Episode(1.0, (2, 1), values=(0.25, 9.0, 0.5))
        found = credit([[episode]], AdvantageRule("gae", credit="turn", gamma=0.5, gae_lambda=1.0))
        # deltas 0.5 * 0.5 - 0.25 = 0 and 0.5; advantages 0 + 0.5 * 0.5 and 0.5
        assert found.advantages == [[0.25, 0.25, 0.5]]
        assert found.targets[0][::2] == [0.5, 1.0] and math.isnan(found.targets[0][1])

    def test_gae_needs_values(self):
        with pytest.raises(ValueError, match="a value for each of 3 trained tokens, not 0"):
            credit([[self.LONG]], AdvantageRule("gae", credit="token"))

    def test_a_step_without_rollouts(self):
        for kind in (*KINDS, "gae"):
            for way in ("sequence", "turn", "token"):
                assert credit([], AdvantageRule(kind, credit=way)).advantages == []
                assert credit([[]], AdvantageRule(kind, credit=way)).advantages == []

    @THOUSAND
    @given(
        st.lists(
            st.lists(st.tuples(numbers, st.lists(st.integers(1, 3), max_size=3), st.booleans(), st.integers(0, 99)), max_size=4), max_size=3
        ),
        st.sampled_from([*KINDS, "gae"]),
        st.sampled_from(["sequence", "turn", "token"]),
        st.sampled_from([1.0, 0.5]),
        st.booleans(),
    )
    def test_twin(self, groups, kind, way, gamma, white):
        """Rollouts are (reward, turns, trained?, a number that token rewards and values are made of)."""
        way = "token" if kind == "gae" and way == "sequence" else way
        rewards_of = lambda seed, n: [((seed + 7 * i) % 10 - 5) / 10 for i in range(n)] if seed % 2 else []  # noqa: E731
        values_of = lambda seed, n: [((seed + 3 * i) % 11 - 5) / 10 for i in range(n)]  # noqa: E731
        episodes = [
            [Episode(r, tuple(turns), tuple(rewards_of(s, sum(turns))), tuple(values_of(s, sum(turns))), ok) for r, turns, ok, s in group]
            for group in groups
        ]
        rule = AdvantageRule(kind, credit=way, gamma=gamma, gae_lambda=0.9, whiten_advantages=white)
        found = as_lists(credit(episodes, rule), [e for group in episodes for e in group if e.trained])

        expected = []
        for group in episodes:
            expected += [a for a, e in zip(self.twin_of(group, kind, way, gamma), group, strict=True) if e.trained]
        if white or kind.startswith("reinforce"):
            flat = iter(twin.whitened([a for row in expected for a in row]))
            expected = [[next(flat) for _ in row] for row in expected]
        for own, theirs in zip(found, expected, strict=True):
            assert own == pytest.approx(theirs, rel=1e-6, abs=1e-6)

    def twin_of(self, group, kind, way, gamma):
        def per_token(e):
            rewards = list(e.token_rewards) or [0.0] * e.n
            return [*rewards[:-1], rewards[-1] + e.reward] if rewards else []

        def units(e):
            """Rewards and values of tokens or of turns."""
            rewards, ends = per_token(e), [sum(e.turns[: k + 1]) for k in range(len(e.turns))]
            if way == "token":
                return rewards, list(e.values)
            return [sum(rewards[b - n : b]) for b, n in zip(ends, e.turns, strict=True)], [
                e.values[b - n] for b, n in zip(ends, e.turns, strict=True)
            ]

        def spread(e, of_units):
            return of_units if way == "token" else [a for a, n in zip(of_units, e.turns, strict=True) for _ in range(n)]

        scores = [sum(e.token_rewards) + e.reward for e in group]
        if kind == "gae":
            return [spread(e, twin.gae(*units(e), gamma, 0.9)) for e in group]
        if way == "sequence":
            return [[a] * e.n for a, e in zip(twin.compared(scores, kind), group, strict=True)]
        to_go = [[sum(gamma ** (i - k) * r[i] for i in range(k, len(r))) for k in range(len(r))] for r, _ in map(units, group)]
        if way == "turn":
            found = [[] for _ in group]
            for k in range(3):
                there = [i for i, g in enumerate(to_go) if len(g) > k]
                for i, a in zip(there, twin.compared([to_go[i][k] for i in there], kind), strict=True):
                    found[i].append(a)
            return [spread(e, f) for e, f in zip(group, found, strict=True)]
        if len(group) == 1 and kind != "reinforce++":
            return [[0.0] * len(to_go[0])]
        base = twin.compared(scores, kind)
        n = len(scores)
        mean = sum(scores) / n if n else 0.0
        std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (n - 1)) + 1e-4 if kind == "group" and n > 1 else 1.0
        return [[(g - s) / std + b for g in row] for row, s, b in zip(to_go, scores, base, strict=True)]
