"""An endless stream of prompts from a file, shuffled anew each epoch: what tasks share that read their problems.

In: problems read from `task.path` and, if given, `task.eval_path`. Out: prompts of either split. It does not know what is asked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.tasks.base import Split
from megatron_gptoss.types import Prompt

HELDOUT_BELOW = 26  # of 256: a tenth of `path` when no eval_path is given


@dataclass(frozen=True)
class Problem:
    line: int  # in its file
    text: str
    gold: str


class FilePrompts:
    """Prompts of the task `name`. DataError for a file that cannot be used; ConfigError without a path.

    `read` turns a path into problems. What stands in the held-out file is never trained, wherever else it stands.
    """

    def __init__(self, name: str, path: str, eval_path: str, seed: int, read: Callable[[str], list[Problem]], example: str) -> None:
        if not path:
            raise ConfigError(f"task.path is empty, and {name} reads its problems from a file. Set it to one, {example} say.")
        self.name, self.seed = name, seed
        problems = read(path)
        if eval_path:
            heldout = read(eval_path)
            seen = {problem.text for problem in heldout}
            train = [problem for problem in problems if problem.text not in seen]
        else:
            heldout = [problem for problem in problems if _is_heldout(problem.text)]
            train = [problem for problem in problems if not _is_heldout(problem.text)]
        self._problems: dict[Split, list[Problem]] = {"train": train, "heldout": heldout}
        self._empty: dict[Split, str] = {
            "train": f"every problem of task.path = {path} is held out; give a file with further problems.",
            "heldout": f"task.path = {path} has too few problems for a held-out tenth; set task.eval_path to a file of held-out problems.",
        }

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        problems = self._problems[split]
        if count and not problems:
            raise DataError(self._empty[split])
        orders: dict[int, list[int]] = {}
        prompts = []
        for index in range(start, start + count):
            epoch, place = divmod(index, len(problems))
            if epoch not in orders:
                orders[epoch] = list(range(len(problems)))
                random.Random(f"{self.name}/{self.seed}/{split}/{epoch}").shuffle(orders[epoch])
            problem = problems[orders[epoch][place]]
            prompts.append(Prompt(f"{self.name}/{split}/{problem.line}/{epoch}", self.name, problem.text, problem.gold))
        return prompts

    def epoch_size(self, split: Split) -> int:
        return len(self._problems[split])


def _is_heldout(text: str) -> bool:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] < HELDOUT_BELOW
