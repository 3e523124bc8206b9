"""Laws of pass@k and of its uncertainty: by hand, against every subset counted, without bias, and with prompts as the units."""

import itertools
import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.schema import Config, EvalConfig, RunConfig
from megatron_gptoss.loop.evaluate import Evaluation, num_prompts, report
from megatron_gptoss.loop.pass_at_k import over_prompts, pass_at_k, pass_rates, unseen_share
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup


@st.composite
def counted(draw, most=9):
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


class TestOnePrompt:
    @pytest.mark.parametrize(
        ("n", "c", "k", "by_hand"),
        [(4, 2, 1, 1 / 2), (4, 2, 2, 5 / 6), (4, 1, 2, 1 / 2), (4, 2, 3, 1.0), (5, 1, 2, 2 / 5), (10, 3, 5, 1 - 21 / 252), (3, 0, 3, 0.0)],
    )
    def test_by_hand(self, n, c, k, by_hand):
        assert pass_at_k(n, c, k) == pytest.approx(by_hand, abs=1e-15)

    @given(counted())
    def test_it_is_the_share_of_subsets_that_hold_a_success(self, case):
        n, c, k = case
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == float(Fraction(sum(min(s) < c for s in subsets), len(subsets)))

    @given(counted(most=60))
    def test_limits_and_order(self, case):
        n, c, k = case
        assert pass_at_k(n, c, 1) == c / n
        assert pass_at_k(n, c, n) == (1.0 if c else 0.0)
        assert 0.0 <= pass_at_k(n, c, k) <= 1.0
        assert k == n or pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1)
        assert c == n or pass_at_k(n, c, k) <= pass_at_k(n, c + 1, k)

    @given(st.integers(1, 30), st.floats(0, 1), st.data())
    def test_its_mean_over_rollouts_is_what_k_tries_would_give(self, n, p, data):
        k = data.draw(st.integers(1, n))
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)

    def test_large_numbers_neither_overflow_nor_cancel(self):
        # One success in a million: pass@1 is 1e-6 to the last bit, not what is left of 1 - 0.999999. C(n, k) alone has 30,000 digits.
        assert pass_at_k(10**6, 1, 1) == 1e-6
        assert pass_at_k(100_000, 1, 50_000) == 0.5
        assert pass_at_k(10_000, 5_000, 9_000) == 1.0

    @pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
    def test_what_cannot_be_is_refused(self, n, c, k):
        with pytest.raises(ValueError, match=rf"pass@{k} of {c} successes in {n} rollouts"):
            pass_at_k(n, c, k)


class TestOverPrompts:
    def test_by_hand(self):
        # mean 0.5; squares 4 x 0.25 = 1; / (n - 1) = 1/3; / n = 1/12
        found = over_prompts([0.0, 0.0, 1.0, 1.0])
        assert (found.value, found.error) == (0.5, pytest.approx(math.sqrt(1 / 12)))
        assert found.words() == "0.500 ± 0.289"

    def test_one_prompt_leaves_the_error_unknown(self):
        assert math.isnan(over_prompts([1.0]).error) and over_prompts([1.0]).words() == "1.000"
        with pytest.raises(ValueError, match="needs a prompt"):
            over_prompts([])

    @given(st.lists(counted(), min_size=2, max_size=6), st.integers(2, 5))
    def test_more_rollouts_that_say_the_same_make_the_error_no_smaller(self, cases, times):
        once = [(n, c) for n, c, _ in cases]
        often = [(n * times, c * times) for n, c in once]
        assert pass_rates(often, [1])[1] == pass_rates(once, [1])[1]

    @given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.integers(2, 4))
    def test_more_prompts_do(self, values, times):
        n, few, many = len(values), over_prompts(values), over_prompts(values * times)
        assert many.value == pytest.approx(few.value, abs=1e-12)
        assert many.error == pytest.approx(few.error * math.sqrt((n - 1) / (n * times - 1)), abs=1e-9)

    def test_what_never_happened_may_still_happen(self):
        # the chance to see none of it in n prompts is 5 %
        for n in (1, 20, 300):
            assert (1 - unseen_share(n)) ** n == pytest.approx(0.05)
        assert unseen_share(300) == pytest.approx(3 / 300, rel=0.01)


