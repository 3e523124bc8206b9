"""Times a layer's experts on one GPU, whole and kernel by kernel, beside the matrix products alone, which no arrangement can undercut.

    python tools/bench_experts.py --json experts.json
    python tools/bench_experts.py --tokens 8192 --tile ACTIVATE_BACKWARD=32,64,4,3     # rows, columns, warps, stages
    python tools/bench_experts.py --device cpu                                         # tiny; does it run?

In: sizes (those of the 20B model when nothing is said: 32 experts, hidden and width 2,880, 4 experts a token, 16,384 tokens) and routing.
Out: a table and a JSON file. Needs torch and triton, not Megatron. Before anything is timed, the grouped experts are held against the loop
in float64 on few tokens; exit code 1 when they err more than twice as much as the loop in bfloat16 does.

Rows of the table:
  products   the two grouped matrix products forward and the four backward, nothing else: the floor
  experts    what Megatron's MoE layer calls: rows in, rows out (expert_grouped)
  layer      the same between tokens: rows gathered by token, experts, each token's rows summed (rows.py)
  plain      the same as `layer` as one would write it without kernels (index_select, gathered biases, compiled activation)
and each kernel and product alone. Routing: `balanced` gives every expert as many rows, `natural` about as uneven as an untrained router's.

How it is timed: bfloat16, random data; CUDA events; before each measurement 256 MiB are written, which empties the L2 cache, and the GPU
sleeps two milliseconds, so that launching is hidden. Medians. FLOPs: 2 for a multiplication and addition. Bytes: what must be read and
written at least. Extra bytes: the largest amount allocated at once beyond inputs, parameters, outputs and their gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed
from megatron_gptoss.model import expert_grouped, expert_reference
from megatron_gptoss.model.rows import Rows, find_rows, from_experts, to_experts, weight_of_rows

LIMIT = 7.0
COPY_TBPS = 4.27  # measured copy bandwidth of an H200, bytes read and written


@dataclass(frozen=True)
class Data:
    """One layer and its input. Shape legend: as rows.py; I expert width."""

    x_TC: Tensor
    router_TE: Tensor  # float32 router weights, 0 where not routed
    w1_E2IC: Tensor
    b1_E2I: Tensor
    w2_ECI: Tensor
    b2_EC: Tensor
    dout_TC: Tensor
    rows: Rows
    counts: tuple[int, ...]

    @property
    def offs_E(self) -> Tensor:
        return torch.tensor(self.counts, device=self.x_TC.device).cumsum(0).to(torch.int32)

    def parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w1_E2IC, self.b1_E2I, self.w2_ECI, self.b2_EC

    @property
    def forward_flops(self) -> int:
        (_, twice, C), N = self.w1_E2IC.shape, len(self.rows.token_N)
        return 2 * N * C * (twice + twice // 2)


@dataclass
class Line:
    name: str
    routing: str
    forward_ms: float
    backward_ms: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    tbps: float | None = None  # of kernels that only move memory
    extra_bytes: int | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here; --device cpu tries the tool out.", file=sys.stderr)
        return 2
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{machine}, torch {torch.__version__}", flush=True)
    lacking = expert_grouped.missing(torch.device(options.device), options.dtype, options.hidden, options.width)
    if lacking is None:
        for tile in options.tile:
            set_tile(tile)
        errors = check(options)
        worst = max(errors.values())
        print("error over the bfloat16 loop's (at most 2): " + ", ".join(f"{k} {v:.2f}" for k, v in errors.items()), flush=True)
    else:
        print(f"grouped: {lacking}")
        errors, worst = {}, 0.0
    lines: list[Line] = []
    for routing in options.routing:
        data = make(options, routing)
        for line in measure(data, routing, options, grouped=lacking is None):
            lines.append(line)
            print(one_line(line), flush=True)
            if options.json:
                found = {"device": machine, "torch": torch.__version__, "errors": errors, "lines": [asdict(x) for x in lines]}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if worst > 2 else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A layer's experts on one GPU, whole and in parts.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--experts", type=int, default=32, help="of this rank")
    parser.add_argument("--per-token", type=int, default=4, help="experts that a token visits")
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--width", type=int, default=2880)
    parser.add_argument("--routing", nargs="+", choices=["balanced", "natural"], default=["balanced", "natural"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="lines whose names begin so")
    parser.add_argument("--tile", nargs="+", default=[], metavar="KERNEL=R,C,W,S", help="another tile for a kernel of expert_kernels.py")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.device == "cpu":
        options.tokens, options.experts, options.per_token, options.hidden, options.width = 40, 4, 2, 64, 48
        options.repeats = min(options.repeats, 2)
    return options


def set_tile(setting: str) -> None:
    from megatron_gptoss.model import expert_kernels

    name, _, numbers = setting.partition("=")
    if not isinstance(getattr(expert_kernels, name, None), expert_kernels.Tile):
        raise SystemExit(f"expert_kernels.py has no tile {name}")
    setattr(expert_kernels, name, expert_kernels.Tile(*map(int, numbers.split(","))))


def choose(tokens: int, experts: int, per_token: int, routing: str, generator: torch.Generator) -> Tensor:
    """[T, E] bool on the host, `per_token` true in a row."""
    if routing == "balanced":
        first = torch.randperm(tokens, generator=generator)  # token t visits `per_token` neighbours on a ring of experts
        chosen = (first[:, None] * per_token + torch.arange(per_token)) % experts
    else:
        # An expert's popularity varies by e: the busiest of 32 has about five times the mean, the idlest almost nothing.
        logits = torch.randn(tokens, experts, generator=generator) + torch.randn(experts, generator=generator)
        chosen = logits.topk(per_token).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)


def make(options: argparse.Namespace, routing: str) -> Data:
    T, E, C, I = options.tokens, options.experts, options.hidden, options.width
    generator = torch.Generator().manual_seed(0)
    chosen = choose(T, E, options.per_token, routing, generator).to(options.device)
    on_device = torch.Generator(options.device).manual_seed(1)

    def draw(*shape: int, scale: float, dtype: torch.dtype = options.dtype) -> Tensor:
        return (scale * torch.randn(shape, generator=on_device, device=options.device, dtype=torch.float32)).to(dtype)

    router = torch.rand(T, E, generator=on_device, device=options.device) * chosen
    leaves = [draw(T, C, scale=1.0), router / router.sum(1, keepdim=True),
              draw(E, 2 * I, C, scale=C**-0.5), draw(E, 2 * I, scale=1.0), draw(E, C, I, scale=I**-0.5), draw(E, C, scale=0.1)]  # fmt: skip
    rows = find_rows(chosen, options.per_token)
    return data_of([x.requires_grad_() for x in leaves], draw(T, C, scale=1.0), rows, tuple(chosen.sum(0).tolist()))


def data_of(leaves: Sequence[Tensor], dout_TC: Tensor, rows: Rows, counts: tuple[int, ...]) -> Data:
    x_TC, router_TE, w1, b1, w2, b2 = leaves
    return Data(x_TC, router_TE, w1, b1, w2, b2, dout_TC, rows, counts)


def experts_of(kind: str, x_NC: Tensor, weight_N: Tensor, data: Data) -> Tensor:
    if kind == "loop":
        return expert_reference.experts(x_NC, weight_N, list(data.counts), *data.parameters(), limit=LIMIT)
    return expert_grouped.experts(x_NC, weight_N, data.offs_E, *data.parameters(), limit=LIMIT)


def layer(kind: str, data: Data) -> Tensor:
    """Tokens in, tokens out."""
    if kind == "plain":
        return plain_layer(data)
    backend: Any = expert_reference
    if kind == "grouped":
        from megatron_gptoss.model import expert_kernels

        backend = expert_kernels
    rows = to_experts(data.x_TC, data.rows, backend)
    return from_experts(experts_of(kind, rows, weight_of_rows(data.router_TE, data.rows), data), data.rows, backend)


@torch.compile(dynamic=False)
def plain_activation(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def plain_layer(data: Data) -> Tensor:
    expert = torch.arange(len(data.counts), device=data.x_TC.device).repeat_interleave(torch.tensor(data.counts, device=data.x_TC.device))
    weight = data.router_TE.flatten()[data.rows.cell_N].to(data.x_TC.dtype)
    h = expert_grouped.grouped_mm(data.x_TC.index_select(0, data.rows.token_N), data.w1_E2IC.mT, data.offs_E) + data.b1_E2I[expert]
    y = expert_grouped.grouped_mm(plain_activation(h), data.w2_ECI.mT, data.offs_E) + data.b2_EC[expert]
    return (y * weight[:, None]).index_select(0, data.rows.row_TK.flatten()).view(*data.rows.row_TK.shape, -1).sum(1)


def check(options: argparse.Namespace) -> dict[str, float]:
    """Errors of the grouped experts against the loop in float64, over those of the loop in the same dtype; by output and gradient."""
    sizes = {} if options.device == "cpu" else {"tokens": 300, "experts": 4, "per_token": 2, "hidden": 256, "width": 192}
    small = argparse.Namespace(**vars(options) | sizes)
    data = make(small, "natural")
    leaves = (data.x_TC, data.router_TE, *data.parameters())
    exact_leaves = tuple(x.detach().double().requires_grad_() for x in leaves)
    exact_data = data_of(exact_leaves, data.dout_TC.double(), data.rows, data.counts)

    def found(kind: str, where: Data, of: tuple[Tensor, ...]) -> list[Tensor]:
        out = layer(kind, where)
        return [out.detach(), *torch.autograd.grad(out, of, where.dout_TC)]

    errors = {}
    names = ("y", "x", "router", "w1", "b1", "w2", "b2")
    exact, eager, ours = found("loop", exact_data, exact_leaves), found("loop", data, leaves), found("grouped", data, leaves)
    for name, right, theirs, mine in zip(names, exact, eager, ours, strict=True):
        rounding = torch.finfo(options.dtype).eps / 2 * right.abs().max()
        errors[name] = float((mine.double() - right).abs().max() / ((theirs.double() - right).abs().max() + rounding))
    return errors


def measure(data: Data, routing: str, options: argparse.Namespace, grouped: bool):
    """Lines, one after the other. `grouped`: that backend can run here."""
    wanted = lambda name: not options.only or name.startswith(tuple(options.only))  # noqa: E731
    flops = data.forward_flops
    leaves = (data.x_TC, data.router_TE, *data.parameters())
    wholes: list[tuple[str, Callable[[], Tensor], tuple[Tensor, ...], Tensor]] = []
    if not grouped:
        wholes.append(("loop layer", lambda: layer("loop", data), leaves, data.dout_TC))
    else:
        x_NC, weight_N, dy_NC = rows_of(data)
        inputs = (x_NC, weight_N, *data.parameters())
        if wanted("products"):
            forward, backward = products(data, x_NC.detach(), dy_NC)
            f, b = clock(forward, options), clock(backward, options)
            yield Line("products", routing, f, b, flops / f / 1e9, 2 * flops / b / 1e9)
        wholes.append(("experts", lambda: experts_of("grouped", x_NC, weight_N, data), inputs, dy_NC))
        wholes.append(("layer", lambda: layer("grouped", data), leaves, data.dout_TC))
        if options.device == "cuda":
            wholes.append(("plain", lambda: layer("plain", data), leaves, data.dout_TC))
    for name, forward, of, cotangent in wholes:
        if wanted(name):
            f, b, extra = both_ways(forward, of, cotangent, options)
            yield Line(name, routing, f, b, flops / f / 1e9, 2 * flops / b / 1e9, extra_bytes=extra)
    if grouped:
        for name, call, count, unit in parts(data):
            if wanted(name):
                ms = clock(call, options)
                tflops, tbps = (count / ms / 1e9, None) if unit == "flops" else (None, count / ms / 1e9)
                yield Line(name, routing, ms, forward_tflops=tflops, tbps=tbps)


def rows_of(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and an output gradient, by rows."""
    x_NC, dy_NC = (x.detach().index_select(0, data.rows.token_N) for x in (data.x_TC, data.dout_TC))
    return x_NC.requires_grad_(), data.router_TE.detach().flatten()[data.rows.cell_N].requires_grad_(), dy_NC


