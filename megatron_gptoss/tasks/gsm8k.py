"""GSM8K: grade-school word problems, answered in one turn with real Harmony messages.

In: a JSON-lines file with `question` and `answer`, the reference after `#### `. Out: prompts without end, shuffled anew each epoch, and
verdicts by math-verify. No tools, and no demonstrations: a model that can speak comes in.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gptoss.data.harmony import Message, ParsedTurn, developer_text, system_text
from megatron_gptoss.data.prompts import read_prompt_file
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.tasks.base import Split, Verdict
from megatron_gptoss.tasks.math_check import MathChecker, final_answer
from megatron_gptoss.types import Prompt, RewardPart

INSTRUCTIONS = "Solve the problem. Put the final answer, a number without its unit, in \\boxed{}."
HELDOUT_BELOW = 26  # of 256: a tenth of `path` when no eval_path is given


@dataclass(frozen=True)
class _Item:
    line: int  # in its file
    question: str
    gold: str


class Gsm8k:
    """The task. DataError for a file that cannot be used; ConfigError without a path."""

    name = "gsm8k"

    def __init__(self, path: str, eval_path: str = "", seed: int = 0, reasoning: str = "low", check_timeout_s: float = 5.0) -> None:
        if not path:
            raise ConfigError("task.path is empty, and gsm8k reads its problems from a file. Set it to one, gsm8k_train.jsonl say.")
        self.seed = seed
        self.opening = (Message("system", system_text(reasoning)), Message("developer", developer_text(INSTRUCTIONS)))
        self.checker = MathChecker(check_timeout_s)
        items = _read(path)
        if eval_path:
            heldout = _read(eval_path)
            seen = {item.question for item in heldout}
            train = [item for item in items if item.question not in seen]
        else:
            heldout = [item for item in items if _is_heldout(item.question)]
            train = [item for item in items if not _is_heldout(item.question)]
        self._items: dict[Split, list[_Item]] = {"train": train, "heldout": heldout}
        self._empty: dict[Split, str] = {
            "train": f"every problem of task.path = {path} is held out; give a file with further problems.",
            "heldout": f"task.path = {path} has too few problems for a held-out tenth; set task.eval_path to a file of held-out problems.",
        }

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        items = self._items[split]
        if count and not items:
            raise DataError(self._empty[split])
        orders: dict[int, list[int]] = {}
        prompts = []
        for index in range(start, start + count):
            epoch, place = divmod(index, len(items))
            if epoch not in orders:
                orders[epoch] = list(range(len(items)))
                random.Random(f"gsm8k/{self.seed}/{split}/{epoch}").shuffle(orders[epoch])
            item = items[orders[epoch][place]]
            prompts.append(Prompt(f"gsm8k/{split}/{item.line}/{epoch}", self.name, item.question, item.gold))
        return prompts

    def epoch_size(self, split: Split) -> int:
        return len(self._items[split])

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


def _read(path: str) -> list[_Item]:
    items = []
    for record in read_prompt_file(path, ("question", "answer")):
        _, marker, gold = record.fields["answer"].rpartition("####")
        if not marker or not gold.strip():
            raise DataError(f"{path}:{record.line}: the answer has no reference after '#### '.")
        items.append(_Item(record.line, record.fields["question"].strip(), gold.strip()))
    return items


def _is_heldout(question: str) -> bool:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[0] < HELDOUT_BELOW
