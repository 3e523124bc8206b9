"""Laws of Harmony: our ids are openai-harmony's, our parse agrees with its parse, and whatever a model says is a typed result."""

import openai_harmony as oh
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.harmony import (
    ENDS,
    Call,
    Message,
    ParsedTurn,
    answer_to,
    developer_text,
    generation_prefix,
    parse_turn,
    render,
    render_marked,
    render_turn,
    system_text,
    turn_stop_tokens,
)
from megatron_gptoss.data.tokenizer import Tokenizer, load_tokenizer
from megatron_gptoss.data.tools import STATELESS_PYTHON, Tool, functions_text, python_text
from tests.helpers.shared_data import shared_file
from tools.fuzz_harmony import broken_law, fuzz

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
SPECIALS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]


def gpt_oss():
    return load_tokenizer(Config(tokenizer=TokenizerConfig(path=str(shared_file("o200k_base.tiktoken").parent))))


@pytest.fixture(params=["tiny", "gpt-oss"])
def tokenizer(request) -> Tokenizer:
    return TINY if request.param == "tiny" else gpt_oss()


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text in which Harmony's seven names stand for the special tokens."""
    ids: list[int] = []
    while text:
        at, name = min(((text.find(s), s) for s in SPECIALS if s in text), default=(len(text), ""))
        ids += tokenizer.encode(text[:at])
        ids += [tokenizer.special(name)] if name else []
        text = text[at + len(name) :]
    return ids


# ---------------------------------------------------------------- rendering

CALC = oh.ToolDescription.new("calc", "Calculates.", {"type": "object", "properties": {"expression": {"type": "string"}}})


def theirs(message: Message) -> oh.Message:
    author = oh.Author(role=oh.Role(message.role), name=message.author_name)
    made = oh.Message.from_author_and_content(author, message.content)
    made.channel, made.recipient, made.content_type = message.channel, message.recipient, message.content_type
    return made


def their_ids(messages: list[oh.Message]) -> list[int]:
    keep = oh.RenderConversationConfig(auto_drop_analysis=False)
    encoding: oh.HarmonyEncoding = gpt_oss().encoding  # type: ignore[attr-defined]
    return encoding.render_conversation_for_completion(oh.Conversation.from_messages(messages), oh.Role.ASSISTANT, keep)


TALK = [
    Message("user", "What is (2+2)*3? <|end|> is no end. é日本"),
    Message("assistant", "I need the calculator.", "analysis"),
    Message("assistant", '{"expression":"2+2"}', "commentary", "functions.calc", "<|constrain|>json"),
    Message("tool", "4", "commentary", "assistant", author_name="functions.calc"),
    Message("assistant", '{"expression":"4*3"}', "commentary", "functions.calc", "json"),
    Message("tool", "12", "commentary", "assistant", author_name="functions.calc"),
    Message("assistant", "print(12)", "analysis", "python", "code"),
    Message("tool", "12\n", "analysis", "assistant", author_name="python"),
    Message("assistant", "12", "final"),
    Message("user", "Thanks."),
]


@pytest.mark.parametrize("length", range(1, len(TALK) + 1))
def test_ids_are_openai_harmonys(length):
    talk, tokenizer = TALK[:length], gpt_oss()
    if talk[-1].channel == "final":
        talk = talk[:-1]  # a final answer that ends a conversation is the next test
    assert render(talk, tokenizer) + generation_prefix(tokenizer) == their_ids([theirs(m) for m in talk])


def test_a_last_final_answer_returns_as_in_their_training_rendering():
    encoding: oh.HarmonyEncoding = gpt_oss().encoding  # type: ignore[attr-defined]
    keep = oh.RenderConversationConfig(auto_drop_analysis=False)
    their = encoding.render_conversation_for_training(oh.Conversation.from_messages([theirs(m) for m in TALK[:9]]), keep)
    assert render(TALK[:9], gpt_oss()) == their