def products(data: Data, x_NC: Tensor, dy_NC: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The grouped matrix products of one forward and one backward pass, on data of the right shapes."""
    w1, _, w2, _ = (p.detach() for p in data.parameters())
    offs, mm = data.offs_E, expert_grouped.grouped_mm
    h_N2I = mm(x_NC, w1.mT, offs)
    a_NI = h_N2I[:, : w2.shape[2]].contiguous()
    return (
        lambda: (mm(x_NC, w1.mT, offs), mm(a_NI, w2.mT, offs)),
        lambda: (mm(dy_NC, w2, offs), mm(dy_NC.mT, a_NI, offs), mm(h_N2I.mT, x_NC, offs), mm(h_N2I, w1, offs)),
    )


def parts(data: Data) -> list[tuple[str, Callable[[], Any], int, str]]:
    """(name, call, FLOPs or bytes, which) of each product and kernel."""
    from megatron_gptoss.model import expert_kernels as kernels

    x_NC, weight_N, dy_NC = (x.detach() for x in rows_of(data))
    w1, b1, w2, b2 = (p.detach() for p in data.parameters())
    offs, mm = data.offs_E, expert_grouped.grouped_mm
    h_N2I = mm(x_NC, w1.mT, offs)
    a_NI = kernels.activate(h_N2I, b1, weight_N, offs, LIMIT)
    y_NC, dweight_N, dw1 = mm(a_NI, w2.mT, offs), torch.zeros_like(weight_N), torch.zeros_like(w1)
    N, C, I, T, size = len(x_NC), x_NC.shape[1], a_NI.shape[1], len(data.x_TC), x_NC.element_size()
    one, two = 2 * N * C * I, 4 * N * C * I
    return [
        ("mm x w1", lambda: mm(x_NC, w1.mT, offs), two, "flops"),
        ("mm a w2", lambda: mm(a_NI, w2.mT, offs), one, "flops"),
        ("mm dy w2", lambda: mm(dy_NC, w2, offs), one, "flops"),
        ("mm dh w1", lambda: mm(h_N2I, w1, offs), two, "flops"),
        ("mm dw1", lambda: mm(h_N2I.mT, x_NC, offs), two, "flops"),
        ("mm dw2", lambda: mm(dy_NC.mT, a_NI, offs), one, "flops"),
        ("activate", lambda: kernels.activate(h_N2I, b1, weight_N, offs, LIMIT), 3 * N * I * size, "bytes"),
        ("activate_backward", lambda: kernels.activate_backward(a_NI, h_N2I, b1, weight_N, offs, LIMIT), 6 * N * I * size, "bytes"),
        ("add_bias_", lambda: kernels.add_bias_(y_NC, b2, weight_N, offs), 2 * N * C * size, "bytes"),
        ("bias_backward", lambda: kernels.bias_backward(dy_NC, b2, weight_N, offs, dweight_N), N * C * size, "bytes"),
        ("zero_empty_", lambda: kernels.zero_empty_(dw1, offs), 0, "bytes"),
        ("gather_rows", lambda: kernels.gather_rows(data.x_TC.detach(), data.rows.token_N), (T + N) * C * size, "bytes"),
        ("sum_rows", lambda: kernels.sum_rows(y_NC, data.rows.row_TK), (T + N) * C * size, "bytes"),
        ("find_rows", lambda: find_rows(data.router_TE.detach() > 0, data.rows.row_TK.shape[1]), 0, "bytes"),
    ]  # fmt: skip


def clock(call: Callable[[], Any], options: argparse.Namespace) -> float:
    """Median milliseconds."""
    return statistics.median(timed(call, options)[0] for _ in warm(call, options))


def warm(call: Callable[[], Any], options: argparse.Namespace) -> range:
    for _ in range(3 if options.device == "cuda" else 1):
        call()
    return range(options.repeats)


def timed(call: Callable[[], Any], options: argparse.Namespace) -> tuple[float, Any]:
    """(milliseconds, result)."""
    if options.device == "cpu":
        start = time.perf_counter()
        result = call()
        return 1e3 * (time.perf_counter() - start), result
    torch.empty(2**26, dtype=torch.float32, device="cuda").fill_(0.0)
    torch.cuda._sleep(4_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), result


def both_ways(
    forward: Callable[[], Tensor], of: tuple[Tensor, ...], cotangent: Tensor, options: argparse.Namespace
) -> tuple[float, float, int | None]:
    """Median milliseconds forward and backward, and extra bytes."""

    def step() -> tuple[float, float]:
        f, out = timed(forward, options)
        return f, timed(lambda: torch.autograd.grad(out, of, cotangent), options)[0]

    found = [step() for _ in warm(step, options)]
    extra = None
    if options.device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = forward()
        gradients = torch.autograd.grad(out, of, cotangent)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in (out, *gradients))
    return *(statistics.median(x) for x in zip(*found, strict=True)), extra  # pyright: ignore[reportReturnType]


def one_line(line: Line) -> str:
    def number(value: float | None, form: str, unit: str) -> str:
        return f"{value:{form}} {unit}" if value is not None else " " * (len(f"{0.0:{form}}") + 1 + len(unit))

    share = f" ({line.tbps / COPY_TBPS:.0%} of a copy's)" if line.tbps else ""
    extra = f"  extra {line.extra_bytes / 2**30:.2f} GiB" if line.extra_bytes is not None else ""
    return (
        f"{line.routing:9}{line.name:18}{line.forward_ms:8.3f} ms {number(line.forward_tflops, '6.0f', 'TFLOP/s')}"
        f"  {number(line.backward_ms, '8.3f', 'ms')} {number(line.backward_tflops, '6.0f', 'TFLOP/s')}"
        f"{number(line.tbps, '6.2f', 'TB/s') if line.tbps else ''}{share}{extra}"
    )


if __name__ == "__main__":
    sys.exit(main())
