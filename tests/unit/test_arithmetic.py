"""Laws of the arithmetic task. In: nothing but the package."""

import hashlib
import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.schema import Config, RunConfig, TaskConfig, TokenizerConfig
from megatron_gptoss.data.harmony import ParsedTurn, generation_prefix, parse_turn, render, render_marked
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.tasks.arithmetic import Arithmetic, Problem, calculate
from megatron_gptoss.tasks.base import Verdict
from megatron_gptoss.tasks.registry import make_task
from megatron_gptoss.types import Prompt

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))

# demo_recipe.md, section 2, with its line breaks taken out.
TRANSCRIPT = (
    "<|start|>developer<|message|># Tools\nfunctions.calc(expression)<|end|><|start|>user<|message|>(37+58)*4<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"expression":"37+58"}<|call|>'
    "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>95<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"expression":"95*4"}<|call|>'
    "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>380<|end|><|start|>assistant"
    "<|channel|>final<|message|>380<|return|>"
)


def call(expression: str) -> ParsedTurn:
    return ParsedTurn("call", json.dumps({"expression": expression}), "commentary", "functions.calc", "<|constrain|>json")


def final(text: str) -> ParsedTurn:
    return ParsedTurn("final", text, "final")


def value(expression: str) -> int:
    """An independent reading: Python's own arithmetic."""
    assert re.fullmatch(r"[0-9+*()-]+", expression)
    return eval(expression)


def test_the_transcript_of_the_recipe_token_by_token(monkeypatch):
    task = Arithmetic(0)
    monkeypatch.setattr(task, "_problem", lambda split, index: Problem(37, ("+58", "*4")))
    (clean,) = task.copy_transcripts("heldout", 0, 1)
    marked = render_marked(clean.messages, TINY, clean.copied)
    assert TINY.decode(marked.token_ids) == TRANSCRIPT
    assert (len(marked.token_ids), sum(marked.said)) == (76, 32)
    copied = [i for i, c in zip(marked.token_ids, marked.copied, strict=True) if c]
    assert TINY.decode(copied) == '37+58"}<|call|>95*4"}<|call|>380<|return|>'
    assert all(said for said, c in zip(marked.said, marked.copied, strict=True) if c)


def test_a_conversation_that_samples_the_transcript_is_rewarded():
    """The tool really runs: our replies between the assistant's turns rebuild the recipe's transcript to the token."""
    talk = Arithmetic(0).begin(Prompt("p", "arithmetic", "(37+58)*4", "380"))
    ids = render(talk.opening(), TINY) + generation_prefix(TINY)
    whole = list(render_marked(Arithmetic(0).copy_transcripts("train", 0, 1)[0].messages[:1], TINY).token_ids)
    assert ids[: len(whole)] == whole
    for said in [part.split("<|start|>")[0] for part in TRANSCRIPT.split("<|start|>assistant")[1:]]:
        turn_ids = _special_ids(said)
        ids += turn_ids
        reply = talk.reply(parse_turn(turn_ids, TINY))
        if isinstance(reply, Verdict):
            break
        ids += render(reply, TINY) + generation_prefix(TINY)
    assert TINY.decode(ids) == TRANSCRIPT
    assert reply == Verdict(1.0, reply.parts, "380", ("called-both", "right"), "final")  # type: ignore[possibly-undefined, union-attr]


def _special_ids(text: str) -> list[int]:
    parts = re.split(r"(<\|[a-z]+\|>)", text)
    return [i for n, part in enumerate(parts) for i in ([TINY.special(part)] if n % 2 else TINY.encode(part))]


