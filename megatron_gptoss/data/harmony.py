"""How a conversation becomes token ids, and what the model said in one assistant turn, in Harmony, GPT-OSS's chat format.

In: messages, or the token ids of one sampled turn. Out: token ids, or a `ParsedTurn`. One renderer and one parser serve every `Tokenizer`.
It does not judge what was said (tasks do), and it never rewrites history: openai-harmony drops old analysis when it renders a new user
turn, here token ids are append-only, because what is trained must be what was sampled.

A turn is everything the model samples after `<|start|>assistant`: any number of messages ended by `<|end|>` (analysis, preambles), then
tool calls ended by `<|call|>`, or the final answer ended by `<|return|>`.
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
    "after-end",  # messages after <|return|>, or a final answer after a call
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
class Call:
    """One tool call as the model wrote it. Whether the arguments are any good, the task finds out."""

    recipient: str | None  # "python", "functions.calc"; None for `<|call|>` without to=
    text: str  # arguments, or Python
    channel: str | None = None
    content_type: str | None = None
    problem: Problem | None = None  # None: well-formed, though the turn around it may not be


@dataclass(frozen=True)
class ParsedTurn:
    """What the model said in one turn.

    Of a turn with several calls (parallel ones; engines that stop at `<|call|>` sample one) `text` and its neighbours are the last call's,
    and all are in `calls`. A malformed turn shows the message in which the first problem was found, and all calls it holds anywhere, so
    that none is lost unseen.
    """

    kind: Literal["call", "final", "malformed"]
    text: str = ""  # arguments of the call, the final answer, or the content of the message with the problem
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None  # as in Message
    before: tuple[Message, ...] = ()  # analysis and preambles that came first
    problem: Problem | None = None  # of a malformed turn only
    detail: str = ""  # the problem in words
    calls: tuple[Call, ...] = ()  # in their order
    pieces: tuple[tuple[int, ...], ...] = ()  # the sampled token ids by message, every one of them; see render_turn

    def __post_init__(self) -> None:
        if self.kind == "call" and not self.calls:
            object.__setattr__(self, "calls", (Call(self.recipient, self.text, self.channel, self.content_type),))


@dataclass(frozen=True)
class Marked:
    """Token ids of a finished transcript, with the tokens that a model is to learn."""

    token_ids: tuple[int, ...]  # [T]
    said: tuple[bool, ...]  # [T] True where the assistant says the token: after <|start|>assistant, the end token included
    copied: tuple[bool, ...]  # [T] True where the token belongs to a copied span; within `said`


# ---------------------------------------------------------------- texts


def system_text(reasoning: str, current_date: str = "", functions: bool = False, tools: str = "") -> str:
    """The system message GPT-OSS was trained with. `reasoning` is low, medium or high; `functions` when a developer message lists tools;
    `tools`: the section of a built-in tool (data/tools.py).

    Dates are left out unless given: a prompt that changes overnight makes a run that cannot be repeated.
    """
    date = f"\nCurrent date: {current_date}" if current_date else ""
    commentary = "\nCalls to these tools must go to the commentary channel: 'functions'." if functions else ""
    section = f"{tools}\n\n" if tools else ""
    return (
        f"You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06{date}\n\nReasoning: {reasoning}\n\n"
        f"{section}# Valid channels: analysis, commentary, final. Channel must be included for every message.{commentary}"
    )


def developer_text(instructions: str) -> str:
    """A developer message without tools."""
    return f"# Instructions\n\n{instructions}"


def answer_to(call: Call, text: str) -> Message:
    """What a tool answers to a call, on the channel the call came on."""
    return Message("tool", text, call.channel or "commentary", "assistant", author_name=call.recipient)


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
    recipient beside the role or after the channel, with or without `<|constrain|>`, content type or a space before it. Reading goes on
    behind whatever is wrong, at the next place where a message can begin, so every call of the turn is in `calls`, in order.
    """
    pieces = _cut(token_ids, tokenizer)
    said = [_read_piece(piece, following, tokenizer, first=n == 0) for n, (piece, following) in enumerate(pieces)]
    for n, one in enumerate(said):
        if one.problem is None:
            one.problem, one.detail = _problem_of_place(one, said[n + 1 :])
    calls = tuple(call for one in said for call in _calls_of(one))
    kept = tuple(tuple(piece) for piece, _ in pieces)
    if not said:
        return ParsedTurn("malformed", problem="empty", detail="no token was sampled")
    wrong = next((n for n, one in enumerate(said) if one.problem is not None), None)
    if wrong is None:
        before = tuple(one.message() for one in said if one.end == "<|end|>")
        kind = "call" if said[-1].end == "<|call|>" else "final"
        one = said[-1]
        return ParsedTurn(kind, one.text, one.channel, one.recipient, one.content_type, before, calls=calls, pieces=kept)
    one, before = said[wrong], tuple(each.message() for each in said[:wrong] if each.end == "<|end|>")
    return ParsedTurn(
        "malformed", one.text, one.channel, one.recipient, one.content_type, before, one.problem, one.detail, calls=calls, pieces=kept
    )


