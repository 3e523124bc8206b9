"""KL taken off the rewards: scored before the update by policy and reference, paid by each token, and the update itself stays on-policy."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.loop.train import update
from megatron_gptoss.parallel.packing import pack_step
from megatron_gptoss.rl.kl_reward import kl_rewards
from megatron_gptoss.trainer.how import TokenScores
from megatron_gptoss.trainer.start import TrainingWorld
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup, StepStats, VersionRun
from tests.helpers.training import samples

STATS = StepStats(0.0, 0.0, 0.0, 0, 1, False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def rollout(reward: float, index: int) -> Rollout:
    sampled = (False, True, False, True)
    return Rollout(
        prompt=Prompt("p/1", "arithmetic", "1+1", "2"), index=index, token_ids=(5, 6, 7, 8), sampled=sampled, logp=(0.0, -0.5, 0.0, -0.5),
        versions=(VersionRun(0, 2),), num_tool_calls=1, stop_reason="final", answer="2", reward=reward, reward_parts=(),
    )  # fmt: skip


class World:
    """Scores every token with -1 as the policy and with -1.5 as the reference, and keeps what it is asked to train on."""

    by_microbatch = staticmethod(TrainingWorld.by_microbatch)

    def __init__(self):
        self.asked = []

    def score(self, minibatches, temperature, *, reference=False, router_replay="none"):
        self.asked.append(reference)
        value = -1.5 if reference else -1.0
        make = lambda b: TokenScores(torch.full((b.target_N.numel(),), value), torch.zeros(b.target_N.numel()))  # noqa: E731
        return [[[make(b) for b in m[d]] for m in minibatches] for d in range(len(minibatches[0]))]

    def update(self, minibatches, how, old):
        self.advantages = {b.names[s]: [] for m in minibatches for rank in m for b in rank for s in range(len(b.names))}
        for b in (b for m in minibatches for rank in m for b in rank):
            for s, a in zip(b.sample_N.tolist(), b.advantage_N.tolist(), strict=True):
                self.advantages[b.names[s]].append(a)
        self.old = old
        return STATS


def run(*flags: str, ranks: int = 1):
    config = load(*parse_flags(["--rl.advantage=group-mean", "--rl.kl_coef=0.1", *flags])).config
    on_policy = config.rl.minibatches == 1
    world = World()
    session = SimpleNamespace(
        config=config, plan=SimpleNamespace(on_policy=on_policy), world=world, clock=lambda _: nullcontext(), note_skip=lambda *_: None,
        show_memory=lambda: None, archiving=SimpleNamespace(begin=lambda: None), dir=SimpleNamespace(path=Path("nowhere")),
        pack=lambda made, minibatches: pack_step(made, minibatches=minibatches, ranks=ranks, tokens_per_microbatch=10),
    )  # fmt: skip
    group = RolloutGroup(Prompt("p/1", "arithmetic", "1+1", "2"), tuple(rollout(float(i == 0), i) for i in range(4)))
    return world, update(session, 1, [group])


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_pays_and_the_update_stays_on_policy(ranks):
    # k1 is 0.5 a token: each of the two tokens of a rollout pays 0.05. Scores 0.9 and -0.1, -0.1, -0.1: mean 0.15
    world, stats = run("--rl.kl_in=reward", "--rl.kl_estimator=k1", ranks=ranks)
    assert world.asked == [False, True] and world.old is None
    assert world.advantages["p/1#0"] == pytest.approx([0.75, 0.75])
    assert stats.kl_ref == pytest.approx(0.5)
    # credit by token: to go 0.9 and 0.95 of the first, -0.1 and -0.05 of the others
    world, _ = run("--rl.kl_in=reward", "--rl.kl_estimator=k1", "--rl.credit=token", ranks=ranks)
    assert world.advantages["p/1#0"] == pytest.approx([0.75, 0.8])
    assert world.advantages["p/1#3"] == pytest.approx([-0.25, -0.2])


def test_off_policy_the_scores_are_made_once_and_serve_both():
    world, _ = run("--rl.kl_in=reward", "--rl.minibatches=2")
    assert world.asked == [False, True] and world.old is not None


def test_in_the_loss_nothing_is_scored_before_an_on_policy_update():
    world, stats = run()
    assert world.asked == [] and world.old is None and stats is STATS
    assert world.advantages["p/1#0"] == pytest.approx([0.75, 0.75])


def test_what_is_paid_by_hand_and_a_log_prob_that_is_not_finite_pays_nothing():
    batch = pack_step(samples(2, seed=9), minibatches=1, ranks=1, tokens_per_microbatch=8192)[0][0][0]
    n = batch.target_N.numel()
    logp, ref = torch.full((n,), -1.0), torch.full((n,), -1.5)
    ref[0] = -math.inf
    found = kl_rewards([(batch, logp, ref)], estimator="k1", coef=0.1)
    assert [x for name in batch.names for x in found[name]] == pytest.approx([0.0] + [-0.05] * (n - 1))
    assert [len(found[name]) for name in batch.names] == torch.bincount(batch.sample_N).tolist()
