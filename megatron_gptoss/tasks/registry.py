"""Which task a configuration means. In: `Config`. Out: a task. It knows the tasks' names and which settings each takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.tasks.arithmetic import Arithmetic
from megatron_gptoss.tasks.base import Task
from megatron_gptoss.tasks.gsm8k import Gsm8k
from megatron_gptoss.tasks.verify_if import VerifyIf


def _arithmetic(config: Config) -> Arithmetic:
    sft = config.sft
    return Arithmetic(config.run.seed, sft.guess_fraction, sft.stop_fraction, sft.digit_fraction)


def _gsm8k(config: Config) -> Gsm8k:
    task = config.task
    return Gsm8k(task.path, task.eval_path, config.run.seed, task.reasoning, task.check_timeout_s)


def _verify_if(config: Config) -> VerifyIf:
    task = config.task
    return VerifyIf(
        task.path, task.eval_path, config.run.seed, task.reasoning, task.check_timeout_s, task.judging, task.partial, task.nltk_data
    )


TASKS: dict[str, Callable[[Config], Task]] = {"arithmetic": _arithmetic, "gsm8k": _gsm8k, "verify_if": _verify_if}


def make_task(config: Config) -> Task:
    """The task that `task.name` names. ConfigError for an unknown name; what a task cannot use it says with ConfigError or DataError."""
    make = TASKS.get(config.task.name)
    if make is None:
        near = difflib.get_close_matches(config.task.name, TASKS, n=3, cutoff=0.4)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        raise ConfigError(f"task.name = {config.task.name!r} is no task.{nearest} There are: {', '.join(sorted(TASKS))}.")
    return make(config)
