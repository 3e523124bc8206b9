"""A task a tiny model learns in minutes: `(37+58)*4`, with a calculator that does exactly one operation a call.

In: a seed, how many operations, how large the numbers. Out: prompts without end, conversations that run the calculator, and transcripts
for the warm start. Every operation takes a call, so the model must call, copy each result into the next call, and copy the last result
into its answer.

Problem: (a OP1 b)OP2 c with a, b in 10..99, OP1 in {+,-}, OP2 in {+,-,*}, c in 2..9 and no value below zero: 288,840 problems. Harder
ones go on in the same way, `((((816-128)*27)-37)-28)+20`, and may have larger numbers: a and b have `digits`, the others one less; no value
has more than six, the most that the calculator takes. Five operations on three digits make a transcript of about 180 tokens, longer than
GPT-OSS's window: the numbers of the last calls stand where only the layers that see everything can read them.

Held out are problems whose text has a sha256 that starts with a byte below 26, about a tenth. Reward: 1 if the answer is exactly right,
else 0.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gptoss.data.harmony import Message, ParsedTurn
from megatron_gptoss.tasks.base import Demonstration, Split, Verdict
from megatron_gptoss.types import Prompt, RewardPart

TOOL = "functions.calc"
DEVELOPER = Message("developer", f"# Tools\n{TOOL}(expression)")
MAX_DIGITS = 6  # of a number that the calculator takes
HELDOUT_BELOW = 26  # of 256


@dataclass(frozen=True)
class Problem:
    a: int
    steps: tuple[str, ...]  # an operator and a number each, "+58", "*4"; a right solution calls once for each

    @property
    def text(self) -> str:
        return functools.reduce(lambda inner, step: f"({inner}){step}", self.steps[1:], f"{self.a}{self.steps[0]}")

    def results(self) -> tuple[str, ...]:
        """What the calculator says to the calls of a right solution."""
        return tuple(itertools.accumulate(self.steps, lambda now, step: calculate(now + step), initial=str(self.a)))[1:]

    def calls(self) -> list[str]:
        """The expressions of a right solution."""
        return [now + step for now, step in zip((str(self.a), *self.results()), self.steps, strict=False)]


def calculate(expression: str) -> str:
    """The tool: one operation on two numbers of at most six digits; "error" for anything else."""
    match = re.fullmatch(rf"([0-9]{{1,{MAX_DIGITS}}})([+*-])([0-9]{{1,{MAX_DIGITS}}})", expression)
    if match is None:
        return "error"
    a, b = int(match[1]), int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])


def is_heldout(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < HELDOUT_BELOW


def draw_problem(rng: random.Random, split: Split, operations: int = 2, digits: int = 2) -> Problem:
    """A problem of one split, uniform over the draws that keep every value at or above zero and within the calculator's reach."""
    large = (10 ** (digits - 1), 10**digits - 1)
    small = (max(2, 10 ** (digits - 2)), 10 ** (digits - 1) - 1)
    while True:
        a, first = rng.randint(*large), f"{rng.choice('+-')}{rng.randint(*large)}"
        problem = Problem(a, (first, *(f"{rng.choice('+-*')}{rng.randint(*small)}" for _ in range(operations - 1))))
        in_reach = all(result.isdigit() and len(result) <= MAX_DIGITS for result in problem.results())
        if in_reach and is_heldout(problem.text) == (split == "heldout"):
            return problem


class Arithmetic:
    """The task. `guess`, `stop` and `digit` are the shares of flawed demonstrations, at most 1 together (rules.py); the rest is right.
    `operations`: of a problem, at least 2; `digits`: of its two first numbers, at least 2."""

    name = "arithmetic"

    def __init__(
        self, seed: int, guess: float = 0.10, stop: float = 0.50, digit: float = 0.03, *, operations: int = 2, digits: int = 2
    ) -> None:
        self.seed, self.operations, self.digits = seed, operations, digits
        self.mix = (("guess", guess), ("stop", stop), ("digit", digit))

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return [self._prompt(split, index) for index in range(start, start + count)]

    def epoch_size(self, split: Split) -> None:
        return None

    def begin(self, prompt: Prompt) -> ArithmeticConversation:
        return ArithmeticConversation(prompt, self.operations)

    def close(self) -> None:
        pass

    def demonstration(self, rng: random.Random) -> Demonstration:
        """A transcript of a training problem: right, a guess without a call, a stop after an earlier result than the last, or one wrong
        digit."""
        problem, u = draw_problem(rng, "train", self.operations, self.digits), rng.random()
        kind = "clean"
        for name, share in self.mix:
            if u < share:
                kind = name
                break
            u -= share
        if kind == "digit":
            return _with_wrong_digit(problem, rng)
        calls, results = problem.calls(), problem.results()
        if kind == "guess":
            digits = str(rng.randint(1, 9)) + "".join(rng.choice("0123456789") for _ in results[-1][1:])
            return _transcript(problem, [], digits, kind)
        made = len(calls)
        if kind == "stop":
            made = 1 if made == 2 else rng.randint(1, made - 1)  # two leave no choice, and asking would move on the demo's generator
        return _transcript(problem, calls[:made], results[made - 1], kind)

    def copy_transcripts(self, split: Split, start: int, count: int) -> list[Demonstration]:
        clean = []
        for index in range(start, start + count):
            problem = self._problem(split, index)
            clean.append(_transcript(problem, problem.calls(), problem.results()[-1], "clean"))
        return clean

    def _problem(self, split: Split, index: int) -> Problem:
        # One generator per prompt, so that prompt n is the same wherever a stream starts. Python hashes a text seed with sha512.
        return draw_problem(random.Random(f"arithmetic/{self.seed}/{split}/{index}"), split, self.operations, self.digits)

    def _prompt(self, split: Split, index: int) -> Prompt:
        problem = self._problem(split, index)
        return Prompt(f"arithmetic/{split}/{index}", self.name, problem.text, problem.results()[-1])


