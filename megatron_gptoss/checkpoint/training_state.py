"""Training checkpoints: Megatron distributed checkpoints with everything a run needs to go on as if it had not stopped.

In: the parts of one training world. Out: a folder with `config.json` (the architecture, Hugging Face layout), Megatron's shards, and the
marker `COMPLETE`, written last. A save goes to a temporary name and is renamed when it is whole; a torn one is never chosen. Training waits
only until its state is copied to host memory; background.py writes the copy. It does not decide when to save, nor read Hugging Face
weights (hf_files.py).

A checkpoint may be loaded in any layout of ranks. Weights, master weights, moments, their count of updates and the schedule do not know
about ranks. Random states do: they are those of a rank at a place. In the layout that saved them each rank gets its own back; in another
one every rank keeps the fresh ones its world was seeded with, since there is no right way to divide or join generators. Nothing that is
trained draws from them (no dropout; prompts and sampling are seeded by step), so losses do not depend on it.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.checkpoint.background import (
    Meeting,
    Planner,
    Report,
    Saving,
    cannot_save,
    copy_to_host,
    take_parts,
    temporary_name,
)
from megatron_gptoss.checkpoint.marker import Layout, replace_folder, why_torn, write_marker, written_layout
from megatron_gptoss.checkpoint.optimizer_shards import own_shards
from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.model.router import routers_of


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
    if len(loaded) != len(optimizer.chained_optimizers):
        raise CheckpointError(
            f"the checkpoint has {len(loaded)} optimizers and this run {len(optimizer.chained_optimizers)} (one for experts, one for the "
            "rest): what [diagnose] freezes has changed. Go on with what it had, or start a new run from its weights with --init."
        )
    for (_, state), part in zip(sorted(loaded.items()), optimizer.chained_optimizers, strict=True):
        now: dict[str, Any] = part.optimizer.param_groups[0]
        for group in state["optimizer"]["param_groups"]:
            group.update({key: now[key] for key in ("max_lr", "min_lr", "betas", "eps") if key in now})


def random_state(module: torch.nn.Module) -> dict[str, Any]:
    """Every random generator of this rank, and of the routers' noise in it."""
    return {
        "routing_noise": {router.layer: router.noise.generator.get_state() for router in routers_of(module) if router.noise is not None},
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": _tracker().get_states(),
    }


def set_random_state(state: dict[str, Any], module: torch.nn.Module) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["tracker"])
    noise = state.get("routing_noise", {})  # checkpoints from before it was kept have none
    for router in routers_of(module):
        if router.noise is not None and router.layer in noise:
            router.noise.generator.set_state(noise[router.layer])


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


def layout_in_force() -> Layout:
    """How this world's ranks are divided, as far as a rank's place depends on it."""
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


class Trained(Protocol):
    """Another model of the same world with its optimizer: the critic."""

    model: DistributedDataParallel
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler


CRITIC = "critic"  # its place in a checkpoint, and with a dot the beginning of its tensors' keys


def _state_to_save(
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    progress: Progress,
    critic: Trained | None = None,
) -> dict[str, Any]:
    state = _trained_to_save(model, optimizer, schedule)
    if critic is not None:
        state[CRITIC] = _trained_to_save(critic.model, critic.optimizer, critic.schedule)
        add_prefix_for_sharding(state[CRITIC], f"{CRITIC}.")
    return {**state, "random": _random_of_ranks(model), "progress": asdict(progress)}


def _trained_to_save(model: DistributedDataParallel, optimizer: ChainedOptimizer, schedule: OptimizerParamScheduler) -> dict[str, Any]:
    _complete_state(optimizer)
    module: Any = model.module
    parts: Any = optimizer.chained_optimizers
    weights = module.sharded_state_dict(metadata=_metadata())
    return {
        "model": weights,
        "optimizer": {
            # What `sharded_state_dict` returns, but for `param_state`: see optimizer_shards.py.
            i: {**part.state_dict(), "param_state": own_shards(part, weights), "param_state_sharding_type": "fully_reshardable"}
            for i, part in enumerate(parts)
        },
        "schedule": schedule.state_dict(),
    }


def _state_to_load(
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    critic: Trained | None,
    *,
    with_random: bool,
) -> dict[str, Any]:
    metadata = _metadata()
    module: Any = model.module
    state: dict[str, Any] = {"model": module.sharded_state_dict(metadata=metadata)}
    if optimizer is not None and schedule is not None:
        parts = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
        # Where all experts are frozen there is one optimizer, and Megatron leaves its number out.
        state["optimizer"] = parts if len(optimizer.chained_optimizers) > 1 else {0: parts}
        state["schedule"] = schedule.state_dict()
        if with_random:
            state["random"] = _random_of_ranks(model)
    if critic is not None:
        state[CRITIC] = _state_to_load(critic.model, critic.optimizer, critic.schedule, None, with_random=False)
        add_prefix_for_sharding(state[CRITIC], f"{CRITIC}.")
    return state