def test_prompts_obey_the_rules_and_the_splits_never_meet():
    task = Arithmetic(5)
    train, heldout = task.prompts("train", 0, 2000), task.prompts("heldout", 0, 1000)
    for prompts, held in [(train, True), (heldout, False)]:
        for prompt in prompts:
            match = re.fullmatch(r"\((\d\d)([+-])(\d\d)\)([+*-])([2-9])", prompt.text)
            assert match, prompt.text
            assert value(f"{match[1]}{match[2]}{match[3]}") >= 0
            assert value(prompt.text) == int(prompt.gold) >= 0
            assert (hashlib.sha256(prompt.text.encode()).digest()[0] >= 26) == held
    assert not {p.text for p in train} & {p.text for p in heldout}
    assert len({p.id for p in train + heldout}) == 3000


def test_the_stream_depends_on_seed_split_and_number_only():
    assert Arithmetic(1).prompts("train", 7, 3) == Arithmetic(1).prompts("train", 0, 20)[7:10]
    assert Arithmetic(1).prompts("train", 0, 50) != Arithmetic(2).prompts("train", 0, 50)
    # A value kept from the first version: a resumed run must meet the prompts it would have met.
    assert [p.text for p in Arithmetic(0).prompts("heldout", 0, 3)] == ["(16-11)+4", "(13+46)*2", "(19+96)+8"]


@given(st.integers(0, 999_999), st.sampled_from("+-*"), st.integers(0, 999_999))
def test_the_calculator_is_python_arithmetic(a, op, b):
    assert calculate(f"{a}{op}{b}") == str({"+": a + b, "-": a - b, "*": a * b}[op])


@pytest.mark.parametrize("expression", ["", "1", "1+2+3", "(1+2)", "-1+2", "1/2", "1 + 2", "1000000+1", "\u0661+\u0662", "1+2\n"])
def test_the_calculator_does_one_operation_only(expression):
    assert calculate(expression) == "error"


@pytest.mark.parametrize(
    ("turns", "reward", "labels", "stop"),
    [
        ([final("380")], 1.0, ("no-call", "right"), "final"),
        ([call("37+58"), final("95")], 0.0, ("stopped-early",), "final"),
        ([call("37+58"), call("95*4"), final("380")], 1.0, ("called-both", "right"), "final"),
        ([call("37+58"), call("95*4"), final("0380")], 0.0, ("called-both",), "final"),
        ([call("37+58"), call("95*4"), final("380.")], 0.0, ("called-both", "malformed"), "malformed"),
        ([call("1"), call("37+58"), call("95*4"), final("380")], 1.0, ("overcall", "right"), "final"),
        ([ParsedTurn("malformed", problem="empty")], 0.0, ("no-call", "malformed"), "malformed"),
        ([call("37+58"), ParsedTurn("call", "{", "commentary", "functions.calc")], 0.0, ("stopped-early", "malformed"), "malformed"),
        ([ParsedTurn("call", '["expression"]', "commentary", "functions.calc")], 0.0, ("no-call", "malformed"), "malformed"),
        ([ParsedTurn("call", '{"expression":"1+1"}', "commentary", "functions.other")], 0.0, ("no-call", "malformed"), "malformed"),
        ([ParsedTurn("call", '{"expression":"1+1"}', "analysis", "functions.calc")], 0.0, ("no-call", "malformed"), "malformed"),
        ([ParsedTurn("call", "[" * 100_000, "commentary", "functions.calc")], 0.0, ("no-call", "malformed"), "malformed"),
    ],
)
def test_verdicts(turns, reward, labels, stop):
    talk = Arithmetic(0).begin(Prompt("p", "arithmetic", "(37+58)*4", "380"))
    *calls, last = turns
    for turn in calls:
        assert not isinstance(talk.reply(turn), Verdict)
    verdict = talk.reply(last)
    assert isinstance(verdict, Verdict)
    assert (verdict.reward, verdict.labels, verdict.stop_reason) == (reward, labels, stop)
    assert verdict.reward == sum(part.value for part in verdict.parts)


