"""Laws of the critic on one rank: what its values are, what its loss is, that it touches nothing of the policy, that it is resumed bit for
bit; and of its wiring: which value reaches which token."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_gptoss.config.fit import does_not_fit
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.memory import checkpoint_bytes
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.rank_memory import trainer_memory
from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.errors import CheckpointError, TrainerFailed
from megatron_gptoss.loop.train import step_metrics, update
from megatron_gptoss.parallel.packing import pack, pack_step
from megatron_gptoss.rl.advantages import AdvantageRule
from megatron_gptoss.rl.samples import by_sample, make_samples
from megatron_gptoss.rl.value_loss import value_figures
from megatron_gptoss.rollout.versions import runs_of
from megatron_gptoss.types import CriticStats, MicroBatch, Prompt, Rollout, RolloutGroup, StepStats
from tests.helpers.critics import critic, valued
from tests.helpers.training import MILD, samples, trainer

CONFIGS = Path(__file__).parents[2] / "configs"
TINY, DEMO = str(CONFIGS / "tiny.toml"), str(CONFIGS / "demo.toml")
STATS = StepStats(0.0, 0.0, 0.0, 0, 1, False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
ONCE = RlConfig(critic_epochs=1)
PLAIN = RlConfig(value_clip=0.0, critic_epochs=1)


def packed(batch, budget: int = 8192):
    return pack(batch, ranks=1, tokens_per_microbatch=budget)[0]


def by_name(c, batches: list[MicroBatch]) -> dict[str, list[float]]:
    return by_sample(zip(batches, c.values(batches), strict=True))


# ---- values -------------------------------------------------------------------------------------------------------------------------


def test_at_first_every_value_is_zero_and_the_body_is_the_policys(one_rank):
    policy = trainer(one_rank)
    c = critic(one_rank, policy=policy.module, head_seed=None)
    assert all((v == 0).all() for v in c.values(packed(samples(3, seed=1))))
    theirs, ours = dict(policy.module.named_parameters()), dict(c.module.named_parameters())
    assert set(theirs) - set(ours) == {"output_layer.weight"} and set(ours) - set(theirs) == {"value_head.weight", "value_head.bias"}
    for name in set(theirs) & set(ours):
        assert torch.equal(theirs[name], ours[name]) and theirs[name].data_ptr() != ours[name].data_ptr()


def test_a_value_is_the_heads_of_the_hidden_state_before_its_token(one_rank):
    from megatron_gptoss.model.gpt_oss import packed_params

    policy = trainer(one_rank)
    c = critic(one_rank, policy=policy.module)
    (batch,) = packed(samples(3, seed=2))
    hidden_TC = policy.module(
        input_ids=batch.tokens_T[None],
        position_ids=batch.positions_T[None],
        packed_seq_params=packed_params(batch.cu_seqlens, batch.max_seqlen),
        head=lambda hidden, weight: hidden,
    )
    head = c.module.value_head
    weight, bias = head.weight.detach().double(), float(head.bias)
    expected = [float(hidden_TC[t].detach().double() @ weight) + bias for t in batch.predict_N.tolist()]
    assert c.values([batch])[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert batch.tokens_T[batch.predict_N + 1].tolist() == batch.target_N.tolist()


def test_values_and_update_do_not_depend_on_the_packing(one_rank):
    batch = valued(samples(6, seed=3), seed=4)
    one, many = critic(one_rank), critic(one_rank)
    assert len(packed(batch)) == 1 and len(packed(batch, 40)) > 2
    together, apart = by_name(one, packed(batch)), by_name(many, packed(batch, 40))
    for name, values in together.items():
        assert apart[name] == pytest.approx(values, abs=1e-5)
    for rl in (ONCE, RlConfig(aggregation="sequence-mean", critic_epochs=2)):
        a, b = one.update([packed(batch)], rl), many.update([packed(batch, 40)], rl)
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5)
        assert a.clip_fraction == b.clip_fraction


# ---- loss ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "aggregation"), [(0.0, "token-mean"), (0.2, "token-mean"), (0.2, "sequence-mean")])
def test_the_loss_by_hand(one_rank, clip, aggregation):
    batch = valued(samples(4, seed=5), seed=6, untaught=0.3)
    c = critic(one_rank)
    now = by_name(c, packed(batch))
    top = bottom = clipped = taught = 0.0
    for s in batch:
        rows = [(o, r) for o, r, t in zip(s.values, s.value_targets, s.trained, strict=True) if t]
        for v, (old, target) in zip(now[s.name], rows, strict=True):
            if math.isnan(target):
                continue
            plain = (v - target) ** 2
            near = (min(max(v, old - clip), old + clip) - target) ** 2 if clip else plain
            weight = 1 / s.num_trained if aggregation == "sequence-mean" else 1.0
            top, bottom = top + weight * max(plain, near) / 2, bottom + weight
            clipped, taught = clipped + (near > plain), taught + 1
    stats = c.update([packed(batch)], RlConfig(value_clip=clip, aggregation=aggregation, critic_epochs=1))
    assert stats.loss == pytest.approx(top / bottom, rel=1e-5)
    assert stats.clip_fraction == pytest.approx(clipped / taught)
    assert (clipped > 0) == (clip > 0)


def test_a_token_without_a_target_teaches_nothing(one_rank):
    batch = valued(samples(4, seed=7), seed=8, untaught=0.5)
    other = [
        replace(s, values=tuple(v + 9.0 if math.isnan(t) else v for v, t in zip(s.values, s.value_targets, strict=True))) for s in batch
    ]
    a, b = critic(one_rank), critic(one_rank)
    assert a.update([packed(batch)], RlConfig()) == b.update([packed(other)], RlConfig())
    assert a.fingerprint() == b.fingerprint()
    nothing = [replace(s, value_targets=(math.nan,) * len(s.token_ids)) for s in batch]
    before = a.fingerprint()
    stats = a.update([packed(nothing)], RlConfig())
    assert (stats.loss, stats.grad_norm, stats.num_updates, stats.skipped) == (0.0, 0.0, 0, False)
    assert a.fingerprint() == before, "moments and decay do not move it either"


def test_it_learns_what_it_is_taught_and_leaves_the_policy_alone(one_rank):
    policy = trainer(one_rank)
    before = policy.fingerprint()
    c = critic(one_rank, policy=policy.module, head_seed=None)
    batch = valued(samples(4, seed=9), seed=10)
    losses = [c.update([packed(batch)], PLAIN).loss for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0]
    assert policy.fingerprint() == before


def test_its_gradients_take_no_memory_between_updates(one_rank):
    lean, plain = critic(one_rank), critic(one_rank)
    for step in range(2):
        lean.give_gradients_back()
        assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in (*lean.model.buffers, *lean.model.expert_parallel_buffers))
        batch = [packed(valued(samples(4, seed=9), seed=10 + step))]
        assert lean.update(batch, PLAIN) == plain.update(batch, PLAIN)
        assert lean.fingerprint() == plain.fingerprint()


def test_in_bfloat16_the_optimizers_originals_are_the_weights_it_began_from(one_rank):
    c = critic(one_rank, head_seed=None, dtype="bfloat16", lr=1e-3)
    before = {name: p.detach().clone() for name, p in c.module.named_parameters()}
    stats = c.update([packed(valued(samples(4, seed=9), seed=10))], PLAIN)
    assert stats.num_updates == 1 and c.values(packed(samples(1, seed=1)))[0].dtype == torch.float32
    for name, p in c.module.named_parameters():
        rounding = before[name].abs().max() / 128
        assert (p - before[name]).abs().max() <= 1.1e-3 + rounding, name


def test_epochs_and_minibatches_are_updates_of_their_own(one_rank):
    c = critic(one_rank)
    parts = [packed(valued(samples(2, seed=s), seed=s)) for s in (1, 2)]
    stats = c.update(parts, RlConfig(critic_epochs=2, minibatches=2))
    assert (stats.num_updates, c.schedule.num_steps) == (4, 4)


class TestNotFinite:
    def test_an_update_is_refused_and_changes_nothing_and_three_end_the_run(self, one_rank):
        c = critic(one_rank)
        batch = valued(samples(3, seed=11), seed=12)
        place = batch[1].trained.index(True)
        spoilt = replace(batch[1], value_targets=tuple(math.inf if i == place else t for i, t in enumerate(batch[1].value_targets)))
        before = c.fingerprint()
        stats = c.update([packed([batch[0], spoilt])], RlConfig())
        assert stats.skipped and stats.num_updates == 0 and "critic" in stats.problem
        assert c.fingerprint() == before
        c.update([packed([spoilt])], RlConfig())
        with pytest.raises(TrainerFailed, match="3 updates in a row"):
            c.update([packed([spoilt])], RlConfig())

    def test_targets_are_needed(self, one_rank):
        with pytest.raises(ValueError, match="has none"):
            critic(one_rank).update([packed(samples(2, seed=1))], RlConfig())


def test_how_good_values_were_by_hand():
    (s,) = samples(1, seed=1, shortest=6, longest=6)
    s = replace(s, trained=(False, True, True, True, True, False))
    # taught: values 0, 0.5, 1 against 0, 1, 1; the fourth teaches nothing. Var(target) 2/9, of the differences 0, 0.5, 0: 1/18
    s = replace(s, values=(9.0, 0.0, 0.5, 1.0, 7.0, 9.0), value_targets=(9.0, 0.0, 1.0, 1.0, math.nan, 9.0))
    found = value_figures([s])
    assert (found.mean, found.explained_variance) == pytest.approx((0.5, 0.75))
    equal = replace(s, value_targets=(0.0, 1.0, 1.0, 1.0, math.nan, 0.0))
    assert value_figures([equal]).explained_variance == 0.0


# ---- resume -------------------------------------------------------------------------------------------------------------------------


def save(t, path, c=None):
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import save_training_state

    parts = {"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule, "critic": c}
    save_training_state(path, config=MILD, progress=Progress(1, 1, 7), **parts)


def restore(t, path, c=None):
    from megatron_gptoss.checkpoint.training_state import load_training_state

    load_training_state(path, model=t.model, optimizer=t.optimizer, schedule=t.schedule, critic=c)


class TestResume:
    def test_both_models_and_their_next_updates_are_equal_bit_for_bit(self, one_rank, tmp_path):
        from megatron_gptoss.trainer.how import Update

        t, batch = trainer(one_rank), valued(samples(4, seed=13), seed=14)
        c = critic(one_rank, policy=t.module)
        for _ in range(2):
            c.update([packed(batch)], RlConfig())
            t.update([packed(batch)], Update(policy=RlConfig()))
        save(t, tmp_path / "step-1", c)
        other = trainer(one_rank, seed=99)
        again = critic(one_rank, policy=other.module, head_seed=None)
        assert again.fingerprint()["weights"] != c.fingerprint()["weights"]
        restore(other, tmp_path / "step-1", again)
        assert other.fingerprint() == t.fingerprint() and again.fingerprint() == c.fingerprint()
        for seed in (15, 16):
            batch = packed(valued(samples(4, seed=seed), seed=seed))
            assert c.update([batch], RlConfig()) == again.update([batch], RlConfig())
        assert again.fingerprint() == c.fingerprint()

    def test_a_checkpoint_without_a_critic_says_so_and_one_with_it_gives_the_policy_alone(self, one_rank, tmp_path):
        t = trainer(one_rank)
        c = critic(one_rank, policy=t.module)
        save(t, tmp_path / "without")
        with pytest.raises(CheckpointError, match=r"without has no critic.*--init"):
            restore(t, tmp_path / "without", c)
        save(t, tmp_path / "with", c)
        other = trainer(one_rank, seed=99)
        restore(other, tmp_path / "with")
        assert other.fingerprint() == t.fingerprint()


# ---- wiring -------------------------------------------------------------------------------------------------------------------------


def rollout(prompt: str, index: int, reward: float, sampled: str) -> Rollout:
    flags = tuple(c == "x" for c in sampled)
    return Rollout(
        prompt=Prompt(prompt, "arithmetic", "1+1", "2"), index=index, token_ids=tuple(range(5, 5 + len(flags))), sampled=flags,
        logp=tuple(-0.5 if f else 0.0 for f in flags), versions=runs_of([(0, sum(flags))]), num_tool_calls=1,
        stop_reason="final", answer="2", reward=reward, reward_parts=(),
    )  # fmt: skip


GROUPS = [
    RolloutGroup(Prompt("p/1", "arithmetic", "1+1", "2"), (rollout("p/1", 0, 1.0, "..xx.x"), rollout("p/1", 1, 0.0, ".xx"))),
    RolloutGroup(Prompt("p/2", "arithmetic", "1+1", "2"), (rollout("p/2", 0, 1.0, ".x"),)),
]
VALUES = {"p/1#0": [0.2, 0.4, 0.6], "p/1#1": [0.5, 0.1], "p/2#0": [0.7]}  # of every trained token, in order


class World:
    """A critic that knows VALUES; keeps what it and the policy are asked to train on."""

    def __init__(self):
        self.trained, self.taught, self.measured = [], [], []

    def values(self, minibatches):
        for batch in (b for m in minibatches for rank in m for b in rank):
            left = {name: list(values) for name, values in VALUES.items()}
            yield batch, torch.tensor([left[batch.names[s]].pop(0) for s in batch.sample_N.tolist()])

    def update_critic(self, minibatches, rl):
        self.taught += [b for m in minibatches for rank in m for b in rank]
        return CriticStats(0.25, 0.5, 0.1, 1e-3, 1, False)

    def update(self, minibatches, how, old):
        self.trained += [b for m in minibatches for rank in m for b in rank]
        return STATS

    def measure(self, minibatch, how):
        self.measured += [b for rank in minibatch for b in rank]
        return replace(STATS, num_updates=0)


def run(*flags: str, step: int = 9, ranks: int = 1, budget: int = 100):
    config = load(*parse_flags(["--rl.advantage=gae", *flags])).config
    world = World()
    session = SimpleNamespace(
        config=config, plan=SimpleNamespace(on_policy=True), world=world, clock=lambda _: nullcontext(), note_skip=lambda *_: None,
        note_critic=lambda *_: None, show_memory=lambda: None, archiving=SimpleNamespace(begin=lambda: None),
        dir=SimpleNamespace(path=Path("nowhere")),
        pack=lambda made, minibatches=1: pack_step(made, minibatches=minibatches, ranks=ranks, tokens_per_microbatch=budget),
    )  # fmt: skip
    return world, update(session, step, GROUPS)


def found(batches, field: str) -> dict[str, list[float]]:
    return by_sample((b, getattr(b, field)) for b in batches)


def close(theirs: dict[str, list[float]], ours: dict[str, list[float]]) -> bool:
    return {n: pytest.approx(v, abs=1e-6) for n, v in ours.items()} == theirs


@pytest.mark.parametrize(("ranks", "budget"), [(1, 100), (1, 6), (2, 100)])
def test_values_reach_their_tokens_and_the_reward_comes_with_the_last(ranks, budget):
    # lambda 1: A = R - V. The target is R everywhere.
    world, stats = run("--rl.gae_lambda=1.0", ranks=ranks, budget=budget)
    assert close(found(world.trained, "advantage_N"), {"p/1#0": [0.8, 0.6, 0.4], "p/1#1": [-0.5, -0.1], "p/2#0": [0.3]})
    assert close(found(world.taught, "value_N"), VALUES)
    assert close(found(world.taught, "value_target_N"), {"p/1#0": [1.0] * 3, "p/1#1": [0.0] * 2, "p/2#0": [1.0]})
    assert stats.critic.value_mean == pytest.approx(2.5 / 6)
    # lambda 0: A = r + V' - V, and only the last token is paid.
    world, _ = run("--rl.gae_lambda=0.0", ranks=ranks, budget=budget)
    assert close(found(world.trained, "advantage_N"), {"p/1#0": [0.2, 0.2, 0.4], "p/1#1": [-0.4, -0.1], "p/2#0": [0.3]})
    assert close(found(world.taught, "value_target_N"), {"p/1#0": [0.4, 0.6, 1.0], "p/1#1": [0.1, 0.0], "p/2#0": [1.0]})
    # lambda 1/2, gamma 1/2: deltas of p/1#0: 0.2 - 0.2 = 0, 0.3 - 0.4 = -0.1, 0.4; A_2 = 0.4, A_1 = -0.1 + 0.1 = 0, A_0 = 0
    world, _ = run("--rl.gae_lambda=0.5", "--rl.gamma=0.5", ranks=ranks, budget=budget)
    assert close({"p/1#0": found(world.trained, "advantage_N")["p/1#0"]}, {"p/1#0": [0.0, 0.0, 0.4]})


def test_by_turn_a_turns_first_token_is_taught_and_pays_for_the_whole_turn():
    # p/1#0 has turns of two tokens and of one, with values 0.2 and 0.6; lambda 1: 1 - 0.2 and 1 - 0.6
    world, _ = run("--rl.credit=turn", "--rl.gae_lambda=1.0")
    assert close(found(world.trained, "advantage_N"), {"p/1#0": [0.8, 0.8, 0.4], "p/1#1": [-0.5, -0.5], "p/2#0": [0.3]})
    targets = found(world.taught, "value_target_N")["p/1#0"]
    assert [targets[0], targets[2]] == [1.0, 1.0] and math.isnan(targets[1])


def test_while_the_critic_warms_up_the_policy_is_measured_and_not_updated():
    world, stats = run("--rl.critic_warmup_steps=3", step=3)
    assert world.trained == [] and world.measured and world.taught and stats.num_updates == 0
    world, stats = run("--rl.critic_warmup_steps=3", step=4)
    assert world.trained and not world.measured and stats.num_updates == 1
    names = {n for n in step_metrics(stats) if n.startswith("critic/")}
    assert names >= {f"critic/{n}" for n in ("loss", "explained_variance", "value_mean", "grad_norm", "lr")}


def test_a_filler_beside_samples_with_values_can_be_packed():
    made = make_samples(GROUPS[1:], AdvantageRule("gae", credit="token"), values=VALUES)
    (first,), (second,) = pack(made, ranks=2, tokens_per_microbatch=100)
    assert sorted(b.value_N.numel() for b in (first, second)) == [0, 1]


# ---- plan ---------------------------------------------------------------------------------------------------------------------------


def planned(*flags: str):
    loaded = load(*parse_flags([TINY, DEMO, "--rl.advantage=gae", *flags]))
    return loaded, make_plan(loaded, Cluster(2, 0))


def test_the_flag_alone_is_a_plan_in_which_the_policy_decays_over_the_steps_it_learns_in():
    loaded, plan = planned("--run.steps=40", "--rl.critic_warmup_steps=4", "--rl.minibatches=2", "--rl.critic_epochs=3")
    assert not plan.not_built and (plan.total_updates, plan.critic_updates) == (36 * 2, 40 * 2 * 3)
    assert loaded.config.rl.credited == "token" and not loaded.config.rl.leaves_out_uniform_groups
    plain = make_plan(load(*parse_flags([TINY, DEMO])), Cluster(2, 0))
    assert (plain.total_updates, plain.critic_updates) == (40, 0)


def test_memory_and_disk_count_the_critic_by_hand():
    config = planned()[0].config
    parts = {part.name: part.num_bytes for part in trainer_memory(config)[0].parts}
    critics = 529_296 - 512 * 128 + 128 + 1  # a head of 129 numbers instead of 512 rows
    assert [parts[f"critic's {p}"] for p in ("weights", "gradients", "optimizer")] == [4 * critics, 4 * critics, 8 * critics]
    assert checkpoint_bytes(config) == 16 * (529_296 + critics)


def test_two_stages_hold_one_value_head():
    config = planned("--parallel.pipeline=2")[0].config
    first, last = ({p.name: p.num_bytes // 4 for p in rank.parts} for rank in trainer_memory(config))
    assert first["critic's weights"] == first["weights"]
    assert last["critic's weights"] == last["weights"] - 512 * 128 + 129


def test_a_plan_that_fits_without_a_critic_and_not_with_it_names_the_critic():
    base = [str(CONFIGS / "20b.toml"), "--parallel.data=8", "--parallel.expert=8", "--cluster.gpu_memory_gib=120"]
    assert does_not_fit(load(*parse_flags(base))) == ""
    assert "critic's" in does_not_fit(load(*parse_flags([*base, "--rl.advantage=gae"])))
