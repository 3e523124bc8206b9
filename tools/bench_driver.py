"""What does the driver do in a step by itself, while GPUs wait for it, and how long does it take? No GPU is needed.

    python tools/bench_driver.py configs/20b.toml --answers 2048 --length 4096 --ranks 8

In: a configuration, for the model's shape and the packing, and the size of a step. Answers are random tokens with random log-probs and
routes, in groups, after a prompt of 100 tokens. Out: seconds of each part by the clock, and the bytes that it makes, in the order of a run:
the archive is begun when microbatches are, and written beside what follows. What follows is short here, for there is no trainer, so the
archive's seconds are those from its beginning to its end, and nothing waits for it in a run whose update takes longer. Microbatches are
copied once, as into Ray's shared memory, and read by the ranks, whose seconds are added up over all.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.loop.archiving import Archiving
from megatron_gptoss.loop.train import rollout_metrics
from megatron_gptoss.obs.console import Console as SaidConsole
from megatron_gptoss.parallel.packing import pack_step, work_of
from megatron_gptoss.rl.advantages import AdvantageRule, keep_informative
from megatron_gptoss.rl.samples import make_samples, sample_scores
from megatron_gptoss.rollout.scores import write_scores
from megatron_gptoss.trainer import wire
from megatron_gptoss.types import MicroBatch, Prompt, Rollout, RolloutGroup, TokenRoutes, VersionRun

PROMPT_TOKENS = 100
GIB = 2**30
Result = TypeVar("Result")


def make_groups(model: ModelConfig, answers: int, group: int, length: int, routes: bool) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    ran, layers, top_k = PROMPT_TOKENS + length - 1, model.num_hidden_layers, model.num_experts_per_tok

    def rollout(prompt: Prompt, index: int) -> Rollout:
        experts = rng.integers(0, model.num_local_experts, ran * layers * top_k, dtype=np.uint8).tobytes() if routes else b""
        return Rollout(
            prompt=prompt,
            index=index,
            token_ids=tuple(rng.integers(0, 256, PROMPT_TOKENS + length).tolist()),
            sampled=(False,) * PROMPT_TOKENS + (True,) * length,
            logp=(0.0,) * PROMPT_TOKENS + tuple((-rng.random(length)).tolist()),
            versions=(VersionRun(0, length),),
            num_tool_calls=0,
            stop_reason="length",
            answer=None,
            reward=float(index % 2),
            reward_parts=(),
            routes=TokenRoutes(experts, layers, top_k, model.num_local_experts) if routes else None,
        )

    prompts = [Prompt(f"bench/{number}", "bench", "", "") for number in range(answers // group)]
    return [RolloutGroup(prompt, tuple(rollout(prompt, index) for index in range(group))) for prompt in prompts]


class Clock:
    def __init__(self) -> None:
        self.table = Table("part", "seconds", "GiB", title="the driver's part of a step", title_justify="left")

    def __call__(self, part: str, work: Callable[[], Result], size: Callable[[Result], int] | None = None) -> Result:
        began = time.perf_counter()
        result = work()
        self.table.add_row(part, f"{time.perf_counter() - began:.2f}", f"{size(result) / GIB:.2f}" if size else "")
        return result


Sent = tuple[bytes, list[bytes]]


def send(batches: Sequence[MicroBatch]) -> Sent:
    """As Ray's serializer does with wire.py: arrays out of band."""
    out = io.BytesIO()
    pickler, buffers = pickle.Pickler(out, protocol=5, buffer_callback=(found := []).append), found
    pickler.dispatch_table = copyreg.dispatch_table | {
        kind: lambda record: (wire.from_arrays, (wire.to_arrays(record),)) for kind in wire.RECORDS
    }
    pickler.dump(batches)
    return out.getvalue(), [bytes(buffer.raw()) for buffer in buffers]


def receive(sent: Sent) -> Sequence[MicroBatch]:
    return pickle.loads(sent[0], buffers=sent[1])


def size_of(sent: Sent) -> int:
    return len(sent[0]) + sum(map(len, sent[1]))


def main(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="CONFIG.toml | --SECTION.KEY=VALUE", show_default=False)] = None,
    answers: Annotated[int, typer.Option(min=1, help="Of a step.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
    group: Annotated[int, typer.Option(min=2, help="Answers of one prompt.")] = 32,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ones.")] = 8,
    routes: Annotated[bool, typer.Option(help="With the engine's experts of every token.")] = True,
) -> None:
    try:
        configs, flags = parse_flags(["--tokenizer.name=tiny", *(arguments or [])])
        if not configs:
            raise ConfigError("which configuration? Example: python tools/bench_driver.py configs/20b.toml --answers 2048 --length 4096")
        if answers % group:
            raise ConfigError(f"--answers {answers} are no whole groups of --group {group}.")
        config = load(configs, flags).config
        if length + PROMPT_TOKENS > config.trainer.tokens_per_microbatch:
            raise ConfigError(
                f"--length {length} and a prompt of {PROMPT_TOKENS} tokens are more than trainer.tokens_per_microbatch = "
                f"{config.trainer.tokens_per_microbatch}. Use a shorter answer or a larger --trainer.tokens_per_microbatch."
            )
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    groups, tokenizer, clock = make_groups(config.model, answers, group, length, routes), load_tokenizer(config), Clock()
    with tempfile.TemporaryDirectory(prefix="bench-driver-") as folder, ExitStack() as ending:
        archive, scores_file = Path(folder) / "step-1.jsonl", Path(folder) / "step-1.scores.jsonl"
        samples = clock("advantages and samples", lambda: make_samples(groups, AdvantageRule("group-mean")))
        (packed,) = clock(
            "packing",
            lambda: pack_step(
                samples,
                minibatches=1,
                ranks=ranks,
                tokens_per_microbatch=config.trainer.tokens_per_microbatch,
                work=work_of(config.model),
            ),
        )
        writing = Archiving(ending, SaidConsole())
        writing.plan(archive, 1, groups, tokenizer)
        writing.begin()
        began = time.perf_counter()
        sent = clock("microbatches sent", lambda: [send(of_rank) for of_rank in packed], lambda each: sum(map(size_of, each)))
        clock("microbatches read, on the ranks", lambda: [receive(each) for each in sent])
        scored = clock(
            "scores by sample, on the ranks",
            lambda: [sample_scores(batches, [torch.randn(batch.target_N.numel()) for batch in batches]) for batches in packed],
        )
        told = [pickle.dumps(each, protocol=5) for each in scored]
        back = clock("scores read", lambda: [score for each in told for score in pickle.loads(each)])
        writing.finish()
        clock.table.add_row("archive, beside", f"{time.perf_counter() - began:.2f}", f"{archive.stat().st_size / GIB:.2f}")
        clock("metrics", lambda: rollout_metrics(groups, keep_informative(groups, drop_uniform=True)))
        clock("scores written", lambda: write_scores(scores_file, 1, back), lambda _: scores_file.stat().st_size)
    Console().print(clock.table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"ignore_unknown_options": True})(main)
    app()
