"""What GPT-OSS computes, in plain PyTorch: the model that others are held against.

In: token ids, and weights under Hugging Face's names and shapes, in any dtype. Out: log-probs, and every piece of a layer as a function of
its own inputs, so that a piece of another implementation can be judged alone, given what it was given. Everything is float32, nothing is
fused, cached or divided over ranks; it shares no code with the Megatron model, which is what makes it worth comparing with. Not fast: it
is for the self-test, for tools and for tests.

`fault` computes a piece wrong in one known way. A piece that errs like its faulty twin is explained by it.

Source: openai/gpt-oss torch/model.py; where Hugging Face's modeling_gpt_oss.py differs only in layout, its layout.

Shape legend: T tokens of packed sequences, C hidden size, H query heads, K kv heads, D head dim, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_gptoss.config.schema import ModelConfig

# Piece -> the ways in which it can be computed wrong here.
FAULTS: dict[str, tuple[str, ...]] = {
    "rope": ("yarn", "yarn-rounded"),
    "attention": ("no-sinks", "window", "window-short", "no-window"),
    "router": ("router-bias",),
    "experts": ("gate-up",),
    "head": ("temperature", "shifted", "shifted-early"),
}
LAYER = "model.layers.{}."
HEAD_TOKENS = 256  # whose logits exist at once


def norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    x_TC = x_TC.float()
    return x_TC * torch.rsqrt(x_TC.square().mean(-1, keepdim=True) + eps) * weight_C.float()


def linear(x_TC: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return x_TC.float() @ weights[f"{name}.weight"].float().t() + weights[f"{name}.bias"].float()


def project(model: ModelConfig, weights: Mapping[str, Tensor], layer: int, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normed hidden states -> q_THD, k_TKD, v_TKD, not yet rotated."""
    name = LAYER.format(layer) + "self_attn."
    q, k, v = (linear(x_TC, weights, f"{name}{x}_proj").unflatten(-1, (-1, model.head_dim)) for x in "qkv")
    return q, k, v


