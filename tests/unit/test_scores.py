"""Laws of a step's scores: what the trainer knew of each token reaches the file beside the archive, exactly and under the right name."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.errors import DataError
from megatron_gptoss.rollout.scores import read_scores, scores_beside, write_scores
from megatron_gptoss.types import SampleScores

NUMBERS = st.floats(width=32)


@st.composite
def scores(draw, name):
    pairs = draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
    advantage = draw(st.sampled_from([tuple(a for a, _ in pairs), (pairs[0][0],) * len(pairs)]))
    return SampleScores(name, advantage, tuple(logp for _, logp in pairs))


def bits(each: SampleScores) -> tuple:
    """== says that nan differs from itself, and that 0.0 equals -0.0. Of a nan neither sign nor payload means anything."""
    return each.name, *(tuple(struct.pack("d", math.nan if math.isnan(x) else x) for x in v) for v in (each.advantage, each.trainer_logp))


@given(st.lists(st.text(), unique=True, max_size=4).flatmap(lambda names: st.tuples(*map(scores, names))))
def test_reading_gives_back_what_was_written(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("scores") / "step-3.scores.jsonl"
    write_scores(path, 3, written)
    assert [bits(each) for each in read_scores(path).values()] == [bits(each) for each in written]


def test_one_number_stands_for_an_advantage_that_all_tokens_share(tmp_path):
    write_scores(tmp_path / "a.jsonl", 3, [SampleScores("p#0", (0.5, 0.5), (-1.0, math.nan)), SampleScores("p#1", (0.5, 1.0), (0.0, 0.0))])
    first, second = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert first == {"step": 3, "sample": "p#0", "advantage": 0.5, "trainer_logp": [-1.0, "nan"]}
    assert second["advantage"] == [0.5, 1.0]


def test_it_stands_beside_its_archive(tmp_path):
    assert scores_beside(tmp_path / "step-12.jsonl") == tmp_path / "step-12.scores.jsonl"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"sample": "p#0", "advantage": 1.0}', "the field 'trainer_logp' is missing"),
        ('{"sample": "p#0", "advantage": [1.0], "trainer_logp": [0.0, 0.0]}', "1 advantages but 2 log-probs"),
        ('{"sample": "p#0", "advantage": "much", "trainer_logp": [0.0]}', "could not convert"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, why):
    path = tmp_path / "a.jsonl"
    path.write_text('{"sample": "p#1", "advantage": 1.0, "trainer_logp": [0.0]}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: this line holds no scores: .*{why}"):
        read_scores(path)
