"""Megatron's distributed checkpoints ("torch_dist") piece by piece, without a model and without process groups.

In: a folder with `.metadata`, or tensors' parts one after another. Out: any part of any tensor; or such a folder. The format is that of
torch.distributed.checkpoint: `.metadata` says for every tensor which chunk lies in which file at which byte, and a chunk is what torch.save
makes of a tensor. Megatron adds objects without a tensor (`name/shard_2_24`) and `metadata.json`. Reading is torch's own
FileSystemReader; writing is ours, because torch's writer wants every tensor in memory at once.
It does not know what tensors mean, nor how many ranks will read them.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_gptoss.errors import CheckpointError

Shape = tuple[int, ...]
METADATA = ".metadata"


class DistributedReader:
    """An existing checkpoint. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            self.metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        except Exception as error:  # a pickle that is torn or something else can raise nearly anything
            raise CheckpointError(f"{path / METADATA}: cannot be read ({type(error).__name__}: {error})") from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in self.metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        files = {info.relative_path for info in self.metadata.storage_data.values()}
        missing = sorted(name for name in files if not (path / name).is_file())
        if missing:
            raise CheckpointError(f"{path / METADATA} names {', '.join(missing)}, missing in {path}")
        ends = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            size = (path / name).stat().st_size
            if size < end:
                raise CheckpointError(f"{path / name}: cut off: it has {size} bytes, and its tensors end at byte {end}")

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """This part of the tensor, which may lie in any number of chunks; each of them is read whole."""
        entry = self.tensors[key]
        out = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        covered = sum(torch.Size(item.lengths).numel() for item in items)
        if covered != out.numel():
            raise CheckpointError(f"{self.path}: {key} is not whole: {covered} of {out.numel()} numbers at {list(offsets)}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(out))
        except Exception as error:  # torch.load of a torn file can raise nearly anything
            raise CheckpointError(f"{self.path}: {key} cannot be read ({type(error).__name__}: {error})") from error
        return out

    def chunk_starts(self, key: str, axis: int, layer: int | None) -> list[int]:
        """Where chunks begin along an axis, in the layer given (the first axis)."""
        chunks = self.tensors[key].chunks
        return sorted({c.offsets[axis] for c in chunks if layer is None or c.offsets[0] <= layer < c.offsets[0] + c.sizes[0]})


class _Into(DefaultLoadPlanner):
    """Lets torch's reader fill one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = tuple(slice(at, at + n) for at, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.out[place]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Chunk:
    """One part of a tensor in a file; `offsets` None: an object instead."""

    key: str
    offsets: Shape | None
    sizes: Shape | None
    file: str
    at: int
    length: int


class ChunkFile:
    """A file of chunks that is being written. Counts and sums up what goes through it."""

    def __init__(self, handle: IO[bytes], name: str) -> None:
        self._handle, self._name = handle, name
        self.num_bytes, self.checksum = 0, 0

    def write(self, data: Any) -> int:
        """What torch.save calls."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.num_bytes += self._handle.write(data)
        return len(data)

    def flush(self) -> None:
        pass

    def add(self, key: str, content: Tensor | list[Any], offsets: Shape | None = None) -> Chunk:
        """A tensor's part, at these offsets in the whole; or an object, wrapped in a list as Megatron does it."""
        at = self.num_bytes
        torch.save(content, self)  # pyright: ignore[reportArgumentType]
        sizes = tuple(content.shape) if isinstance(content, Tensor) else None
        return Chunk(key, offsets, sizes, self._name, at, self.num_bytes - at)


def write_metadata(folder: Path, shapes: dict[str, Shape], dtype: torch.dtype, chunks: Sequence[Chunk]) -> None:
    """`.metadata` and `metadata.json`, which make a distributed checkpoint of the folder. Every tensor of `shapes` has this dtype."""
    properties = TensorProperties(dtype=dtype)
    state: dict[str, Any] = {key: TensorStorageMetadata(properties, torch.Size(shape), []) for key, shape in shapes.items()}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        where = _StorageInfo(chunk.file, chunk.at, chunk.length)
        if chunk.offsets is None or chunk.sizes is None:
            state[chunk.key] = BytesStorageMetadata()
            storage[MetadataIndex(chunk.key)] = where
        else:
            state[chunk.key].chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            storage[MetadataIndex(chunk.key, chunk.offsets)] = where
    with (folder / METADATA).open("wb") as handle:
        pickle.dump(Metadata(state, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION), handle)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def object_key(key: str, index: int, count: int) -> str:
    """Megatron's name of the object with this index among `count`."""
    return f"{key}/shard_{index}_{count}"


def saved_size(shape: Shape, dtype: torch.dtype) -> int:
    """About how many bytes a chunk takes on disk."""
    empty = io.BytesIO()
    torch.save(torch.empty(0, dtype=dtype), empty)
    return torch.Size(shape).numel() * dtype.itemsize + len(empty.getvalue())
