"""Can this run start here? Checks that look at the machine and at files, before anything heavy is imported.

In: `Loaded`, `RunPlan`. Out: nothing, or the error that a person can act on: ConfigError, DataError, CheckpointError or MachineError. Needs
no torch, ray, vllm or megatron. Does not check rules between keys (rules.py), nor what only running workers can tell (parity, links).
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import cast

from megatron_gptoss.checkpoint.marker import take_back_old
from megatron_gptoss.config.fit import changed_config, does_not_fit
from megatron_gptoss.config.hf_config import difference, quantization, read_hf_config
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.memory import engine_memory
from megatron_gptoss.config.plan import Cluster, RunPlan
from megatron_gptoss.config.rules import engine_sizes
from megatron_gptoss.config.schema import ClusterConfig, Config
from megatron_gptoss.data.harmony import generation_prefix, render, render_marked
from megatron_gptoss.data.prompts import require_room
from megatron_gptoss.data.tokenizer import load_tokenizer, tokenizer_is_here
from megatron_gptoss.errors import CheckpointError, ConfigError, DataError, MachineError
from megatron_gptoss.obs.run_dir import RunDir, already_there, find_weights, is_run_dir
from megatron_gptoss.tasks.base import Demonstrator, Split, Task
from megatron_gptoss.types import Prompt

FRAMING_TOKENS = 32  # more than a message's header and end take, beside its content
GENERATED_PROMPTS = 64  # looked at for length, of each split of a task that makes its prompts up


def detect_cluster() -> Cluster:
    """CPUs and GPUs of this node, as this process may use them."""
    return Cluster(num_cpus=len(os.sched_getaffinity(0)), num_gpus=_count_gpus())


def check_run(loaded: Loaded, plan: RunPlan, command: str) -> None:
    """All of the checks below, cheapest first. `command`: "sft", "train" or "eval"."""
    if command == "eval" and loaded.origins["run.final_eval_prompts"].startswith("flag"):
        raise ConfigError(
            f"{loaded.show('run.final_eval_prompts')} is for gptoss train, and gptoss eval would not look at it. "
            f"Use --eval.prompts={loaded.config.run.final_eval_prompts or 1}."
        )
    if plan.not_built:
        raise ConfigError(plan.not_built[0] if len(plan.not_built) == 1 else "\n  - ".join(("", *plan.not_built)).lstrip("\n"))
    check_memory(loaded)
    if command != "sft":
        check_engine_memory(loaded)
    check_attention(loaded)
    check_packages(loaded)
    check_run_target(loaded, plan, command)
    check_inputs(loaded.config, command)
    if plan.shortfall:
        raise MachineError(f"{plan.shortfall}. Use fewer ranks or engines, or set cluster.address to a Ray cluster that has them.")
    free_port(loaded.config.cluster)


def check_memory(loaded: Loaded) -> None:
    """A plan that cannot fit on its GPUs is refused, with changes that would make it fit."""
    problem = does_not_fit(loaded)
    if problem:
        raise ConfigError(problem)


def check_engine_memory(loaded: Loaded) -> None:
    """The GPUs of an engine must hold the whole model and one conversation, and beside these what it is given weights through. On a CPU the
    rules ask for a conversation's room."""
    config = loaded.config
    need = _engine_gib(config)
    room = config.rollout.gpu_memory_fraction * config.cluster.gpu_memory_gib
    if config.cluster.device == "cpu":
        return
    if need <= room:
        return _check_receiving(loaded)
    share = need / config.cluster.gpu_memory_gib + 0.02
    cures = [f"rollout.gpu_memory_fraction = {share:.2f} or more"] if share < 0.95 else []
    larger = (size for size in engine_sizes(config) if size > config.rollout.tensor_parallel)
    fits = next((size for size in larger if _engine_gib(changed_config(config, {"rollout.tensor_parallel": size})) <= room), None)
    cures += [f"rollout.tensor_parallel = {fits} or more"] if fits else []
    raise ConfigError(
        f"an engine needs {need:.1f} GiB on each of its GPUs ({loaded.show('rollout.tensor_parallel')}) for weights and one conversation, "
        f"and {loaded.show('rollout.gpu_memory_fraction')} of {loaded.show('cluster.gpu_memory_gib')} is {room:.1f} GiB. "
        f"Use {', or '.join(cures) if cures else 'a smaller model'}."
    )


