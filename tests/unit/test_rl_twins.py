"""Every surrogate, estimate of KL, aggregation, correction and metric against its twin in plain Python, on 1,000 random cases: empty and
one-token rows, all-masked rows, gaps of 800 nats, infinite and NaN log-probs. Each case is cut into microbatches in a random way, so the
loss, its gradient and the metrics are also seen not to depend on packing."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.rl.aggregate import UpdateTotals, count
from megatron_gptoss.rl.correction import PRESETS, correct, mean_weight, weight_sums
from megatron_gptoss.rl.diagnostics import Totals, mismatch_measures
from megatron_gptoss.rl.objective import correction_recipe, objective
from tests.helpers import rl_twins as twin

THOUSAND = settings(max_examples=1000, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

configs = st.builds(
    RlConfig,
    surrogate=st.sampled_from(["ppo", "gspo", "cispo"]),
    dual_clip=st.sampled_from([0.0, 3.0]),
    aggregation=st.sampled_from(["token-mean", "sequence-mean", "sequence-sum"]),
    aggregation_length=st.just(7),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3", "unbiased"]),
    correction=st.sampled_from(sorted(PRESETS)),
    correction_veto=st.sampled_from([0.0, 0.5]),
    correction_normalize=st.booleans(),
    reject_low=st.just(0.98),
    reject_high=st.just(1.03),
)
cases = st.builds(
    twin.random_case,
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from(["near", "far", "huge", "bad"]),
)


def split(case: twin.Case, seed: int) -> list[list[int]]:
    """The sequences of a case in random order, cut into microbatches."""
    draw = random.Random(seed)
    order = draw.sample(range(len(case)), len(case))
    cuts = sorted(draw.sample(range(1, len(order)), draw.randrange(len(order)))) if len(order) > 1 else []
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


def run(case, rl, *, on_policy, with_ref, seed, dtype=torch.float64):
    """The loss, each sequence's gradient, and the totals of all microbatches."""
    packs = [(order, *twin.tokens_and_columns(case, order, dtype)) for order in split(case, seed)]
    totals = UpdateTotals(*count(tokens for _, _, tokens, _ in packs).tolist())
    if rl.correction_normalize:
        how, sums = correction_recipe(rl), torch.zeros(2, dtype=torch.float64)
        for _, _, tokens, columns in packs:
            before = columns["logp" if on_policy else "old"]
            usable = torch.stack(
                [columns[n].isfinite() for n in ("logp", "engine", *(["ref"] * with_ref), *(["old"] * (not on_policy)))]
            ).all(0)
            sums += weight_sums(how, correct(how, before, columns["engine"], tokens, usable), tokens)
        totals = UpdateTotals(totals.tokens, totals.sequences, mean_weight(sums))
    measured, loss, gradients = Totals.empty(), 0.0, {}
    for order, _, tokens, columns in packs:
        logp = columns["logp"].clone().requires_grad_()
        found = objective(
            rl, tokens, totals, logp_N=logp, entropy_N=columns["entropy"], old_logp_N=None if on_policy else columns["old"],
            engine_logp_N=columns["engine"], advantage_N=columns["advantage"], ref_logp_N=columns["ref"] if with_ref else None,
        )  # fmt: skip
        found.loss_sum.backward()
        measured.add(found, tokens)
        loss += found.loss_sum.item()
        gradients |= dict(zip(order, logp.grad.split([len(case[i]) for i in order]), strict=True))
    return loss, [gradients[i].tolist() for i in range(len(case))], measured


@THOUSAND
@given(case=cases, rl=configs, on_policy=st.booleans(), with_ref=st.booleans(), seed=st.integers(0, 2**32))
def test_loss_gradient_and_metrics_are_those_of_the_twin_however_they_are_packed(case, rl, on_policy, with_ref, seed):
    loss, gradients, measured = run(case, rl, on_policy=on_policy, with_ref=with_ref, seed=seed)
    expected = twin.objective(case, rl, on_policy=on_policy, with_ref=with_ref)
    assert loss == pytest.approx(expected.loss_sum, rel=1e-11, abs=1e-11 * (1 + expected.size))
    for own, theirs in zip(gradients, expected.slopes, strict=True):
        assert own == pytest.approx(theirs, rel=1e-9, abs=1e-11)

    numbers = {"logp_abs_max": measured.maximum("logp_abs"), "ess": measured.ess}
    numbers |= {name: measured.mean(name) for name in ("k1", "k3", "logp_abs", "clipped", "truncated", "kl_ref", "entropy")}
    numbers |= {measure.name: measure.value for measure in mismatch_measures(measured)}
    theirs = twin.measures(case, on_policy=on_policy, with_ref=with_ref)
    assert {name for name in numbers if "_position/" in name or "_turn/" in name} <= set(theirs)
    for name, value in theirs.items():
        assert numbers[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert all(map(math.isfinite, numbers.values()))
    if on_policy:
        assert measured.maximum("ratio_dev") == 0.0 and measured.sum("clipped") == 0.0


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", ["tis", "seq-tis", "geo-rs-tis"])
def test_packing_changes_float32_by_less_than_one_in_a_million(surrogate, correction):
    case = twin.random_case([9, 0, 1, 14, 5, 7, 1, 12], 5, "near")
    rl = RlConfig(surrogate=surrogate, correction=correction, aggregation="sequence-mean", kl_coef=0.1, correction_normalize=True)
    runs = [run(case, rl, on_policy=False, with_ref=True, seed=seed, dtype=torch.float32) for seed in range(6)]
    size = twin.objective(case, rl, on_policy=False, with_ref=True).size
    for loss, gradients, measured in runs[1:]:
        assert loss == pytest.approx(runs[0][0], abs=1e-6 * size)
        for own, first in zip(gradients, runs[0][1], strict=True):
            assert own == pytest.approx(first, rel=1e-6, abs=1e-6)
        assert [m.value for m in mismatch_measures(measured)] == pytest.approx([m.value for m in mismatch_measures(runs[0][2])], rel=1e-12)
