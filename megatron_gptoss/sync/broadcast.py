"""Buckets from the trainer's lead rank to all workers of all engines: NCCL between GPUs, Gloo between CPUs, by the same code.

In: a `Transfer` and this process's rank in its group; 0 sends. Out: buckets, two on their way at a time. The group is made beside
torch.distributed's own world, so that trainer and engines keep theirs, and it can be given up without either.

On a GPU nothing here makes the host wait: buffers are handed over in the order of streams, and a bucket travels while the next is packed
and the last is loaded.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    BroadcastOptions,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Work,
)

from megatron_gptoss.sync.plan import BucketPlan, SyncPlan
from megatron_gptoss.sync.transfer import SyncAborted, Transfer, Watch, join_store

# NCCL's own watchdog must not fire: it ends the process, and a trainer outlives its engines. `Watch` is earlier, and more polite.
NEVER = timedelta(days=7)
# Gloo cannot give up what is on its way before its own timeout, and to delete such a group would wait for that.
_LEFT_BEHIND: list[Group] = []
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


class Group:
    """A connection of the sender with all receivers, kept for as many updates as it holds."""

    def __init__(self, transfer: Transfer, rank: int, device: torch.device, watch: Watch) -> None:
        """Raises SyncAborted when the others do not come."""
        self.name, self.device = transfer.group, device
        self.buffers: list[Tensor] = []
        self.works: deque[Work] = deque(maxlen=4)  # the last ones begun
        self.store = join_store(transfer)  # its own: a process group may sit in a call of its store
        here = [f"group/{transfer.group}/{r}" for r in range(transfer.size)]
        watch.store.set(here[rank], "here")
        watch.until(lambda: watch.store.check(here))
        meeting = PrefixStore(f"group/{transfer.group}", self.store)
        self.backend: Any = _watched(lambda: _connect(meeting, rank, transfer, device), watch)

    def two_buffers(self, num_bytes: int) -> list[Tensor]:
        if not self.buffers or self.buffers[0].numel() < num_bytes:
            self.buffers = []
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self.buffers

    def broadcast(self, tensor: Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        work = self.backend.broadcast([tensor], options)
        self.works.append(work)
        return work

    def finish(self, work: Work, watch: Watch) -> None:
        """On a GPU the current stream waits for it, not the host."""
        if self.device.type == "cuda":
            watch.check()
        else:
            watch.until(work.is_completed)
        work.wait()

    def close(self) -> None:
        """Give up what is on its way; the group is of no use any more."""
        if self.device.type == "cuda":
            self.backend.abort()
            self.buffers = []
        elif self._busy():
            _LEFT_BEHIND.append(self)
        _LEFT_BEHIND[:] = [group for group in _LEFT_BEHIND if group._busy()]

    def _busy(self) -> bool:
        return not all(work.is_completed() for work in self.works)


def _connect(meeting: PrefixStore, rank: int, transfer: Transfer, device: torch.device) -> Any:
    if device.type != "cuda":
        return ProcessGroupGloo(meeting, rank, transfer.size, timeout=timedelta(seconds=transfer.timeout_s))
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(device)  # this is another thread
    group: Any = ProcessGroupNCCL
    with _environment(QUIET):
        backend = group(meeting, rank, transfer.size, NEVER)
    # NCCL meets at the first call.
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work = backend.broadcast([torch.zeros(1, device=device)], options)
    work.wait()
    torch.cuda.synchronize()
    return backend


@contextmanager
def _environment(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _watched(call: Callable[[], Any], watch: Watch) -> Any:
    """`call` in a thread, which is left behind when the watch ends first."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except Exception as error:
            found.append((None, error))

    threading.Thread(target=run, name="weight-sync-connect", daemon=True).start()
    watch.until(lambda: bool(found))
    value, error = found[0]
    if error is not None:
        raise SyncAborted(f"no connection: {error}")
    return value


class Members:
    """The one group a process is in. Another name means other members: the old group is closed, and a new one made."""

    def __init__(self) -> None:
        self.group: Group | None = None

    def get(self, transfer: Transfer, rank: int, device: torch.device, watch: Watch) -> Group:
        if self.group is None or self.group.name != transfer.group:
            self.close()
            self.group = Group(transfer, rank, device, watch)
        return self.group

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()


class BroadcastOutlet:
    """The sender's end of one update."""

    def __init__(self, group: Group, plan: SyncPlan, watch: Watch) -> None:
        self.group, self.watch = group, watch
        self.buffers = group.two_buffers(plan.buffer_bytes)
        self.works: list[Work] = []

    def buffer(self, bucket: BucketPlan) -> Tensor:
        """Free to be filled; what travels from it must be gone first."""
        if bucket.index >= 2:
            self.group.finish(self.works[bucket.index - 2], self.watch)
        return self.buffers[bucket.index % 2]

    def filled(self, bucket: BucketPlan) -> None:
        self.works.append(self.group.broadcast(self.buffers[bucket.index % 2][: bucket.num_bytes]))

    def finish(self) -> None:
        for work in self.works[-2:]:
            self.watch.until(work.is_completed)
            work.wait()


class BroadcastInlet:
    """A receiver's end of one update."""

    def __init__(self, group: Group, plan: SyncPlan, watch: Watch) -> None:
        self.group, self.plan, self.watch = group, plan, watch
        self.buffers = group.two_buffers(plan.buffer_bytes)
        self.works: list[Work] = []
        for _ in range(2):
            self._receive_next()

    def _receive_next(self) -> None:
        if len(self.works) < len(self.plan.buckets):
            bucket = self.plan.buckets[len(self.works)]
            self.works.append(self.group.broadcast(self.buffers[bucket.index % 2][: bucket.num_bytes]))

    def bucket(self, bucket: BucketPlan) -> Tensor:
        self.group.finish(self.works[bucket.index], self.watch)
        return self.buffers[bucket.index % 2]

    def loaded(self, bucket: BucketPlan) -> None:
        """The bucket's buffer may be written again, in the stream's order."""
        self._receive_next()

    def finish(self) -> None:
        if self.group.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self.watch.until(done.query)
