"""Do this node's processors compute right and fast, and how fast do its GPUs reach each other?

In: nothing; run as a process of its own, so that a broken driver cannot take `gptoss check` with it. Out: one JSON object on stdout. It
imports torch and nothing of this project, judges nothing (node_checks.py does), and uses no network.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

GPU_SIZE, CPU_SIZE = 8192, 512
REPEATS = 20
LINK_BYTES = 2**28


def product(device: torch.device) -> dict[str, Any]:
    """A matrix product whose every element is known exactly, and its speed.

    Factors are -1, 0 or 1, so sums of `n` products are whole numbers below 2^24: float32 accumulates them exactly in any order, and
    bfloat16 rounds them once. Two correct devices cannot differ in a single bit.
    """
    n = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (n, n), generator=make, dtype=torch.int8).to(device).bfloat16() for _ in range(2))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    c = a @ b
    exact = (a.float() @ b.float()).bfloat16()
    wrong = int((c != exact).sum()) + int((~torch.isfinite(c)).sum())
    # A value of its own, by integers, since the line above asks the same device twice.
    row = int((a[0].cpu().long() * b[:, 0].cpu().long()).sum())
    wrong += int(float(exact[0, 0]) != float(torch.tensor(float(row)).bfloat16()))
    _wait(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        c = a @ b
    _wait(device)
    return {"wrong": wrong, "tflops": 2 * n**3 * REPEATS / (time.perf_counter() - start) / 1e12}


def link(source: int, target: int) -> float:
    """GB/s of a copy between two GPUs of this node."""
    a = torch.empty(LINK_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    b = torch.empty(LINK_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    b.copy_(a)
    _wait(b.device)
    start = time.perf_counter()
    for _ in range(5):
        b.copy_(a)
    _wait(a.device)
    _wait(b.device)
    return 5 * LINK_BYTES / (time.perf_counter() - start) / 1e9


def probe() -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    count = torch.cuda.device_count()
    for index in range(count):
        found: dict[str, Any] = {"index": index}
        try:
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found |= {"uuid": str(properties.uuid), "name": properties.name, "free_gib": free / 2**30, "total_gib": total / 2**30}
            found |= product(torch.device("cuda", index))
        except Exception as error:  # a sick GPU fails in many ways; each of them is its finding
            found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        devices.append(found)
    well = [d["index"] for d in devices if "error" not in d]
    links = [{"from": i, "to": j, "gb_per_s": link(i, j)} for i in well for j in well if i != j]
    return {"devices": devices, "links": links, "cpu": product(torch.device("cpu")), "cuda": torch.version.cuda}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(probe()))
