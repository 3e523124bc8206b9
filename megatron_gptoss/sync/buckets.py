"""A bucket's bytes as named tensors, and back.

In: a plan and a buffer. Out: views of the buffer with Hugging Face's names and shapes; or the buffer filled. It sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from megatron_gptoss.checkpoint.weight_map import hf_shapes, turned_names
from megatron_gptoss.sync.plan import BucketPlan, Slot, SyncPlan, plan_sync


def plan_of(model: object, dtype: str, bucket_bytes: int) -> SyncPlan:
    """`model`: a ModelConfig, or a Hugging Face config, which calls the sizes by the same names."""
    return plan_sync(hf_shapes(model), turned_names(model), dtype, bucket_bytes)  # pyright: ignore[reportArgumentType]


def view(slot: Slot, buffer: Tensor, dtype: str) -> Tensor:
    """A tensor of the bucket as Hugging Face has it; not contiguous where it is turned."""
    stored = buffer[slot.offset : slot.offset + slot.num_bytes].view(getattr(torch, dtype)).view(slot.stored_shape)
    return stored.transpose(-2, -1) if slot.turned else stored


def views(plan: SyncPlan, bucket: BucketPlan, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for slot in bucket.slots:
        yield slot.name, view(slot, buffer, plan.dtype)


@torch.no_grad()
def fill(plan: SyncPlan, bucket: BucketPlan, buffer: Tensor, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Take the bucket's tensors from `tensors`, which has them in the plan's order, and write them into the buffer, cast to its dtype."""
    if bucket.has_gaps:
        buffer[: bucket.num_bytes].zero_()  # gaps are summed too
    for slot, (name, tensor) in zip(bucket.slots, islice(tensors, len(bucket.slots)), strict=True):
        assert (name, tuple(tensor.shape)) == (slot.name, slot.shape), f"{name} {tuple(tensor.shape)} came instead of {slot}"
        view(slot, buffer, plan.dtype).copy_(tensor)


def skip(bucket: BucketPlan, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Gather the bucket's tensors, since all ranks must, and drop them."""
    for _ in bucket.slots:
        next(tensors)
