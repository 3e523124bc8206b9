"""Does a processor of this node compute right, and how fast?

    gpu_probe.py            the CPU, how many GPUs torch sees, versions, and what nvidia-smi says of each GPU
    gpu_probe.py INDEX      one GPU

In: that. Out: one JSON object on stdout. A process of its own for each GPU: a broken driver or a GPU that hangs takes nothing else with
it, and is known by its number. It imports torch and nothing of this project, judges nothing (node_checks.py does), and uses no network.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.cuda.nccl

GPU_SIZE, CPU_SIZE = 8192, 512
GPU_REPEATS, CPU_REPEATS = 100, 4  # products in a row; 100 take 0.14 s on an H200
ROUNDS = 5
SMI_FIELDS = ("uuid", "driver_version", "ecc.errors.uncorrected.volatile.total", "temperature.gpu")


def product(device: torch.device) -> dict[str, Any]:
    """A matrix product whose every element is known exactly, and its speed.

    Factors are -1, 0 or 1, so sums of `n` products are whole numbers below 2^24: float32 accumulates them exactly in any order, and
    bfloat16 rounds them once. Two correct devices cannot differ in a single bit, nor can one before and after a second of full load.
    """
    n, repeats = (GPU_SIZE, GPU_REPEATS) if device.type == "cuda" else (CPU_SIZE, CPU_REPEATS)
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (n, n), generator=make, dtype=torch.int8).to(device).bfloat16() for _ in range(2))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    exact = (a.float() @ b.float()).bfloat16()
    wrong = wrong_elements(a @ b, exact)
    # One value by whole numbers on the CPU, since the line above asks the same device twice.
    first = int((a[0].cpu().long() * b[:, 0].cpu().long()).sum())
    wrong += int(float(exact[0, 0]) != float(torch.tensor(float(first)).bfloat16()))
    c, seconds = a @ b, []
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=c)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return {"wrong": wrong + wrong_elements(c, exact), "tflops": 2 * n**3 * repeats / statistics.median(seconds) / 1e12}


def wrong_elements(c: torch.Tensor, exact: torch.Tensor) -> int:
    return int((c != exact).sum())  # NaN differs from everything


def of_node() -> dict[str, Any]:
    return {
        "cpu": product(torch.device("cpu")),
        "gpus": torch.cuda.device_count(),
        "why_none": _why_none(),
        "versions": {
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version() if torch.version.cuda else None,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        },
        "smi": smi(),
    }


def of_gpu(index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index}
    try:
        properties = torch.cuda.get_device_properties(index)
        found |= {"name": properties.name, "uuid": f"GPU-{str(properties.uuid).removeprefix('GPU-')}"}
        free, total = torch.cuda.mem_get_info(index)
        found |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
        torch.cuda.set_device(index)
        found |= product(torch.device("cuda", index))
    except Exception as error:  # a sick GPU fails in many ways; each of them is its finding
        found["error"] = f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0]}"
    return found


def smi() -> dict[str, dict[str, str]]:
    """UUID -> driver's version, uncorrected errors of memory since the driver was loaded, degrees Celsius. Empty without nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return {row[0]: dict(zip(("driver", "ecc", "celsius"), row[1:], strict=True)) for row in rows if len(row) == len(SMI_FIELDS)}


def _why_none() -> str:
    if torch.cuda.device_count():
        return ""
    try:
        torch.cuda.init()
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return "no reason given"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(of_gpu(int(sys.argv[1])) if len(sys.argv) > 1 else of_node()))
