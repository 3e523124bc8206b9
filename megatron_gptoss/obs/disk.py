"""What does a person hear when the disk is full?

In: a file that is being written. Out: nothing, or a MachineError with the file, the room that is left, and the cure.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.errors import MachineError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Any OSError inside, a full disk above all, becomes a MachineError about `path`."""
    try:
        yield
    except OSError as error:
        folder = next(p for p in path.absolute().parents if p.is_dir())
        free_mib = shutil.disk_usage(folder).free / 2**20
        raise MachineError(
            f"{path} cannot be written: {error.strerror or error}. {free_mib:.1f} MiB are free in {folder}. Free some space there and go "
            "on from the last checkpoint with --resume, or start a run elsewhere with run.dir."
        ) from error
