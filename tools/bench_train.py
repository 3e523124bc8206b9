"""Times a training world with random weights: scoring, forward + backward, optimizer step; by itself or under torchrun.

    python tools/bench_train.py configs/20b.toml --parallel.data=1 --parallel.expert=1 --trainer.attention=flash --trainer.recompute=full \\
        --tokens 16384 --sequence 8192 --without-optimizer --profile --json 20b.json
    python tools/bench_train.py configs/tiny.toml               # on a CPU: does it run?

A whole step of the 20B on two H200s of one host with 256 GiB (docs/memory.md says why this plan), and one sequence of 65,536 tokens:

    python3 -m torch.distributed.run --standalone --nproc-per-node 2 tools/bench_train.py configs/20b.toml --parallel.data=2 \
        --parallel.expert=2 --trainer.optimizer_states=float32 --trainer.optimizer_offload=0.75 --trainer.threads_per_rank=16 \
        --trainer.attention=flash --trainer.attention_windowed=triton --trainer.experts=grouped --trainer.logprob=fused \
        --tokens 16384 --sequence 8192 --json 20b-step.json
    python3 -m torch.distributed.run --standalone --nproc-per-node 2 tools/bench_train.py configs/20b.toml --parallel.data=1 \
        --parallel.context=2 --parallel.expert=2 --trainer.recompute=full --trainer.optimizer_states=float32 \
        --trainer.optimizer_offload=0.75 --trainer.threads_per_rank=16 --trainer.attention=flash --trainer.attention_windowed=triton \
        --trainer.experts=grouped --trainer.logprob=fused --tokens 65536 --sequence 65536 --json 20b-65k.json

In: TOML files and dotted flags as `gptoss train` takes them, and what to time. Out: a table, and JSON from rank 0. Trainer, model, groups
and packing are those of training; only weights and tokens are random. Each rank makes its weights on its own device, with the distributions
of model/random_init.py but not its values, which are drawn on the host and take minutes for 20 billion.

Routing: `balanced` overrules the choice of every router so that token t of a rank goes to experts tK, tK + 1, ... tK + K - 1 (modulo E, and
one further in each layer): every expert gets as many tokens as any other, up to one. Logits, probabilities and gradients are the router's
own. `natural` leaves the choice to the random router.

`--without-optimizer` builds none: one 140 GB GPU holds weights and float32 gradients of the 20B (126 GB), not the optimizer's 12 bytes a
parameter. DDP then all-reduces gradients instead of scattering them, since for the latter Megatron copies all parameters while it builds.
`--gradients bfloat16` keeps gradients in the parameters' dtype, as the plain yardstick does; training never does.

Useful FLOPs a token, of which recomputation is no part: forward 2 for each parameter that multiplies it (attention's matrices, router, the
K experts that it visits; the output head only for tokens that are predicted), and 4 H D for each pair of a query and a key that it sees, a
full layer n (n + 1) / 2 of them in a sequence of n and a windowed one at most `sliding_window` a query. Backward twice as many. (Tools
that time attention alone count 2.5 times, since no kernel does with less.) Peak: the best of ten products of 8192^3 in the same dtype, on
the same GPU, in this run. Milliseconds are medians of the slowest rank's; memory is the worst rank's peak.

With the optimizer, peak memory since the process started, building and compiling included, is set beside what `gptoss plan` predicts for
this load (and for balanced routing without its imbalance), as the first step of a run does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.fit import changed_config
from megatron_gptoss.config.layout import layer_multiplications, stages, world_size
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.memory import count_parameters
from megatron_gptoss.config.rank_memory import GIB, RankMemory, trainer_memory
from megatron_gptoss.config.rules import not_built_yet
from megatron_gptoss.config.schema import Config, ModelConfig
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.obs.plan_table import predicted_and_measured
from megatron_gptoss.types import PeakMemory

if TYPE_CHECKING:  # torch must not be imported before the environment says what Megatron needs on a CPU
    import torch

    from megatron_gptoss.parallel.shape import ParallelShape
    from megatron_gptoss.trainer.step import Trainer
    from megatron_gptoss.types import MicroBatch


@dataclass(frozen=True)
class Load:
    """What one rank is given for one update: `microbatches` packs of `sequences` sequences of `length` tokens."""

    sequences: int
    length: int
    microbatches: int

    @property
    def tokens(self) -> int:
        return self.microbatches * self.sequences * self.length


@dataclass
class Phase:
    """What was measured of one phase. Tokens and FLOPs are those of all data-parallel ranks together."""

    name: str
    ms: float
    tokens_per_s: float | None  # of the whole world
    tflops_per_gpu: float | None
    share_of_peak: float | None
    peak_gib: float | None  # allocated at once, on the worst rank


@dataclass(frozen=True)
class Memory:
    """Of the rank whose tensors took most."""

    rank: int
    predicted: RankMemory  # of its pipeline stage
    measured: PeakMemory | None  # None on a CPU
    host_bytes: int  # the largest resident set of any rank's process


@dataclass(frozen=True)
class Kernel:
    name: str
    ms: float
    calls: int
    share: float  # of all kernels' time


def main(arguments: Sequence[str] | None = None) -> int:
    # "Apex is not installed" and the like, from every rank.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    try:
        options, config = parse(arguments)
        return bench(options, config)
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, help="of a microbatch; default: trainer.tokens_per_microbatch")
    parser.add_argument("--sequence", type=int, help="tokens of each sequence; default: rollout.max_sequence_tokens")
    parser.add_argument("--microbatches", type=int, help="of an update on a rank; default: one for each pipeline stage")
    parser.add_argument("--routing", choices=("balanced", "natural"), default="balanced")
    parser.add_argument("--without-optimizer", action="store_true", help="time scoring, forward and backward only")
    parser.add_argument("--gradients", choices=("float32", "bfloat16"), default="float32", help="bfloat16: only without the optimizer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="list the five longest kernels of forward + backward")
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args(arguments)
    loaded = load(*parse_flags(rest))
    # A figure must belong to what it is printed with. --parallel sizes that a run would refuse are the model's to refuse.
    ignored = [line for line in not_built_yet(loaded) if line.startswith("trainer.")]
    if ignored:
        raise ConfigError("\n".join(ignored))
    config = loaded.config
    for name in ("tokens", "sequence", "microbatches", "repeats"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1.")
    if options.gradients == "bfloat16" and not (options.without_optimizer and config.trainer.dtype == "bfloat16"):
        raise ConfigError('--gradients bfloat16 needs --without-optimizer and trainer.dtype = "bfloat16".')
    return options, config


def load_of(options: argparse.Namespace, config: Config) -> Load:
    tokens = options.tokens or config.trainer.tokens_per_microbatch
    length = min(options.sequence or config.rollout.max_sequence_tokens, tokens)
    return Load(tokens // length, length, options.microbatches or config.parallel.pipeline)


def rank_here(config: Config) -> int:
    """This process's rank. ConfigError when another number of processes was started than there are ranks. On a CPU it also puts into the
    environment what must be there before Megatron is imported."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != world_size(config):
        p = config.parallel
        raise ConfigError(
            f"{world} processes were started, but parallel.tensor {p.tensor} x context {p.context} x pipeline {p.pipeline} x data {p.data} "
            f"= {world_size(config)}. Start as many with torchrun --nproc-per-node, or set --parallel.data."
        )
    if config.cluster.device == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return int(os.environ.get("RANK", "0"))


