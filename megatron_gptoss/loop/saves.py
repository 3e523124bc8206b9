"""Which checkpoint is on its way to the disk, and which older ones go when it is there?

In: a trainer whose state is to be saved, and when. Out: complete checkpoints in the run's directory, no more than it keeps, and how long
each took. The trainer writes (checkpoint/training_state.py); the stories decide when.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.memory import checkpoint_bytes
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import GptossError
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.metrics import MetricsLog
from megatron_gptoss.obs.run_dir import RunDir, checkpoints_to_remove
from megatron_gptoss.trainer.start import TrainingWorld


class Saves:
    """Of one run. `saved_step`: the newest step of which there is, or will be, a checkpoint."""

    def __init__(self, run_dir: RunDir, config: Config, saved_step: int, ending: ExitStack) -> None:
        self.saved_step = saved_step
        self._dir, self._config = run_dir, config
        self._on_its_way: tuple[TrainingWorld, MetricsLog] | None = None  # who writes a checkpoint, and where it is told
        self._remover = ending.enter_context(ThreadPoolExecutor(1))
        self._removing: list[Future[None]] = []

    def begin(self, world: TrainingWorld, progress: Progress, metrics: MetricsLog) -> None:
        """A checkpoint of now. Training waits for its copy to host memory, or for all of it (run.save_in_background); and first for the
        last one, when that is still being written, so that host memory holds one at most."""
        began = time.perf_counter()
        self.finish(progress.step)
        wait(self._removing)
        self._removing = []
        background = self._config.run.save_in_background
        world.save(self._dir.checkpoint(progress.step).absolute(), progress, checkpoint_bytes(self._config), background=background)
        self.saved_step, self._on_its_way = progress.step, (world, metrics)
        if not background:
            self.finish(progress.step)
        metrics.write(progress.step, {"time/save_s": time.perf_counter() - began})

    def notice(self, step: int) -> None:
        """At the end of a step: if the checkpoint on its way is complete or has failed by now, deal with it."""
        if self._on_its_way is not None and self._on_its_way[0].save_is_over():
            self.finish(step)

    def finish(self, step: int) -> None:
        """Wait until the checkpoint on its way, if there is one, is complete. Those that are no longer kept go then, renamed first, so that
        none is taken for whole on its way out."""
        if self._on_its_way is None:
            return
        world, metrics = self._on_its_way
        try:
            written_s = world.finish_save()
        except GptossError:
            self._on_its_way = None
            raise
        self._on_its_way = None  # not after a Ctrl-C while it waited: `end` goes on waiting
        metrics.write(step, {"time/save_write_s": written_s})
        run = self._config.run
        for old in checkpoints_to_remove(self._dir.path, run.keep_checkpoints, run.keep_every):
            gone = old.rename(old.with_name(f".tmp-{old.name}"))
            self._removing.append(self._remover.submit(shutil.rmtree, gone, ignore_errors=True))

    def end(self, step: int, console: Console) -> None:
        """A run that ends early still gets the checkpoint on its way, unless its trainer is what failed."""
        if self._on_its_way is not None and self._on_its_way[0].healthy:
            try:
                with console.waiting("writing the last checkpoint"):
                    self.finish(step)
            except GptossError as error:
                console.say(f"{type(error).__name__}: {error}")  # beside what ended the run