def rollout(prompt, index, reward, *labels):
    return Rollout(prompt, index, (1, 2), (False, True), (0.0, -1.0), (0,), 0, "final", "4", reward, (), labels)


def evaluation(*rewards, label="right"):
    """One tuple of rewards for each prompt; the label stands where the reward is above 0."""
    groups = []
    for number, each in enumerate(rewards):
        prompt = Prompt(f"p/{number}", "arithmetic", "2+2", "4")
        groups.append(RolloutGroup(prompt, tuple(rollout(prompt, i, r, *([label] if r > 0 else [])) for i, r in enumerate(each))))
    return Evaluation(tuple(groups))


class TestReport:
    def test_by_hand(self):
        found = report(evaluation((1.0, 0.0), (1.0, 1.0), (0.0, 0.0)), EvalConfig(samples_per_prompt=2))
        assert found.successes == ((2, 1), (2, 2), (2, 0))
        assert {k: each.value for k, each in found.pass_at.items()} == {1: pytest.approx(1 / 2), 2: pytest.approx(2 / 3)}
        assert found.mean_reward == found.pass_at[1], "of a reward that is 0 or 1 the mean is pass@1"
        assert found.mean_reward.error == pytest.approx(math.sqrt(0.5 / 2 / 3))  # 0.5, 1, 0: squares 0.5, over n - 1, over n
        values = found.metrics()
        assert (values["eval/prompts"], values["eval/rollouts"], values["eval/success"]) == (3.0, 6.0, pytest.approx(0.5))
        assert values["eval/pass_at_2"] == pytest.approx(2 / 3) and values["eval/right"] == pytest.approx(0.5)

    def test_what_counts_as_a_success_is_the_configurations_word(self):
        partial = evaluation((0.4, 0.9), (0.0, 0.2))
        counts = {}
        for how in (EvalConfig(samples_per_prompt=2), EvalConfig(success_reward=0.5), EvalConfig(success_label="right")):
            found = report(partial, how.model_copy(update={"samples_per_prompt": 2}))
            counts[found.success] = [c for _, c in found.successes]
            assert found.mean_reward.value == pytest.approx(0.375), "the mean reward asks for no threshold"
        assert counts == {"reward >= 1": [0, 0], "reward >= 0.5": [1, 0], "label right": [2, 1]}

    def test_the_file_says_what_the_table_says(self):
        how = EvalConfig(samples_per_prompt=2, k="2")
        found = report(evaluation((1.0, 0.0), (1.0, 1.0)), how)
        config = Config(eval=how, run=RunConfig(init="runs/x"))
        value = json.loads(json.dumps(found.to_json(config), allow_nan=False))
        assert value["weights"] == "runs/x" and value["success"] == "reward >= 1" and value["samples_per_prompt"] == 2
        assert value["pass_at"] == {"2": {"value": 1.0, "standard_error": 0.0}}
        assert value["per_prompt"] == [
            {"id": "p/0", "successes": 1, "mean_reward": 0.5},
            {"id": "p/1", "successes": 2, "mean_reward": 1.0},
        ]
        assert ("mean reward", "0.750 ± 0.250") in found.rows()

    def test_all_alike_is_not_called_certain(self):
        (words,) = (value for name, value in report(evaluation(*[(1.0,)] * 20), EvalConfig(k="1")).rows() if name == "pass@1")
        assert words.startswith("1.000   all prompts alike: up to 0.139 of others may differ")

    def test_one_prompt_writes_json_too(self):
        found = report(evaluation((1.0, 0.0)), EvalConfig(samples_per_prompt=2))
        assert found.to_json(Config())["mean_reward"] == {"value": 0.5, "standard_error": "nan"}
        json.dumps(found.to_json(Config()), allow_nan=False)


def test_k_is_powers_of_two_unless_it_is_said():
    assert EvalConfig(samples_per_prompt=1).ks == (1,)
    assert EvalConfig(samples_per_prompt=10).ks == (1, 2, 4, 8)
    assert EvalConfig(samples_per_prompt=10, k="10,5,5").ks == (5, 10)


def test_no_prompt_is_asked_twice():
    assert (num_prompts(300, None), num_prompts(300, 40), num_prompts(30, 40)) == (300, 40, 30)
