"""What does one node's own memory hold for the trainer ranks on it?

In: `Config`. Out: bytes. Pure arithmetic. Python, libraries, Ray's object store and the engines' own memory are not counted.
"""

from __future__ import annotations

from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.memory import BYTES, written_state_bytes
from megatron_gptoss.config.rank_memory import Held, held_by_critic, held_parameters, largest_update, trainer_memory
from megatron_gptoss.config.schema import Config


def host_bytes_per_node(config: Config) -> int:
    """At most, of a node full of ranks."""
    return optimizers_per_node(config) + checkpoint_per_node(config)


def optimizers_per_node(config: Config) -> int:
    """Their share on the host. The stage that needs most is taken for all."""
    return _ranks_per_node(config) * max(rank.host_bytes for rank in trainer_memory(config))


def checkpoint_per_node(config: Config) -> int:
    """What is there besides while a checkpoint is being written; 0 where `gptoss train` is told to write none. When it is asked to stop it
    still does, and `gptoss sft` always does: neither is counted then."""
    if not (config.run.save_every or config.run.save_at_end):
        return 0
    count = _copied if config.run.save_in_background else _passing
    models = [held_parameters, held_by_critic] if config.rl.has_critic else [held_parameters]
    return sum(max(count(config, held(config, stage)) for stage in range(config.parallel.pipeline)) for held in models)


def _copied(config: Config, held: Held) -> int:
    """All that a node's ranks write. Of weights that several ranks have alike one writes; each its own range of the optimizer's."""
    ranks, p = _ranks_per_node(config), config.parallel
    dense = min(ranks, p.tensor * p.pipeline) * held.dense
    experts = min(ranks, p.expert * p.pipeline) * held.experts
    return (dense + experts) * BYTES[config.trainer.dtype] + ranks * held.updated * written_state_bytes(config)


def _passing(config: Config, held: Held) -> int:
    """One tensor of each rank on its way from its GPU; and the optimizer's on the host, where a rank has a part of each parameter: such a
    part is written in boxes, which are copied out first."""
    model, p = config.model, config.parallel
    embedding = model.vocab_size * model.hidden_size // p.tensor
    matrices = model.num_local_experts // p.expert * 2 * model.intermediate_size * model.hidden_size
    largest = max(4 * largest_update(config, held), BYTES[config.trainer.dtype] * max(embedding, matrices))
    boxes = (held.dense_updated if p.data * p.context > 1 else 0) + (held.experts_updated if held.experts_updated < held.experts else 0)
    return _ranks_per_node(config) * (largest + round(config.trainer.optimizer_offload * boxes * written_state_bytes(config)))


def _ranks_per_node(config: Config) -> int:
    return min(world_size(config), config.cluster.gpus_per_node)
