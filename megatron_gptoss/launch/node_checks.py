"""Is what this node computes with in order: processors, GPUs and their links, memory, clock?

In: the plan, and what gpu_probe.py measured. Out: `Check`s. Never raises for a bad machine. Packages, files and ports are
config/machine.py's; whether trainer and engine agree is `gptoss check --parity`'s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_gptoss.config.fit import host_bytes_per_node
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.machine import Check
from megatron_gptoss.config.plan import RunPlan

PROBE = Path(__file__).with_name("gpu_probe.py")
PROBE_TIMEOUT_S = 90
# Least TFLOP/s of a bfloat16 product of 8192^3 in a healthy GPU; an H200 was measured at 778 (docs/performance.md).
LEAST_TFLOPS = {"H200": 550.0, "H100": 450.0}
LEAST_SHARE = 0.8  # of the node's fastest, in products and in links: a GPU that throttles is slower than its neighbours
MAX_CLOCK_S = 5.0  # between this node and the file system that all nodes write to


def node_checks(loaded: Loaded, plan: RunPlan) -> list[Check]:
    return [_memory(loaded, plan), _clock(plan.run_dir), *computing(plan.device)]


def computing(device: str) -> list[Check]:
    """What the processors do, measured; `device`: what the run computes on."""
    try:
        done = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [Check("computing", False, f"a matrix product did not end within {PROBE_TIMEOUT_S} s: see nvidia-smi and dmesg")]
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Check("computing", False, f"torch cannot compute here: {words}")]
    return judge(json.loads(done.stdout.splitlines()[-1]), device)


def judge(found: dict[str, Any], device: str) -> list[Check]:
    """What a probe's measurements mean. `device`: what the run computes on."""
    cpu = found["cpu"]
    checks = [Check("CPU computes", cpu["wrong"] == 0, _product_words(cpu, "GFLOP/s", 1e3))]
    if device == "cpu":
        return checks
    gpus = found["devices"]
    if not gpus:
        return [*checks, Check("GPUs", False, 'torch sees none: is the driver loaded (nvidia-smi)? On a CPU: cluster.device = "cpu"')]
    fastest = max((gpu["tflops"] for gpu in gpus if "tflops" in gpu), default=0.0)
    checks += [_gpu(gpu, fastest) for gpu in gpus]
    uuids = [gpu["uuid"] for gpu in gpus if "uuid" in gpu]
    twice = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
    checks.append(Check("GPUs differ", not twice, f"seen twice: {', '.join(twice)}" if twice else f"{len(uuids)} UUIDs"))
    if found["links"]:
        checks.append(_links(found["links"]))
    return checks


def _gpu(gpu: dict[str, Any], fastest: float) -> Check:
    name = f"GPU {gpu['index']}"
    if "error" in gpu:
        return Check(name, False, gpu["error"])
    least = next((tflops for model, tflops in LEAST_TFLOPS.items() if model in gpu["name"]), 0.0)
    words = f"{gpu['name']}, {gpu['uuid']}, {gpu['free_gib']:.1f} of {gpu['total_gib']:.1f} GiB free, {_product_words(gpu, 'TFLOP/s', 1.0)}"
    if gpu["wrong"]:
        return Check(name, False, words)
    if gpu["tflops"] < max(least, LEAST_SHARE * fastest):
        return Check(
            name, False, f"{words}: too slow, {max(least, LEAST_SHARE * fastest):.0f} is the least. Clocks, heat, another process?"
        )
    if gpu["free_gib"] < 0.97 * gpu["total_gib"]:
        return Check(name, False, f"{words}: somebody else's process holds memory (nvidia-smi)")
    return Check(name, True, words)


def _links(links: list[dict[str, Any]]) -> Check:
    fastest = max(link["gb_per_s"] for link in links)
    slow = [link for link in links if link["gb_per_s"] < LEAST_SHARE * fastest]
    words = f"{len(links)} directed pairs, {min(link['gb_per_s'] for link in links):.0f} to {fastest:.0f} GB/s"
    if slow:
        words += "; slow: " + ", ".join(f"{link['from']} to {link['to']} {link['gb_per_s']:.0f}" for link in slow)
    return Check("GPU links", not slow, words)


def _product_words(found: dict[str, Any], unit: str, scale: float) -> str:
    right = "every element right" if not found["wrong"] else f"{found['wrong']} elements of a matrix product WRONG"
    return f"{right}, {found['tflops'] * scale:.0f} {unit} in bfloat16"


def _memory(loaded: Loaded, plan: RunPlan) -> Check:
    """What the plan puts into host memory is there. Object store and engines' own memory are not counted."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    need = host_bytes_per_node(loaded.config) if plan.device == "cuda" else 0
    words = f"{free / 2**30:.1f} GiB available" + (f", the optimizers of its ranks need {need / 2**30:.1f}" if need else "")
    return Check("host memory", free >= need, words)


def _clock(run_dir: Path) -> Check:
    """This node's clock against that of the file system with the runs, which is the same for all nodes where it is shared."""
    folder = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".gptoss-clock-") as file:
            before = time.time()
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            skew = Path(file.name).stat().st_mtime - (before + time.time()) / 2
    except OSError as error:
        return Check("clock", False, f"{folder} cannot be written to: {error.strerror}")
    return Check("clock", abs(skew) <= MAX_CLOCK_S, f"{skew:+.1f} s from the file system of {folder}")
