"""Router replay through the trainer: what an update takes over, what it counts, and the published failure, reproduced and cured.

The engine is another trainer with the same weights, whose routes and log-probs come with the samples. Noise on the logits that only the
choice sees stands for rounding that differs from pass to pass.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_gptoss.config.schema import DiagnoseConfig, RlConfig, TrainerConfig
from megatron_gptoss.parallel.packing import filler, make_microbatch, pack_step
from tests.helpers.routes import record_of, rows_of, sampled_by, sent_anywhere
from tests.helpers.tiny_model import strong_tensors
from tests.helpers.training import MILD, samples

NOISE = 2.0
OFF = {"correction": "none", "clip_low": 0.2, "clip_high": 0.2}
LAYERS, TOP_K = MILD.num_hidden_layers, MILD.num_experts_per_tok


def trainer(shape, *, noise=0.0, **fields):
    from megatron_gptoss.trainer.step import Trainer

    made = Trainer(
        MILD, TrainerConfig(**fields), shape, RlConfig(lr=1e-2, decay="constant", warmup_steps=0), total_updates=10,
        diagnose=DiagnoseConfig(routing_noise=noise), seed=11,
    )  # fmt: skip
    made.load_hf((n, 0.5 * t if "norm" not in n else t) for n, t in strong_tensors(MILD, 4))
    made.weights_changed()
    return made


def packed(batch, *, budget=60, minibatches=1):
    return [m[0] for m in pack_step(batch, minibatches=minibatches, ranks=1, tokens_per_microbatch=budget)]


def how(mode, **fields):
    from megatron_gptoss.trainer.how import Update

    return Update(policy=RlConfig(router_replay=mode, **(OFF | fields)))


def measured(stats):
    return {m.name: m.value for m in stats.measures}


@pytest.fixture(scope="module")
def batch(one_rank):
    return sampled_by(trainer(one_rank), samples(8, seed=6))


@pytest.fixture(scope="module")
def watched(one_rank):
    """What the routers take in each forward pass: [(layer, experts)], recomputation included."""
    from megatron_gptoss.model.router import GptOssRouter

    taken = []
    honest = GptOssRouter.route

    def route(self, hidden):
        logits_TE, experts_TK, probs_TK = honest(self, hidden)
        taken.append((self.layer, experts_TK.detach().clone()))
        return logits_TE, experts_TK, probs_TK

    GptOssRouter.route = route
    yield taken
    GptOssRouter.route = honest


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_every_row_of_scoring_update_and_recomputation_is_the_engines(one_rank, watched, recompute):
    """Arbitrary routes under noise, several microbatches; the last token of a sequence is the routers' own."""
    far = sent_anywhere(samples(5, seed=2), MILD, seed=9)
    t = trainer(one_rank, noise=NOISE, recompute=recompute)
    batches = packed(far)
    runs = 2 if recompute != "none" else 1
    for passes, go in (
        (1, lambda: t.score(batches[0], router_replay="engine")),
        (runs, lambda: t.update(batches, how("engine"))),
    ):
        watched.clear()
        go()
        assert len(watched) == passes * LAYERS * len(batches[0]) and len(batches[0]) > 1
        for layer in range(LAYERS):
            ours = [experts for at, experts in watched if at == layer]
            for mb in batches[0]:
                theirs = mb.routes.experts_LTK[layer].long()
                told = theirs.any(-1)
                same = [e for e in ours if len(e) == len(theirs) and torch.equal(e[told], theirs[told])]
                assert len(same) == passes and int((~told).sum()) == len(mb.names)


def test_without_replay_noise_parts_the_trainer_from_the_engine_and_with_it_they_agree(one_rank, batch):
    found = {mode: trainer(one_rank, noise=NOISE).update(packed(batch), how(mode)) for mode in ("none", "engine")}
    assert found["none"].k3 > 1e-3 and found["none"].logp_abs_max > 0.1
    # The routes of a sequence's last token reach no prediction; what is left is another packing's rounding.
    assert found["engine"].k3 < 1e-10 and found["engine"].logp_abs_max < 1e-5
    assert "router/missing_rows" not in measured(found["none"])


def test_the_published_failure_and_its_cure(one_rank, batch):
    """Old log-probs scored in a pass of their own meet other routes in the update: ratios that should be 1 are clipped. On-policy the ratio
    is 1 by construction, and with the scored routes replayed it is 1 because both passes are the same."""
    batches = packed(batch)

    def step(mode, scored):
        t = trainer(one_rank, noise=NOISE)
        old = [t.score(m, router_replay=mode) for m in batches] if scored else None
        return t.update(batches, how(mode), old)

    broken = step("none", scored=True)
    assert broken.clip_fraction > 0.05 and broken.ratio_max_abs_dev > 0.5
    for mode, scored in (("none", False), ("engine", False), ("scored", True), ("engine", True)):
        cured = step(mode, scored)
        assert (cured.ratio_max_abs_dev, cured.clip_fraction) == (0.0, 0.0), (mode, scored)
        assert cured.grad_norm > 0


