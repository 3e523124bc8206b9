"""Whole runs whose rollouts run ahead of training: a real engine, a real trainer, interrupted turns, and a resume."""

import json

from megatron_gptoss.rollout.archive import read_archive
from megatron_gptoss.rollout.versions import continued_turns, lags
from megatron_gptoss.tasks.arithmetic import Arithmetic
from tests.helpers.runs import CONFIGS, SMALL, finished, gptoss, metrics, must, wait_for

GROUPS = 4  # of SMALL: 16 sequences in groups of 4
# One conversation at a time: rollouts are slower than updates, so updates meet turns.
SLOW_ENGINE = ["--rollout.max_lag_steps=1", "--rollout.max_running=1", "--run.eval_every=2", "--run.eval_prompts=2"]


def seen(run, step):
    """(prompt ids, all rollouts) of an archived step."""
    groups = read_archive(run / "rollouts" / f"step-{step}.jsonl")
    return [group.prompt.id for group in groups], [rollout for group in groups for rollout in group.rollouts]


def test_rollouts_run_ahead_within_the_bound_and_a_resumed_run_trains_every_prompt_once(warm, tmp_path):
    flags = [*CONFIGS, *SMALL, *SLOW_ENGINE, "--run.save_every=1", "--run.steps=8", "--run.id=o"]
    run = tmp_path / "runs" / "demo-o"
    first = gptoss("train", *flags, "--init", str(warm), cwd=tmp_path, background=True)
    try:
        wait_for(lambda: finished(run, 3), "step 3", timeout=500)
    finally:
        first.kill()  # what was on its way is lost
        first.wait()
    resumed_from = max(int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/COMPLETE"))
    assert resumed_from >= 2
    must("train", "--resume", str(run), cwd=tmp_path)

    rows, trained, continued = metrics(run), [], 0
    for step in range(1, 9):
        ids, rollouts = seen(run, step)
        trained += ids
        row, from_version = rows[step], rows[step]["policy/version"] - rows[step]["train/updates"]
        assert (row["rollout/lag_mean"], row["rollout/lag_max"]) == lags(rollouts, from_version)
        assert row["rollout/lag_max"] <= 1 and row["rollout/groups_stale"] == 0
        assert (row["policy/ratio_max_abs_dev"], row["policy/clip_fraction"]) == (0.0, 0.0), "on-policy by construction"
        assert row["rollout/continued_turns"] == sum(continued_turns(rollout) for rollout in rollouts)
        continued += row["rollout/continued_turns"]
        if row["rollout/lag_max"] == 0 and row["train/updates"]:
            assert row["mismatch/logp_abs_max"] < 1e-4, "nothing but rounding lies between an engine and a trainer of the same policy"
    assert trained == [prompt.id for prompt in Arithmetic(0).prompts("train", 0, 8 * GROUPS)]
    assert continued > 0 and any(row.get("rollout/lag_max") == 1 for row in rows.values())
    assert {2, 4, 6} <= {step for step, row in rows.items() if "eval/success" in row}
    worst = [json.loads(line) for line in (run / "rollouts" / "step-2.jsonl").read_text().splitlines()]
    assert all(count > 0 for line in worst for _, count in line["versions"])