def bench(options: argparse.Namespace, config: Config) -> int:
    rank, on_gpu = rank_here(config), config.cluster.device == "cuda"
    from megatron_gptoss.parallel.groups import destroy_groups

    shape = join(config, rank, on_gpu)
    try:
        given = load_of(options, config)
        with torch_threads(config.trainer.threads_per_rank):
            peak = measured_peak(config.trainer.dtype, on_gpu)
            trainer = make_trainer(
                config, shape, with_optimizer=not options.without_optimizer, wide_gradients=options.gradients == "float32"
            )
            peaks = Peaks(on_gpu)
            phases, kernels = measure(trainer, config, given, options, peak, peaks)
            memory = fullest(peaks, as_loaded(config, given, options))
        if rank == 0:
            report(config, given, options, peak, phases, kernels, memory)
    finally:
        destroy_groups()
    return 0


# ---- building -----------------------------------------------------------------------------------------------------------------------


def join(config: Config, rank: int, on_gpu: bool) -> ParallelShape:
    """Process groups as a trainer's worker makes them."""
    import torch

    from megatron_gptoss.errors import MachineError
    from megatron_gptoss.parallel.groups import init_groups
    from megatron_gptoss.parallel.shape import ParallelShape

    p = config.parallel
    shape = ParallelShape(
        world=world_size(config), tensor=p.tensor, pipeline=p.pipeline, context=p.context, expert=p.expert, stage_layers=stages(config)
    )
    if on_gpu:
        if not torch.cuda.is_available():
            raise MachineError('cluster.device = "cuda", and there is no CUDA device here. --cluster.device=cpu tries the tool out.')
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = "RANK" not in os.environ
    init_groups(
        shape,
        rank=rank,
        init_method=f"file://{tempfile.mkdtemp()}/meet" if alone else "env://",
        timeout_s=config.trainer.step_timeout_s,
        seed=0,
        backend="nccl" if on_gpu else "gloo",
    )
    return shape