class ArithmeticConversation:
    """One rollout. Labels: by the calls answered "no-call", "stopped-early", "called-both" or "overcall"; then "right" or "malformed".
    Where a solution takes more than two calls, "called-both" is "called-all".

    The first four are about calls alone, whatever ended the conversation: right given both calls is the share of "right" in "called-both".
    """

    def __init__(self, prompt: Prompt, operations: int = 2) -> None:
        self.prompt, self.operations = prompt, operations
        self.num_calls = 0

    def opening(self) -> Sequence[Message]:
        return (DEVELOPER, Message("user", self.prompt.text))

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        if turn.kind == "call" and len(turn.calls) == 1 and turn.recipient == TOOL and turn.channel == "commentary":
            expression = _expression(turn.text)
            if expression is not None:
                self.num_calls += 1
                return (_tool_says(calculate(expression)),)
        if turn.kind == "final" and re.fullmatch(r"-?[0-9]+", turn.text):
            return self._verdict("final", turn.text)
        return self._verdict("malformed", None)

    def cut(self, reason: str) -> Verdict:
        return self._verdict(reason, None)

    def _verdict(self, stop_reason: str, answer: str | None) -> Verdict:
        labels = ["stopped-early" if self.num_calls < self.operations else "overcall"]
        if self.num_calls in (0, self.operations):
            labels = ["no-call" if self.num_calls == 0 else "called-both" if self.operations == 2 else "called-all"]
        right = answer == self.prompt.gold
        if right:
            labels.append("right")
        if stop_reason == "malformed":
            labels.append("malformed")
        return Verdict(float(right), (RewardPart("right", float(right)),), answer, tuple(labels), stop_reason)


def _expression(arguments: str) -> str | None:
    """The argument of a call; None when the JSON is broken or has no such field. What is no text is no operation, which "" says too."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return expression if isinstance(expression, str) else ""


def _tool_says(result: str) -> Message:
    return Message("tool", result, channel="commentary", recipient="assistant", author_name=TOOL)


def _transcript(problem: Problem, expressions: Sequence[str], answer: str, kind: str) -> Demonstration:
    """Developer, user, one call and its true result per expression, then the answer. Expressions and answer are the copied text."""
    messages = [DEVELOPER, Message("user", problem.text)]
    copied = []
    for expression in expressions:
        before = '{"expression":"'
        arguments = f'{before}{expression}"}}'
        # The span runs on to the closing `"}`: knowing where the number ends is part of copying it.
        copied.append((len(messages), len(before), len(arguments)))
        call = Message("assistant", arguments, "commentary", TOOL, "<|constrain|>json", recipient_after_channel=True)
        messages += [call, _tool_says(calculate(expression))]
    copied.append((len(messages), 0, len(answer)))
    messages.append(Message("assistant", answer, "final"))
    return Demonstration(tuple(messages), kind, tuple(copied) if kind == "clean" else ())


def _with_wrong_digit(problem: Problem, rng: random.Random) -> Demonstration:
    """One wrong digit in one of the calls or in the answer, and what follows from it. Drawn again while a result is below zero, or more
    than the calculator takes."""
    while True:
        slot = rng.randrange(len(problem.steps) + 1)
        now, calls = str(problem.a), []
        for n, step in enumerate(problem.steps):
            expression = now + step
            calls.append(_wrong_digit(expression, rng) if n == slot else expression)
            now = calculate(calls[-1])
            if not now.isdigit() or len(now) > MAX_DIGITS:
                break
        else:
            return _transcript(problem, calls, _wrong_digit(now, rng) if slot == len(problem.steps) else now, "digit")


def _wrong_digit(text: str, rng: random.Random) -> str:
    at = rng.choice([n for n, c in enumerate(text) if c.isdigit()])
    return text[:at] + rng.choice([c for c in "0123456789" if c != text[at]]) + text[at + 1 :]
