"""Training checkpoints: Megatron distributed checkpoints with everything a run needs to go on as if it had not stopped.

In: the parts of one training world. Out: a folder with `config.json` (the architecture, Hugging Face layout), Megatron's shards, and the
marker `COMPLETE`, written last. A save goes to a temporary name and is renamed when it is whole; a torn one is never chosen.
It does not decide when to save, nor read Hugging Face weights (hf_files.py).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.checkpoint.progress import MARKER, Progress
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError


def _metadata() -> dict[str, Any]:
    # chained_optim_avoid_prefix: without it the optimizer's keys depend on whether experts are divided (facts/megatron_core.md, 3.6).
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def _tracker() -> Any:
    """Megatron's random states for regions that differ over tensor-parallel ranks."""
    return tensor_parallel.get_cuda_rng_tracker()


def _use_rates_in_force(loaded: Any, optimizer: ChainedOptimizer) -> None:
    """Write the configured rates into the loaded parameter groups: Megatron matches groups by them, and a resumed run may have others."""
    for (_, state), part in zip(sorted(loaded.items()), optimizer.chained_optimizers, strict=True):
        now: dict[str, Any] = part.optimizer.param_groups[0]
        for group in state["optimizer"]["param_groups"]:
            group.update({key: now[key] for key in ("max_lr", "min_lr", "betas", "eps") if key in now})


def random_state() -> dict[str, Any]:
    """Every random generator of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": _tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["tracker"])


def _accept_step_of_torch_adam() -> None:
    """torch's AdamW keeps `step` beside the moments; Megatron-Core 0.19.2's reshardable loader does not pass it on and raises KeyError.

    A value that is no tensor is skipped there, so 0 leaves the step alone that `load_state_dict` has just restored.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "accepts_step", False):
        return

    def with_step(self, model_param, tensors):
        return original(self, model_param, {"step": 0, **tensors})

    with_step.accepts_step = True  # pyright: ignore[reportFunctionMemberAccess]
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def _complete_state(optimizer: ChainedOptimizer) -> None:
    """Zero moments and step 0 for parameters that torch's AdamW has not updated yet: a checkpoint saves and fills all of them alike."""
    for part in optimizer.chained_optimizers:
        if any("step" not in part.optimizer.state.get(p, {}) for group in part.optimizer.param_groups for p in group["params"]):
            part.init_state_fn(part.optimizer)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _separate_steps(optimizer: ChainedOptimizer) -> None:
    """After loading, Megatron hands one `step` tensor to all parameters; AdamW would count it up once per parameter, not per update."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _sharded_state(
    model: DistributedDataParallel, optimizer: ChainedOptimizer | None, schedule: OptimizerParamScheduler | None, *, loading: bool
) -> dict[str, Any]:
    metadata = _metadata()
    module: Any = model.module
    state: dict[str, Any] = {"model": module.sharded_state_dict(metadata=metadata)}
    if optimizer is not None and schedule is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
        state["schedule"] = schedule.state_dict()
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", random_state(), (world,), (rank,), replica_id=0)
    return state


def save_training_state(
    path: Path,
    *,
    config: ModelConfig,
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    progress: Progress,
    needed_bytes: int = 0,
) -> None:
    """Write `path` (all ranks call this). An existing complete checkpoint of that name is kept until the new one is whole.

    `needed_bytes`: what all ranks together will write; with less free nothing is begun. Raises CheckpointError when the disk is full or
    the folder cannot be written; what was complete before stays complete.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    lead = dist.get_rank() == 0
    try:
        if lead:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            free = shutil.disk_usage(temporary).free
            if free < needed_bytes:
                raise OSError(errno.ENOSPC, f"{free / 2**20:.1f} MiB free, about {needed_bytes / 2**20:.1f} MiB needed")
        dist.barrier()
        _complete_state(optimizer)
        state = _sharded_state(model, optimizer, schedule, loading=False)
        state["progress"] = asdict(progress)
        dist_checkpointing.save(state, str(temporary))
        dist.barrier()
        if lead:
            write_hf_config(config, temporary / "config.json")
            _flush_to_disk(temporary)
            (temporary / MARKER).write_text(f"step {progress.step}\n")
            _flush_to_disk(temporary)
            if path.exists():  # at no moment may a torn folder carry the final name
                shutil.rmtree(path.rename(path.with_name(f".tmp-old-{path.name}")))
            temporary.replace(path)
        dist.barrier()
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(_cannot_save(path, error)) from error
    finally:
        if lead:
            shutil.rmtree(temporary, ignore_errors=True)  # already renamed when all went well


def _flush_to_disk(folder: Path) -> None:
    """The marker must not reach the disk before what it vouches for."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cannot_save(path: Path, error: BaseException) -> str:
    why = " ".join(str(error).split())[-300:]
    kept = sorted(p.name for p in path.parent.glob("step-*") if (p / MARKER).exists())
    last = f"the last complete checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier checkpoint"
    return f"cannot save {path}: {why}. Free some space or set run.dir elsewhere; {last}."


def load_training_state(
    path: Path,
    *,
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer | None = None,
    schedule: OptimizerParamScheduler | None = None,
) -> Progress:
    """Load `path` into the parts given (all ranks call this). Without an optimizer only the weights are read.

    Returns the run's progress. Raises CheckpointError when the folder is no complete checkpoint or does not fit.
    """
    if not (path / MARKER).exists():
        raise CheckpointError(f"{path} is no complete checkpoint: it has no file {MARKER}.")
    if optimizer is not None:
        _accept_step_of_torch_adam()
        _complete_state(optimizer)
    try:
        state = _sharded_state(model, optimizer, schedule, loading=True)
        state: Any = dist_checkpointing.load(state, str(path))
    except (OSError, KeyError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"cannot load {path}: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error
    model.module.load_state_dict(state["model"])
    if optimizer is not None and schedule is not None:
        _use_rates_in_force(state["optimizer"], optimizer)
        optimizer.load_state_dict(state["optimizer"])
        _separate_steps(optimizer)
        schedule.load_state_dict(state["schedule"])
        set_random_state(state["random"])
    known = {f.name for f in fields(Progress)}
    return Progress(**{k: v for k, v in state["progress"].items() if k in known})