def make_trainer(config: Config, shape: ParallelShape, *, with_optimizer: bool, wide_gradients: bool = True) -> Trainer:
    from megatron_gptoss.trainer import passes, step

    parts: Any = passes
    names = ("make_optimizer", "make_schedule", "DistributedDataParallelConfig")
    kept = {name: getattr(passes, name) for name in names}
    if not with_optimizer:
        parts.make_optimizer = parts.make_schedule = lambda *_args, **_kwargs: _NoOptimizer()
        plain = {"use_distributed_optimizer": False, "grad_reduce_in_fp32": wide_gradients}
        parts.DistributedDataParallelConfig = lambda **fields: kept["DistributedDataParallelConfig"](**{**fields, **plain})
    try:
        trainer = step.Trainer(config.model, config.trainer, shape, config.rl, total_updates=1000)
    finally:
        for name, part in kept.items():
            setattr(parts, name, part)
    fill_with_random_weights(trainer, config.model)
    trainer.weights_changed()
    return trainer


class _NoOptimizer:
    """Stands where the optimizer would, so that its memory is not taken."""

    def zero_grad(self) -> None: ...
    def reload_model_params(self) -> None: ...


def fill_with_random_weights(trainer: Trainer, model: ModelConfig) -> None:
    """Each parameter where it is, in its dtype. Ranks that hold the same parameter draw the same numbers."""
    import torch

    groups = trainer.groups
    with torch.no_grad():
        for name, p in trainer.module.named_parameters():
            if "norm" in name:
                p.fill_(1.0)
            elif name.endswith("bias") and "router" not in name:
                p.zero_()
            else:
                # Layers are counted on their stage, so the stage belongs to the name.
                holder = f"ep{groups.ep.rank()}" if not getattr(p, "allreduce", True) else f"tp{groups.tp.rank()}"
                digest = hashlib.sha256(f"{groups.pp.rank()}/{holder}/{name}".encode()).digest()
                generator = torch.Generator(p.device).manual_seed(int.from_bytes(digest[:7], "big"))
                p.normal_(0.0, model.initializer_range, generator=generator)


class Balanced:
    """In place of a router's noise on the choice: logits [T, E] that choose experts in turn, whatever the router thinks."""

    def __init__(self, layer: int, top_k: int) -> None:
        self.layer, self.top_k = layer, top_k

    def __call__(self, logits_TE: torch.Tensor) -> torch.Tensor:
        import torch

        T, E = logits_TE.shape
        turn_TK = torch.arange(T * self.top_k, device=logits_TE.device).view(T, self.top_k) + self.layer
        return torch.zeros_like(logits_TE, requires_grad=False).scatter_(1, turn_TK % E, 1.0)


