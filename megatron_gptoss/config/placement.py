"""On which node does each trainer rank and each engine run?

In: `Config`. Out: `Placement`, node numbers counted from 0 in Slurm's order; node 0 has Ray's head and the driver. Pure:
which Ray node a number stands for is found when Ray is up (loop/nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.schema import Config


@dataclass(frozen=True)
class Placement:
    num_nodes: int
    trainer: tuple[int, ...]  # of rank 0, 1, ...
    engines: tuple[int, ...]  # of engine 0, 1, ...


@dataclass(frozen=True)
class Place:
    """Where a rank or an engine really runs, as it says itself."""

    who: str
    host: str
    pid: int
    gpus: tuple[str, ...]  # UUIDs; none on a CPU


def same_gpu(places: Iterable[Place]) -> str:
    """What is wrong when two of these compute on one GPU; "" when nothing is."""
    holders: dict[str, list[str]] = {}
    for place in places:
        for gpu in place.gpus:
            holders.setdefault(gpu, []).append(f"{place.who} ({place.host})")
    shared = [f"{' and '.join(names)} on {gpu}" for gpu, names in holders.items() if len(names) > 1]
    if not shared:
        return ""
    return (
        f"one GPU for each rank and engine is the rule, and there are {'; '.join(shared)}. Something beside Ray sets CUDA_VISIBLE_DEVICES, "
        "or a node's Ray was told of more GPUs than it has (--num-gpus)."
    )


def place(config: Config) -> Placement:
    """With GPUs: rank after rank fills a node's, then engine after engine, so that ranks which talk most share a node.

    Example, 8 GPUs a node, 16 ranks and 12 engines: ranks on nodes 0 and 1, engines on node 2 (eight) and 3 (four).
    Without GPUs, which is for tests: all ranks on node 0, engines in turn on the others, or on node 0 where it is the only one.
    """
    ranks, engines, cluster = world_size(config), config.rollout.num_engines, config.cluster
    if cluster.device == "cpu":
        nodes = cluster.nodes or 1
        others = range(1, nodes) or range(1)
        return Placement(nodes, (0,) * ranks, tuple(others[e % len(others)] for e in range(engines)))
    first_engine = 0 if cluster.share_gpus else ranks
    trainer = tuple(rank // cluster.gpus_per_node for rank in range(ranks))
    rolling = tuple((first_engine + e) // cluster.gpus_per_node for e in range(engines))
    return Placement(cluster.nodes or max(*trainer, *rolling) + 1, trainer, rolling)
