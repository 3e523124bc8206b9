"""What does the driver do in a step by itself, while GPUs wait for it, and how long does it take? No GPU is needed.

    python tools/bench_driver.py configs/20b.toml --answers 2048 --length 4096 --ranks 8

In: a configuration, for the model's shape and the packing, and the size of a step. Answers are random tokens with random log-probs and
routes, in groups, after a prompt of 100 tokens. Out: seconds of each part, by the clock and of this process's CPU time, and the bytes that
it makes. Parts "beside" run while the trainer works; "on the ranks" is what each of them does by itself, added up over all.

Peak memory of this tool is several times that of the driver, since it is the ranks too.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable
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
from megatron_gptoss.loop.train import rollout_metrics
from megatron_gptoss.parallel.packing import pack_step, work_of
from megatron_gptoss.rl.advantages import AdvantageRule, keep_informative
from megatron_gptoss.rl.samples import make_samples, sample_scores
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.rollout.scores import write_scores
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup, TokenRoutes, VersionRun

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
        self.table = Table("part", "seconds", "of CPU", "GiB", title="the driver's part of a step", title_justify="left")

    def __call__(self, part: str, work: Callable[[], Result], size: Callable[[Result], int] | None = None) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.table.add_row(part, f"{wall:.2f}", f"{cpu:.2f}", f"{size(result) / GIB:.2f}" if size else "")
        return result


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
    with tempfile.TemporaryDirectory(prefix="bench-driver-") as folder:
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
        sent = clock("microbatches as bytes", lambda: [pickle.dumps(each, protocol=5) for each in packed], lambda each: sum(map(len, each)))
        clock("microbatches read, on the ranks", lambda: [pickle.loads(each) for each in sent])
        scored = clock(
            "scores by sample, on the ranks",
            lambda: [sample_scores(batches, [torch.randn(batch.target_N.numel()) for batch in batches]) for batches in packed],
        )
        told = [pickle.dumps(each, protocol=5) for each in scored]
        back = clock("scores read", lambda: [score for each in told for score in pickle.loads(each)])
        clock("archive, beside", lambda: write_archive(archive, 1, groups, tokenizer), lambda _: archive.stat().st_size)
        clock("scores written", lambda: write_scores(scores_file, 1, back), lambda _: scores_file.stat().st_size)
        clock("metrics", lambda: rollout_metrics(groups, keep_informative(groups, drop_uniform=True)))
    Console().print(clock.table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"ignore_unknown_options": True})(main)
    app()