def balance_routers(trainer: Trainer, model: ModelConfig) -> None:
    from megatron_gptoss.model.router import routers_of

    for router in routers_of(trainer.module):
        router.noise = Balanced(router.layer, model.num_experts_per_tok)  # pyright: ignore[reportAttributeAccessIssue]


def microbatches_of(given: Load, vocab_size: int, seed: int) -> list[MicroBatch]:
    """Random tokens, all but the first of each sequence trained; engine log-probs near those of a random model."""
    import math
    import random

    from megatron_gptoss.parallel.packing import make_microbatch
    from megatron_gptoss.types import Sample

    draw = random.Random(seed)
    trained = (False, *[True] * (given.length - 1))
    logp = (0.0, *[-math.log(vocab_size)] * (given.length - 1))

    def sample(name: str) -> Sample:
        ids = tuple(draw.randrange(vocab_size) for _ in range(given.length))
        return Sample(name=name, token_ids=ids, trained=trained, engine_logp=logp, advantage=draw.gauss(0.0, 1.0))

    return [make_microbatch([sample(f"bench/{m}#{s}") for s in range(given.sequences)]) for m in range(given.microbatches)]


# ---- counting -----------------------------------------------------------------------------------------------------------------------


def seen_pairs(n: int, window: int | None) -> int:
    """(query, key) pairs of one causal sequence; the window counts the token itself."""
    w = n if window is None else min(n, window)
    return w * (w + 1) // 2 + (n - w) * w


def forward_flops(model: ModelConfig, given: Load) -> int:
    """Useful FLOPs of one data-parallel rank's forward pass over all its microbatches; backward has twice as many."""
    windowed = (model.num_hidden_layers + 1) // 2  # layers 0, 2, ...
    pairs = windowed * seen_pairs(given.length, model.sliding_window) + (model.num_hidden_layers - windowed) * seen_pairs(
        given.length, None
    )
    matrices = given.length * model.num_hidden_layers * layer_multiplications(model)
    head = (given.length - 1) * model.vocab_size * model.hidden_size
    one_sequence = 2 * (matrices + head) + 4 * model.num_attention_heads * model.head_dim * pairs
    return given.microbatches * given.sequences * one_sequence


# ---- measuring ----------------------------------------------------------------------------------------------------------------------


def torch_threads(threads: int) -> Any:
    from contextlib import contextmanager

    import torch

    @contextmanager
    def limited():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return limited()


def measured_peak(dtype: str, on_gpu: bool) -> float:
    """FLOP/s of the best of ten square products."""
    import torch

    n = 8192 if on_gpu else 512
    a = torch.randn(n, n, device="cuda" if on_gpu else "cpu").to(getattr(torch, dtype))
    times = [timed(lambda: torch.mm(a, a))[1] for _ in range(12)]
    return 2 * n**3 / min(times[2:]) * 1e3


def timed[T](work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and milliseconds until the device has done it."""
    import torch

    torch.cuda.synchronize()  # on a CPU, model.cpu has made it do nothing
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, (time.perf_counter() - start) * 1e3


class Peaks:
    """The most this process's GPU has held, although each phase's peak is measured from its own start."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.most = on_gpu, PeakMemory(0, 0, 0)

    def note(self) -> int:
        """Bytes of tensors at the peak since the last call, or since the process started."""
        import torch

        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        now = PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free)
        self.most = PeakMemory(*map(max, zip(astuple(self.most), astuple(now), strict=True)))
        torch.cuda.reset_peak_memory_stats()
        return now.allocated


def as_loaded(config: Config, given: Load, options: argparse.Namespace) -> Config:
    """The configuration whose plan is this run's: its packs, its routing, and no reference policy."""
    even = {"parallel.expert_imbalance": 1.0} if options.routing == "balanced" else {}
    pack = {"trainer.tokens_per_microbatch": given.sequences * given.length, "rollout.max_sequence_tokens": given.length}
    return changed_config(config, {**pack, **even, "rl.kl_coef": 0.0})


