"""Times context-parallel sink attention against one rank that computes everything, in the same run, and counts the bytes that were sent.

    torchrun --standalone --nproc-per-node 2 tools/bench_context.py --json two_gpus.json
    torchrun --standalone --nproc-per-node 2 tools/bench_context.py --device cpu    # gloo, tiny sizes: does it run?

In: sizes and backends. Out: a table and a JSON file: milliseconds (medians; of the slowest rank) of forward + backward through all layers,
speed-up, bytes a layer as counted and by formula. Layers are independent and random: what a model has between them is not measured. First
a small stream is computed in both ways and each is held against float64; exit code 1 if context parallelism is the worse.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_gptoss.attention.api import attend
from megatron_gptoss.attention.context import LayerBytes, attend_context, bytes_sent_per_layer, choose_method, shard_rows, traffic
from megatron_gptoss.errors import GptossError


@dataclass(frozen=True)
class Kind:
    """One kind of layer, and how it is computed."""

    name: str
    window: int | None
    backend: str
    layers: int
    method: str


@dataclass(frozen=True)
class Stream:
    """T tokens in sequences of equal length; H query heads, K kv heads of size D."""

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(self.tokens * s // self.sequences for s in range(self.sequences + 1))


@dataclass(frozen=True)
class Layer:
    """Leaves of one layer and the cotangent of its output."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    sink_H: Tensor
    dout_THD: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q_THD, self.k_TKD, self.v_TKD, self.sink_H


@dataclass(frozen=True)
class Row:
    """What is printed of one kind of layer, or of all together."""

    kind: str
    method: str
    layers: int
    one_rank_ms: float
    ms: float
    counted: LayerBytes  # a layer, of the rank that sends most
    formula: LayerBytes

    @property
    def speed_up(self) -> float:
        return self.one_rank_ms / self.ms


Attention = Callable[[Kind, Layer, Tensor], tuple[Tensor, Tensor]]


