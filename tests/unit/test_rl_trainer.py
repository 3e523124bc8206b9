"""Every part of the policy update that a configuration can ask for, through the trainer: packing changes nothing, on-policy stays exact,
log-probs that are not finite are masked or stop the run, and what is measured comes out by name."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import broken_rules
from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.errors import TrainerFailed
from megatron_gptoss.parallel.packing import pack_step
from megatron_gptoss.rl.samples import by_sample
from tests.helpers.training import samples, trainer

TINY = str(Path(__file__).parents[2] / "configs" / "tiny.toml")
VARIANTS = {
    "gspo": RlConfig(surrogate="gspo", aggregation="sequence-mean", correction="seq-tis"),
    "cispo": RlConfig(surrogate="cispo", correction="icepop", correction_cap=5.0, entropy_coef=0.01),
    "dr-grpo": RlConfig(
        aggregation="sequence-sum", aggregation_length=30, dual_clip=3.0, correction="geo-rs", reject_low=0.5, reject_high=2.0
    ),
    "normalised": RlConfig(correction="tis", correction_normalize=True),
    "unbiased": RlConfig(kl_coef=0.1, kl_estimator="unbiased", correction="seq-mis", correction_veto=1e-4),
}


def packed(batch, *, budget=8192, minibatches=1):
    return [m[0] for m in pack_step(batch, minibatches=minibatches, ranks=1, tokens_per_microbatch=budget)]


def how(policy, **kw):
    from megatron_gptoss.trainer.how import Update

    return Update(policy=policy, **kw)


def made(one_rank, policy):
    t = trainer(one_rank)
    if policy.kl_coef:
        t.keep_reference()
    return t


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_norm_do_not_depend_on_the_packing(one_rank, name):
    policy, batch = VARIANTS[name], samples(9, seed=2)
    a = made(one_rank, policy).update(packed(batch), how(policy))
    b = made(one_rank, policy).update(packed(batch[::-1], budget=40), how(policy))
    assert a.num_tokens == b.num_tokens and a.num_updates == b.num_updates == 1
    assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=1e-7)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for own, other in zip(a.measures, b.measures, strict=True):
        assert (own.name, own.value) == (other.name, pytest.approx(other.value, rel=1e-4, abs=1e-5))
    assert [(w.name, w.position) for w in a.worst] == [(w.name, w.position) for w in b.worst]


@pytest.mark.parametrize("name", VARIANTS)
def test_on_policy_the_ratio_is_exactly_one_though_the_forward_pass_wavers(one_rank, name, monkeypatch):
    policy = VARIANTS[name]
    t = made(one_rank, policy)
    forward = t._forward
    monkeypatch.setattr(t, "_forward", lambda *a: forward(*a) + 1e-3 * torch.randn(2, 1))
    batch = packed(samples(5, seed=4))
    stats = t.update(batch, how(policy))
    assert (stats.ratio_max_abs_dev, stats.clip_fraction) == (0.0, 0.0)
    old = [t.score(m) for m in batch]
    assert t.update(batch, how(policy), old).ratio_max_abs_dev > 1e-5, "the control: scored log-probs let the wavering in"


def test_a_ratio_that_is_not_one_on_policy_stops_the_run(one_rank, monkeypatch):
    from megatron_gptoss.trainer import step

    honest = step.objective
    monkeypatch.setattr(step, "objective", lambda *a, **kw: honest(*a, **(kw | {"old_logp_N": kw["logp_N"].detach() - 1e-6})))
    with pytest.raises(AssertionError, match="an on-policy update has a ratio"):
        trainer(one_rank).update(packed(samples(5, seed=4)), how(RlConfig()))


def test_normalised_weights_by_hand(one_rank):
    t, batch = trainer(one_rank), samples(4, seed=3)
    mb = packed(batch)[0][0]
    w = torch.exp((t.score([mb])[0].logp_N - mb.engine_logp_N).clamp(max=math.log(2.0)))
    expected = -(w / w.mean() * mb.advantage_N).mean()
    assert t.update(packed(batch), how(VARIANTS["normalised"])).loss == pytest.approx(expected.item(), rel=1e-5)


class TestNotFinite:
    def spoilt(self, value):
        """50 sequences, one log-prob of the engine spoilt."""
        batch = samples(50, seed=6)
        place = batch[7].trained.index(True)
        logp = [value if i == place else lp for i, lp in enumerate(batch[7].engine_logp)]
        return [*batch[:7], replace(batch[7], engine_logp=tuple(logp)), *batch[8:]]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_below_the_rate_it_is_masked_and_counted(self, one_rank, value):
        batch = self.spoilt(value)
        stats = trainer(one_rank).update(packed(batch), how(RlConfig(max_unusable_fraction=0.01)))
        assert not stats.skipped and math.isfinite(stats.loss)
        shares = {m.name: m.value for m in stats.measures}
        assert shares["mismatch/unusable_fraction"] == pytest.approx(1 / sum(s.num_trained for s in batch))

    def test_above_the_rate_the_run_stops_before_the_optimizer_steps(self, one_rank):
        t = trainer(one_rank)
        before = t.fingerprint()["weights"]
        with pytest.raises(TrainerFailed, match=r"^step-3: 1 of \d+ trained tokens .* rl\.max_unusable_fraction = 0\."):
            t.update(packed(self.spoilt(math.nan)), how(RlConfig(max_unusable_fraction=0.0), label="step-3"))
        assert t.fingerprint()["weights"] == before


def test_the_worst_token_is_named_with_its_place(one_rank):
    batch = samples(6, seed=8)
    place = max(i for i, x in enumerate(batch[2].trained) if x)
    far = replace(batch[2], engine_logp=(*batch[2].engine_logp[:place], -30.0, *batch[2].engine_logp[place + 1 :]))
    worst = trainer(one_rank).update(packed([*batch[:2], far, *batch[3:]], budget=60), how(RlConfig())).worst
    assert (worst[0].name, worst[0].position, worst[0].token_id) == (far.name, place, far.token_ids[place])
    assert worst[0].engine_logp == -30.0
    gaps = [abs(w.trainer_logp - w.engine_logp) for w in worst]
    assert gaps == sorted(gaps, reverse=True) and len(worst) == 8


class TestScores:
    """StepStats.scores: each sample's tokens as the policy that sampled saw them, with their advantages."""

    def test_nobody_asked_nothing_is_kept_and_the_step_has_the_same_bits(self, one_rank):
        batch = packed(samples(6, seed=2), budget=60)
        plain, kept = (trainer(one_rank).update(batch, how(RlConfig(), keep_scores=keep)) for keep in (False, True))
        assert plain.scores == () and len(kept.scores) == 6
        assert replace(kept, scores=()) == plain

    @pytest.mark.parametrize("kind", ["on-policy", "two minibatches, two epochs", "measured"])
    def test_they_are_what_a_pass_before_the_step_scores(self, one_rank, kind):
        asked, t = samples(8, seed=2), trainer(one_rank)
        batches = packed(asked, budget=60, minibatches=2 if "minibatches" in kind else 1)
        scored = [t.score(m) for m in batches]
        logp_N = [each.logp_N for of_minibatch in scored for each in of_minibatch]
        before = by_sample(zip([b for m in batches for b in m], logp_N, strict=True))
        policy = RlConfig(minibatches=len(batches), epochs=len(batches))
        if kind == "measured":
            stats = t.measure(batches[0], how(policy, keep_scores=True))
        else:
            stats = t.update(batches, how(policy, keep_scores=True), scored if len(batches) > 1 else None)
        assert stats.num_updates == {"on-policy": 1, "measured": 0}.get(kind, 4)
        assert {each.name: list(each.trainer_logp) for each in stats.scores} == before
        assert {each.name: set(each.advantage) for each in stats.scores} == {s.name: {torch.tensor(s.advantage).item()} for s in asked}

    def test_a_log_prob_that_cannot_be_used_is_nan_and_its_neighbours_stay(self, one_rank):
        batch = TestNotFinite().spoilt(math.nan)
        place = [i for i, flag in enumerate(batch[7].trained) if flag].index(batch[7].trained.index(True))
        stats = trainer(one_rank).update(packed(batch), how(RlConfig(max_unusable_fraction=0.01), keep_scores=True))
        found = {each.name: each.trainer_logp for each in stats.scores}
        assert [i for i, x in enumerate(found[batch[7].name]) if math.isnan(x)] == [place]
        assert not any(math.isnan(x) for name, logp in found.items() if name != batch[7].name for x in logp)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rl.advantage=gae", "--rl.credit=sequence"], ["rl.advantage", 'rl.credit = "token" or "turn"']),
        (["--rl.advantage=gae", "--rl.critic_warmup_steps=40"], ["rl.critic_warmup_steps = 40", "run.steps = 40", "at most 39"]),
        (["--rl.gamma=0.9"], ["rl.gamma = 0.9", 'rl.credit = "turn"']),
        (["--rl.dual_clip=0.5"], ["rl.dual_clip = 0.5", "more than 1"]),
        (["--rl.dual_clip=3.0", "--rl.surrogate=cispo"], ["rl.dual_clip = 3.0", "rl.surrogate"]),
        (["--rl.aggregation=sequence-sum"], ["rl.aggregation_length = 200"]),
        (["--rl.aggregation_length=5"], ["rl.aggregation_length = 5", "or 0 with another"]),
        (["--rl.kl_in=reward", "--rl.kl_estimator=unbiased"], ["rl.kl_in", '"k1" or "k3"']),
        (["--rl.kl_coef=0.1", "--rl.kl_estimator=k1"], ['rl.kl_in = "loss" (default)', "gradient is 0", 'rl.kl_in = "reward"']),
        (["--rl.overlong_buffer_tokens=200"], ["rl.overlong_buffer_tokens = 200", "such as 40"]),
        (["--rollout.group_size=1"], ["rollout.group_size = 1", "reinforce++"]),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_what_would(flags, words):
    (message,) = broken_rules(load(*parse_flags([TINY, *flags])))
    assert all(word in message for word in words), message


def test_reinforce_needs_no_group():
    assert broken_rules(load(*parse_flags([TINY, "--rollout.group_size=1", "--rl.advantage=reinforce++"]))) == []
