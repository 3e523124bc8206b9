"""Does Harmony's parser keep its laws on a million token streams? Random ids, random phrases, and well-formed turns with mutations.

    .venv/bin/python tools/fuzz_harmony.py --count 1000000 --seed 0 [--ranks FOLDER]

In: a seed and a count; a folder with o200k_base.tiktoken for GPT-OSS's own vocabulary, the tiny one otherwise. Out: how many streams of
which outcome; at the first broken law it prints the stream and ends with 1. The laws (`broken_law`) are read off the ids here, without
the parser.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.harmony import ENDS, ParsedTurn, parse_turn, render_turn
from megatron_gptoss.data.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
PHRASES = (
    *(
        "assistant",
        "user",
        "analysis",
        "final",
        "commentary",
        " to=functions.calc",
        " to=python",
        " to=",
        " to=all",
        " json",
        " code",
        "{}",
    ),
    *('{"a":"<|call|>"}', " ", "é日", "print(1)\n", "to", "=x", "<|start|>assistant"),
)
HEADERS = (
    *("<|channel|>commentary to=functions.calc <|constrain|>json", "<|channel|>commentary to=functions.calc<|constrain|>json"),
    *("<|channel|>commentary to=functions.calc json", "<|channel|>commentary to=functions.calc", " to=functions.calc<|channel|>commentary"),
    *(
        " to=functions.calc<|channel|>commentary <|constrain|>json",
        "<|channel|>analysis to=python code",
        " to=python<|channel|>analysis code",
    ),
)


class Streams:
    """An endless seeded source of token streams for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(f"fuzz/{seed}")
        self.specials = [tokenizer.special(name) for name in SPECIALS]
        # Most ids are text or Harmony's own; some are reserved, above the vocabulary, or negative.
        self.top = tokenizer.vocab_size + 50
        self.phrases = [self._ids(text, tokenizer, special=False) for text in PHRASES]
        self.headers = [self._ids(text, tokenizer) for text in HEADERS]
        self.thought = self._ids("<|channel|>analysis<|message|>Hm.<|end|>", tokenizer)
        self.answer = self._ids("<|channel|>final<|message|>4<|return|>", tokenizer)
        self.message, self.call, self.back = (self._ids(text, tokenizer) for text in ("<|message|>", "<|call|>", "<|start|>assistant"))

    def next(self) -> list[int]:
        kind = self.rng.randrange(10)
        if kind == 0:
            return self.random_ids()
        if kind < 4:
            return self.random_phrases()
        return self.mutated(self.turn())

    def random_ids(self) -> list[int]:
        rng = self.rng
        return [rng.choice(self.specials) if rng.random() < 0.3 else rng.randrange(-2, self.top) for _ in range(rng.randrange(24))]

    def random_phrases(self) -> list[int]:
        rng, ids = self.rng, []
        for _ in range(rng.randrange(16)):
            ids += [rng.choice(self.specials)] if rng.random() < 0.5 else rng.choice(self.phrases)
        return ids

    def turn(self) -> list[int]:
        """A well-formed turn: thoughts, then parallel calls in any spelling, or an answer."""
        rng = self.rng
        messages = [self.thought] * rng.randrange(3)
        if rng.random() < 0.3:
            messages.append(self.answer)
        else:
            messages += [self._one_call() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        ids = list(messages[0])
        for message in messages[1:]:
            ids += [*self.back, *message]
        return ids

    def mutated(self, ids: list[int]) -> list[int]:
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
            at, other = rng.randrange(len(ids) + 1), rng.randrange(len(ids) + 1)
            low, high = min(at, other), max(at, other)
            match rng.randrange(6):
                case 0:
                    ids = ids[:at] + ids[at + 1 :]
                case 1:
                    ids = [*ids[:at], rng.choice(self.specials), *ids[at:]]
                case 2:
                    ids = [*ids[:at], *rng.choice(self.phrases), *ids[at:]]
                case 3:
                    ids = ids[:at]  # truncated
                case 4:
                    ids = ids[:high] + ids[low:]  # a stretch twice
                case _:
                    ids = [*ids[:at], rng.randrange(-2, self.top), *ids[at + 1 :]]
        return ids

    def _one_call(self) -> list[int]:
        return [*self.rng.choice(self.headers), *self.message, *self.rng.choice(self.phrases), *self.call]

    @staticmethod
    def _ids(text: str, tokenizer: Tokenizer, special: bool = True) -> list[int]:
        ids: list[int] = []
        while special and text:
            at, name = min(((text.find(s), s) for s in SPECIALS if s in text), default=(len(text), ""))
            ids += [*tokenizer.encode(text[:at]), *([tokenizer.special(name)] if name else [])]
            text = text[at + len(name) :]
        return ids or tokenizer.encode(text)


def broken_law(ids: Sequence[int], turn: ParsedTurn, tokenizer: Tokenizer) -> str | None:
    """The law that a parse breaks, in words; None when it keeps all."""
    if render_turn(turn) != list(ids):
        return "render(parse(x)) is not x"
    made = _calls_in(ids, tokenizer)
    if Counter(call.recipient for call in turn.calls) != made:
        return f"calls are lost or made up: {dict(made)} stand there, found {turn.calls}"
    if (turn.kind == "malformed") != (turn.problem is not None) or bool(turn.problem) != bool(turn.detail):
        return "malformed without a problem, or a problem without words"
    last = tokenizer.special_name(ids[-1]) if ids else None
    if turn.kind == "final" and (turn.calls or last != "<|return|>" or turn.channel != "final"):
        return "a final answer that is none"
    if turn.kind == "call" and (last != "<|call|>" or not turn.calls or any(c.problem or not c.recipient for c in turn.calls)):
        return "a call that is none"
    return None


def _calls_in(ids: Sequence[int], tokenizer: Tokenizer) -> Counter[str | None]:
    """How often each to=NAME stands in a header of a stream, and as None each `<|call|>` whose message has no such header."""
    made: Counter[str | None] = Counter()
    names: set[str | None] = set()  # of the message being read
    text: list[int] = []
    in_content = False
    for token in [*ids, tokenizer.special("<|start|>")]:
        name = tokenizer.special_name(token)
        if name is None:
            text.append(token)
            continue
        if not in_content:
            names |= {word[3:] for word in tokenizer.decode(text).split() if word.startswith("to=")} - {"", "all"}
        text = []
        if name == "<|call|>" and not names:
            names = {None}
        if name in (*ENDS, "<|start|>") or (name == "<|channel|>" and in_content):
            made.update(names)
            names, in_content = set(), False
        in_content = in_content or name == "<|message|>"
    return made


def fuzz(tokenizer: Tokenizer, seed: int, count: int) -> Counter[str]:
    """Outcomes of `count` streams. AssertionError, with the stream, at the first broken law."""
    streams, outcomes = Streams(tokenizer, seed), Counter()
    for n in range(count):
        ids = streams.next()
        turn = parse_turn(ids, tokenizer)
        law = broken_law(ids, turn, tokenizer)
        if law is not None:
            raise AssertionError(f"stream {n} of seed {seed}: {law}\n{ids}\n{tokenizer.decode(ids)}\n{turn}")
        outcomes[turn.problem or (turn.kind if len(turn.calls) < 2 else f"{len(turn.calls)} parallel calls")] += 1
    return outcomes


def main(
    count: Annotated[int, typer.Option(help="how many streams")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="seed of the streams")] = 0,
    ranks: Annotated[str, typer.Option(help="folder of o200k_base.tiktoken; empty: the tiny vocabulary")] = "",
) -> None:
    named = TokenizerConfig(path=ranks) if ranks else TokenizerConfig(name="tiny")
    tokenizer, start = load_tokenizer(Config(tokenizer=named)), time.monotonic()
    try:
        outcomes = fuzz(tokenizer, seed, count)
    except AssertionError as error:
        sys.exit(str(error))
    print(f"{count} streams, seed {seed}, tokenizer {tokenizer.name}: no law broken, {time.monotonic() - start:.0f} s")
    for name, number in outcomes.most_common():
        print(f"  {number:8d}  {name}")


if __name__ == "__main__":
    typer.run(main)
