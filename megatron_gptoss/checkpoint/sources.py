"""A checkpoint that is there already: what it is, whether it is whole, and any piece of its weights in Hugging Face's terms.

In: a folder of one of four kinds. Out: `Source`: the architecture, and pieces of tensors with Hugging Face's names, shapes and order, plain
numbers whatever the file holds. Everything that headers can tell is checked before the first piece is read; numbers that are not finite are
refused as they are read. It writes nothing; targets.py does.

Kinds: "hf" (Hugging Face, plain numbers), "hf-mxfp4" (the published form: experts' matrices as blocks and scales), "openai" (OpenAI's own
folder: other names, q, k and v in one tensor, blocks and scales), "megatron" (a distributed checkpoint, ours or of any run).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_gptoss.checkpoint import shards
from megatron_gptoss.checkpoint.marker import why_torn
from megatron_gptoss.checkpoint.megatron_files import METADATA, DistributedReader
from megatron_gptoss.checkpoint.mxfp4 import LARGEST_FINITE, dequantise, packed_shapes
from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.checkpoint.weight_map import Entry, Shape, entries, stored_shapes
from megatron_gptoss.config.hf_config import quantization, read_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError

Kind = Literal["hf", "hf-mxfp4", "openai", "megatron"]
PIECE_BYTES = 1 << 27  # experts' matrices are read in pieces of about this size, when the source's own form allows it
# Files that belong to a model beside its weights, carried along by every conversion.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json", "vocab.json",
    "merges.txt", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A row of the weight table for one layer, or some of its experts."""

    entry: Entry
    experts: range = range(0)  # empty for rows that are not per expert


class Source:
    """A checkpoint of one kind. `read` is safe to call from several threads."""

    kind: Kind

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self.path, self.model = path, model

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that `read` gives."""
        raise NotImplementedError

    def shapes(self) -> dict[str, Shape]:
        """Every tensor as stored."""
        raise NotImplementedError

    def pieces(self, entry: Entry) -> list[Piece]:
        """The whole entry, in pieces that can be read one by one without reading anything twice."""
        raise NotImplementedError

    def read(self, piece: Piece) -> Iterator[tuple[Tensor, ...]]:
        """For each expert (or once) the Hugging Face tensors of the row, for an expert without the expert axis. Views, perhaps strided.

        One after another: all experts of a run's checkpoint, turned at once, would take as much memory again. Raises CheckpointError for a
        file that cannot be read and for numbers that are not finite.
        """
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What must be the same for half a conversion to be continued."""
        files = sorted(p for p in self.path.iterdir() if p.is_file())
        return {"path": str(self.path.absolute()), "files": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]}


def _pieces_at(model: ModelConfig, entry: Entry, starts: Sequence[int]) -> list[Piece]:
    """Pieces of experts that begin at `starts` (the first is 0)."""
    ends = [*starts[1:], model.num_local_experts]
    return [Piece(entry, range(first, end)) for first, end in zip(starts, ends, strict=True)]


