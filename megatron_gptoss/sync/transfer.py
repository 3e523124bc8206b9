"""What both sides of an update are told of it, how they wait for each other, and where the time goes.

In: orders of the driver. Out: `Transfer` and its parts, `Watch`, `Laps`. It moves no weights: broadcast.py and shared.py do.

Nobody waits without a limit: whoever waits looks at a deadline and at a key in the driver's store, which says that the update is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_gptoss.types import PolicyVersion

Kind = Literal["broadcast", "shared"]
LOOK_S = 0.05  # how often a waiting side asks whether the update is given up


class Superseded(Exception):
    """The trainer has been told to change the weights that were asked for: they are gone, or will be before they could be sent."""


class SyncAborted(Exception):
    """The update cannot be finished; says why. The process that raises it can take part in the next one."""


@dataclass(frozen=True)
class Transfer:
    """One update of one or more engines."""

    kind: Kind
    version: PolicyVersion
    number: int  # of the update, counted in the run
    dtype: str  # what travels: the engines' own
    bucket_bytes: int  # see plan.plan_sync
    host: str  # of the driver's store
    port: int
    timeout_s: float  # from each side's own beginning
    group: str = ""  # broadcast: who takes part; both sides keep the connection while it stays the same
    size: int = 0  # broadcast: the sender, rank 0, and all workers of all engines

    @property
    def key(self) -> str:
        """Set in the store when the update is given up; its value says why."""
        return f"update/{self.number}/given-up"

    @property
    def begun(self) -> str:
        """A key that is set when the trainer's ranks have come to it."""
        return f"update/{self.number}/begun"


@dataclass(frozen=True)
class SharedBuffers:
    """How another process of the same host opens a trainer rank's two buffers and its board."""

    board: str  # path
    num_bytes: int  # of one buffer
    buffers: tuple[object, object]  # of each: a path, or the arguments of torch's rebuild_cuda_tensor


@dataclass(frozen=True)
class Receipt:
    """One engine's part in a transfer."""

    transfer: Transfer
    first_rank: int = 0  # broadcast: of its first worker
    sources: tuple[SharedBuffers, ...] = ()  # shared: of each worker
    slots: tuple[int, ...] = ()  # shared: each worker's place on its source's board


@dataclass(frozen=True)
class Sent:
    """What the sending ranks have to say."""

    digest: int
    problem: str  # why not everybody got everything, "" when all went well
    seconds: dict[str, float] = field(default_factory=dict)  # see Laps


def join_store(transfer: Transfer) -> TCPStore:
    return TCPStore(transfer.host, transfer.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=transfer.timeout_s))


class Watch:
    """Patience: until the deadline, and while the update is not given up."""

    def __init__(self, store: Store, transfer: Transfer) -> None:
        self.store, self.transfer = store, transfer
        self.deadline = time.monotonic() + transfer.timeout_s
        self.next_look = 0.0

    def check(self) -> None:
        """Raises SyncAborted."""
        now = time.monotonic()
        if now > self.deadline:
            raise SyncAborted(f"the others were not there within {self.transfer.timeout_s:g} s")
        if now < self.next_look:
            return
        self.next_look = now + LOOK_S
        try:
            given_up = self.store.get(self.transfer.key).decode() if self.store.check([self.transfer.key]) else ""
        except RuntimeError as error:
            raise SyncAborted(f"the driver's store does not answer: {error}") from None
        if given_up:
            raise SyncAborted(given_up)

    def until(self, done: Callable[[], bool]) -> None:
        """Raises SyncAborted, or what `done` raises."""
        pause = 2e-5
        while not done():
            self.check()
            time.sleep(pause)
            pause = min(pause * 1.2, 1e-3)


class Laps:
    """Where the time of an update goes: `mark` gives the time since the last mark to a part. Never waits; on a GPU it is the GPU's time."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, torch.cuda.Event | float]] = [("", self._now())]

    def _now(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, part: str) -> None:
        self.marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each part. The device must have finished."""
        found: dict[str, float] = {}
        for (_, start), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(start, float) and isinstance(end, float):
                taken = end - start
            else:
                assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
                taken = start.elapsed_time(end) / 1000
            found[part] = found.get(part, 0.0) + taken
        return found
