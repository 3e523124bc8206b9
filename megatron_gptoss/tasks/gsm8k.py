"""GSM8K: grade-school word problems, answered in one turn with real Harmony messages.

In: a JSON-lines file with `question` and `answer`, the reference after `#### `. Out: prompts without end, shuffled anew each epoch, and
verdicts by math-verify. No tools, and no demonstrations: a model that can speak comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gptoss.data.harmony import Message, ParsedTurn, developer_text, system_text
from megatron_gptoss.data.prompts import read_prompt_file
from megatron_gptoss.errors import DataError
from megatron_gptoss.tasks.base import Split, Verdict
from megatron_gptoss.tasks.file_prompts import FilePrompts, Problem
from megatron_gptoss.tasks.math_check import MathChecker, final_answer
from megatron_gptoss.types import Prompt, RewardPart

INSTRUCTIONS = "Solve the problem. Put the final answer, a number without its unit, in \\boxed{}."


class Gsm8k:
    """The task. DataError for a file that cannot be used; ConfigError without a path."""

    name = "gsm8k"

    def __init__(self, path: str, eval_path: str = "", seed: int = 0, reasoning: str = "low", check_timeout_s: float = 5.0) -> None:
        self.opening = (Message("system", system_text(reasoning)), Message("developer", developer_text(INSTRUCTIONS)))
        self.checker = MathChecker(check_timeout_s)
        self._file = FilePrompts(self.name, path, eval_path, seed, read_math_problems, "gsm8k_train.jsonl")

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return self._file.prompts(split, start, count)

    def epoch_size(self, split: Split) -> int:
        return self._file.epoch_size(split)

    def begin(self, prompt: Prompt) -> Gsm8kConversation:
        return Gsm8kConversation(prompt, self.opening, self.checker)

    def close(self) -> None:
        self.checker.close()


class Gsm8kConversation:
    """One rollout: a single turn. Labels: the checker's outcome where it is not a plain yes or no, "right", "malformed"."""

    def __init__(self, prompt: Prompt, opening: Sequence[Message], checker: MathChecker) -> None:
        self.prompt = prompt
        self._opening = opening
        self._checker = checker

    def opening(self) -> Sequence[Message]:
        return (*self._opening, Message("user", self.prompt.text))

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        if turn.kind != "final":  # there is no tool to call
            return _verdict(0.0, None, "malformed", "malformed")
        outcome = self._checker.check(self.prompt.gold, turn.text)
        label = {"equal": "right", "different": "wrong"}.get(outcome, outcome)
        return _verdict(float(outcome == "equal"), final_answer(turn.text), "final", label)

    def cut(self, reason: str) -> Verdict:
        return _verdict(0.0, None, reason)


def _verdict(reward: float, answer: str | None, stop_reason: str, *labels: str) -> Verdict:
    return Verdict(reward, (RewardPart("right", reward),), answer, labels, stop_reason)


def read_math_problems(path: str, needs_marker: bool = True) -> list[Problem]:
    """Problems with `question` and `answer`, the reference after `#### `; all of `answer` without one, unless it is needed."""
    problems = []
    for record in read_prompt_file(path, ("question", "answer")):
        _, marker, gold = record.fields["answer"].rpartition("####")
        if not gold.strip() or (needs_marker and not marker):
            raise DataError(f"{path}:{record.line}: the answer has no reference after '#### '.")
        problems.append(Problem(record.line, record.fields["question"].strip(), gold.strip()))
    return problems
