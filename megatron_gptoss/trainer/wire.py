"""Microbatches on their way from the driver to the ranks: tensors as arrays, which Ray lays into shared memory as they are.

In: `MicroBatch`es. Out: the same, in tensors of the rank's own. Ray by itself copies a tensor's bytes several times, and a step of 2,048
answers of 4,096 tokens with routes has 1.15 GiB of them (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import ray.util
import torch

from megatron_gptoss.model.replay import Routes
from megatron_gptoss.types import MicroBatch

RECORDS = (MicroBatch, Routes)


def register() -> None:
    """In the process that sends, when it has joined Ray."""
    for record in RECORDS:
        ray.util.register_serializer(record, serializer=to_arrays, deserializer=from_arrays)


def to_arrays(record: Any) -> tuple[type, dict[str, Any]]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return type(record), {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def from_arrays(sent: tuple[type, dict[str, Any]]) -> Any:
    kind, values = sent
    # What lies in shared memory may only be read; a tensor of it would not know.
    return kind(**{name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for name, value in values.items()})