def _take(
    loaded: Any, model: DistributedDataParallel, optimizer: ChainedOptimizer | None, schedule: OptimizerParamScheduler | None
) -> None:
    """What was loaded goes into its model, and into its optimizer and schedule when they are given."""
    model.module.load_state_dict(loaded["model"])
    if optimizer is not None and schedule is not None:
        _use_rates_in_force(loaded["optimizer"], optimizer)
        parts = loaded["optimizer"]
        optimizer.load_state_dict(parts if len(parts) > 1 else parts[0])
        _separate_steps(optimizer)
        schedule.load_state_dict(loaded["schedule"])


def _random_of_ranks(model: DistributedDataParallel) -> ShardedObject:
    return ShardedObject("random", random_state(model), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


_saves = itertools.count()  # all ranks of a world save equally often, so the number names a save on all of them


def begin_save(
    path: Path,
    *,
    config: ModelConfig,
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    progress: Progress,
    critic: Trained | None = None,
    needed_bytes: int = 0,
    background: bool = True,
    timeout_s: float = 600.0,
    planner: Planner | None = None,
) -> Saving:
    """Copy the state to host memory and begin to write it to `path` (all ranks call this, when their last save is over).

    An existing complete checkpoint of that name is kept until the new one is whole. `needed_bytes`: what all ranks together will write;
    with less free nothing is begun. Raises CheckpointError when the disk is full or the folder cannot be written; what was complete before
    stays complete. What happens later, `Saving.wait` raises. With `background=False` the save is over when this returns, and no copy is
    made: tensors on a GPU pass through host memory one at a time, and of those in host memory Megatron copies only parts of larger ones.
    `planner`: that of the run's saves before, so that planning is not done anew.
    """
    meeting = Meeting(f"save {next(_saves)} {path.name}", timeout_s)
    temporary = temporary_name(path)
    problem = meeting.all_hear_rank_0("the folder", lambda: _make_room(temporary, needed_bytes))
    if problem:
        raise CheckpointError(cannot_save(path, problem))
    planner, layout = planner or Planner(), layout_in_force()
    try:
        state = _state_to_save(model, optimizer, schedule, progress, critic)
        tensors: list[Any] = [entry.data for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
        live = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        planner.plan(state, temporary)
    except (OSError, CheckpointingException, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(cannot_save(path, str(error))) from error
    writer, metadata, backend = planner.writer, planner.metadata, CheckpointingConfig(planner.backend, planner.version)
    to_write = take_parts(writer)
    if background:
        copy_to_host(to_write, live)

    def finish(reports: list[Report]) -> None:
        """Rank 0, when all ranks have written."""
        writer.finish(metadata, [report.results for report in reports])
        save_config(backend, str(temporary))
        write_hf_config(config, temporary / "config.json")
        for file in temporary.iterdir():  # the marker must not reach the disk before what it vouches for
            _flush(file)
        write_marker(temporary, step=progress.step, layout=layout)
        replace_folder(path, temporary)

    return Saving(path, meeting, to_write, writer.transforms, finish, background=background)


def save_training_state(path: Path, **parts: Any) -> None:
    """`begin_save` to its end: the checkpoint is complete when this returns."""
    begin_save(path, **parts, background=False).wait()


def _reason(error: BaseException) -> str:
    """What went wrong, without what torch wraps around it: the innermost error of the first rank that had one."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _make_room(temporary: Path, needed_bytes: int) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    free = shutil.disk_usage(temporary).free
    if free < needed_bytes:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(errno.ENOSPC, f"{free / 2**20:.1f} MiB free, about {needed_bytes / 2**20:.1f} MiB needed")


def _flush(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_training_state(
    path: Path,
    *,
    model: DistributedDataParallel,
    optimizer: ChainedOptimizer | None = None,
    schedule: OptimizerParamScheduler | None = None,
    critic: Trained | None = None,
) -> Progress:
    """Load `path` into the parts given (all ranks call this). Without an optimizer only the weights are read.

    Returns the run's progress. Raises CheckpointError when the folder is no complete checkpoint or does not fit.
    """
    torn = why_torn(path)
    if torn:
        raise CheckpointError(f"{path} is no complete checkpoint: {torn}.")
    same_layout = written_layout(path) == layout_in_force()
    for part in (optimizer, critic.optimizer if critic is not None else None):
        if part is not None:
            _accept_step_of_torch_adam()
            _complete_state(part)
    try:
        if critic is not None and CRITIC not in dist_checkpointing.load_common_state_dict(str(path)):
            raise CheckpointError(
                f'{path} has no critic, which rl.advantage = "gae" would go on with: the run that wrote it had none. Start a new run from '
                f"its weights with --init {path}, or go on with the rl.advantage it had."
            )
        state = _state_to_load(model, optimizer, schedule, critic, with_random=same_layout)
        state: Any = dist_checkpointing.load(state, str(path))
    except (OSError, KeyError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"cannot load {path}: {_reason(error)}. Go on from an earlier checkpoint of that run: move this one away and resume again."
        ) from error
    _take(state, model, optimizer, schedule)
    if critic is not None:
        _take(state[CRITIC], critic.model, critic.optimizer, critic.schedule)
    if optimizer is not None and same_layout:
        set_random_state(state["random"], model)
    known = {f.name for f in fields(Progress)}
    return Progress(**{k: v for k, v in state["progress"].items() if k in known})
