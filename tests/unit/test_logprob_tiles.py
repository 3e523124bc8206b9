"""Tiles cover every logit once, never hold more than a chunk of them, and are cut where it costs least."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.logprob.tiles import default_chunk, plan_tiles


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 4000), st.integers(1, 500))
def test_tiles_cover_everything_once_and_fit_the_buffer(N, V, chunk, fewest):
    plan = plan_tiles(N, V, chunk, fewest)
    for slices, length in ((plan.rows, N), (plan.columns, V)):
        assert [i for s in slices for i in range(s.start, s.stop)] == list(range(length))
    sizes = [(r.stop - r.start) * (c.stop - c.start) for r in plan.rows for c in plan.columns]
    assert max(sizes) == plan.largest == sizes[-1] <= chunk * V
    if chunk >= N:
        assert len(sizes) == 1, "what fits is not cut"


def test_gpt_oss_by_hand():
    """2e9 bytes hold 4,972 tokens x 201,088 logits of 2 bytes. Over 24,576 tokens that is 40,682 columns, 40,576 = 317 x 128 of them
    aligned: four whole tiles of all tokens and a rest of 38,784."""
    assert default_chunk(201_088, 2) == 4_972
    plan = plan_tiles(24_576, 201_088, 4_972)
    assert plan.rows == (slice(0, 24_576),)
    assert [c.stop - c.start for c in plan.columns] == [38_784] + 4 * [40_576]
    assert 2 * plan.largest == 1_994_391_552


def test_tokens_are_cut_when_columns_would_be_too_few():
    """Vocabulary of 25,136 (an eighth) and a buffer of 1,024 tokens: 131,072 tokens would leave 196 columns."""
    plan = plan_tiles(131_072, 25_136, 1_024)
    assert max(c.stop - c.start for c in plan.columns) == 4_096
    assert max(r.stop - r.start for r in plan.rows) == 1_024 * 25_136 // 4_096
    assert default_chunk(10**12, 2) == 1
