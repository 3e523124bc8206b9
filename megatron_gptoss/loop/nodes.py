"""Which nodes does Ray have, and which of them has been lost?

In: how many nodes a plan needs. Out: Ray's names of them, in the plan's order; the host names of those that are gone. Starts none:
launch/job.sh does.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from megatron_gptoss.errors import DeadlineExpired

NODES_TIMEOUT_S = 300.0  # Ray's workers start beside the driver; a slow file system makes their imports slow


def wait_for_nodes(wanted: int, timeout_s: float = NODES_TIMEOUT_S) -> list[str]:
    """Ids of `wanted` nodes: the driver's own, then by host name. DeadlineExpired names those that came."""
    deadline = time.monotonic() + timeout_s
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < wanted:
        if time.monotonic() > deadline:
            names = ", ".join(sorted(node["NodeManagerHostname"] for node in alive))
            raise DeadlineExpired(
                f"the run needs {wanted} nodes, and after {timeout_s:.0f} s Ray has {len(alive)}: {names}. The logs of the others' Ray lie "
                "beside the job's output; or set cluster.nodes to fewer."
            )
        time.sleep(0.5)
    own = ray.get_runtime_context().get_node_id()
    alive.sort(key=lambda node: (node["NodeID"] != own, _by_number(node["NodeManagerHostname"]), node["NodeID"]))
    return [node["NodeID"] for node in alive[:wanted]]


def gpus_of(node_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Host name and Ray's number of GPUs of each of these nodes."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    return [(known[i]["NodeManagerHostname"], int(known[i]["Resources"].get("GPU", 0))) for i in node_ids]


def too_few_gpus(found: Sequence[tuple[str, int]], wanted: Sequence[int]) -> str:
    """`wanted`: the node number of each rank and engine. Which nodes have fewer GPUs than are put there, "" when none has."""
    counts = Counter(wanted)
    short = [f"{host} has {have} of {counts[node]}" for node, (host, have) in enumerate(found) if have < counts[node]]
    return f"too few GPUs for one rank or engine each: {'; '.join(short)}. cluster.gpus_per_node says how many a node has" if short else ""


def lost_nodes() -> list[str]:
    """Host names and addresses of nodes that Ray had and has no more; none when Ray itself does not answer."""
    try:
        return sorted({_name(node) for node in ray.nodes() if not node["Alive"]})
    except Exception:  # the head is gone too; the batch script says that
        return []


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _by_number(name: str) -> list[tuple[int, str]]:
    """node9 before node10, as Slurm orders them."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
