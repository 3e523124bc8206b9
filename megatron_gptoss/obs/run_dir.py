"""Where does a run keep its files?

    runs/NAME-ID/
      config.toml      every key as resolved; loads again
      manifest.json    versions, git state, machine, backends (manifest.py)
      metrics.jsonl    one object a step (metrics.py)
      tensorboard/     the same numbers as TensorBoard events
      rollouts/        step-N.jsonl, conversations with their rewards; step-N.scores.jsonl, what training made of their tokens
      checkpoints/     step-000020/ with config.json, Megatron's files, and COMPLETE, written last
      logs/            one file a worker

In: a path. Out: `RunDir`, and which weights a path stands for. A run directory is never overwritten: a resumed run goes on in it, and what
config.toml and manifest.json said before is kept beside them. Does not write checkpoints (checkpoint/). No torch.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gptoss.checkpoint.marker import why_torn
from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config.load import dump
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import CheckpointError, ConfigError, MachineError
from megatron_gptoss.obs.disk import disk_errors


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDir:
        """A new run directory with its folders and config.toml. ConfigError when `path` exists, MachineError when it cannot be made."""
        run = cls(path)
        if path.exists():
            raise ConfigError(already_there(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()  # fails for the second of two runs that start at once
            run._make_folders()
        except OSError as error:
            hint = "Set run.dir to a folder you may write to, or another run.id."
            raise MachineError(f"run directory {path} cannot be made: {error.strerror}. {hint}") from None
        write_atomic(run.config_file, dump(config))
        return run

    @classmethod
    def resume(cls, path: Path, config: Config, step: int) -> RunDir:
        """The directory of a run that goes on after `step`. The config now in force becomes config.toml: the next resume starts from it.
        Rollouts of later steps go, as their metrics do: they are made anew, and a reader would take old ones for this run's."""
        run = cls(path)
        run._make_folders()
        for file in run.rollouts.iterdir():
            if (found := re.fullmatch(r"(eval-)?step-(\d+)(\.scores)?\.jsonl", file.name)) and int(found[2]) > step:
                file.unlink()
        text = dump(config.model_copy(update={"run": config.run.model_copy(update={"resume": ""})}))
        if not run.config_file.exists() or run.config_file.read_text() != text:
            run.keep_before(run.config_file, step)
            write_atomic(run.config_file, text)
        return run

    def keep_before(self, file: Path, step: int) -> None:
        """Set a file aside that is about to be written anew: config.toml -> config-before-step-000020.toml, -2.toml, ..."""
        if not file.exists():
            return
        aside, count = file.with_stem(f"{file.stem}-before-step-{step:06d}"), 1
        while aside.exists():
            count += 1
            aside = file.with_stem(f"{file.stem}-before-step-{step:06d}-{count}")
        shutil.copy2(file, aside)

    def _make_folders(self) -> None:
        for folder in (self.tensorboard, self.rollouts, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)


@dataclass(frozen=True)
class WeightSource:
    kind: Literal["checkpoint", "huggingface"]  # Megatron's distributed checkpoint, or config.json with safetensors
    path: Path  # the folder that holds config.json


def already_there(path: Path) -> str:
    """Message for a run directory that exists, with the way on that fits what is in it."""
    resume = f", or go on from its last checkpoint with --resume {path}" if path.is_dir() and latest_checkpoint(path) else ""
    return f"run directory {path} exists already, and a run is never overwritten. Choose another run.id (empty: date and time){resume}."


def checkpoint_step(path: Path) -> int | None:
    """20 for `.../step-000020`, None for any other name."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else None


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(complete_checkpoints(run_dir)), None)


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Oldest first. Torn ones (no COMPLETE, a file missing or cut short, or still under a temporary name) are passed over."""
    complete = [p for p in (run_dir / "checkpoints").glob("step-*") if checkpoint_step(p) is not None and not why_torn(p)]
    return sorted(complete, key=lambda p: checkpoint_step(p) or 0)


def torn_since(checkpoint: Path) -> list[tuple[str, str]]:
    """Name and fault of every save that is newer than `checkpoint` and torn, oldest first."""
    chosen, found = checkpoint_step(checkpoint) or 0, []
    for path in checkpoint.parent.iterdir():
        unfinished = path.name.startswith(".tmp-step-")
        step = checkpoint_step(path.with_name(path.name.removeprefix(".tmp-")))
        if step is not None and step > chosen:
            found.append((step, path.name, "its save never ended" if unfinished else why_torn(path)))
    return [(name, why) for _, name, why in sorted(found)]


def checkpoints_to_remove(run_dir: Path, keep: int, every: int = 0) -> list[Path]:
    """Complete checkpoints beyond the newest `keep`, oldest first, but for steps that `every` divides; none when `keep` is 0. Torn ones are
    not ours to judge: one may be on its way. Whoever removes a checkpoint renames it first, so that half of one is never taken for whole.
    """
    old = complete_checkpoints(run_dir)[:-keep] if keep else []
    return [p for p in old if not every or (checkpoint_step(p) or 0) % every]


def is_run_dir(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "checkpoints").is_dir()


def find_weights(path: Path) -> WeightSource:
    """What a user's path stands for: a run directory (its newest checkpoint), one checkpoint, or a Hugging Face folder.

    Raises ConfigError when there is nothing of the kind, CheckpointError when what is there is not whole.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist. It should be a run directory, a checkpoint in it, or a Hugging Face folder.")
    if is_run_dir(path):
        newest = latest_checkpoint(path)
        if newest is None:
            torn = sorted(p.name for p in (path / "checkpoints").iterdir())
            what = f"only torn ones ({', '.join(torn)})" if torn else "none"
            where = path / "checkpoints"
            raise CheckpointError(f"{path} has no complete checkpoint: {what} in {where}. The run ended before its first save.")
        return WeightSource("checkpoint", newest)
    torn = why_torn(path)
    if not torn:
        return WeightSource("checkpoint", path)
    if checkpoint_step(path) is not None or path.name.startswith(".tmp-") or (path / MARKER).is_file():
        newest = latest_checkpoint(path.parent.parent)
        other = f" The newest complete one is {newest}." if newest else ""
        raise CheckpointError(f"{path} is torn: {torn}.{other}")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return WeightSource("huggingface", path)
    missing = "no *.safetensors" if (path / "config.json").is_file() else "no config.json"
    raise ConfigError(
        f"{path} is neither a run directory (config.toml and checkpoints/), nor a checkpoint (file {MARKER}), nor a Hugging Face folder: "
        f"it has {missing}."
    )


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one whole, whatever interrupts it. MachineError when the disk is full."""
    with disk_errors(path):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        temporary.chmod(0o644)  # NamedTemporaryFile makes it private, which would hide a run from one's colleagues
        temporary.replace(path)
