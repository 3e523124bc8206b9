"""Hugging Face tensors <-> Megatron parameters: one table, read in both directions.

In: a model on this rank and full Hugging Face tensors (or the other way round). Out: filled parameters (or full tensors,
gathered over tensor-, expert- and pipeline-parallel ranks). The table also names each tensor in Megatron's distributed checkpoints, in
OpenAI's own layout, and says which are published as MXFP4: convert.py has no names of its own.
Nothing is guessed from shapes: GPT-OSS's expert matrices are square, so a forgotten transpose would pass every shape check.
It reads and writes no files (hf_files.py), and what MXFP4 is stands in mxfp4.py.

Shape legend: L layers, C hidden size, I expert width, E experts, K kv heads, G query heads per kv head, H = K * G query heads, D head dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One Megatron parameter (per layer) and the Hugging Face tensors it is made of."""

    hf: tuple[str, ...]  # names, {layer} from 0; expert tensors hold all experts along their first axis
    hf_shape: Callable[[ModelConfig], tuple[Shape, ...]]  # full shapes, expert axis included
    megatron: str  # name, {layer} from 0; expert parameters hold this rank's experts along their first axis
    to_megatron: Callable[..., Tensor]  # (model, *tensors) -> tensor; of one expert when per_expert
    to_hf: Callable[[ModelConfig, Tensor], tuple[Tensor, ...]]  # its inverse; of one expert, or of a stack of them
    tensor_axis: int | None = None  # axis of the Megatron tensor that tensor-parallel ranks divide; None: each has all of it
    per_expert: bool = False  # experts are divided over expert-parallel ranks, and whole there: no tensor_axis
    turned: bool = False  # Megatron (and vLLM) store a matrix with its two axes the other way round
    openai: str = ""  # OpenAI's own name; the Hugging Face tensors lie in it one after another along the first axis
    # Published as MXFP4, name + "_blocks" and "_scales": each expert's matrix transposed, blocks along its rows. None: it is not.
    # The function puts these rows in Megatron's order: to_megatron(m, x) == packed(x.t()), so packed bytes can be moved instead of numbers.
    packed: Callable[[Tensor], Tensor] | None = None
    key: str = ""  # in distributed checkpoints; empty: `megatron` without the layer's number

    @property
    def stored_key(self) -> str:
        """One tensor for all layers (a first axis) and experts (a second one), as model.sharded_state_dict makes it."""
        return self.key or self.megatron.replace(".{layer}.", ".")

    @property
    def in_layer(self) -> bool:
        return "{layer}" in self.megatron


