"""Two sources of log-probs for the same tokens, side by side: where do they part, by how much, on which words?

    python tools/compare_logprobs.py runs/demo-1/rollouts/step-1.jsonl runs/demo-1/checkpoints/step-000000
    python tools/compare_logprobs.py gpt-oss-20b runs/x/checkpoints/step-000020 --tokens runs/x/rollouts/step-20.jsonl

In: each source an archive of rollouts (the engine's log-probs), or weights: a run directory (its newest checkpoint), a checkpoint, or a
Hugging Face folder, which model/reference.py computes in float32, a layer of it in memory at a time. Tokens are the first archive's, or
those of --tokens. Out: the gap by position, k1 and k3, the worst tokens with their text, and a picture if asked. Changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from megatron_gptoss.config.load import load
from megatron_gptoss.config.schema import Config
from megatron_gptoss.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_is_here
from megatron_gptoss.errors import ConfigError, DataError, GptossError
from megatron_gptoss.obs.console import visible
from megatron_gptoss.obs.run_dir import find_weights
from megatron_gptoss.rl.kl import kl_estimate
from megatron_gptoss.rl.parity import format_gaps, gap_by_position
from megatron_gptoss.rl.samples import sample_name
from megatron_gptoss.rollout.archive import read_archive
from megatron_gptoss.types import Rollout

CONTEXT = 12  # tokens shown before a worst one


@dataclass(frozen=True)
class Row:
    """One sampled token in both sources."""

    rollout: Rollout
    position: int
    a: float  # nats
    b: float

    @property
    def gap(self) -> float:
        return abs(self.a - self.b)


def is_archive(path: Path) -> bool:
    return path.suffix == ".jsonl"


def rollouts_of(archive: Path, most: int) -> list[Rollout]:
    found = [rollout for group in read_archive(archive) for rollout in group.rollouts if any(rollout.sampled)]
    return found[:most] if most else found


def archived(path: Path, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """The archive's log-probs of these rollouts' sampled tokens. DataError when it does not hold the same tokens."""
    own = {sample_name(r): r for group in read_archive(path) for r in group.rollouts}
    found = []
    for rollout in rollouts:
        other = own.get(sample_name(rollout))
        if other is None or other.token_ids != rollout.token_ids or other.sampled != rollout.sampled:
            what = "has no" if other is None else "has other tokens for"
            raise DataError(f"{path} {what} {sample_name(rollout)}. Two archives can be compared only where they hold the same tokens.")
        found.append([lp for lp, sampled in zip(other.logp, other.sampled, strict=True) if sampled])
    return found


def computed(path: Path, rollouts: Sequence[Rollout], temperature: float) -> list[list[float]]:
    """The reference model's, with these weights."""
    from megatron_gptoss.checkpoint.stored import StoredWeights
    from megatron_gptoss.model.reference import log_probs_of

    weights = StoredWeights(find_weights(path).path)
    largest, rollout = max((max(r.token_ids), i) for i, r in enumerate(rollouts))
    if largest >= weights.model.vocab_size:
        raise DataError(f"{sample_name(rollouts[rollout])} has token {largest}, and {path} a vocabulary of {weights.model.vocab_size}.")
    found = log_probs_of(weights, weights.model, [r.token_ids for r in rollouts], temperature=temperature)
    return [[float(logp[t - 1]) for t, yes in enumerate(r.sampled) if yes] for r, logp in zip(rollouts, found, strict=True)]


