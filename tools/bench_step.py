"""Whole steps of reinforcement learning with random weights: how long does each part take, on how many GPUs, in how much memory?

    python tools/bench_step.py configs/tiny.toml --length 64 --sequences 16 --group 4

is a check that it runs, on a CPU. The 20B on two GPUs that trainer and engines share; on eight, shared; on eight, four for each; and
answers of 16,384 tokens with two and with four context ranks:

    python tools/bench_step.py configs/20b.toml --length 4096 --sequences 256 --parallel.data=2 --parallel.expert=2 \\
        --trainer.optimizer_offload=0.75 --trainer.threads_per_rank=16 --rollout.num_engines=2 --cluster.share_gpus=true \\
        --rollout.gpu_memory_fraction=0.5 --cluster.host_memory_gib=250
    python tools/bench_step.py configs/20b.toml --length 4096 --sequences 2048 --group 32 --parallel.data=8 --parallel.expert=8 \\
        --rollout.num_engines=8 --cluster.share_gpus=true --rollout.gpu_memory_fraction=0.6
    python tools/bench_step.py configs/20b.toml --length 4096 --sequences 2048 --group 32
    python tools/bench_step.py configs/20b.toml --length 16384 --sequences 256 --group 32 --parallel.data=2 --parallel.context=2 \\
        --trainer.tokens_per_microbatch=16512
    python tools/bench_step.py configs/20b.toml --length 16384 --sequences 256 --group 32 --parallel.data=1 --parallel.context=4 \\
        --trainer.tokens_per_microbatch=16512

In: configuration files and flags as `gptoss train` takes them, and the size of a step. Out: what `gptoss train` prints (memory predicted
and measured among it), and a table of the steps after the first ones, which compile; `--json` keeps it.

It is `gptoss train` itself, with layers of flags over the configuration: the tiny tokenizer, which has to be fetched from nowhere; this
file as the task, whose conversations have one turn and end where `--length` does (a random model says one of its few stop tokens by chance
alone), and half of which are worth 1; every rollout trained, the experts of the engines replayed; neither evaluations nor saves; and
without the self-test, since a random model's routers are near-ties everywhere, which it refuses.

Tokens of rollouts are those sampled, by the engines' GPUs; of scoring and updates those trained, by the trainer's. Prompts have about 10.
An update that is on-policy scores nothing before; `--rl.old_logp=scored` makes it. Where rollouts run ahead (`--rollout.max_lag_steps=1`)
they have the whole step.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.schema import Config
from megatron_gptoss.data.harmony import Message, ParsedTurn
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.obs.metrics import read_metrics
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.tasks.base import Split, Verdict
from megatron_gptoss.types import Prompt, RewardPart

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 128  # room for the longest prompt
PARTS = ("rollout", "wait", "score", "update", "sync")

# ---- the task ---------------------------------------------------------------------------------------------------------------------------


class Turn:
    """One conversation, worth what its place in the order of ends says."""

    def __init__(self, prompt: Prompt, coins: Iterator[float]) -> None:
        self.prompt, self.coins = prompt, coins

    def opening(self) -> Sequence[Message]:
        return (Message("user", self.prompt.text),)

    def reply(self, turn: ParsedTurn) -> Verdict:
        return self.cut("final")

    def cut(self, reason: str) -> Verdict:
        reward = next(self.coins)
        return Verdict(reward, (RewardPart("coin", reward),), None, (), reason)


class Coins:
    """Every second conversation that ends is worth 1, so there is something to learn whatever a random model says."""

    name = "coins"

    def __init__(self) -> None:
        self.coins = itertools.cycle((0.0, 1.0))

    def begin(self, prompt: Prompt) -> Turn:
        return Turn(prompt, self.coins)

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return [Prompt(f"coins/{split}/{n}", "coins", f"{n}+{n}", "") for n in range(start, start + count)]

    def epoch_size(self, split: Split) -> None:
        return None

    def close(self) -> None:
        pass


def make_task(config: Config) -> Coins:
    return Coins()


# ---- the run ----------------------------------------------------------------------------------------------------------------------------


def step_flags(length: int, sequences: int, group: int, steps: int) -> list[str]:
    return [
        "--run.name=bench-step", f"--run.steps={steps}", "--run.eval_every=0", "--run.final_eval_prompts=0", "--run.save_every=0",
        "--run.save_at_end=false", "--run.archive_scores=false", "--tokenizer.name=tiny", f"--task.name={Path(__file__).resolve()}",
        "--parity.enabled=false", "--rl.drop_uniform_groups=false", "--rl.router_replay=engine", f"--rl.sequences_per_step={sequences}",
        f"--rollout.group_size={group}", "--rollout.max_turns=1", f"--rollout.max_turn_tokens={length}",
        f"--rollout.max_sequence_tokens={length + PROMPT_TOKENS}",
    ]  # fmt: skip


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    tokens: float  # that it dealt with; 0: it counts none
    gpus: int  # or CPU ranks and engines

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds / self.gpus if self.tokens and self.seconds else 0.0


def parts_of(rows: Sequence[Mapping[str, Any]], config: Config) -> list[Part]:
    """Means over these steps, and the whole step last."""
    p, engines = config.parallel, config.rollout.num_engines * config.rollout.tensor_parallel
    ranks = p.tensor * p.context * p.pipeline * p.data
    mean = lambda name: sum(row.get(name, 0.0) for row in rows) / len(rows)  # noqa: E731
    step, sampled, trained = mean("time/step_s"), mean("rollout/tokens"), mean("train/tokens")
    found = []
    for name in PARTS:
        seconds = mean(f"time/{name}_s")
        if name == "wait" and seconds:
            found.append(Part("rollouts, beside the rest", step, sampled, engines))
        if seconds > 1e-3:  # what is less was not done
            tokens, gpus = {"rollout": (sampled, engines), "score": (trained, ranks), "update": (trained, ranks)}.get(name, (0.0, 1))
            found.append(Part(name, seconds, tokens, gpus))
    all_gpus = max(ranks, engines) if config.cluster.share_gpus else ranks + engines
    return [*found, Part("whole step", step, trained, all_gpus)]


def table(parts: Sequence[Part]) -> Table:
    made = Table("part", "seconds", "of the step", "tokens", "tokens/s a GPU", title="a step", title_justify="left")
    for part in parts:
        share = f"{part.seconds / parts[-1].seconds:.0%}"
        counts = (f"{part.tokens:,.0f}", f"{part.tokens_per_s:,.0f}") if part.tokens else ("", "")
        made.add_row(part.name, f"{part.seconds:.2f}", share, *counts)
    return made


def train(words: Sequence[str]) -> int:
    """`gptoss train` to its end; its exit code. Ctrl-C is its affair, which ends engines and trainer, and is waited for."""
    with subprocess.Popen([sys.executable, "-m", "megatron_gptoss.cli", "train", *words]) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def main(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="CONFIG.toml | --SECTION.KEY=VALUE", show_default=False)] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
    sequences: Annotated[int, typer.Option(min=1, help="Of a step.")] = 64,
    group: Annotated[int, typer.Option(min=2, help="Sequences of one prompt.")] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 3,
    skip: Annotated[int, typer.Option(min=0, help="First steps that are not counted: they compile.")] = 1,
    keep: Annotated[Path | None, typer.Option("--json", help="File for the table.", show_default=False)] = None,
) -> None:
    try:
        configs, flags = parse_flags(arguments or [])
        if not configs:
            raise ConfigError("which configuration? Example: python tools/bench_step.py configs/20b.toml --length 4096 --sequences 256")
        if keep and not keep.absolute().parent.is_dir():
            raise ConfigError(f"--json {keep}: the folder {keep.absolute().parent} does not exist. Make it first.")
        words = [*configs, *step_flags(length, sequences, group, steps), *(f"--{flag.key}={flag.text}" for flag in flags)]
        config = load(*parse_flags(words)).config
        run = config.run
        if skip >= run.steps:
            raise ConfigError(f"--skip {skip} leaves nothing of {run.steps} steps to count. Use --skip {run.steps - 1} or less.")
        run_id = run.id or f"{datetime.now():%Y%m%d-%H%M%S}"
        if ended := train([*words, f"--run.id={run_id}"]):
            raise typer.Exit(ended)
        rows = [row for row in read_metrics(RunDir(Path(run.dir) / f"{run.name}-{run_id}").metrics_file) if row["step"] > skip]
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    parts = parts_of(rows, config)
    Console().print(table(parts))
    if keep:
        keep.write_text(json.dumps({"arguments": words, "steps": len(rows), "parts": [asdict(p) for p in parts]}, indent=1) + "\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"ignore_unknown_options": True})(main)
    app()
