"""Samples into packed microbatches: no padding, a token budget, the same number of microbatches on every data-parallel rank.

In: samples, the number of data-parallel ranks, and what a sequence costs (`work_of`). Out: for each rank a list of microbatches. Pure: the
same samples give the same packing, and since losses are summed over tokens, the packing does not change the loss.

Ranks wait for each other in every layer of every microbatch, because they share experts. So it is not enough that each rank has the same
work in all: what the ranks do at the same time, their j-th microbatches, must take equally long. All microbatches of all ranks are
therefore filled together, each sample into the one with least work that has room, longest first; then the heaviest and the lightest trade
samples; and microbatches of like work are done at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_gptoss.config.layout import layer_multiplications
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.model.replay import Routes, pack_routes
from megatron_gptoss.types import MicroBatch, Sample, TokenRoutes

Work = Callable[[int], float]  # tokens of a sequence -> what it costs, in any unit

# Forward and backward together, on one H200. Only their ratios matter here, and the packing hardly depends on them.
MATRIX_FLOPS_PER_S = 650e12  # grouped_mm over 32 experts: 742 forward, 658 backward
FULL_ATTENTION_FLOPS_PER_S = 500e12  # flash-attn-4 with sinks: 461 at 8,192 tokens, 525 at 32,768
WINDOWED_ATTENTION_FLOPS_PER_S = 190e12  # our Triton kernels, window 128 at 32,768 tokens: 0.30 ms forward, 0.96 ms backward


def work_of(model: ModelConfig) -> Work:
    """Seconds for one sequence of n tokens, forward and backward, all layers and the head: a n + b n (n + 1) / 2.

    Matrices take 6 FLOPs a token and parameter. Attention takes 4 H D FLOPs forward and 2.5 times that backward for each pair of a query
    and a key it sees: n (n + 1) / 2 of them in full layers, at most `sliding_window` keys a query in windowed ones.
    """
    matrices = model.num_hidden_layers * layer_multiplications(model) + model.vocab_size * model.hidden_size
    pair = 3.5 * 4 * model.num_attention_heads * model.head_dim
    windowed = (model.num_hidden_layers + 1) // 2  # layers 0, 2, ...
    full = model.num_hidden_layers - windowed

    def work(n: int) -> float:
        seen = min(n, model.sliding_window)
        windowed_pairs = seen * (seen + 1) // 2 + (n - seen) * seen
        full_pairs = n * (n + 1) // 2
        return (
            6 * matrices * n / MATRIX_FLOPS_PER_S
            + pair * full * full_pairs / FULL_ATTENTION_FLOPS_PER_S
            + pair * windowed * windowed_pairs / WINDOWED_ATTENTION_FLOPS_PER_S
        )

    return work


def balanced_bins(lengths: Sequence[int], work: Sequence[float], *, bins: int, capacity: int) -> list[list[int]] | None:
    """Indices of samples in `bins` bins of nearly equal work, no bin over `capacity` tokens; None when no way was found."""
    heaviest_first = sorted(range(len(lengths)), key=lambda i: (-work[i], -lengths[i], i))
    for choose in (_least_work, _least_room):  # the second fits more in, and balances worse
        content, used, loads = [[] for _ in range(bins)], [0] * bins, [0.0] * bins
        for i in heaviest_first:
            place = choose([b for b in range(bins) if used[b] + lengths[i] <= capacity], used, loads)
            if place is None:
                break
            content[place].append(i)
            used[place] += lengths[i]
            loads[place] += work[i]
        else:
            _trade(content, used, loads, lengths, work, capacity)
            return content
    return None


def bins_at_least(lengths: Sequence[int], capacity: int) -> int:
    """No packing needs fewer: neither may tokens be over, nor have more than k of those samples one bin that are longer than 1 / (k + 1) of
    it. Answers that were cut at one length waste a part of every bin, and a search from the number of tokens alone fails over and over."""
    longest_first = sorted(lengths, reverse=True)
    by_length = ((place // (capacity // max(length, 1))) + 1 for place, length in enumerate(longest_first))
    return max(-(-sum(lengths) // capacity), max(by_length, default=0))


def _least_work(fitting: list[int], used: list[int], loads: list[float]) -> int | None:
    return min(fitting, key=lambda b: (loads[b], b), default=None)


def _least_room(fitting: list[int], used: list[int], loads: list[float]) -> int | None:
    return min(fitting, key=lambda b: (-used[b], b), default=None)


def _trade(
    content: list[list[int]], used: list[int], loads: list[float], lengths: Sequence[int], work: Sequence[float], capacity: int
) -> None:
    """Move or swap samples between a heavy and a light bin while the heavier of the two becomes lighter by it. In place."""
    for _ in range(4 * len(content)):  # enough in practice, and an end
        order = sorted(range(len(content)), key=lambda b: (loads[b], b))
        light = order[0]
        for heavy in reversed(order[1:]):
            best = _best_trade(content[heavy], content[light], loads[heavy] - loads[light], work)
            gained = [(a, b) for a, b in best if _fits(a, b, used, heavy, light, lengths, capacity)]
            if gained:
                break
        else:
            return
        a, b = gained[0]
        for sample, source, target in ((a, heavy, light), (b, light, heavy)):
            if sample is not None:
                content[source].remove(sample)
                content[target].append(sample)
                used[source] -= lengths[sample]
                used[target] += lengths[sample]
                loads[source] -= work[sample]
                loads[target] += work[sample]


def _best_trade(heavy: list[int], light: list[int], gap: float, work: Sequence[float]) -> list[tuple[int, int | None]]:
    """Trades (sample of the heavy bin, sample of the light one or None) that narrow `gap`, the best first."""
    found = []
    for a in heavy:
        for b in (None, *light):
            moved = work[a] - (work[b] if b is not None else 0.0)
            left = abs(gap - 2 * moved)  # the difference afterwards
            if left < gap * (1 - 1e-9):
                found.append((left, a, -1 if b is None else b))
    return [(a, None if b < 0 else b) for _, a, b in sorted(found)]


def _fits(a: int, b: int | None, used: list[int], heavy: int, light: int, lengths: Sequence[int], capacity: int) -> bool:
    into_light = lengths[a] - (lengths[b] if b is not None else 0)
    return used[light] + into_light <= capacity and used[heavy] - into_light <= capacity


def deal_out(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Bins to ranks, `ranks` of like work at a time: `result[rank][j]` is the bin that a rank does in pass j.

    The heaviest come first, so that memory peaks in the first pass. Within a pass, the rank with least work so far gets the heaviest bin.
    """
    order = sorted(range(len(work)), key=lambda b: (-work[b], b))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda r: (total[r], r))
        for rank, b in zip(lightest_first, order[start : start + ranks], strict=True):
            dealt[rank].append(b)
            total[rank] += work[b]
    return dealt