def rotation(model: ModelConfig, position_T: Tensor, fault: str = "none") -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, D / 2] of YaRN. Its borders are not rounded; "yarn-rounded" does it, "yarn" is plain RoPE."""
    D, base = model.head_dim, model.rope_theta
    plain = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=position_T.device) / D)
    if fault == "yarn":
        frequency, factor = plain, 1.0
    else:

        def dimension(turns: float) -> float:
            """Where a dimension makes so many turns over the original context."""
            return D * math.log(model.rope_original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension(model.rope_beta_fast), dimension(model.rope_beta_slow)
        if fault == "yarn-rounded":
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        ramp = ((torch.arange(D // 2, device=plain.device) - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: fast, left alone
        frequency = plain * (1 - ramp) + plain / model.rope_factor * ramp
        factor = 0.1 * math.log(model.rope_factor) + 1.0 if model.rope_factor > 1 else 1.0
    angle = position_T.double()[:, None, None] * frequency
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_THD.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def window_of(model: ModelConfig, layer: int, fault: str = "none") -> int | None:
    """Keys that a query of this layer sees, itself included; None: all before it."""
    wrong = {"window": 1, "window-short": -1}.get(fault, 0)
    return None if layer % 2 or fault == "no-window" else model.sliding_window + wrong


def attention(
    model: ModelConfig,
    layer: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sinks_H: Tensor,
    bounds: Sequence[int],
    fault: str = "none",
) -> Tensor:
    """[T, H D]: causal inside each sequence [bounds_i, bounds_i+1). The sink is one more logit, which carries no value."""
    H, K = model.num_attention_heads, model.num_key_value_heads
    window, outputs = window_of(model, layer, fault), []
    for first, last in pairwise(bounds):
        q, k, v = (x[first:last].float().transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
        k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
        score_HTT = q @ k.transpose(1, 2) / math.sqrt(model.head_dim)
        place = torch.arange(last - first, device=q.device)
        distance_TT = place[:, None] - place
        hidden_TT = distance_TT < 0 if window is None else (distance_TT < 0) | (distance_TT >= window)
        score_HTT = score_HTT.masked_fill(hidden_TT, -math.inf)
        if fault != "no-sinks":
            score_HTT = torch.cat([score_HTT, sinks_H.float()[:, None, None].expand(H, last - first, 1)], dim=-1)
        weight_HTT = score_HTT.softmax(-1)[..., : last - first]
        outputs.append((weight_HTT @ v).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def router(model: ModelConfig, x_TC: Tensor, weight_EC: Tensor, bias_E: Tensor, fault: str = "none") -> Tensor:
    """[T, E]: softmax over the logits of the chosen experts, 0 for the others."""
    logit_TE = x_TC.float() @ weight_EC.float().t()
    if fault != "router-bias":
        logit_TE = logit_TE + bias_E.float()
    # A stable sort: of equal logits the lower expert wins, as the trainer has it.
    chosen = logit_TE.sort(dim=-1, descending=True, stable=True).indices[:, : model.num_experts_per_tok]
    return torch.zeros_like(logit_TE).scatter(1, chosen, logit_TE.gather(1, chosen).softmax(-1))


def experts(model: ModelConfig, weights: Mapping[str, Tensor], layer: int, x_TC: Tensor, prob_TE: Tensor, fault: str = "none") -> Tensor:
    """[T, C]: sum over the chosen experts of probability times (up + 1) gate sigmoid(1.702 gate), projected down."""
    name = LAYER.format(layer) + "mlp.experts."
    x_TC, limit = x_TC.float(), model.swiglu_limit
    result = torch.zeros_like(x_TC)
    for e in range(model.num_local_experts):
        tokens = prob_TE[:, e].nonzero()[:, 0]
        if not len(tokens):
            continue
        both = x_TC[tokens] @ weights[f"{name}gate_up_proj"][e].float() + weights[f"{name}gate_up_proj_bias"][e].float()
        gate, up = both[:, ::2], both[:, 1::2]
        if fault == "gate-up":
            gate, up = up, gate
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ weights[f"{name}down_proj"][e].float()
        y = y + weights[f"{name}down_proj_bias"][e].float()
        result.index_add_(0, tokens, y * prob_TE[tokens, e, None].float())
    return result


def head(hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """[N]: log-probs of the targets, nats."""
    logit_NV = hidden_NC.float() @ weight_VC.float().t() / temperature
    return logit_NV.gather(1, target_N[:, None])[:, 0] - logit_NV.logsumexp(-1)


@torch.no_grad()
def log_probs_of(
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    fault: str = "none",
) -> list[Tensor]:
    """float32 [length - 1] for each sequence: log-prob of every token but the first, on the weights' device. All sequences go through a
    layer before the next one is asked for, so `weights` may read them from a disk. `fault`: one of FAULTS.

    "temperature" leaves the temperature out; "shifted" gives each token the log-prob of the one before it, and the first one its own;
    "shifted-early" that of the one after it.
    """
    if fault != "none" and not any(fault in known for known in FAULTS.values()):
        raise ValueError(f"unknown fault {fault!r}; one of {', '.join(f for known in FAULTS.values() for f in known)}")
    lengths = [len(ids) for ids in sequences]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    embedding = weights["model.embed_tokens.weight"]
    id_T = torch.tensor([token for ids in sequences for token in ids], device=embedding.device)
    cos, sin = rotation(model, torch.cat([torch.arange(n, device=id_T.device) for n in lengths]), fault)
    x_TC = embedding[id_T].float()
    for layer in range(model.num_hidden_layers):
        name = LAYER.format(layer)
        q, k, v = project(model, weights, layer, norm(x_TC, weights[f"{name}input_layernorm.weight"], model.rms_norm_eps))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = attention(model, layer, q, k, v, weights[f"{name}self_attn.sinks"], bounds, fault)
        x_TC = x_TC + linear(seen, weights, f"{name}self_attn.o_proj")
        y_TC = norm(x_TC, weights[f"{name}post_attention_layernorm.weight"], model.rms_norm_eps)
        prob_TE = router(model, y_TC, weights[f"{name}mlp.router.weight"], weights[f"{name}mlp.router.bias"], fault)
        x_TC = x_TC + experts(model, weights, layer, y_TC, prob_TE, fault)
    x_TC = norm(x_TC, weights["model.norm.weight"], model.rms_norm_eps)
    output_VC, divisor = weights["lm_head.weight"].float(), 1.0 if fault == "temperature" else temperature
    found = []
    for first, last in pairwise(bounds):
        predicted = range(first, last - 1, HEAD_TOKENS)
        parts = [head(x_TC[t : min(t + HEAD_TOKENS, last - 1)], output_VC, id_T[t + 1 : min(t + HEAD_TOKENS, last - 1) + 1], divisor)
                 for t in predicted]  # fmt: skip
        found.append(shifted(torch.cat(parts) if parts else x_TC.new_zeros(0), fault))
    return found


def log_probs(
    weights: Mapping[str, Tensor], model: ModelConfig, token_ids: Sequence[int], *, temperature: float = 1.0, fault: str = "none"
) -> Tensor:
    """log_probs_of one sequence."""
    return log_probs_of(weights, model, [token_ids], temperature=temperature, fault=fault)[0]


def shifted(logp_N: Tensor, fault: str) -> Tensor:
    """Log-probs of one sequence that lie one place too late or too early; the token at the end that has none keeps its own."""
    if fault == "shifted":
        return torch.cat([logp_N[:1], logp_N[:-1]])
    if fault == "shifted-early":
        return torch.cat([logp_N[1:], logp_N[-1:]])
    return logp_N
