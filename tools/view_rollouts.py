"""Read what the policy said.

    python tools/view_rollouts.py RUN                     # on a terminal: one conversation at a time, in colour; ? names the keys
    python tools/view_rollouts.py RUN --step 3 --reward 0 --plain --tokens
    python tools/view_rollouts.py RUN --html              # a page to open from the disk: RUN/rollouts.html

In: a run directory's archived rollouts, with the scores beside them. Out: conversations in full, on the terminal or as one page. Without a
terminal it is plain text. Changes nothing but the page it writes.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_gptoss.config.schema import Config, TaskConfig, TokenizerConfig
from megatron_gptoss.data.tokenizer import Tokenizer, load_tokenizer
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.obs.browse import Filter, Place, Reader, browse, plain, shown
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.rollouts_page import TOKENS, write_page
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.obs.shelf import Archive, archives, choose
from megatron_gptoss.obs.transcript import Measure


def view(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="Step to look at; left out: the last one.")] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Those of held-out evaluations instead of training.")] = False,
    group: Annotated[int | None, typer.Option(min=1, help="Group to begin with, from 1.")] = None,
    reward: Annotated[float | None, typer.Option(help="Only conversations with this reward.")] = None,
    label: Annotated[str, typer.Option(help="Only those that the task gave this label.")] = "",
    prompt: Annotated[str, typer.Option(help="Only those whose prompt has this text, or this in its id.")] = "",
    colour: Annotated[Measure, typer.Option(help="What the colour of a token says.")] = "advantage",
    as_text: Annotated[bool, typer.Option("--plain", help="Plain text, also on a terminal.")] = False,
    n: Annotated[int, typer.Option(min=1, help="Plain text: how many conversations.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Plain text: a line for each sampled token, with its numbers.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write one page of the whole run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where --html writes; left out: RUN/rollouts.html.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens on the page of --html, over all steps.")] = TOKENS,
) -> None:
    """Read a run's archived conversations: on a terminal, as plain text, or as a page."""
    if out is not None and not html:
        raise ConfigError(f"--out {out} says where --html writes its page. Use both, or neither.")
    chosen_by = {
        "step": step,
        "group": group,
        "reward": reward,
        "held-out": held_out or None,
        "label": label or None,
        "prompt": prompt or None,
    }
    if html and (named := [f"--{name}" for name, value in chosen_by.items() if value is not None]):
        raise ConfigError(f"{', '.join(named)}: --html writes the whole run, and its page lets you choose. Leave out one or the other.")
    found, tokenizer = archives(run), tokenizer_of(run)
    if html:
        make_page(run, found, tokenizer, out or run / "rollouts.html", max_tokens)
        return
    of_kind, place = choose(found, held_out=held_out, step=step)
    chosen = Filter("all" if reward is None else shown(reward), label, prompt)
    reader = Reader(found, Place(tuple(of_kind), place, measure=colour, filter=chosen), tokenizer)
    kept, every = reader.kept, reader.all
    groups = len({t.group for t in every})
    if group is not None and group > groups:
        raise ConfigError(f"--group {group} is not there: {reader.archive.words} has {groups} groups.")
    begin = next((i for i, t in enumerate(kept) if group is None or t.group >= group - 1), 0)
    if not as_text and sys.stdin.isatty() and sys.stdout.isatty():
        reader.place = replace(reader.place, rollout=begin)
        browse(reader)
        return
    for t in kept[begin : begin + n]:
        print(plain(t, tokens=tokens))
    mean = sum(t.rollout.reward for t in every) / max(len(every), 1)
    words = f"{len(kept[begin : begin + n])} of {len(kept)} shown; {len(every)} conversations, mean reward {mean:.3f}"
    print(f"{reader.archive.path}: {words}")


def tokenizer_of(run: Path) -> Tokenizer:
    """Of config.toml only what names it: a run of another version may have keys that this one does not know."""
    file = RunDir(run).config_file
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        named, task = values.get("tokenizer", {}), values.get("task", {})
        known = TokenizerConfig(**{key: named[key] for key in ("name", "path") if key in named})
        return load_tokenizer(Config(tokenizer=known, task=TaskConfig(path=task.get("path", ""))))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} does not say which tokenizer the run had: {error}") from None


def make_page(run: Path, found: list[Archive], tokenizer: Tokenizer, out: Path, max_tokens: int) -> None:
    console = Console()
    with console.progress("reading rollouts", total=len(found), unit="archives") as bar:
        write_page(run.resolve().name, found, tokenizer, out, tokens=max_tokens, bar=bar)
    console.say(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        typer.run(view)
    except GptossError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away, as `head` does