def _same(_model: ModelConfig, x: Tensor) -> Tensor:
    return x


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _same_back(_model: ModelConfig, x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def _join_qkv(model: ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H*D, ...], [K*D, ...], [K*D, ...] -> [(H + 2K) * D, ...]: for each kv head its G query heads, its key, its value."""
    K, rest = model.num_key_value_heads, q.shape[1:]
    return torch.cat([x.reshape(K, -1, *rest) for x in (q, k, v)], dim=1).reshape(-1, *rest)


def _split_qkv(model: ModelConfig, qkv: Tensor) -> tuple[Tensor, ...]:
    K, D, rest = model.num_key_value_heads, model.head_dim, qkv.shape[1:]
    G = model.num_attention_heads // K
    q, k, v = qkv.reshape(K, (G + 2) * D, *rest).split([G * D, D, D], dim=1)
    return tuple(x.reshape(-1, *rest) for x in (q, k, v))


def _halves_from_interleaved(x: Tensor) -> Tensor:
    """First axis gate, up, gate, up, ... -> all gates, then all ups."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)  # four times as fast as torch.cat of two strided halves


def _interleaved_from_halves(x: Tensor, axis: int) -> Tensor:
    """`axis` counts from the last, so that a stack of experts is as good as one."""
    return x.unflatten(axis, (2, -1)).transpose(axis - 1, axis).flatten(axis - 1, axis)


def _gate_up(_model: ModelConfig, x_C2I: Tensor) -> Tensor:
    """[C, 2I], used as x @ W with gate and up interleaved -> [2I, C], used as x @ W.T with gate above up."""
    return _halves_from_interleaved(x_C2I.t())


def _gate_up_back(_model: ModelConfig, w_2IC: Tensor) -> tuple[Tensor, ...]:
    return (_interleaved_from_halves(w_2IC, -2).transpose(-2, -1),)


def _gate_up_bias(_model: ModelConfig, x_2I: Tensor) -> Tensor:
    return _halves_from_interleaved(x_2I)


def _gate_up_bias_back(_model: ModelConfig, b_2I: Tensor) -> tuple[Tensor, ...]:
    return (_interleaved_from_halves(b_2I, -1),)


def _transposed(_model: ModelConfig, x: Tensor) -> Tensor:
    return x.t()


def _transposed_back(_model: ModelConfig, x: Tensor) -> tuple[Tensor, ...]:
    return (x.transpose(-2, -1),)


def _vector(size: Callable[[ModelConfig], int]) -> Callable[[ModelConfig], tuple[Shape, ...]]:
    return lambda m: ((size(m),),)


def _qkv_shape(*rest: str) -> Callable[[ModelConfig], tuple[Shape, ...]]:
    def shapes(m: ModelConfig) -> tuple[Shape, ...]:
        tail = tuple(getattr(m, name) for name in rest)
        heads = (m.num_attention_heads, m.num_key_value_heads, m.num_key_value_heads)
        return tuple((count * m.head_dim, *tail) for count in heads)

    return shapes


HF, MG, OA, KEY = "model.layers.{layer}.", "decoder.layers.{layer}.", "block.{layer}.", "decoder.layers."
HF_EXPERTS, MG_EXPERTS, KEY_EXPERTS = HF + "mlp.experts.", MG + "mlp.experts.", KEY + "mlp.experts.experts."
QKV_WEIGHTS = tuple(HF + f"self_attn.{x}_proj.weight" for x in "qkv")
QKV_BIASES = tuple(HF + f"self_attn.{x}_proj.bias" for x in "qkv")

BEFORE_LAYERS = (
    Row(("model.embed_tokens.weight",), lambda m: ((m.vocab_size, m.hidden_size),),
        "embedding.word_embeddings.weight", _same, _same_back, tensor_axis=0, openai="embedding.weight"),
)  # fmt: skip

IN_EACH_LAYER = (
    Row((HF + "input_layernorm.weight",), _vector(lambda m: m.hidden_size),
        MG + "input_layernorm.weight", _same, _same_back,
        openai=OA + "attn.norm.scale", key=KEY + "self_attention.linear_qkv.layer_norm_weight"),
    Row(QKV_WEIGHTS, _qkv_shape("hidden_size"),
        MG + "self_attention.linear_qkv.weight", _join_qkv, _split_qkv, tensor_axis=0, openai=OA + "attn.qkv.weight"),
    Row(QKV_BIASES, _qkv_shape(),
        MG + "self_attention.linear_qkv.bias", _join_qkv, _split_qkv, tensor_axis=0, openai=OA + "attn.qkv.bias"),
    Row((HF + "self_attn.sinks",), _vector(lambda m: m.num_attention_heads),
        MG + "self_attention.core_attention.softmax_offset", _same, _same_back, tensor_axis=0, openai=OA + "attn.sinks"),
    Row((HF + "self_attn.o_proj.weight",), lambda m: ((m.hidden_size, m.num_attention_heads * m.head_dim),),
        MG + "self_attention.linear_proj.weight", _same, _same_back, tensor_axis=1, openai=OA + "attn.out.weight"),
    Row((HF + "self_attn.o_proj.bias",), _vector(lambda m: m.hidden_size),
        MG + "self_attention.linear_proj.bias", _same, _same_back, openai=OA + "attn.out.bias"),
    Row((HF + "post_attention_layernorm.weight",), _vector(lambda m: m.hidden_size),
        MG + "pre_mlp_layernorm.weight", _same, _same_back,
        openai=OA + "mlp.norm.scale", key=KEY + "mlp.linear_fc1.layer_norm_weight"),
    Row((HF + "mlp.router.weight",), lambda m: ((m.num_local_experts, m.hidden_size),),
        MG + "mlp.router.weight", _same, _same_back, openai=OA + "mlp.gate.weight"),
    Row((HF + "mlp.router.bias",), _vector(lambda m: m.num_local_experts),
        MG + "mlp.router.bias", _same, _same_back, openai=OA + "mlp.gate.bias"),
    Row((HF_EXPERTS + "gate_up_proj",), lambda m: ((m.num_local_experts, m.hidden_size, 2 * m.intermediate_size),),
        MG_EXPERTS + "linear_fc1.weight", _gate_up, _gate_up_back, per_expert=True, turned=True,
        openai=OA + "mlp.mlp1_weight", packed=_halves_from_interleaved, key=KEY_EXPERTS + "linear_fc1.weight"),
    Row((HF_EXPERTS + "gate_up_proj_bias",), lambda m: ((m.num_local_experts, 2 * m.intermediate_size),),
        MG_EXPERTS + "linear_fc1.bias", _gate_up_bias, _gate_up_bias_back, per_expert=True,
        openai=OA + "mlp.mlp1_bias", key=KEY_EXPERTS + "linear_fc1.bias"),
    Row((HF_EXPERTS + "down_proj",), lambda m: ((m.num_local_experts, m.intermediate_size, m.hidden_size),),
        MG_EXPERTS + "linear_fc2.weight", _transposed, _transposed_back, per_expert=True, turned=True,
        openai=OA + "mlp.mlp2_weight", packed=_as_it_is, key=KEY_EXPERTS + "linear_fc2.weight"),
    Row((HF_EXPERTS + "down_proj_bias",), lambda m: ((m.num_local_experts, m.hidden_size),),
        MG_EXPERTS + "linear_fc2.bias", _same, _same_back, per_expert=True,
        openai=OA + "mlp.mlp2_bias", key=KEY_EXPERTS + "linear_fc2.bias"),
)  # fmt: skip

AFTER_LAYERS = (
    Row(("model.norm.weight",), _vector(lambda m: m.hidden_size),
        "decoder.final_layernorm.weight", _same, _same_back, openai="norm.scale"),
    Row(("lm_head.weight",), lambda m: ((m.vocab_size, m.hidden_size),),
        "output_layer.weight", _same, _same_back, tensor_axis=0, openai="unembedding.weight"),
)  # fmt: skip

# Objects without content, one a layer, that Megatron's linear layers add to a distributed checkpoint and ask for when they load it.
EXTRA_STATES = (KEY + "self_attention.linear_qkv._extra_state", KEY + "self_attention.linear_proj._extra_state")


@dataclass(frozen=True)
class Entry:
    """A row for one layer."""

    row: Row
    layer: int

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name.format(layer=self.layer) for name in self.row.hf)

    def megatron_name(self) -> str:
        return self.row.megatron.format(layer=self.layer)

    @property
    def openai_name(self) -> str:
        return self.row.openai.format(layer=self.layer)


