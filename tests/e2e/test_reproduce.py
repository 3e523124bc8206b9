"""tools/reproduce.py with real runs: a warm start, two steps of one setting, and what is kept and drawn of them."""

import json
import os
import subprocess
import sys

from tests.helpers.runs import CONFIGS, ROOT

SMALL = [
    "--run.steps=2", "--run.final_eval_prompts=4", "--rl.sequences_per_step=16", "--rollout.group_size=4", "--rl.drop_uniform_groups=false",
    "--sft.steps=20", "--sft.sequences_per_step=8", "--sft.min_copy_probability=0.0", "--run.trace_steps=1",
]  # fmt: skip


def test_a_setting_is_run_kept_and_drawn(tmp_path):
    own = ["--only=main", "--seeds=0", "--runs=runs", "--out=docs/kept", "--page=docs/page.md"]
    command = [sys.executable, str(ROOT / "tools" / "reproduce.py"), *CONFIGS, *SMALL, *own]
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    about, *rows = map(json.loads, (tmp_path / "docs" / "kept" / "main-0.jsonl").read_text().splitlines())
    assert (about["setting"], about["steps"], about["ended"]) == ("main", 2, "finished") and about["seconds"] > 0 and about["warm"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"reward/mean", "policy/entropy", "policy/kl_ref", "mismatch/k3"} <= row.keys() for row in rows[1:])
    assert {"eval/success"} <= rows[0].keys() & rows[2].keys()
    assert (tmp_path / "docs" / "kept" / "a.png").stat().st_size > 20_000
    assert "| everything on, the long run | 0 | 2 |" in (tmp_path / "docs" / "page.md").read_text()
    assert "main-0: NOT MET: at least 150 steps in one run of at most 9 minutes, engine start included (2 steps in " in done.stdout
    assert "main-0: met: `policy/ratio_max_abs_dev` is 0.0 at every step (largest 0)" in done.stdout
    assert "holds the last 1 steps of main-0." in (tmp_path / "docs" / "page.md").read_text()
    assert (tmp_path / "docs" / "kept" / "main-0.trace.json.gz").stat().st_size > 500
    assert not list((tmp_path / "runs" / "main-0" / "checkpoints").iterdir()), "nothing goes on from these runs"
    # The timeline of its last step: all processes in it, and the parts of the step inside the step.
    events = json.loads((tmp_path / "runs" / "main-0" / "trace.json").read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    assert set(processes) == {"driver", "trainer-0", "engine-0"}
    of_driver = {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == processes["driver"]}
    assert {"step 2", "rollout", "update", "sync", "pack", "record"} <= of_driver.keys() and "step 1" not in of_driver
    whole = of_driver["step 2"]
    assert all(whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 50_000 for e in of_driver.values())
    of_trainer = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == processes["trainer-0"]}
    assert {"update", "forward, loss and backward", "forward", "optimizer"} <= of_trainer
    beside = [e["name"] for e in events if e["ph"] == "b"]
    assert beside.count("archive") == 1 and len(beside) >= 17, "every conversation has a turn at least"
    # What is kept is not made again.
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and again.stdout.startswith("0 runs to make, 1 kept already"), again.stdout + again.stderr
