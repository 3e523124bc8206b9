"""Buckets from a trainer rank to the engine workers on its own GPU, through memory that both have: CUDA IPC, or on a CPU a piece of memory
that both map. The same protocol for both.

In: a `Transfer`, and handles that a rank gives away once per engine. Out: buckets, two buffers of them. A board of counters in the host's
memory says what is filled and what is drained; nothing goes over the network.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gptoss.sync.plan import BucketPlan
from megatron_gptoss.sync.transfer import SharedBuffers, Watch

MOST_ENGINES, MOST_WORKERS = 256, 16  # that may be there at once, and of one engine
UPDATE = 1 << 20  # a board counts on over updates: counter = number of the update x UPDATE + buckets done of it


class Board:
    """Counters of 8 bytes: 0 is what the rank has filled, 1 + slot what a worker has drained. Each is written by one process."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.counters = memoryview(memory).cast("q")

    @property
    def filled(self) -> int:
        return self.counters[0]

    @filled.setter
    def filled(self, value: int) -> None:
        self.counters[0] = value

    def drained(self, slot: int) -> int:
        return self.counters[1 + slot]

    def drain(self, slot: int, value: int) -> None:
        self.counters[1 + slot] = value


def count(update: int, bucket: BucketPlan) -> int:
    return update * UPDATE + bucket.index + 1


def _new_memory(num_bytes: int) -> tuple[mmap.mmap, str]:
    """Memory that another process of this host can map by a path, and that is gone with this process."""
    fd = os.memfd_create("gptoss-weights")
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes), f"/proc/{os.getpid()}/fd/{fd}"


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def slot_of(engine: int, worker: int) -> int:
    """A worker's place on a board. `engine` counts all that ever were; one that comes so much later takes the place of one that is gone."""
    return engine % MOST_ENGINES * MOST_WORKERS + worker


class Lender:
    """A trainer rank's two buffers and board, made once, and its end of each update."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        memory, self.board_path = _new_memory(8 * (1 + MOST_ENGINES * MOST_WORKERS))
        self.board = Board(memory)
        self.paths: list[str] = []
        if device.type == "cuda":
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        else:
            made = [_new_memory(num_bytes) for _ in range(2)]
            self.buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory, _ in made]
            self.paths = [path for _, path in made]

    def lend(self) -> SharedBuffers:
        """Handles for one engine. On a GPU each can be opened once: torch counts who has it."""
        if self.device.type != "cuda":
            return SharedBuffers(self.board_path, self.num_bytes, (self.paths[0], self.paths[1]))
        from torch.multiprocessing.reductions import reduce_tensor

        first, second = (reduce_tensor(buffer)[1] for buffer in self.buffers)
        return SharedBuffers(self.board_path, self.num_bytes, (first, second))


class SharedOutlet:
    """`slots`: of the workers that this rank serves; () on a rank that serves none, which then only takes part in gathering."""

    def __init__(self, lender: Lender, update: int, slots: Sequence[int], watch: Watch) -> None:
        self.lender, self.update, self.slots, self.watch = lender, update, slots, watch
        self.waiting: list[BucketPlan] = []  # filled and perhaps not drained

    def buffer(self, bucket: BucketPlan) -> Tensor:
        if len(self.waiting) == 2:
            self._until_drained(self.waiting.pop(0))
        return self.lender.buffers[bucket.index % 2]

    def filled(self, bucket: BucketPlan) -> None:
        if self.lender.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.lender.board.filled = count(self.update, bucket)
        self.waiting.append(bucket)

    def finish(self) -> None:
        while self.waiting:
            self._until_drained(self.waiting.pop(0))

    def _until_drained(self, bucket: BucketPlan) -> None:
        board, wanted = self.lender.board, count(self.update, bucket)
        self.watch.until(lambda: all(board.drained(slot) >= wanted for slot in self.slots))


class Borrowed:
    """A worker's view of a rank's buffers, opened once and kept while the handles stay the same."""

    def __init__(self, source: SharedBuffers, device: torch.device) -> None:
        self.source, self.device = source, device
        self.board = Board(_map(source.board))
        self.buffers = [self._open(buffer) for buffer in source.buffers]

    def _open(self, buffer: object) -> Tensor:
        if isinstance(buffer, str):
            return torch.frombuffer(_map(buffer), dtype=torch.uint8)
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        assert isinstance(buffer, tuple)
        arguments = list(buffer)
        arguments[6] = self.device.index or 0  # the same GPU may have another number here
        return rebuild_cuda_tensor(*arguments)


class SharedInlet:
    def __init__(self, borrowed: Borrowed, update: int, slot: int, watch: Watch) -> None:
        self.borrowed, self.update, self.slot, self.watch = borrowed, update, slot, watch

    def bucket(self, bucket: BucketPlan) -> Tensor:
        self.watch.until(lambda: self.borrowed.board.filled >= count(self.update, bucket))
        return self.borrowed.buffers[bucket.index % 2]

    def loaded(self, bucket: BucketPlan) -> None:
        """The rank may write the buffer again, so this worker's GPU must have read it."""
        if self.borrowed.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.borrowed.board.drain(self.slot, count(self.update, bucket))

    def finish(self) -> None:
        pass
