"""A checkpoint that comes into being, part by part, in any order, in a temporary folder.

In: pieces of weights in Hugging Face's terms. Out: a folder of kind "hf", "hf-mxfp4" or "megatron". A part is written and forgotten; what
must be known of it later (checksums, where chunks lie, losses) is in its `Record`, which the converter's journal keeps.
When to write which part, and what is left to do, is convert.py's business.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_gptoss.checkpoint import shards
from megatron_gptoss.checkpoint.marker import write_marker
from megatron_gptoss.checkpoint.megatron_files import Chunk, ChunkFile, object_key, saved_size, write_metadata
from megatron_gptoss.checkpoint.mxfp4 import BLOCK, Loss, dequantise, quantise
from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.checkpoint.sources import PIECE_BYTES, Piece, SafetensorsSource, Source, packed_names, stored_as, stored_tensors
from megatron_gptoss.checkpoint.weight_map import EXTRA_STATES, megatron_shape, stored_shapes
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError

TargetKind = Literal["hf", "hf-mxfp4", "megatron"]
LOSSES = "mxfp4_losses.json"  # beside the weights: what quantising cost each tensor
# What the published config.json says about its weights.
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


@dataclass(frozen=True)
class Part:
    """What is read, converted and written in one go, and redone as a whole when it is torn."""

    number: int
    pieces: tuple[Piece, ...]


@dataclass
class Record:
    """What a finished part left behind. Plain values only: it is one line of JSON."""

    part: int
    written: list[tuple[str, int, int, int]] = field(default_factory=list)  # file, first byte, bytes, crc32
    chunks: list[dict[str, Any]] = field(default_factory=list)  # of megatron_files.Chunk
    losses: dict[str, dict[str, float]] = field(default_factory=dict)  # of mxfp4.Loss, by tensor

    @property
    def num_bytes(self) -> int:
        return sum(count for _, _, count, _ in self.written)


class Target:
    """One kind of folder. `write` is safe to call from several threads for different parts."""

    kind: TargetKind
    num_bytes: int  # of the finished folder, about

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype

    def begin(self, folder: Path) -> None:
        """Prepare the folder; again after an interruption."""

    def write(self, folder: Path, part: Part, source: Source) -> Record:
        raise NotImplementedError

    def finish(self, folder: Path, records: list[Record], companions: dict[str, Any]) -> None:
        """Everything beside the weights. `companions`: token ids for config.json."""
        raise NotImplementedError

    def seal(self, folder: Path) -> None:
        """The last thing before the final name, when all else is on the disk."""


class HuggingFaceTarget(Target):
    """Kinds hf and hf-mxfp4: files are laid out before anything is read, so that pieces go straight to their place."""

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        kind: Literal["hf", "hf-mxfp4"],
        max_shard_bytes: float,
        like: SafetensorsSource | None,
    ) -> None:
        """`like`: a checkpoint whose scales to keep where they fit."""
        super().__init__(model, dtype)
        self.kind, self.like = kind, like
        if kind == "hf-mxfp4":
            for name in ("hidden_size", "intermediate_size"):
                if getattr(model, name) % BLOCK:
                    raise CheckpointError(f"MXFP4 packs {BLOCK} numbers in a block, which does not divide {name} = {getattr(model, name)}")
        tensors = [(name, shape, torch.uint8 if is_uint8 else dtype) for name, shape, is_uint8 in stored_tensors(kind, model)]
        self.layout = shards.lay_out(tensors, max_shard_bytes)
        self.num_bytes = sum(shard.num_bytes for shard in self.layout.shards.values())

    def begin(self, folder: Path) -> None:
        for name, shard in self.layout.shards.items():
            with (folder / name).open("r+b" if (folder / name).exists() else "w+b") as handle:
                handle.write(shard.header)
                handle.truncate(shard.num_bytes)

    def write(self, folder: Path, part: Part, source: Source) -> Record:
        record, files = Record(part.number), _OpenFiles(folder)
        try:
            for piece in part.pieces:
                for name, index, tensor in self._tensors(piece, source, record):
                    place = self.layout.places[name]
                    at = place.offset + (0 if index is None else index * place.row_bytes)
                    data = shards.bytes_of(tensor)
                    files.write(place.file, at, data)
                    record.written.append((place.file, at, len(data), zlib.crc32(data)))
        finally:
            files.close()
        return record

    def _tensors(self, piece: Piece, source: Source, record: Record) -> Iterator[tuple[str, int | None, Tensor]]:
        """(name, expert or None, contiguous tensor) to be stored for a piece."""
        names = stored_as(self.kind, self.model, piece.entry)
        if names[0][2]:
            yield from self.packed_tensors(piece, source, record)
            return
        for place, parts in enumerate(source.read(piece)):
            index = piece.experts[place] if piece.experts else None
            for (name, _, _), tensor in zip(names, parts, strict=True):
                yield name, index, tensor.to(self.dtype).contiguous()

    def packed_tensors(self, piece: Piece, source: Source, record: Record) -> Iterator[tuple[str, int | None, Tensor]]:
        """The same for rows that are stored as blocks and scales; what it cost goes into the record."""
        name = piece.entry.hf_names[0]
        own, total = packed_names(self.kind, name), Loss()
        if isinstance(source, SafetensorsSource) and source.kind != "hf":
            for expert, both in zip(piece.experts, zip(*source.read_packed(piece), strict=True), strict=True):
                yield from ((n, expert, tensor) for n, tensor in zip(own, both, strict=True))
            return
        scales = self.like.read_packed(piece)[1] if self.like else [None] * len(piece.experts)
        for expert, (matrix,), hint in zip(piece.experts, source.read(piece), scales, strict=True):
            blocks, own_scales, loss = quantise(matrix.t(), like=hint)
            total += loss
            yield from ((n, expert, tensor) for n, tensor in zip(own, (blocks, own_scales), strict=True))
        record.losses[name] = asdict(total)

    def finish(self, folder: Path, records: list[Record], companions: dict[str, Any]) -> None:
        if shards.SINGLE not in self.layout.shards:
            (folder / shards.INDEX).write_text(self.layout.index())
        write_hf_config(self.model, folder, dtype=str(self.dtype).removeprefix("torch."), **companions)
        if self.kind == "hf-mxfp4":
            config = json.loads((folder / "config.json").read_text()) | {"quantization_config": MXFP4_CONFIG}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            losses = losses_by_tensor(records)
            if losses:
                rows = {name: {**asdict(loss), "relative": loss.relative} for name, loss in losses.items()}
                (folder / LOSSES).write_text(json.dumps(rows, indent=2) + "\n")


class MegatronTarget(Target):
    """A distributed checkpoint of the weights alone: one file a part."""

    kind: TargetKind = "megatron"

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self._own = threading.local()
        self.shapes = stored_shapes(model)
        self.num_bytes = sum(saved_size(shape, dtype) for shape in self.shapes.values())

    def write(self, folder: Path, part: Part, source: Source) -> Record:
        record = Record(part.number)
        with (folder / _chunk_file(part.number)).open("wb") as handle:
            file = ChunkFile(handle, _chunk_file(part.number))
            for piece in part.pieces:
                row, chunk = piece.entry.row, self._chunk(piece, source)
                lead = ([piece.entry.layer] if row.in_layer else []) + ([piece.experts.start] if row.per_expert else [])
                chunk = chunk.unsqueeze(0) if row.in_layer else chunk
                offsets = (*lead, *[0] * (chunk.dim() - len(lead)))
                record.chunks.append(asdict(file.add(row.stored_key, chunk, offsets)))
            handle.flush()
            os.fdatasync(handle.fileno())
        record.written.append((_chunk_file(part.number), 0, file.num_bytes, file.checksum))
        return record

    def _chunk(self, piece: Piece, source: Source) -> Tensor:
        """Megatron's tensor; with an axis of experts where there are some."""
        row = piece.entry.row
        if not row.per_expert:
            return row.to_megatron(self.model, *next(source.read(piece))).to(self.dtype).contiguous()
        chunk = self._buffer(len(piece.experts), *megatron_shape(self.model, row)[1:])
        if row.packed and isinstance(source, SafetensorsSource) and source.kind != "hf" and self.dtype == torch.bfloat16:
            # Bytes are put in order, a quarter of the numbers they become, and become numbers where these are wanted.
            for own, blocks, scales in zip(chunk, *source.read_packed(piece), strict=True):
                dequantise(row.packed(blocks), row.packed(scales), out=own)
        else:
            for own, parts in zip(chunk, source.read(piece), strict=True):
                own.copy_(row.to_megatron(self.model, *parts))
        return chunk

    def _buffer(self, *shape: int) -> Tensor:
        """Of this thread, until its next call. Experts' pieces have two shapes, and fresh memory costs more than filling it."""
        if math.prod(shape) * self.dtype.itemsize > 2 * PIECE_BYTES:
            return torch.empty(shape, dtype=self.dtype)
        buffers = self._own.__dict__.setdefault("buffers", {})
        if shape not in buffers:
            if len(buffers) > 1:
                buffers.clear()
            buffers[shape] = torch.empty(shape, dtype=self.dtype)
        return buffers[shape]

    def finish(self, folder: Path, records: list[Record], companions: dict[str, Any]) -> None:
        chunks = [_chunk(values) for record in records for values in record.chunks]
        name, layers = _chunk_file(1 + max(record.part for record in records)), self.model.num_hidden_layers
        with (folder / name).open("wb") as handle:
            file = ChunkFile(handle, name)
            for key in EXTRA_STATES:
                chunks += [file.add(object_key(key, layer, layers), [None]) for layer in range(layers)]
            # What Megatron calls the common state: a run begins at step 0 of itself, wherever its weights came from.
            progress = asdict(Progress(step=0, policy_version=0, prompt_cursor=0))
            chunks.append(file.add(object_key("common_state", 0, 1), [{"progress": progress}]))
        write_metadata(folder, self.shapes, self.dtype, chunks)
        write_hf_config(self.model, folder, dtype=str(self.dtype).removeprefix("torch."), **companions)

    def seal(self, folder: Path) -> None:
        write_marker(folder, step=0, layout={"world": 1})


