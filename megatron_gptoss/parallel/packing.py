"""Samples into packed microbatches: no padding, a token budget, the same number of microbatches on every data-parallel rank.

In: samples and the number of data-parallel ranks. Out: for each rank a list of microbatches. Pure: the same samples give the same packing,
and since losses are summed over tokens, the packing does not change the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_gptoss.types import MicroBatch, Sample


def split_over_ranks(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """Deal samples out so that every rank has about the same number of tokens: longest first, each to the lightest rank.

    Within a rank the samples keep their original order.
    """
    loads = [0] * ranks
    owner: dict[int, int] = {}
    for index in sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        owner[index] = rank
        loads[rank] += len(samples[index].token_ids)
    return [[s for i, s in enumerate(samples) if owner[i] == rank] for rank in range(ranks)]


def split_by_budget(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[list[Sample]]:
    """Consecutive samples up to the token budget. The plan refuses longer samples earlier; here one raises ValueError."""
    bins: list[list[Sample]] = []
    used = 0
    for sample in samples:
        length = len(sample.token_ids)
        if length > tokens_per_microbatch:
            raise ValueError(f"{sample.name} has {length} tokens, the microbatch budget is {tokens_per_microbatch}")
        if not bins or used + length > tokens_per_microbatch:
            bins.append([])
            used = 0
        bins[-1].append(sample)
        used += length
    return bins


def make_microbatch(samples: Sequence[Sample]) -> MicroBatch:
    """Pack samples one after another. Each trained token t+1 gives one prediction, made from position t."""
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    predict: list[int] = []
    target: list[int] = []
    owner: list[int] = []
    advantage: list[float] = []
    engine_logp: list[float] = []
    for s, sample in enumerate(samples):
        base = len(tokens)
        tokens += sample.token_ids
        positions += range(len(sample.token_ids))
        starts.append(len(tokens))
        for t, trained in enumerate(sample.trained):
            if trained:
                predict.append(base + t - 1)
                target.append(sample.token_ids[t])
                owner.append(s)
                advantage.append(sample.advantage)
                engine_logp.append(sample.engine_logp[t])
    batch = MicroBatch(
        names=tuple(s.name for s in samples),
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(len(s.token_ids) for s in samples),
        predict_N=torch.tensor(predict, dtype=torch.int64),
        target_N=torch.tensor(target, dtype=torch.int64),
        sample_N=torch.tensor(owner, dtype=torch.int64),
        advantage_N=torch.tensor(advantage, dtype=torch.float32),
        engine_logp_N=torch.tensor(engine_logp, dtype=torch.float32),
    )
    batch.check()
    return batch


def filler(like: Sample) -> Sample:
    """A sample that trains nothing, for ranks that run out of samples: experts are shared, so all ranks must do as many passes."""
    return Sample(
        name="filler", token_ids=like.token_ids[:2], trained=(False,) * len(like.token_ids[:2]), engine_logp=(0.0, 0.0), advantage=0.0
    )


def pack(samples: Sequence[Sample], *, ranks: int, tokens_per_microbatch: int) -> list[list[MicroBatch]]:
    """Microbatches for each data-parallel rank, the same number for all; [] for each when there are no samples."""
    if not samples:
        return [[] for _ in range(ranks)]
    bins = [split_by_budget(part, tokens_per_microbatch) for part in split_over_ranks(samples, ranks)]
    most = max(len(b) for b in bins)
    for b in bins:
        while len(b) < most:
            b.append([filler(samples[0])])
    return [[make_microbatch(part) for part in b] for b in bins]


def pack_step(samples: Sequence[Sample], *, minibatches: int, ranks: int, tokens_per_microbatch: int) -> list[list[list[MicroBatch]]]:
    """`result[m][rank]` are the microbatches of optimizer update m on a rank.

    Samples are cut into `minibatches` consecutive parts of nearly equal number; parts that would be empty are left out.
    """
    size, rest = divmod(len(samples), minibatches)
    parts, start = [], 0
    for m in range(minibatches):
        end = start + size + (1 if m < rest else 0)
        if end > start:
            parts.append(pack(samples[start:end], ranks=ranks, tokens_per_microbatch=tokens_per_microbatch))
        start = end
    return parts