def main() -> int:
    options = parse()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        print("Start it with torchrun --nproc-per-node N, N of 2 or more.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        return bench(options, device)
    except (GptossError, ValueError) as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Context-parallel sink attention against one rank.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: gloo, float32, reference backends, tiny sizes")
    parser.add_argument("--tokens", type=int, help="of the whole stream (65,536; cpu 256)")
    parser.add_argument("--sequences", type=int, default=1, help="of equal length in the stream")
    parser.add_argument("--full-layers", type=int, help="12; cpu 2")
    parser.add_argument("--windowed-layers", type=int, help="12; cpu 2")
    parser.add_argument("--window", type=int, help="128; cpu 16")
    parser.add_argument("--heads", type=int, help="64; cpu 8")
    parser.add_argument("--kv-heads", type=int, help="8; cpu 2")
    parser.add_argument("--head-dim", type=int, help="64; cpu 8")
    parser.add_argument("--full-backend", help="flash; cpu reference")
    parser.add_argument("--window-backend", help="triton; cpu reference")
    parser.add_argument("--full-method", choices=["ulysses", "ring"], help="default: the rule of choose_method")
    parser.add_argument("--repeats", type=int, help="5; cpu 3")
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--check-tokens", type=int, help="of the stream that is compared with float64 (2,048; cpu 128)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    on_gpu = {"tokens": 65_536, "full_layers": 12, "windowed_layers": 12, "window": 128, "heads": 64, "kv_heads": 8, "head_dim": 64}
    on_cpu = {"tokens": 256, "full_layers": 2, "windowed_layers": 2, "window": 16, "heads": 8, "kv_heads": 2, "head_dim": 8}
    on_gpu |= {"full_backend": "flash", "window_backend": "triton", "repeats": 5, "check_tokens": 2048}
    on_cpu |= {"full_backend": "reference", "window_backend": "reference", "repeats": 3, "check_tokens": 128}
    for name, value in (on_cpu if options.device == "cpu" else on_gpu).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def bench(options: argparse.Namespace, device: torch.device) -> int:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stream = Stream(options.tokens, options.sequences, options.heads, options.kv_heads, options.head_dim, dtype, device)
    group = dist.group.WORLD
    assert group is not None
    size = group.size()

    def method(window: int | None) -> str:
        return choose_method(stream.heads, stream.kv_heads, size, window)

    full = Kind("full", None, options.full_backend, options.full_layers, options.full_method or method(None))
    windowed = Kind(f"window {options.window}", options.window, options.window_backend, options.windowed_layers, method(options.window))
    kinds = [kind for kind in (full, windowed) if kind.layers]

    def on_one(kind: Kind, layer: Layer, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*layer.leaves(), cu_seqlens=cu_seqlens, window=kind.window, backend=kind.backend)

    def on_all(kind: Kind, layer: Layer, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return attend_context(
            *layer.leaves(), group=group, cu_seqlens=cu_seqlens, window=kind.window, backend=kind.backend, method=kind.method
        )

    passed = check(kinds, stream, options.check_tokens, on_one, on_all)
    rows = []
    for name, measured in [(kind.name, [kind]) for kind in kinds] + [("all", kinds)]:
        one_rank_ms = 0.0
        if group.rank() == 0:
            one_rank_ms = measure(measured, stream, slice(None), on_one, options)
            free(device)
        dist.barrier()
        ms = measure(measured, stream, shard_rows(stream.tokens, group.rank(), size), on_all, options, barrier=dist.barrier)
        free(device)
        slowest = torch.tensor([ms], dtype=torch.float64, device="cpu" if device.type == "cpu" else device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        counted, formula = sent(measured, stream, on_all, group)
        layers = sum(kind.layers for kind in measured)
        rows.append(Row(name, " + ".join(kind.method for kind in measured), layers, one_rank_ms, float(slowest), counted, formula))
    if group.rank() == 0:
        report(rows, stream, kinds, size, passed, options.json)
    return 0 if passed and all(row.counted == row.formula for row in rows) else 1


def make_layer(stream: Stream, rows: slice, seed: int) -> Layer:
    """The same stream on every rank, of which these rows are kept."""
    generator = torch.Generator(stream.device).manual_seed(seed)

    def random(heads: int) -> Tensor:
        shape = (stream.tokens, heads, stream.head_dim)
        return torch.randn(shape, generator=generator, dtype=stream.dtype, device=stream.device)[rows].clone()

    q_THD, k_TKD, v_TKD, dout_THD = (random(heads) for heads in (stream.heads, stream.kv_heads, stream.kv_heads, stream.heads))
    sink_H = torch.linspace(-3, 6, stream.heads, device=stream.device)
    for x in (q_THD, k_TKD, v_TKD, sink_H):
        x.requires_grad_()
    return Layer(q_THD, k_TKD, v_TKD, sink_H, dout_THD)


def cu_seqlens_of(stream: Stream) -> Tensor:
    return torch.tensor(stream.bounds, dtype=torch.int32, device=stream.device)


def forward_backward(stack: list[tuple[Kind, Layer]], cu_seqlens: Tensor, attention: Attention) -> None:
    outs = [attention(kind, layer, cu_seqlens)[0] for kind, layer in stack]
    leaves = [x for _, layer in stack for x in layer.leaves()]
    torch.autograd.grad(outs, leaves, [layer.dout_THD for _, layer in stack])


def measure(
    kinds: list[Kind],
    stream: Stream,
    rows: slice,
    attention: Attention,
    options: argparse.Namespace,
    barrier: Callable[[], object] = lambda: None,
) -> float:
    """Median milliseconds of forward + backward through all layers of these kinds, in turns."""
    order = sorted((place / kind.layers, k, kind) for k, kind in enumerate(kinds) for place in range(kind.layers))
    stack = [(kind, make_layer(stream, rows, seed)) for seed, (_, _, kind) in enumerate(order)]
    cu_seqlens = cu_seqlens_of(stream)
    times = []
    for repeat in range(options.warm_ups + options.repeats):
        barrier()
        elapsed_ms = timed(lambda: forward_backward(stack, cu_seqlens, attention), stream.device)
        if repeat >= options.warm_ups:
            times.append(elapsed_ms)
    return statistics.median(times)


def timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        start_s = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start_s)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def sent(kinds: list[Kind], stream: Stream, attention: Attention, group: dist.ProcessGroup) -> tuple[LayerBytes, LayerBytes]:
    """Bytes of one layer of each kind together, as counted and by formula: of the rank that sends most forward, and of that backward."""
    rank, size, cu_seqlens = group.rank(), group.size(), cu_seqlens_of(stream)
    counts = torch.zeros(4, dtype=torch.int64, device=stream.device)
    for kind in kinds:
        layer = make_layer(stream, shard_rows(stream.tokens, rank, size), 0)
        before = traffic.bytes
        out_THD, _ = attention(kind, layer, cu_seqlens)
        between = traffic.bytes
        torch.autograd.grad(out_THD, layer.leaves(), layer.dout_THD)
        formula = bytes_sent_per_layer(
            kind.method,
            rank=rank,
            size=size,
            bounds=stream.bounds,
            num_heads=stream.heads,
            num_kv_heads=stream.kv_heads,
            head_dim=stream.head_dim,
            itemsize=stream.dtype.itemsize,
            window=kind.window,
        )
        counts += torch.tensor([between - before, traffic.bytes - between, formula.forward, formula.backward], device=stream.device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    forward, backward, formula_forward, formula_backward = counts.tolist()
    return LayerBytes(forward, backward), LayerBytes(formula_forward, formula_backward)


def check(kinds: list[Kind], stream: Stream, tokens: int, on_one: Attention, on_all: Attention) -> bool:
    """On a small stream of sequences that run across shards: the error of all ranks together is at most twice that of one rank, and a
    rounding, for output, log-sum-exp and every gradient; relative to the largest entry, against the reference backend in float64."""
    small = Stream(tokens, 5, stream.heads, stream.kv_heads, stream.head_dim, stream.dtype, stream.device)
    rank, size, cu_seqlens = dist.get_rank(), dist.get_world_size(), cu_seqlens_of(small)
    rows = shard_rows(tokens, rank, size)
    everything = slice(None)
    passed = True
    for kind in kinds:
        exact_kind = Kind(kind.name, kind.window, "reference", 1, kind.method)
        whole = make_layer(small, everything, 1)
        q, k, v, sinks = (x.detach().double().requires_grad_() for x in whole.leaves())
        exact = Layer(q, k, v, sinks, whole.dout_THD.double())
        expected = results(exact_kind, exact, cu_seqlens, on_one)
        single = results(kind, whole, cu_seqlens, on_one)
        shard = results(kind, make_layer(small, rows, 1), cu_seqlens, on_all)
        dist.all_reduce(shard["dsink"])
        for name, x in expected.items():
            part = everything if name == "dsink" else rows
            largest = x.abs().max()
            one = float((single[name] - x).abs().max() / largest)
            many = (shard[name] - x[part]).abs().max() / largest
            dist.all_reduce(many, op=dist.ReduceOp.MAX)
            good = float(many) <= 2 * one + torch.finfo(stream.dtype).eps / 2
            passed &= good
            if rank == 0:
                verdict = "" if good else "   TOO LARGE"
                print(f"check {kind.name:12} {kind.method:8} {name:6} error on {size} ranks {float(many):.1e}, on one {one:.1e}{verdict}")
    return passed


def results(kind: Kind, layer: Layer, cu_seqlens: Tensor, attention: Attention) -> dict[str, Tensor]:
    out_THD, lse_TH = attention(kind, layer, cu_seqlens)
    gradients = torch.autograd.grad(out_THD, layer.leaves(), layer.dout_THD)
    found = {"out": out_THD, "lse": lse_TH, **dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=True))}
    return {name: x.detach().double() for name, x in found.items()}


def report(rows: list[Row], stream: Stream, kinds: list[Kind], size: int, passed: bool, file: Path | None) -> None:
    name = torch.cuda.get_device_name(stream.device) if stream.device.type == "cuda" else "CPU"
    heads = f"{stream.heads}/{stream.kv_heads} heads of {stream.head_dim}"
    title = f"{stream.tokens:,} tokens in {stream.sequences} sequence(s), {heads}, {size} x {name}"
    table = Table(title=title)
    for column in (
        "layers",
        "method",
        "backend",
        "1 rank ms",
        f"{size} ranks ms",
        "speed-up",
        "MB a layer: forward",
        "backward",
        "formula",
    ):
        table.add_column(column, justify="left" if column in ("layers", "method", "backend") else "right")
    backends = {kind.name: kind.backend for kind in kinds}
    for row in rows:
        agree = "equal" if row.counted == row.formula else f"{row.formula.forward / 1e6:.3f} / {row.formula.backward / 1e6:.3f}"
        table.add_row(
            f"{row.layers} {row.kind}",
            row.method,
            backends.get(row.kind, " + ".join(backends.values())),
            f"{row.one_rank_ms:.2f}",
            f"{row.ms:.2f}",
            f"{row.speed_up:.3f}",
            f"{row.counted.forward / 1e6:.3f}",
            f"{row.counted.backward / 1e6:.3f}",
            agree,
        )
    Console(width=max(140, len(title))).print(table)
    if file is not None:
        shape = {**asdict(stream), "dtype": str(stream.dtype), "device": name, "ranks": size}
        found = [{**asdict(row), "speed_up": row.speed_up} for row in rows]
        file.write_text(
            json.dumps({"shape": shape, "kinds": [asdict(k) for k in kinds], "checked": passed, "rows": found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