def render_turn(turn: ParsedTurn) -> list[int]:
    """The token ids that were parsed. Never through text: several spellings read the same, and what is trained is what was sampled."""
    return [token for piece in turn.pieces for token in piece]


@dataclass
class _Read:
    """One message of a turn; what is unknown keeps its default."""

    text: str = ""
    channel: str | None = None
    recipients: tuple[str, ...] = ()  # one, in a header that is as it should be
    content_type: str | None = None
    end: str = ""  # the end token, "" without one
    problem: Problem | None = None
    detail: str = ""

    @property
    def recipient(self) -> str | None:
        return self.recipients[0] if self.recipients else None

    def message(self) -> Message:
        return Message("assistant", self.text, self.channel, content_type=self.content_type)

    def wrong(self, problem: Problem, detail: str) -> None:
        """The first problem found is the one that is kept."""
        if self.problem is None:
            self.problem, self.detail = problem, detail


def _cut(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[Sequence[int], str]]:
    """A turn as its messages, every token in one of them, each with the name of the special token that follows it ("": none, or its end).

    A message ends with its end token, or where another one must have begun: at `<|start|>`, and at a `<|channel|>` inside content.
    """
    pieces: list[tuple[Sequence[int], str]] = []
    begin, in_content = 0, False
    for at, token in enumerate(ids):
        name = tokenizer.special_name(token)
        if name is None:
            continue
        if at > begin and (name == "<|start|>" or (name == "<|channel|>" and in_content)):
            pieces.append((ids[begin:at], name))
            begin, in_content = at, False
        elif name in ENDS:
            pieces.append((ids[begin : at + 1], ""))
            begin, in_content = at + 1, False
        in_content = in_content or name == "<|message|>"
    if begin < len(ids):
        pieces.append((ids[begin:], ""))
    return pieces


def _read_piece(ids: Sequence[int], following: str, tokenizer: Tokenizer, first: bool) -> _Read:
    """Reads one message. The first one of a turn has its `<|start|>assistant` in the prompt already."""
    one = _Read()
    last = tokenizer.special_name(ids[-1])
    if last in ENDS:
        one.end, ids = str(last), ids[:-1]
    started = bool(ids) and tokenizer.special_name(ids[0]) == "<|start|>"
    if started and first:
        one.wrong("bad-header", "<|start|> in a header, before <|message|>")
    elif not started and not first:
        one.wrong("bad-header", f"{(tokenizer.decode(ids[:1]) or one.end)!r} where <|start|> was due")
    ids = ids[1:] if started else ids
    if not one.end and not following:
        one.wrong("truncated", "the turn ends inside a message")
    message = next((n for n, token in enumerate(ids) if tokenizer.special_name(token) == "<|message|>"), None)
    _read_header(ids[:message], one, tokenizer, started)
    if message is None:
        one.wrong("no-message" if one.end else "bad-header", f"{one.end or following} in a header, before <|message|>")
        return one
    content = ids[message + 1 :]
    one.text = tokenizer.decode(content)
    strange = next((name for name in map(tokenizer.special_name, content) if name is not None), None if one.end else following or None)
    if strange is not None:
        one.wrong("special-in-content", f"{strange} inside a message")
    return one


