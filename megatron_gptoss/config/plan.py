"""What follows from the configuration on this machine?

In: `Loaded` and `Cluster`. Out: `RunPlan`, computed once and handed to every room. Raises ConfigError when values do not fit each other
(rules.py). Pure: it opens no file, asks no device and reads the clock only when none is given. A machine that is too small is not an
error here, so that one can plan on a laptop; `RunPlan.shortfall` says what is missing and the commands that run refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron_gptoss.config.layout import stages, weight_sync, world_size
from megatron_gptoss.config.load import FIELDS, Loaded
from megatron_gptoss.config.memory import Parameters, count_parameters
from megatron_gptoss.config.placement import Placement, place
from megatron_gptoss.config.rules import broken_rules, not_built_yet
from megatron_gptoss.config.schema import MOST_IN_FLIGHT, Config, WeightSync
from megatron_gptoss.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """What a run may use, all nodes together."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class Resources:
    """What one Ray actor asks for."""

    num_cpus: float  # for placement only; threads are set by trainer.threads_per_rank
    num_gpus: float


@dataclass(frozen=True)
class RunPlan:
    run_dir: Path  # runs/NAME-ID, or the run that is resumed
    resumed: bool
    cluster: Cluster
    device: str  # "cpu" | "cuda"
    # trainer
    world_size: int  # trainer ranks: tensor x context x pipeline x data
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int  # divides tensor x context x data, the ranks of a pipeline stage
    layers_per_stage: tuple[int, ...]  # one number a pipeline stage, first to last
    heads_per_rank: int  # query heads
    kv_heads_per_rank: int
    vocabulary_per_rank: int  # rows of the embedding and of the output head
    experts_per_rank: int  # of each layer
    expert_copies: int  # ranks of a stage that hold the same experts
    tokens_per_microbatch: int  # at most, over the tensor x context ranks that share it
    tokens_per_rank: int  # of them in one rank's attention; norms and residuals hold 1 / tensor of these
    tokens_multiple: int  # a microbatch's length is a multiple of it, so that all those ranks have as many
    least_microbatches: int  # of an update on a rank, where there are samples for them: a pipeline stands half empty with fewer
    trainer_resources: Resources  # of one rank
    placement: Placement  # the node of each rank and engine
    attention_full: str  # backend of layers that see everything
    attention_windowed: str  # backend of layers with a sliding window
    switches: tuple[str, ...]  # what makes the trainer's model wrong on purpose, as `key = value (origin)`; () in a run to be believed
    # a step
    groups_per_step: int
    sequences_per_step: int
    sequences_per_minibatch: int  # over all ranks, before groups without signal are dropped
    updates_per_step: int  # optimizer updates: minibatches x epochs
    total_updates: int  # of the policy, over the whole run
    critic_updates: int  # of the critic, over the whole run; 0: there is none
    on_policy: bool  # one update per step: the old log-probs are those of the update itself, scoring is skipped
    max_tokens_per_step: int  # when every rollout is as long as it may be
    # engines
    num_engines: int
    weight_sync: WeightSync  # how they are given new weights
    shares_gpus: bool  # with the trainer: they sleep while it works
    engine_max_model_len: int  # tokens of a whole conversation
    engine_max_running: int  # conversations one engine decodes at once
    engine_max_in_flight: int  # turns it is given at once
    engine_tensor_parallel: int  # processes that divide its model; with GPUs, one on each
    engine_resources: Resources  # of one engine; no GPU where it shares the trainer's, which Ray has given to the ranks
    # model
    parameters: Parameters
    # what is missing here, "" when nothing is
    shortfall: str
    # values that a run would ignore, one message each; () in a plan that can run
    not_built: tuple[str, ...]