def rows_of(rollouts: Sequence[Rollout], a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[Row]:
    rows = []
    for rollout, of_a, of_b in zip(rollouts, a, b, strict=True):
        positions = [t for t, sampled in enumerate(rollout.sampled) if sampled]
        rows += [Row(rollout, *row) for row in zip(positions, of_a, of_b, strict=True)]
    return rows


def edges(last: int, window: int) -> list[int]:
    """Bins of half a window at first, then each twice as long as all before it."""
    found = [0, max(window // 2, 1), max(window, 2)]
    while found[-1] <= last:
        found.append(2 * found[-1])
    return found


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Over all tokens; k1 and k3 estimate KL(A || B), had A sampled them."""
    a, b = (torch.tensor([getattr(row, side) for row in rows], dtype=torch.float64) for side in "ab")
    gap = (a - b).abs()
    return {
        "tokens": float(len(rows)),
        "mean |A - B|": float(gap.mean()),
        "max |A - B|": float(gap.max()),
        "k1": float(kl_estimate("k1", a, b).mean()),
        "k3": float(kl_estimate("k3", a, b).mean()),
    }


def worst_words(rows: Sequence[Row], count: int, tokenizer: Tokenizer | None) -> list[str]:
    """The largest gaps first; one that is no number is the largest."""
    chosen = sorted(rows, key=lambda row: -row.gap if math.isfinite(row.gap) else -math.inf)[:count]
    lines = []
    for row in chosen:
        ids = row.rollout.token_ids
        before = ids[max(row.position - CONTEXT, 0) : row.position]
        text = (
            f"{ids[row.position]}"
            if tokenizer is None
            else f"{visible(tokenizer.decode(before))} >>{tokenizer.decode([ids[row.position]])!r}"
        )
        lines.append(f"  {row.gap:>9.2e}  A {row.a:>9.4f}  B {row.b:>9.4f}  {sample_name(row.rollout)} @{row.position}  {text}")
    return lines


def draw(rows: Sequence[Row], names: Sequence[str], picture: Path) -> None:
    """Left: A against B. Right: the gap over the position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), constrained_layout=True)
    left.plot([row.a for row in rows], [row.b for row in rows], ".", markersize=3, alpha=0.5)
    lowest = min([0.0, *(x for row in rows for x in (row.a, row.b) if math.isfinite(x))])
    left.plot([lowest, 0], [lowest, 0], color="#9aa0a6", linewidth=1)
    left.set_xlabel(f"A: {names[0]}, log-prob in nats")
    left.set_ylabel(f"B: {names[1]}")
    right.semilogy([row.position for row in rows], [max(row.gap, 1e-9) for row in rows], ".", markersize=3, alpha=0.5)
    right.set_xlabel("position in the conversation")
    right.set_ylabel("|A - B|, nats")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def config_beside(paths: Sequence[Path]) -> Config | None:
    """The configuration of the run that one of these paths lies in."""
    for path in paths:
        for folder in (path, *path.absolute().parents):
            if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
                return load([folder / "config.toml"]).config
    return None


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Archive, run directory, checkpoint or Hugging Face folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    tokens: Annotated[Path | None, typer.Option("--tokens", help="Archive whose tokens are taken; left out: A's or B's.")] = None,
    temperature: Annotated[float, typer.Option(help="Of computed log-probs; left out: that of the run the paths lie in, else 1.")] = 0.0,
    most: Annotated[int, typer.Option("--most", min=0, help="Conversations at most; 0: all.")] = 64,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst tokens.")] = 10,
    limit: Annotated[float, typer.Option(help="Gaps above it are marked; exit code 1 when there is one. 0: none.")] = 0.0,
    picture: Annotated[Path | None, typer.Option(help="Where to put a picture.")] = None,
) -> None:
    """Compare two sources of log-probs for the same tokens."""
    archive = tokens or next((path for path in (a, b) if is_archive(path)), None)
    if archive is None:
        raise ConfigError("neither A nor B is an archive of rollouts (rollouts/step-N.jsonl); name one with --tokens.")
    config = config_beside([archive, a, b])
    temperature = temperature or (config.rollout.temperature if config else 1.0)
    rollouts = rollouts_of(archive, most)
    if not rollouts:
        raise DataError(f"{archive} has no sampled token.")
    sides = [archived(p, rollouts) if is_archive(p) else computed(p, rollouts, temperature) for p in (a, b)]
    rows = rows_of(rollouts, *sides)
    window = config.model.sliding_window if config else 128
    gaps = gap_by_position(
        [row.position for row in rows],
        [row.a for row in rows],
        [row.b for row in rows],
        edges=edges(max(row.position for row in rows), window),
    )
    print(f"A  {a}\nB  {b}\ntokens of {archive}, temperature {temperature:g}\n")
    print(format_gaps(gaps, limit=limit or math.inf, window=window))
    print("\n" + "   ".join(f"{name} {value:.3g}" for name, value in summary(rows).items()))
    if worst:
        tokenizer = load_tokenizer(config) if config and tokenizer_is_here(config) else None
        print("\nworst tokens\n" + "\n".join(worst_words(rows, worst, tokenizer)))
    if picture:
        draw(rows, [a.name, b.name], picture)
        print(f"\npicture {picture}")
    if limit and not all(row.gap <= limit for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(compare)
    except GptossError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
