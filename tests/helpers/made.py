"""Which tensors that a stretch of code makes are there still when it is over? Also those that only C++ holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """A context: every storage that an operator returns inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[StorageWeakRef, tuple[str, int]] = {}  # operator and shape, bytes; of the first tensor on a storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.found.setdefault(StorageWeakRef(storage), (f"{func} {tuple(leaf.shape)}", storage.nbytes()))
        return out

    def alive(self, known: Iterable[StorageWeakRef]) -> list[tuple[str, int]]:
        """Without those that are known."""
        gc.collect()  # Triton's interpreter leaves cycles
        others = set(known)
        return [what for reference, what in self.found.items() if not reference.expired() and reference not in others]
