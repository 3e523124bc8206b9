"""How does a run come to its Ray: the cluster that it is told of, or one of its own?

In: an address. Out: a Ray that this process has joined, and that says nothing on the terminal. It neither ends it nor chooses nodes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from megatron_gptoss.errors import MachineError


def join_ray(address: str, *, num_cpus: int, log: Path) -> None:
    """Join the cluster at `address`, or start one with so many CPUs when it is "local". What Ray would print goes to `log`.

    Raises MachineError when nobody answers there, or this machine is too busy to start one.
    """
    _send_ray_messages_to(log)
    # Ray runs its workers at niceness 15, so that whatever else computes on the machine goes first: a program that the policy wrote before
    # the trainer that feeds a GPU. launch/node.sh says the same where Slurm starts Ray.
    os.environ.setdefault("RAY_worker_niceness", "0")
    local = address == "local"

    def join() -> None:
        ray.init(
            address=address,  # never None: Ray would then join whatever cluster it finds
            num_cpus=num_cpus if local else None,
            include_dashboard=False if local else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_object_store_bytes() if local else None,
        )

    try:
        twice(join)
    except ConnectionError as error:
        raise MachineError(
            f"no Ray cluster answers at cluster.address = {address!r}: {error}. Start one with `ray start --head`, give its address, "
            'or set cluster.address to "local", which starts one for this run.'
        ) from None


def twice(join: Callable[[], object]) -> None:
    """Ray gives its processes 30 s to come up, and cannot be told otherwise; on a busy or cold machine the second try finds them in memory.

    MachineError when that is in vain too.
    """
    for last in (False, True):
        try:
            join()
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if last:
                load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
                raise MachineError(
                    f"Ray's processes did not come up within 30 s, twice. This machine's load was {load} in the last 1, 5 and 15 minutes, "
                    f"on {os.cpu_count()} CPUs: try again when it is less busy."
                ) from None


def _send_ray_messages_to(log: Path) -> None:
    """Ray prints what it notices about dead workers straight to stdout, also with log_to_driver=False. Pool and trainer say it better."""
    from ray._private import worker

    def write(data: dict[str, Any], *_args: Any, **_kwargs: Any) -> None:
        with log.open("a") as file:
            file.writelines(line.rstrip("\n") + "\n" for line in data["lines"])

    worker.print_to_stdstream = write


def _object_store_bytes() -> int:
    """Weights and microbatches pass through it; a laptop's /dev/shm is small."""
    free = os.statvfs("/dev/shm")
    return int(min(2 * 2**30, max(100 * 2**20, free.f_bavail * free.f_frsize * 0.3)))
