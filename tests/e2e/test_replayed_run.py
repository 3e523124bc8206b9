"""A whole run that replays the engine's routes, and an archived step of it trained again with them."""

import json
import subprocess
import sys

import pytest

from tests.helpers.runs import CONFIGS, ROOT, SMALL, metrics, must

LAYERS = 2  # of configs/tiny.toml


def test_a_run_replays_its_engine_s_routes_and_its_archive_trains_again_bit_for_bit(warm, tmp_path):
    flags = ["--rl.router_replay=engine", "--rl.old_logp=scored", "--run.steps=2", "--run.save_every=1", "--run.final_eval_prompts=0"]
    must("train", *CONFIGS, *SMALL, *flags, "--run.id=r", "--init", str(warm), cwd=tmp_path)
    run = tmp_path / "runs" / "demo-r"
    rows = metrics(run)
    for step in (1, 2):
        archive = run / "rollouts" / f"step-{step}.jsonl"
        rollouts = [json.loads(line) for line in archive.read_text().splitlines()]
        assert all(r["routes"]["num_experts"] == 4 for r in rollouts)
        assert any(r["num_tool_calls"] for r in rollouts), "a prefix was told of again"
        # Every token of every conversation was run but the last.
        tokens = sum(len(r["token_ids"]) for r in rollouts)
        assert rows[step]["router/missing_rows"] == LAYERS * len(rollouts)
        assert rows[step]["router/replayed_fraction"] == pytest.approx(1 - len(rollouts) / tokens, rel=1e-12)
        assert rows[step]["router/rerouted_rows"] == 0
        assert (rows[step]["policy/ratio_max_abs_dev"], rows[step]["policy/clip_fraction"]) == (0.0, 0.0), "scored, with the same routes"

    tool = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(run), "--step", "2"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal") == 6
    archive.write_text("\n".join(json.dumps(r | {"routes": None}) for r in rollouts))
    without = subprocess.run(tool, capture_output=True, text=True)
    assert without.returncode == 2 and "holds no routes" in without.stderr
