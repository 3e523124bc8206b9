"""How a conversation becomes token ids, and what the model said in one assistant turn, in Harmony, GPT-OSS's chat format.

In: messages, or the token ids of one sampled turn. Out: token ids, or a `ParsedTurn`. One renderer and one parser serve every `Tokenizer`.
It does not judge what was said (tasks do), and it never rewrites history: openai-harmony drops old analysis when it renders a new user
turn, here token ids are append-only, because what is trained must be what was sampled.

A turn is everything the model samples after `<|start|>assistant`: any number of messages ended by `<|end|>` (analysis, preambles), then one
that ends with `<|call|>` (a tool call) or `<|return|>` (the final answer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_gptoss.data.tokenizer import Tokenizer

Role = Literal["system", "developer", "user", "assistant", "tool"]
Problem = Literal[
    "empty",  # no token at all
    "truncated",  # the tokens end inside a message
    "bad-header",  # words or special tokens in a header that have no meaning there
    "no-message",  # a header that ends without <|message|>
    "other-speaker",  # the model went on as somebody else than the assistant
    "special-in-content",  # a special token, or an id without a meaning, inside a message
    "call-without-recipient",  # <|call|> without to=
    "call-not-called",  # to= in a message that does not end with <|call|>
    "no-final",  # <|return|> on another channel than final
    "final-not-returned",  # a final answer that does not end with <|return|>
    "unfinished",  # the last message ends with <|end|>, so a further one was due
    "after-end",  # tokens after <|call|> or <|return|>
]
ENDS = ("<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True)
class Message:
    """One message. Field names and values are openai-harmony's."""

    role: Role
    content: str
    channel: str | None = None
    recipient: str | None = None  # "functions.calc"; of a tool's answer "assistant"
    content_type: str | None = None  # "json", or "<|constrain|>json" for the marker token and a word
    author_name: str | None = None  # a tool's name; a tool has no other header
    recipient_after_channel: bool = False  # `<|channel|>commentary to=x`, as models write it too, instead of ` to=x<|channel|>commentary`


@dataclass(frozen=True)
class ParsedTurn:
    """What the model said in one turn. A malformed turn keeps what could be read of its last message, so that no call is lost unseen."""

    kind: Literal["call", "final", "malformed"]
    text: str = ""  # arguments of the call, the final answer, or as much of the last message as there is
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None  # as in Message
    before: tuple[Message, ...] = ()  # analysis and preambles that came first
    problem: Problem | None = None  # of a malformed turn only
    detail: str = ""  # the problem in words


@dataclass(frozen=True)
class Marked:
    """Token ids of a finished transcript, with the tokens that a model is to learn."""

    token_ids: tuple[int, ...]  # [T]
    said: tuple[bool, ...]  # [T] True where the assistant says the token: after <|start|>assistant, the end token included
    copied: tuple[bool, ...]  # [T] True where the token belongs to a copied span; within `said`


# ---------------------------------------------------------------- texts


def system_text(reasoning: str, current_date: str = "", functions: bool = False) -> str:
    """The system message GPT-OSS was trained with. `reasoning` is low, medium or high; `functions` when a developer message lists tools.

    Dates are left out unless given: a prompt that changes overnight makes a run that cannot be repeated.
    """
    date = f"\nCurrent date: {current_date}" if current_date else ""
    tools = "\nCalls to these tools must go to the commentary channel: 'functions'." if functions else ""
    return (
        f"You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06{date}\n\nReasoning: {reasoning}\n\n"
        f"# Valid channels: analysis, commentary, final. Channel must be included for every message.{tools}"
    )


def developer_text(instructions: str) -> str:
    """A developer message without tools."""
    return f"# Instructions\n\n{instructions}"