@pytest.mark.parametrize("reasoning", ["low", "medium", "high"])
@pytest.mark.parametrize("date", ["", "2025-06-28"])
def test_system_and_developer_texts_are_theirs(reasoning, date):
    system = oh.SystemContent.new().with_reasoning_effort(oh.ReasoningEffort(reasoning.capitalize()))
    if date:
        system = system.with_conversation_start_date(date)
    developer = oh.DeveloperContent.new().with_instructions("Be brief.\nBox it.")
    start = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system), oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer)]
    ours = [Message("system", system_text(reasoning, date)), Message("developer", developer_text("Be brief.\nBox it."))]
    assert render([*ours, TALK[0]], gpt_oss()) + generation_prefix(gpt_oss()) == their_ids([*start, theirs(TALK[0])])


def test_system_text_with_function_tools_is_theirs():
    system = oh.Message.from_role_and_content(oh.Role.SYSTEM, oh.SystemContent.new())
    developer = oh.Message.from_role_and_content(oh.Role.DEVELOPER, oh.DeveloperContent.new().with_function_tools([CALC]))
    their = gpt_oss().decode(their_ids([system, developer, theirs(TALK[0])]))
    tools = their.split("<|start|>developer<|message|>")[1].split("<|end|>")[0]
    assert "type calc = (_: {" in tools
    ours = [Message("system", system_text("medium", functions=True)), Message("developer", tools), *TALK[:4]]
    assert render(ours, gpt_oss()) + generation_prefix(gpt_oss()) == their_ids([system, developer, *map(theirs, TALK[:4])])


def test_the_built_in_python_tool_is_described_as_theirs():
    system = oh.Message.from_role_and_content(oh.Role.SYSTEM, oh.SystemContent.new().with_tools(oh.ToolNamespaceConfig.python()))
    ours = [Message("system", system_text("medium", tools=python_text())), TALK[0]]
    # Theirs says so of functions also where there are none.
    their = (
        gpt_oss()
        .decode(their_ids([system, theirs(TALK[0])]))
        .replace("\nCalls to these tools must go to the commentary channel: 'functions'.", "")
    )
    assert gpt_oss().decode(render(ours, gpt_oss()) + generation_prefix(gpt_oss())) == their
    told = system_text("high", tools=python_text(STATELESS_PYTHON.format(timeout_s=5.0)))
    assert "Reasoning: high" in told and "time out after 5 seconds" in told


LINES = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), min_size=1, max_size=12)
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["number", "integer", "boolean"])}, optional={"default": st.integers(-(2**63), 2**63) | st.booleans()}
    )
    | st.fixed_dictionaries({"type": st.just("string")}, optional={"enum": st.lists(LINES, min_size=1, max_size=3), "default": LINES}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner})
        | st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), inner, max_size=3)},
            optional={"description": LINES, "required": st.lists(st.sampled_from(["a", "b", "c"]))},
        )
    ),
    max_leaves=8,
).flatmap(lambda schema: st.just(schema) | LINES.map(lambda text: {**schema, "description": text}))


@settings(max_examples=150)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), SCHEMAS, max_size=4), LINES, st.just("") | LINES)
def test_functions_are_described_as_theirs(properties, description, instructions):
    schema = {"type": "object", "properties": properties, "required": list(properties)[::2]}
    content = oh.DeveloperContent.new().with_function_tools(
        [oh.ToolDescription.new("f", description, schema), oh.ToolDescription.new("g", "Two\nlines.", None)]
    )
    content = content.with_instructions(instructions) if instructions else content
    their = gpt_oss().decode(their_ids([oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)]))
    ours = functions_text([Tool("f", description, schema), Tool("g", "Two\nlines.")], instructions)
    assert their == f"<|start|>developer<|message|>{ours}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a"}, r"tool f.x: the schema says pattern"),
        ({"type": ["string", "null"]}, r"tool f.x: type \['string', 'null'\]"),
        ({"oneOf": []}, r"tool f.x: the schema says oneOf"),
        ({"type": "array", "items": {}}, r"tool f.x\[\]: type None"),
        ({"type": "string", "description": "a\nb"}, r"tool f.x: the description of a parameter must be one line"),
    ],
)
def test_a_schema_that_the_model_would_not_see_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        functions_text([Tool("f", "", {"type": "object", "properties": {"x": schema}})])


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@settings(max_examples=60)
@given(st.text(), NAMES, NAMES, st.none() | NAMES | NAMES.map(lambda n: "<|constrain|>" + n))
def test_ids_are_theirs_for_any_names(content, recipient, channel, content_type):
    talk = [
        Message("assistant", content, channel, recipient, content_type),
        Message("tool", content, channel, "assistant", content_type, author_name=recipient),
    ]
    assert render(talk, gpt_oss()) + generation_prefix(gpt_oss()) == their_ids([theirs(m) for m in talk])


