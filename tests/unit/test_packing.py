"""Laws of packing: nothing is lost, nothing is doubled, budgets hold, ranks do the same number of passes."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.parallel.packing import (
    balanced_bins,
    bins_at_least,
    make_microbatch,
    pack,
    pack_step,
    plan_packing,
    split_by_budget,
    work_of,
)
from megatron_gptoss.types import Sample


def sample(i: int, length: int) -> Sample:
    trained = tuple(t > 0 and (t * 7 + i) % 3 != 0 for t in range(length))
    return Sample(
        name=f"s{i}", token_ids=tuple(100 * i + t for t in range(length)), trained=trained,
        engine_logp=tuple(-(t + 1.0) if x else 0.0 for t, x in enumerate(trained)), advantage=float(i),
    )  # fmt: skip


samples_strategy = st.lists(st.integers(2, 30), min_size=1, max_size=20).map(lambda ls: [sample(i, n) for i, n in enumerate(ls)])


@given(samples_strategy, st.integers(1, 4), st.integers(30, 90), st.integers(1, 5))
def test_every_trained_token_lands_exactly_once(samples, ranks, budget, at_least):
    packed = pack(samples, ranks=ranks, tokens_per_microbatch=budget, work=lambda n: n + n * n / 50, at_least=at_least)
    assert len(packed) == ranks and len(packed[0]) >= min(at_least, -(-len(samples) // ranks))
    assert len({len(batches) for batches in packed}) == 1, "ranks must do the same number of passes"
    seen = Counter()
    for batches in packed:
        for b in batches:
            assert b.tokens_T.numel() <= budget
            for p, target, s, adv, lp in zip(b.predict_N, b.target_N, b.sample_N, b.advantage_N, b.engine_logp_N, strict=True):
                assert b.tokens_T[p + 1] == target, "a prediction is made from the position before its token"
                assert b.cu_seqlens[s] <= p < b.cu_seqlens[s + 1] - 1, "and inside its own sequence"
                seen[(b.names[s], int(b.positions_T[p]) + 1, int(target), float(adv), float(lp))] += 1
    wanted = Counter(
        (s.name, t, s.token_ids[t], s.advantage, s.engine_logp[t]) for s in samples for t in range(len(s.token_ids)) if s.trained[t]
    )
    assert seen == wanted


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8), st.integers(30, 90), st.integers(1, 6))
def test_a_packing_holds_each_sample_once_within_budget_and_equal_counts(lengths, ranks, capacity, at_least):
    found = plan_packing(lengths, ranks, capacity, float, at_least)
    assert sorted(i for of_rank in found for bin in of_rank for i in bin) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin) <= capacity for of_rank in found for bin in of_rank)
    assert len(found) == ranks and len({len(of_rank) for of_rank in found}) == 1
    assert found == plan_packing(lengths, ranks, capacity, float, at_least), "the same samples give the same packing"
    assert all(bin == sorted(bin) for of_rank in found for bin in of_rank), "samples keep their order"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(30, 90))
def test_one_rank_packs_the_samples_as_they_come(lengths, capacity):
    (bins,) = plan_packing(lengths, 1, capacity, float)
    assert [i for bin in bins for i in bin] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in a) + lengths[b[0]] > capacity for a, b in pairwise(bins)), "the next sample had no room"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 100))
def test_no_packing_has_fewer_bins_than_there_must_be(lengths, capacity):
    assert bins_at_least(lengths, capacity) <= len(split_by_budget(sorted(lengths), capacity))


def test_how_many_bins_there_must_be_by_hand():
    assert bins_at_least([6, 6, 6, 1], 10) == 3  # no two of the long ones have room together, and 19 tokens would need 2
    assert bins_at_least([4196] * 2048, 16384) == 683  # three in a bin, where the tokens alone would go into 525
    assert bins_at_least([2, 3, 5], 10) == 1 and bins_at_least([], 10) == 0
    many = plan_packing([4196] * 2048, 8, 16384, float)
    assert {len(of_rank) for of_rank in many} == {86}  # 683 over 8 ranks


@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 6))
def test_no_single_move_makes_the_heaviest_bin_lighter(lengths, bins):
    found = balanced_bins(lengths, [float(n) for n in lengths], bins=bins, capacity=10**9)
    assert found is not None
    loads = [sum(lengths[i] for i in b) for b in found]
    heavy, light = loads.index(max(loads)), loads.index(min(loads))
    assert all(loads[light] + lengths[i] >= loads[heavy] for i in found[heavy]) or heavy == light


def test_trades_find_what_longest_first_misses():
    # Longest first, each into the lightest: 5+3 and 4+3+3. The best is 5+4 and 3+3+3.
    found = balanced_bins([5, 4, 3, 3, 3], [5.0, 4.0, 3.0, 3.0, 3.0], bins=2, capacity=18)
    assert found is not None and sorted(sum([5, 4, 3, 3, 3][i] for i in b) for b in found) == [9, 9]


# Lengths as reinforcement learning makes them. (name, lengths of a step's samples, budget); the longest fits the budget.
def _lengths(law: str, n: int, longest: int) -> list[int]:
    draw = random.Random(7)
    if law == "log-normal":  # most answers are short, some go on and on
        return [min(longest, max(16, int(math.exp(draw.gauss(math.log(longest / 6), 0.9))))) for _ in range(n)]
    if law == "cut off":  # a third runs into the limit
        return [longest if draw.random() < 0.33 else draw.randint(longest // 40, longest // 2) for _ in range(n)]
    return [draw.choice((longest // 30, longest)) for _ in range(n)]  # two kinds: a short refusal, a full chain of thought


@pytest.mark.parametrize("law", ["log-normal", "cut off", "two kinds"])
@pytest.mark.parametrize(("ranks", "longest", "budget"), [(4, 8192, 16384), (16, 8192, 16384), (8, 24576, 32768), (32, 24576, 49152)])
def test_ranks_that_wait_for_each_other_in_every_pass_lose_at_most_a_tenth(law, ranks, longest, budget):
    lengths, work = _lengths(law, 512, longest), work_of(ModelConfig())
    found = plan_packing(lengths, ranks, budget, work)
    times = [[sum(work(lengths[i]) for i in bin) for bin in of_rank] for of_rank in found]
    passes = len(times[0])
    waited = sum(max(t[j] for t in times) for j in range(passes)) / (sum(map(sum, times)) / ranks)
    assert waited <= 1.1, f"{waited:.3f} over {passes} passes"
    assert max(map(sum, times)) / (sum(map(sum, times)) / ranks) <= 1.1
    alone = sum(2 * n > budget for n in lengths)  # no two of these fit into one microbatch
    assert passes <= -(-max(sum(lengths) / budget, alone) // ranks) + 2, "and the budget is used"


def test_what_a_sequence_costs_worked_by_hand():
    # 20B: 24 layers of 126.1 million multiplying parameters and a head of 579.1 million; 12 full and 12 windowed layers; window 128.
    work = work_of(ModelConfig())
    matrices = 24 * (2880 * (2 * 4096 + 2 * 512) + 2880 * 32 + 4 * 3 * 2880 * 2880) + 201088 * 2880
    assert matrices == 3_607_142_400  # of 3,608,307,264 active parameters; the rest are biases, norms and sinks
    full, windowed = 8192 * 8193 // 2, 128 * 129 // 2 + (8192 - 128) * 128
    pair = 14 * 64 * 64
    by_hand = 6 * matrices * 8192 / 650e12 + 12 * pair * full / 500e12 + 12 * pair * windowed / 190e12
    assert work(8192) == pytest.approx(by_hand, rel=1e-12)
    assert work(1) * 8192 < work(8192) < work(1) * 8192 * 1.25  # at 8k attention is a fifth of it
    assert work(131072) > 3.5 * 131072 * work(1)  # at 131k it is most


def test_by_hand():
    b = make_microbatch([sample(1, 3), sample(2, 2)])
    assert b.tokens_T.tolist() == [100, 101, 102, 200, 201]
    assert b.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert b.cu_seqlens.tolist() == [0, 3, 5]
    # trained where (7t + i) % 3 != 0 and t > 0: sample 1: t=1 (8%3=2), t=2 (15%3=0 no); sample 2: t=1 (9%3=0 no)
    assert b.predict_N.tolist() == [0]
    assert b.target_N.tolist() == [101]
    assert b.max_seqlen == 3


def test_a_sample_over_the_budget_is_refused():
    for ranks in (1, 2):
        with pytest.raises(ValueError, match="s0 has 9 tokens, the microbatch budget is 8"):
            pack([sample(0, 9)], ranks=ranks, tokens_per_microbatch=8)


@pytest.mark.parametrize("field", ["trained", "engine_logp", "token_advantages", "values", "value_targets"])
def test_a_sample_whose_entries_are_no_entry_a_token_is_refused_by_name(field):
    whole = {"token_advantages": (0.0,) * 4, "values": (0.0,) * 4, "value_targets": (0.0,) * 4}
    good, bad = (replace(sample(i, 4), **whole) for i in (1, 2))
    make_microbatch([good, bad])
    for entries in (getattr(bad, field)[:3], (*getattr(bad, field), 0.0)):
        with pytest.raises(ValueError, match=rf"s2: 4 tokens, but {len(entries)} entries of {field}"):
            make_microbatch([replace(bad, **{field: entries}), good])


def test_minibatches_cover_the_step_and_empty_ones_are_left_out():
    samples = [sample(i, 4) for i in range(5)]
    parts = pack_step(samples, minibatches=2, ranks=1, tokens_per_microbatch=100)
    assert [[n for b in part[0] for n in b.names] for part in parts] == [["s0", "s1", "s2"], ["s3", "s4"]]
    assert len(pack_step(samples[:1], minibatches=3, ranks=2, tokens_per_microbatch=100)) == 1


def test_no_samples_no_microbatches():
    assert pack([], ranks=2, tokens_per_microbatch=8) == [[], []]