def _check_receiving(loaded: Loaded) -> None:
    """Buckets of weights lie outside what vLLM takes: the fraction, or where a cache's size is given, weights and cache."""
    config, whole = loaded.config, loaded.config.cluster.gpu_memory_gib
    need, weights = _engine_gib(config, "publish"), engine_memory(config)[0].num_bytes / 2**30
    if config.rollout.gpu_kv_cache_gib:
        key, taken, most = "rollout.gpu_kv_cache_gib", weights + config.rollout.gpu_kv_cache_gib, whole - need - weights
    else:
        key, taken, most = "rollout.gpu_memory_fraction", config.rollout.gpu_memory_fraction * whole, 1 - need / whole
    if taken + need <= whole:
        return
    raise ConfigError(
        f"an engine receives weights through two buckets, {need:.1f} GiB beside the {taken:.1f} that it takes of each GPU "
        f"({loaded.show(key)}), and {loaded.show('cluster.gpu_memory_gib')}. "
        f"Use {f'{key} = {math.floor(100 * most) / 100:.2f} or less' if most > 0.01 else 'a larger rollout.tensor_parallel'}."
    )


def _engine_gib(config: Config, phase: str = "always") -> float:
    return sum(part.num_bytes for part in engine_memory(config) if part.phase == phase) / 2**30


def check_run_target(loaded: Loaded, plan: RunPlan, command: str = "") -> None:
    """The run directory is new (or is the run to resume), and the weights to start from exist and have this architecture.

    `command`: refuse to resume a run of another one; empty: do not ask.
    """
    run = loaded.config.run
    if run.resume:
        if not plan.run_dir.is_dir():
            raise ConfigError(f"{loaded.show('run.resume')} does not exist.{_runs_in(Path(run.dir))}")
        if not is_run_dir(plan.run_dir):
            raise ConfigError(
                f"{loaded.show('run.resume')} is not a run directory: it has no config.toml with checkpoints/ beside it."
                f"{_runs_in(Path(run.dir))}"
            )
        if command:
            _check_same_command(loaded, plan.run_dir, command)
        _check_moments_are_there(loaded, plan.run_dir)
        check_architecture(loaded, "run.resume")
        return
    if plan.run_dir.exists():
        raise ConfigError(already_there(plan.run_dir))
    _check_writable(loaded, plan.run_dir)
    if run.init:
        check_architecture(loaded, "run.init")


def check_attention(loaded: Loaded) -> None:
    """What the attention backends need is here, as far as one can see without torch; the rest shows when the model is built."""
    config = loaded.config
    for key in ("trainer.attention", "trainer.attention_windowed"):
        backend = loaded.value(key)
        if backend == "triton" and config.cluster.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise MachineError(
                f"{loaded.show(key)} with {loaded.show('cluster.device')} runs only in Triton's interpreter, which is slow and for tests. "
                f'Set TRITON_INTERPRET=1 in the environment, or {key} = "reference".'
            )
        if backend in BACKEND_PACKAGES:
            _need(loaded, key, BACKEND_PACKAGES[backend], "triton")


def check_packages(loaded: Loaded) -> None:
    """The packages are here that the transformer and the dispatcher ask for."""
    if loaded.config.trainer.transformer == "te":
        _need(loaded, "trainer.transformer", BACKEND_PACKAGES["te"], "local")
    if loaded.config.trainer.dispatcher == "deepep":
        _need(loaded, "trainer.dispatcher", DEEPEP, "alltoall")


@dataclass(frozen=True)
class Package:
    """Found by looking at folders: importing any of them imports torch."""

    name: str
    module: str
    folder: str  # in the module's
    advice: str = 'Install the extra "gpu" of this package'


BACKEND_PACKAGES = {
    "flash": Package("flash-attn-4", "flash_attn", "cute"),
    "te": Package("transformer-engine", "transformer_engine", "pytorch"),
}
DEEPEP = Package("deep_ep", "deep_ep", ".", "Build DeepEP 1.2 from its source (docs/parallelism.md)")


