"""What did a worker say last? In: a log file. Out: its last lines. It does not judge them, nor make them safe for a terminal."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 65536


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log, read from its last 64 KiB; a log that is missing or empty says so in its place."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"({error.strerror})"]
    return [line.rstrip() for line in lines[-count:]] or ["(empty)"]
