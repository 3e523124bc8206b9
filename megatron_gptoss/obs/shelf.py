"""Which rollouts has a run archived, and what is in them?

In: a run directory. Out: its archives in order, and the transcripts of one when somebody asks. Reads only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.obs.transcript import Transcript, transcript
from megatron_gptoss.rollout.archive import read_archive
from megatron_gptoss.rollout.scores import read_scores, scores_beside


@dataclass(frozen=True)
class Archive:
    """The rollouts of one step, or of one held-out evaluation."""

    path: Path
    step: int
    held_out: bool

    @property
    def key(self) -> str:
        return f"{'eval' if self.held_out else 'train'}-{self.step}"

    @property
    def words(self) -> str:
        return f"held-out, after step {self.step}" if self.held_out else f"step {self.step}"

    @property
    def is_scored(self) -> bool:
        return scores_beside(self.path).exists()

    def read(self, tokenizer: Tokenizer) -> list[Transcript]:
        """In the order of groups, and of rollouts in them. DataError for a file that cannot be read, or scores of other rollouts."""
        scores = read_scores(scores_beside(self.path)) if self.is_scored else {}
        found = []
        for number, group in enumerate(read_archive(self.path)):
            for rollout in group.rollouts:
                name = f"{rollout.prompt.id}#{rollout.index}"  # sample_name of rl/samples.py, which would bring torch
                try:
                    found.append(transcript(rollout, number, tokenizer, scores.get(name)))
                except ValueError as error:
                    raise DataError(f"{scores_beside(self.path)} does not belong to {self.path}: {error}.") from error
        return found


def archives(run: Path) -> list[Archive]:
    """All of a run, training and held-out, by step. ConfigError when there are none."""
    found = []
    for path in RunDir(run).rollouts.glob("*.jsonl"):
        if match := re.fullmatch(r"(eval-)?step-(\d+)\.jsonl", path.name):
            found.append(Archive(path, int(match[2]), bool(match[1])))
    if not found:
        raise ConfigError(f"{RunDir(run).rollouts} has no archived rollouts. Give the directory of a run that made some: runs/NAME-ID.")
    return sorted(found, key=lambda a: (a.step, not a.held_out))


def choose(found: Sequence[Archive], *, held_out: bool, step: int | None = None) -> tuple[list[Archive], int]:
    """Those of training or of evaluation, and the place of `step` in them; the last one without a step. ConfigError when it has none."""
    of_kind = [archive for archive in found if archive.held_out == held_out]
    if not of_kind:
        where, other = found[0].path.parent, "leave out --held-out" if held_out else "use --held-out"
        raise ConfigError(f"{where} has no archived rollouts of {'held-out evaluations' if held_out else 'training'}; {other}.")
    steps = [archive.step for archive in of_kind]
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step} has no archive. There are steps {', '.join(map(str, steps))}.")
    return of_kind, len(of_kind) - 1 if step is None else steps.index(step)