# ---------------------------------------------------------------- rendering


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of whole messages, as openai-harmony writes them when it drops no analysis."""
    return [token for part in _parts(messages, tokenizer) for token in part.ids]


def generation_prefix(tokenizer: Tokenizer) -> list[int]:
    """`<|start|>assistant`: what the model continues."""
    return [tokenizer.special("<|start|>"), *tokenizer.encode("assistant")]


def render_marked(messages: Sequence[Message], tokenizer: Tokenizer, copied: Sequence[tuple[int, int, int]] = ()) -> Marked:
    """A transcript with the assistant's tokens marked.

    `copied` holds (message, first character, end character). A token counts as copied when it shares a character with a span; a span that
    reaches the end of its message takes the end token in, since stopping there is part of copying right. ValueError for a span outside an
    assistant message.
    """
    for number, first, end in copied:
        if messages[number].role != "assistant" or not 0 <= first < end <= len(messages[number].content):
            raise ValueError(f"copied span {first}..{end} is not inside an assistant message (message {number})")
    ids: list[int] = []
    said: list[bool] = []
    marks: list[bool] = []
    for part in _parts(messages, tokenizer):
        ids += part.ids
        said += [part.said] * len(part.ids)
        spans = [(first, end) for number, first, end in copied if number == part.number]
        if part.place == "content":
            marks += _tokens_in(spans, part.ids, messages[part.number].content, tokenizer)
        else:
            marks += [part.place == "end" and any(end == len(messages[part.number].content) for _, end in spans)] * len(part.ids)
    return Marked(tuple(ids), tuple(said), tuple(marks))


@dataclass(frozen=True)
class _Part:
    number: int  # which message
    place: Literal["prefix", "header", "content", "end"]
    said: bool
    ids: list[int]


def _parts(messages: Sequence[Message], tokenizer: Tokenizer) -> list[_Part]:
    """Every message as prefix (who speaks), header, content, end token."""
    parts = []
    for number, message in enumerate(messages):
        said = message.role == "assistant"
        # The assistant's prefix is tokenized on its own, because a sampled turn continues exactly these ids.
        prefix, speaker = ("assistant", "") if said else ("", _speaker(message))
        header: list[int] = []
        for special, text in _header(message, speaker):
            header += [tokenizer.special(special)] if special else []
            header += tokenizer.encode(text)
        parts.append(_Part(number, "prefix", False, [tokenizer.special("<|start|>"), *tokenizer.encode(prefix)]))
        parts.append(_Part(number, "header", said, [*header, tokenizer.special("<|message|>")]))
        parts.append(_Part(number, "content", said, tokenizer.encode(message.content)))
        parts.append(_Part(number, "end", said, [tokenizer.special(_end_of(message, last=number == len(messages) - 1))]))
    return parts


def _speaker(message: Message) -> str:
    if message.role != "tool":
        return message.role
    if not message.author_name:
        raise ValueError("a tool message needs author_name: in Harmony the tool's name stands where others have their role")
    return message.author_name


def _header(message: Message, speaker: str) -> list[tuple[str, str]]:
    """A header as (special token or "", the text after it). Kept apart, so that a name which spells a special token stays text."""
    recipient = f" to={message.recipient}" if message.recipient and message.recipient != "all" else ""
    after = message.recipient_after_channel and message.channel is not None
    pieces = [("", speaker if after else speaker + recipient)]
    if message.channel is not None:
        pieces.append(("<|channel|>", message.channel + (recipient if after else "")))
    if message.content_type is not None:
        special, text = pieces.pop()
        constrained = message.content_type.startswith("<|constrain|>")
        pieces.append((special, f"{text} " if constrained else f"{text} {message.content_type}"))
        if constrained:
            pieces.append(("<|constrain|>", message.content_type.removeprefix("<|constrain|>")))
    return pieces


def _end_of(message: Message, last: bool) -> str:
    """`<|return|>` is a stop signal, not history: openai-harmony writes an earlier final answer with `<|end|>`."""
    if message.role == "assistant" and message.recipient and message.recipient != "all":
        return "<|call|>"
    return "<|return|>" if message.role == "assistant" and message.channel == "final" and last else "<|end|>"


def _tokens_in(spans: Sequence[tuple[int, int]], ids: Sequence[int], content: str, tokenizer: Tokenizer) -> list[bool]:
    """Which tokens of a content share a byte with one of the character spans."""
    byte_spans = [(len(content[:first].encode()), len(content[:end].encode())) for first, end in spans]
    marks, at = [], 0
    for token in ids:
        upto = at + len(tokenizer.token_bytes(token))
        marks.append(any(first < upto and at < end for first, end in byte_spans))
        at = upto
    return marks


# ---------------------------------------------------------------- parsing


def turn_stop_tokens(opening: Sequence[Message], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Where sampling of an assistant turn stops.

    Always at `<|call|>` and `<|return|>`. A system message declares the channels; with an analysis channel the model may think first, and
    `<|end|><|start|>assistant` inside its turn is sampled like anything else. Without one a turn is a single message, no good turn holds
    `<|end|>` or `<|start|>`, and stopping there saves the tokens of a turn that is malformed already.
    """
    thinks = any(m.role == "system" and "# Valid channels:" in m.content and "analysis" in m.content for m in opening)
    names = ("<|call|>", "<|return|>") if thinks else ("<|call|>", "<|return|>", "<|end|>", "<|start|>")
    return tuple(tokenizer.special(name) for name in names)


