"""Which token ids stand for a text, for the tiny test vocabulary and for GPT-OSS's own.

In: text or ids. Out: ids or text, and the ids of Harmony's special tokens by name. It does not know messages, channels or turns
(harmony.py does), and plain text never becomes a special token here, whatever it spells.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import tokenizers
from openai_harmony import HarmonyEncoding, HarmonyError, load_harmony_encoding

from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import DataError

TINY_FILE = Path(__file__).with_name("tiny_tokenizer.json")
RANKS_FILE = "o200k_base.tiktoken"
GPT_OSS_TEXT_IDS = 199_998  # ids below are byte-pair ranks, the rest of the 201,088 are special or reserved (openai-harmony 0.0.8)
GPT_OSS_VOCAB = 201_088


class Tokenizer(Protocol):
    """What the rest of the house may ask of a vocabulary. Any int will do as an id: a model can sample ids without a meaning."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Ids in use, 0 .. vocab_size - 1. A model may have more rows than that."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special token, also where the text spells one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens by name; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a special token's are its name."""
        ...

    def special(self, name: str) -> int:
        """Id of a special token, "<|start|>". KeyError for a name this vocabulary lacks."""
        ...

    def special_name(self, token_id: int) -> str | None:
        """Name of a special token, None for a token of text. An id without a meaning counts as special: "<|unknown_511|>"."""
        ...


class TinyTokenizer:
    """Byte-level BPE of 339 ids: digits, operators and the fixed phrases of the arithmetic task are one token each."""

    name = "tiny"

    def __init__(self, file: Path = TINY_FILE) -> None:
        self._bpe = tokenizers.Tokenizer.from_file(str(file))
        self._bpe.encode_special_tokens = True  # the library's name for: text that spells a special token stays text
        self.vocab_size = self._bpe.get_vocab_size()
        self._special = {token.content: token_id for token_id, token in self._bpe.get_added_tokens_decoder().items()}
        self._special_name = {token_id: name for name, token_id in self._special.items()}
        vocab = self._bpe.get_vocab()
        self._bytes = {
            token_id: token.encode() if token in self._special else bytes(_BYTE_OF[c] for c in token) for token, token_id in vocab.items()
        }

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(_well_formed(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id) or _unknown(token_id).encode()

    def special(self, name: str) -> int:
        return self._special[name]

    def special_name(self, token_id: int) -> str | None:
        if token_id in self._special_name:
            return self._special_name[token_id]
        return None if token_id in self._bytes else _unknown(token_id)


class GptOssTokenizer:
    """The 201,088 ids of GPT-OSS, through openai-harmony."""

    name = "gpt-oss"
    vocab_size = GPT_OSS_VOCAB

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self.encoding = encoding
        self._special = {
            name: encoding.encode(name, allowed_special={name})[0]
            for name in ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<|endoftext|>")
        }

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode(_well_formed(text), disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        if all(0 <= i < GPT_OSS_VOCAB for i in ids):
            return self.encoding.decode(ids)
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < GPT_OSS_VOCAB:
            return _unknown(token_id).encode()
        return bytes(self.encoding._inner.decode_bytes([token_id]))  # the public decode() replaces a part of a character by U+FFFD

    def special(self, name: str) -> int:
        return self._special[name]

    def special_name(self, token_id: int) -> str | None:
        return None if 0 <= token_id < GPT_OSS_TEXT_IDS else self.token_bytes(token_id).decode()


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer the configuration names. DataError when GPT-OSS's ranks cannot be found, with what to set."""
    if config.tokenizer.name == "tiny":
        return _tiny()
    return _gpt_oss(_ranks_folder(config))


def tokenizer_is_here(config: Config) -> bool:
    """Whether `load_tokenizer` finds its file on this machine, so that nothing is downloaded. DataError for a named folder without it."""
    return config.tokenizer.name == "tiny" or _ranks_folder(config) != ""


def _ranks_folder(config: Config) -> str:
    """Folder that holds o200k_base.tiktoken; "" leaves it to openai-harmony, which downloads. A folder the user names must hold it."""
    named = [("tokenizer.path", config.tokenizer.path), ("TIKTOKEN_ENCODINGS_BASE", os.environ.get("TIKTOKEN_ENCODINGS_BASE", ""))]
    for key, folder in named:
        if folder:
            if not (Path(folder) / RANKS_FILE).is_file():
                raise DataError(f"{key} = {folder}: there is no {RANKS_FILE} in that folder. Set it to the folder that holds the file.")
            return folder
    if config.task.path and (Path(config.task.path).parent / RANKS_FILE).is_file():
        return str(Path(config.task.path).parent)
    return ""


@functools.cache
def _tiny() -> TinyTokenizer:
    return TinyTokenizer()


@functools.cache
def _gpt_oss(folder: str) -> GptOssTokenizer:
    try:
        with _encodings_base(folder):
            return GptOssTokenizer(load_harmony_encoding("HarmonyGptOss"))
    except (HarmonyError, OSError, ValueError) as error:
        source = f"{folder}/{RANKS_FILE} cannot be used" if folder else f"{RANKS_FILE} is not on this machine and could not be downloaded"
        cure = f"Set tokenizer.path to a folder that holds an intact {RANKS_FILE}."
        raise DataError(f"GPT-OSS tokenizer: {source} ({error}). {cure}") from error


@contextmanager
def _encodings_base(folder: str) -> Iterator[None]:
    """openai-harmony takes the folder only from the environment; set it for the time of the load."""
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if folder:
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TIKTOKEN_ENCODINGS_BASE", None)
        else:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def _unknown(token_id: int) -> str:
    return f"<|unknown_{token_id}|>"


def _well_formed(text: str) -> str:
    """A lone surrogate (JSON allows "\\ud800") has no UTF-8; it becomes U+FFFD, as openai-harmony does it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, inverted: printable bytes stand for themselves, the others for U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
