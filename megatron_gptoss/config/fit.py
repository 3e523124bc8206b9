"""Does the plan fit on its GPUs, and if not, what would make it fit?

In: `Loaded`. Out: "" or one message: which rank needs how much, the largest parts, and changes that were tried here and fit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from megatron_gptoss.config.host_memory import checkpoint_per_node, host_bytes_per_node, optimizers_per_node
from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.load import Loaded, to_toml
from megatron_gptoss.config.memory import engine_memory
from megatron_gptoss.config.rank_memory import GIB, RankMemory, worst_rank
from megatron_gptoss.config.rules import broken_rules, divisors, not_built_yet
from megatron_gptoss.config.schema import Config

NUM_CURES = 3
MOST_CHANGES = 3  # keys of one cure that is searched for; beyond that, one is found step by step
ENGINE_ROOM = 1.2  # of a GPU, in an engine's weights, is the least that is worth trying
MORE_GPUS = ("parallel.data", "parallel.context", "parallel.pipeline")


def does_not_fit(loaded: Loaded) -> str:
    """Empty when the worst rank fits its GPU and what its ranks put into a node's own memory fits there. Runs on CPUs are not judged."""
    config = loaded.config
    if config.cluster.device == "cpu":
        return ""
    rank, host = worst_rank(config), host_bytes_per_node(config)
    if rank.total > config.cluster.gpu_memory_gib * GIB:
        where = f"a trainer rank of stage {rank.stage}" if config.parallel.pipeline > 1 else "a trainer rank"
        rests = f", while it rests beside an engine with its {loaded.show('rollout.gpu_memory_fraction')},"
        beside = rests if rank.worst_phase == "engine" else ""
        problem = f"{where}{beside} needs {_gib(rank.total)} and {loaded.show('cluster.gpu_memory_gib')}. Largest parts: {_largest(rank)}."
    elif host > config.cluster.host_memory_gib * GIB:
        problem = (
            f"the ranks of a node need {_gib(host)} of its own memory and {loaded.show('cluster.host_memory_gib')}: {_of_the_host(loaded)}."
        )
    else:
        return ""
    found = cures(loaded)
    if not found:
        return f"{problem} None of the changes that were tried makes it fit: it takes more GPUs, or a smaller model."
    return f"{problem} Would fit: {'; or '.join(_words(config, cure) for cure in found)}."


def _of_the_host(loaded: Loaded) -> str:
    """Which key takes how much."""
    optimizers, checkpoint = optimizers_per_node(loaded.config), checkpoint_per_node(loaded.config)
    words = [f"{loaded.show('trainer.optimizer_offload')} takes {_gib(optimizers)}"] if optimizers else []
    if checkpoint:
        words.append(f"a checkpoint that is being written takes {_gib(checkpoint)} ({loaded.show('run.save_in_background')})")
    return " and ".join(words)


def _words(config: Config, cure: Mapping[str, Any]) -> str:
    ranks = world_size(changed_config(config, cure))
    more = f" ({ranks} ranks)" if ranks > world_size(config) else ""
    return " and ".join(f"{key} = {to_toml(value)}" for key, value in cure.items()) + more


def fits(config: Config) -> bool:
    return (
        worst_rank(config).total <= config.cluster.gpu_memory_gib * GIB
        and host_bytes_per_node(config) <= config.cluster.host_memory_gib * GIB
    )


def cures(loaded: Loaded) -> list[dict[str, Any]]:
    """Changes that make the plan fit, each tried: no rule is broken, and nothing is in it that a run would ignore.

    First those on as many GPUs as now, with the fewest keys and with one key more, then one on more GPUs.
    """
    candidates = list(_candidates(loaded.config))
    same = [c for c in candidates if c[0] not in MORE_GPUS]
    found = _search(loaded, same, NUM_CURES - 1) or _greedy(loaded, same)
    return found + (_search(loaded, [c for c in candidates if c[0] in MORE_GPUS], 1) or ([] if found else _greedy(loaded, candidates)))