def parse_turn(token_ids: Sequence[int], tokenizer: Tokenizer) -> ParsedTurn:
    """One sampled assistant turn, the tokens after `<|start|>assistant`. Never raises: what is not a call or a final answer is "malformed".

    Works on ids, so that text which only spells `<|call|>` stays text. Header words may stand in any of the orders seen in the wild:
    recipient beside the role or after the channel, with or without `<|constrain|>`, content type or a space before it.
    """
    before: list[Message] = []
    rest = list(token_ids)
    if not rest:
        return ParsedTurn("malformed", problem="empty", detail="no token was sampled")
    while True:
        one = _read_message(rest, tokenizer, first=not before)
        if one.problem is not None:
            return _malformed(one, before, one.problem, one.detail)
        rest = one.rest
        if one.end != "<|end|>":
            return _closing(one, before, tokenizer)
        if one.recipient:
            return _malformed(one, before, "call-not-called", f"a message to {one.recipient} ends with <|end|>, not <|call|>")
        if one.channel == "final":
            return _malformed(one, before, "final-not-returned", "the final answer ends with <|end|>, not <|return|>")
        if not rest:
            return _malformed(one, before, "unfinished", "the turn ends with <|end|>, without a call or a final answer")
        before.append(Message("assistant", one.text, one.channel, content_type=one.content_type))


@dataclass
class _Read:
    """One message cut off the front of a turn; what is unknown keeps its default."""

    text: str = ""
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    end: str = ""
    rest: Sequence[int] = ()
    problem: Problem | None = None
    detail: str = ""


def _closing(one: _Read, before: list[Message], tokenizer: Tokenizer) -> ParsedTurn:
    """The turn whose last message ended with `<|call|>` or `<|return|>`."""
    if one.rest:
        return _malformed(one, before, "after-end", f"tokens after {one.end}: {tokenizer.decode(one.rest)[:80]!r}")
    if one.end == "<|call|>":
        if not one.recipient:
            return _malformed(one, before, "call-without-recipient", "<|call|> in a message without to=")
        return ParsedTurn("call", one.text, one.channel, one.recipient, one.content_type, tuple(before))
    if one.recipient:
        return _malformed(one, before, "call-not-called", f"a message to {one.recipient} ends with <|return|>, not <|call|>")
    if one.channel != "final":
        return _malformed(one, before, "no-final", f"<|return|> on channel {one.channel}, not final")
    return ParsedTurn("final", one.text, one.channel, None, one.content_type, tuple(before))


