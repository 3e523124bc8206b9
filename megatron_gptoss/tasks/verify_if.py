"""Verifiable instructions: prompts that say how to answer ("no commas", "at least 300 words"), checked by if-verifiable.

In: a JSON-lines file in the form of IFEval and IFBench: `prompt`, `instruction_id_list`, `kwargs` (arguments, one object per instruction).
Out: prompts without end and verdicts, strict and loose: loose also accepts an answer that follows once its first or last line or its
asterisks are taken out. Checkers run in processes of their own, behind a deadline, and without a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_gptoss.data.harmony import Message, ParsedTurn, system_text
from megatron_gptoss.data.prompts import read_json_lines
from megatron_gptoss.errors import DataError, RunFailed
from megatron_gptoss.tasks.base import Split, Verdict
from megatron_gptoss.tasks.file_prompts import FilePrompts, Problem
from megatron_gptoss.tasks.json_workers import START_TIMEOUT_S, JsonWorkers, python_script
from megatron_gptoss.types import Prompt, RewardPart

Judging = Literal["strict", "loose"]


@dataclass(frozen=True)
class Followed:
    """Which instructions a response follows, in their order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    label: str = ""  # "timeout", "crashed" or "checker-error" where a check did not come to an end


class InstructionChecker:
    """if-verifiable in up to `num_workers` processes. Any number of threads may call `check`."""

    def __init__(self, timeout_s: float, nltk_data: str = "", num_workers: int = 2) -> None:
        self.timeout_s = timeout_s
        env = {**os.environ, "NLTK_DATA": nltk_data} if nltk_data else None
        self._workers = JsonWorkers("if-verifiable", python_script(Path(__file__).with_name("if_worker.py")), num_workers, env)

    def unknown(self, instructions: Sequence[str]) -> list[str]:
        """Instruction ids without a checker. RunFailed where the checkers cannot start."""
        answer = self._workers.ask({"known": list(instructions)}, START_TIMEOUT_S)
        if isinstance(answer, str):
            raise RunFailed(f"the if-verifiable process gave no answer ({answer})")
        return answer["unknown"]

    def check(self, instructions: Sequence[str], kwargs: Sequence[dict[str, Any]], prompt: str, response: str) -> Followed:
        request = {"instructions": list(instructions), "kwargs": list(kwargs), "prompt": prompt, "response": response}
        answer = self._workers.ask(request, self.timeout_s)
        if isinstance(answer, str):  # a check that does not end finds nothing followed
            none = (False,) * len(instructions)
            return Followed(none, none, answer)
        return Followed(tuple(answer["strict"]), tuple(answer["loose"]), "checker-error" if answer["errors"] else "")

    def close(self) -> None:
        self._workers.close()


class VerifyIf:
    """The task. `judging`: which verdict is the reward. `partial`: the reward is the share of instructions followed, not all or nothing.

    DataError for a file that cannot be used, an instruction nobody can check, or NLTK data that is missing; ConfigError without a path.
    """

    name = "verify_if"

    def __init__(
        self,
        path: str,
        eval_path: str = "",
        seed: int = 0,
        reasoning: str = "low",
        check_timeout_s: float = 5.0,
        judging: Judging = "strict",
        partial: bool = False,
        nltk_data: str = "",
    ) -> None:
        self.judging: Judging = judging
        self.partial = partial
        self.system = Message("system", system_text(reasoning))
        self._file = FilePrompts(self.name, path, eval_path, seed, _read, "the file of IFBench")
        self.checker = InstructionChecker(check_timeout_s, nltk_data)
        try:
            self._require_checkers(path, eval_path)
        except BaseException:
            self.close()
            raise

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return self._file.prompts(split, start, count)

    def epoch_size(self, split: Split) -> int:
        return self._file.epoch_size(split)

    def begin(self, prompt: Prompt) -> VerifyIfConversation:
        return VerifyIfConversation(prompt, self)

    def close(self) -> None:
        self.checker.close()

    def _require_checkers(self, *paths: str) -> None:
        """Asked once, before a run starts: if-verifiable passes over an instruction that it does not know, and would reward it."""
        problems = [(path, problem) for path in paths if path for problem in _read(path)]
        ids = {name for _, problem in problems for name in json.loads(problem.gold)["instructions"]}
        try:
            unknown = set(self.checker.unknown(sorted(ids)))
        except RunFailed as error:
            raise DataError(f"task.name = verify_if: {error}") from error
        for path, problem in problems:
            strange = unknown & set(json.loads(problem.gold)["instructions"])
            if strange:
                raise DataError(f"{path}:{problem.line}: no checker of IFEval or IFBench is called {', '.join(sorted(strange))}.")


class VerifyIfConversation:
    """One rollout: a single turn. Labels: "strict" and "loose" where all is followed, "malformed", or why a check did not end."""

    def __init__(self, prompt: Prompt, task: VerifyIf) -> None:
        self.prompt = prompt
        self._task = task

    def opening(self) -> Sequence[Message]:
        return (self._task.system, Message("user", self.prompt.text))

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        if turn.kind != "final":  # there is no tool to call
            return Verdict(0.0, (RewardPart("followed", 0.0),), None, ("malformed",), "malformed")
        wanted = json.loads(self.prompt.gold)
        found = self._task.checker.check(wanted["instructions"], wanted["kwargs"], self.prompt.text, turn.text)
        chosen = found.strict if self._task.judging == "strict" else found.loose
        reward = sum(chosen) / len(chosen) if self._task.partial else float(all(chosen))
        labels = [name for name, each in (("strict", found.strict), ("loose", found.loose)) if all(each)]
        labels += [found.label] if found.label else []
        return Verdict(reward, (RewardPart("followed", reward),), turn.text, tuple(labels), "final")

    def cut(self, reason: str) -> Verdict:
        return Verdict(0.0, (RewardPart("followed", 0.0),), None, (), reason)


def _read(path: str) -> list[Problem]:
    """The instructions and their arguments travel as JSON in the prompt's gold."""
    problems = []
    for line, value in read_json_lines(path):
        prompt, names, kwargs = (value.get(key) for key in ("prompt", "instruction_id_list", "kwargs"))
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{path}:{line}: the field 'prompt' is missing, empty or no text.")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise DataError(f"{path}:{line}: the field 'instruction_id_list' must be a list of instruction names, at least one.")
        if not isinstance(kwargs, list) or len(kwargs) != len(names) or not all(isinstance(each, dict) for each in kwargs):
            raise DataError(f"{path}:{line}: the field 'kwargs' must hold one object for each of the {len(names)} instructions.")
        given = [{key: each[key] for key in sorted(each) if each[key] is not None} for each in kwargs]
        problems.append(Problem(line, prompt, json.dumps({"instructions": names, "kwargs": given})))
    if not problems:
        raise DataError(f"{path} holds no prompt; it needs one JSON object a line, with prompt, instruction_id_list, kwargs.")
    return problems
