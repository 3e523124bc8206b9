"""Where does each tensor lie in a folder of safetensors files?

In: an existing folder, or names and shapes of one to come. Out: file, first byte, shape and dtype of every tensor; and any part of one,
read or written without the rest. The safetensors package reads and writes whole files through memory maps, which a converter that must stay
small cannot use. It does not know what tensors mean, and changes no number.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_gptoss.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the safetensors format's own limit


@dataclass(frozen=True)
class Place:
    file: str
    offset: int  # of the tensor's first byte in the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one index of the first axis."""
        return self.num_bytes // self.shape[0]


def find_tensors(folder: Path) -> dict[str, Place]:
    """Every tensor of the folder, by the index or else of model.safetensors or else of all *.safetensors (OpenAI's folders have no index).

    Only headers are read. Raises CheckpointError for a file that is missing, cut off or no safetensors file, and for an index that names
    tensors other than the files hold.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    index = folder / INDEX
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index") from error
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{index} names {', '.join(missing)}, missing in {folder}. Fetch the missing files or the whole folder again."
            )
    else:
        weight_map = {}
        files = [SINGLE] if (folder / SINGLE).is_file() else sorted(p.name for p in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: neither {INDEX} nor any *.safetensors")
    found: dict[str, Place] = {}
    for name in files:
        for tensor, place in read_header(folder / name).items():
            if tensor in found:
                raise CheckpointError(f"{folder}: {tensor} is in {found[tensor].file} and in {name}")
            found[tensor] = place
    wrong = [n for n in weight_map if n not in found or found[n].file != weight_map[n]]
    if wrong:
        raise CheckpointError(
            f"{index}: {len(wrong)} tensors are not where it says, the first of them {wrong[0]} in {weight_map[wrong[0]]}"
        )
    return found


def read_header(file: Path) -> dict[str, Place]:
    """The tensors of one file. Raises CheckpointError when the file is cut off or is something else."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if 8 + length > size or length > LONGEST_HEADER:
                raise CheckpointError(f"{file}: no safetensors file, or cut off within its header ({size} bytes)")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{file}: {name} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}")
            found[name] = Place(file.name, 8 + length + first, tuple(entry["shape"]), DTYPES[entry["dtype"]])
            if found[name].num_bytes != end - first:
                raise CheckpointError(f"{file}: {name} has {end - first} bytes, and its shape and dtype ask for {found[name].num_bytes}")
            if 8 + length + end > size:
                raise CheckpointError(f"{file}: cut off: it has {size} bytes, and {name} ends at byte {8 + length + end}")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: no safetensors file ({type(error).__name__} in its header)") from error
    return found


def read(folder: Path, place: Place, first: int = 0, count: int | None = None) -> Tensor:
    """The tensor, or `count` indices of its first axis from `first` on, in memory of its own."""
    shape = place.shape if count is None else (count, *place.shape[1:])
    out = torch.empty(shape, dtype=place.dtype)
    into = memoryview(out.view(torch.uint8).flatten().numpy()) if out.numel() else memoryview(b"")
    offset = place.offset + (first * place.row_bytes if count is not None else 0)
    file = folder / place.file
    try:
        handle = os.open(file, os.O_RDONLY)
        try:
            done = 0
            while done < len(into):
                got = os.preadv(handle, [into[done : done + (1 << 30)]], offset + done)  # Linux reads at most 2 GiB at once
                if not got:
                    raise CheckpointError(f"{file}: cut off: no byte {offset + done}")
                done += got
        finally:
            os.close(handle)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    return out


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes, in place."""
    return memoryview(tensor.view(torch.uint8).flatten().numpy())


@dataclass(frozen=True)
class Shard:
    header: bytes  # what stands before the first tensor
    num_bytes: int  # of the whole file


@dataclass(frozen=True)
class Layout:
    shards: dict[str, Shard]  # by file name
    places: dict[str, Place]  # by tensor name

    def index(self) -> str:
        """The text of model.safetensors.index.json."""
        total = sum(place.num_bytes for place in self.places.values())
        weight_map = {name: place.file for name, place in self.places.items()}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def lay_out(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], max_shard_bytes: float) -> Layout:
    """Files for these tensors, in order; one is closed before it would pass `max_shard_bytes`, and a tensor is never divided."""
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    size = 0.0
    for name, shape, dtype in tensors:
        own = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + own > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (shape, dtype)
        size += own
    names = [SINGLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    shards, places = {}, {}
    for file, group in zip(names, groups, strict=True):
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (shape, dtype) in group.items():
            end = at + math.prod(shape) * dtype.itemsize
            content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        shards[file] = Shard(header, len(header) + at)
        for name, (shape, dtype) in group.items():
            first = content[name]["data_offsets"][0]  # pyright: ignore[reportIndexIssue]
            places[name] = Place(file, len(header) + first, shape, dtype)
    return Layout(shards, places)
