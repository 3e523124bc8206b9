"""Which parts of the optimizer's global tensors does this rank hold? What a save writes, without asking another rank for anything.

In: one of the chained distributed optimizers and the model's sharded state. Out: `ShardedTensor`s of master weights and moments, views of
the optimizer's own tensors, under the keys of Megatron's `fully_reshardable` format, so Megatron's loader reads them at any layout.

A data-parallel rank owns a range of each parameter, flattened. Megatron gathers the ranges on every rank to write them; while that lasts
the step waits, and each rank needs host memory for the others' parts. But a range of a flattened tensor is at most 2n - 1 boxes of the
n-dimensional one, and torch.distributed.checkpoint stores any boxes, so each rank writes its own. It does not load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size on each axis


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements start..stop-1 of a row-major tensor as boxes, in order: a part of a row, whole rows, a part of a row."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first..last-1
    if first > last:  # all inside one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Boxes of a range inside row `index` of the first axis."""
    begin = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - begin, stop - begin):
        yield (index, *offset), (1, *size)


def own_shards(part: DistributedOptimizer, model_state: dict[str, Any]) -> dict[str, ShardedTensor]:
    """`part`'s tensors on this rank. `model_state` is the model's sharded state dict, which knows each parameter's place."""
    places: dict[Tensor, Any] = {entry.data: entry for entry in nested_values(model_state)}
    found: dict[str, ShardedTensor] = {}
    for ranges in (bucket for by_dtype in part.gbuf_ranges for buckets in by_dtype.values() for bucket in buckets):
        for parameter, where in ranges["param_map"].items():
            place = places[parameter]
            assert isinstance(place, ShardedTensor), f"{place.key} is stored in pieces; its optimizer state would need the same"
            for name, flat in part._get_main_param_and_optimizer_states(parameter).items():
                if name != "step":  # one number, and param_groups have it
                    for shard in _shards(place, f"optimizer.state.{name}.{place.key}", flat, where["param"].start):
                        found[f"{shard.key}/{shard.global_offset}"] = shard
    return found


def _shards(place: ShardedTensor, key: str, flat: Tensor, start: int) -> Iterator[ShardedTensor]:
    """The boxes of `flat`, which begins at element `start` of the parameter at `place`."""
    leading, taken = place.prepend_axis_num, 0
    replica: Any = place.replica_id  # (pipeline, tensor, data)
    for offset, size in boxes((1,) * leading + tuple(place.local_shape), start, start + flat.numel()):
        count = math.prod(size)
        yield replace(
            place,
            key=key,
            data=flat.detach()[taken : taken + count].view(size),
            dtype=flat.dtype,
            local_shape=size,
            global_offset=tuple(a + b for a, b in zip(place.global_offset, offset, strict=True)),
            axis_fragmentations=None,  # boxes are no regular grid
            prepend_axis_num=0,  # written out: Megatron forgets it in irregular grids
            replica_id=(*replica[:-1], 0),  # no data-parallel rank holds another's range
        )
        taken += count
