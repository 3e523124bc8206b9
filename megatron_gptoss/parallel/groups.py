"""Process groups of one training world: torch.distributed, then Megatron's parallel_state, then seeded random states.

In: a ParallelShape, this process's rank, where to meet, the seed. Out: nothing; Megatron keeps the groups in module globals.
This is the only file that initialises them. It does not decide sizes (shape.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_gptoss.errors import MachineError
from megatron_gptoss.model import cpu
from megatron_gptoss.parallel.shape import ParallelShape


def init_groups(
    shape: ParallelShape, *, rank: int, timeout_s: float, seed: int, backend: str, store: Store | None = None, init_method: str = ""
) -> None:
    """Join the training world.

    `rank` counts from 0 to shape.world - 1. The ranks meet at `store` (see `open_meeting`) or else at `init_method`, a torch.distributed
    URL ("file:///..."). A collective that waits longer than `timeout_s` seconds fails; `backend` is "gloo" or "nccl". Raises ValueError
    for a shape that does not fit, and whatever torch.distributed raises when the others do not come.
    """
    shape.check()
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    timeout = timedelta(seconds=timeout_s)
    meeting: dict[str, Any] = {"store": store} if store is not None else {"init_method": init_method}
    dist.init_process_group(backend, rank=rank, world_size=shape.world, timeout=timeout, **meeting)
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


def open_meeting(first_port: int, num_ports: int, *, world: int, timeout_s: float) -> TCPStore:
    """The place where ranks meet, opened by rank 0: it listens from now on, so no other run can take its port in between.

    Takes the first port of the range that is free. Raises MachineError when none is.
    """
    for port in range(first_port, first_port + num_ports):
        try:
            return TCPStore("0.0.0.0", port, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except dist.DistNetworkError:
            continue
    raise MachineError(
        f"all ports from {first_port} to {first_port + num_ports - 1} are taken on the node of trainer rank 0 (cluster.first_port = "
        f"{first_port}, cluster.num_ports = {num_ports}). Set cluster.first_port to another range or cluster.num_ports to a larger one."
    )


def join_meeting(host: str, port: int, *, world: int, timeout_s: float) -> TCPStore:
    """Where rank 0 waits, for the other ranks."""
    return TCPStore(host, port, world, is_master=False, timeout=timedelta(seconds=timeout_s))


def destroy_groups() -> None:
    """Leave the training world; init_groups may be called again afterwards."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
