"""Times sink attention, forward and backward, beside the peers on one GPU in one run.

    python tools/bench_attention.py --json attention.json
    python tools/bench_attention.py --only triton flash flash-attn-4 --sizes 8192 packed --windows 128
    python tools/bench_attention.py --device cpu                # tiny, reference against eager: does it run?

In: which implementations, sizes and windows. Out: a table and a JSON file, written anew after each row. `triton`, `flash` and `te` are our
`attend` on that backend; the others are the libraries by themselves. One that is not installed, or fails, has a line that says so; the rest
goes on. Before it is timed, each is held against the float64 reference on few tokens; exit code 1 when one of ours is wrong there.

How it is timed: bfloat16, random data, 64 query and 8 kv heads, head_dim 64, causal, sinks from -6 to 6. Every repeat runs the forward pass
with gradients on and `torch.autograd.grad` of its output, between CUDA events each; before either, 256 MiB are written, which empties the
L2 cache, and the GPU sleeps two milliseconds, so that launching is hidden as it is inside a training step. Medians. Useful FLOPs: forward
4 * H * D * pairs, backward 10 * H * D * pairs, with pairs = visible (query, key) pairs. Extra bytes: the largest amount allocated at once
beyond inputs, output and gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_gptoss.attention.api import attend
from megatron_gptoss.errors import MachineError

OURS = ("reference", "triton", "flash", "te")
PEERS = ("flash-attn-4", "transformer-engine", "cudnn", "flex", "eager")
ON_GPU = ("triton", "flash", "flash-attn-4", "cudnn", "transformer-engine", "flex")
LONG_TOKENS = 100_000  # from here on only these are timed, unless --only names others: each pass takes up to a second
LONG_RUNNERS = ("triton", "flash")
WRONG = 2e-2  # relative error: right ones are near 3e-3 in bfloat16, ones that ignore the sink in backward above 4e-2


@dataclass(frozen=True)
class Problem:
    """Packed sequences on one device; window None: full."""

    name: str
    bounds: tuple[int, ...]
    window: int | None
    H: int = 64
    K: int = 8
    D: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def is_packed(self) -> bool:
        return len(self.bounds) > 2

    @property
    def longest(self) -> int:
        return max(b - a for a, b in pairwise(self.bounds))

    @property
    def pairs(self) -> int:
        return sum(visible_pairs(b - a, self.window) for a, b in pairwise(self.bounds))

    @property
    def forward_flops(self) -> int:
        return 4 * self.H * self.D * self.pairs

    @property
    def backward_flops(self) -> int:
        return 10 * self.H * self.D * self.pairs


@dataclass(frozen=True)
class Data:
    """Leaves and the cotangent of the output."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    sink_H: Tensor
    dout_THD: Tensor
    cu_seqlens: Tensor | None

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q_THD, self.k_TKD, self.v_TKD, self.sink_H


@dataclass
class Row:
    implementation: str
    problem: str
    tokens: int
    window: int | None
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    extra_bytes: int | None = None
    repeats: int = 0
    errors: dict[str, float] = field(default_factory=dict)  # relative, of the check on few tokens
    note: str = ""


Attention = Callable[[Data], Tensor]  # q, k, v [T, heads, D] -> output [T, H, D], differentiable in all leaves


