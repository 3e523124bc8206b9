"""Mathematics with Python: the model may run programs before it answers, and the final answer is rewarded.

In: a JSON-lines file with `question` and `answer`, the reference after `#### ` if there is one, else all of `answer`. Out: prompts without
end, conversations in which GPT-OSS's built-in `python` tool runs in the sandbox, and verdicts by math-verify. How a program ended is told
to the model and labelled; it is not rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gptoss.data.harmony import Message, ParsedTurn, answer_to, developer_text, system_text
from megatron_gptoss.data.tools import STATELESS_PYTHON, python_text
from megatron_gptoss.tasks.base import Split, Verdict
from megatron_gptoss.tasks.file_prompts import FilePrompts
from megatron_gptoss.tasks.gsm8k import read_math_problems
from megatron_gptoss.tasks.math_check import MathChecker, final_answer
from megatron_gptoss.tasks.sandbox import ProgramResult, Sandbox
from megatron_gptoss.types import Prompt, RewardPart

TOOL = "python"
INSTRUCTIONS = "Solve the problem. Use Python where it helps. Put the final answer in \\boxed{}."
SAID_OF_AN_END = {
    "ok": "",
    "error": "",  # the traceback says it
    "timeout": "[stopped: the program ran for {timeout_s:g} s]",
    "cpu": "[stopped: the program used {timeout_s:g} s of processor time]",
    "memory": "[stopped: the program used more than {memory_mib} MiB]",
    "output": "[stopped: the program printed more than {output_bytes} bytes]",
    "killed": "[the program was killed]",
    "crashed": "[the interpreter crashed]",
    "broken": "[the program could not be run]",
}


class Retool:
    """The task. It owns the sandbox and closes it. DataError for a file that cannot be used; ConfigError without a path."""

    name = "retool"

    def __init__(
        self, sandbox: Sandbox, path: str, eval_path: str = "", seed: int = 0, reasoning: str = "low", check_timeout_s: float = 5.0
    ) -> None:
        python = python_text(STATELESS_PYTHON.format(timeout_s=sandbox.limits.timeout_s))
        self.opening = (Message("system", system_text(reasoning, tools=python)), Message("developer", developer_text(INSTRUCTIONS)))
        self.sandbox = sandbox
        self.checker = MathChecker(check_timeout_s)
        self._file = FilePrompts(
            self.name, path, eval_path, seed, lambda file: read_math_problems(file, needs_marker=False), "gsm8k_train.jsonl"
        )

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return self._file.prompts(split, start, count)

    def epoch_size(self, split: Split) -> int:
        return self._file.epoch_size(split)

    def begin(self, prompt: Prompt) -> RetoolConversation:
        return RetoolConversation(prompt, self)

    def close(self) -> None:
        self.checker.close()
        self.sandbox.close()


class RetoolConversation:
    """One rollout. Labels: "called" or "no-call"; "program-" and how a program ended, where one did not end well; then the checker's
    outcome ("right", "wrong", ...) or "malformed".
    """

    def __init__(self, prompt: Prompt, task: Retool) -> None:
        self.prompt = prompt
        self._task = task
        self._ends: list[str] = []

    def opening(self) -> Sequence[Message]:
        return (*self._task.opening, Message("user", self.prompt.text))

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        if turn.kind == "call" and all(call.recipient == TOOL for call in turn.calls):
            return [answer_to(call, self._run(call.text)) for call in turn.calls]
        if turn.kind != "final":
            return self._verdict(0.0, None, "malformed", "malformed")
        outcome = self._task.checker.check(self.prompt.gold, turn.text)
        label = {"equal": "right", "different": "wrong"}.get(outcome, outcome)
        return self._verdict(float(outcome == "equal"), final_answer(turn.text), "final", label)

    def cut(self, reason: str) -> Verdict:
        return self._verdict(0.0, None, reason)

    def _run(self, code: str) -> str:
        result = self._task.sandbox.run(code)
        self._ends.append(result.end)
        return said_to_the_model(result, self._task.sandbox)

    def _verdict(self, reward: float, answer: str | None, stop_reason: str, *labels: str) -> Verdict:
        called = "called" if self._ends else "no-call"
        ends = sorted({f"program-{end}" for end in self._ends if end != "ok"})
        return Verdict(reward, (RewardPart("right", reward),), answer, (called, *ends, *labels), stop_reason)


def said_to_the_model(result: ProgramResult, sandbox: Sandbox) -> str:
    """What a program printed, and how it ended where that does not show. Never empty: silence looks like a tool that is not there."""
    limits = sandbox.limits
    note = SAID_OF_AN_END[result.end].format(timeout_s=limits.timeout_s, memory_mib=limits.memory_mib, output_bytes=limits.output_bytes)
    text = result.output.rstrip("\n")
    return "\n".join(part for part in (text, note) if part) or "[no output; print what you want to see]"
