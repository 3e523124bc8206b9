"""PPO with a critic through the command line: the critic learns alone first, then both; from a checkpoint both go on bit for bit."""

import subprocess
import sys

from tests.helpers.runs import CONFIGS, ROOT, SMALL, metrics, must

# So short a warm start seldom earns a reward; punishing length gives every rollout one of its own.
FLAGS = [
    "--rl.advantage=gae", "--rl.critic_warmup_steps=1", "--rl.overlong_buffer_tokens=190", "--run.steps=2", "--run.save_every=1",
]  # fmt: skip


def test_the_critic_learns_alone_then_with_the_policy_and_a_replayed_step_is_equal_in_every_figure(warm, tmp_path):
    text = must("train", *CONFIGS, *SMALL, *FLAGS, "--run.id=gae", "--init", str(warm), cwd=tmp_path)
    assert "learns alone in the first 1 step" in " ".join(text.split())
    run = tmp_path / "runs" / "demo-gae"
    rows = metrics(run)
    assert [rows[step]["train/updates"] for step in (1, 2)] == [0, 1]
    assert [rows[step]["policy/version"] for step in (1, 2)] == [0, 1], "a step of the critic alone gives the engines nothing new"
    for step in (1, 2):
        row = rows[step]
        assert row["critic/updates"] == 4 and row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/lr"] > 0
        assert row["rollout/groups_uniform"] == 0, "groups of equal rewards teach a critic too"
        assert row["policy/ratio_max_abs_dev"] == 0.0
    assert rows[1]["critic/value_mean"] == 0.0 and abs(rows[1]["critic/explained_variance"]) < 1e-12, "at first all values are 0"
    assert rows[2]["critic/value_mean"] < 0.0, "it has learnt that length is punished"

    # Policy and critic of step 1's checkpoint, and step 2's archived rollouts: values, advantages, both losses and gradients.
    tool = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(run), "--step", "2"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal") == 6 + 4
