"""Process groups of one training world: torch.distributed, then Megatron's parallel_state, then seeded random states.

In: a ParallelShape, this process's rank, where to meet, the seed. Out: nothing; Megatron keeps the groups in module globals.
This is the only file that initialises them. It does not decide sizes (shape.py) and does not choose ports.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_gptoss.model import cpu
from megatron_gptoss.parallel.shape import ParallelShape


def init_groups(shape: ParallelShape, *, rank: int, init_method: str, timeout_s: float, seed: int, backend: str) -> None:
    """Join the training world.

    `rank` counts from 0 to shape.world - 1; `init_method` is a torch.distributed URL ("tcp://127.0.0.1:29500", "file:///..."); a
    collective that waits longer than `timeout_s` seconds fails; `backend` is "gloo" or "nccl". Raises ValueError for a shape that does
    not fit, and whatever torch.distributed raises when the others do not come.
    """
    shape.check()
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=shape.world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        expert_tensor_parallel_size=1,  # Megatron: "Bias in Moe is only supported when ETP==1"
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]  # goes into timedelta(minutes=...)
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy_groups() -> None:
    """Leave the training world; init_groups may be called again afterwards."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
