"""Which piece of the trainer's model is not what GPT-OSS computes? Each is compared with the reference, given its own inputs.

In: what was seen at the borders between a model's pieces during one pass, its exported weights, the tokens. Out: one PieceGap for each
piece of each layer. Because the reference gets the very inputs that the piece got, a fault does not spread: only the piece that has it
differs, and no second model is needed, only one layer's weights at a time. A rank must hold the whole model; experts may be divided.

A piece is at fault when it is further from the reference than its dtype's rounding explains, or when what it differs by is what a known
fault would change (a matched filter: in bfloat16 a small fault hides in the size of the rounding, but not in its direction).

Shape legend: as in reference.py; N predicted tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.model import reference
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.rl.parity import PieceGap
from megatron_gptoss.types import MicroBatch

Seen = dict[tuple[int, str], list[Tensor]]  # (layer, border) -> a tensor [T, ...] for each microbatch
END = -1  # the "layer" of what comes after them

# Relative error of a piece, norm over norm. Pieces sum up to thousands of products and round several times, each time by half an epsilon.
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@contextmanager
def watched(model: GptOssModel) -> Iterator[Seen]:
    """Keeps what passes between the pieces inside the block. Passes must be forward only."""
    seen: Seen = defaultdict(list)
    handles = []

    def watch(module: Any, layer: int, into: tuple[str, ...] = (), out: str = "") -> None:
        def see(_module: Any, inputs: tuple, output: Any) -> None:
            for name, x in zip(into, inputs, strict=False):
                seen[layer, name].append(x.detach())
            if out:
                seen[layer, out].append((output[0] if isinstance(output, tuple) else output).detach())

        handles.append(module.register_forward_hook(see))

    for block in model.decoder.layers:
        layer: Any = block
        index = layer.layer_number - 1
        watch(layer.input_layernorm, index, into=("in",))
        watch(layer.self_attention.core_attention, index, into=("q", "k", "v"), out="seen")
        watch(layer.pre_mlp_layernorm, index, into=("middle",), out="normed")
        watch(layer.mlp.router, index, out="probs")
        watch(layer.mlp, index, out="experts")
    watch(model.decoder.final_layernorm, END, into=("in",), out="normed")
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _size(x: float) -> float:
    """For `max`, which lets a nan in second place go."""
    return math.inf if math.isnan(x) else x


@dataclass
class Difference:
    """Of one piece, added up over microbatches."""

    error: float = 0.0  # |found - expected|^2
    size: float = 0.0  # |expected|^2
    largest: float = 0.0
    count: int = 0
    faults: dict[str, list[float]] = field(default_factory=dict)  # fault -> [|change|^2, (found - expected) . change]

    def add(self, found: Tensor, right: Callable[[str], Tensor], faults: Iterable[str] = ()) -> None:
        """`right(fault)`: what the reference computes with that fault; "none" is right."""
        expected = right("none")
        off = found.reshape(expected.shape).float() - expected
        self.error += float(off.square().sum())
        self.size += float(expected.square().sum())
        self.largest = max(self.largest, float(off.abs().max()), key=_size) if off.numel() else self.largest
        self.count += off.numel()
        for fault in faults:
            change = right(fault) - expected
            sums = self.faults.setdefault(fault, [0.0, 0.0])
            sums[0] += float(change.square().sum())
            sums[1] += float((off * change).sum())

    def fault(self) -> str:
        """The fault that explains the difference best; "" when none does."""
        found = []
        for name, (change, along) in self.faults.items():
            if change <= 0.0 or not 0.7 < along / change < 1.3:
                continue
            rest = max(self.error - along**2 / change, 0.0)  # what is left is rounding: its direction is random
            if math.sqrt(rest / self.count) < 0.1 * math.sqrt(change):
                found.append((self.error - 2 * along + change, name))
        return min(found)[1] if found else ""


def compare(
    seen: Seen,
    tensors: Iterable[tuple[str, Tensor]],
    model: ModelConfig,
    batches: Sequence[MicroBatch],
    logp: Sequence[Tensor],
    temperature: float,
    head_limit: float,
) -> list[PieceGap]:
    """`tensors`: exported weights, in the weight map's order. `logp`: the trainer's log-probs of each microbatch. `head_limit`: nats."""
    gaps: list[PieceGap] = []
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors:
        weights[name] = tensor
        if name == "model.embed_tokens.weight":
            gaps += _gaps(0, model, {"embedding": _embedding(seen, weights, batches)}, seen)
        elif name.endswith("mlp.experts.down_proj_bias"):  # the last of a layer
            layer = int(name.split(".")[2])
            gaps += _gaps(layer, model, _layer(seen, weights, model, layer, batches), seen)
            weights.clear()
    final = _final(seen, weights, model, batches, logp, temperature)
    gaps += _gaps(END, model, {"final norm": final["final norm"]}, seen)
    head = final["head"]
    gaps.append(PieceGap(END, "head", head.largest, head_limit, _head_fault(head, head_limit)))
    return gaps


def _head_fault(head: Difference, limit: float) -> str:
    return head.fault() if head.largest > limit else ""


def _gaps(layer: int, model: ModelConfig, found: dict[str, Difference], seen: Seen) -> list[PieceGap]:
    dtype = next(iter(seen.values()))[0].dtype
    limit = LIMIT.get(dtype, LIMIT[torch.float32])
    return [PieceGap(layer, piece, math.sqrt(d.error / d.size) if d.size else 0.0, limit, d.fault()) for piece, d in found.items()]


def _rows(seen: Seen, layer: int, border: str, j: int) -> Tensor:
    """[T, ...] of microbatch j; Megatron has a batch of one between tokens and features."""
    x = seen[layer, border][j]
    return x.squeeze(1) if x.ndim == 3 and x.shape[1] == 1 and border not in ("q", "k", "v") else x


@torch.no_grad()
def _embedding(seen: Seen, weights: dict[str, Tensor], batches: Sequence[MicroBatch]) -> Difference:
    found = Difference()
    for j, batch in enumerate(batches):
        table = weights["model.embed_tokens.weight"]
        ids = batch.tokens_T.to(table.device)
        found.add(_rows(seen, 0, "in", j), lambda _, table=table, ids=ids: table[ids].float())
    return found


@torch.no_grad()
def _layer(seen: Seen, weights: dict[str, Tensor], model: ModelConfig, layer: int, batches: Sequence[MicroBatch]) -> dict[str, Difference]:
    found: dict[str, Difference] = defaultdict(Difference)
    name, eps = reference.LAYER.format(layer), model.rms_norm_eps
    for j, batch in enumerate(batches):
        inside, q, k, v, out, middle, normed, probs, moe = (
            _rows(seen, layer, border, j) for border in ("in", "q", "k", "v", "seen", "middle", "normed", "probs", "experts")
        )
        bounds = batch.cu_seqlens.tolist()
        position_T = batch.positions_T.to(q.device)
        q0, k0, v0 = reference.project(model, weights, layer, reference.norm(inside, weights[f"{name}input_layernorm.weight"], eps))

        def rotated(fault: str, q0=q0, k0=k0, position_T=position_T) -> Tensor:
            turn = reference.rotation(model, position_T, fault)
            return torch.cat([reference.rotate(x, *turn).flatten(1) for x in (q0, k0)], dim=1)

        def attended(fault: str, q=q, k=k, v=v, bounds=bounds) -> Tensor:
            return reference.attention(model, layer, q, k, v, weights[f"{name}self_attn.sinks"], bounds, fault)

        def routed(fault: str, normed=normed) -> Tensor:
            return reference.router(model, normed, weights[f"{name}mlp.router.weight"], weights[f"{name}mlp.router.bias"], fault)

        def expert_output(fault: str, normed=normed, probs=probs) -> Tensor:
            return reference.experts(model, weights, layer, normed, probs, fault)

        after = _rows(seen, *((layer + 1, "in") if layer + 1 < model.num_hidden_layers else (END, "in")), j)
        projected = inside.float() + reference.linear(out, weights, f"{name}self_attn.o_proj")
        norm_T = reference.norm(middle, weights[f"{name}post_attention_layernorm.weight"], eps)
        found["projection"].add(v, lambda _, v0=v0: v0)
        found["rope"].add(torch.cat([q.flatten(1), k.flatten(1)], dim=1), rotated, reference.FAULTS["rope"])
        found["attention"].add(out, attended, reference.FAULTS["attention"] if layer % 2 == 0 else ("no-sinks",))
        found["attention output"].add(middle, lambda _, x=projected: x)
        found["norm"].add(normed, lambda _, x=norm_T: x)
        found["router"].add(probs, routed, reference.FAULTS["router"])
        found["experts"].add(moe, expert_output, reference.FAULTS["experts"])
        found["residual"].add(after, lambda _, x=middle.float() + moe.float(): x)
    return found


@torch.no_grad()
def _final(
    seen: Seen, weights: dict[str, Tensor], model: ModelConfig, batches: Sequence[MicroBatch], logp: Sequence[Tensor], temperature: float
) -> dict[str, Difference]:
    found: dict[str, Difference] = defaultdict(Difference)
    for j, batch in enumerate(batches):
        inside, normed = (_rows(seen, END, border, j) for border in ("in", "normed"))
        norm_TC = reference.norm(inside, weights["model.norm.weight"], model.rms_norm_eps)
        found["final norm"].add(normed, lambda _, x=norm_TC: x)
        hidden_NC, target_N = normed[batch.predict_N.to(normed.device)], batch.target_N.to(normed.device)

        def scored(fault: str, hidden_NC=hidden_NC, target_N=target_N, batch=batch) -> Tensor:
            kept = 1.0 if fault == "temperature" else temperature
            logp_N = reference.head(hidden_NC, weights["lm_head.weight"], target_N, kept)
            parts = logp_N.split(torch.bincount(batch.sample_N, minlength=len(batch.names)).tolist())
            return torch.cat([reference.shifted(part, fault) if len(part) else part for part in parts])

        known = [f for f in reference.FAULTS["head"] if f != "temperature" or temperature != 1.0]
        found["head"].add(logp[j].to(normed.device), scored, known)
    return found
