"""How long does `gptoss convert` take, against what it cannot do without, and how much memory?

    python tools/make_synthetic_checkpoint.py synthetic-20b
    python tools/bench_convert.py synthetic-20b scratch --to megatron --json convert.json

In: an MXFP4 folder and a scratch folder on the disk to be measured, with room for the result. Out: seconds of copying the folder, of
dequantising as many blocks in memory, of writing as many bytes as the result has, and of the conversion; the conversion's peak memory
against its promise; the machine's load. Caches of the files read are dropped before each measurement, and each ends when its bytes are on
the disk. What it makes in the scratch folder it removes again. It checks no values: --verify does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_gptoss.checkpoint.convert import largest_tensor, one_thread_each
from megatron_gptoss.checkpoint.mxfp4 import dequantise
from megatron_gptoss.checkpoint.sources import SafetensorsSource, open_source
from megatron_gptoss.checkpoint.targets import make_target

AT_ONCE = 1 << 26


def forget(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as reading, (target / path.name).open("wb") as writing:
            shutil.copyfileobj(reading, writing, AT_ONCE)
            writing.flush()
            os.fsync(writing.fileno())


def write(target: Path, num_bytes: int) -> None:
    """Noise, in case the disk packs zeros."""
    target.mkdir()
    data = os.urandom(AT_ONCE)
    with (target / "noise").open("wb") as file:
        while num_bytes > 0:
            num_bytes -= file.write(data[:num_bytes])
        file.flush()
        os.fsync(file.fileno())


def dequantise_as_many(source: SafetensorsSource, threads: int) -> None:
    """All packed tensors' worth of blocks, an expert's matrix at a time, in memory."""
    shapes = [place.shape for name, place in source.places.items() if name.endswith("_scales")]
    jobs = [shape[1:] for shape in shapes for _ in range(shape[0])]
    random = {s: (torch.randint(0, 256, (*s, 16), dtype=torch.uint8), torch.full(s, 120, dtype=torch.uint8)) for s in set(jobs)}
    with one_thread_each(), ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda shape: dequantise(*random[shape]) is None, jobs):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of a conversion from MXFP4, against copying and dequantising alone.")
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path, help="made if it is not there; on the disk to be measured")
    parser.add_argument("--to", choices=("hf", "megatron"), default="megatron")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    source = open_source(arguments.source)
    if not isinstance(source, SafetensorsSource) or source.kind != "hf-mxfp4":
        raise SystemExit(f"{arguments.source} is of kind {source.kind}; hf-mxfp4 is wanted")
    scratch: Path = arguments.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    num_in = sum(place.num_bytes for place in source.places.values())
    num_out = make_target(arguments.to, source.model, torch.bfloat16, max_shard_bytes=5e9).num_bytes
    found: dict[str, object] = {
        "to": arguments.to, "cpus": len(os.sched_getaffinity(0)), "in_gb": num_in / 1e9, "out_gb": num_out / 1e9,
        "load_before": os.getloadavg(),
    }  # fmt: skip

    def measure(name: str, work: Callable[[Path], None]) -> float:
        place = scratch / name
        shutil.rmtree(place, ignore_errors=True)
        forget(arguments.source)
        seconds = timed(lambda: work(place))
        shutil.rmtree(place, ignore_errors=True)
        found[f"{name}_s"] = round(seconds, 1)
        print(f"{name}: {seconds:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        return seconds

    def convert(place: Path) -> None:
        command = [sys.executable, "-m", "megatron_gptoss.cli", "convert", str(arguments.source), str(place), "--to", arguments.to]
        process = subprocess.Popen([*command, "--workers", str(arguments.workers)])
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the conversion failed: {os.waitstatus_to_exitcode(status)}")
        found["peak_gb"] = usage.ru_maxrss * 1024 / 1e9
        found["cpu_s"] = round(usage.ru_utime + usage.ru_stime, 1)

    copying = measure("copy", lambda place: copy(arguments.source, place))
    dequantising = measure("dequantise", lambda _: dequantise_as_many(source, len(os.sched_getaffinity(0))))
    writing = measure("write", lambda place: write(place, num_out))
    converting = measure("convert", convert)
    found["of_copy_and_dequantise"] = round(converting / (copying + dequantising), 2)
    found["of_write_and_dequantise"] = round(converting / (writing + dequantising), 2)
    found["promised_gb"] = (2 * largest_tensor(source.model, 2) + 2e9) / 1e9
    found["load_after"] = os.getloadavg()
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
