"""Laws of one training world of one rank: packing invariance, on-policy exactness, refusal of values that are not finite, exact resume."""

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.errors import CheckpointError, TrainerFailed
from megatron_gptoss.parallel.packing import pack_step
from tests.helpers.training import MILD, samples, trainer

PPO = RlConfig()


def packed(batch, *, budget=8192, minibatches=1):
    return [m[0] for m in pack_step(batch, minibatches=minibatches, ranks=1, tokens_per_microbatch=budget)]


def how(policy=PPO, **kw):
    from megatron_gptoss.trainer.how import Update

    return Update(policy=policy, **kw)


def weights(t):
    return {n: p.detach().clone() for n, p in t.module.named_parameters()}


def test_scores_are_the_log_softmax_of_the_logits(one_rank):
    t = trainer(one_rank)
    sample = samples(1, seed=1)[0]
    with torch.no_grad():
        tokens = torch.tensor(sample.token_ids)
        logits = t.module(input_ids=tokens[None], position_ids=torch.arange(len(tokens))[None])[0]
    by_hand = [torch.log_softmax(logits[i - 1] / 0.7, -1)[tokens[i]].item() for i, x in enumerate(sample.trained) if x]
    assert t.score(packed([sample])[0], temperature=0.7)[0].logp_N.tolist() == pytest.approx(by_hand, abs=1e-5)


def test_loss_and_update_do_not_depend_on_the_packing(one_rank):
    batch = samples(9, seed=2)
    one, many = trainer(one_rank), trainer(one_rank)
    a = one.update(packed(batch), how())
    b = many.update(packed(batch[::-1], budget=40), how())
    assert len(packed(batch, budget=40)[0]) > 3
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    assert a.num_tokens == b.num_tokens == sum(s.num_trained for s in batch)
    # Adam's first step is lr * sign(g): compare where the gradient is not lost in rounding
    for name, p in weights(one).items():
        assert (p - weights(many)[name]).abs().mean() < 1e-4, name


def test_the_loss_by_hand(one_rank):
    t = trainer(one_rank)
    batch = samples(3, seed=3)
    scores = t.score(packed(batch)[0])[0].logp_N
    mb = packed(batch)[0][0]
    w = torch.exp((scores - mb.engine_logp_N).clamp(max=math.log(2.0)))
    expected = -(w * mb.advantage_N).mean()  # ratio 1: the surrogate is the advantage itself
    assert t.update(packed(batch), how()).loss == pytest.approx(expected.item(), rel=1e-5)


def test_on_policy_the_ratio_is_exactly_one_even_if_the_forward_pass_wavers(one_rank, monkeypatch):
    t = trainer(one_rank)
    forward = t._forward
    monkeypatch.setattr(t, "_forward", lambda *a: forward(*a) + 1e-3 * torch.randn(2, 1))  # another result each time it runs
    stats = t.update(packed(samples(5, seed=4)), how())
    assert stats.ratio_max_abs_dev == 0.0
    assert stats.clip_fraction == 0.0
    # the control: with scored log-probs the same wavering shows
    batch = packed(samples(5, seed=4))
    old = [t.score(m) for m in batch]
    assert t.update(batch, how(), old).ratio_max_abs_dev > 1e-5