def test_a_call_the_tool_cannot_do_is_answered_and_the_talk_goes_on():
    talk = Arithmetic(0).begin(Prompt("p", "arithmetic", "(37+58)*4", "380"))
    for turn in [call("(37+58)*4"), ParsedTurn("call", '{"expression":7}', "commentary", "functions.calc")]:
        (answer,) = talk.reply(turn)  # type: ignore[misc]
        assert answer.content == "error"
    assert talk.cut("max_turns") == Verdict(0.0, talk.cut("max_turns").parts, None, ("called-both",), "max_turns")


def test_demonstrations_have_the_shares_asked_for_and_are_what_they_say():
    task, rng, kinds = Arithmetic(0), random.Random(3), Counter()
    for _ in range(4000):
        shown = task.demonstration(rng)
        kinds[shown.kind] += 1
        _developer, user, *rest = shown.messages
        assert hashlib.sha256(user.content.encode()).digest()[0] >= 26  # training problems only
        calls = [json.loads(m.content)["expression"] for m in rest[:-1:2]]
        assert [m.content for m in rest[1::2]] == [calculate(c) for c in calls]  # results are never made up
        right = str(value(user.content))
        first = user.content[1:6]
        match shown.kind:
            case "clean":
                assert calls == [first, calculate(first) + user.content[7:]]
                assert rest[-1].content == right
            case "guess":
                assert not calls
                assert len(rest[-1].content) == len(right)
            case "stop":
                assert calls == [first]
                assert rest[-1].content == calculate(first)
            case "digit":
                assert len(calls) == 2
                slips = [(first, calls[0]), (calculate(calls[0]) + user.content[7:], calls[1]), (calculate(calls[1]), rest[-1].content)]
                assert sum(sum(a != b for a, b in zip(*slip, strict=True)) for slip in slips) == 1
    # Binomial: four standard errors of 4000 draws are at most 0.032.
    for kind, share in {"guess": 0.10, "stop": 0.50, "digit": 0.03, "clean": 0.37}.items():
        assert abs(kinds[kind] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5, kinds


# ---- more operations, larger numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operations", "digits"), [(3, 2), (5, 3), (6, 4)])
def test_harder_problems_obey_the_same_rules(operations, digits):
    task = Arithmetic(5, operations=operations, digits=digits)
    train, heldout = task.prompts("train", 0, 300), task.prompts("heldout", 0, 60)
    pattern = rf"\({{{operations - 1}}}(\d{{{digits}}})([+-])(\d{{{digits}}})" + rf"\)([+*-])(\d{{{digits - 1}}})" * (operations - 1)
    for prompts, held in [(train, True), (heldout, False)]:
        for prompt in prompts:
            assert re.fullmatch(pattern, prompt.text), prompt.text
            assert 0 <= value(prompt.text) == int(prompt.gold) <= 999_999
            assert (hashlib.sha256(prompt.text.encode()).digest()[0] >= 26) == held
    assert {op for prompt in train for op in "+-*" if op in prompt.text} == set("+-*")


def test_every_operation_of_a_right_solution_is_a_call_that_the_calculator_takes():
    for clean in Arithmetic(1, operations=5, digits=3).copy_transcripts("heldout", 0, 50):
        _developer, user, *rest = clean.messages
        calls = [json.loads(m.content)["expression"] for m in rest[:-1:2]]
        assert len(calls) == 5
        assert [m.content for m in rest[1::2]] == [calculate(c) for c in calls] == [str(value(c)) for c in calls]
        assert rest[-1].content == str(value(user.content))
        # The first reads the problem; each later one goes on with the last result and the problem's next number.
        numbers = re.findall(r"\d+", user.content)
        assert [re.findall(r"\d+", c) for c in calls] == [
            numbers[:2],
            *([m.content, n] for m, n in zip(rest[1:-2:2], numbers[2:], strict=True)),
        ]


def test_transcripts_of_five_operations_are_longer_than_the_window():
    for clean in Arithmetic(0, operations=5, digits=3).copy_transcripts("train", 0, 30):
        marked = render_marked(clean.messages, TINY, clean.copied)
        ask = [i for i, c in enumerate(marked.copied) if c]
        assert len(marked.token_ids) > 128
        assert ask[-1] - 128 > marked.said.index(True)  # the problem is out of the window's sight when the answer is given


def test_flaws_of_longer_solutions():
    task, rng, made = Arithmetic(0, operations=5, digits=3), random.Random(3), Counter()
    for _ in range(1500):
        shown = task.demonstration(rng)
        _developer, user, *rest = shown.messages
        calls = [json.loads(m.content)["expression"] for m in rest[:-1:2]]
        assert [m.content for m in rest[1::2]] == [calculate(c) for c in calls]
        made[shown.kind, len(calls)] += 1
        if shown.kind in ("clean", "stop"):
            numbers = re.findall(r"[+*-]?\d+", user.content)
            results = [calculate(calls[0]), *(m.content for m in rest[3:-1:2])]
            assert calls == ["".join(numbers[:2]), *(r + n for r, n in zip(results, numbers[2:], strict=False))][: len(calls)]
            assert rest[-1].content == results[-1]
        elif shown.kind == "digit":
            assert len(calls) == 5
    stops = [made["stop", n] for n in range(1, 5)]
    assert {n for kind, n in made if kind == "stop"} == {1, 2, 3, 4}
    assert {n for kind, n in made if kind in ("clean", "digit")} == {5}
    share = sum(stops) / 4
    assert all(abs(n - share) < 4 * (share * 0.75) ** 0.5 for n in stops), stops  # four standard errors


@pytest.mark.parametrize(
    ("calls", "label"), [(0, "no-call"), (1, "stopped-early"), (4, "stopped-early"), (5, "called-all"), (6, "overcall")]
)
def test_labels_of_longer_solutions(calls, label):
    task = Arithmetic(0, operations=5, digits=3)
    (prompt,) = task.prompts("train", 0, 1)
    talk = task.begin(prompt)
    for _ in range(calls):
        assert not isinstance(talk.reply(call("1+1")), Verdict)
    verdict = talk.reply(final(prompt.gold or ""))
    assert isinstance(verdict, Verdict)
    assert verdict.labels == (label, "right")


def test_the_configuration_says_how_hard():
    made = make_task(Config(task=TaskConfig(operations=5, digits=3)))
    assert made.prompts("heldout", 0, 3) == Arithmetic(0, operations=5, digits=3).prompts("heldout", 0, 3)


def test_every_copied_character_stands_in_the_context_before_it():
    for clean in Arithmetic(2).copy_transcripts("heldout", 0, 50):
        marked = render_marked(clean.messages, TINY, clean.copied)
        for at, (token, copied) in enumerate(zip(marked.token_ids, marked.copied, strict=True)):
            if copied and TINY.decode([token]).isdigit():
                assert token in marked.token_ids[:at]
        assert sum(TINY.decode([t]).isdigit() for t, said in zip(marked.token_ids, marked.said, strict=True) if said) == sum(
            TINY.decode([t]).isdigit() for t, c in zip(marked.token_ids, marked.copied, strict=True) if c
        )


def test_copy_transcripts_are_of_the_same_problems_as_the_prompts():
    task = Arithmetic(4)
    assert [t.messages[1].content for t in task.copy_transcripts("heldout", 3, 5)] == [p.text for p in task.prompts("heldout", 3, 5)]


def test_registry():
    task = make_task(Config(run=RunConfig(seed=9)))
    assert task.prompts("train", 0, 2) == Arithmetic(9).prompts("train", 0, 2)
    with pytest.raises(ConfigError, match=r"task.name = 'arithmetics' is no task. Nearest: arithmetic. There are: arithmetic, gsm8k"):
        make_task(Config(task=TaskConfig(name="arithmetics")))
    with pytest.raises(ConfigError, match=r"task.path is empty"):
        make_task(Config(task=TaskConfig(name="gsm8k")))
