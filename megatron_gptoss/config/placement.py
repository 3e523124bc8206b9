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
    engine_gpus: int = 0  # of one engine, all on its node; 0: it computes on a CPU
    engine_ranks: tuple[tuple[int, ...], ...] = ()  # trainer ranks whose GPUs engine 0, 1, ... computes on; () when it has its own
    gpus_left_idle: int = 0  # between engines, where a node's last GPUs were too few for one

    def gpu_nodes(self, *, with_engines: bool) -> tuple[int, ...]:
        """The node of every GPU that a run takes, one entry for each."""
        own = self.engines if with_engines and not self.engine_ranks else ()
        return (*self.trainer, *(node for node in own for _ in range(self.engine_gpus)))


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
    """With GPUs: rank after rank fills a node's, then engine after engine, so that ranks which talk most share a node. An engine's GPUs lie
    on one node: where too few are left it begins on the next. With cluster.share_gpus engine after engine takes the ranks' GPUs instead.

    Example, 8 GPUs a node, 16 ranks and 12 engines of one GPU: ranks on nodes 0 and 1, engines on node 2 (eight) and 3 (four).
    Without GPUs, which is for tests: all ranks on node 0, engines in turn on the others, or on node 0 where it is the only one.
    """
    ranks, engines, cluster, size = world_size(config), config.rollout.num_engines, config.cluster, config.rollout.tensor_parallel
    if cluster.device == "cpu":
        nodes = cluster.nodes or 1
        others = range(1, nodes) or range(1)
        return Placement(nodes, (0,) * ranks, tuple(others[e % len(others)] for e in range(engines)))
    per_node = cluster.gpus_per_node
    first_gpus, free = [], 0 if cluster.share_gpus else ranks
    for _ in range(engines):
        if free % per_node + size > per_node:
            free = -(-free // per_node) * per_node
        first_gpus.append(free)
        free += size
    trainer = tuple(rank // per_node for rank in range(ranks))
    rolling = tuple(gpu // per_node for gpu in first_gpus)
    return Placement(
        num_nodes=cluster.nodes or max(*trainer, *rolling) + 1,
        trainer=trainer,
        engines=rolling,
        engine_gpus=size,
        engine_ranks=tuple(tuple(range(gpu, gpu + size)) for gpu in first_gpus) if cluster.share_gpus else (),
        gpus_left_idle=0 if cluster.share_gpus else free - ranks - engines * size,
    )