# PyTorch's optimizer, and ours, which reads gradients where they lie.
@pytest.mark.parametrize("how_optimized", [{}, {"optimizer_states": "bfloat16"}, {"optimizer_offload": 0.5}], ids=str)
def test_between_updates_gradients_take_no_memory_and_nothing_else_differs(one_rank, tmp_path, how_optimized):
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import load_training_state, save_training_state

    def held(t):
        return [buffer.grad_data.untyped_storage().nbytes() for buffer in (*t.model.buffers, *t.model.expert_parallel_buffers)]

    lean, plain = trainer(one_rank, **how_optimized), trainer(one_rank, **how_optimized)
    whole = held(lean)
    assert sum(whole) >= 4 * sum(p.numel() for p in lean.module.parameters())  # padded
    for step in range(3):
        lean.give_gradients_back()
        lean.give_gradients_back()  # each engine that is restarted asks for it
        assert held(lean) == [0] * len(whole)
        batch = packed(samples(6, seed=30 + step))
        scored = [t.score(batch[0])[0].logp_N.tolist() for t in (lean, plain)]
        assert scored[0] == scored[1] and held(lean) == [0] * len(whole), "scoring needs none"
        stats = [t.update(batch, how()) for t in (lean, plain)]
        assert (stats[0].loss, stats[0].grad_norm) == (stats[1].loss, stats[1].grad_norm) and stats[0].grad_norm > 0
        assert held(lean) == whole
        assert all(torch.equal(p, weights(plain)[name]) for name, p in weights(lean).items())
    lean.give_gradients_back()
    parts = {"model": lean.model, "optimizer": lean.optimizer, "schedule": lean.schedule}
    save_training_state(tmp_path / "state", **parts, config=MILD, progress=Progress(3, 3, 7))
    again = trainer(one_rank, **how_optimized)
    again.give_gradients_back()
    load_training_state(tmp_path / "state", model=again.model, optimizer=again.optimizer, schedule=again.schedule)
    batch = packed(samples(6, seed=40))
    for t in (again, plain):
        t.update(batch, how())
    assert all(torch.equal(p, weights(plain)[name]) for name, p in weights(again).items())


def test_a_rank_that_has_not_started_has_nothing_to_give_back():
    """An engine that starts first and dies in its start asks for room."""
    from megatron_gptoss.trainer.worker import TrainerWorker

    rank = object.__new__(TrainerWorker)  # the constructor takes this process's output
    rank.settings, rank.critic = SimpleNamespace(use_gpu=False), None
    rank.free_cache()
    given = []
    rank.trainer = SimpleNamespace(give_gradients_back=lambda: given.append("policy"))
    rank.critic = SimpleNamespace(give_gradients_back=lambda: given.append("critic"))
    rank.free_cache()
    assert given == ["policy", "critic"]


def test_off_policy_the_first_update_has_ratio_one_and_the_second_has_not(one_rank):
    t = trainer(one_rank)
    policy = PPO.model_copy(update={"minibatches": 2, "epochs": 2})
    batch = packed(samples(6, seed=5), minibatches=2)
    old = [t.score(m) for m in batch]
    first = trainer(one_rank)
    assert first.update(batch[:1], how(), old[:1]).ratio_max_abs_dev == 0.0, "scoring and updating are the same code path, bit for bit"
    stats = t.update(batch, how(policy), old)
    assert stats.ratio_max_abs_dev > 1e-4
    assert t.schedule.num_steps == 4


def test_measuring_says_what_an_update_would_and_changes_nothing(one_rank):
    t = trainer(one_rank)
    before = t.fingerprint()
    batch = packed(samples(5, seed=17), budget=50)
    seen = t.measure(batch[0], how())
    assert t.fingerprint() == before
    assert seen.num_updates == 0
    done = t.update(batch, how())
    assert (seen.loss, seen.k3, seen.logp_abs_max, seen.entropy) == (done.loss, done.k3, done.logp_abs_max, done.entropy)
    assert seen.ratio_max_abs_dev == 0.0


@pytest.mark.parametrize("policy", [None, PPO, RlConfig(correction_normalize=True)])
def test_a_minibatch_without_a_trained_token_changes_nothing_though_moments_would(one_rank, policy):
    t, batch = trainer(one_rank), samples(2, seed=6)
    t.update(packed(batch), how(policy))
    before = t.fingerprint()
    nothing = [replace(s, trained=(False,) * len(s.trained)) for s in batch]
    stats = t.update(packed(nothing), how(policy))
    assert t.fingerprint() == before
    assert (stats.num_tokens, stats.num_updates, stats.skipped, stats.grad_norm, stats.loss) == (0, 0, False, 0.0, 0.0)