class NotHere(Exception):
    """The implementation does not exist on this machine, or not for this problem."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 180)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("No CUDA device here; --device cpu tries the tool out.", file=sys.stderr)
            return 2
        torch._dynamo.config.recompile_limit = 64  # flex is compiled once for each problem
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    console.print(f"{machine}, torch {torch.__version__}")
    rows: list[Row] = []
    checked: dict[tuple[str, bool, bool], dict[str, float]] = {}
    for problem in problems(options):
        for name in options.only or (ON_GPU if options.device == "cuda" else ("reference", "eager")):
            row = measure(name, problem, options, checked)
            rows.append(row)
            console.print(one_line(row), highlight=False)
            if options.json:
                found = {"device": machine, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(rows))
    wrong = [row for row in rows if row.implementation in OURS and (row.note.startswith("failed") or not is_right(row.errors))]
    return 1 if wrong else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sink attention beside its peers on one GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny, float32")
    parser.add_argument("--only", "--backend", nargs="+", choices=OURS + PEERS, metavar="NAME", help=f"of {', '.join(OURS + PEERS)}")
    parser.add_argument(
        "--sizes",
        nargs="+",
        metavar="T",
        help="tokens of one sequence, 16x2048 for that many of them, or packed (8192 packed 32768 131072)",
    )
    parser.add_argument("--windows", nargs="+", metavar="W", help="visible keys, or full (128 full)")
    parser.add_argument("--repeats", type=int, default=10, help="of each measurement, fewer where one takes long")
    parser.add_argument("--quick", action="store_true", help="8192 and packed only, 5 repeats")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats = min(options.repeats, 5)
    if options.sizes is None:
        options.sizes = ["96", "packed"] if options.device == "cpu" else ["8192", "packed"] if options.quick else None
    options.sizes = options.sizes or ["8192", "packed", "32768", "131072"]
    options.windows = options.windows or (["16", "full"] if options.device == "cpu" else ["128", "full"])
    return options


def problems(options: argparse.Namespace) -> list[Problem]:
    on_cpu = options.device == "cpu"
    shape: dict[str, Any] = {"H": 8, "K": 2, "D": 16, "dtype": torch.float32, "device": "cpu"} if on_cpu else {}
    found = []
    for size in options.sizes:
        lengths = packed_lengths(256, 40) if on_cpu else packed_lengths(32_768, 2_000)
        if size != "packed":
            count, _, length = size.rpartition("x")
            lengths = [int(length)] * int(count or 1)
        bounds = (0, *accumulate(lengths))
        found += [Problem(size, bounds, None if w == "full" else int(w), **shape) for w in options.windows]
    return found


def packed_lengths(total: int, mean: int) -> list[int]:
    """Sequence lengths with an exponential distribution, the last one cut; the same on every machine."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(min(max(round(draw.expovariate(1 / mean)), 1), total - sum(lengths)))
    return lengths


def visible_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs of one causal sequence; the window counts the token itself."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return length * window - window * (window - 1) // 2


# ---- one measurement ----------------------------------------------------------------------------------------------------------------


def measure(name: str, problem: Problem, options: argparse.Namespace, checked: dict) -> Row:
    row = Row(name, problem.name, problem.tokens, problem.window)
    too_long = problem.tokens >= LONG_TOKENS and name not in LONG_RUNNERS
    if not options.only and (too_long or (name == "flex" and problem.is_packed)):  # flex is compiled for each problem
        row.note = "not timed unless --only names it"
        return row
    try:
        kind = (name, problem.window is None, problem.is_packed)
        if kind not in checked:
            checked[kind] = check(name, problem)
        row.errors = checked[kind]
        worst = max(row.errors, key=lambda which: row.errors[which])
        if not is_right(row.errors):
            row.note = f"WRONG: {worst} is off by {row.errors[worst]:.1e}"
            return row
        data = make_data(problem)
        time_passes(implement(name, problem), data, problem, options.repeats, row)
    except NotHere as reason:
        row.note = str(reason)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    except Exception as error:  # a peer that fails must not end the run
        row.note = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    finally:
        if problem.device == "cuda":
            torch.cuda.empty_cache()
    return row


