"""For how long does a training checkpoint stop a step? Beside a bare copy of the same bytes to host memory, in the same process.

    TORCHDYNAMO_DISABLE=1 python tools/bench_checkpoint.py configs/tiny.toml
    TORCHDYNAMO_DISABLE=1 python tools/bench_checkpoint.py configs/tiny.toml --model.hidden_size=1024 --model.intermediate_size=1024 ...
    torchrun --nproc-per-node 2 tools/bench_checkpoint.py ... --cluster.device=cuda --parallel.data=2 --parallel.expert=2

In: configuration files and flags as for `gptoss`; of them the model, the trainer and the layout count. Out: a table of rank 0; the
checkpoints are removed. `stopped` is the time until training may go on, the median of --saves saves after a first one; `written` the time
until the checkpoint is complete. A step is timed with nothing on its way to the disk, and again while a checkpoint is being written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.schema import Config
from megatron_gptoss.model import cpu
from megatron_gptoss.parallel.groups import init_groups
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.types import Sample


@dataclass
class Row:
    """Seconds of the saves of one kind, the first apart."""

    name: str
    stopped: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    step_meanwhile: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8, help="of 128 tokens, in a step on each data-parallel rank")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: the system's temporary folder")
    options, rest = parser.parse_known_args(arguments)
    config = load(*parse_flags(rest)).config
    cpu.install()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(tempfile.mkdtemp(dir=options.folder)) if rank == 0 else Path()
    on_gpu = config.cluster.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(config.trainer.threads_per_rank)
    p = config.parallel
    shape = ParallelShape(world=world, tensor=p.tensor, pipeline=p.pipeline, context=p.context, expert=p.expert)
    meeting = "env://" if world > 1 else f"file://{folder}/meet"
    init_groups(shape, rank=rank, init_method=meeting, timeout_s=600, seed=0, backend="nccl" if on_gpu else "gloo")
    shared = [folder]
    dist.broadcast_object_list(shared, src=0)
    try:
        bench(config, shape, rank, shared[0], options)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    return 0


def bench(config: Config, shape: ParallelShape, rank: int, folder: Path, options: argparse.Namespace) -> None:
    from megatron_gptoss.checkpoint.background import Planner
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import begin_save
    from megatron_gptoss.trainer.how import Update
    from megatron_gptoss.trainer.step import Trainer

    t = Trainer(config.model, config.trainer, shape, config.sft, total_updates=10_000)
    with torch.no_grad():
        for parameter in t.module.parameters():
            parameter.uniform_(-0.02, 0.02)
    t.weights_changed()
    mine = [pack(sequences(config, shape, options.sequences), ranks=shape.data, tokens_per_microbatch=8192)[shape.data_index(rank)]]

    def step() -> None:
        t.update(mine, Update(policy=None))

    for _ in range(2):
        step()
    alone = [seconds(step) for _ in range(max(5, options.saves))]
    planner = Planner()
    rows = [Row("training waits"), Row("in the background")]
    for number in range(options.saves + 1):
        for row in rows:
            dist.barrier()
            background = row is rows[1]
            began = time.perf_counter()
            saving = begin_save(
                folder / f"step-{number}", config=config.model, model=t.model, optimizer=t.optimizer, schedule=t.schedule,
                progress=Progress(number, 0, 0), background=background, planner=planner,
            )  # fmt: skip
            row.stopped.append(time.perf_counter() - began)
            while background and not saving.done():
                row.step_meanwhile.append(seconds(step))
            row.written.append(saving.wait())
    size = sum(file.stat().st_size for file in (folder / "step-0").iterdir())
    copy = bare_copy(t)
    if rank == 0:
        report(rows, alone, copy, size, sum(p.numel() for p in t.module.parameters()))


def sequences(config: Config, shape: ParallelShape, count: int) -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.vocab_size, (count * shape.data, 128), generator=g)
    return [Sample(f"s{i}", tuple(row.tolist()), (False, *(True,) * 127), (0.0,) * 128, advantage=1.0) for i, row in enumerate(ids)]


def bare_copy(t) -> list[float]:
    """Weights, master weights and moments of this rank to fresh host memory, and nothing else."""
    states = [v for part in t.optimizer.chained_optimizers for s in part.optimizer.state.values() for v in s.values()]
    groups = [group for part in t.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    owned = any("master_param" in s for part in t.optimizer.chained_optimizers for s in part.optimizer.state.values())  # PlannedAdamW's
    masters = [] if owned else [p for group in groups for p in group["params"]]
    tensors = [*t.module.parameters(), *masters, *states]

    def copy() -> None:
        copies = [x.detach().clone() if x.device.type == "cpu" else x.detach().to("cpu", non_blocking=True) for x in tensors]
        torch.cuda.synchronize()
        del copies

    return [seconds(copy) for _ in range(5)]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def report(rows: list[Row], alone: list[float], copy: list[float], size: int, parameters: int) -> None:
    table = Table(title=f"{parameters / 1e6:.1f} M parameters on rank 0, a checkpoint of {size / 2**20:.0f} MiB", title_justify="left")
    for name in ("checkpoint", "stopped, first s", "stopped s", "written s", "a step meanwhile s"):
        table.add_column(name, justify="left" if name == "checkpoint" else "right")
    for row in rows:
        meanwhile = f"{statistics.median(row.step_meanwhile):.3f}" if row.step_meanwhile else ""
        stopped, written = statistics.median(row.stopped[1:]), statistics.median(row.written[1:])
        table.add_row(row.name, f"{row.stopped[0]:.3f}", f"{stopped:.3f}", f"{written:.3f}", meanwhile)
    table.add_row("a bare copy to host memory", f"{copy[0]:.3f}", f"{statistics.median(copy[1:]):.3f}", "", "")
    table.add_row("a step with nothing on its way", "", "", "", f"{statistics.median(alone):.3f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    sys.exit(main())