def losses_by_tensor(records: list[Record]) -> dict[str, Loss]:
    """The losses of each quantised tensor, over its parts."""
    found: dict[str, Loss] = {}
    for record in records:
        for name, values in record.losses.items():
            found[name] = found.get(name, Loss()) + Loss(**values)
    return found


def recomputed(target: Target, source: Source, piece: Piece) -> Iterator[tuple[Tensor, ...]]:
    """What the target's folder must give back for this piece: the source's numbers as the target stores them."""
    if not (piece.entry.row.packed and isinstance(target, HuggingFaceTarget) and target.kind == "hf-mxfp4"):
        yield from (tuple(t.to(target.dtype) for t in parts) for parts in source.read(piece))
        return
    tensors = {(name, expert): tensor for name, expert, tensor in target.packed_tensors(piece, source, Record(0))}
    blocks, scales = packed_names(target.kind, piece.entry.hf_names[0])
    yield from ((dequantise(tensors[blocks, e], tensors[scales, e]).t(),) for e in piece.experts)


def make_target(
    kind: TargetKind, model: ModelConfig, dtype: torch.dtype, *, max_shard_bytes: float, like: SafetensorsSource | None = None
) -> Target:
    if kind == "megatron":
        return MegatronTarget(model, dtype)
    return HuggingFaceTarget(model, dtype, kind, max_shard_bytes, like)