def entries(model: ModelConfig) -> list[Entry]:
    """The table for all layers, in the order in which export_hf walks it."""
    table = [Entry(row, 0) for row in BEFORE_LAYERS]
    table += [Entry(row, layer) for layer in range(model.num_hidden_layers) for row in IN_EACH_LAYER]
    return table + [Entry(row, 0) for row in AFTER_LAYERS]


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name -> full shape of every Hugging Face tensor, in export order."""
    return {name: shape for e in entries(model) for name, shape in zip(e.hf_names, e.row.hf_shape(model), strict=True)}


def turned_names(model: ModelConfig) -> frozenset[str]:
    """Hugging Face tensors that are cheapest to move with their last two axes swapped: both ends store them so."""
    return frozenset(name for e in entries(model) if e.row.turned for name in e.hf_names)


def megatron_shape(model: ModelConfig, row: Row) -> Shape:
    """The whole tensor of one layer, over all ranks: [experts, ...] when per_expert."""
    shapes = row.hf_shape(model)
    parts = [torch.empty(shape[1:] if row.per_expert else shape, device="meta") for shape in shapes]
    one = tuple(row.to_megatron(model, *parts).shape)
    return (shapes[0][0], *one) if row.per_expert else one


def stored_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Key -> shape of every tensor of the weights in a distributed checkpoint: layers stacked along a first axis."""
    rows = (*BEFORE_LAYERS, *IN_EACH_LAYER, *AFTER_LAYERS)
    stacked = {True: (model.num_hidden_layers,), False: ()}
    return {row.stored_key: stacked[row.in_layer] + megatron_shape(model, row) for row in rows}


