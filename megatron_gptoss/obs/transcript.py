"""An archived rollout as a person reads it: messages with their role, made of tokens with all that is known of each.

In: a rollout, a tokenizer, and, when the step was trained, its scores. Out: a `Transcript`, every token of the rollout in it once and in
order. For the eye: what is no whole message is kept as it stands. It draws nothing (browse.py, rollouts_page.py) and reads no file.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_gptoss.data.harmony import ENDS
from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.types import Rollout, SampleScores

ROLES = ("system", "developer", "user", "assistant")
Measure = Literal["none", "advantage", "mismatch", "logp", "version"]
MEASURES: dict[Measure, str] = {
    "none": "no colour",
    "advantage": "advantage",
    "mismatch": "trainer minus engine, log-prob",
    "logp": "engine's log-prob",
    "version": "policy version",
}


@dataclass(frozen=True)
class Token:
    """One token of a conversation. What is not known is None: of a prompt's token all of it."""

    position: int
    token_id: int
    text: str  # "" where a character ends only with a later token
    special: bool
    sampled: bool
    logp: float | None = None  # the engine's, nats
    trainer_logp: float | None = None  # nats
    advantage: float | None = None
    version: int | None = None  # of the policy that sampled it

    @property
    def mismatch(self) -> float | None:
        """Trainer minus engine, nats. None where either is not known or not finite."""
        if self.logp is None or self.trainer_logp is None:
            return None
        gap = self.trainer_logp - self.logp
        return gap if math.isfinite(gap) else None

    def value(self, measure: Measure) -> float | None:
        return None if measure == "none" else getattr(self, measure)


@dataclass(frozen=True)
class Message:
    """A stretch of tokens with one speaker: header up to <|message|>, body, and the end token where there is one."""

    role: str  # one of ROLES, "tool", or "?" for tokens without a header
    name: str  # a tool's
    channel: str
    recipient: str
    header: tuple[Token, ...]
    body: tuple[Token, ...]
    end: tuple[Token, ...]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (*self.header, *self.body, *self.end)

    @property
    def title(self) -> str:
        """`assistant to functions.calc, commentary`."""
        who = self.name or self.role if self.role == "tool" else "unfinished" if self.role == "?" else self.role
        to = f" to {self.recipient}" if self.recipient else ""
        return f"{who}{to}{f', {self.channel}' if self.channel else ''}"


@dataclass(frozen=True)
class Transcript:
    rollout: Rollout
    group: int  # place of its group in the step
    messages: tuple[Message, ...]

    @property
    def tokens(self) -> Iterator[Token]:
        return (token for message in self.messages for token in message.tokens)

    @property
    def advantage(self) -> float | None:
        """The one that all sampled tokens share; None where they differ or have none."""
        found = {token.advantage for token in self.tokens if token.sampled}
        return found.pop() if len(found) == 1 else None

    def strongest(self, measure: Measure, count: int) -> list[Token]:
        """Tokens with the largest values, whatever their sign; of log-probs the least likely ones."""
        known = [(abs(value), token) for token in self.tokens if (value := token.value(measure)) is not None and not math.isnan(value)]
        return [token for _, token in sorted(known, key=lambda pair: (-pair[0], pair[1].position))[:count]]


def transcript(rollout: Rollout, group: int, tokenizer: Tokenizer, scores: SampleScores | None = None) -> Transcript:
    """ValueError for scores of another number of tokens than were sampled."""
    return Transcript(rollout, group, tuple(_messages(_tokens(rollout, tokenizer, scores))))


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token; joined they are what `decode` gives. A character of several tokens stands with the last of them, also one
    that a special token cuts off: the text of a special token is its name alone."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token_id in token_ids:
        if texts and tokenizer.special_name(token_id) is not None:
            texts[-1] += decoder.decode(b"", True)
        texts.append(decoder.decode(tokenizer.token_bytes(token_id)))
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts


def _tokens(rollout: Rollout, tokenizer: Tokenizer, scores: SampleScores | None) -> list[Token]:
    if scores is not None and len(scores.trainer_logp) != sum(rollout.sampled):
        raise ValueError(f"{scores.name}: scores of {len(scores.trainer_logp)} tokens, and {sum(rollout.sampled)} were sampled")
    versions = [run.version for run in rollout.versions for _ in range(run.num_tokens)]  # of each sampled token
    found, trained = [], 0
    for position, (token_id, text) in enumerate(zip(rollout.token_ids, token_texts(rollout.token_ids, tokenizer), strict=True)):
        special, sampled = tokenizer.special_name(token_id) is not None, rollout.sampled[position]
        if not sampled:
            found.append(Token(position, token_id, text, special, False))
            continue
        found.append(
            Token(
                position,
                token_id,
                text,
                special,
                True,
                logp=rollout.logp[position],
                trainer_logp=scores.trainer_logp[trained] if scores else None,
                advantage=scores.advantage[trained] if scores else None,
                version=versions[trained],
            )
        )
        trained += 1
    return found


def _messages(tokens: Sequence[Token]) -> Iterator[Message]:
    """Cut where harmony.py's parser cuts a turn: behind an end token, before <|start|>, and before a <|channel|> inside a body."""
    begin, in_body = 0, False
    for at, token in enumerate(tokens):
        if not token.special:
            continue
        if at > begin and (token.text == "<|start|>" or (token.text == "<|channel|>" and in_body)):
            yield _message(tokens[begin:at])
            begin, in_body = at, False
        if token.text in ENDS:
            yield _message(tokens[begin : at + 1])
            begin, in_body = at + 1, False
        in_body = in_body or token.text == "<|message|>"
    if begin < len(tokens):
        yield _message(tokens[begin:])


def _message(tokens: Sequence[Token]) -> Message:
    ended = tokens[-1].special and tokens[-1].text in ENDS
    inner, end = (tokens[:-1], tokens[-1:]) if ended else (tokens, ())
    mark = next((i for i, token in enumerate(inner) if token.special and token.text == "<|message|>"), None)
    header, body = ((), inner) if mark is None else (inner[: mark + 1], inner[mark + 1 :])
    role, name, channel, recipient = _heading("".join(t.text for t in header), tokens[0].sampled) if header else ("?", "", "", "")
    return Message(role, name, channel, recipient, tuple(header), tuple(body), tuple(end))


def _heading(text: str, sampled: bool) -> tuple[str, str, str, str]:
    """Role, tool's name, channel, recipient of `<|start|>assistant<|channel|>commentary to=functions.calc <|constrain|>json<|message|>`."""
    speaker, _, channel = text.removeprefix("<|start|>").removesuffix("<|message|>").partition("<|channel|>")
    recipient = re.search(r"\bto=([^\s<]+)", text)
    words = [word for word in re.sub(r"\bto=[^\s<]*", "", speaker).split() if not word.startswith("<|")]
    first = words[0] if words else "assistant" if sampled else "?"
    role = first if first in (*ROLES, "?") else "tool"
    where = re.match(r"[^\s<]+", channel.strip())
    return role, first if role == "tool" else "", where[0] if where else "", recipient[1] if recipient else ""