def _search(loaded: Loaded, candidates: list[tuple[str, Any]], most: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    enough = MOST_CHANGES
    for size in range(1, MOST_CHANGES + 1):
        for chosen in combinations(candidates, size):
            cure = dict(chosen)
            # Two values of one key are no cure; a milder value of the same keys came first; a cure with a change more is none.
            if len(cure) < size or size > enough or any(_within(other, cure) for other in found):
                continue
            if _works(loaded, cure):
                found.append(cure)
                enough = min(enough, size + 1)
                if len(found) == most:
                    return found
    return found


def _within(cure: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return set(cure) == set(other) or set(cure.items()) <= set(other.items())


def _works(loaded: Loaded, cure: Mapping[str, Any]) -> bool:
    return _is_plan(loaded, cure) and fits(changed_config(loaded.config, cure))


def _is_plan(loaded: Loaded, cure: Mapping[str, Any]) -> bool:
    changed = Loaded(changed_config(loaded.config, cure), loaded.origins)
    return set(_ignored(changed)) <= set(_ignored(loaded)) and not broken_rules(changed)


def _greedy(loaded: Loaded, candidates: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """One cure of more changes: always the one that saves most next; none when that leads nowhere."""
    cure: dict[str, Any] = {}
    while True:
        options = [cure | {key: value} for key, value in candidates if cure.get(key) != value]
        sizes = [(worst_rank(changed_config(loaded.config, o)).total, i) for i, o in enumerate(options) if _is_plan(loaded, o)]
        now = worst_rank(changed_config(loaded.config, cure)).total
        if not sizes or min(sizes)[0] >= now:
            return []
        cure = options[min(sizes)[1]]
        if fits(changed_config(loaded.config, cure)):
            return [cure]


def changed_config(config: Config, values: Mapping[str, Any]) -> Config:
    for key, value in values.items():
        section, name = key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def _candidates(config: Config) -> Iterator[tuple[str, Any]]:
    """Single changes, from those that cost least to those that cost most."""
    trainer, parallel = config.trainer, config.parallel
    if config.run.save_in_background:
        yield "run.save_in_background", False
    if trainer.attention == "reference":
        yield "trainer.attention", "triton"
    if trainer.dtype == "float32":
        yield "trainer.dtype", "bfloat16"
    if trainer.experts == "loop" and trainer.dtype == "bfloat16":
        yield "trainer.experts", "grouped"
    for choice in ("selective", "full"):
        if ("none", "selective", "full").index(trainer.recompute) < ("none", "selective", "full").index(choice):
            yield "trainer.recompute", choice
    shared = parallel.tensor * parallel.context
    shortest = -(-config.rollout.max_sequence_tokens // shared) * shared
    if shortest < trainer.tokens_per_microbatch:
        yield "trainer.tokens_per_microbatch", shortest
    ranks = shared * parallel.data
    for expert in divisors(config.model.num_local_experts):
        if expert > parallel.expert and ranks % expert == 0:
            yield "parallel.expert", expert
    if trainer.optimizer_states == "float32":
        yield "trainer.optimizer_states", "bfloat16"
    for share in (0.25, 0.5, 0.75, 1.0):
        if share > trainer.optimizer_offload:
            yield "trainer.optimizer_offload", share
    least = ENGINE_ROOM * engine_memory(config)[0].num_bytes / (config.cluster.gpu_memory_gib * GIB)
    for share in (0.6, 0.5, 0.4, 0.3) if config.cluster.share_gpus else ():
        if least < share < config.rollout.gpu_memory_fraction:
            yield "rollout.gpu_memory_fraction", share
    for times in (2, 4, 8, 16):
        yield "parallel.data", parallel.data * times
    for key in ("parallel.context", "parallel.pipeline"):
        section, name = key.split(".")
        for times in (2, 4):
            yield key, getattr(getattr(config, section), name) * times


def _ignored(loaded: Loaded) -> list[str]:
    return [message.split(" = ")[0] for message in not_built_yet(loaded)]


def _largest(rank: RankMemory) -> str:
    parts = sorted((*rank.at_the_peak(), *rank.beside_them()), key=lambda part: -part.num_bytes)[:3]
    return ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in parts)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