def fullest(peaks: Peaks, config: Config) -> Memory:
    """The same on all ranks."""
    import torch

    ranks = torch.distributed.get_world_size()
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, (peaks.most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    rank = max(range(ranks), key=lambda r: found[r][0].allocated)
    stage = rank // (ranks // config.parallel.pipeline)
    return Memory(rank, trainer_memory(config)[stage], found[rank][0] if peaks.on_gpu else None, max(host for _, host in found))


def measure(
    trainer: Trainer, config: Config, given: Load, options: argparse.Namespace, peak: float, peaks: Peaks
) -> tuple[list[Phase], list[Kernel]]:
    import torch

    from megatron_gptoss.trainer.how import Update

    if options.routing == "balanced":
        balance_routers(trainer, config.model)
    shape = trainer.shape
    minibatch = microbatches_of(given, config.model.vocab_size, seed=shape.data_index(torch.distributed.get_rank()))
    # No reference policy is kept, and the KL term would cost a scoring pass.
    how = Update(policy=config.rl.model_copy(update={"kl_coef": 0.0}), temperature=config.rollout.temperature)
    times: dict[str, list[float]] = {"score": [], "forward + backward": [], "optimizer": [], "step": []}
    memory: dict[str, list[int]] = {name: [] for name in times}

    def one[T](name: str, work: Callable[[], T], keep: bool) -> tuple[T, float]:
        torch.distributed.barrier()
        peaks.note()
        result, ms = timed(work)
        held = peaks.note()
        if keep:
            times[name].append(ms)
            memory[name].append(held)
        return result, ms

    def accumulate():
        return trainer._accumulate(minibatch, how, trainer._known(minibatch, how, None, None))

    for repeat in range(2 + options.repeats):
        keep = repeat >= 2  # kernels are compiled, buffers allocated and the optimizer's state made in the first
        one("score", lambda: trainer.score(minibatch, temperature=how.temperature), keep)
        totals, passes_ms = one("forward + backward", accumulate, keep)
        if not options.without_optimizer:
            (_, stepped), step_ms = one("optimizer", lambda totals=totals: trainer._step(totals.sums), keep)
            if not stepped:
                raise GptossError("the optimizer refused a step: a gradient is not finite")
            if keep:
                times["step"].append(passes_ms + step_ms)
                memory["step"].append(max(memory[name][-1] for name in ("forward + backward", "optimizer")))
    useful = {"score": 1, "forward + backward": 3, "optimizer": 0, "step": 3}
    flops = forward_flops(config.model, given)
    phases = []
    for name in (n for n in times if times[n]):
        ms, peak_bytes = slowest(statistics.median(times[name]), max(memory[name]), trainer)
        rate = useful[name] * flops * shape.data / shape.world / ms * 1e3
        phases.append(
            Phase(
                name=name,
                ms=ms,
                tokens_per_s=given.tokens * shape.data / ms * 1e3 if useful[name] else None,
                tflops_per_gpu=rate / 1e12 if useful[name] else None,
                share_of_peak=rate / peak if useful[name] else None,
                peak_gib=peak_bytes / 2**30 if peak_bytes else None,
            )
        )
    kernels = longest_kernels(accumulate) if options.profile else []
    return phases, kernels


def slowest(ms: float, peak_bytes: int, trainer: Trainer) -> tuple[float, int]:
    """The worst over all ranks."""
    import torch

    worst = torch.tensor([ms, float(peak_bytes)], dtype=torch.float64, device=trainer.device)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return float(worst[0]), int(worst[1])


def longest_kernels(work: Callable[[], object], most: int = 5) -> list[Kernel]:
    """By the time they take themselves, all their calls together: GPU kernels, or on a CPU torch's operators."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        timed(work)
    spent = [(e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3, e.count) for e in found.key_averages()]
    everything = sum(ms for _, ms, _ in spent) or 1.0
    return [Kernel(name, ms, calls, ms / everything) for name, ms, calls in sorted(spent, key=lambda k: -k[1])[:most]]


# ---- telling ------------------------------------------------------------------------------------------------------------------------


def report(
    config: Config,
    given: Load,
    options: argparse.Namespace,
    peak: float,
    phases: Sequence[Phase],
    kernels: Sequence[Kernel],
    memory: Memory,
) -> None:
    import torch

    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = torch.cuda.get_device_name() if config.cluster.device == "cuda" else "cpu"
    parameters, p, t = count_parameters(config.model), config.parallel, config.trainer
    console.print(
        f"{world_size(config)} x {machine}, torch {torch.__version__}; {parameters.total:,} parameters, {parameters.active:,} a token; "
        f"tensor {p.tensor} context {p.context} pipeline {p.pipeline} data {p.data} expert {p.expert}"
    )
    console.print(
        f"{given.microbatches} microbatches of {given.sequences} x {given.length:,} tokens a data-parallel rank; {t.dtype}, attention "
        f"{t.attention} / {t.backend_of_windowed_layers}, experts {t.experts}, log-probs {t.logprob}, recompute {t.recompute}, "
        f"optimizer {t.optimizer_states}, {t.optimizer_offload:.0%} on the host, {t.threads_per_rank} threads a rank, "
        f"routing {options.routing}, gradients {options.gradients}; matrix peak {peak / 1e12:.4g} TFLOP/s"
    )
    table = Table("phase", "ms", "tokens/s", "TFLOP/s a GPU", "of peak", "peak GiB")
    for f in phases:
        table.add_row(
            f.name, f"{f.ms:,.1f}", *(("",) * 3 if f.tokens_per_s is None else (
                f"{f.tokens_per_s:,.0f}", f"{f.tflops_per_gpu:.4g}", f"{f.share_of_peak:.1%}")), f"{f.peak_gib:.1f}" if f.peak_gib else ""
        )  # fmt: skip
    console.print(table)
    if not options.without_optimizer:
        console.print(memory_table(memory))
    if kernels:
        table = Table("kernel of forward + backward", "ms", "calls", "of all")
        for k in kernels:
            table.add_row(k.name[:100], f"{k.ms:,.1f}", str(k.calls), f"{k.share:.1%}")
        console.print(table)
    if options.json:
        record = {
            "machine": machine, "torch": torch.__version__, "world": world_size(config), "routing": options.routing,
            "gradients": options.gradients, "with_optimizer": not options.without_optimizer, "load": asdict(given),
            "memory": {
                "rank": memory.rank, "predicted_bytes": memory.predicted.allocated, "predicted_moment": memory.predicted.worst_phase,
                "measured": asdict(memory.measured) if memory.measured else None, "predicted_host_bytes": memory.predicted.host_bytes,
                "process_bytes": memory.host_bytes,
            },
            "peak_flops": peak, "phases": [asdict(f) for f in phases], "kernels": [asdict(k) for k in kernels],
            "config": config.model_dump(mode="json", include={"model", "parallel", "trainer"}),
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1))


def memory_table(memory: Memory) -> Table:
    """Predicted beside measured, in the words of a run's first step, and in bytes."""
    table = Table(f"memory of rank {memory.rank}", "")
    predicted = memory.predicted
    if memory.measured:
        for row in predicted_and_measured(predicted, memory.measured):
            table.add_row(*row)
    measured = f", measured {memory.measured.allocated:,}" if memory.measured else ""
    table.add_row("tensors at the peak, bytes", f"predicted {predicted.allocated:,} ({predicted.worst_phase}){measured}")
    host = f"predicted {predicted.host_bytes / GIB:.1f} GiB for the optimizer, the process held {memory.host_bytes / GIB:.1f} in all"
    table.add_row("host memory", host)
    return table


if __name__ == "__main__":
    sys.exit(main())