def test_names_that_spell_special_tokens_stay_text(tokenizer):
    names = Message("tool", "x", "commentary<|call|>", "a<|channel|>b", "j<|message|>", author_name="f<|start|>")
    found = [tokenizer.special_name(i) for i in render([names], tokenizer) if tokenizer.special_name(i)]
    assert found == ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


def test_a_rendered_turn_continues_the_generation_prefix(tokenizer):
    """What an engine is asked to continue is exactly what a transcript holds before the tokens that are learned."""
    for message in [TALK[1], TALK[2], TALK[8]]:
        marked = render_marked([message], tokenizer)
        said = marked.said.index(True)
        assert list(marked.token_ids[:said]) == generation_prefix(tokenizer)
        assert all(marked.said[said:])


def test_copied_tokens_by_hand():
    call = Message("assistant", '{"expression":"37+5"}', "commentary", "functions.calc", "<|constrain|>json", recipient_after_channel=True)
    answer = Message("assistant", "42", "final")
    marked = render_marked([call, answer], TINY, [(0, 15, 21), (1, 0, 2)])
    assert TINY.decode([i for i, c in zip(marked.token_ids, marked.copied, strict=True) if c]) == '37+5"}<|call|>42<|return|>'
    inner = render_marked([call], TINY, [(0, 16, 17)])
    assert TINY.decode([i for i, c in zip(inner.token_ids, inner.copied, strict=True) if c]) == "7"  # not to the end: no end token
    for wrong in [(0, 3, 3), (0, -1, 2), (0, 0, 22)]:
        with pytest.raises(ValueError):
            render_marked([call], TINY, [wrong])


def test_copied_tokens_count_bytes_not_characters():
    marked = render_marked([Message("assistant", "é日12", "final")], TINY, [(0, 2, 3)])
    assert TINY.decode([i for i, c in zip(marked.token_ids, marked.copied, strict=True) if c]) == "1"


# ---------------------------------------------------------------- parsing

ARGS = '{"expression":"2+2"}'
# Spellings of one call seen in the wild (channel, content type as read); each must come out as the call it is.
SPELLINGS = {
    f"<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{ARGS}<|call|>": ("commentary", "<|constrain|>json"),
    f"<|channel|>commentary to=functions.calc<|constrain|>json<|message|>{ARGS}<|call|>": ("commentary", "<|constrain|>json"),
    f"<|channel|>commentary to=functions.calc json<|message|>{ARGS}<|call|>": ("commentary", "json"),
    f"<|channel|>commentary to=functions.calc<|message|>{ARGS}<|call|>": ("commentary", None),
    f" to=functions.calc<|channel|>commentary <|constrain|>json<|message|>{ARGS}<|call|>": ("commentary", "<|constrain|>json"),
    f" to=functions.calc<|channel|>commentary<|constrain|>json<|message|>{ARGS}<|call|>": ("commentary", "<|constrain|>json"),
    f" to=functions.calc<|channel|>commentary json<|message|>{ARGS}<|call|>": ("commentary", "json"),
    f" to=functions.calc<|channel|>commentary<|message|>{ARGS}<|call|>": ("commentary", None),
    f"<|channel|>analysis to=functions.calc code<|message|>{ARGS}<|call|>": ("analysis", "code"),
    f"<|channel|>analysis code to=functions.calc<|message|>{ARGS}<|call|>": ("analysis", "code"),
    f" to=functions.calc<|channel|>commentary to=functions.calc<|message|>{ARGS}<|call|>": ("commentary", None),
    f" to=functions.calc<|message|>{ARGS}<|call|>": (None, None),
}
THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
# openai-harmony 0.0.8 refuses these two.
OURS_ONLY = ["analysis code to=", "to=functions.calc<|channel|>commentary to="]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("before", ["", THINK, THINK + "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"])
def test_no_spelling_of_a_call_is_lost(spelling, before, tokenizer):
    turn = parse_turn(ids_of(before + spelling, tokenizer), tokenizer)
    assert (turn.kind, turn.recipient, turn.text) == ("call", "functions.calc", ARGS), turn
    assert (turn.channel, turn.content_type) == SPELLINGS[spelling]
    assert [m.content for m in turn.before] == ["Hm.", "I call."][: before.count("<|end|>")]
    if tokenizer.name == "gpt-oss" and not any(s in spelling for s in OURS_ONLY):
        agrees_with_openai_harmony(ids_of(before + spelling, tokenizer), turn)


