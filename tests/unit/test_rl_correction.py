"""Each preset of the rollout correction on the same seven tokens, worked by hand; and the ends: e^800, empty rows, nothing left."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from megatron_gptoss.config.load import FIELDS
from megatron_gptoss.rl.correction import PRESETS, correct, mean_weight, recipe, weight_sums
from tests.helpers.rl_twins import packed

# Ratios trainer/engine of three sequences (and one without tokens): products 2.4, 0.2 and 1, geometric means 2.4^(1/3) = 1.339, 0.447, 1.
RATIOS = [4.0, 0.6, 1.0, 0.2 / 0.8, 0.8, 1.0, 1.0]
ROWS = ("xxx", "xx", "", "xx")
GEO = [2.4 ** (1 / 3)] * 3 + [0.2**0.5] * 2 + [1.0] * 2


def run(name: str, ratios=RATIOS, rows=ROWS, usable=None, **numbers):
    tokens = packed(*rows)
    log = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64)
    engine = torch.full_like(log, -1.0)
    usable = torch.ones(len(ratios), dtype=torch.bool) if usable is None else torch.tensor(usable)
    how = recipe(name, **numbers)
    return correct(how, engine + log, engine, tokens, usable), tokens, how


# name -> weights with cap 2, floor 0.5, band 0.9 .. 1.1
BY_HAND = {
    "none": [1.0] * 7,
    "tis": [2.0, 0.6, 1.0, 0.25, 0.8, 1.0, 1.0],
    "mis": [0.0, 0.6, 1.0, 0.25, 0.8, 1.0, 1.0],
    "icepop": [0.0, 0.6, 1.0, 0.0, 0.8, 1.0, 1.0],
    "seq-is": [2.4] * 3 + [0.2] * 2 + [1.0] * 2,
    "seq-tis": [2.0] * 3 + [0.2] * 2 + [1.0] * 2,
    "seq-mis": [0.0] * 3 + [0.2] * 2 + [1.0] * 2,
    "geo-tis": GEO,
    "geo-mis": GEO[:3] + [0.0] * 2 + [1.0] * 2,
    "geo-rs": [0.0] * 5 + [1.0] * 2,
    "geo-rs-tis": [0.0] * 5 + [1.0] * 2,
    "geo-rs-seq-tis": [0.0] * 5 + [1.0] * 2,
}


@pytest.mark.parametrize("name", PRESETS)
def test_by_hand(name):
    found, _, _ = run(name, reject_low=0.9, reject_high=1.1)
    assert found.weight_N.tolist() == pytest.approx(BY_HAND[name])


def test_what_was_done_is_said():
    said = lambda name: [x.tolist() for x in (lambda f: (f.truncated_N, f.masked_N, f.rejected_S))(run(name)[0])]  # noqa: E731
    no7, no4 = [False] * 7, [False] * 4
    assert said("none") == [no7, no7, no4]
    assert said("tis") == [[True, *no7[1:]], no7, no4]
    assert said("icepop") == [no7, [True, False, False, True, False, False, False], no4]
    assert said("seq-tis") == [[True] * 3 + [False] * 4, no7, no4]
    assert said("seq-mis") == [no7, no7, [True, False, False, False]]
    assert said("geo-rs") == [no7, no7, [True, True, False, False]]


def test_a_band_of_tokens_or_whole_sequences():
    tokens = packed(*ROWS)
    log, usable = torch.tensor([math.log(r) for r in RATIOS], dtype=torch.float64), torch.ones(7, dtype=torch.bool)
    kept = lambda level: correct(  # noqa: E731
        replace(PRESETS["none"], reject=level, reject_low=0.5, reject_high=3.0), log, torch.zeros_like(log), tokens, usable
    ).weight_N.tolist()
    assert kept("token") == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert kept("sequence") == [1.0] * 3 + [0.0] * 2 + [1.0] * 2  # products 2.4, 0.2, 1


def test_one_catastrophic_token_rejects_its_sequence():
    found, _, _ = run("tis", veto=0.3)
    assert found.rejected_S.tolist() == [False, True, False, False]
    assert found.weight_N.tolist() == [2.0, 0.6, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert not run("tis", veto=0.2)[0].rejected_S.any()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaps_of_800_nats_stay_finite(name, dtype):
    tokens, usable = packed("xx", "xx"), torch.ones(4, dtype=torch.bool)
    found = correct(
        recipe(name), torch.tensor([0.0, -1, -800, 0], dtype=dtype), torch.tensor([-800.0, -1, 0, 0], dtype=dtype), tokens, usable
    )
    assert found.weight_N.isfinite().all() and found.weight_N.square().sum().isfinite()
    up, down = found.weight_N[0].item(), found.weight_N[2].item()  # of a sequence with a ratio of e^800, and of one with e^-800
    kept = {"none": (1.0, 1.0), "seq-is": (math.exp(40.0), 0.0), "tis": (2.0, 0.0), "seq-tis": (2.0, 0.0), "geo-tis": (2.0, 0.0)}
    assert (up, down) == pytest.approx(kept.get(name, (0.0, 0.0)), rel=1e-6, abs=1e-100)


@pytest.mark.parametrize("name", PRESETS)
def test_empty_rows_and_rows_without_a_usable_token(name):
    found, tokens, how = run(name, [], ("", ""), veto=0.1)
    assert found.weight_N.shape == (0,) and not found.rejected_S.any()
    assert mean_weight(weight_sums(how, found, tokens)) == 1.0
    found, tokens, how = run(name, [9.0, 9.0, 1.0], ("xx", "x"), usable=[False, False, True], veto=0.1)
    assert found.weight_N.tolist() == [0.0, 0.0, 1.0]
    assert not found.masked_N.any() and not found.truncated_N.any() and not found.rejected_S.any()


def test_an_unusable_token_changes_nothing_for_its_sequence():
    with_it, _, _ = run("seq-tis", [1.5, 7.0, 1.2], ("xxx",), usable=[True, False, True])
    assert with_it.weight_N.tolist() == pytest.approx([1.8, 0.0, 1.8])
    geo, _, _ = run("geo-tis", [1.5, 7.0, 1.2], ("xxx",), usable=[True, False, True])
    assert geo.weight_N[0].item() == pytest.approx(1.8**0.5)


def test_the_mean_that_normalises_counts_tokens_or_sequences_and_only_what_is_left():
    mean = lambda name, **kw: (lambda f: mean_weight(weight_sums(f[2], f[0], f[1])))(run(name, **kw))  # noqa: E731
    assert mean("tis") == pytest.approx((2.0 + 0.6 + 1.0 + 0.25 + 0.8 + 1.0 + 1.0) / 7)
    assert mean("icepop") == pytest.approx((0.6 + 1.0 + 0.8 + 1.0 + 1.0) / 5)
    assert mean("seq-tis") == pytest.approx((2.0 + 0.2 + 1.0) / 3), "a sequence counts once, however long"
    assert mean("seq-mis") == pytest.approx((0.2 + 1.0) / 2)
    assert mean("geo-rs", reject_low=1.0, reject_high=1.0, ratios=[2.0], rows=("x",)) == 1.0, "nothing is left"


def test_no_gradient_flows_through_the_weights():
    logp = torch.tensor([-1.0], requires_grad=True)
    for name in PRESETS:
        found = correct(recipe(name), logp, torch.tensor([-1.5]), packed("x"), torch.tensor([True]))
        assert not found.weight_N.requires_grad


def test_an_unknown_name_is_refused_and_the_schema_knows_them_all():
    with pytest.raises(ValueError, match="unknown rollout correction 'ice'; there are none, tis"):
        recipe("ice")
    assert list(get_args(FIELDS["rl.correction"].annotation)) == list(PRESETS)
