"""Is an answer the reference answer? The final answer of a text, and math-verify behind a deadline.

In: a text, a reference. Out: an `Outcome`. It does not judge the way there. math-verify stops itself with signals, which work only in a
process's main thread (from another thread it scores 0), and it can hang in one multiplication. So it runs in processes of its own, killed
at the deadline and started again when next needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from megatron_gptoss.tasks.json_workers import JsonWorkers, python_script

Outcome = Literal["equal", "different", "no-answer", "timeout", "crashed"]


def final_answer(text: str) -> str | None:
    """The answer a text marks as its own, None if it marks none. The strongest marker decides, and of several of one kind the last.

    1. `\\boxed{...}`, what the prompt asks for. 2. A line `#### ...`, GSM8K's own. 3. A line `A: ...`, as in the example model solutions
    published with GSM8K. A number without a marker is no answer: it may be any number of the working.
    """
    marked = _last_boxed(text)
    for marker in (r"####", r"A:"):
        if marked is None:
            lines = re.findall(rf"^[ \t]*{marker}(.*)$", text, flags=re.MULTILINE)
            marked = lines[-1] if lines else None
    if marked is None:
        return None
    return marked.strip().removesuffix(".").strip() or None  # "18." ends a sentence


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{}, braces matched; None without one, or when it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
        if depth == 0:
            return text[start:at]
    return None


class MathChecker:
    """Compares answers in up to `num_workers` processes. Any number of threads may call `check`; it blocks while all are busy."""

    def __init__(self, timeout_s: float, num_workers: int = 2) -> None:
        self.timeout_s = timeout_s
        self._workers = JsonWorkers("math-verify", python_script(Path(__file__).with_name("math_worker.py")), num_workers)

    def check(self, gold: str, text: str) -> Outcome:
        """Whether the final answer of `text` equals `gold`. RunFailed when no worker can be started or after `close`."""
        answer = final_answer(text)
        return "no-answer" if answer is None else self.compare(gold, answer)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Whether two answers, as LaTeX or plain numbers, are equal. The deadline is `timeout_s`, a worker's start not counted."""
        line = self._workers.ask({"gold": gold, "answer": answer, "timeout_s": self.timeout_s}, self.timeout_s)
        if isinstance(line, str):
            return line
        return "equal" if line["equal"] else "different"

    def close(self) -> None:
        self._workers.close()
