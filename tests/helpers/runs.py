"""Whole runs through the command line, as a person starts them, small enough for a test."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [str(ROOT / "configs" / name) for name in ("tiny.toml", "demo.toml")]
# Small in number, not in kind: the same model, task and engines as the demo.
SMALL = [
    "--run.steps=4", "--run.save_every=2", "--run.eval_every=0", "--run.final_eval_prompts=4", "--rl.sequences_per_step=16",
    "--rollout.group_size=4", "--rl.drop_uniform_groups=false",
]  # fmt: skip


def gptoss(*arguments: str, cwd: Path, background: bool = False, timeout: float = 400) -> subprocess.Popen | subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_gptoss.cli", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "RAY_worker_niceness")}
    # The tests' own settings must not help a run along.
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # packages may come by it
    if background:
        log = (cwd / "terminal.txt").open("w")
        # As from a terminal: a shell starts what it puts into the background deaf to Ctrl-C, and tests may have been started so.
        hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=hear_ctrl_c)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def must(*arguments: str, cwd: Path, timeout: float = 400) -> str:
    """Run and return the terminal's text; the test fails with it when the exit code is not 0."""
    done = gptoss(*arguments, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"gptoss {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def metrics(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def finished(run: Path, step: int) -> bool:
    """The step is written down whole, so the next one has begun."""
    file = run / "metrics.jsonl"
    return file.exists() and any(line.startswith(f'{{"step": {step},') and line.endswith("\n") for line in file.open())


def timeless(row: dict) -> dict:
    """A step's metrics without those that are a clock's."""
    return {k: v for k, v in row.items() if not k.startswith("time") and not k.endswith("tokens_per_s")}


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 240.0, poll: float = 0.05) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout:.0f} s"
        time.sleep(poll)


def tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> str:
    """Its name and its command line; "" when it has ended meanwhile."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


def alive(processes: list[psutil.Process]) -> list[str]:
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return left