def split_by_budget(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of consecutive samples up to the token budget."""
    bins: list[list[int]] = []
    used = 0
    for i, length in enumerate(lengths):
        if not bins or used + length > capacity:
            bins.append([])
            used = 0
        bins[-1].append(i)
        used += length
    return bins


def make_microbatch(samples: Sequence[Sample]) -> MicroBatch:
    """Pack samples one after another. Each trained token t+1 gives one prediction, made from position t."""
    lengths = [len(sample.token_ids) for sample in samples]

    def joined(field: str, dtype: type[np.generic]) -> np.ndarray:
        """Of all samples in a row: millions of Python's numbers, without a loop over them."""
        parts = [np.array(getattr(sample, field), dtype) for sample in samples]
        for sample, part, length in zip(samples, parts, lengths, strict=True):
            if len(part) != length:
                raise ValueError(f"{sample.name}: {length} tokens, but {len(part)} entries of {field}")
        return np.concatenate(parts)

    starts = np.cumsum([0, *lengths])
    tokens_T = joined("token_ids", np.int64)
    (trained_N,) = joined("trained", np.bool_).nonzero()  # places in the pack
    sample_N = np.repeat(np.arange(len(samples)), lengths)[trained_N]
    advantage_S = np.array([sample.advantage for sample in samples], np.float32)
    advantage_N = advantage_S[sample_N]
    if any(sample.token_advantages for sample in samples):
        samples = [s if s.token_advantages else replace(s, token_advantages=(s.advantage,) * len(s.token_ids)) for s in samples]
        advantage_N = joined("token_advantages", np.float32)[trained_N]
    with_values = any(sample.values for sample in samples)
    batch = MicroBatch(
        names=tuple(sample.name for sample in samples),
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.arange(len(tokens_T)) - np.repeat(starts[:-1], lengths)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        predict_N=torch.from_numpy(trained_N - 1),
        target_N=torch.from_numpy(tokens_T[trained_N]),
        sample_N=torch.from_numpy(sample_N),
        advantage_N=torch.from_numpy(advantage_N),
        engine_logp_N=torch.from_numpy(joined("engine_logp", np.float32)[trained_N]),
        routes=_packed_routes(samples),
        value_N=torch.from_numpy(joined("values", np.float32)[trained_N]) if with_values else None,
        value_target_N=torch.from_numpy(joined("value_targets", np.float32)[trained_N]) if with_values else None,
    )
    batch.check()
    return batch


def _packed_routes(samples: Sequence[Sample]) -> Routes | None:
    """The engine's routes in the order of the packed tokens; rows of zeros where it has none. None when no sample has any."""
    known = [s.routes for s in samples if s.routes is not None]
    if not known:
        return None
    like = known[0]

    def rows_TLK(routes: TokenRoutes | None) -> torch.Tensor | None:
        if routes is None or not routes.experts:
            return None
        return torch.frombuffer(bytearray(routes.experts), dtype=torch.uint8).view(-1, routes.num_layers, routes.top_k)

    return pack_routes(
        [rows_TLK(s.routes) for s in samples],
        [len(s.token_ids) for s in samples],
        layers=range(like.num_layers),
        num_experts=like.num_experts,
        top_k=like.top_k,
    )


def filler(like: Sample) -> Sample:
    """A sample that trains nothing, for ranks that run out of samples: experts are shared, so all ranks must do as many passes."""
    routes = like.routes
    nothing = (0.0,) * len(like.token_ids[:2])
    return Sample(
        name="filler",
        token_ids=like.token_ids[:2],
        trained=(False,) * len(nothing),
        engine_logp=nothing,
        advantage=0.0,
        values=nothing if like.values else (),
        value_targets=nothing if like.values else (),
        # The same tokens went the same way; without routes they would count as missing.
        routes=None if routes is None else replace(routes, experts=routes.experts[: 2 * routes.num_layers * routes.top_k]),
    )


def pack(
    samples: Sequence[Sample], *, ranks: int, tokens_per_microbatch: int, work: Work | None = None, at_least: int = 1
) -> list[list[MicroBatch]]:
    """Microbatches for each data-parallel rank, the same number for all; [] for each when there are no samples.

    `work`: what a sequence of n tokens costs; None: n. `at_least`: microbatches a rank should get where there are samples for them (a
    pipeline of that many stages). One rank has nothing to balance, and packs the samples as they come.
    """
    if not samples:
        return [[] for _ in range(ranks)]
    bins = plan_packing([len(s.token_ids) for s in samples], ranks, tokens_per_microbatch, work or float, at_least, samples)
    empty = [filler(samples[0])]
    return [[make_microbatch([samples[i] for i in b] or empty) for b in of_rank] for of_rank in bins]


def plan_packing(
    lengths: Sequence[int], ranks: int, capacity: int, work: Work, at_least: int = 1, samples: Sequence[Sample] = ()
) -> list[list[list[int]]]:
    """`result[rank][j]`: indices of the samples of a rank's j-th microbatch, in their own order; [] where a rank has none left.

    As few microbatches as a greedy search finds room in. Raises ValueError for a sequence longer than `capacity`.
    """
    for i, length in enumerate(lengths):
        if length > capacity:
            name = samples[i].name if samples else f"sample {i}"
            raise ValueError(f"{name} has {length} tokens, the microbatch budget is {capacity}")
    enough = -(-len(lengths) // ranks)  # each sample alone
    fewest = max(-(-bins_at_least(lengths, capacity) // ranks), min(at_least, enough))
    if ranks == 1:
        consecutive = split_by_budget(lengths, capacity)
        if len(consecutive) >= fewest:
            return [consecutive]
    costs = [work(n) for n in lengths]
    for passes in range(fewest, enough + 1):
        bins = balanced_bins(lengths, costs, bins=passes * ranks, capacity=capacity)
        if bins is not None:
            dealt = deal_out([sum(costs[i] for i in b) for b in bins], ranks)
            return [[sorted(bins[b]) for b in of_rank] for of_rank in dealt]
    raise AssertionError("each sample alone always fits")


def pack_step(
    samples: Sequence[Sample],
    *,
    minibatches: int,
    ranks: int,
    tokens_per_microbatch: int,
    work: Work | None = None,
    at_least: int = 1,
) -> list[list[list[MicroBatch]]]:
    """`result[m][rank]` are the microbatches of optimizer update m on a rank.

    Samples are cut into `minibatches` consecutive parts of nearly equal number; parts that would be empty are left out. `work` and
    `at_least` as in `pack`.
    """
    size, rest = divmod(len(samples), minibatches)
    parts, start = [], 0
    for m in range(minibatches):
        end = start + size + (1 if m < rest else 0)
        if end > start:
            part = samples[start:end]
            parts.append(pack(part, ranks=ranks, tokens_per_microbatch=tokens_per_microbatch, work=work, at_least=at_least))
        start = end
    return parts
