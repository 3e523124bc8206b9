"""The weights of a checkpoint by Hugging Face name, read when they are asked for: one layer in memory at a time.

In: a checkpoint of any kind that sources.py reads. Out: a mapping, for the reference model. It changes no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_gptoss.checkpoint.sources import open_source
from megatron_gptoss.checkpoint.weight_map import Entry, entries, hf_shapes


class StoredWeights(Mapping[str, Tensor]):
    """What was read of a layer stays until another layer is asked for. Raises CheckpointError for a folder that is no whole checkpoint."""

    def __init__(self, path: Path) -> None:
        self.source = open_source(path)
        self.model = self.source.model
        self._entry_of = {name: entry for entry in entries(self.model) for name in entry.hf_names}
        self._held: dict[str, Tensor] = {}
        self._of: object = None  # the layer, or the tensor outside the layers, that is held

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entry_of[name]
        of = entry.layer if entry.row.in_layer else name
        if of != self._of:
            self._held, self._of = {}, of
        if name not in self._held:
            self._held |= dict(zip(entry.hf_names, self._read(entry), strict=True))
        return self._held[name]

    def _read(self, entry: Entry) -> list[Tensor]:
        parts = [tensors for piece in self.source.pieces(entry) for tensors in self.source.read(piece)]
        if not entry.row.per_expert:
            return [tensor.clone() for tensor in parts[0]]
        return [torch.stack(list(tensors)) for tensors in zip(*parts, strict=True)]

    def __iter__(self) -> Iterator[str]:
        return iter(hf_shapes(self.model))

    def __len__(self) -> int:
        return len(self._entry_of)
