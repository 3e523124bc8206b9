"""Times log-probs and entropies, forward and backward, beside the matrix products alone on one GPU in one run.

    python tools/bench_logprob.py --json logprob.json
    python tools/bench_logprob.py --chunks 1024 4972 9830 --tokens 24576 8192
    python tools/bench_logprob.py --device cpu                # tiny, reference against eager: does it run?

In: sizes, chunks (tokens whose logits the buffer holds). Out: a table and a JSON file, written anew after each row. Rows: `products`, the
three matrix products that no method can avoid (logits, gradient of the hidden states, gradient of the matrix), whole and alone; `fused`,
ours; and two ways without it: `eager`, everything at once, and `checkpoint`, 2,048 tokens at a time, computed twice. Exit code 1 when ours
misses a bar: log-probs' mean error against float64 at most that of bfloat16 eager, and for each size some chunk within --time-bar, some
within --memory-bar.

With a buffer for a share f of the logits, 4 - f products are done for 3: (4 - f) / 3 is the floor of the ratio. At 2 GB and 24,576 tokens
f is 0.2 and the floor 1.27; what is above it are the two passes over the logits, at least 30 GB of memory traffic.

How it is timed: bfloat16, random data with logits of spread about 3, cotangents for both outputs, CUDA events, medians. Extra bytes: the
largest amount allocated at once beyond inputs, outputs and gradients.
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

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_gptoss.logprob.api import selected_logprob
from megatron_gptoss.logprob.tiles import default_chunk

CHECKED_TOKENS = 256  # float64 logits of so many are compared


@dataclass(frozen=True)
class Data:
    """Leaves, targets, and cotangents of log-prob and entropy."""

    hidden_NC: Tensor
    weight_VC: Tensor
    target_N: Tensor
    dlogp_N: Tensor
    dentropy_N: Tensor


@dataclass
class Row:
    implementation: str
    tokens: int
    chunk: int | None
    forward_ms: float | None = None
    backward_ms: float | None = None
    times_products: float | None = None  # forward + backward over the three products
    extra_bytes: int | None = None
    logp_error: float | None = None  # mean absolute, nats, on CHECKED_TOKENS
    entropy_error: float | None = None
    note: str = ""

    @property
    def total_ms(self) -> float:
        assert self.forward_ms is not None and self.backward_ms is not None, "not measured"
        return self.forward_ms + self.backward_ms


Method = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here; --device cpu tries the tool out.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows: list[Row] = []
    for tokens in options.tokens:
        data = make_data(tokens, options)
        products = time_products(data, options)
        rows.append(products)
        for name, chunk, method in methods(options):
            row = Row(name, tokens, chunk)
            rows.append(row)
            try:
                measure(row, method, data, options)
                row.times_products = row.total_ms / products.total_ms
            except torch.OutOfMemoryError:
                row.note = "does not fit"
            if options.json:
                options.json.write_text(json.dumps({"device": device_name(options), "rows": [asdict(r) for r in rows]}, indent=1))
        del data
    console.print(f"{device_name(options)}, torch {torch.__version__}, vocabulary {options.vocabulary}, hidden size {options.hidden}")
    console.print(as_table(rows))
    missed = misses(rows, options)
    for line in missed:
        console.print(f"[red]missed:[/red] {line}")
    return 1 if missed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=None)
    parser.add_argument("--vocabulary", type=int, default=None)
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--chunks", type=int, nargs="+", default=None, help="tokens; default: what the product chooses, and twice that")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--time-bar", type=float, default=1.25, help="forward + backward over the three products")
    parser.add_argument("--memory-bar", type=float, default=2.5e9, help="extra bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    tiny = options.device == "cpu"
    options.tokens = options.tokens or ([64] if tiny else [24_576])
    options.vocabulary = options.vocabulary or (512 if tiny else 201_088)
    options.hidden = options.hidden or (32 if tiny else 2_880)
    options.repeats = options.repeats or (2 if tiny else 10)
    options.dtype = torch.float32 if tiny else torch.bfloat16
    chosen = default_chunk(options.vocabulary, options.dtype.itemsize)
    options.chunks = options.chunks or ([16] if tiny else [chosen, 2 * chosen])
    return options


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu"


def make_data(tokens: int, options: argparse.Namespace) -> Data:
    generator = torch.Generator(options.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=options.device)

    hidden_NC = normal(tokens, options.hidden).to(options.dtype).requires_grad_()
    weight_VC = (normal(options.vocabulary, options.hidden) * (3 * options.hidden**-0.5)).to(options.dtype).requires_grad_()
    target_N = torch.randint(0, options.vocabulary, (tokens,), generator=generator, device=options.device)
    return Data(hidden_NC, weight_VC, target_N, normal(tokens), normal(tokens))


def methods(options: argparse.Namespace) -> list[tuple[str, int | None, Method]]:
    backend = "reference" if options.device == "cpu" else "fused"

    def ours(chunk: int) -> Method:
        return lambda *x: selected_logprob(*x, chunk=chunk, backend=backend)

    made: list[tuple[str, int | None, Method]] = [(backend, chunk, ours(chunk)) for chunk in options.chunks]
    return [*made, ("eager", None, eager), ("checkpoint", 2048, checkpointed)]


def eager(hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    logp_NV = (hidden_NC @ weight_VC.t()).to(torch.promote_types(hidden_NC.dtype, torch.float32)).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def checkpointed(hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    parts = [
        checkpoint(eager, h, weight_VC, t, use_reentrant=False) for h, t in zip(hidden_NC.split(2048), target_N.split(2048), strict=True)
    ]
    logp, entropy = zip(*parts, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.cat(logp), torch.cat(entropy)


# ---- measuring ----------------------------------------------------------------------------------------------------------------------


def measure(row: Row, method: Method, data: Data, options: argparse.Namespace) -> None:
    row.logp_error, row.entropy_error = errors(method, data)
    leaves = (data.hidden_NC, data.weight_VC)
    forward, backward = [], []
    for repeat in range(2 + options.repeats):
        before = start_memory(options)
        outputs, forward_ms = timed(lambda: method(*leaves, data.target_N), options)
        gradients, backward_ms = timed(
            lambda outputs=outputs: torch.autograd.grad(outputs, leaves, (data.dlogp_N, data.dentropy_N)), options
        )
        if options.device == "cuda" and repeat == 1:
            kept = sum(x.numel() * x.element_size() for x in (*outputs, *gradients))
            row.extra_bytes = torch.cuda.max_memory_allocated() - before - kept
        if repeat >= 2:
            forward.append(forward_ms)
            backward.append(backward_ms)
        del outputs, gradients
    row.forward_ms, row.backward_ms = statistics.median(forward), statistics.median(backward)


def time_products(data: Data, options: argparse.Namespace) -> Row:
    """Logits whole, then both gradients out of that buffer; no pass over it."""
    hidden_NC, weight_VC = data.hidden_NC.detach(), data.weight_VC.detach()
    logit_NV = hidden_NC.new_empty(len(hidden_NC), len(weight_VC))
    dhidden_NC, dweight_VC = torch.empty_like(hidden_NC), torch.empty_like(weight_VC)

    def gradients() -> None:
        torch.mm(logit_NV, weight_VC, out=dhidden_NC)
        torch.mm(logit_NV.t(), hidden_NC, out=dweight_VC)

    times = []
    for _ in range(2 + options.repeats):
        _, forward_ms = timed(lambda: torch.mm(hidden_NC, weight_VC.t(), out=logit_NV), options)
        times.append((forward_ms, timed(gradients, options)[1]))
    forward, backward = (statistics.median(x) for x in zip(*times[2:], strict=True))
    return Row("products", len(hidden_NC), None, forward, backward, 1.0)


def timed[T](work: Callable[[], T], options: argparse.Namespace) -> tuple[T, float]:
    """What `work` returns, and milliseconds."""
    if options.device == "cpu":
        start = time.perf_counter()
        return work(), (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    result = work()
    end.record()
    end.synchronize()
    return result, begin.elapsed_time(end)


def start_memory(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@torch.no_grad()
def errors(method: Method, data: Data) -> tuple[float, float]:
    """Mean absolute errors of log-prob and entropy against float64, on the first tokens."""
    x = data.hidden_NC[:CHECKED_TOKENS], data.weight_VC, data.target_N[:CHECKED_TOKENS]
    logp_N, entropy_N = eager(x[0].double(), x[1].double(), x[2])
    found = method(*x)
    return float((found[0] - logp_N).abs().mean()), float((found[1] - entropy_N).abs().mean())


# ---- telling ------------------------------------------------------------------------------------------------------------------------


def misses(rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """The bars that ours misses, in words. Times are judged on a GPU only."""
    lines = []
    for tokens in options.tokens:
        here = [r for r in rows if r.tokens == tokens]
        ours = [r for r in here if r.implementation in ("fused", "reference")]
        eagers = next((r.logp_error for r in here if r.implementation == "eager" and r.logp_error is not None), float("inf"))
        for r in ours:
            if r.logp_error is not None and r.logp_error > eagers + 1e-6:  # 1e-6: the last bits of a float32 of 10
                lines.append(f"{tokens} tokens, chunk {r.chunk}: log-prob error {r.logp_error:.2e}, eager {eagers:.2e}")
        if options.device == "cuda":
            ratio = min((r.times_products for r in ours if r.times_products is not None), default=float("inf"))
            extra = min((r.extra_bytes for r in ours if r.extra_bytes is not None), default=float("inf"))
            if ratio > options.time_bar:
                lines.append(f"{tokens} tokens: {ratio:.2f} times the three products, the bar is {options.time_bar}")
            if extra > options.memory_bar:
                lines.append(f"{tokens} tokens: {extra / 1e9:.2f} GB extra, the bar is {options.memory_bar / 1e9}")
    return lines


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(
        "implementation", "tokens", "chunk", "forward ms", "backward ms", "x products", "extra GB", "logp error", "H error", "note"
    )
    for r in rows:
        table.add_row(
            r.implementation, str(r.tokens), str(r.chunk or ""), number(r.forward_ms), number(r.backward_ms), number(r.times_products),
            "" if r.extra_bytes is None else f"{r.extra_bytes / 1e9:.2f}",
            "" if r.logp_error is None else f"{r.logp_error:.1e}", "" if r.entropy_error is None else f"{r.entropy_error:.1e}", r.note,
        )  # fmt: skip
    return table


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


if __name__ == "__main__":
    sys.exit(main())
