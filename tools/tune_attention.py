#!/usr/bin/env python3
"""Time tile shapes of our Triton attention kernels on this GPU, to choose the constants in triton_forward.py and triton_backward.py.

    python tools/tune_attention.py [--tokens 32768] [--packed] [--only forward_window ...] [--json FILE]

Each kernel is timed alone on random bfloat16 data, 64 query and 8 kv heads, head_dim 64, causal. Variants are compiled side by side first
(one process a variant, on few tokens), then timed one after the other: median of 10 times 4 launches between CUDA events. `regs` and
`spills` are per thread.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

H, K, D, WINDOW = 64, 8, 64, 128
# kernel -> (module, its Tile, windowed?)
SPACES = {
    "forward_window": ("triton_forward", "FORWARD_WINDOW", True),
    "forward_full": ("triton_forward", "FORWARD_FULL", False),
    "dq_window": ("triton_backward", "QUERIES_WINDOW", True),
    "dq_full": ("triton_backward", "QUERIES_FULL", False),
    "dkv_window": ("triton_backward", "KEYS_WINDOW", True),
    "dkv_full": ("triton_backward", "KEYS_FULL", False),
}


def variants(kernel: str) -> list[tuple]:
    """(rows, keys, warps, stages, run, registers)"""
    if kernel in ("forward_window", "dq_window"):
        return [
            (128, 64, 4, 2, 4, None),
            (128, 64, 4, 2, 8, None),
            (128, 64, 4, 2, 16, None),
            (128, 64, 4, 1, 1, None),
            (128, 64, 4, 1, 8, None),
            (64, 64, 4, 2, 8, None),
            (64, 64, 4, 2, 16, None),
            (64, 64, 4, 2, 8, 168),
            (64, 64, 4, 2, 8, 128),
            (64, 64, 4, 3, 8, None),
            (64, 64, 4, 1, 1, None),
            (128, 64, 8, 2, 8, None),
            (128, 64, 8, 2, 8, 128),
            (128, 64, 8, 1, 1, 128),
            (256, 64, 8, 2, 4, None),
        ]
    if kernel == "dkv_window":
        return [(*x, 1, most) for x in itertools.product((32, 64), (64,), (4,), (2, 3, 4)) for most in (None, 128, 168)]
    if kernel == "forward_full":
        shapes = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 3)]
    elif kernel == "dq_full":
        shapes = [
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (64, 128, 4, 2),
            (64, 128, 4, 3),
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 4, 3),
        ]
    else:
        shapes = [(64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3), (128, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2)]
    return [(*shape, 1, None) for shape in shapes]


KERNELS = {
    "forward_window": "_forward_window_kernel",
    "forward_full": "_forward_kernel",
    "dq_window": "_dq_window_kernel",
    "dq_full": "_dq_kernel",
    "dkv_window": "_dkv_kernel",
    "dkv_full": "_dkv_kernel",
}


def inputs(T: int, packed: bool):
    from megatron_gptoss.attention.layout import Layout
    from tools.bench_attention import packed_lengths

    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(T, n, D, device="cuda", dtype=torch.bfloat16) for n in (H, K, K, H))
    sink = torch.linspace(-6, 6, H, device="cuda")
    lengths = packed_lengths(T, 2000) if packed else [T]
    return q, k, v, dout, sink, Layout((0, *itertools.accumulate(lengths)), device=q.device)


def set_tile(kernel: str, variant: tuple) -> None:
    from megatron_gptoss.attention.triton_forward import Tile

    module, name, _ = SPACES[kernel]
    setattr(importlib.import_module(f"megatron_gptoss.attention.{module}"), name, Tile(*variant))


def capture(kernel: str, T: int, packed: bool):
    """A function that launches only this kernel, and the compiled kernel."""
    from megatron_gptoss.attention import triton_backward, triton_forward

    q, k, v, dout, sink, layout = inputs(T, packed)
    window = WINDOW if SPACES[kernel][2] else None
    module = triton_forward if kernel.startswith("forward") else triton_backward
    function = getattr(module, KERNELS[kernel])
    out, lse = triton_forward.forward(q, k, v, sink, layout, window, D**-0.5)
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            def launch(**kwargs):
                compiled = function[grid](**kwargs)
                launches.append((lambda: function[grid](**kwargs), compiled))
                return compiled

            return launch

    setattr(module, KERNELS[kernel], Recorder())
    try:
        if kernel.startswith("forward"):
            triton_forward.forward(q, k, v, sink, layout, window, D**-0.5)
        else:
            triton_backward.backward(dout, None, q, k, v, sink, out, lse, layout, window, D**-0.5, True)
    finally:
        setattr(module, KERNELS[kernel], function)
    torch.cuda.synchronize()
    return launches[0]


def compile_one(job: tuple[str, tuple, bool]) -> str | None:
    kernel, variant, packed = job
    module, name, _ = SPACES[kernel]
    tiles = importlib.import_module(f"megatron_gptoss.attention.{module}")
    usual = getattr(tiles, name)
    try:
        set_tile(kernel, variant)
        capture(kernel, 4096, packed)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    finally:
        setattr(tiles, name, usual)


def median_ms(launch, repeats: int = 10) -> float:
    for _ in range(3):
        launch()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):  # the host launches ahead of the GPU, as in training
            launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time tile shapes of our Triton attention kernels.")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--packed", action="store_true", help="sequences of 2,000 tokens on average instead of one")
    parser.add_argument("--only", nargs="*", default=list(SPACES))
    parser.add_argument("--json")
    parser.add_argument("--show", type=int, default=6, help="variants shown for each kernel")
    arguments = parser.parse_args()
    jobs = [(kernel, variant, arguments.packed) for kernel in arguments.only for variant in variants(kernel)]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=1), strict=True))

    results = []
    for kernel in arguments.only:
        rows = []
        for variant in variants(kernel):
            if failures[kernel, variant, arguments.packed]:
                rows.append((float("inf"), variant, failures[kernel, variant, arguments.packed]))
                continue
            set_tile(kernel, variant)
            try:
                launch, compiled = capture(kernel, arguments.tokens, arguments.packed)
                rows.append(
                    (median_ms(launch), variant, f"regs {compiled.n_regs} spills {compiled.n_spills} smem {compiled.metadata.shared}")
                )
            except Exception as error:
                rows.append((float("inf"), variant, f"{type(error).__name__}: {error}"[:100]))
        rows.sort(key=lambda row: row[0])
        results += [{"kernel": kernel, "ms": ms, "tile": variant, "note": note} for ms, variant, note in rows]
        print(f"{kernel}  T={arguments.tokens}{' packed' if arguments.packed else ''}  (rows, keys, warps, stages, run, registers)")
        for ms, variant, note in rows[: arguments.show]:
            print(f"  {ms:8.3f} ms  {variant}  {note}")
        broken = [row for row in rows if row[0] == float("inf")]
        if broken:
            print(f"  {len(broken)} could not run, e.g. {broken[0][1]}: {broken[0][2]}")
        if rows and rows[0][0] < float("inf"):
            set_tile(kernel, rows[0][1])  # later kernels run beside the best earlier ones
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