def _malformed(one: _Read, before: list[Message], problem: Problem, detail: str) -> ParsedTurn:
    return ParsedTurn("malformed", one.text, one.channel, one.recipient, one.content_type, tuple(before), problem, detail)


def _read_message(ids: Sequence[int], tokenizer: Tokenizer, first: bool) -> _Read:
    """Cuts one message off. The first message of a turn has its `<|start|>assistant` in the prompt already."""
    one = _Read()
    if not first and tokenizer.special_name(ids[0]) != "<|start|>":
        one.problem, one.detail = "bad-header", f"{tokenizer.decode(ids[:1])!r} where <|start|> was due"
        return one
    ids = ids if first else ids[1:]
    upto, stop = _scan_header(ids, one, tokenizer, first)
    if stop is None:
        one.problem, one.detail = "truncated", "the turn ends inside a header"
    elif stop != "<|message|>":
        one.problem = "no-message" if stop in ENDS else "bad-header"
        one.detail = f"{stop} in a header, before <|message|>"
    else:
        _scan_content(ids[upto + 1 :], one, tokenizer)
    return one


def _scan_header(ids: Sequence[int], one: _Read, tokenizer: Tokenizer, first: bool) -> tuple[int, str | None]:
    """Reads a header into `one`. Returns where it stops and the special token there, None at the end of the turn."""
    places: dict[str, list[int]] = {"speaker": []}  # text tokens by the special token they follow
    place, stop, at = "speaker", None, 0
    for at, token in enumerate(ids):  # noqa: B007 (the place where the loop stops is the result)
        name = tokenizer.special_name(token)
        if name is None:
            places[place].append(token)
        elif name in ("<|channel|>", "<|constrain|>") and name not in places:
            place = name
            places[place] = []
        else:
            stop = name
            break
    _read_words({place: tokenizer.decode(tokens).split() for place, tokens in places.items()}, one, first)
    return at, stop


def _read_words(words: dict[str, list[str]], one: _Read, first: bool) -> None:
    """Fills channel, recipient and content type from a header's words by place; says so in `problem` when a word has no meaning."""
    recipients = [w.removeprefix("to=") for place in words.values() for w in place if w.startswith("to=")]
    speaker, channel, constrain = (
        [w for w in words.get(place, []) if not w.startswith("to=")] for place in ("speaker", "<|channel|>", "<|constrain|>")
    )
    types = channel[1:]
    if "<|constrain|>" in words:
        types.append("<|constrain|>" + "".join(constrain[:1]))
    one.channel = channel[0] if channel else None
    one.content_type = types[0] if types else None
    one.recipient = next((r for r in recipients if r and r != "all"), None)

    meaningless = (speaker if first else speaker[1:]) + types[1:] + constrain[1:]
    if not first and speaker[:1] != ["assistant"]:
        one.problem, one.detail = "other-speaker", f"the model went on as {speaker[0] if speaker else 'nobody'}"
    elif meaningless:
        one.problem, one.detail = "bad-header", f"words without a meaning in a header: {' '.join(meaningless)}"
    elif "" in recipients or len(set(recipients)) > 1:
        one.problem, one.detail = "bad-header", f"recipients in one header: {', '.join(r or '(empty)' for r in recipients)}"


def _scan_content(ids: Sequence[int], one: _Read, tokenizer: Tokenizer) -> None:
    """Reads a message's content and its end into `one`; a problem found in the header stays."""
    at = next((n for n, token in enumerate(ids) if tokenizer.special_name(token) is not None), None)
    one.text = tokenizer.decode(ids[:at])
    if one.problem is not None:
        return
    if at is None:
        one.problem, one.detail = "truncated", "the turn ends inside a message"
        return
    one.end, one.rest = str(tokenizer.special_name(ids[at])), ids[at + 1 :]
    if one.end not in ENDS:
        one.problem, one.detail = "special-in-content", f"{one.end} inside a message"
