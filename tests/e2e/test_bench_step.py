"""tools/bench_step.py makes real steps."""

import json
import subprocess
import sys

from tests.helpers.runs import ROOT


def test_two_steps_of_random_weights_on_a_cpu(tmp_path):
    tool = [sys.executable, str(ROOT / "tools" / "bench_step.py"), str(ROOT / "configs" / "tiny.toml")]
    size = ["--length", "24", "--sequences", "8", "--group", "4", "--steps", "2"]
    where = [f"--run.dir={tmp_path}", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([*tool, *size, *where, "--rl.old_logp=scored"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert found["steps"] == 1 and list(parts) == ["rollout", "score", "update", "sync", "whole step"]
    assert 8 < parts["rollout"]["tokens"] <= 8 * 24 and parts["update"]["tokens"] == parts["rollout"]["tokens"], "every rollout is trained"
    assert sum(part["seconds"] for part in found["parts"][:-1]) <= parts["whole step"]["seconds"]
    assert "tokens/s a GPU" in done.stdout and not list(tmp_path.glob("bench-step-*/checkpoints/*"))