def _need(loaded: Loaded, key: str, package: Package, instead: str) -> None:
    # Another node of a cluster may have what this one lacks; there it shows when the model is built.
    if loaded.config.cluster.address == "local" and not _is_installed(package.module, package.folder):
        raise MachineError(
            f'{loaded.show(key)} needs the package {package.name}, which is not installed. {package.advice}, or use {key} = "{instead}".'
        )


def _is_installed(module: str, folder: str) -> bool:
    found = find_spec(module)
    return found is not None and any((Path(place) / folder).is_dir() for place in found.submodule_search_locations or ())


def check_architecture(loaded: Loaded, key: str) -> None:
    """The checkpoint that `key` (run.init or run.resume) points to has the configured [model]."""
    if key == "run.resume":
        take_back_old(Path(loaded.value(key)) / "checkpoints")
    try:
        source = find_weights(Path(loaded.value(key)))
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{loaded.show(key)}: {error}") from None
    packed = quantization(source.path)
    if packed:
        raise CheckpointError(
            f"{loaded.show(key)}: {source.path / 'config.json'} has quantization_config ({packed}), and a run does not read packed "
            f"weights. Convert them first, gptoss convert {source.path} NEW --to megatron, and give the new folder; one in BF16 works too "
            "(--to hf)."
        )
    fields = difference(loaded.config.model, read_hf_config(source.path))
    if fields:
        rows = "".join(f"\n  {loaded.show(f'model.{name}')}, the checkpoint has {theirs}" for name, _, theirs in fields)
        raise CheckpointError(
            f"{loaded.show(key)} holds another architecture than [model] ({source.path / 'config.json'}):{rows}\n"
            "Set these keys to the checkpoint's values, or start from another checkpoint."
        )


def check_inputs(config: Config, command: str = "") -> None:
    """The task exists, can do what `command` asks of it, reads and validates its prompt files, and its prompts leave room for answers.

    Without a command (`gptoss plan`, `gptoss check`) nothing is downloaded: lengths are checked only where the tokenizer's file is here.
    """
    for key in ("path", "eval_path"):
        value = getattr(config.task, key)
        if value and not Path(value).is_file():
            raise DataError(f"task.{key} = {value} is not a file. Paths start from where gptoss is called: {Path.cwd()}.")
        if value and Path(value).stat().st_size == 0:
            raise DataError(f"task.{key} = {value} is empty. One JSON object a line is wanted.")
    from megatron_gptoss.tasks.registry import make_task  # here, because the answer checkers it brings are slow to import

    task = make_task(config)
    try:
        if command == "sft" and not hasattr(task, "demonstration"):
            raise ConfigError(
                f"task.name = {config.task.name} has no demonstrations, and gptoss sft imitates them. Set task.name to arithmetic, which "
                f"has some, or begin {config.task.name} with gptoss train and --init."
            )
        evaluates = bool(config.run.eval_prompts or config.run.final_eval_prompts or config.parity.enabled)
        splits: list[Split] = ["heldout"] if command == "eval" else ["train", "heldout"] if evaluates else ["train"]
        prompts = [prompt for split in splits for prompt in task.prompts(split, 0, _how_many(task.epoch_size(split)))]
        if command or tokenizer_is_here(config):
            _check_lengths(prompts, task, config)
            if hasattr(task, "copy_transcripts"):
                _check_solutions(cast(Demonstrator, task), config)
    finally:
        task.close()


def _how_many(epoch: int | None) -> int:
    """All prompts of a file, a sample of those a task makes up. At least one, so that a split without any says so."""
    return GENERATED_PROMPTS if epoch is None else max(epoch, 1)


