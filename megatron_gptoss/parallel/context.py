"""A packed microbatch as one rank of the training world computes it: padded, and under context parallelism cut into shards.

In: a microbatch and a place in the context-parallel group. Out: `LocalBatch`, this rank's tokens and predictions. Pure; nothing is sent.

Sharding, as attention/context.py wants it: the packed stream of T tokens is cut into contiguous shards of equal length, rank r holds tokens
r * T/CP .. (r + 1) * T/CP, and cu_seqlens stays that of the whole stream. A prediction belongs to the rank that holds the token it is made
from; its target is an id, so no rank needs its neighbour's tokens.

Shape legend: T tokens of the shard, G = CP * T tokens of the padded stream, N predictions of the microbatch, M of them made by this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_gptoss.types import MicroBatch


@dataclass(frozen=True)
class LocalBatch:
    """What this rank computes of a microbatch."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, place in the sequence, wherever the shard begins
    cu_seqlens: Tensor  # int32 [S+1] or, padded, [S+2]: of the whole stream, first 0, last G
    max_seqlen: int
    predict_M: Tensor  # int64, index into the shard
    target_M: Tensor  # int64
    advantage_M: Tensor  # float32
    engine_logp_M: Tensor  # float32, nats
    mine_M: Tensor  # int64, which of the microbatch's N predictions these are
    value_M: Tensor | None = None  # float32, a critic's before the step; None: no critic
    value_target_M: Tensor | None = None  # float32, nan where the critic learns nothing


def pad(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The microbatch with its token count raised to a multiple: one more sequence at the end, of token 0, that predicts nothing."""
    missing = -batch.tokens_T.numel() % multiple
    if not missing:
        return batch
    tokens, cu = batch.tokens_T, batch.cu_seqlens
    return replace(
        batch,
        names=(*batch.names, "padding"),
        tokens_T=torch.cat([tokens, tokens.new_zeros(missing)]),
        positions_T=torch.cat([batch.positions_T, torch.arange(missing, dtype=torch.int64, device=tokens.device)]),
        cu_seqlens=torch.cat([cu, cu[-1:] + missing]),
        max_seqlen=max(batch.max_seqlen, missing),
    )


def take_shard(batch: MicroBatch, *, rank: int, ranks: int, multiple: int) -> LocalBatch:
    """The part of rank `rank` of `ranks` context-parallel ranks, after padding to `multiple` tokens. `ranks` divides `multiple`."""
    if multiple % ranks:
        raise ValueError(f"a multiple of {multiple} tokens cannot be cut into {ranks} equal shards")
    batch = pad(batch, multiple)
    length = batch.tokens_T.numel() // ranks
    rows = slice(rank * length, (rank + 1) * length)
    if ranks == 1:
        mine = torch.arange(batch.predict_N.numel(), device=batch.predict_N.device)
    else:
        mine = ((batch.predict_N >= rows.start) & (batch.predict_N < rows.stop)).nonzero().squeeze(1)
    return LocalBatch(
        tokens_T=batch.tokens_T[rows],
        positions_T=batch.positions_T[rows],
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        predict_M=batch.predict_N[mine] - rows.start,
        target_M=batch.target_N[mine],
        advantage_M=batch.advantage_N[mine],
        engine_logp_M=batch.engine_logp_N[mine],
        mine_M=mine,
        value_M=None if batch.value_N is None else batch.value_N[mine],
        value_target_M=None if batch.value_target_N is None else batch.value_target_N[mine],
    )
