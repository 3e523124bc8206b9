"""A bucket of weights on its way from trainer to engine: safetensors bytes.

In: named tensors. Out: bytes, which any process reads without the libraries of the one that wrote them. (A pickled tensor names the loader
of its writer; Megatron-Core puts its own there, so that reading one would import Megatron into an engine.)
"""

from __future__ import annotations

from collections.abc import Iterable

import safetensors.torch
from torch import Tensor

Bucket = list[tuple[str, Tensor]]


def to_bytes(bucket: Iterable[tuple[str, Tensor]]) -> bytes:
    """Raises ValueError when a name occurs twice."""
    named = list(bucket)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
    if len(tensors) != len(named):
        raise ValueError("a name occurs twice in one bucket")
    return safetensors.torch.save(tensors)