def test_kl_to_the_reference_is_zero_at_first_and_grows(one_rank):
    t = trainer(one_rank)
    t.keep_reference()
    policy = PPO.model_copy(update={"kl_coef": 0.1})
    batch = packed(samples(4, seed=6))
    before = weights(t)
    first = t.update(batch, how(policy))
    assert first.kl_ref == 0.0
    assert any(not torch.equal(p, before[n]) for n, p in weights(t).items()), "scoring the reference must put the policy's weights back"
    assert t.update(batch, how(policy)).kl_ref > 1e-6


def test_schedule_by_hand(one_rank):
    from megatron_gptoss.config.schema import TrainerConfig
    from megatron_gptoss.trainer.step import Trainer

    fields = RlConfig(lr=1.0, warmup_steps=2, decay="linear", min_lr_ratio=0.1)
    t = Trainer(MILD, TrainerConfig(), one_rank, fields, total_updates=5)
    rates = []
    for _ in range(5):
        t.schedule.step(increment=1)
        rates.append(t.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])


class TestNotFinite:
    def test_a_loss_that_is_not_finite_changes_nothing_and_is_dumped_by_name(self, one_rank, tmp_path):
        t = trainer(one_rank)
        before = weights(t)
        batch = samples(6, seed=7)
        bad = replace(batch[4], advantage=float("nan"))
        todo = packed([*batch[:4], bad, batch[5]], budget=60)
        stats = t.update(todo, how(dump_dir=tmp_path, label="step-3"))
        assert stats.skipped
        (dump,) = tmp_path.glob("step-3-rank0-microbatch*.pt")
        assert bad.name in torch.load(dump, weights_only=False)["microbatch"].names
        assert str(dump) in stats.problem
        assert all(torch.equal(p, before[n]) for n, p in weights(t).items())
        assert not t.update(packed(batch), how()).skipped
        assert t.skipped_in_a_row == 0

    def test_a_gradient_that_is_not_finite_is_seen_though_the_loss_is_fine(self, one_rank, tmp_path, monkeypatch):
        t = trainer(one_rank)
        before = weights(t)

        class Poison(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return g * float("inf")

        forward = t._forward
        monkeypatch.setattr(t, "_forward", lambda *a: Poison.apply(forward(*a)))
        stats = t.update(packed(samples(3, seed=8)), how(dump_dir=tmp_path, label="step-1"))
        assert stats.skipped
        assert math.isfinite(stats.loss)
        assert "a gradient that is not finite in microbatch 0 of rank 0 (s0, s1, s2)" in stats.problem
        assert list(tmp_path.glob("*.pt"))
        assert all(torch.equal(p, before[n]) for n, p in weights(t).items())

    def test_too_many_in_a_row_end_the_run(self, one_rank):
        t = trainer(one_rank, max_skipped_updates=2)
        bad = packed([replace(samples(1, seed=9)[0], advantage=float("inf"))])
        assert t.update(bad, how()).skipped
        with pytest.raises(TrainerFailed, match="2 updates in a row"):
            t.update(bad, how())


class TestResume:
    def save(self, t, path, step=2, needed_bytes=0):
        from megatron_gptoss.checkpoint.progress import Progress
        from megatron_gptoss.checkpoint.training_state import save_training_state

        save_training_state(
            path,
            config=MILD,
            model=t.model,
            optimizer=t.optimizer,
            schedule=t.schedule,
            progress=Progress(step, step, 7, 0),
            needed_bytes=needed_bytes,
        )

    def load(self, t, path, with_optimizer=True):
        from megatron_gptoss.checkpoint.training_state import load_training_state

        return load_training_state(
            path, model=t.model, optimizer=t.optimizer if with_optimizer else None, schedule=t.schedule if with_optimizer else None
        )

    def test_state_and_the_next_update_are_equal_bit_for_bit(self, one_rank, tmp_path):
        t = trainer(one_rank)
        for seed in (11, 12):
            t.update(packed(samples(4, seed=seed)), how())
        self.save(t, tmp_path / "step-2")
        saved = t.fingerprint()
        torch.rand(3)  # the random state moves on; loading must bring it back
        other = trainer(one_rank, seed=99)
        assert other.fingerprint()["weights"] != saved["weights"]
        progress = self.load(other, tmp_path / "step-2")
        assert (progress.step, progress.policy_version, progress.prompt_cursor) == (2, 2, 7)
        assert other.fingerprint() == saved
        batch = packed(samples(4, seed=13))
        for _ in range(3):
            a, b = t.update(batch, how()), other.update(batch, how())
            assert (a.loss, a.grad_norm, a.learning_rate) == (b.loss, b.grad_norm, b.learning_rate)
        assert t.fingerprint()["weights"] == other.fingerprint()["weights"]
        assert t.fingerprint()["moments"] == other.fingerprint()["moments"]

    def test_weights_alone(self, one_rank, tmp_path):
        t = trainer(one_rank)
        t.update(packed(samples(4, seed=14)), how())
        self.save(t, tmp_path / "step-1")
        other = trainer(one_rank, seed=99)
        self.load(other, tmp_path / "step-1", with_optimizer=False)
        other.weights_changed()
        assert other.fingerprint()["weights"] == t.fingerprint()["weights"]
        other.update(packed(samples(4, seed=15)), how())  # master weights were taken from the loaded ones
        moved = max((p - weights(t)[n]).abs().max().item() for n, p in weights(other).items())
        assert 0 < moved < 0.011, "one Adam step of lr 0.01 from the loaded weights"

    def test_a_full_disk_leaves_the_last_checkpoint_whole(self, one_rank, tmp_path, monkeypatch):
        t = trainer(one_rank)
        self.save(t, tmp_path / "step-1")
        saved = t.fingerprint()
        t.update(packed(samples(4, seed=16)), how())
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
        with pytest.raises(CheckpointError, match=r"step-2.*step-1, is intact"):
            self.save(t, tmp_path / "step-2", needed_bytes=101)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1"]
        other = trainer(one_rank, seed=99)
        self.load(other, tmp_path / "step-1")
        assert other.fingerprint() == saved

    def test_a_torn_checkpoint_is_refused(self, one_rank, tmp_path):
        t = trainer(one_rank)
        self.save(t, tmp_path / "step-1")
        (tmp_path / "step-1" / "COMPLETE").unlink()
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            self.load(t, tmp_path / "step-1")


def test_a_refused_second_minibatch_says_what_was_done_before_it(one_rank):
    t = trainer(one_rank)
    good, bad = samples(2, seed=21), [replace(samples(1, seed=22)[0], advantage=float("nan"))]
    batch = packed([*good, *bad, *bad], minibatches=2)
    old = [t.score(m) for m in batch]
    stats = t.update(batch, how(PPO.model_copy(update={"minibatches": 2})), old)
    assert stats.skipped
    assert stats.num_updates == 1, "the weights have changed, so the engines must hear of it"
    assert t.schedule.num_steps == 1, "an update that was refused does not advance the schedule"


def test_a_resumed_run_takes_rates_from_its_configuration_and_the_count_from_the_checkpoint(one_rank, tmp_path):
    from megatron_gptoss.config.schema import TrainerConfig
    from megatron_gptoss.trainer.step import Trainer

    t = trainer(one_rank, updates=10)
    t.update(packed(samples(2, seed=23)), how())
    TestResume().save(t, tmp_path / "step-1")
    longer = Trainer(MILD, TrainerConfig(), one_rank, RlConfig(lr=0.5, warmup_steps=0, decay="linear", min_lr_ratio=0.0), total_updates=4)
    TestResume().load(longer, tmp_path / "step-1")
    assert longer.update(packed(samples(2, seed=24)), how()).learning_rate == pytest.approx(0.25), "update 2 of 4, linear from 0.5 to 0"
