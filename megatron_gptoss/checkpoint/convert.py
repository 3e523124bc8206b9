"""`gptoss convert`: one checkpoint into another, piece by piece, resumable, small whatever the model's size.

In: a folder of any kind that sources.py reads, the kind of folder that is wanted. Out: that folder, whole or absent. Work goes on in
`.NAME.converting` beside it, and `.NAME.converting.jsonl` says which parts are finished; a conversion that was interrupted takes them up
after it has summed up their bytes again, and does only the rest. It renames nothing before all of it is on the disk.
What tensors are called and how they are turned is weight_map.py's, how folders are made targets.py's; what is equal, verify.py's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_gptoss.checkpoint.marker import flush_folder
from megatron_gptoss.checkpoint.mxfp4 import Loss
from megatron_gptoss.checkpoint.sources import COMPANIONS, Piece, SafetensorsSource, Source, open_source, token_ids
from megatron_gptoss.checkpoint.targets import Part, Record, Target, TargetKind, losses_by_tensor, make_target, part_bytes
from megatron_gptoss.checkpoint.weight_map import entries
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.obs.console import Console

MIB = 1 << 20
# A part in work takes its bytes as read, as turned and as written. Beside parts, the process itself takes some hundred MiB.
COPIES_OF_A_PART = 3
ROOM_BESIDE = 1 << 30  # bytes for parts in work, over twice the largest tensor
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Conversion:
    """What came of it."""

    parts: int
    parts_found: int  # finished by an earlier attempt, checked and kept
    num_bytes: int  # written now
    seconds: float
    losses: dict[str, Loss]  # of tensors that were quantised


def convert(
    source: Path,
    target: Path,
    kind: TargetKind,
    *,
    dtype: str = "",
    scales_from: Path | None = None,
    max_shard_bytes: float = 5e9,
    workers: int = 0,
    console: Console | None = None,
) -> Conversion:
    """Make `target`, which must not exist, from `source`.

    `dtype`: "bfloat16", "float32" or "" for the source's own. `scales_from`: an MXFP4 folder whose scales to keep in every block that loses
    nothing by it. `workers`: threads that read, turn and write parts; 0 picks twice the CPUs, at most 8.
    Raises CheckpointError for a source that is not whole or not GPT-OSS (nothing is left behind), a target that exists, and a disk that is
    full (what is finished stays, and the same call goes on from there).
    """
    if target.exists():
        raise CheckpointError(f"{target}: exists already; checkpoints are never overwritten")
    console = console or Console()
    opened = open_source(source)
    like = None if scales_from is None else open_scales(scales_from, opened, kind)
    made = make_target(kind, opened.model, DTYPES[dtype] if dtype else opened.dtype, max_shard_bytes=max_shard_bytes, like=like)
    parts = plan_parts(opened)
    started = time.perf_counter()
    with _work_folder(target) as (folder, journal):
        begun = _open_journal(journal, {"source": opened.identity(), "kind": kind, "dtype": str(made.dtype), "shards": max_shard_bytes,
                                        "scales_from": str(scales_from), "parts": len(parts)}, folder, console)  # fmt: skip
        try:
            _require_room(folder, target, made.num_bytes)
            found = _finished(folder, begun, workers or _workers(), console) if begun else {}
            made.begin(folder)
            todo = [part for part in parts if part.number not in found]
            if found:
                console.say(f"{len(found)} of {len(parts)} parts were finished before and are as they were written; {len(todo)} are left")
            written = _write_parts(opened, made, folder, journal, todo, workers or _workers(), console)
            records = sorted([*found.values(), *written], key=lambda record: record.part)
            made.finish(folder, records, token_ids(opened.path))
            for name in COMPANIONS:
                if (opened.path / name).is_file():
                    shutil.copyfile(opened.path / name, folder / name)
            _publish(folder, made, target)
            _forget(folder)
        except CheckpointError:
            _forget(folder)  # the source is bad: nothing of it is kept
            raise
        except OSError as error:
            message = _cannot_write(target, folder, error, made.num_bytes)
            if not _any_finished(folder):
                _forget(folder)
            raise CheckpointError(message) from error
    return Conversion(len(parts), len(found), sum(r.num_bytes for r in written), time.perf_counter() - started, losses_by_tensor(records))


def plan_parts(source: Source) -> list[Part]:
    """Everything to do: a layer's small tensors together, experts' matrices in pieces, what lies outside the layers by itself."""
    groups: list[list[Piece]] = []
    small: dict[int, list[Piece]] = {}
    for entry in entries(source.model):
        pieces = source.pieces(entry)
        if not entry.row.in_layer or entry.row.packed:
            groups += [[piece] for piece in pieces]
            continue
        if entry.layer not in small:
            small[entry.layer] = []
            groups.append(small[entry.layer])
        small[entry.layer] += pieces
    return [Part(number, tuple(pieces)) for number, pieces in enumerate(groups)]


def largest_tensor(model: ModelConfig, itemsize: int) -> int:
    """Bytes of the largest Hugging Face tensor."""
    shapes = (shape for entry in entries(model) for shape in entry.row.hf_shape(model))
    return max(torch.Size(shape).numel() for shape in shapes) * itemsize


# ---- work, and how much of it at once ---------------------------------------------------------------------------------------------------


class Room:
    """So many bytes for parts in work. One that is larger than all of it may enter alone."""

    def __init__(self, total: int) -> None:
        self.total, self.taken, self.changed = total, 0, threading.Condition()

    def enter(self, size: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.taken == 0 or self.taken + size <= self.total)
            self.taken += size

    def leave(self, size: int) -> None:
        with self.changed:
            self.taken -= size
            self.changed.notify_all()


def _write_parts(
    source: Source, target: Target, folder: Path, journal: Any, todo: list[Part], workers: int, console: Console
) -> list[Record]:
    """All parts, several at a time. The first one that fails ends it, when those in work have come to their end."""
    itemsize = max(source.dtype.itemsize, target.dtype.itemsize)
    room = Room(2 * largest_tensor(source.model, itemsize) + ROOM_BESIDE)
    sizes = {part.number: part_bytes(part, source.model, itemsize) for part in todo}
    total = sum(sizes.values())
    started, lock, failed, records = time.perf_counter(), threading.Lock(), threading.Event(), []
    futures: list[Future[None]] = []

    with console.progress("converting", max(1, total // MIB), "MiB") as bar, one_thread_each(), ThreadPoolExecutor(workers) as pool:

        def work(part: Part) -> None:
            try:
                if failed.is_set():
                    return
                record = target.write(folder, part, source)
                with lock:
                    _append(journal, record)
                    records.append(record)
                    done = sum(sizes[r.part] for r in records)
                    bar.update(done // MIB, f"{done / (time.perf_counter() - started) / 1e6:.0f} MB/s")
            except BaseException:
                failed.set()
                raise
            finally:
                room.leave(COPIES_OF_A_PART * sizes[part.number])

        try:
            for part in todo:
                room.enter(COPIES_OF_A_PART * sizes[part.number])
                if failed.is_set():
                    break
                futures.append(pool.submit(work, part))
            wait(futures)
        except BaseException:  # Ctrl-C
            failed.set()
            raise
    for future in futures:
        future.result()
    return records


def _append(journal: Any, record: Record) -> None:
    """The line break comes first: what follows a line that was torn is then a line of its own."""
    line = b"\n" + json.dumps(asdict(record)).encode()
    if journal.write(line) != len(line):  # as much as the disk took
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Parts are the parallelism; torch's own threads would only fight for the same cores. Nor does torch.save add its own checksums to
    ours; torch.load does not look at them."""
    before, summed = torch.get_num_threads(), get_crc32_options()
    torch.set_num_threads(1)
    set_crc32_options(False)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_crc32_options(summed)