def load_hf(module: nn.Module, model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill this rank's parameters from full Hugging Face tensors, in any order, cast to the parameters' dtype.

    `module` is a GptOssModel or a wrapper around one. Every rank reads all tensors and keeps its layers, its experts and its part of what
    tensor-parallel ranks divide; there is no communication.
    Raises CheckpointError that lists missing, unexpected and misshaped names; parameters may then be half filled.
    """
    inner, parameters = _unwrap(module)
    rank_of_tp, num_tp = inner.pg_collection.tp.rank(), inner.pg_collection.tp.size()
    shapes = hf_shapes(model)
    entry_of = {name: entry for entry in entries(model) for name in entry.hf_names}
    first_expert, num_experts = _local_experts(inner, model)
    waiting: dict[str, Tensor] = {}  # parts of a parameter whose other parts have not come yet
    seen, unexpected, misshaped = set(), [], []

    for name, tensor in tensors:
        if name not in shapes:
            unexpected.append(name)
            continue
        seen.add(name)
        if tuple(tensor.shape) != shapes[name]:
            misshaped.append(f"{name} {list(tensor.shape)} instead of {list(shapes[name])}")
            continue
        entry = entry_of[name]
        waiting[name] = tensor
        if all(part in waiting for part in entry.hf_names):
            parts = [waiting.pop(part) for part in entry.hf_names]
            if entry.megatron_name() in parameters:  # on this pipeline stage
                _fill(parameters, model, entry, parts, first_expert, num_experts, (rank_of_tp, num_tp))

    problems = [("missing", [name for name in shapes if name not in seen]), ("unexpected", unexpected), ("misshaped", misshaped)]
    if any(names for _, names in problems):
        raise CheckpointError("the weights do not fit the model: " + "; ".join(_list(kind, names) for kind, names in problems if names))


@torch.no_grad()
def _fill(
    parameters: dict[str, Tensor], model: ModelConfig, entry: Entry, parts: list[Tensor], first: int, count: int, tp: tuple[int, int]
) -> None:
    """`first`, `count`: this rank's experts. `tp`: its place among the tensor-parallel ranks, and their number."""
    if not entry.row.per_expert:
        full, axis = entry.row.to_megatron(model, *parts), entry.row.tensor_axis
        parameters[entry.megatron_name()].copy_(full if axis is None else full.chunk(tp[1], axis)[tp[0]])
        return
    for expert in range(count):  # whole on their rank, whatever the tensor-parallel size
        own = [part[first + expert] for part in parts]
        parameters[entry.megatron_name()][expert].copy_(entry.row.to_megatron(model, *own))


def export_hf(
    module: nn.Module,
    model: ModelConfig,
    *,
    value: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    contiguous: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Full Hugging Face tensors: contiguous, detached, in the parameters' dtype and on their device.

    `value` picks what is exported for a parameter, for instance its gradient (`lambda p: p.grad`). A tensor that needs no rearrangement
    shares memory with the model: copy it before the next optimizer step if it must stay. Without `contiguous` more of them do: what is only
    turned (`turned_names`) stays as it lies, for a receiver that copies it anyway.

    Collective over the tensor-, expert- and pipeline-parallel groups: every rank must walk through the whole iterator, and every rank
    gets every tensor.
    """
    inner, parameters = _unwrap(module)
    groups = inner.pg_collection
    stage = _Stages(groups.pp, entries(model), parameters, like=value(next(iter(parameters.values()))))
    for entry in entries(model):
        row, full = entry.row, ()
        with torch.no_grad():
            if entry.megatron_name() in parameters:  # on this pipeline stage
                own = value(parameters[entry.megatron_name()]).detach()
                if row.per_expert:
                    own = _gather(own, groups.ep)
                elif row.tensor_axis is not None:
                    own = _gather(own, groups.tp, row.tensor_axis)
                full = row.to_hf(model, own)
            if contiguous or groups.pp.size() > 1:
                full = tuple(tensor.contiguous() for tensor in full)
            full = stage.share(entry, model, full)
        yield from zip(entry.hf_names, full, strict=True)


def _gather(local: Tensor, group: Any, axis: int = 0) -> Tensor:
    """Equal parts along an axis, one of each rank -> the whole, in rank order."""
    if group.size() == 1:
        return local
    first = local.movedim(axis, 0).contiguous()
    full = first.new_empty(first.shape[0] * group.size(), *first.shape[1:])
    dist.all_gather_into_tensor(full, first, group=group)
    return full.movedim(0, axis)


class _Stages:
    """Hands each pipeline stage's tensors to the others, all of which have to ask for the same entries in the same order."""

    def __init__(self, group: Any, table: list[Entry], parameters: dict[str, Tensor], like: Tensor) -> None:
        self.group, self.like = group, like
        if group.size() > 1:
            mine = [entry.megatron_name() for entry in table if entry.megatron_name() in parameters]
            held: list[list[str]] = [[] for _ in range(group.size())]
            dist.all_gather_object(held, mine, group=group)
            self.owner = {name: stage for stage, names in enumerate(held) for name in names}

    def share(self, entry: Entry, model: ModelConfig, full: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`full` on the stage that holds the entry, () elsewhere -> the tensors on all stages."""
        if self.group.size() == 1:
            return full
        full = full or tuple(self.like.new_empty(shape) for shape in entry.row.hf_shape(model))
        source = dist.get_global_rank(self.group, self.owner[entry.megatron_name()])
        for tensor in full:
            dist.broadcast(tensor, source, group=self.group)
        return full


def _local_experts(inner: Any, model: ModelConfig) -> tuple[int, int]:
    """(global index of this rank's first expert, how many it has)."""
    group = inner.pg_collection.ep
    count = model.num_local_experts // group.size()
    return group.rank() * count, count


def _unwrap(module: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    """The model inside DistributedDataParallel and other wrappers, and its parameters by GPTModel's names, layers counted over all pipeline
    stages."""
    inner: Any = module
    while not hasattr(inner, "pg_collection") or not hasattr(inner, "decoder"):
        if not hasattr(inner, "module"):
            raise TypeError(f"{type(module).__name__} does not hold a GptOssModel")
        inner = inner.module
    first = inner.decoder.layers[0].layer_number - 1
    if not first:
        return inner, dict(inner.named_parameters())
    return inner, {_counted_from(first, name): parameter for name, parameter in inner.named_parameters()}


def _counted_from(first: int, name: str) -> str:
    """decoder.layers.0.x on a stage whose first layer is `first` -> its name in the whole model."""
    before, layers, after = name.partition("decoder.layers.")
    if not layers:
        return name
    index, dot, rest = after.partition(".")
    return f"{before}{layers}{first + int(index)}{dot}{rest}"


def _list(kind: str, names: list[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} {kind}: {', '.join(names[:shown])}{more}"
