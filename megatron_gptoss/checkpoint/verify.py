"""`gptoss convert --verify`: does the result hold what the source holds, tensor by tensor?

In: two folders. Out: `Verdict`: shape and SHA-256 of every tensor on both sides, in Hugging Face's terms. Where numbers were made shorter
(bfloat16) or packed (MXFP4), the source's side is what they had to become, worked out anew. Both sides are read through the same table, so
a fault of the table itself shows in the log-probs only: forward.py computes each side with what reads its own format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from megatron_gptoss.checkpoint.convert import MIB, largest_tensor, one_thread_each, open_scales
from megatron_gptoss.checkpoint.shards import bytes_of
from megatron_gptoss.checkpoint.sources import Source, open_source
from megatron_gptoss.checkpoint.targets import Target, make_target, recomputed
from megatron_gptoss.checkpoint.weight_map import Entry, Shape, entries, hf_shapes
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.obs.console import Console

# Named one by one: what a converter forgets first. End of a Hugging Face name -> what a person calls it.
NAMED = {
    "self_attn.sinks": "sinks",
    "mlp.router.bias": "router biases",
    "mlp.experts.gate_up_proj_bias": "expert biases, gate and up",
    "mlp.experts.down_proj_bias": "expert biases, down",
}


@dataclass(frozen=True)
class Compared:
    name: str
    shape_source: Shape
    shape_result: Shape
    sha256_source: str
    sha256_result: str

    @property
    def equal(self) -> bool:
        return self.shape_source == self.shape_result and self.sha256_source == self.sha256_result


@dataclass(frozen=True)
class Verdict:
    tensors: list[Compared]
    missing: list[str]  # in the source, not in the result
    unexpected: list[str]

    @property
    def different(self) -> list[str]:
        return [t.name for t in self.tensors if not t.equal]

    def rows(self) -> list[tuple[str, str]]:
        """For a table on the console."""
        rows = [("all tensors", _count(self.tensors))]
        rows += [(words, _count([t for t in self.tensors if t.name.endswith(end)])) for end, words in NAMED.items()]
        return [*rows, ("missing", ", ".join(self.missing) or "none"), ("unexpected", ", ".join(self.unexpected) or "none")]

    def write(self, file: Path) -> None:
        rows = [{**asdict(t), "equal": t.equal} for t in self.tensors]
        file.write_text(json.dumps({"missing": self.missing, "unexpected": self.unexpected, "tensors": rows}, indent=1) + "\n")

    def check(self) -> None:
        """Raise CheckpointError when anything differs."""
        if self.different or self.missing or self.unexpected:
            names = self.missing + self.unexpected + self.different
            raise CheckpointError(
                f"the result is not the source: {len(self.missing)} tensors missing, {len(self.unexpected)} unexpected, "
                f"{len(self.different)} different: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}"
            )


def verify(source: Path, result: Path, *, scales_from: Path | None = None, workers: int = 0, console: Console | None = None) -> Verdict:
    """Compare every tensor. `scales_from`: as given when the result was made. Raises CheckpointError when one of them cannot be read."""
    console = console or Console()
    one, other = open_source(source), open_source(result)
    if one.model != other.model:
        raise CheckpointError(f"{result} has another architecture than {source}")
    if other.kind == "openai":
        raise CheckpointError(f"{result} has OpenAI's own layout, which is only read")
    like = None if scales_from is None else open_scales(scales_from, one, other.kind)
    target = make_target(other.kind, one.model, other.dtype, max_shard_bytes=math.inf, like=like)
    table = entries(one.model)
    total = sum(math.prod(shape) for shape in hf_shapes(one.model).values()) * other.dtype.itemsize
    # A tensor's pieces are read one after another on both sides; the room for parts in work is that of two of the largest.
    largest = largest_tensor(one.model, max(one.dtype.itemsize, other.dtype.itemsize))
    threads = workers or (2 if largest > 1 << 28 else len(os.sched_getaffinity(0)))
    tensors: list[Compared] = []
    with console.progress("comparing", max(1, total // MIB), "MiB") as bar, one_thread_each(), ThreadPoolExecutor(threads) as pool:
        done = 0
        for entry, compared in zip(table, pool.map(lambda entry: _compare(one, other, target, entry), table), strict=True):
            tensors += compared
            done += sum(math.prod(shape) for shape in entry.row.hf_shape(one.model)) * other.dtype.itemsize
            bar.update(done // MIB)
    known = set(hf_shapes(one.model))
    names = {t.name for t in tensors}
    return Verdict(tensors, sorted(known - names), sorted(names - known))


def _compare(one: Source, other: Source, target: Target, entry: Entry) -> list[Compared]:
    wanted = _sums(entry, (recomputed(target, one, piece) for piece in one.pieces(entry)))
    found = _sums(entry, (other.read(piece) for piece in other.pieces(entry)))
    return [Compared(n, w[0], f[0], w[1], f[1]) for n, w, f in zip(entry.hf_names, wanted, found, strict=True)]


def _sums(entry: Entry, pieces: Iterator[Iterator[tuple[Tensor, ...]]]) -> list[tuple[Shape, str]]:
    """(shape, SHA-256 of the bytes) of each Hugging Face tensor of an entry, experts one after another."""
    sums = [hashlib.sha256() for _ in entry.hf_names]
    shapes: list[Shape] = [() for _ in entry.hf_names]
    experts = 0
    for piece in pieces:
        for parts in piece:
            experts += 1
            for place, tensor in enumerate(parts):
                sums[place].update(bytes_of(tensor.contiguous()))
                shapes[place] = tuple(tensor.shape)
    lead = (experts,) if entry.row.per_expert else ()
    return [((*lead, *shape), summed.hexdigest()) for shape, summed in zip(shapes, sums, strict=True)]


def _count(tensors: list[Compared]) -> str:
    different = [t.name for t in tensors if not t.equal]
    words = f"{len(tensors) - len(different)} of {len(tensors)} equal"
    return f"{words}, not {', '.join(different)[:300]}" if different else words
