"""Surrogates, estimates of KL, the critic's loss and aggregations: values worked by hand, limits, and what happens at any gap."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.rl.aggregate import UpdateTotals, count, token_scale
from megatron_gptoss.rl.kl import kl_estimate
from megatron_gptoss.rl.objective import objective
from megatron_gptoss.rl.surrogates import cispo, gspo, ppo
from megatron_gptoss.rl.value_loss import value_loss
from tests.helpers.rl_twins import packed, t

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
UP, DOWN = math.log(2.0), math.log(0.5)


def gradient(loss_N: torch.Tensor, logp_N: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_N.sum(), logp_N)[0].tolist()


class TestPpo:
    def test_at_ratio_one_it_is_the_policy_gradient(self):
        logp = t(-1.0, -2.0).requires_grad_()
        found = ppo(logp, logp.detach(), t(0.5, -1.5), **BOUNDS)
        assert gradient(found.loss_N, logp) == [-0.5, 1.5]
        assert found.ratio_N.tolist() == [1.0, 1.0] and not found.clipped_N.any()

    def test_clipping_by_hand(self):
        # ratios 2 and 0.5 with both signs. A>0: min(2, 1.28) = 1.28, clipped; min(0.5, 0.8) = 0.5, not.
        # A<0: max(2, 1.28) = 2, not; max(0.5, 0.8) = 0.8, clipped.
        logp = t(UP, DOWN, UP, DOWN).requires_grad_()
        found = ppo(logp, t(0, 0, 0, 0), t(1, 1, -1, -1), **BOUNDS)
        assert found.loss_N.tolist() == pytest.approx([-1.28, -0.5, 2.0, 0.8])
        assert found.clipped_N.tolist() == [True, False, False, True]
        assert gradient(found.loss_N, logp) == pytest.approx([0.0, -0.5, 2.0, 0.0])

    def test_the_dual_clip_bounds_what_one_token_can_lose(self):
        logp = t(math.log(5.0), UP, math.log(5.0)).requires_grad_()
        found = ppo(logp, t(0, 0, 0), t(-1, -1, 1), **BOUNDS, dual_clip=3.0)
        assert found.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.28])  # 5 is cut to 3, 2 is not; A > 0 is the upper clip's
        assert found.clipped_N.tolist() == [True, False, True]
        assert gradient(found.loss_N, logp) == pytest.approx([0.0, 2.0, 0.0])

    @pytest.mark.parametrize("gap", [800.0, -800.0, 1e30])
    def test_no_gap_gives_a_loss_or_gradient_that_is_not_finite(self, gap):
        for make in (ppo, cispo):
            logp = torch.tensor([gap, gap], dtype=torch.float32, requires_grad=True)
            found = make(logp, torch.zeros(2), torch.tensor([1.0, -1.0]), **BOUNDS)
            assert found.loss_N.isfinite().all() and all(map(math.isfinite, gradient(found.loss_N, logp)))


class TestGspo:
    def test_by_hand_over_two_sequences(self):
        # mean gaps (0.1 + 0.3)/2 = 0.2 and -0.4; exp(0.2) = 1.2214 is inside 1.28, exp(-0.4) = 0.6703 is under 0.8
        logp = t(0.1, 0.3, -0.4).requires_grad_()
        tokens = packed("xx", "x")
        found = gspo(logp, t(0, 0, 0), t(1, 1, -1), tokens, torch.ones(3, dtype=torch.bool), **BOUNDS)
        assert found.ratio_N.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-0.4)])
        assert found.loss_N.tolist() == pytest.approx([-math.exp(0.2), -math.exp(0.2), 0.8])
        assert found.clipped_N.tolist() == [False, False, True]

    def test_its_gradient_is_that_of_the_sequence_ratio(self):
        old, advantage = t(-1.0, -2.0, -0.5), 0.7
        logp = t(-1.05, -1.9, -0.45).requires_grad_()
        found = gspo(logp, old, t(advantage, advantage, advantage), packed("x.xx"), torch.ones(3, dtype=torch.bool), **BOUNDS)
        own = gradient(found.loss_N / 3, logp)  # mean over the sequence's tokens
        whole = -torch.exp((logp - old).mean()) * advantage
        assert own == pytest.approx(torch.autograd.grad(whole, logp)[0].tolist(), rel=1e-12)

    def test_a_token_without_a_usable_log_prob_has_no_share_in_the_mean(self):
        tokens, usable = packed("xxx"), torch.tensor([True, False, True])
        found = gspo(t(0.1, 99.0, 0.3), t(0, 0, 0), t(1, 1, 1), tokens, usable, **BOUNDS)
        assert found.ratio_N[0].item() == pytest.approx(math.exp(0.2))


class TestCispo:
    def test_a_clipped_token_keeps_its_gradient(self):
        logp = t(UP, DOWN, 0.1).requires_grad_()
        found = cispo(logp, t(0, 0, 0), t(1, -1, 2), **BOUNDS)
        assert found.loss_N.tolist() == pytest.approx([-1.28 * UP, 0.8 * DOWN, -2 * math.exp(0.1) * 0.1])
        assert gradient(found.loss_N, logp) == pytest.approx([-1.28, 0.8, -2 * math.exp(0.1)])
        assert found.clipped_N.tolist() == [True, True, False]

    def test_without_a_lower_bound(self):
        found = cispo(t(-3.0), t(0.0), t(1.0), clip_low=1.0, clip_high=0.28)
        assert found.ratio_N.item() == pytest.approx(math.exp(-3.0)) and not found.clipped_N.any()


class TestKl:
    @pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
    def test_zero_at_the_reference(self, kind):
        assert kl_estimate(kind, t(-1.0), t(-1.0), t(-1.0)).item() == 0.0

    def test_by_hand(self):
        # logp -1, reference -2: d = 1
        values = {kind: kl_estimate(kind, t(-1.0), t(-2.0), t(-1.0 - UP)).item() for kind in ("k1", "k2", "k3", "unbiased")}
        k3 = math.exp(-1.0) + 1.0 - 1.0
        assert values == pytest.approx({"k1": 1.0, "k2": 0.5, "k3": k3, "unbiased": 2 * k3})

    def test_gradients_by_hand(self):
        logp = t(-1.0).requires_grad_()
        slopes = {k: gradient(kl_estimate(k, logp, t(-2.0), t(-1.0 - UP)), logp)[0] for k in ("k1", "k2", "k3", "unbiased")}
        assert slopes == pytest.approx({"k1": 1.0, "k2": 1.0, "k3": 1 - math.exp(-1.0), "unbiased": 2.0})  # r * d for the last

    def test_the_unbiased_estimate_has_value_and_gradient_of_the_exact_kl_off_policy(self):
        """Over a vocabulary of three, the expectation under the old policy is worked out exactly."""
        logits = t(0.3, -0.2, 0.5).requires_grad_()
        old, ref = torch.log_softmax(t(0.0, 0.4, 0.1), 0), torch.log_softmax(t(-0.5, 0.2, 0.0), 0)
        logp = torch.log_softmax(logits, 0)
        exact = (logp.exp() * (logp - ref)).sum()
        right = torch.autograd.grad(exact, logits, retain_graph=True)[0]

        def expected(kind: str):
            value = (old.exp() * kl_estimate(kind, logp, ref, old)).sum()
            return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]

        value, slope = expected("unbiased")
        assert value == pytest.approx(exact.item(), rel=1e-12)
        assert torch.allclose(slope, right, rtol=1e-12)
        assert not torch.allclose(expected("k3")[1], right, rtol=0.1), "the control: plain k3 is biased"

    def test_far_from_the_reference_it_stays_finite(self):
        for kind in ("k1", "k2", "k3", "unbiased"):
            logp = torch.tensor([-800.0, 0.0], requires_grad=True)
            value = kl_estimate(kind, logp, torch.tensor([0.0, -800.0]), torch.tensor([0.0, -800.0]))
            assert value.isfinite().all() and all(map(math.isfinite, gradient(value, logp)))

    def test_errors(self):
        with pytest.raises(ValueError, match="unknown"):
            kl_estimate("k4", t(0.0), t(0.0))
        with pytest.raises(ValueError, match="policy that sampled"):
            kl_estimate("unbiased", t(0.0), t(0.0))


class TestValueLoss:
    def test_by_hand(self):
        # old 0, clip 0.2. V = 0.5, R = 1: (0.5)^2 and (0.2 - 1)^2 = 0.64, the larger counts. V = 0.1: both 0.81.
        value = t(0.5, 0.1, 0.5).requires_grad_()
        found = value_loss(value, t(0, 0, 0), t(1.0, 1.0, 0.0), clip=0.2)
        assert found.loss_N.tolist() == pytest.approx([0.32, 0.405, 0.125])
        assert found.clipped_N.tolist() == [True, False, False]
        assert gradient(found.loss_N, value) == pytest.approx([0.0, -0.9, 0.5])

    def test_a_token_without_a_target_teaches_nothing(self):
        value = t(0.5, 0.5).requires_grad_()
        found = value_loss(value, t(0, 0), t(math.nan, 1.0), clip=0.0)
        assert found.loss_N.tolist() == [0.0, 0.125]
        assert gradient(found.loss_N, value) == [0.0, -0.5]

    @settings(max_examples=1000, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), max_size=4), st.sampled_from([0.0, 0.2, 1.0]))
    def test_twin(self, rows, clip):
        found = value_loss(*(t(*column) for column in (zip(*rows, strict=True) if rows else ((), (), ()))), clip=clip)
        for own, (v, old, r) in zip(found.loss_N.tolist(), rows, strict=True):
            near = min(max(v, old - clip), old + clip) if clip else v
            assert own == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2)


class TestAggregation:
    def losses(self, kind: str, **kw) -> float:
        """Sequences of 1, 3 and no trained tokens with losses 1 | 2, 3, 4."""
        tokens = packed("x", "xx.x", ".")
        totals = UpdateTotals(*count([tokens]).tolist())
        assert (totals.tokens, totals.sequences) == (4, 2)
        scale = token_scale(kind, tokens, totals, **kw)
        loss_N = t(1, 2, 3, 4)
        return float((loss_N if scale is None else scale * loss_N).sum()) / totals.tokens

    def test_by_hand(self):
        assert self.losses("token-mean") == 10 / 4
        assert self.losses("sequence-mean") == pytest.approx((1 + 3) / 2)
        assert self.losses("sequence-sum", length=5) == pytest.approx((1 / 5 + 9 / 5) / 2)

    def test_errors(self):
        with pytest.raises(ValueError, match="at least 1"):
            self.losses("sequence-sum")
        with pytest.raises(ValueError, match="unknown"):
            self.losses("mean")

    def test_nothing_to_train_on(self):
        tokens = packed(".")
        assert count([]).tolist() == count([tokens]).tolist() == [0.0, 0.0]
        assert token_scale("sequence-mean", tokens, UpdateTotals(0.0, 0.0)).shape == (0,)


class TestOnPolicy:
    @pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
    def test_the_ratio_is_exactly_one_and_the_gradient_the_policy_gradient(self, surrogate):
        logp = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        advantage = torch.tensor([0.5, -1.0, 0.25, 2.0])
        found = objective(
            RlConfig(surrogate=surrogate, correction="none", dual_clip=0.0), packed("xx", "x.x"), UpdateTotals(4, 2), logp_N=logp,
            entropy_N=torch.ones(4), old_logp_N=None, engine_logp_N=torch.full((4,), -3.0), advantage_N=advantage,
        )  # fmt: skip
        found.loss_sum.backward()
        assert (found.ratio_N == 1.0).all() and not found.clipped_N.any()
        assert torch.equal(logp.grad, -advantage)


def test_the_entropy_bonus_lowers_the_loss():
    def loss(coef: float) -> float:
        return objective(
            RlConfig(entropy_coef=coef), packed("xx"), UpdateTotals(2, 1), logp_N=t(-1, -1), entropy_N=t(2.0, 1.0), old_logp_N=None,
            engine_logp_N=t(-1, -1), advantage_N=t(1, 1),
        ).loss_sum.item()  # fmt: skip

    assert loss(0.1) == pytest.approx(loss(0.0) - 0.3)


def test_a_log_prob_that_is_not_finite_adds_nothing_to_loss_or_gradient():
    logp = t(-1.0, -1.0, math.nan, -1.0).requires_grad_()
    found = objective(
        RlConfig(correction="seq-is", kl_coef=0.1, entropy_coef=0.1), packed("xx", "xx"), UpdateTotals(4, 2), logp_N=logp,
        entropy_N=t(0, 0, math.nan, 0), old_logp_N=t(-1, -1, -1, -1), engine_logp_N=t(-1, -math.inf, -1, -1.5),
        advantage_N=t(1, 1, 1, 1), ref_logp_N=t(-1, -1, -1, math.inf),
    )  # fmt: skip
    assert found.usable_N.tolist() == [True, False, False, False]
    assert found.loss_sum.item() == -1.0
    found.loss_sum.backward()
    assert logp.grad.tolist() == [-1.0, 0.0, 0.0, 0.0]
