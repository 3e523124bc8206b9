"""Laws of packing: nothing is lost, nothing is doubled, budgets hold, ranks do the same number of passes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.parallel.packing import make_microbatch, pack, pack_step, split_by_budget, split_over_ranks
from megatron_gptoss.types import Sample


def sample(i: int, length: int) -> Sample:
    trained = tuple(t > 0 and (t * 7 + i) % 3 != 0 for t in range(length))
    return Sample(
        name=f"s{i}", token_ids=tuple(100 * i + t for t in range(length)), trained=trained,
        engine_logp=tuple(-(t + 1.0) if x else 0.0 for t, x in enumerate(trained)), advantage=float(i),
    )  # fmt: skip


samples_strategy = st.lists(st.integers(2, 30), min_size=1, max_size=20).map(lambda ls: [sample(i, n) for i, n in enumerate(ls)])


@given(samples_strategy, st.integers(1, 4), st.integers(30, 90))
def test_every_trained_token_lands_exactly_once(samples, ranks, budget):
    packed = pack(samples, ranks=ranks, tokens_per_microbatch=budget)
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


@given(samples_strategy, st.integers(1, 4))
def test_ranks_are_balanced_as_greedily_as_possible(samples, ranks):
    loads = [sum(len(s.token_ids) for s in part) for part in split_over_ranks(samples, ranks)]
    assert max(loads) - min(loads) <= max(len(s.token_ids) for s in samples)


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
    with pytest.raises(ValueError, match="s0 has 9 tokens"):
        split_by_budget([sample(0, 9)], 8)


def test_minibatches_cover_the_step_and_empty_ones_are_left_out():
    samples = [sample(i, 4) for i in range(5)]
    parts = pack_step(samples, minibatches=2, ranks=1, tokens_per_microbatch=100)
    assert [[n for b in part[0] for n in b.names] for part in parts] == [["s0", "s1", "s2"], ["s3", "s4"]]
    assert len(pack_step(samples[:1], minibatches=3, ranks=2, tokens_per_microbatch=100)) == 1


def test_no_samples_no_microbatches():
    assert pack([], ranks=2, tokens_per_microbatch=8) == [[], []]
