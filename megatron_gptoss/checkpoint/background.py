"""How does a checkpoint reach the disk while training goes on?

In: what this rank has to write, in host memory. Out: `Saving`, which ends in a complete checkpoint or in one CheckpointError. It does not
decide what belongs into a checkpoint (training_state.py).

A thread of the rank writes. Megatron-Core writes from a child process instead: forked from the rank, which after CUDA, gloo and Ray have
started their threads may hang in any lock that one of them held; or spawned, which takes a second CUDA context and 10 s of imports for
each rank, and outlives a rank that is killed, so that it may write into what a resumed run has begun. A thread ends with its rank, and
writing releases the interpreter. Nor does it take part in collectives, whose order belongs to the training thread: ranks tell each other
how it went through a connection of their own to the store at which the world met.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult

from megatron_gptoss.checkpoint.marker import why_torn
from megatron_gptoss.errors import CheckpointError

NICENESS = 10  # of the writing thread: where CPUs are short, training goes first


class Planner(TorchDistSaveShardedStrategy):
    """Megatron's planning of saves, without its writing: `writer` has what this rank must write, `metadata` what rank 0 writes about it.

    A run keeps one. All its checkpoints are divided alike, so that from the third on ranks need not tell each other who writes what.
    """

    def __init__(self) -> None:
        super().__init__(cached_metadata=True)
        self.used = False
        self.writer: Any = None
        self.metadata: Any = None
        # Megatron reports results through a manager process, which takes seconds to start; threads need none.
        filesystem_async._results_queue = queue.SimpleQueue()  # pyright: ignore[reportAttributeAccessIssue]

    def plan(self, state: dict[str, Any], folder: Path) -> None:
        """Decide what of `state` goes into which file of `folder`. Collective; nothing is written."""
        check = not self.used  # that each entry is written once: asks all ranks
        dist_checkpointing.save(state, str(folder), self, validate_access_integrity=check, async_sharded_save=True, async_strategy="mcore")  # pyright: ignore[reportArgumentType]
        self.used = True

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> Any:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


@dataclass
class Part:
    """One file of this rank. Nobody changes its tensors until they are written."""

    path: Path
    objects: list[Any]  # (WriteItem, BytesIO)
    tensors: list[Any]  # (WriteItem, Tensor); let go of as they are written


def take_parts(writer: Any) -> list[Part]:
    """What a planned `writer` has for this rank, where it lies. Whatever may still be computing it is waited for."""
    torch.cuda.synchronize()
    parts = [Part(Path(path), objects, tensors) for path, _, (objects, tensors) in writer.write_buckets or []]
    writer.write_buckets = None
    return parts


def copy_to_host(parts: list[Part], live: set[int]) -> None:
    """Afterwards all is in host memory, and none of it in a storage that training changes (`live`: data pointers)."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor.to("cpu", non_blocking=True)
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    for part in parts:
        part.tensors = [(item, copy(tensor)) for item, tensor in part.tensors]
    torch.cuda.synchronize()


def write(parts: list[Part], transforms: Any) -> list[WriteResult]:
    """Write and flush this rank's files. What is still on a GPU passes through host memory one tensor at a time."""
    results = []
    for part in parts:
        with part.path.open("wb") as stream:
            for waiting in (part.objects, part.tensors):
                waiting.reverse()
                while waiting:
                    item, data = waiting.pop()
                    data = data.cpu() if isinstance(data, torch.Tensor) else data
                    results.append(_write_item(transforms, stream, data, item, part.path.name, SerializationFormat.TORCH_SAVE))
            stream.flush()
            os.fsync(stream.fileno())
    return results


