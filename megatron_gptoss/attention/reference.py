"""Attention with sinks in plain PyTorch: the meaning of the word, and the backend of a CPU run.

In: queries, keys, values of packed sequences, and one sink logit per head. Out: attention output and log-sum-exp, differentiable by
autograd in q, k, v and sink, through both outputs. It does not rotate (RoPE), project, or know about parallel ranks.

A sink is one more logit per head that carries no value, so softmax with a sink is plain softmax times sigmoid(lse - sink).

Shape legend: T packed query and key tokens, H query heads, K kv heads, G = H / K query heads per kv head, D head dim, S sequences,
L length of the longest sequence of a bucket.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

LN2 = math.log(2.0)


def attend_reference(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sink_H: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each packed sequence.

    cu_seqlens: int [S+1], first 0, last T; None: all of T is one sequence.
    window: visible keys, the token itself included (Hugging Face's sliding_window); None: all earlier ones.
    sink_H: one logit per query head, None: no sink. Query head h reads kv head h // G.
    scale: factor on q.k, default 1/sqrt(D).

    Returns out_THD in q's dtype and lse_TH in float32 (float64 for float64 inputs). lse is the plain log-sum-exp of the visible scaled
    scores, WITHOUT the sink, in nats. Raises ValueError when shapes contradict each other.

    Memory and time are those of sequences padded to the longest of their power-of-two bucket: about sum(length^2), never T^2.
    """
    _check(q_THD, k_TKD, v_TKD, sink_H, cu_seqlens, window)
    T, _, D = q_THD.shape
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    starts, lengths = [0], [T]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        starts, lengths = bounds[:-1], [end - begin for begin, end in pairwise(bounds)]

    buckets = _buckets(lengths)
    if len(buckets) == 1 and len(set(lengths)) == 1:  # nothing to pad: a reshape instead of a gather
        shape = (len(lengths), lengths[0])
        out_SLHD, lse_SLH = _attend_padded(
            q_THD.unflatten(0, shape), k_TKD.unflatten(0, shape), v_TKD.unflatten(0, shape), sink_H, window, scale
        )
        return out_SLHD.flatten(0, 1), lse_SLH.flatten(0, 1)

    outs, lses, tokens = [], [], []
    for rows in buckets:
        token_SL, real_SL = _padded_index([starts[r] for r in rows], [lengths[r] for r in rows], T, q_THD.device)
        shape = token_SL.shape
        q_SLHD, k_SLKD, v_SLKD = (x.index_select(0, token_SL.flatten()).unflatten(0, shape) for x in (q_THD, k_TKD, v_TKD))
        out_SLHD, lse_SLH = _attend_padded(q_SLHD, k_SLKD, v_SLKD, sink_H, window, scale)
        real = real_SL.flatten().nonzero().squeeze(1)
        outs.append(out_SLHD.flatten(0, 1).index_select(0, real))
        lses.append(lse_SLH.flatten(0, 1).index_select(0, real))
        tokens.append(token_SL.flatten()[real])
    if len(buckets) == 1:  # sequences are still in their order
        return outs[0], lses[0]
    place_T = torch.cat(tokens).argsort()
    return torch.cat(outs).index_select(0, place_T), torch.cat(lses).index_select(0, place_T)


def _attend_padded(
    q_SLHD: Tensor, k_SLKD: Tensor, v_SLKD: Tensor, sink_H: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of S sequences padded at their ends to L. What padded queries return means nothing; no real query sees a padded key."""
    S, L, H, D = q_SLHD.shape
    K = k_SLKD.shape[2]
    G = H // K
    compute = torch.promote_types(q_SLHD.dtype, torch.float32)
    # The G query heads of a kv head are stacked along the rows of one matrix, so that K and V are never repeated.
    # Scores are in base 2 (log2 instead of nats): exp2 needs a third of exp's time on a CPU, and less still where scores are far apart.
    q_BRD = (q_SLHD.to(compute) * (scale / LN2)).view(S, L, K, G, D).permute(0, 2, 3, 1, 4).reshape(S * K, G * L, D)
    k_BDL = k_SLKD.to(compute).permute(0, 2, 3, 1).reshape(S * K, D, L)
    v_BLD = v_SLKD.to(compute).transpose(1, 2).reshape(S * K, L, D)

    # One mask for all sequences: padding sits behind every real token, where causality hides it already.
    hidden_1RL = _hidden_scores(L, window, compute, q_SLHD.device).repeat(1, G, 1)
    score_BRL = torch.baddbmm(hidden_1RL, q_BRD, k_BDL)
    highest_BR1 = score_BRL.detach().amax(-1, keepdim=True)  # never -inf: each query sees itself. It cancels, so it needs no gradient.
    weight_BRL = (score_BRL - highest_BR1).exp2()
    total_BR1 = weight_BRL.sum(-1, keepdim=True)
    lse_BR1 = (total_BR1.log2() + highest_BR1) * LN2
    factor_BR1 = total_BR1.reciprocal()
    if sink_H is not None:
        sink_BR1 = sink_H.to(compute).view(1, K, G, 1).expand(S, K, G, L).reshape(S * K, G * L, 1)
        factor_BR1 = factor_BR1 * torch.sigmoid(lse_BR1 - sink_BR1)
    out_BRD = torch.bmm(weight_BRL, v_BLD) * factor_BR1

    out_SLHD = out_BRD.view(S, K, G, L, D).permute(0, 3, 1, 2, 4).reshape(S, L, H, D)
    return out_SLHD.to(q_SLHD.dtype), lse_BR1.view(S, H, L).transpose(1, 2)


def _hidden_scores(L: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, L, L]: 0 where query i sees key j, -inf elsewhere."""
    i = torch.arange(L, device=device)
    distance = i.unsqueeze(1) - i.unsqueeze(0)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(1, L, L, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _buckets(lengths: list[int]) -> list[list[int]]:
    """Rows of similar length together: lengths in (2^(n-1), 2^n] share a bucket. Order is kept inside one; empty sequences vanish."""
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            rows.setdefault((length - 1).bit_length(), []).append(row)
    return list(rows.values())


def _padded_index(starts: list[int], lengths: list[int], T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """token_SL: index into T of each place; real_SL: False on padding, whose index is any valid one."""
    place_L = torch.arange(max(lengths), device=device)
    start_S1 = torch.tensor(starts, device=device).unsqueeze(1)
    length_S1 = torch.tensor(lengths, device=device).unsqueeze(1)
    return (start_S1 + place_L).clamp_(max=T - 1), place_L < length_S1


def _check(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, cu_seqlens: Tensor | None, window: int | None) -> None:
    T, H, D = q_THD.shape
    K = k_TKD.shape[1]
    if k_TKD.shape != (T, K, D) or v_TKD.shape != (T, K, D):
        raise ValueError(f"q {tuple(q_THD.shape)}, k {tuple(k_TKD.shape)} and v {tuple(v_TKD.shape)} do not share T, K and D")
    if H % K:
        raise ValueError(f"{H} query heads are not a multiple of {K} kv heads")
    if sink_H is not None and sink_H.shape != (H,):
        raise ValueError(f"sinks have shape {tuple(sink_H.shape)}, not ({H},)")
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees at least itself")
    if cu_seqlens is not None and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != T):
        raise ValueError(f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, not from 0 to {T}")
