"""Attention with sinks in plain PyTorch: the meaning of the word, the exact twin of the kernels, and the backend of a CPU run.

In: queries, keys, values, one sink logit per head, and a Layout. Out: attention output and log-sum-exp; and the gradients, by the formulas
of docs/sink_attention.md rather than by autograd. It does not rotate (RoPE), project, or know about parallel ranks.

A sink is one more logit per head that carries no value: it enters the softmax's denominator and nothing else.

Shape legend: T packed queries, U packed keys, H query heads, K kv heads, G = H / K query heads per kv head, D head dim, S sequences of a
bucket, L the longest query length among them, M the longest key length, B = S * K matrices, R = G * L their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron_gptoss.attention.layout import Layout

LN2 = math.log(2.0)


def forward(
    q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sink_H: Tensor | None, layout: Layout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in q's dtype, lse_TH in float32 (float64 for float64 inputs), natural logarithm of the whole denominator, sink included.

    Memory and time are those of sequences padded to the longest of their power-of-two bucket: about sum(length^2), never T^2.
    """
    if layout.num_queries == layout.num_keys == layout.max_queries * (len(layout.bounds) - 1):  # nothing to pad: a view, no gather
        shape = (-1, max(layout.max_queries, 1))
        q_SLHD, k_SMKD, v_SMKD = (x.unflatten(0, shape) for x in (q_THD, k_UKD, v_UKD))
        out_SLHD, lse_SLH = _forward_padded(q_SLHD, k_SMKD, v_SMKD, sink_H, layout.causal, 0, window, scale)
        return out_SLHD.flatten(0, 1), lse_SLH.flatten(0, 1)

    out_THD = torch.zeros_like(q_THD)
    lse_TH = torch.full(q_THD.shape[:2], -math.inf, dtype=_compute_dtype(q_THD), device=q_THD.device)
    if sink_H is not None:
        lse_TH.copy_(sink_H)  # a query without keys sees the sink alone
    for query_SL, real_SL, key_SM, _, extra in _buckets(layout, q_THD.device):
        out_SLHD, lse_SLH = _forward_padded(q_THD[query_SL], k_UKD[key_SM], v_UKD[key_SM], sink_H, layout.causal, extra, window, scale)
        out_THD[query_SL[real_SL]] = out_SLHD[real_SL]
        lse_TH[query_SL[real_SL]] = lse_SLH[real_SL]
    return out_THD, lse_TH


