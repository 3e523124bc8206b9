"""Which tensors travel together, and where in a bucket each of them lies. Sender and receiver compute the same plan by themselves.

In: names, shapes and the dtype of the policy, in the order of the weight map. Out: `SyncPlan`. Pure: no tensor is touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGNMENT = 16  # bytes; what a copy wants to begin at, and every tensor of the published models is a multiple of it
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One tensor's place in its bucket."""

    name: str
    shape: Shape  # as Hugging Face has it
    turned: bool  # it lies with its last two axes swapped, as both trainer and engine store it
    offset: int  # bytes from the bucket's start, a multiple of ALIGNMENT
    num_bytes: int

    @property
    def stored_shape(self) -> Shape:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape


@dataclass(frozen=True)
class BucketPlan:
    index: int
    slots: tuple[Slot, ...]
    num_bytes: int  # a multiple of ALIGNMENT

    @property
    def has_gaps(self) -> bool:
        return sum(slot.num_bytes for slot in self.slots) < self.num_bytes


@dataclass(frozen=True)
class SyncPlan:
    dtype: str
    buckets: tuple[BucketPlan, ...]

    @property
    def buffer_bytes(self) -> int:
        """What a buffer must have to hold any bucket."""
        return max(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_tensors(self) -> int:
        return sum(len(bucket.slots) for bucket in self.buckets)

    @cached_property
    def key(self) -> int:
        """One number for all names, shapes, places and the dtype; plans with equal keys fit each other."""
        words = repr((self.dtype, [[(s.name, s.shape, s.turned, s.offset) for s in b.slots] for b in self.buckets])).encode()
        return zlib.crc32(words) | zlib.crc32(words, 0x9E3779B9) << 32


def plan_sync(shapes: Mapping[str, Shape], turned: Collection[str], dtype: str, limit_bytes: int) -> SyncPlan:
    """Consecutive tensors, up to `limit_bytes` a bucket; a tensor larger than the limit travels alone."""
    sizes = {name: _rounded(prod(shape) * ELEMENT_BYTES[dtype]) for name, shape in shapes.items()}
    buckets = []
    for index, names in enumerate(plan_buckets(sizes.items(), limit_bytes)):
        slots, offset = [], 0
        for name in names:
            slots.append(Slot(name, tuple(shapes[name]), name in turned, offset, prod(shapes[name]) * ELEMENT_BYTES[dtype]))
            offset += sizes[name]
        buckets.append(BucketPlan(index, tuple(slots), offset))
    return SyncPlan(dtype, tuple(buckets))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def plan_buckets(sizes: Iterable[tuple[str, int]], limit_bytes: int) -> list[list[str]]:
    """Consecutive names, up to `limit_bytes` a bucket; a tensor larger than the limit travels alone."""
    buckets: list[list[str]] = []
    used = 0
    for name, size in sizes:
        if not buckets or used + size > limit_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        used += size
    return buckets
