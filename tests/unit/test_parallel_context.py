"""Cutting a packed microbatch into context-parallel shards loses, doubles and moves nothing."""

import pytest
import torch

from megatron_gptoss.parallel.context import pad, take_shard
from megatron_gptoss.parallel.packing import make_microbatch
from tests.helpers.training import samples


def batch(seed=0):
    return make_microbatch(samples(5, seed=seed, shortest=3, longest=17))


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 2), (2, 4), (3, 6), (8, 8), (8, 64)])
def test_shards_in_rank_order_are_the_padded_stream(ranks, multiple):
    whole = batch()
    shards = [take_shard(whole, rank=r, ranks=ranks, multiple=multiple) for r in range(ranks)]
    T = whole.tokens_T.numel()
    for name in ("tokens_T", "positions_T"):
        joined = torch.cat([getattr(s, name) for s in shards])
        assert joined.numel() % multiple == 0 and joined.numel() - T < multiple
        assert torch.equal(joined[:T], getattr(whole, name))
    assert len({s.tokens_T.numel() for s in shards}) == 1
    assert all(int(s.cu_seqlens[-1]) == multiple * -(-T // multiple) for s in shards)
    assert all(torch.equal(s.cu_seqlens[: len(whole.names) + 1], whole.cu_seqlens) for s in shards)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_prediction_is_made_once_by_the_rank_that_holds_its_token(ranks):
    whole = batch(seed=1)
    shards = [take_shard(whole, rank=r, ranks=ranks, multiple=ranks) for r in range(ranks)]
    assert torch.equal(torch.cat([s.mine_M for s in shards]).sort().values, torch.arange(whole.predict_N.numel()))
    for s in shards:
        assert torch.equal(s.tokens_T[s.predict_M], whole.tokens_T[whole.predict_N[s.mine_M]])
        for ours, theirs in (("target_M", "target_N"), ("advantage_M", "advantage_N"), ("engine_logp_M", "engine_logp_N")):
            assert torch.equal(getattr(s, ours), getattr(whole, theirs)[s.mine_M])


def test_padding_is_a_sequence_of_its_own_that_predicts_nothing():
    whole = batch(seed=2)
    T = whole.tokens_T.numel()
    padded = pad(whole, T + 3)
    padded.check()
    assert padded.cu_seqlens.tolist() == [*whole.cu_seqlens.tolist(), T + 3]
    assert padded.positions_T[T:].tolist() == [0, 1, 2]
    assert padded.predict_N is whole.predict_N
    assert pad(whole, T) is whole, "what fits is left alone"


def test_shards_must_be_equal():
    with pytest.raises(ValueError, match="multiple of 3 tokens cannot be cut into 2"):
        take_shard(batch(), rank=0, ranks=2, multiple=3)