def _workers() -> int:
    return min(8, 2 * len(os.sched_getaffinity(0)))


# ---- the folder in work, and what an earlier attempt left in it -------------------------------------------------------------------------


@contextmanager
def _work_folder(target: Path) -> Iterator[tuple[Path, Any]]:
    """The temporary folder and its journal, open and locked: a second conversion into the same name is refused."""
    folder = target.with_name(f".{target.name}.converting")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        journal = _journal(folder).open("ab+", buffering=0)  # what is written is written, and closing it can fail no more
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror})") from error
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{target} is being made by another process, which holds {_journal(folder)}") from None
        yield folder, journal


def _journal(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.jsonl")


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _journal(folder).unlink(missing_ok=True)


def _open_journal(journal: Any, job: dict[str, Any], folder: Path, console: Console) -> list[Record]:
    """Records of an earlier attempt at the same job. One at another job is thrown away, and says so."""
    journal.seek(0)
    records, before, lines = [], None, journal.read().split(b"\n")
    for number, line in enumerate(lines):
        with suppress(ValueError):  # any line may be torn
            values = json.loads(line)
            if number:
                records.append(Record(values["part"], [tuple(w) for w in values["written"]], values["chunks"], values["losses"]))
            else:
                before = values
    if before == json.loads(json.dumps(job)):
        return records
    if any(lines):
        console.say(f"{folder} is half of a conversion of something else (or of files that have changed since): starting over")
    for path in folder.iterdir():
        path.unlink()
    journal.truncate(0)
    journal.write(json.dumps(job).encode())
    return []


def _finished(folder: Path, records: list[Record], workers: int, console: Console) -> dict[int, Record]:
    """Those whose bytes are still what was written."""

    def intact(record: Record) -> bool:
        return all(_checksum(folder / file, at, count) == crc for file, at, count, crc in record.written)

    total = sum(record.num_bytes for record in records)
    with console.progress("checking what is finished", max(1, total // MIB), "MiB") as bar, ThreadPoolExecutor(workers) as pool:
        found, done = {}, 0
        for record, whole in zip(records, pool.map(intact, records), strict=True):
            done += record.num_bytes
            bar.update(done // MIB)
            if whole:
                found[record.part] = record
    return found


def _checksum(file: Path, at: int, count: int) -> int | None:
    """crc32 of these bytes, None when they are not all there."""
    crc = 0
    try:
        with file.open("rb", buffering=0) as handle:
            handle.seek(at)
            while count:
                data = handle.read(min(count, 8 * MIB))
                if not data:
                    return None
                crc, count = zlib.crc32(data, crc), count - len(data)
    except FileNotFoundError:
        return None
    return crc


def _publish(folder: Path, made: Target, target: Path) -> None:
    """Everything on the disk, then what vouches for it, then the final name."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    made.seal(folder)
    flush_folder(folder)
    folder.rename(target)
    flush_folder(target.absolute().parent)


def _require_room(folder: Path, target: Path, num_bytes: int) -> None:
    there = sum(p.stat().st_blocks * 512 for p in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if free + there < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def _cannot_write(target: Path, folder: Path, error: OSError, num_bytes: int) -> str:
    if error.errno != errno.ENOSPC:
        return f"{target}: cannot be written ({error.strerror or error})"
    free = shutil.disk_usage(folder).free
    there = sum(p.stat().st_blocks * 512 for p in folder.iterdir())
    kept = f" The finished parts are kept in {folder}: the same command goes on from them." if _any_finished(folder) else ""
    return (
        f"{target}: the disk is full: it takes {num_bytes / MIB:.1f} MiB, {there / MIB:.1f} MiB are there, and {free / MIB:.1f} MiB "
        f"are free in {target.parent.absolute()}. Free some space there or choose another folder.{kept}"
    )


def _any_finished(folder: Path) -> bool:
    """The journal has more than its first line."""
    return b"\n" in _journal(folder).read_bytes()


def open_scales(path: Path, source: Source, kind: str) -> SafetensorsSource:
    """The folder that --scales-from names."""
    if kind != "hf-mxfp4":
        raise CheckpointError(f"--scales-from {path} is for --to hf-mxfp4 only; {kind} has no scales")
    like = open_source(path)
    if not isinstance(like, SafetensorsSource) or like.kind == "hf":
        raise CheckpointError(f"--scales-from {path}: a checkpoint of kind {like.kind} has no scales")
    if like.model != source.model:
        raise CheckpointError(f"--scales-from {path}: its architecture is not that of {source.path}")
    return like
