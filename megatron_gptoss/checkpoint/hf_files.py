"""A Hugging Face folder: config.json and safetensors shards, written whole or not at all.

In: named tensors and a ModelConfig. Out: a folder that transformers and vLLM read; and the tensors back from such a folder.
It knows nothing about Megatron, nor about what the tensors mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_gptoss.checkpoint.shards import INDEX, SINGLE, find_tensors, read
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError


def write_hf_folder(
    path: Path,
    model: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: float = 5e9,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Write `path` (which must not exist). A shard is closed before it would pass `max_shard_bytes`; one tensor is never divided.

    Everything is written under a temporary name beside `path` and renamed when complete, so `path` is either whole or absent.
    Raises CheckpointError when `path` exists or cannot be written. All tensors must have one dtype; it goes into config.json.
    """
    if path.exists():
        raise CheckpointError(f"{path}: exists already; checkpoints are never overwritten")
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        dtype = _write_shards(temporary, tensors, max_shard_bytes)
        write_hf_config(model, temporary, eos_token_id=eos_token_id, pad_token_id=pad_token_id, dtype=dtype)
        for file in temporary.iterdir():
            _flush(file)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: float) -> str:
    """The shards and, when there are several, the index; returns the dtype's name ("float32")."""
    shards: list[list[str]] = []  # names of each closed shard
    open_shard: dict[str, Tensor] = {}
    dtypes: set[str] = set()
    open_bytes = total_bytes = 0

    def close() -> None:
        save_file(open_shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(open_shard))
        open_shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if open_shard and open_bytes + size > max_shard_bytes:
            close()
            open_bytes = 0
        # An own copy: safetensors refuses tensors that share memory, and the model may move on before the shard is closed.
        open_shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        open_bytes += size
        total_bytes += size
    close()
    if len(dtypes) > 1:
        raise CheckpointError(f"{folder.parent}: tensors of several dtypes ({', '.join(sorted(dtypes))}) in one checkpoint")

    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return dtypes.pop() if dtypes else "float32"
    where = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": where}, indent=2) + "\n")
    return dtypes.pop()


def _flush(file: Path) -> None:
    """On the disk before the rename, so that a power cut cannot leave a complete name over torn bytes."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def read_hf_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder as stored, on the host, one at a time, file by file. Raises CheckpointError for what cannot be read."""
    for name, place in find_tensors(path).items():
        yield name, read(path, place)
