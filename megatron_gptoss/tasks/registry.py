"""Which task a configuration means. In: `Config`. Out: a task. It knows the tasks' names and which settings each takes.

A name with a dot, a slash or a colon is a user's own task: a file `my_task.py` or a module `my_package.my_task`, whose function
`make_task(config)` returns it; `:` names another function.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.tasks.arithmetic import Arithmetic
from megatron_gptoss.tasks.base import Task
from megatron_gptoss.tasks.gsm8k import Gsm8k
from megatron_gptoss.tasks.retool import Retool
from megatron_gptoss.tasks.sandbox import Sandbox, SandboxLimits
from megatron_gptoss.tasks.verify_if import VerifyIf

MEMBERS = ("name", "prompts", "epoch_size", "begin", "close")  # of tasks.base.Task


def _arithmetic(config: Config) -> Arithmetic:
    sft, task = config.sft, config.task
    shares = (sft.guess_fraction, sft.stop_fraction, sft.digit_fraction)
    return Arithmetic(config.run.seed, *shares, operations=task.operations, digits=task.digits)


def _gsm8k(config: Config) -> Gsm8k:
    task = config.task
    return Gsm8k(task.path, task.eval_path, config.run.seed, task.reasoning, task.check_timeout_s)


def _retool(config: Config) -> Retool:
    task = config.task
    limits = SandboxLimits(task.sandbox_timeout_s, task.sandbox_memory_mib, task.sandbox_output_bytes)
    modules = [name.strip() for name in task.sandbox_modules.split(",") if name.strip()]
    sandbox = Sandbox(limits, task.sandbox, task.sandbox_processes, modules)
    try:
        return Retool(sandbox, task.path, task.eval_path, config.run.seed, task.reasoning, task.check_timeout_s)
    except BaseException:
        sandbox.close()
        raise


def _verify_if(config: Config) -> VerifyIf:
    task = config.task
    return VerifyIf(
        task.path, task.eval_path, config.run.seed, task.reasoning, task.check_timeout_s, task.judging, task.partial, task.nltk_data
    )


TASKS: dict[str, Callable[[Config], Task]] = {"arithmetic": _arithmetic, "gsm8k": _gsm8k, "retool": _retool, "verify_if": _verify_if}


def make_task(config: Config) -> Task:
    """The task that `task.name` names. ConfigError for an unknown name; what a task cannot use it says with ConfigError or DataError."""
    name = config.task.name
    make = TASKS.get(name)
    if make is not None:
        return make(config)
    if any(sign in name for sign in "./:"):
        return _users_own(config)
    near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.4)
    nearest = f" Nearest: {', '.join(near)}." if near else ""
    raise ConfigError(
        f"task.name = {name!r} is no task.{nearest} There are: {', '.join(sorted(TASKS))}; or name a file of your own, ./{name}.py say."
    )


def _users_own(config: Config) -> Task:
    where, _, function = config.task.name.partition(":")
    function = function or "make_task"
    start = f"task.name = {config.task.name!r}:"
    try:
        module = _load_file(Path(where), start) if where.endswith(".py") else importlib.import_module(where)
    except GptossError:
        raise
    except Exception as error:  # whatever the user's file does while it is read
        raise ConfigError(f"{start} {where} cannot be loaded: {type(error).__name__}: {error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise ConfigError(f"{start} {where} has no function {function}(config). It must return the task.")
    task = make(config)
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigError(
            f"{start} what {function}(config) returned has no {', '.join(missing)}. docs/bring_your_own_task.md shows a task."
        )
    return cast(Task, task)


def _load_file(path: Path, start: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{start} there is no file {path}. Paths start from where gptoss is called: {Path.cwd()}.")
    spec = importlib.util.spec_from_file_location(f"gptoss_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
