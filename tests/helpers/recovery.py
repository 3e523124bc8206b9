"""An engine, then a trainer rank, are killed in a run of any size: what the run itself mends, and what a resume goes on from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.helpers.runs import alive, finished, gptoss, metrics, must, tree, wait_for, words_of

STEPS = 12
FLAGS = (f"--run.steps={STEPS}", "--run.save_every=2", "--run.eval_every=0", "--run.final_eval_prompts=4", "--rl.drop_uniform_groups=false")


def gpu_memory_mib() -> int:
    """Used on this machine's GPUs, or on those of CUDA_VISIBLE_DEVICES, by whomever; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    which = [f"--id={gpus}"] if (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    query = ["nvidia-smi", *which, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))


def killed_and_resumed(*arguments: str, cwd: Path, patience_s: float) -> None:
    """Runs `gptoss train` with these arguments.

    An engine dies in the middle and the run goes on; a trainer rank dies and the run ends, with nothing left of it in the machine or on its
    GPUs; resumed, it comes to its end. `patience_s`: for a start, and for any of these.
    """
    before = gpu_memory_mib()
    driver = gptoss("train", *arguments, *FLAGS, "--run.name=killed", "--run.id=0", cwd=cwd, background=True)
    run = cwd / "runs" / "killed-0"
    family = []
    saved = run / "checkpoints" / f"step-{4:06d}" / "COMPLETE"

    def kill(name: str) -> None:
        family.extend(p for p in tree(driver.pid) if p not in family)
        victim = next(p for p in family if p.is_running() and words_of(p).startswith(name))
        victim.kill()

    def gone(condition: bool) -> bool:
        return condition or driver.poll() is not None

    try:
        wait_for(lambda: gone(finished(run, 1)), "step 1", timeout=patience_s)
        assert driver.poll() is None, (cwd / "terminal.txt").read_text()
        kill("ray::Engine")
        wait_for(lambda: gone(saved.exists()), "step 4's checkpoint", timeout=patience_s)
        assert driver.poll() is None, (cwd / "terminal.txt").read_text()
        kill("ray::TrainerWorker")
        driver.wait(timeout=patience_s)
    finally:
        driver.kill()
    text = (cwd / "terminal.txt").read_text()
    wait_for(lambda: not alive(family), f"the end of {alive(family)}", timeout=60)
    wait_for(lambda: gpu_memory_mib() <= before, f"the return of GPU memory to {before} MiB", timeout=60)
    assert driver.returncode == 1, text
    assert re.search(r"trainer rank \d+ failed while it should \w+: its process is gone.*\nLog .*trainer-\d+\.log", text), text
    hint = text.splitlines()[-1]
    assert hint.endswith(f"is whole. Go on from it with: gptoss train --resume {run.relative_to(cwd)}"), text
    rows = metrics(run)
    assert 4 <= max(rows) < STEPS
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows.values()) == 1

    must("train", "--resume", str(run), cwd=cwd, timeout=patience_s)
    rows = metrics(run)
    assert sorted(step for step in rows if step > 0) == list(range(1, STEPS + 1))
    assert all(row["policy/ratio_max_abs_dev"] == 0.0 for step, row in rows.items() if step > 0)
    wait_for(lambda: gpu_memory_mib() <= before, f"the return of GPU memory to {before} MiB", timeout=60)
