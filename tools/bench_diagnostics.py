"""What the diagnostics cost: whole training updates with them and without, in turn, in one process.

    python tools/bench_diagnostics.py configs/tiny.toml --tokens 4096 --sequence 128                # a CPU
    python tools/bench_diagnostics.py configs/20b.toml --model.num_hidden_layers=4 --parallel.data=1 --parallel.expert=1 \\
        --tokens 16384 --sequence 8192 --microbatches 2 --json diagnostics.json                     # four layers of the 20B on one GPU

In: TOML files, dotted flags and sizes as tools/bench_train.py takes them, and its trainer, weights, tokens and routing. Out: a table.
An update is `Trainer.update` on-policy: counts, forward, loss, backward, reduction over ranks, the optimizer's step, and the report.

    bare          no diagnostics: of each microbatch only the loss is added up, which the guard of the step needs; nothing is reported
    diagnosed     as in training: rl/diagnostics.py and rl/worst.py of each microbatch, and their report
    archived      and the log-prob of every token besides (run.archive_scores)

Each round has all three, in an order that turns from round to round. A difference is that to the bare update of the same round, and a
figure the median of the rounds. Wall time is rank 0's until its device has done all. The process's own time is there because on a machine
that is shared it is the quieter clock on a CPU (on a GPU it means little). "Inside" is the processor time that the host's thread spends in
the diagnostics' own calls: on a CPU all they cost, and the figure that a busy machine disturbs least; on a GPU what it takes to launch
them, which is hidden wherever the GPU is behind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_train import balance_routers, join, load_of, make_trainer, microbatches_of, rank_here, timed, torch_threads
from bench_train import parse as parse_load
from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError, GptossError

if TYPE_CHECKING:
    from megatron_gptoss.trainer.step import Trainer

BARE, DIAGNOSED, ARCHIVED = "bare", "diagnosed", "archived"
KINDS = (BARE, DIAGNOSED, ARCHIVED)


@dataclass(frozen=True)
class Time:
    """Of one update, milliseconds."""

    wall: float
    process: float
    inside: float  # processor time of the calling thread


@dataclass(frozen=True)
class Cost:
    """Medians over the rounds, milliseconds."""

    kind: str
    wall: float
    process: float
    more_wall: float  # than the bare update of the same round
    more_process: float
    inside: float


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options, given, config = parse(arguments)
        return bench(options, given, config)
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.Namespace, Config]:
    """(ours, bench_train's, the configuration)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args(arguments)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds} must be at least 1.")
    given, config = parse_load(rest)
    if given.without_optimizer:
        raise ConfigError("--without-optimizer leaves no whole update to compare with; fewer --model.num_hidden_layers need less memory.")
    # No reference policy is kept, and a mean of weights or scored log-probs would cost passes that are no diagnostics.
    plain = {"kl_coef": 0.0, "correction_normalize": False, "router_replay": "none"}
    return options, given, config.model_copy(update={"rl": config.rl.model_copy(update=plain)})


def bench(options: argparse.Namespace, given: argparse.Namespace, config: Config) -> int:
    rank = rank_here(config)
    from megatron_gptoss.parallel.groups import destroy_groups

    shape = join(config, rank, config.cluster.device == "cuda")
    try:
        with torch_threads(config.trainer.threads_per_rank):
            trainer = make_trainer(config, shape, with_optimizer=True)
            if given.routing == "balanced":
                balance_routers(trainer, config.model)
            rounds = measure(trainer, given, config, options.rounds)
        if rank == 0:
            report(options, given, config, costs(rounds))
    finally:
        destroy_groups()
    return 0


# ---- measuring ----------------------------------------------------------------------------------------------------------------------


def measure(trainer: Trainer, given: argparse.Namespace, config: Config, rounds: int) -> list[dict[str, Time]]:
    import torch

    from megatron_gptoss.trainer.how import Update

    load = load_of(given, config)
    minibatch = microbatches_of(load, config.model.vocab_size, seed=trainer.shape.data_index(torch.distributed.get_rank()))
    how = Update(policy=config.rl, temperature=config.rollout.temperature)

    def one(kind: str) -> Time:
        with bare(trainer) if kind == BARE else watched(trainer) as inside:
            torch.distributed.barrier()
            began = time.process_time()
            stats, wall = timed(lambda: trainer.update([minibatch], replace(how, keep_scores=kind == ARCHIVED)))
            process = (time.process_time() - began) * 1e3
        if stats.skipped:
            raise GptossError(f"an update was refused: {stats.problem}")
        return Time(wall, process, inside[0])

    found = []
    for number in range(2 + rounds):  # kernels are compiled, buffers allocated and the optimizer's state made in the first two
        turn = number % len(KINDS)
        times = {kind: one(kind) for kind in (*KINDS[turn:], *KINDS[:turn])}
        if number >= 2:
            found.append(times)
    return found


@contextmanager
def bare(trainer: Trainer) -> Iterator[list[float]]:
    """The trainer measures nothing but the loss, and reports nothing."""
    from megatron_gptoss.rl.diagnostics import SUMS
    from megatron_gptoss.types import StepStats

    loss = SUMS.index("loss")

    def only_the_loss(_j: int, found: Any, _tokens: Any, known: Any) -> None:
        known.measured.sums[loss] += found.loss_sum.detach()

    def nothing(*_: Any, skipped: bool, problem: str, **_others: Any) -> StepStats:
        return StepStats(0.0, 0.0, 0.0, 0, 1, skipped, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, problem)

    with replaced(trainer, _diagnose=only_the_loss, _stats=nothing):
        yield [0.0]


@contextmanager
def watched(trainer: Trainer) -> Iterator[list[float]]:
    """The processor's milliseconds in the calls that only measure, report or archive."""
    spent = [0.0]

    def timing(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*positional, **named)
            finally:
                spent[0] += (time.thread_time() - began) * 1e3

        return call

    with replaced(trainer, **{name: timing(getattr(trainer, name)) for name in ("_diagnose", "_scores", "_stats")}):
        yield spent


@contextmanager
def replaced(trainer: Trainer, **methods: Callable[..., Any]) -> Iterator[None]:
    """This one trainer has other methods inside the block."""
    for name, method in methods.items():
        setattr(trainer, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(trainer, name)


def costs(rounds: Sequence[dict[str, Time]]) -> list[Cost]:
    middle = lambda values: statistics.median(list(values))  # noqa: E731
    return [
        Cost(
            kind,
            wall=middle(r[kind].wall for r in rounds),
            process=middle(r[kind].process for r in rounds),
            more_wall=middle(r[kind].wall - r[BARE].wall for r in rounds),
            more_process=middle(r[kind].process - r[BARE].process for r in rounds),
            inside=middle(r[kind].inside for r in rounds),
        )
        for kind in KINDS
    ]


# ---- telling ------------------------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, given: argparse.Namespace, config: Config, found: Sequence[Cost]) -> None:
    import torch

    load, plain = load_of(given, config), found[0]
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = torch.cuda.get_device_name() if config.cluster.device == "cuda" else "cpu"
    console.print(
        f"{world_size(config)} x {machine}, torch {torch.__version__}; {config.model.num_hidden_layers} layers of "
        f"{config.model.hidden_size}; {load.microbatches} microbatches of {load.sequences} x {load.length:,} tokens a data-parallel rank; "
        f"{options.rounds} rounds"
    )
    table = Table("update", "wall ms", "more", "", "process ms", "more", "", "inside ms", "of bare process")
    for c in found:
        table.add_row(
            c.kind, f"{c.wall:,.2f}", f"{c.more_wall:+,.2f}", f"{c.more_wall / plain.wall:+.2%}", f"{c.process:,.2f}",
            f"{c.more_process:+,.2f}", f"{c.more_process / plain.process:+.2%}", f"{c.inside:,.2f}", f"{c.inside / plain.process:.2%}",
        )  # fmt: skip
    console.print(table)
    if options.json:
        record = {
            "machine": machine, "torch": torch.__version__, "load": asdict(load), "rounds": options.rounds,
            "costs": [asdict(c) for c in found],
            "config": config.model_dump(mode="json", include={"model", "parallel", "trainer", "rl"}),
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
