"""Laws of the two vocabularies. In: the shipped tiny vocabulary; GPT-OSS's ranks where shared/data is present."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.schema import Config, TaskConfig, TokenizerConfig
from megatron_gptoss.data.tokenizer import TINY_FILE, Tokenizer, load_tokenizer
from megatron_gptoss.errors import DataError
from tests.helpers.shared_data import shared_file
from tools.make_tiny_tokenizer import SPECIAL, make

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))


def gpt_oss() -> Tokenizer:
    return load_tokenizer(Config(tokenizer=TokenizerConfig(path=str(shared_file("o200k_base.tiktoken").parent))))


@pytest.fixture(params=["tiny", "gpt-oss"])
def tokenizer(request) -> Tokenizer:
    return TINY if request.param == "tiny" else gpt_oss()


def test_the_shipped_file_is_what_the_tool_makes():
    assert TINY_FILE.read_text() == make().to_str(pretty=True) + "\n"


def test_tiny_ids_of_the_recipe():
    assert TINY.vocab_size == 339
    assert [TINY.special(name) for name in SPECIAL] == list(range(8))
    for one_token in ["commentary to=functions.calc ", '{"expression":"', '"}', "functions.calc to=assistant", "assistant", "7", "*", "("]:
        assert len(TINY.encode(one_token)) == 1, one_token
    assert len(TINY.encode("2024")) == 4  # digits never merge


def test_gpt_oss_ids_published_with_harmony():
    tokenizer = gpt_oss()
    published = {"<|return|>": 200002, "<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007}
    published |= {"<|message|>": 200008, "<|call|>": 200012, "<|endoftext|>": 199999}
    assert {name: tokenizer.special(name) for name in published} == published
    assert tokenizer.special_name(199997) is None  # the last rank of o200k_base
    assert tokenizer.special_name(199998) is not None
    assert tokenizer.special_name(201088) == "<|unknown_201088|>"


TEXTS = st.text() | st.lists(st.sampled_from([*SPECIAL, "<|endoftext|>", "37+58", " to=", "é", "\ud800", "日本"])).map("".join)


@given(TEXTS)
def test_text_is_never_special_and_comes_back(text):
    for tokenizer in [TINY, gpt_oss()]:
        ids = tokenizer.encode(text)
        assert all(tokenizer.special_name(i) is None for i in ids)
        assert tokenizer.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)


@given(st.lists(st.integers(-5, 205_000) | st.integers(0, 600)))
def test_any_ids_can_be_shown(ids):
    for tokenizer in [TINY, gpt_oss()]:
        assert b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace") == tokenizer.decode(ids)


def test_ids_without_a_meaning_are_seen(tokenizer):
    assert tokenizer.decode([tokenizer.special("<|call|>"), 300_000]) == "<|call|><|unknown_300000|>"
    with pytest.raises(KeyError):
        tokenizer.special("<|no such token|>")


def test_where_the_ranks_are_looked_for(tmp_path, monkeypatch):
    data = shared_file("o200k_base.tiktoken").parent
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(DataError, match=r"TIKTOKEN_ENCODINGS_BASE = .*there is no o200k_base.tiktoken"):
        load_tokenizer(Config())
    with pytest.raises(DataError, match=r"tokenizer.path = /nowhere"):
        load_tokenizer(Config(tokenizer=TokenizerConfig(path="/nowhere")))
    assert load_tokenizer(Config(tokenizer=TokenizerConfig(path=str(data)))).vocab_size == 201_088  # a set path wins
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"] == str(tmp_path)  # and leaves the environment as it was
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "")
    assert load_tokenizer(Config(task=TaskConfig(path=str(data / "gsm8k_train.jsonl")))).encode("hello world") == [24912, 2375]


def test_a_damaged_ranks_file_is_refused(tmp_path):
    (tmp_path / "o200k_base.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(DataError, match=r"Set tokenizer.path to a folder that holds an intact o200k_base.tiktoken"):
        load_tokenizer(Config(tokenizer=TokenizerConfig(path=str(tmp_path))))