class Meeting:
    """The ranks of one save, apart from all collectives. `name` must be new and the same on all ranks."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.rank, self.world, self.name, self.timeout_s = dist.get_rank(), dist.get_world_size(), name, timeout_s
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()  # a store serves one thread at a time, a clone another

    def say(self, key: str, value: object) -> None:
        self._store.set(f"{self.name}/{key}", pickle.dumps(value))

    def hear(self, key: str, *, patience: float = 1.0) -> Any:
        """What another rank said, as soon as it has; RuntimeError when it has not within `patience` x the deadline."""
        self._store.set_timeout(timedelta(seconds=patience * self.timeout_s))
        try:
            return pickle.loads(self._store.get(f"{self.name}/{key}"))
        except RuntimeError as error:  # a DistError from a TCPStore, itself from a FileStore
            raise RuntimeError(f"nothing was heard of {key} within {patience * self.timeout_s:.0f} s") from error

    def forget(self, key: str) -> None:
        """Let the store go of what was said; whoever should hear it has."""
        self._store.delete_key(f"{self.name}/{key}")

    def all_hear_rank_0(self, key: str, act: Callable[[], None]) -> str:
        """Rank 0 acts; every rank gets "", or what went wrong, in words."""
        if self.rank == 0:
            self.say(key, _attempt(act))
        return self.hear(key, patience=2.0)


@dataclass(frozen=True)
class Report:
    """How one rank's writing went."""

    results: list[WriteResult] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of its files
    problem: str = ""


class Saving:
    """A checkpoint that is being written on all ranks. `seconds` is known when it is over."""

    def __init__(
        self, path: Path, meeting: Meeting, parts: list[Part], transforms: Any, finish: Callable[[list[Report]], None], *, background: bool
    ) -> None:
        self.path, self._meeting, self._finish = path, meeting, finish
        self.seconds = 0.0
        self._problem = ""
        self._thread = threading.Thread(target=self._run, args=(parts, transforms, background), name=f"save {path.name}", daemon=True)
        self._thread.start()
        if not background:
            self._thread.join()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> float:
        """Seconds the writing took. CheckpointError, once, when it came to nothing."""
        self._thread.join()
        problem, self._problem = self._problem, ""
        if problem:
            raise CheckpointError(cannot_save(self.path, problem))
        return self.seconds

    def _run(self, parts: list[Part], transforms: Any, background: bool) -> None:
        began = time.perf_counter()
        if background and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._meeting.say(f"rank {self._meeting.rank}", _written(parts, transforms))
            self._problem = self._meeting.all_hear_rank_0("the outcome", self._conclude)
        except Exception as error:
            traceback.print_exc()
            self._problem = _words(error)
        self.seconds = time.perf_counter() - began

    def _conclude(self) -> None:
        """Rank 0: only when the files of all ranks are whole and flushed the checkpoint gets its marker and its name."""
        temporary = temporary_name(self.path)
        try:
            reports = [self._meeting.hear(f"rank {rank}") for rank in range(self._meeting.world)]
            for rank, report in enumerate(reports):
                self._meeting.forget(f"rank {rank}")  # a large model's reports are megabytes
                _check(rank, report, temporary)
            self._finish(reports)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # already renamed when all went well


def _check(rank: int, report: Report, folder: Path) -> None:
    if report.problem:
        raise RuntimeError(f"rank {rank}: {report.problem}")
    for name, size in report.sizes.items():
        seen = (folder / name).stat().st_size if (folder / name).exists() else 0
        if seen != size:
            raise RuntimeError(
                f"rank {rank} wrote {size} bytes to {name}, rank 0 sees {seen}. All nodes must share the file system of run.dir"
            )


def _written(parts: list[Part], transforms: Any) -> Report:
    try:
        paths = [part.path for part in parts]
        results = write(parts, transforms)
        return Report(results, {path.name: path.stat().st_size for path in paths})
    except Exception as error:
        traceback.print_exc()  # into the rank's log
        return Report(problem=_words(error))


def _attempt(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        traceback.print_exc()
        return _words(error)
    return ""


def _words(error: BaseException) -> str:
    """What went wrong. On a full disk torch complains of positions in its own file, and the reason is what it was handling."""
    chain: list[BaseException] = [error]
    while below := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(below)
    told = next((e for e in chain if isinstance(e, OSError)), error)
    return str(told) if isinstance(told, OSError | RuntimeError) else f"{type(told).__name__}: {told}"


def temporary_name(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}")


def cannot_save(path: Path, why: str) -> str:
    kept = sorted(p.name for p in path.parent.glob("step-*") if not why_torn(p))
    last = f"the last complete checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier checkpoint"
    cure = "Free some space or set run.dir elsewhere; " if "[Errno" in why else "The ranks' logs have the traceback; "
    return f"cannot save {path}: {' '.join(why.split())[-300:]}. {cure}{last}."