def test_what_the_engine_lacked_is_counted_once_whichever_pass_chose_it(one_rank, batch):
    """3 sequences: one without routes, one with a hole of a row, one whole. Each lacks its last token too."""
    holed = rows_of(batch[1].routes).clone()
    holed[2, 1] = 0
    three = [replace(batch[0], routes=None), replace(batch[1], routes=record_of(holed, MILD)), batch[2]]
    rows = LAYERS * sum(len(s.token_ids) for s in three)
    missing = LAYERS * len(three[0].token_ids) + LAYERS + 1 + LAYERS
    for batches in ([[make_microbatch([s]) for s in three]], [[make_microbatch(three)]]):
        t = trainer(one_rank, noise=NOISE)
        old = [t.score(m, router_replay="engine") for m in batches]
        for stats in (t.update(batches, how("engine"), old), t.update(batches, how("engine")), t.measure(batches[0], how("engine"))):
            assert measured(stats)["router/missing_rows"] == missing
            assert measured(stats)["router/replayed_fraction"] == pytest.approx(1 - missing / rows)
    old = [t.score(m, router_replay="scored") for m in batches]
    found = measured(t.update(batches, how("scored"), old))
    assert (found["router/missing_rows"], found["router/replayed_fraction"]) == (0.0, 1.0)


def test_a_filler_goes_the_way_of_the_sample_it_copies(batch):
    made = filler(batch[0])
    assert torch.equal(rows_of(made.routes), rows_of(batch[0].routes)[:2])
    assert not make_microbatch([made]).routes.missing_LT.any()


def test_later_updates_of_a_step_keep_the_routes_of_scoring(one_rank, batch, watched):
    """Two minibatches, two epochs: the weights move, the routes do not, and only the first epoch is counted."""
    policy = {"minibatches": 2, "epochs": 2}
    batches = packed(batch, budget=8192, minibatches=2)
    t = trainer(one_rank, noise=NOISE)
    old = [t.score(m, router_replay="engine") for m in batches]
    watched.clear()
    stats = t.update(batches, how("engine", **policy), old)
    assert stats.num_updates == 4
    for n, (layer, experts) in enumerate(watched):
        m = n // LAYERS % 2
        assert torch.equal(experts, old[m][0].routes.experts_LTK[layer].long())
    assert measured(stats)["router/missing_rows"] == LAYERS * len(batch)


def test_routers_learn_through_replayed_routes_as_by_their_own(one_rank, batch):
    """Without noise replay changes nothing: the same gradients bit for bit, and they are not zero."""
    found = {}
    for mode in ("none", "engine"):
        t = trainer(one_rank)
        t.update(packed(batch), how(mode))
        found[mode] = {name: p.main_grad.clone() for name, p in t.module.named_parameters() if ".router." in name}
    assert len(found["none"]) == 2 * LAYERS
    for name, gradient in found["none"].items():
        assert gradient.abs().max() > 0 and torch.equal(found["engine"][name], gradient), name


def test_normalised_weights_are_those_of_the_replayed_policy(one_rank, batch):
    """The mean weight comes from a pass of its own, which must route like the update's: then all weights are 1."""
    fields = {"correction": "tis", "correction_normalize": True}
    stats = trainer(one_rank, noise=NOISE).update(packed(batch), how("engine", **fields))
    plain = trainer(one_rank, noise=NOISE).update(packed(batch), how("engine"))
    assert stats.loss == pytest.approx(plain.loss, rel=1e-5) and measured(stats)["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_the_reference_routes_for_itself(one_rank, watched):
    far = packed(sent_anywhere(samples(3, seed=2), MILD, seed=9))
    t = trainer(one_rank)
    t.keep_reference()
    own = t.score(far[0])
    watched.clear()
    assert torch.equal(t.score(far[0], reference=True, router_replay="engine")[0].logp_N, own[0].logp_N)
    assert not torch.equal(t.score(far[0], router_replay="engine")[0].logp_N, own[0].logp_N)


def test_a_microbatch_that_is_not_finite_is_found_under_its_own_routes(one_rank):
    """The search runs each microbatch alone; with another one's routes it would stop at a wrong size."""
    far = sent_anywhere(samples(6, seed=2), MILD, seed=9)
    far[3] = replace(far[3], advantage=math.inf)
    batches = packed(far)
    stats = trainer(one_rank).update(batches, how("engine"))
    (bad,) = [j for j, mb in enumerate(batches[0]) if "s3" in mb.names]
    assert stats.skipped and f"microbatch {bad} of rank 0" in stats.problem and bad > 0


def test_noise_is_seeded_and_new_in_every_pass(one_rank):
    batches = packed(samples(4, seed=1))
    a, b, clean = trainer(one_rank, noise=NOISE), trainer(one_rank, noise=NOISE), trainer(one_rank)
    first, second = a.score(batches[0])[0].logp_N, a.score(batches[0])[0].logp_N
    assert not torch.equal(first, second)
    assert torch.equal(first, b.score(batches[0])[0].logp_N) and torch.equal(second, b.score(batches[0])[0].logp_N)
    assert torch.equal(clean.score(batches[0])[0].logp_N, clean.score(batches[0])[0].logp_N)