def agrees_with_openai_harmony(ids: list[int], turn: ParsedTurn) -> None:
    encoding: oh.HarmonyEncoding = gpt_oss().encoding  # type: ignore[attr-defined]
    *before, last = encoding.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)
    assert [(m.channel, m.content[0].text) for m in before] == [(m.channel, m.content) for m in turn.before]  # type: ignore[attr-defined]
    assert (last.channel, last.recipient, last.content_type, last.content[0].text) == (  # type: ignore[attr-defined]
        turn.channel,
        turn.recipient,
        turn.content_type,
        turn.text,
    )


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary"]), st.text()), max_size=3), st.text(), st.booleans())
def test_well_formed_turns_read_as_theirs(thoughts, text, calls):
    """Rendering and parsing are inverse, and our reading is openai-harmony's."""
    tokenizer = gpt_oss()
    last = Message("assistant", text, "commentary", "functions.f", "<|constrain|>json") if calls else Message("assistant", text, "final")
    talk = [*(Message("assistant", thought, channel) for channel, thought in thoughts), last]
    ids = render(talk, tokenizer)[len(generation_prefix(tokenizer)) :]
    turn = parse_turn(ids, tokenizer)
    assert turn.kind == ("call" if calls else "final")
    assert (turn.before, turn.text) == (tuple(talk[:-1]), text)
    agrees_with_openai_harmony(ids, turn)