def backward(
    dout_THD: Tensor,
    dlse_TH: Tensor | None,
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    sink_H: Tensor | None,
    out_THD: Tensor,
    lse_TH: Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in their tensors' dtypes and dsink (None without a sink). Deterministic always.

    out and lse may belong to a larger attention of which (k, v) is one part: that is how a ring's parts get their gradients.
    """
    compute = _compute_dtype(q_THD)
    delta_TH = (dout_THD.to(compute) * out_THD.to(compute)).sum(-1)
    if dlse_TH is not None:
        delta_TH = delta_TH - dlse_TH
    dsink_H = None if sink_H is None else sink_gradient(sink_H, lse_TH, delta_TH)
    lse_TH = lse_TH.masked_fill(lse_TH == -math.inf, 0.0)  # no key and no sink: its scores are -inf, so its weights are 0, not NaN

    if layout.num_queries == layout.num_keys == layout.max_queries * (len(layout.bounds) - 1):
        shape = (-1, max(layout.max_queries, 1))
        dout_SLHD, delta_SLH, lse_SLH = (x.unflatten(0, shape) for x in (dout_THD, delta_TH, lse_TH))
        q_SLHD, k_SMKD, v_SMKD = (x.unflatten(0, shape) for x in (q_THD, k_UKD, v_UKD))
        dq_SLHD, dk_SMKD, dv_SMKD = _backward_padded(dout_SLHD, delta_SLH, lse_SLH, q_SLHD, k_SMKD, v_SMKD, layout.causal, 0, window, scale)
        return dq_SLHD.flatten(0, 1), dk_SMKD.flatten(0, 1), dv_SMKD.flatten(0, 1), dsink_H

    dq_THD, dk_UKD, dv_UKD = torch.zeros_like(q_THD), torch.zeros_like(k_UKD), torch.zeros_like(v_UKD)
    for query_SL, real_SL, key_SM, real_SM, extra in _buckets(layout, q_THD.device):
        # Padding repeats some real query; without weights (lse = inf) and cotangents it adds nothing to any key.
        dout_SLHD = dout_THD[query_SL].masked_fill(~real_SL[..., None, None], 0.0)
        lse_SLH = lse_TH[query_SL].masked_fill(~real_SL[..., None], math.inf)
        rows = (delta_TH[query_SL], lse_SLH, q_THD[query_SL], k_UKD[key_SM], v_UKD[key_SM])
        dq_SLHD, dk_SMKD, dv_SMKD = _backward_padded(dout_SLHD, *rows, layout.causal, extra, window, scale)
        dq_THD[query_SL[real_SL]] = dq_SLHD[real_SL]
        dk_UKD[key_SM[real_SM]] = dk_SMKD[real_SM]
        dv_UKD[key_SM[real_SM]] = dv_SMKD[real_SM]
    return dq_THD, dk_UKD, dv_UKD, dsink_H


def sink_gradient(sink_H: Tensor, lse_TH: Tensor, delta_TH: Tensor) -> Tensor:
    """dL/dsink_h = -sum_i exp(sink_h - lse_ih) delta_ih, with delta = dO . O - dlse. In the sink's dtype."""
    share_TH = torch.exp(sink_H.to(lse_TH.dtype) - lse_TH)
    return -(share_TH * delta_TH).sum(0).to(sink_H.dtype)


def _forward_padded(
    q_SLHD: Tensor, k_SMKD: Tensor, v_SMKD: Tensor, sink_H: Tensor | None, causal: bool, extra: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of S sequences padded at their ends. What padded queries return means nothing; no real query sees a padded key."""
    S, L, H, _ = q_SLHD.shape
    weight_BRM = _scores(q_SLHD, k_SMKD, causal, extra, window, scale)
    K = k_SMKD.shape[2]
    # Scores are in base 2 (log2 instead of nats): exp2 needs a third of exp's time on a CPU, and less still where scores are far apart.
    highest_BR1 = weight_BRM.amax(-1, keepdim=True)
    if sink_H is not None:
        sink_BR1 = (sink_H.to(weight_BRM.dtype) / LN2).view(1, K, H // K, 1).expand(S, K, H // K, L).reshape(highest_BR1.shape)
        highest_BR1 = torch.maximum(highest_BR1, sink_BR1)
    highest_BR1 = highest_BR1.masked_fill(highest_BR1 == -math.inf, 0.0)
    weight_BRM.sub_(highest_BR1).exp2_()
    total_BR1 = weight_BRM.sum(-1, keepdim=True)
    if sink_H is not None:
        total_BR1 += (sink_BR1 - highest_BR1).exp2_()
    # A query that sees nothing, without a sink, has total 0 and output 0.
    out_BRD = torch.bmm(weight_BRM, _keys_by_matrix(v_SMKD, weight_BRM.dtype)) * total_BR1.reciprocal().masked_fill_(total_BR1 == 0, 0.0)
    lse_BR1 = (total_BR1.log2() + highest_BR1) * LN2
    return _rows_to_queries(out_BRD, S, L, H).to(q_SLHD.dtype), lse_BR1.view(S, H, L).transpose(1, 2)


def _backward_padded(
    dout_SLHD: Tensor,
    delta_SLH: Tensor,
    lse_SLH: Tensor,
    q_SLHD: Tensor,
    k_SMKD: Tensor,
    v_SMKD: Tensor,
    causal: bool,
    extra: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """P = exp(score - lse), dS = P * (dO . V - delta); then dV = P^T dO, dQ = dS K and dK = dS^T Q, the last two times the scale."""
    S, L, H, _ = q_SLHD.shape
    K = k_SMKD.shape[2]
    compute = _compute_dtype(q_SLHD)
    lse_BR1, delta_BR1 = (x.to(compute).transpose(1, 2).reshape(S * K, H // K * L, 1) for x in (lse_SLH, delta_SLH))
    dout_BRD, q_BRD = _queries_by_matrix(dout_SLHD, K, compute), _queries_by_matrix(q_SLHD, K, compute)
    weight_BRM = _scores(q_SLHD, k_SMKD, causal, extra, window, scale).sub_(lse_BR1 / LN2).exp2_()
    dv_BMD = torch.bmm(weight_BRM.mT, dout_BRD)
    dscore_BRM = torch.bmm(dout_BRD, _keys_by_matrix(v_SMKD, compute).mT).sub_(delta_BR1).mul_(weight_BRM)
    dq_BRD = torch.bmm(dscore_BRM, _keys_by_matrix(k_SMKD, compute)).mul_(scale)
    dk_BMD = torch.bmm(dscore_BRM.mT, q_BRD).mul_(scale)
    dk_SMKD, dv_SMKD = (x.unflatten(0, (S, K)).transpose(1, 2) for x in (dk_BMD, dv_BMD))
    return _rows_to_queries(dq_BRD, S, L, H).to(q_SLHD.dtype), dk_SMKD.to(k_SMKD.dtype), dv_SMKD.to(v_SMKD.dtype)


def _scores(q_SLHD: Tensor, k_SMKD: Tensor, causal: bool, extra: int, window: int | None, scale: float) -> Tensor:
    """[B, R, M], in base 2, -inf where hidden: one mask for all sequences, since padding sits behind every real token, where causality
    hides it already."""
    compute = _compute_dtype(q_SLHD)
    (_, L, H, _), (_, M, K, _) = q_SLHD.shape, k_SMKD.shape
    q_BRD = _queries_by_matrix(q_SLHD, K, compute).mul(scale / LN2)
    k_BDM = _keys_by_matrix(k_SMKD, compute).mT
    if not causal:
        return torch.bmm(q_BRD, k_BDM)
    position_L1 = torch.arange(extra, extra + L, device=q_SLHD.device).unsqueeze(1)
    distance_LM = position_L1 - torch.arange(M, device=q_SLHD.device)
    hidden_LM = distance_LM < 0
    if window is not None:
        hidden_LM |= distance_LM >= window
    bias_RM = torch.zeros(L, M, dtype=compute, device=q_SLHD.device).masked_fill_(hidden_LM, -math.inf).repeat(H // K, 1)
    return torch.baddbmm(bias_RM.unsqueeze(0), q_BRD, k_BDM)


def _queries_by_matrix(x_SLHD: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """[S, L, H, D] -> [S * K, G * L, D]: the G query heads of a kv head are rows of one matrix, so that K and V are never repeated."""
    S, L, H, D = x_SLHD.shape
    return x_SLHD.to(dtype).view(S, L, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(S * K, H // K * L, D)


def _rows_to_queries(x_BRD: Tensor, S: int, L: int, H: int) -> Tensor:
    """[S * K, G * L, D] -> [S, L, H, D]"""
    return x_BRD.reshape(S, H, L, x_BRD.shape[2]).transpose(1, 2).contiguous()


def _keys_by_matrix(x_SMKD: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, M, K, D] -> [S * K, M, D]"""
    return x_SMKD.to(dtype).transpose(1, 2).flatten(0, 1)


def _buckets(layout: Layout, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int]]:
    """Sequences of similar length together: query indices [S, L], which of them are real, key indices [S, M], which are real, and `extra`,
    the keys that stand before the first query. Lengths in (2^(n-1), 2^n] share a bucket. Sequences without queries or keys vanish."""
    rows: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for (q0, q1), (k0, k1) in zip(pairwise(layout.bounds), pairwise(layout.key_bounds), strict=True):
        if q1 > q0 and k1 > k0:
            extra = k1 - k0 - (q1 - q0)
            rows.setdefault(((q1 - q0 - 1).bit_length(), extra), []).append((q0, q1, k0, k1))
    for (_, extra), spans in rows.items():
        query_SL, real_SL = _padded_index([(q0, q1) for q0, q1, _, _ in spans], layout.num_queries, device)
        key_SM, real_SM = _padded_index([(k0, k1) for _, _, k0, k1 in spans], layout.num_keys, device)
        yield query_SL, real_SL, key_SM, real_SM, extra


def _padded_index(spans: list[tuple[int, int]], total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[S, L] index of each place, and whether it is real; padding's index is any valid one."""
    begin_S1, end_S1 = torch.tensor(spans, device=device).unsqueeze(-1).unbind(1)
    index_SL = begin_S1 + torch.arange(int((end_S1 - begin_S1).max()), device=device)
    return index_SL.clamp(max=total - 1), index_SL < end_S1


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def missing(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
    """What this machine lacks for the backend: nothing, ever."""
    return None
