"""Is this checkpoint whole? The marker COMPLETE and what it vouches for.

In: a folder. Out: why it is torn, or nothing. The marker is JSON: the step, the layout of the ranks that wrote it, and the size of every
file in bytes, so that a file that went missing or was cut short is found before anything is loaded. Sizes, not checksums: reading a
checkpoint twice would double the time of a resume. A marker without sizes vouches for its own presence only. No torch: the driver asks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gptoss.checkpoint.progress import MARKER

Layout = Mapping[str, int]  # {"world": 4, "tensor": 2, ...}


def file_sizes(folder: Path) -> dict[str, int]:
    """Every file below `folder` but the marker, by its path in it."""
    found = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop(MARKER, None)
    return found


def write_marker(folder: Path, *, step: int, layout: Layout) -> None:
    """Vouch for what is in `folder` now. The caller has flushed it to the disk; the marker is on the disk when this returns."""
    with (folder / MARKER).open("w") as file:
        json.dump({"step": step, "layout": dict(layout), "files": file_sizes(folder)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """The names in a folder reach the disk apart from what is in the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


OLD = ".tmp-old-"  # before the name of a checkpoint that another of the same name is about to replace


def replace_folder(path: Path, new: Path) -> None:
    """`new` becomes `path`. What had that name goes last, so that at no moment neither is there, and no torn folder carries the name."""
    old = path.with_name(f"{OLD}{path.name}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        new.replace(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def take_back_old(folder: Path) -> None:
    """A process that was killed between the two renames of `replace_folder` left a whole checkpoint under its old name's other name."""
    for old in folder.glob(f"{OLD}*"):
        path = old.with_name(old.name.removeprefix(OLD))
        if not path.exists() and not why_torn(old):
            old.rename(path)


def read_marker(folder: Path) -> dict[str, Any]:
    """What the marker says; empty when it says nothing of sizes. Raises ValueError when it is cut short, OSError when there is none."""
    text = (folder / MARKER).read_text()
    return json.loads(text) if text.startswith("{") else {}


def written_layout(folder: Path) -> Layout | None:
    """The layout of the ranks that wrote a whole checkpoint; None when its marker does not say."""
    return read_marker(folder).get("layout")


def why_torn(folder: Path) -> str:
    """In words, or "" when the checkpoint is whole."""
    if not (folder / MARKER).is_file():
        return f"it has no file {MARKER}, so its save never ended"
    try:
        sizes = read_marker(folder).get("files", {})
    except ValueError:
        return f"its file {MARKER} is cut short"
    for name, wanted in sizes.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != wanted:
            return f"{name} has {size} bytes, and {MARKER} says {wanted}"
    return ""


def layout_words(layout: Layout) -> str:
    """`4 ranks (tensor 2, expert 2)`."""
    degrees = ", ".join(f"{name} {size}" for name, size in layout.items() if name != "world" and size > 1)
    ranks = f"{layout['world']} rank{'s' if layout['world'] > 1 else ''}"
    return f"{ranks} ({degrees})" if degrees else ranks
