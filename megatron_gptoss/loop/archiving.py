"""A step's rollouts are written while the trainer works.

In: the groups of a step. Out: their archive, whole, when `finish` has returned; what went wrong with it is raised there. It begins when the
trainer has been given its work, in one thread: before that the driver would wait for it, and several would keep it from everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.types import RolloutGroup


class Archiving:
    """Of one run, an archive at a time. `ending`: a run that ends early still has the archive of what it has sampled."""

    def __init__(self, ending: ExitStack, console: Console) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._planned: Callable[[], None] | None = None
        self._writing: Future[None] | None = None
        ending.callback(self._end, console)

    def plan(self, path: Path, step: int, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
        """To be begun when the trainer is at work."""
        self.finish()
        self._planned = partial(_write, path, step, groups, tokenizer)

    def begin(self) -> None:
        """Write what is planned, beside what follows."""
        planned, self._planned = self._planned, None
        if planned is not None:
            self._writing = self._thread.submit(planned)

    def finish(self) -> None:
        """Wait until what was planned is there. Raises as write_archive."""
        self.begin()
        writing, self._writing = self._writing, None
        if writing is not None:
            with SPANS("archive is waited for"):
                writing.result()

    def _end(self, console: Console) -> None:
        try:
            self.finish()
        except Exception as error:  # said beside what ended the run
            console.say(f"{type(error).__name__}: {error}")
        self._thread.shutdown()


def _write(path: Path, step: int, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
    with SPANS("archive", beside=True):
        write_archive(path, step, groups, tokenizer)