# The ten spellings of a call found in the wild, of which most parsers lose seven, with what has to come out.
CODE = "print(1)"
TEN = {
    "as trained": (f"{THINK}<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{ARGS}<|call|>", "functions.calc", ARGS),
    "recipient in the role header": (
        f"{THINK} to=functions.calc<|channel|>commentary <|constrain|>json<|message|>{ARGS}<|call|>", "functions.calc", ARGS,
    ),
    "no <|constrain|>": (f"{THINK}<|channel|>commentary to=functions.calc json<|message|>{ARGS}<|call|>", "functions.calc", ARGS),
    "no content type": (f"{THINK}<|channel|>commentary to=functions.calc<|message|>{ARGS}<|call|>", "functions.calc", ARGS),
    "no analysis first": (f"<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{ARGS}<|call|>", "functions.calc", ARGS),
    "no channel": (f" to=functions.calc<|message|>{ARGS}<|call|>", "functions.calc", ARGS),
    "to=python code": (f"{THINK}<|channel|>analysis to=python code<|message|>{CODE}<|call|>", "python", CODE),
    "no space before <|constrain|>": (
        f"<|channel|>commentary to=functions.calc<|constrain|>json<|message|>{ARGS}<|call|>", "functions.calc", ARGS,
    ),
    "a literal <|call|> inside JSON": (
        '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"s":"@"}<|call|>', "functions.calc", '{"s":"<|call|>"}',
    ),
    "a truncated call": (
        f"{THINK}<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{ARGS[:9]}", "functions.calc", ARGS[:9],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEN)
def test_the_ten_spellings_in_the_wild(name, tokenizer):
    spelled, recipient, text = TEN[name]
    front, at, behind = spelled.partition("@")
    ids = ids_of(front, tokenizer) + (tokenizer.encode("<|call|>") if at else []) + ids_of(behind, tokenizer)
    turn = parse_turn(ids, tokenizer)
    (call,) = turn.calls
    assert (call.recipient, call.text) == (recipient, text)
    assert (turn.kind, turn.problem) == (("malformed", "truncated") if name == "a truncated call" else ("call", None))
    assert (call.problem is None) == (turn.kind == "call")
    assert render_turn(turn) == ids


def test_parallel_calls_are_all_there_in_their_order(tokenizer):
    one = "<|channel|>commentary to=functions.calc json<|message|>1<|call|><|start|>assistant"
    two = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>2<|call|>"
    turn = parse_turn(ids_of(THINK + one + two, tokenizer), tokenizer)
    calls = (Call("functions.calc", "1", "commentary", "json"), Call("python", "2", "analysis", "code"))
    assert (turn.kind, turn.calls, turn.recipient, turn.text) == ("call", calls, "python", "2")
    assert [m.content for m in turn.before] == ["Hm.", "Hm."]
    answers = [answer_to(call, text) for call, text in zip(turn.calls, "34", strict=True)]
    said = tokenizer.decode(render(answers, tokenizer))
    assert said == (
        "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>3<|end|>"
        "<|start|>python to=assistant<|channel|>analysis<|message|>4<|end|>"
    )


@pytest.mark.parametrize(
    ("said", "problem", "calls"),
    [
        # A call, then an answer that did not wait for its result.
        ("<|channel|>commentary to=a<|message|>1<|call|><|start|>assistant<|channel|>final<|message|>4<|return|>", "after-end", ["a"]),
        # What is wrong comes first, and the call behind it is still there.
        ("hello<|end|><|start|>assistant<|channel|>commentary to=a<|message|>1<|call|>", "bad-header", ["a"]),
        ("<|channel|>analysis<|message|>Hm.<|channel|>commentary to=a<|message|>1<|call|>", "special-in-content", ["a"]),
        ("<|start|>assistant<|channel|>commentary to=a<|message|>1<|call|>", "bad-header", ["a"]),
        ("<|channel|>commentary to=a to=b<|message|>1<|call|>", "bad-header", ["a", "b"]),
        ("<|channel|>final to=a<|message|>1<|end|><|start|>assistant to=b<|message|>2<|call|>", "call-not-called", ["a", "b"]),
        ("<|call|><|call|>", "no-message", [None, None]),
    ],
)  # fmt: skip
def test_calls_of_a_malformed_turn_are_kept(said, problem, calls, tokenizer):
    turn = parse_turn(ids_of(said, tokenizer), tokenizer)
    assert (turn.kind, turn.problem, [call.recipient for call in turn.calls]) == ("malformed", problem, calls), turn


def test_a_seeded_sample_of_the_million_streams(tokenizer):
    """tools/fuzz_harmony.py runs the million; its laws are read off the ids, not with the parser."""
    outcomes = fuzz(tokenizer, seed=7, count=8000)
    assert outcomes["call"] and outcomes["final"] and outcomes["2 parallel calls"]
    assert len(outcomes) >= 14  # nearly every problem there is


@pytest.mark.parametrize(
    ("said", "problem", "recipient", "text"),
    [
        ("", "empty", None, ""),
        ("<|channel|>commentary to=functions.calc <|constrain|>js", "truncated", "functions.calc", ""),
        ('<|channel|>commentary to=functions.calc<|message|>{"expr', "truncated", "functions.calc", '{"expr'),
        ("hello", "truncated", None, ""),
        ("<|channel|>final<|message|>4", "truncated", None, "4"),
        ("<|call|>", "no-message", None, ""),
        ("<|channel|>commentary to=functions.calc <|constrain|>json{}<|call|>", "no-message", "functions.calc", ""),
        ("<|channel|>commentary<|message|>{}<|call|>", "call-without-recipient", None, "{}"),
        ("<|channel|>commentary to=functions.calc<|message|>{}<|end|>", "call-not-called", "functions.calc", "{}"),
        ("<|channel|>commentary to=functions.calc<|message|>{}<|end|>" + "<|start|>assistant", "call-not-called", "functions.calc", "{}"),
        ("<|channel|>final to=functions.calc<|message|>{}<|return|>", "call-not-called", "functions.calc", "{}"),
        ("<|channel|>commentary to=a to=b<|message|>{}<|call|>", "bad-header", "a", "{}"),
        ("<|channel|>commentary to=<|message|>{}<|call|>", "bad-header", None, "{}"),
        ("<|channel|>commentary to=a json extra<|message|>{}<|call|>", "bad-header", "a", "{}"),
        ("hello<|channel|>final<|message|>4<|return|>", "bad-header", None, "4"),
        ("<|channel|>final<|channel|>final<|message|>4<|return|>", "bad-header", None, "4"),
        ("<|channel|>analysis<|message|>4<|return|>", "no-final", None, "4"),
        ("<|message|>4<|return|>", "no-final", None, "4"),
        ("<|channel|>final<|message|>4<|end|>", "final-not-returned", None, "4"),
        ("<|channel|>analysis<|message|>4<|end|>", "unfinished", None, "4"),
        ("<|channel|>final<|message|>4<|start|>", "special-in-content", None, "4"),
        ("<|channel|>final<|message|>4<|message|>5<|return|>", "special-in-content", None, "4<|message|>5"),
        (THINK[: -len("assistant")] + "user<|message|>And?<|end|>", "other-speaker", None, "And?"),
        ("<|channel|>analysis<|message|>Hm.<|end|>4", "bad-header", None, ""),
        ("<|channel|>final<|message|>4<|return|>5", "after-end", None, "4"),
    ],
)
def test_what_is_wrong_has_a_name_and_keeps_what_was_said(said, problem, recipient, text, tokenizer):
    turn = parse_turn(ids_of(said, tokenizer), tokenizer)
    assert (turn.kind, turn.problem, turn.recipient, turn.text) == ("malformed", problem, recipient, text), turn
    assert turn.detail


def test_text_that_spells_a_special_token_is_text(tokenizer):
    ids = ids_of("<|channel|>commentary to=functions.calc<|message|>", tokenizer)
    ids += [*tokenizer.encode('{"s":"<|call|><|end|>"}'), tokenizer.special("<|call|>")]
    assert parse_turn(ids, tokenizer).text == '{"s":"<|call|><|end|>"}'


def test_an_id_without_a_meaning_is_no_text():
    ids = [*ids_of("<|channel|>final<|message|>4", TINY), 511, TINY.special("<|return|>")]
    assert parse_turn(ids, TINY).problem == "special-in-content"


PIECES = st.sampled_from(
    [*SPECIALS, "assistant", "user", "analysis", "final", "commentary", " to=functions.calc", " to=", " json", "{}", " "]
)


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=16))
def test_the_parser_never_raises_and_never_loses_a_call(pieces):
    ids = ids_of("".join(pieces), TINY)
    turn = parse_turn(ids, TINY)
    assert (turn.problem is None) == (turn.kind != "malformed")
    # A turn that passes as a final answer holds no call anywhere, and one that passes as a call ends with one.
    if turn.kind == "final":
        assert TINY.special("<|call|>") not in ids
        assert ids[-1] == TINY.special("<|return|>")
    if turn.kind == "call":
        assert ids[-1] == TINY.special("<|call|>")
        assert turn.recipient == turn.calls[-1].recipient
    assert broken_law(ids, turn, TINY) is None


@given(st.lists(st.integers(-2, 600) | st.integers(200_000, 201_100), max_size=40))
def test_any_ids_parse(ids):
    for tokenizer in [TINY, gpt_oss()]:
        turn = parse_turn(ids, tokenizer)
        assert turn.kind == "malformed" or tokenizer.special_name(ids[-1]) in ENDS


def test_a_turn_that_may_think_does_not_stop_at_the_end_of_a_thought(tokenizer):
    call, back, end, start = (tokenizer.special(s) for s in ("<|call|>", "<|return|>", "<|end|>", "<|start|>"))
    assert set(turn_stop_tokens([Message("system", system_text("low"))], tokenizer)) == {call, back}
    plain = [Message("developer", "# Tools"), Message("user", "# Valid channels: analysis")]  # only a system message declares channels
    assert set(turn_stop_tokens(plain, tokenizer)) == {call, back, end, start}