def _check_lengths(prompts: Sequence[Prompt], task: Task, config: Config) -> None:
    """The longest prompt leaves room for an answer. A token holds at least one byte, so only openings of as many bytes are encoded."""
    tokenizer, limits = load_tokenizer(config), config.rollout
    prefix = len(generation_prefix(tokenizer))
    lengths = []
    for prompt in prompts:
        opening = task.begin(prompt).opening()
        framing = prefix + FRAMING_TOKENS * len(opening)
        num_bytes = sum(len(m.content.encode("utf-8", "replace")) for m in opening)
        if num_bytes + framing >= limits.max_sequence_tokens:
            lengths.append((len(render(opening, tokenizer)) + prefix, prompt))
    if lengths:
        num_tokens, prompt = max(lengths, key=lambda pair: pair[0])
        require_room(prompt, num_tokens, limits.max_sequence_tokens, limits.max_turn_tokens)


def _check_solutions(task: Demonstrator, config: Config) -> None:
    """Right transcripts, where a task can write them, fit the limits of a rollout; else no rollout could be right."""
    tokenizer, limits = load_tokenizer(config), config.rollout
    marked = [render_marked(demo.messages, tokenizer) for demo in task.copy_transcripts("train", 0, GENERATED_PROMPTS)]
    whole = max(len(each.token_ids) for each in marked)
    turn = max(sum(run) for each in marked for said, run in groupby(each.said) if said)
    for key, most, need, what in (
        ("max_sequence_tokens", limits.max_sequence_tokens, whole, "a right solution"),
        ("max_turn_tokens", limits.max_turn_tokens, turn, "a turn of one"),
    ):
        if need > most:
            raise ConfigError(
                f"rollout.{key} = {most}, and {what} of task.name = {config.task.name} may have {need} tokens. "
                f"Use rollout.{key} = {need + need // 10} or more, or an easier task."
            )


def free_port(cluster: ClusterConfig) -> int:
    """The first port of the configured range that can be bound now."""
    last = cluster.first_port + cluster.num_ports - 1
    for port in range(cluster.first_port, last + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
            return port
    raise MachineError(
        f"all ports from {cluster.first_port} to {last} are taken (cluster.first_port = {cluster.first_port}, cluster.num_ports = "
        f"{cluster.num_ports}). Set cluster.first_port to another range or cluster.num_ports to a larger one."
    )


def _check_same_command(loaded: Loaded, path: Path, command: str) -> None:
    try:
        before = json.loads(RunDir(path).manifest_file.read_text())["command"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the manifest is a record, not a condition
    if before != command:
        raise ConfigError(
            f"{loaded.show('run.resume')} is a run of `gptoss {before}`, and `gptoss {command}` cannot go on with it. "
            f"To start from its weights, use --init {path}."
        )


def _check_moments_are_there(loaded: Loaded, path: Path) -> None:
    """A checkpoint of a run with frozen weights has no optimizer state for them. The other way round there is more than is needed."""
    try:
        before = tomllib.loads(RunDir(path).config_file.read_text())
    except (OSError, ValueError):
        return
    for part in ("attention", "experts", "router"):
        key = f"freeze_{part}"
        if before.get("diagnose", {}).get(key) and not getattr(loaded.config.diagnose, key):
            raise ConfigError(
                f"{loaded.show(f'diagnose.{key}')}, but {loaded.show('run.resume')} ran with true, so its checkpoint has no "
                f"optimizer state for {part}. Set diagnose.{key} = true, or start from its weights with --init {path}."
            )


def _check_writable(loaded: Loaded, run_dir: Path) -> None:
    """The nearest folder that exists above the run directory is a folder, and ours to write to."""
    above = next(p for p in run_dir.absolute().parents if p.exists())
    if not above.is_dir():
        raise ConfigError(f"{loaded.show('run.dir')} cannot hold runs: {above} is a file.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise MachineError(f"{loaded.show('run.dir')} cannot hold runs: {above} cannot be written to. Set run.dir to another folder.")


def _runs_in(folder: Path) -> str:
    newest = sorted((p for p in folder.glob("*") if is_run_dir(p)), key=lambda p: p.stat().st_mtime, reverse=True)[:3]
    return f" Newest runs in {folder}: {', '.join(str(p) for p in newest)}." if newest else f" There are no runs in {folder}."


def _count_gpus() -> int:
    """CUDA devices, without CUDA: the driver's files or nvidia-smi, cut down by CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    files = [p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()]
    if files:
        return len(files)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())