def make_plan(loaded: Loaded, cluster: Cluster, now: datetime | None = None) -> RunPlan:
    problems = broken_rules(loaded)
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  - " + "\n  - ".join(problems))
    config = loaded.config
    rl, rollout, parallel = config.rl, config.rollout, config.parallel
    trainer_resources, engine_resources = _resources(config, cluster)
    updates = rl.minibatches * rl.epochs
    # Another conversation in the same batch changes the shapes of the products and with them the last bits.
    running = 1 if rollout.deterministic else rollout.max_running
    return RunPlan(
        run_dir=run_directory(config, now or datetime.now()),
        resumed=bool(config.run.resume),
        cluster=cluster,
        device=config.cluster.device,
        world_size=world_size(config),
        tensor_parallel=parallel.tensor,
        context_parallel=parallel.context,
        pipeline_parallel=parallel.pipeline,
        data_parallel=parallel.data,
        expert_parallel=parallel.expert,
        layers_per_stage=stages(config),
        heads_per_rank=config.model.num_attention_heads // parallel.tensor,
        kv_heads_per_rank=config.model.num_key_value_heads // parallel.tensor,
        vocabulary_per_rank=config.model.vocab_size // parallel.tensor,
        experts_per_rank=config.model.num_local_experts // parallel.expert,
        expert_copies=parallel.tensor * parallel.context * parallel.data // parallel.expert,
        tokens_per_microbatch=config.trainer.tokens_per_microbatch,
        tokens_per_rank=config.trainer.tokens_per_microbatch // parallel.context,
        tokens_multiple=parallel.tensor * parallel.context,
        least_microbatches=parallel.pipeline,
        trainer_resources=trainer_resources,
        placement=place(config),
        attention_full=config.trainer.attention,
        attention_windowed=config.trainer.backend_of_windowed_layers,
        switches=_switches(loaded),
        groups_per_step=rl.sequences_per_step // rollout.group_size,
        sequences_per_step=rl.sequences_per_step,
        sequences_per_minibatch=rl.sequences_per_step // rl.minibatches,
        updates_per_step=updates,
        total_updates=(config.run.steps - rl.has_critic * rl.critic_warmup_steps) * updates,
        critic_updates=rl.has_critic * config.run.steps * rl.minibatches * rl.critic_epochs,
        on_policy=updates == 1 and rl.old_logp == "auto",
        max_tokens_per_step=rl.sequences_per_step * rollout.max_sequence_tokens,
        num_engines=rollout.num_engines,
        weight_sync=weight_sync(config),
        shares_gpus=config.cluster.share_gpus,
        engine_max_model_len=rollout.max_sequence_tokens,
        engine_max_running=running,
        engine_max_in_flight=rollout.max_in_flight or min(2 * running, MOST_IN_FLIGHT),
        engine_tensor_parallel=rollout.tensor_parallel,
        engine_resources=engine_resources,
        parameters=count_parameters(config.model),
        shortfall=_shortfall(config, cluster),
        not_built=tuple(not_built_yet(loaded)),
    )


def run_directory(config: Config, now: datetime) -> Path:
    if config.run.resume:
        return Path(config.run.resume)
    return Path(config.run.dir) / f"{config.run.name}-{config.run.id or now.strftime('%Y%m%d-%H%M%S')}"


def _switches(loaded: Loaded) -> tuple[str, ...]:
    keys = [key for key in FIELDS if key.startswith("diagnose.") or key == "parity.trainer_fault"]
    return tuple(loaded.show(key) for key in keys if loaded.value(key) != FIELDS[key].default)


def _resources(config: Config, cluster: Cluster) -> tuple[Resources, Resources]:
    """CPUs and GPUs of a trainer rank and of an engine.

    Without GPUs they share the CPUs: trainer and engines work in turn, and Ray would wait for ever for CPUs that do not exist. Example:
    two ranks of one thread and one engine on 2 CPUs ask for 0.66 each.
    """
    gpus = 1.0 if config.cluster.device == "cuda" else 0.0
    size = config.rollout.tensor_parallel
    trainer, engine = float(config.trainer.threads_per_rank), float(size)
    total = trainer * world_size(config) + engine * config.rollout.num_engines
    if config.cluster.address == "local" and total > cluster.num_cpus:
        share = cluster.num_cpus / total
        trainer, engine = (int(wanted * share * 100) / 100 for wanted in (trainer, engine))  # rounded down, so that the sum still fits
    return Resources(trainer, gpus), Resources(engine, 0.0 if config.cluster.share_gpus else gpus * size)


def _shortfall(config: Config, cluster: Cluster) -> str:
    """What this machine lacks; of a Ray cluster, what `cluster.nodes` of them lack, since only Ray knows what it really has."""
    if config.cluster.device == "cpu":
        return ""
    ranks, nodes, local = world_size(config), config.cluster.nodes, config.cluster.address == "local"
    if not local and not nodes:
        return ""  # as many nodes as are needed
    have = cluster.num_gpus if local else nodes * config.cluster.gpus_per_node
    engines, size, placed = config.rollout.num_engines, config.rollout.tensor_parallel, place(config)
    need = len(placed.gpu_nodes(with_engines=True)) + placed.gpus_left_idle
    if need <= have:
        return ""
    data = config.parallel.data
    of = f"parallel.data = {data}" if ranks == data else f"tensor x context x pipeline x data = {ranks}"
    each = f" of rollout.tensor_parallel = {size}" if size > 1 else ""
    idle = f" ({placed.gpus_left_idle} of them idle, since an engine lies on one node)" if placed.gpus_left_idle else ""
    where = "this machine has" if local else f"cluster.nodes = {nodes} of cluster.gpus_per_node = {config.cluster.gpus_per_node} have"
    return f"{of} trainer ranks and rollout.num_engines = {engines} engines{each} need {need} GPUs{idle}, {where} {have}"