def _read_header(ids: Sequence[int], one: _Read, tokenizer: Tokenizer, started: bool) -> None:
    """Reads the tokens before `<|message|>` into `one`."""
    places: list[tuple[str, list[int]]] = [("speaker", [])]  # each special token with the text tokens that follow it
    for token in ids:
        name = tokenizer.special_name(token)
        if name is None:
            places[-1][1].append(token)
            continue
        if name not in ("<|channel|>", "<|constrain|>") or any(name == place for place, _ in places):
            one.wrong("bad-header", f"{name} in a header, before <|message|>")
        places.append((name, []))
    words: dict[str, list[str]] = {}
    for place, tokens in places:
        words.setdefault(place, []).extend(tokenizer.decode(tokens).split())
    _read_words(words, one, started)


def _read_words(words: dict[str, list[str]], one: _Read, started: bool) -> None:
    """Fills channel, recipients and content type from a header's words by place; says so when a word has no meaning."""
    recipients = [w.removeprefix("to=") for place in words.values() for w in place if w.startswith("to=")]
    speaker, channel, constrain = (
        [w for w in words.get(place, []) if not w.startswith("to=")] for place in ("speaker", "<|channel|>", "<|constrain|>")
    )
    types = channel[1:]
    if "<|constrain|>" in words:
        types.append("<|constrain|>" + "".join(constrain[:1]))
    one.channel = channel[0] if channel else None
    one.content_type = types[0] if types else None
    one.recipients = tuple(dict.fromkeys(r for r in recipients if r and r != "all"))

    meaningless = (speaker[1:] if started else speaker) + types[1:] + constrain[1:]
    if started and speaker[:1] != ["assistant"]:
        one.wrong("other-speaker", f"the model went on as {speaker[0] if speaker else 'nobody'}")
    elif meaningless:
        one.wrong("bad-header", f"words without a meaning in a header: {' '.join(meaningless)}")
    elif "" in recipients or len(set(recipients)) > 1:
        one.wrong("bad-header", f"recipients in one header: {', '.join(r or '(empty)' for r in recipients)}")


def _problem_of_place(one: _Read, later: Sequence[_Read]) -> tuple[Problem | None, str]:
    """What is wrong with a message that is well-formed, given what comes after it."""
    if one.end == "<|call|>":
        if not one.recipients:
            return "call-without-recipient", "<|call|> in a message without to="
        if any(other.end == "<|return|>" for other in later):
            return "after-end", "a final answer after a call, without its result"
        return None, ""
    if one.end == "<|return|>" and later:
        return "after-end", f"{len(later)} more message(s) after <|return|>"
    if one.recipients:
        return "call-not-called", f"a message to {one.recipient} ends with {one.end}, not <|call|>"
    if one.end == "<|return|>":
        return (None, "") if one.channel == "final" else ("no-final", f"<|return|> on channel {one.channel}, not final")
    if one.channel == "final":
        return "final-not-returned", "the final answer ends with <|end|>, not <|return|>"
    if not later:
        return "unfinished", "the turn ends with <|end|>, without a call or a final answer"
    return None, ""


def _calls_of(one: _Read) -> list[Call]:
    """The calls a message makes or seems to make: one for each recipient, and one where `<|call|>` has none."""
    recipients: Sequence[str | None] = one.recipients or ([None] if one.end == "<|call|>" else [])
    return [Call(recipient, one.text, one.channel, one.content_type, one.problem) for recipient in recipients]
