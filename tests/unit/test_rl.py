"""Laws of advantages, losses, rollout correction and diagnostics: values worked by hand, invariances, limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.rl.advantages import group_advantages, keep_informative
from megatron_gptoss.rl.correction import correct
from megatron_gptoss.rl.diagnostics import Totals
from megatron_gptoss.rl.losses import nll_loss, ppo_loss
from megatron_gptoss.rl.parity import gap_by_position, within
from megatron_gptoss.rl.samples import make_samples
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup


def rollout(reward: float, index: int = 0, *, stop: str = "final", sampled=(False, True, True)) -> Rollout:
    return Rollout(
        prompt=Prompt("p/1", "arithmetic", "1+1", "2"), index=index, token_ids=(5, 6, 7), sampled=sampled,
        logp=tuple(-0.5 if s else 0.0 for s in sampled), versions=(0,), num_tool_calls=0, stop_reason=stop, answer="2", reward=reward,
        reward_parts=(),
    )  # fmt: skip


def group(*rewards: float) -> RolloutGroup:
    return RolloutGroup(Prompt("p/1", "arithmetic", "1+1", "2"), tuple(rollout(r, i) for i, r in enumerate(rewards)))


class TestAdvantages:
    def test_by_hand(self):
        # rewards 1,0,0,0: mean 1/4, sample variance (9/16 + 3/16)/3 = 1/4, std 1/2
        a = group_advantages([1.0, 0.0, 0.0, 0.0])
        assert a[0] == pytest.approx(0.75 / 0.5001)
        assert a[1] == pytest.approx(-0.25 / 0.5001)
        assert group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=False) == [0.75, -0.25, -0.25, -0.25]

    @given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
    def test_sum_is_zero_and_a_shift_changes_nothing(self, rewards):
        a = group_advantages(rewards, divide_by_std=False)
        assert abs(sum(a)) < 1e-9
        shifted = group_advantages([r + 3.0 for r in rewards], divide_by_std=False)
        assert shifted == pytest.approx(a, abs=1e-9)

    def test_a_group_of_one_has_no_signal(self):
        assert group_advantages([1.0]) == [0.0]

    def test_uniform_groups_are_dropped_and_counted(self):
        kept = keep_informative([group(1, 1), group(0, 1), group(0, 0)], drop_uniform=True)
        assert [[r.reward for r in g.rollouts] for g in kept.groups] == [[0, 1]]
        assert kept.dropped_uniform == 2
        assert keep_informative([group(1, 1)], drop_uniform=False).dropped_uniform == 0

    def test_aborted_rollouts_count_for_the_mean_but_are_not_trained(self):
        g = RolloutGroup(Prompt("p/1", "a", "", ""), (rollout(1.0, 0), rollout(0.0, 1, stop="aborted"), rollout(0.0, 2)))
        samples = make_samples([g], divide_by_std=False)
        assert [s.name for s in samples] == ["p/1#0", "p/1#2"]
        assert samples[0].advantage == pytest.approx(2 / 3)


class TestPpo:
    def loss(self, logp, old, adv, weight=None, **kw):
        t = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
        weight = [1.0] * len(logp) if weight is None else weight
        logp = t(logp).requires_grad_()
        return ppo_loss(logp, t(old), t(adv), t(weight), clip_low=0.2, clip_high=0.28, **kw), logp

    def test_on_policy_gradient_is_the_policy_gradient(self):
        # at ratio 1 the gradient of the surrogate is -w A for every token
        result, logp = self.loss([-1.0, -2.0], [-1.0, -2.0], [0.5, -1.5], [1.0, 0.5])
        result.loss_sum.backward()
        assert logp.grad.tolist() == [-0.5, 0.75]
        assert result.ratio_N.tolist() == [1.0, 1.0]
        assert not result.clipped_N.any()

    def test_clipping_by_hand(self):
        # ratios 2 and 0.5 with both signs. A>0: min(2, 1.28) = 1.28, clipped; min(0.5, 0.8) = 0.5, not.
        # A<0: max(2, 1.28) = 2, not; max(0.5, 0.8) = 0.8, clipped.
        up, down = math.log(2.0), math.log(0.5)
        result, logp = self.loss([up, down, up, down], [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
        assert result.loss_sum.item() == pytest.approx(-1.28 - 0.5 + 2.0 + 0.8)
        assert result.clipped_N.tolist() == [True, False, False, True]
        result.loss_sum.backward()
        assert logp.grad.tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0])

    def test_kl_is_zero_at_the_reference_and_by_hand_elsewhere(self):
        at, _ = self.loss([-1.0], [-1.0], [0.0], ref_logp_N=torch.tensor([-1.0], dtype=torch.float64), kl_coef=1.0)
        assert at.loss_sum.item() == 0.0
        off, logp = self.loss([-1.0], [-1.0], [0.0], ref_logp_N=torch.tensor([-2.0], dtype=torch.float64), kl_coef=0.5)
        assert off.loss_sum.item() == pytest.approx(0.5 * (math.exp(-1.0) + 1.0 - 1.0))
        off.loss_sum.backward()  # d k3 / d logp = 1 - exp(ref - logp)
        assert logp.grad.item() == pytest.approx(0.5 * (1.0 - math.exp(-1.0)))

    def test_entropy_bonus_lowers_the_loss(self):
        plain, _ = self.loss([-1.0], [-1.0], [1.0])
        bonus, _ = self.loss([-1.0], [-1.0], [1.0], entropy_N=torch.tensor([2.0], dtype=torch.float64), entropy_coef=0.1)
        assert bonus.loss_sum.item() == pytest.approx(plain.loss_sum.item() - 0.2)

    def test_nll(self):
        assert nll_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0])).item() == 3.0


class TestCorrection:
    def test_tis_by_hand(self):
        c = correct("tis", torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0 + math.log(2), -5.0]), cap=2.0)
        assert c.weight_N.tolist() == pytest.approx([1.0, 0.5, 2.0])
        assert c.truncated_N.tolist() == [False, False, True]

    def test_any_gap_stays_finite(self):
        c = correct("tis", torch.tensor([0.0, -800.0]), torch.tensor([-800.0, 0.0]), cap=2.0)
        assert c.weight_N[0].item() == pytest.approx(2.0)
        assert c.weight_N[1].item() == 0.0

    def test_none_and_unknown(self):
        assert correct("none", torch.tensor([-1.0]), torch.tensor([-9.0]), cap=2.0).weight_N.tolist() == [1.0]
        with pytest.raises(ValueError, match="unknown"):
            correct("icepop", torch.tensor([0.0]), torch.tensor([0.0]), cap=2.0)

    def test_no_gradient_flows_through_the_weights(self):
        logp = torch.tensor([-1.0], requires_grad=True)
        assert not correct("tis", logp, torch.tensor([-1.5]), cap=2.0).weight_N.requires_grad


class TestDiagnostics:
    def add(self, totals, logp, engine, *, ratio=None, weight=None):
        n = len(logp)
        zeros, ones = torch.zeros(n), torch.ones(n)
        totals.add(
            loss_sum=torch.tensor(1.5), logp_N=torch.tensor(logp), engine_logp_N=torch.tensor(engine), entropy_N=ones * 0.25,
            ratio_N=ones if ratio is None else torch.tensor(ratio), clipped_N=zeros.bool(), kl_ref_N=zeros,
            weight_N=ones if weight is None else torch.tensor(weight), truncated_N=zeros.bool(),
        )  # fmt: skip

    def test_by_hand(self):
        totals = Totals.empty()
        self.add(totals, [-1.0, -2.0], [-1.5, -2.0], weight=[1.0, 3.0], ratio=[1.0, 0.75])
        # gaps trainer - engine: 0.5, 0 -> k1 = -0.25, k3 = (e^.5 - 1 - .5)/2
        assert totals.mean("k1") == pytest.approx(-0.25)
        assert totals.mean("k3") == pytest.approx((math.exp(0.5) - 1.5) / 2)
        assert totals.mean("logp_abs") == pytest.approx(0.25)
        assert totals.maximum("logp_abs") == pytest.approx(0.5)
        assert totals.maximum("ratio_dev") == pytest.approx(0.25)
        assert totals.ess == pytest.approx(16 / (2 * 10))

    def test_microbatches_add_up_to_the_whole(self):
        whole, parts = Totals.empty(), Totals.empty()
        self.add(whole, [-1.0, -2.0, -3.0], [-1.1, -2.0, -2.5])
        self.add(parts, [-1.0, -2.0], [-1.1, -2.0])
        self.add(parts, [-3.0], [-2.5])
        for name in ("tokens", "k1", "k3", "logp_abs", "entropy"):
            assert parts.sum(name) == pytest.approx(whole.sum(name), rel=1e-12)
        assert torch.equal(parts.maxima, whole.maxima)

    def test_an_empty_step_has_no_nan(self):
        totals = Totals.empty()
        self.add(totals, [], [])
        assert totals.mean("k3") == 0.0
        assert totals.ess == 1.0


class TestParity:
    def test_gaps_land_in_their_bins_and_nan_is_outside(self):
        rows = gap_by_position([0, 3, 4, 9], [-1.0, -1.0, -1.0, -1.0], [-1.0, -1.25, -1.5, -1.0], edges=[0, 4, 8])
        assert [(r.first, r.last, r.tokens, r.max) for r in rows] == [(0, 3, 2, 0.25), (4, 7, 1, 0.5), (8, 9, 1, 0.0)]
        assert within(rows, 0.5)
        assert not within(rows, 0.49)
        assert not within(gap_by_position([0, 0], [float("nan"), 0.0], [0.0, 0.0], edges=[0]), 1e9)
