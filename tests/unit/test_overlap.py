"""The overlapped story itself, loop/overlap.py with all its verbs, told with engines and a trainer that sleep (tools/bench_overlap.py)."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest

from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.rules import broken_rules
from megatron_gptoss.errors import EngineFailed, TrainerFailed
from megatron_gptoss.rollout.archive import read_archive
from megatron_gptoss.tasks.arithmetic import Arithmetic

ROOT = Path(__file__).parents[2]
SMALL = ("--rl.sequences_per_step=8", "--rollout.group_size=2", "--rollout.max_running=4")  # 4 groups a step
GROUPS, SIZE = 4, 2


@pytest.fixture(scope="module")
def bench():
    specification = importlib.util.spec_from_file_location("bench_overlap", ROOT / "tools" / "bench_overlap.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_overlap"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def rows(run: Path) -> list[dict]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "time/step_s" in row]


def prompts(first: int, steps: int) -> list[list[str]]:
    """Names of the samples that so many steps train on, when they take the prompts in order."""
    ids = [prompt.id for prompt in Arithmetic(0).prompts("train", first, steps * GROUPS)]
    return [sorted(f"{i}#{n}" for i in ids[at : at + GROUPS] for n in range(SIZE)) for at in range(0, steps * GROUPS, GROUPS)]


@pytest.mark.parametrize(("lag", "rollout_s", "update_s"), [(0, 0.2, 0.1), (1, 0.4, 0.05), (1, 0.1, 0.3), (1, 0.2, 0.2), (3, 0.3, 0.1)])
def test_every_prompt_is_trained_once_and_in_order_within_the_bound(bench, tmp_path, lag, rollout_s, update_s):
    """Whoever is the slower, also where an evaluation goes through the same engines in between."""
    steps, evaluated = 6, ("--run.eval_every=2", "--run.eval_prompts=3")
    run, session, world = bench.simulated_run(
        tmp_path, "r", rollout_s, update_s, lag, f"--run.steps={steps}", "--run.save_every=0", *evaluated, *SMALL
    )
    assert [sorted(names) for names in world.trained] == prompts(0, steps)
    assert session.progress == Progress(step=steps, policy_version=steps, prompt_cursor=steps * GROUPS)
    for step, row in enumerate(rows(run), start=1):
        archived = [rollout for group in read_archive(run / "rollouts" / f"step-{step}.jsonl") for rollout in group.rollouts]
        lags = [step - 1 - r.version for rollout in archived for r in rollout.versions for _ in range(r.num_tokens)]
        assert row["rollout/lag_max"] == max(lags) <= lag and row["rollout/lag_mean"] == pytest.approx(sum(lags) / len(lags))
        assert row.get("rollout/groups_stale", 0) == 0
        parts = sum(row.get(f"time/{part}_s", 0.0) for part in ("wait", "rollout", "score", "update", "sync"))
        assert ("time/wait_s" in row) == ("time/rollout_s" not in row) == (lag > 0)
        assert parts <= row["time/step_s"], "no second counts twice"
    assert sum("eval/success" in row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())) == 2
    assert sum(session.pool.sampled.values()) > 0 and not [t for t in threading.enumerate() if t.name == "event-loop"]


def test_turns_go_on_under_the_new_policy_and_are_counted(bench, tmp_path):
    run, *_ = bench.simulated_run(tmp_path, "r", 0.6, 0.05, 1, "--run.steps=5", "--run.save_every=0", *SMALL)
    mixed = 0
    for step, row in enumerate(rows(run), start=1):
        archived = [rollout for group in read_archive(run / "rollouts" / f"step-{step}.jsonl") for rollout in group.rollouts]
        assert row["rollout/continued_turns"] == sum(len(rollout.versions) > 1 for rollout in archived), "of one turn each"
        assert all(rollout.stop_reason == "final" for rollout in archived)
        mixed += int(row["rollout/continued_turns"])
    assert mixed > 0, "an update that is so much faster than the rollouts interrupts some"


def test_a_resumed_run_goes_on_with_the_first_prompt_that_was_not_trained_on(bench, tmp_path):
    """What was on its way when the run ended is begun again: the cursor counts prompts that steps have taken."""
    before = Progress(step=3, policy_version=2, prompt_cursor=20)
    _, session, world = bench.simulated_run(tmp_path, "r", 0.1, 0.1, 1, "--run.steps=5", "--run.save_every=0", *SMALL, progress=before)
    assert [sorted(names) for names in world.trained] == prompts(20, 2)
    assert session.progress == Progress(step=5, policy_version=4, prompt_cursor=28)


def test_what_fails_on_either_side_ends_the_run_and_nothing_is_left(bench, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:

        async def dies(self, request):
            raise EngineFailed("engine 1 died")

        broken.setattr(bench.SleepingPool, "generate", dies)
        with pytest.raises(EngineFailed, match="engine 1 died"):
            bench.simulated_run(tmp_path, "pool", 0.1, 0.1, 1, "--run.steps=5", *SMALL)
    with monkeypatch.context() as broken:

        def fails(self, *_):
            raise TrainerFailed("rank 0 failed")

        broken.setattr(bench.SleepingWorld, "update", fails)
        with pytest.raises(TrainerFailed, match="rank 0 failed"):
            bench.simulated_run(tmp_path, "world", 5.0, 0.1, 1, "--run.steps=5", "--rl.sequences_per_step=4", *SMALL[1:])
    assert not [thread for thread in threading.enumerate() if thread.name == "event-loop"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rl.correction=none"], ["rollout.max_lag_steps = 1", 'rl.correction = "none"', 'Use rl.correction = "tis"']),
        (["--rollout.deterministic=true"], ["rollout.deterministic = true", "Use rollout.deterministic = false"]),
        (["--cluster.device=cuda", "--cluster.share_gpus=true"], ["cluster.share_gpus = true", "Use cluster.share_gpus = false"]),
    ],
)
def test_what_cannot_overlap_is_refused(flags, words):
    tiny = str(ROOT / "configs" / "tiny.toml")
    messages = broken_rules(load(*parse_flags([tiny, "--rollout.max_lag_steps=1", *flags])))
    assert any(all(word in message for word in words) for message in messages), messages
    assert not any("max_lag_steps" in message for message in broken_rules(load(*parse_flags([tiny, *flags])))), "nor without overlap"


def test_costs_are_means_of_the_steps_that_count(bench, tmp_path):
    lines = [
        {"step": step, "time/step_s": step, "time/wait_s": step / 2, "rollout/lag_mean": 0.5, "rollout/lag_max": step % 2,
         "rollout/groups_stale": 1.0, "rollout/continued_turns": 4.0}
        for step in (1, 2, 3, 4)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 0, "eval/success": 1.0}, *lines]))
    found = bench.cost(tmp_path, 2)
    assert (found.steps, found.step_s, found.parts, found.lag_max, found.stale, found.continued) == (2, 3.5, {"wait": 1.75}, 1, 2.0, 4.0)
