"""Read what the policy said: `python tools/view_rollouts.py RUN [--step N] [--n 3] [--held-out] [--reward 0]`.

In: a run directory's archived rollouts. Out: conversations in full, with their rewards, on the terminal. Changes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from megatron_gptoss.data.prompts import read_json_lines
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.rollout.archive import read_archive


def archives(run: Path, held_out: bool) -> dict[int, Path]:
    """Step -> file, in order of steps."""
    pattern = r"eval-step-(\d+)\.jsonl" if held_out else r"step-(\d+)\.jsonl"
    found = {int(match[1]): path for path in RunDir(run).rollouts.glob("*.jsonl") if (match := re.fullmatch(pattern, path.name))}
    return dict(sorted(found.items()))


def view(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="Step to look at; left out: the last one.")] = None,
    n: Annotated[int, typer.Option(help="How many conversations.")] = 3,
    held_out: Annotated[bool, typer.Option("--held-out", help="Those of held-out evaluations instead of training.")] = False,
    reward: Annotated[float | None, typer.Option(help="Only conversations with this reward.")] = None,
) -> None:
    """Print archived conversations of a run."""
    files = archives(run, held_out)
    if not files:
        raise ConfigError(f"{RunDir(run).rollouts} has no archived rollouts{' of held-out evaluations' if held_out else ''}.")
    chosen = step if step is not None else max(files)
    if chosen not in files:
        raise ConfigError(f"--step {chosen} has no archive. There are steps {', '.join(map(str, files))}.")
    rollouts = [rollout for group in read_archive(files[chosen]) for rollout in group.rollouts]
    # The archive keeps the decoded text for readers like this one; `read_archive` gives the tokens only.
    texts = {(value["prompt_id"], value["index"]): value["text"] for _, value in read_json_lines(files[chosen])}
    matching = [r for r in rollouts if reward is None or r.reward == reward]
    console = Console()
    for rollout in matching[:n]:
        console.rollout(rollout, texts[rollout.prompt.id, rollout.index])
    mean = sum(r.reward for r in rollouts) / len(rollouts)
    console.say(f"{files[chosen]}: {min(n, len(matching))} of {len(matching)} shown; {len(rollouts)} conversations, mean reward {mean:.3f}")


if __name__ == "__main__":
    try:
        typer.run(view)
    except GptossError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