def part_bytes(part: Part, model: ModelConfig, itemsize: int) -> int:
    """Of the part's weights as plain numbers."""
    total = 0
    for piece in part.pieces:
        for shape in piece.entry.row.hf_shape(model):
            total += math.prod(shape[1:] if piece.experts else shape) * (len(piece.experts) or 1) * itemsize
    return total


def _chunk_file(number: int) -> str:
    return f"__0_{number}.distcp"


def _chunk(values: dict[str, Any]) -> Chunk:
    """Back from JSON, which has no tuples and makes equal names anew: pickled, one object twice is shorter than two equal ones."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else sys.intern(v) if isinstance(v, str) else v for k, v in values.items()}
    return Chunk(**plain)


class _OpenFiles:
    """Files of one part, opened once each; on the disk when closed."""

    def __init__(self, folder: Path, sync: Callable[[int], None] = os.fdatasync) -> None:
        self.folder, self.sync, self.handles = folder, sync, {}

    def write(self, name: str, at: int, data: memoryview) -> None:
        if name not in self.handles:
            self.handles[name] = os.open(self.folder / name, os.O_WRONLY)
        done = 0
        while done < len(data):
            done += os.pwrite(self.handles[name], data[done : done + (1 << 30)], at + done)

    def close(self) -> None:
        for handle in self.handles.values():
            try:
                self.sync(handle)
            finally:
                os.close(handle)