def make_data(problem: Problem) -> Data:
    generator = torch.Generator(problem.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (problem.tokens, heads, problem.D)
        return torch.randn(shape, generator=generator, device=problem.device, dtype=problem.dtype)

    q, k, v = (normal(heads).requires_grad_() for heads in (problem.H, problem.K, problem.K))
    sinks = torch.nn.Parameter(torch.linspace(-6, 6, problem.H, device=problem.device))  # so that a module can take it for its own
    cu_seqlens = torch.tensor(problem.bounds, dtype=torch.int32, device=problem.device) if problem.is_packed else None
    return Data(q, k, v, sinks, normal(problem.H), cu_seqlens)


def is_right(errors: dict[str, float]) -> bool:
    return all(error <= WRONG for error in errors.values())  # NaN is not


def check(name: str, problem: Problem) -> dict[str, float]:
    """Relative errors of output and gradients against the float64 reference, on few tokens; enough of them that our windowed kernels do
    several tiles in a row, as in what is timed."""
    tokens = 4300 if problem.device == "cuda" else 64
    bounds = (0, tokens // 4, tokens // 4 + 1, tokens) if problem.is_packed else (0, tokens)
    small = Problem("check", bounds, problem.window, problem.H, problem.K, problem.D, problem.dtype, problem.device)
    data = make_data(small)
    q, k, v, sinks = (x.detach().double().requires_grad_() for x in data.leaves())
    exact = Data(q, k, v, sinks, data.dout_THD.double(), data.cu_seqlens)
    found, true = (both_passes(implement(which, small), x) for which, x in ((name, data), ("reference", exact)))
    labels = ("out", "dq", "dk", "dv", "dsink")
    return {label: float((a.double() - e).norm() / e.norm()) for label, a, e in zip(labels, found, true, strict=True)}


def both_passes(attention: Attention, data: Data) -> list[Tensor]:
    out_THD = attention(data)
    return [out_THD.detach(), *torch.autograd.grad(out_THD, data.leaves(), data.dout_THD)]


def time_passes(attention: Attention, data: Data, problem: Problem, repeats: int, row: Row) -> None:
    """Fills in the row's figures. Warms up four times, or twice where that takes long."""
    both_passes(attention, data)  # compiles
    stopwatch = Stopwatch(problem.device)
    started = time.perf_counter()
    row.extra_bytes = extra_bytes(attention, data)
    took_s = time.perf_counter() - started
    for _ in range(2 if took_s < 0.5 else 0):
        both_passes(attention, data)
    row.repeats = min(repeats, max(3, int(5 / max(took_s, 1e-3))))
    forward_ms, backward_ms = [], []
    for _ in range(row.repeats):
        out_THD = stopwatch(lambda: attention(data), forward_ms)
        stopwatch(lambda out_THD=out_THD: torch.autograd.grad(out_THD, data.leaves(), data.dout_THD), backward_ms)
    row.forward_ms, row.backward_ms = (statistics.median(stopwatch.milliseconds(x)) for x in (forward_ms, backward_ms))
    row.forward_tflops = problem.forward_flops / row.forward_ms / 1e9
    row.backward_tflops = problem.backward_flops / row.backward_ms / 1e9


class Stopwatch:
    """Times a function between CUDA events, or on a CPU with the clock."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            self.scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)  # the L2 cache of an H200 holds 60 MB

    def __call__(self, run: Callable[[], Any], times: list) -> Any:
        if not self.on_gpu:
            started = time.perf_counter()
            result = run()
            times.append(1e3 * (time.perf_counter() - started))
            return result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        torch.cuda._sleep(4_000_000)  # clock cycles, about 2 ms
        begin.record()
        result = run()
        end.record()
        torch.cuda.synchronize()
        times.append((begin, end))
        return result

    def milliseconds(self, times: list) -> list[float]:
        return [begin.elapsed_time(end) for begin, end in times] if self.on_gpu else times


def extra_bytes(attention: Attention, data: Data) -> int | None:
    if not data.q_THD.is_cuda:
        both_passes(attention, data)
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = both_passes(attention, data)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


# ---- implementations ----------------------------------------------------------------------------------------------------------------


def implement(name: str, problem: Problem) -> Attention:
    """The implementation made ready for one problem. Raises NotHere."""
    if name in OURS:
        return ours(name, problem)
    makers: dict[str, Callable[[Problem], Attention]] = {
        "flash-attn-4": flash_attn_4,
        "transformer-engine": transformer_engine,
        "cudnn": cudnn_frontend,
        "flex": flex,
        "eager": eager,
    }
    return makers[name](problem)


def ours(backend: str, problem: Problem) -> Attention:
    def attention(x: Data) -> Tensor:
        try:
            return attend(x.q_THD, x.k_TKD, x.v_TKD, x.sink_H, cu_seqlens=x.cu_seqlens, window=problem.window, backend=backend)[0]
        except MachineError as error:
            raise NotHere(str(error)) from error

    return attention


def eager(problem: Problem) -> Attention:
    """Softmax as one writes it down; holds all scores."""
    position_T = torch.arange(problem.tokens, device=problem.device)
    sequence_T = torch.bucketize(position_T, torch.tensor(problem.bounds[1:], device=problem.device), right=True)
    distance_TU = position_T[:, None] - position_T
    hidden_TU = (distance_TU < 0) | (sequence_T[:, None] != sequence_T)
    if problem.window is not None:
        hidden_TU |= distance_TU >= problem.window

    def attention(x: Data) -> Tensor:
        k, v = (y.repeat_interleave(problem.H // problem.K, 1) for y in (x.k_TKD, x.v_TKD))
        logit_HTU = (torch.einsum("thd,uhd->htu", x.q_THD, k) * problem.D**-0.5).masked_fill(hidden_TU, float("-inf"))
        sink_HT1 = x.sink_H.to(logit_HTU.dtype)[:, None, None].expand(-1, problem.tokens, 1)
        weight_HTU = torch.cat([logit_HTU, sink_HT1], -1).softmax(-1)[..., :-1]
        return torch.einsum("htu,uhd->thd", weight_HTU, v)

    return attention


def flash_attn_4(problem: Problem) -> Attention:
    """flash-attn-4 by itself, its own sink gradient included."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise NotHere(f"not installed: {error}") from error
    window = (None, None) if problem.window is None else (problem.window - 1, 0)

    def attention(x: Data) -> Tensor:
        how: dict[str, Any] = {"causal": True, "window_size": window, "learnable_sink": x.sink_H}
        if x.cu_seqlens is None:
            return first(flash_attn_func(*(y.unsqueeze(0) for y in (x.q_THD, x.k_TKD, x.v_TKD)), **how)).squeeze(0)
        how |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
        how |= {"max_seqlen_q": problem.longest, "max_seqlen_k": problem.longest}
        return first(flash_attn_varlen_func(x.q_THD, x.k_TKD, x.v_TKD, **how))

    return attention


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def transformer_engine(problem: Problem) -> Attention:
    """Its DotProductAttention with softmax_type "learnable", on cuDNN only: its unfused path would hold all scores."""
    os.environ.update(NVTE_FUSED_ATTN="1", NVTE_FLASH_ATTN="0", NVTE_UNFUSED_ATTN="0")
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        raise NotHere(f"not installed: {error}") from error
    module = te.DotProductAttention(
        problem.H,
        problem.D,
        num_gqa_groups=problem.K,
        attention_dropout=0.0,
        qkv_format="thd" if problem.is_packed else "bshd",
        attn_mask_type="padding_causal" if problem.is_packed else "causal",
        window_size=(-1 if problem.window is None else problem.window - 1, 0),
        softmax_type="learnable",
    ).to(problem.device)

    def attention(x: Data) -> Tensor:
        module.softmax_offset = x.sink_H  # the leaf itself, so that its gradient can be asked for
        if x.cu_seqlens is None:
            out = module(*(y.unsqueeze(0) for y in (x.q_THD, x.k_TKD, x.v_TKD)))
        else:
            longest = problem.longest
            out = module(
                x.q_THD,
                x.k_TKD,
                x.v_TKD,
                cu_seqlens_q=x.cu_seqlens,
                cu_seqlens_kv=x.cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        return out.view(x.q_THD.shape)

    return attention


def flex(problem: Problem) -> Attention:
    """torch's flex_attention, compiled; its output times sigmoid(lse - sink)."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    if problem.device != "cuda":
        raise NotHere("needs a GPU")
    bounds = torch.tensor(problem.bounds[1:], device=problem.device)
    sequence_T = torch.bucketize(torch.arange(problem.tokens, device=problem.device), bounds, right=True)

    def seen(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = i >= j
        if problem.window is not None:
            mask = mask & (i - j < problem.window)
        return mask & (sequence_T[i] == sequence_T[j]) if problem.is_packed else mask

    block_mask = create_block_mask(seen, None, None, problem.tokens, problem.tokens, device=problem.device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(x: Data) -> Tensor:
        q, k, v = (y.transpose(0, 1).unsqueeze(0) for y in (x.q_THD, x.k_TKD, x.v_TKD))
        result: Any = compiled(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        out, aux = result
        share = torch.sigmoid(aux.lse - x.sink_H[:, None]).unsqueeze(-1)
        return (out * share).to(out.dtype).squeeze(0).transpose(0, 1)

    return attention


def cudnn_frontend(problem: Problem) -> Attention:
    """cuDNN's fused attention with a sink token, through cudnn-frontend's graphs; one sequence only."""
    try:
        import cudnn
    except ImportError as error:
        raise NotHere(f"not installed: {error}") from error
    if problem.is_packed:
        raise NotHere("packed sequences are not tried: its backward with a sink needs cuDNN 9.26")
    passes = CudnnGraphs(cudnn, problem)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            out, stats = passes.forward(q, k, v, sinks)
            ctx.save_for_backward(q, k, v, sinks, out, stats)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return passes.backward(dout.contiguous(), *ctx.saved_tensors)

    return lambda x: Function.apply(*x.leaves())  # pyright: ignore[reportReturnType]


class CudnnGraphs:
    """Forward and backward graph of one dense problem; [T, heads, D] is described as [1, heads, T, D] with the strides it has."""

    Q, K, V, OUT, STATS, SINK, DOUT, DQ, DK, DV, DSINK = range(1, 12)

    def __init__(self, cudnn: Any, problem: Problem) -> None:
        self.problem = problem
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        T, D = problem.tokens, problem.D
        half = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[problem.dtype]
        single = cudnn.data_type.FLOAT

        def graph() -> Any:
            return cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=self.handle)

        def rows(g: Any, uid: int, heads: int) -> Any:
            return g.tensor(uid=uid, dim=(1, heads, T, D), stride=(T * heads * D, D, heads * D, 1), data_type=half)

        def sinks(g: Any, uid: int) -> Any:
            return g.tensor(uid=uid, dim=(1, problem.H, 1, 1), stride=(problem.H, 1, 1, 1), data_type=single)

        def as_rows(tensor: Any, uid: int, heads: int) -> None:
            tensor.set_output(True).set_uid(uid).set_dim((1, heads, T, D)).set_stride((T * heads * D, D, heads * D, 1))

        def built(g: Any) -> tuple[Any, Tensor]:
            g.validate()
            g.build_operation_graph()
            g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            g.check_support()
            g.build_plans()
            return g, torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device=problem.device)

        # Its left bound is exclusive: 128 shows 128 keys, the token among them.
        mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
        mask |= {} if problem.window is None else {"diagonal_band_left_bound": problem.window}
        scale = D**-0.5

        g = graph()
        q, k, v = rows(g, self.Q, problem.H), rows(g, self.K, problem.K), rows(g, self.V, problem.K)
        out, stats = g.sdpa(
            name="forward", q=q, k=k, v=v, generate_stats=True, attn_scale=scale, sink_token=sinks(g, self.SINK), **mask
        )  # fmt: skip
        as_rows(out, self.OUT, problem.H)
        stats.set_output(True).set_uid(self.STATS).set_data_type(single).set_dim((1, problem.H, T, 1)).set_stride((problem.H * T, T, 1, 1))
        self.forward_graph, self.forward_space = built(g)

        g = graph()
        q, k, v = rows(g, self.Q, problem.H), rows(g, self.K, problem.K), rows(g, self.V, problem.K)
        out, dout = rows(g, self.OUT, problem.H), rows(g, self.DOUT, problem.H)
        stats = g.tensor(uid=self.STATS, dim=(1, problem.H, T, 1), stride=(problem.H * T, T, 1, 1), data_type=single)
        dq, dk, dv = g.sdpa_backward(
            name="backward", q=q, k=k, v=v, o=out, dO=dout, stats=stats, attn_scale=scale, sink_token=sinks(g, self.SINK),
            dSink_token=sinks(g, self.DSINK), **mask,
        )  # fmt: skip
        for tensor, uid, heads in ((dq, self.DQ, problem.H), (dk, self.DK, problem.K), (dv, self.DV, problem.K)):
            as_rows(tensor, uid, heads)
        self.backward_graph, self.backward_space = built(g)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        stats = torch.empty(1, self.problem.H, self.problem.tokens, 1, dtype=torch.float32, device=q.device)
        tensors = {self.Q: q, self.K: k, self.V: v, self.SINK: sinks.view(1, -1, 1, 1), self.OUT: out, self.STATS: stats}
        self.forward_graph.execute({uid: x.detach() for uid, x in tensors.items()}, self.forward_space, handle=self.handle)
        return out, stats

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, stats: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, dsinks = (torch.empty_like(x) for x in (q, k, v, sinks))
        tensors = {self.Q: q, self.K: k, self.V: v, self.SINK: sinks.view(1, -1, 1, 1), self.OUT: out, self.STATS: stats, self.DOUT: dout}
        tensors |= {self.DQ: dq, self.DK: dk, self.DV: dv, self.DSINK: dsinks.view(1, -1, 1, 1)}
        self.backward_graph.execute({uid: x.detach() for uid, x in tensors.items()}, self.backward_space, handle=self.handle)
        return dq, dk, dv, dsinks


# ---- output -------------------------------------------------------------------------------------------------------------------------


def one_line(row: Row) -> str:
    where = f"{row.implementation:>20} {row.problem:>8} {'full' if row.window is None else f'window {row.window}':>10}"
    if row.forward_ms is None or row.backward_ms is None:
        return f"{where}  {row.note}"
    return f"{where}  forward {row.forward_ms:9.3f} ms, backward {row.backward_ms:9.3f} ms"


def table(rows: list[Row]) -> Table:
    shown = Table(title="sink attention, medians")
    for name in ("implementation", "T", "window"):
        shown.add_column(name)
    for name in ("fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s", "extra MiB", "error", "repeats"):
        shown.add_column(name, justify="right")
    shown.add_column("note")
    last = None
    for row in rows:
        if last is not None and (row.problem, row.window) != last:
            shown.add_section()
        last = row.problem, row.window
        shown.add_row(
            row.implementation,
            row.problem,
            "full" if row.window is None else str(row.window),
            *("" if x is None else f"{x:.3f}" for x in (row.forward_ms, row.backward_ms)),
            *("" if x is None else f"{x:.1f}" for x in (row.forward_tflops, row.backward_tflops)),
            "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:,.1f}",
            f"{max(row.errors.values()):.1e}" if row.errors else "",
            str(row.repeats or ""),
            row.note,
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