def _experts_at_once(model: ModelConfig, entry: Entry, itemsize: int = 2) -> int:
    one = sum(torch.Size(shape[1:]).numel() for shape in entry.row.hf_shape(model)) * itemsize
    return max(1, PIECE_BYTES // one)


def stored_as(kind: Kind, model: ModelConfig, entry: Entry) -> list[tuple[str, Shape, bool]]:
    """(name, shape, packed) of an entry's tensors in a safetensors folder; packed ones have two: see `packed_names`."""
    shapes = entry.row.hf_shape(model)
    if kind == "openai":
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return [(entry.openai_name, shapes[0] if len(shapes) == 1 else joined, entry.row.packed is not None)]
    return [(n, s, entry.row.packed is not None and kind == "hf-mxfp4") for n, s in zip(entry.hf_names, shapes, strict=True)]


def packed_names(kind: Kind, name: str) -> tuple[str, str]:
    """Of blocks and scales."""
    dot = "." if kind == "openai" else "_"
    return f"{name}{dot}blocks", f"{name}{dot}scales"


def stored_tensors(kind: Kind, model: ModelConfig) -> Iterator[tuple[str, Shape, bool]]:
    """(name, shape, is uint8) of every tensor of a safetensors folder of this kind, in order."""
    for entry in entries(model):
        for name, shape, packed in stored_as(kind, model, entry):
            if packed:
                E, inputs, outputs = shape
                for part, part_shape in zip(packed_names(kind, name), packed_shapes((E, outputs, inputs)), strict=True):
                    yield part, part_shape, True
            else:
                yield name, shape, False


class SafetensorsSource(Source):
    """Kinds hf, hf-mxfp4 and openai."""

    def __init__(self, path: Path, model: ModelConfig, kind: Kind) -> None:
        super().__init__(path, model)
        self.kind: Kind = kind
        self.places = shards.find_tensors(path)
        expected = {name: (shape, is_uint8) for name, shape, is_uint8 in stored_tensors(kind, model)}
        found = {name: place.shape for name, place in self.places.items()}
        compare_shapes(path, model, {name: shape for name, (shape, _) in expected.items()}, found)
        wrong = [n for n, (_, is_uint8) in expected.items() if is_uint8 != (self.places[n].dtype == torch.uint8)]
        if wrong:
            raise CheckpointError(f"{path}: {wrong[0]} is {self.places[wrong[0]].dtype}, which a checkpoint of kind {kind} does not have")
        self._dtypes = {self.places[n].dtype for n, (_, is_uint8) in expected.items() if not is_uint8}

    @property
    def dtype(self) -> torch.dtype:
        # OpenAI's folders may keep some vectors in float32 beside bfloat16; the widest loses nothing.
        return max(self._dtypes, key=lambda d: (d.itemsize, d == torch.bfloat16))

    def shapes(self) -> dict[str, Shape]:
        return {name: place.shape for name, place in self.places.items()}

    def pieces(self, entry: Entry) -> list[Piece]:
        if not entry.row.per_expert:
            return [Piece(entry)]
        return _pieces_at(self.model, entry, range(0, self.model.num_local_experts, _experts_at_once(self.model, entry)))

    def read(self, piece: Piece) -> Iterator[tuple[Tensor, ...]]:
        entry = piece.entry
        if entry.row.packed and self.kind != "hf":
            yield from ((dequantise(blocks, scales).t(),) for blocks, scales in zip(*self.read_packed(piece), strict=True))
            return
        parts = [self._read(name, piece.experts) for name in self._names(entry)]
        if not entry.row.per_expert:
            if self.kind == "openai" and len(entry.hf_names) > 1:
                parts = list(parts[0].split([shape[0] for shape in entry.row.hf_shape(self.model)]))
            yield tuple(parts)
        else:
            yield from zip(*parts, strict=True)

    def read_packed(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Blocks [n, out, G, 16] and scales [n, out, G] of these experts, as they are stored."""
        names = packed_names(self.kind, self._names(piece.entry)[0])
        blocks, scales = (shards.read(self.path, self.places[n], piece.experts.start, len(piece.experts)) for n in names)
        if scales.max() > LARGEST_FINITE:
            raise CheckpointError(
                f"{self.path / self.places[names[1]].file}: {names[1]} has a scale of {int(scales.max())}; 255 stands for NaN, and above "
                f"{LARGEST_FINITE} there are numbers that bfloat16 cannot hold"
            )
        return blocks, scales

    def _names(self, entry: Entry) -> list[str]:
        return [name for name, _, _ in stored_as(self.kind, self.model, entry)]

    def _read(self, name: str, experts: range) -> Tensor:
        place = self.places[name]
        tensor = shards.read(self.path, place, experts.start, len(experts)) if experts else shards.read(self.path, place)
        self._require_finite(name, tensor)
        return tensor

    def _require_finite(self, name: str, tensor: Tensor) -> None:
        if not is_finite(tensor):
            raise CheckpointError(f"{self.path / self.places[name].file}: {name} has NaN or infinite numbers")


class MegatronSource(Source):
    kind: Kind = "megatron"

    def __init__(self, path: Path, model: ModelConfig) -> None:
        super().__init__(path, model)
        self.files = DistributedReader(path)
        found = {key: tuple(entry.size) for key, entry in self.files.tensors.items()}
        expected = stored_shapes(model)
        # A run's checkpoint has its optimizer beside the weights.
        compare_shapes(path, model, expected, {k: s for k, s in found.items() if k in expected or not k.startswith("optimizer.")})
        self._dtypes = {self.files.tensors[key].properties.dtype for key in expected}
        if len(self._dtypes) > 1:
            raise CheckpointError(f"{path}: weights of several dtypes ({', '.join(sorted(map(str, self._dtypes)))})")

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._dtypes))

    def shapes(self) -> dict[str, Shape]:
        return {key: tuple(self.files.tensors[key].size) for key in stored_shapes(self.model)}

    def pieces(self, entry: Entry) -> list[Piece]:
        """Along the chunks, since each is read whole: several small ones together, a large one alone."""
        if not entry.row.per_expert:
            return [Piece(entry)]
        starts = self.files.chunk_starts(entry.row.stored_key, 1, entry.layer)
        step, together = _experts_at_once(self.model, entry, self.dtype.itemsize), [0]
        for at, end in zip(starts, [*starts[1:], self.model.num_local_experts], strict=True):
            if at and end - together[-1] > step:
                together.append(at)
        return _pieces_at(self.model, entry, together)

    def read(self, piece: Piece) -> Iterator[tuple[Tensor, ...]]:
        row, shape = piece.entry.row, tuple(self.files.tensors[piece.entry.row.stored_key].size)
        lead = ([piece.entry.layer] if row.in_layer else []) + ([piece.experts.start] if row.per_expert else [])
        count = ([1] if row.in_layer else []) + ([len(piece.experts)] if row.per_expert else [])
        stored = self.files.read(row.stored_key, lead + [0] * (len(shape) - len(lead)), count + list(shape[len(count) :]))
        if not is_finite(stored):
            raise CheckpointError(f"{self.path}: {row.stored_key} has NaN or infinite numbers in layer {piece.entry.layer}")
        own = stored[0] if row.in_layer else stored
        yield from (row.to_hf(self.model, x) for x in (own if row.per_expert else [own]))


def is_finite(tensor: Tensor) -> bool:
    """The sum is finite when all numbers are, unless it overflows: only then each is looked at."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def compare_shapes(path: Path, model: ModelConfig, expected: dict[str, Shape], found: dict[str, Shape]) -> None:
    """Raise CheckpointError that lists missing, unexpected and misshaped tensors."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshaped = [f"{n} {list(found[n])} instead of {list(s)}" for n, s in expected.items() if n in found and found[n] != s]
    problems = [("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped)]
    if any(names for _, names in problems):
        words = "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" for kind, names in problems if names
        )
        hint = f" config.json says vocab_size = {model.vocab_size}." if any("embed" in m or "lm_head" in m for m in misshaped) else ""
        raise CheckpointError(f"{path}: the tensors are not those of the model in its config.json: {words}.{hint}")


def open_source(path: Path) -> Source:
    """The checkpoint in this folder, of whatever kind. Raises CheckpointError when it is none of GPT-OSS or not whole."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{path}: no config.json, so no checkpoint that can be converted")
    if (path / MARKER).is_file() or (path / METADATA).is_file():
        torn = why_torn(path)
        if torn:
            raise CheckpointError(f"{path} is torn: {torn}")
        return MegatronSource(path, read_hf_config(config))
    openai = _openai_config(config)
    if openai is not None:
        return SafetensorsSource(path, openai, "openai")
    model, packed = read_hf_config(config), quantization(path)
    if packed not in (None, "mxfp4"):
        raise CheckpointError(f"{config}: quantization_config says {packed!r}; only mxfp4 and plain numbers are read")
    source = SafetensorsSource(path, model, "hf-mxfp4" if packed else "hf")
    check_tokenizer(path, model)
    if len(source._dtypes) > 1:
        raise CheckpointError(f"{path}: weights of several dtypes ({', '.join(sorted(map(str, source._dtypes)))})")
    return source


def _openai_config(file: Path) -> ModelConfig | None:
    """config.json of OpenAI's own layout, which has other words; None for any other. Source: gpt_oss/torch/model.py, ModelConfig."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None  # read_hf_config says what is wrong
    if not isinstance(found, dict) or "model_type" in found or "num_experts" not in found:
        return None
    same = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "sliding_window", "swiglu_limit", "rope_theta",
    )  # fmt: skip
    other = {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "rope_factor": "rope_scaling_factor",
        "rope_original_max_position": "initial_context_length", "rope_beta_slow": "rope_ntk_alpha", "rope_beta_fast": "rope_ntk_beta",
    }  # fmt: skip
    names = {**{name: name for name in same}, **other}
    missing = [theirs for theirs in names.values() if theirs not in found]
    if missing:
        raise CheckpointError(f"{file}: {', '.join(missing)} missing for OpenAI's layout")
    values = {ours: found[theirs] for ours, theirs in names.items()}
    values["max_position_embeddings"] = int(found["initial_context_length"] * found["rope_scaling_factor"])
    try:
        return ModelConfig(**values)
    except ValueError as error:  # pydantic's, with one line a field
        raise CheckpointError(f"{file}: {error}") from error


def check_tokenizer(path: Path, model: ModelConfig) -> None:
    """A tokenizer.json beside the weights has no token that the model has no row for."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    try:
        found = json.loads(file.read_text())
        vocabulary = found["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = max(int(i) for i in (*ids, *(token["id"] for token in found.get("added_tokens", []))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a tokenizer ({type(error).__name__})") from error
    if largest >= model.vocab_size:
        raise CheckpointError(f"{file} has token {largest}, and config.json says vocab_size = {model.vocab_size}: wrong vocabulary")


def token_ids(path: Path) -> dict[str, Any]:
    """eos_token_id and pad_token_id of a folder's config.json, for the config.json of another."""
    found = json.loads((path / "config.json").read_text())
    return {name: found.get(name) for name in ("eos_token_id", "pad_token_id")}
