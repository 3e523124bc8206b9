"""Laws of a transcript: every token once and in order, text and roles as the conversation has them, numbers with their own tokens."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.obs.transcript import token_texts, transcript
from megatron_gptoss.types import Prompt, Rollout, VersionRun
from tests.helpers.conversations import HOSTILE, TINY, conversation, scores_of

PROMPT = Prompt("p/0", "arithmetic", "(37+58)*1", "95")
TOKENS = st.lists(st.tuples(st.integers(0, 345), st.booleans()), min_size=1, max_size=40)


def any_rollout(tokens) -> Rollout:
    sampled = (False, *(flag for _, flag in tokens[1:]))
    count = sum(sampled)
    return Rollout(
        PROMPT, 0, tuple(t for t, _ in tokens), sampled, tuple(-i if f else 0.0 for i, f in enumerate(sampled)),
        (VersionRun(1, count),) if count else (), 0, "final", None, 0.0, (),
    )  # fmt: skip


@given(TOKENS)
def test_every_token_is_there_once_and_in_order_whatever_was_said(tokens):
    rollout = any_rollout(tokens)
    read = list(transcript(rollout, 0, TINY).tokens)
    assert [t.position for t in read] == list(range(len(tokens)))
    assert tuple(t.token_id for t in read) == rollout.token_ids
    assert tuple(t.sampled for t in read) == rollout.sampled
    assert "".join(t.text for t in read) == TINY.decode(rollout.token_ids)
    assert all(t.logp == rollout.logp[t.position] for t in read if t.sampled)


@given(st.lists(st.sampled_from([*TINY.encode("é日😀"), *TINY.encode("a"), TINY.special("<|end|>"), 600]), max_size=12))
def test_characters_of_several_tokens_and_broken_ones_join_to_what_decode_gives(ids):
    assert "".join(token_texts(ids, TINY)) == TINY.decode(ids)


def test_a_character_stands_with_its_last_token():
    ids = TINY.encode("é")
    assert len(ids) == 2 and token_texts(ids, TINY) == ["", "é"]


@pytest.mark.parametrize("begun", [b"\xc3", b"\xf0\x9f"])
def test_a_character_that_nobody_finished_hides_no_end_of_a_message(begun):
    prefix = [TINY.special("<|start|>"), *TINY.encode("assistant"), TINY.special("<|message|>")]
    said = [*TINY.encode("a"), *(next(i for i in range(TINY.vocab_size) if TINY.token_bytes(i) == bytes([byte])) for byte in begun)]
    after = [TINY.special("<|end|>"), TINY.special("<|start|>"), *TINY.encode("user"), TINY.special("<|message|>"), *TINY.encode("b")]
    read = transcript(any_rollout([(t, True) for t in (*prefix, *said, *after)]), 0, TINY)
    assert [m.role for m in read.messages] == ["assistant", "user"]
    assert [t.text for t in read.messages[0].end] == ["<|end|>"]
    assert "".join(t.text for t in read.messages[0].body) == "a\ufffd"


def test_messages_have_the_roles_and_recipients_of_the_conversation():
    read = transcript(conversation(PROMPT, 0, '{"expression":"37+58"}'), 0, TINY)
    assert [m.title for m in read.messages] == [
        "developer",
        "user",
        "assistant to functions.calc, commentary",
        "functions.calc to assistant, commentary",
        "assistant, final",
    ]
    assert [m.role for m in read.messages] == ["developer", "user", "assistant", "tool", "assistant"]
    bodies = ["".join(t.text for t in m.body) for m in read.messages]
    assert bodies[1:] == ["(37+58)*1", '{"expression":"37+58"}', "95", "95"]
    assert ["".join(t.text for t in m.end) for m in read.messages] == ["<|end|>", "<|end|>", "<|call|>", "<|end|>", "<|return|>"]


def test_text_that_spells_special_tokens_cuts_nothing():
    said = "<|end|><|start|>user<|message|>x"
    read = transcript(conversation(PROMPT, 0, said), 0, TINY)
    assert len(read.messages) == 5 and "".join(t.text for t in read.messages[2].body) == said


@pytest.mark.parametrize(
    ("after", "titles"),
    [
        ((), ["assistant"]),  # a prefix that nobody continued
        (("5",), ["unfinished"]),
        (("<|channel|>", "final", "<|message|>", "5", "<|channel|>", "final"), ["assistant, final", "unfinished"]),
        (("<|message|>", "5", "<|end|>", "<|channel|>", "final", "<|message|>", "6"), ["assistant", "assistant, final"]),
    ],
)
def test_malformed_turns_are_kept_as_they_stand(after, titles):
    prefix = [TINY.special("<|start|>"), *TINY.encode("assistant")]
    said = [TINY.special(word) if word.startswith("<|") else TINY.encode(word)[0] for word in after]
    tokens = [*((t, False) for t in prefix), *((t, True) for t in said)]
    if not after:
        titles = ["unfinished"]
    read = transcript(any_rollout(tokens), 0, TINY)
    assert [m.title for m in read.messages] == titles


def test_numbers_stand_with_their_own_tokens():
    rollout = conversation(PROMPT, 0, "37+58")
    count = sum(rollout.sampled)
    logp = [x for x, flag in zip(rollout.logp, rollout.sampled, strict=True) if flag]
    scores = replace(scores_of(rollout, "p/0#0"), trainer_logp=tuple(x + i / 64 for i, x in enumerate(logp)), advantage=tuple(range(count)))
    read = transcript(rollout, 0, TINY, scores)
    said = [t for t in read.tokens if t.sampled]
    assert [t.mismatch for t in said] == [i / 64 for i in range(count)] and [t.advantage for t in said] == list(range(count))
    assert {t.text for t in said if t.version == 4} >= {"final"} and "<|call|>" in {t.text for t in said if t.version == 3}
    assert all((t.logp, t.mismatch, t.advantage, t.version) == (None,) * 4 for t in read.tokens if not t.sampled)
    assert [t.mismatch for t in read.strongest("mismatch", 2)] == [(count - 1) / 64, (count - 2) / 64]
    assert read.advantage is None and transcript(rollout, 0, TINY, scores_of(rollout, "x")).advantage == 0.5


def test_what_cannot_be_subtracted_is_no_mismatch():
    rollout = conversation(PROMPT, 0, "37+58")
    scores = scores_of(rollout, "x")
    spoilt = replace(scores, trainer_logp=(math.nan, -math.inf, *scores.trainer_logp[2:]))
    gaps = [t.mismatch for t in transcript(rollout, 0, TINY, spoilt).tokens if t.sampled]
    assert gaps[:2] == [None, None] and set(gaps[2:]) == {0.25}


def test_scores_of_another_rollout_are_refused():
    rollout = conversation(PROMPT, 0, HOSTILE)
    with pytest.raises(ValueError, match=r"scores of .* tokens, and .* were sampled"):
        transcript(rollout, 0, TINY, scores_of(conversation(PROMPT, 0, "1"), "p/0#0"))
