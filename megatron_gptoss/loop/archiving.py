"""A step's rollouts are written while the trainer works.

In: the groups of a step. Out: their archive, whole, when `finish` has returned; what went wrong with it is raised there. A step of 2,048
answers of 4,096 tokens, with their routes, would otherwise wait for it, see docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.types import RolloutGroup


class Archiving:
    """Of one run, an archive at a time. `ending`: a run that ends early still has the archive that it began."""

    def __init__(self, ending: ExitStack) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._writing: Future[None] | None = None
        ending.callback(self._thread.shutdown)

    def begin(self, path: Path, step: int, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
        self.finish()
        self._writing = self._thread.submit(_write, path, step, groups, tokenizer)

    def finish(self) -> None:
        """Wait for the archive that was begun, if there is one. Raises as write_archive."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _write(path: Path, step: int, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
    with SPANS("archive", beside=True):
        write_archive(path, step, groups, tokenizer)
