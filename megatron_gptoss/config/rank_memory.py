"""What does one trainer rank hold, part by part, and how much at its worst moment?

In: `Config`. Out: `RankMemory` for each pipeline stage. Pure arithmetic over the shapes that the code keeps; docs/memory.md explains every
part with worked numbers. Some parts are there all the time (PHASE "always"; gradients whenever the rank is at "work", for beside an engine
that works on its GPU it gives them back), the others in one phase only, so the peak is the first sum and the largest of the others. What
PyTorch's allocator does not see (CUDA's own memory, NCCL, gaps between blocks) is an allowance, kept apart.

Legend: t tokens of a microbatch on this rank in attention, n the same in norms and residuals (divided over tensor ranks too), R rows
that this rank's experts compute, C hidden size, I expert width, q and kv channels of this rank's query and kv heads, V its part of the
vocabulary, b bytes of a weight or activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from megatron_gptoss.config.layout import stages, weight_sync
from megatron_gptoss.config.memory import BYTES, OPTIMIZER_CHUNK, MemoryPart, bucket_bytes, value_head_parameters
from megatron_gptoss.config.schema import Config

GIB = 2**30
ALL_THE_TIME = ("always", "work")  # that a rank works

# Allowances: what a CUDA process takes before it has a tensor (context, libraries, compiled kernels), what NCCL takes for each group of
# more than one rank, and the part of what comes and goes that lies in gaps of the allocator. Set by one step of the 20B on two H200s,
# where the first two were 4.0 GiB together and the third 4.7 GiB (docs/performance.md).
CUDA_BYTES = int(2.5 * GIB)
NCCL_BYTES_PER_GROUP = int(0.5 * GIB)
GAPS, GAPS_NAME = 0.2, "gaps between blocks"
# An engine that sleeps on a trainer's GPU has given back weights and cache, not its CUDA context, compiled kernels and captured graphs.
ASLEEP_BYTES = int(4 * GIB)


@dataclass(frozen=True)
class RankMemory:
    """One rank of a pipeline stage. All ranks of a stage are alike, but for the share of rows that their experts get."""

    stage: int
    parts: tuple[MemoryPart, ...]  # what PyTorch allocates, by phase
    # What else lies on the GPU. Where an engine shares it: "asleep" what is there while the rank works, "awake" while the engine does.
    overhead: tuple[MemoryPart, ...]
    host_bytes: int  # of the optimizer, in the node's memory

    def sum(self, *phases: str) -> int:
        return sum(part.num_bytes for part in self.parts if part.phase in phases)

    @property
    def worst_phase(self) -> str:
        """Also "engine": the rank rests beside an engine that works."""
        return "engine" if self._while_it_rests > self.while_it_works else self._worst_of_tensors

    @property
    def _worst_of_tensors(self) -> str:
        return max({part.phase for part in self.parts} - {*ALL_THE_TIME, "pass"}, key=lambda phase: (self._beside(phase), phase))

    def _beside(self, phase: str) -> int:
        """What a phase adds to what is always there. Kept activations are there in both phases of a pass, "layer" and "head"."""
        return self.sum(phase, "pass") if phase in ("layer", "head") else self.sum(phase)

    @property
    def allocated(self) -> int:
        """The largest sum of tensors at any moment: what torch.cuda.max_memory_allocated() will say."""
        return self.sum(*ALL_THE_TIME) + self._beside(self._worst_of_tensors)

    @property
    def reserved(self) -> int:
        """The same with the allocator's gaps: what torch.cuda.max_memory_reserved() should say."""
        return self.allocated + sum(part.num_bytes for part in self.overhead if part.name == GAPS_NAME)

    @property
    def total(self) -> int:
        """What the GPU must have."""
        return max(self.while_it_works, self._while_it_rests)

    @property
    def while_it_works(self) -> int:
        """Beside an engine that sleeps, if there is one: what the GPU holds after an update."""
        return self.allocated + sum(part.num_bytes for part in self.overhead if part.phase != "awake")

    @property
    def _while_it_rests(self) -> int:
        """Beside an engine's share; 0 where engines have GPUs of their own. What was last used to publish lies there still."""
        if not any(part.phase == "awake" for part in self.overhead):
            return 0
        return self.sum("always", "publish") + sum(part.num_bytes for part in self.overhead if part.phase != "asleep")

    @property
    def while_both_start(self) -> int:
        """The rank is built, gradients and all, beside an engine that has its share already."""
        return self.sum(*ALL_THE_TIME, "build") + sum(part.num_bytes for part in self.overhead if part.phase != "asleep")

    def at_the_peak(self) -> list[MemoryPart]:
        """The tensors that are there at the worst moment, in their order."""
        worst = self.worst_phase
        phases = {"layer": (*ALL_THE_TIME, "layer", "pass"), "head": (*ALL_THE_TIME, "head", "pass"), "engine": ("always", "publish")}
        return [part for part in self.parts if part.phase in phases.get(worst, (*ALL_THE_TIME, worst)) and part.num_bytes]

    def beside_them(self) -> list[MemoryPart]:
        """What else is there at the worst moment."""
        absent = "asleep" if self.worst_phase == "engine" else "awake"
        return [part for part in self.overhead if part.phase != absent]


def trainer_memory(config: Config) -> list[RankMemory]:
    """One record for each pipeline stage."""
    return [_stage(config, stage) for stage in range(config.parallel.pipeline)]


def fits_beside_a_starting_engine(config: Config) -> bool:
    """Trainer and engine that share a GPU may come up at once. 5 % are left for what only a start takes: gaps, weights as they are read or
    drawn, and an engine that counts what is free before it counts its own."""
    return max(rank.while_both_start for rank in trainer_memory(config)) <= 0.95 * config.cluster.gpu_memory_gib * GIB


def worst_rank(config: Config) -> RankMemory:
    """The stage that needs most."""
    return max(trainer_memory(config), key=lambda rank: rank.total)


# ---- what stays ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Parameters on one rank, and the share of each whose optimizer state it has."""

    dense: int  # attention, norms, router, embedding, head
    experts: int
    dense_updated: int  # the distributed optimizer divides the rest over data x context ranks
    experts_updated: int  # over the ranks that hold the same experts

    @property
    def all(self) -> int:
        return self.dense + self.experts

    @property
    def updated(self) -> int:
        return self.dense_updated + self.experts_updated


def held_parameters(config: Config, stage: int) -> Held:
    model, parallel = config.model, config.parallel
    layers = stages(config)[stage]
    hidden, tensor = model.hidden_size, parallel.tensor
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    divided = hidden * (q + 2 * kv) + q + 2 * kv + q * hidden + model.num_attention_heads  # over tensor ranks; the last: sinks
    whole = hidden + hidden * model.num_local_experts + model.num_local_experts + 2 * hidden  # projection's bias, router, two norms
    first, last = stage == 0, stage == parallel.pipeline - 1
    rows = (first + last) * model.vocab_size * hidden
    dense = layers * (divided // tensor + whole) + rows // tensor + last * hidden
    ranks = tensor * parallel.context * parallel.data
    experts = layers * model.num_local_experts // parallel.expert * expert_parameters(config)
    copies = max(ranks // parallel.expert, 1)
    return Held(dense, experts, ceil(dense / (parallel.data * parallel.context)), ceil(experts / copies))


def held_by_critic(config: Config, stage: int) -> Held:
    """The policy's parameters, with a value head, whole on each rank of the last stage, in place of the output layer."""
    held, last = held_parameters(config, stage), stage == config.parallel.pipeline - 1
    model, parallel = config.model, config.parallel
    dense = held.dense + last * (value_head_parameters(model) - model.vocab_size * model.hidden_size // parallel.tensor)
    return replace(held, dense=dense, dense_updated=ceil(dense / (parallel.data * parallel.context)))


def expert_parameters(config: Config) -> int:
    hidden, wide = config.model.hidden_size, config.model.intermediate_size
    return hidden * 2 * wide + 2 * wide + wide * hidden + hidden


def _state_bytes(config: Config) -> int:
    """Of one updated parameter: two moments, and a float32 original where the weight itself is not one."""
    return 2 * BYTES[config.trainer.optimizer_states] + (0 if config.trainer.dtype == "float32" else 4)


def _trained(config: Config, held: Held, whose: str = "") -> tuple[MemoryPart, MemoryPart, MemoryPart]:
    """What one trained model holds all the time, and at work."""
    return (
        MemoryPart(f"{whose}weights", held.all * BYTES[config.trainer.dtype]),
        MemoryPart(f"{whose}gradients", held.all * 4, "work"),  # summed and reduced in float32
        MemoryPart(f"{whose}optimizer", round(held.updated * _state_bytes(config) * (1 - config.trainer.optimizer_offload))),
    )


def _weights(config: Config, held: Held, critic: Held | None) -> Iterable[MemoryPart]:
    b = BYTES[config.trainer.dtype]
    trained = [_trained(config, held)] + ([_trained(config, critic, "critic's ")] if critic else [])
    for parts in trained:
        yield from parts
    if config.rl.kl_coef > 0:
        yield MemoryPart("reference policy", held.all * b)
        # While it is scored, the current weights wait beside it.
        yield MemoryPart("current weights, while the reference is scored", held.all * b, "reference")
    yield MemoryPart("AdamW's temporaries", _step_temporaries(config, held), "step")
    # Megatron allocates the model, then the buffers its weights move into; the optimizer comes after that. The critic is built last.
    weights, _, optimizer = (part.num_bytes for part in trained[-1])
    yield MemoryPart("weights twice, before the optimizer is", max(weights - optimizer, 0), "build")
    layer = config.model.num_local_experts * 2 * config.model.intermediate_size * config.model.hidden_size * b
    copies = 2 if config.parallel.expert > 1 else 1  # gathered, and in the engines' order
    yield MemoryPart("a layer's experts, on their way to be published", copies * layer, "publish")
    if weight_sync(config) != "inline":
        yield MemoryPart("two buckets of weights to be sent", 2 * bucket_bytes(config))


def planned_optimizer(config: Config) -> bool:
    """Our AdamW (trainer/adamw.py) instead of PyTorch's."""
    trainer = config.trainer
    return config.cluster.device == "cuda" or trainer.optimizer_states != "float32" or trainer.optimizer_offload > 0


def largest_update(config: Config, held: Held) -> int:
    """The most elements of one parameter that a rank updates: of the embedding or of a layer's first expert matrices, one parameter too.
    The optimizer divides a stretch of all parameters in a row, so a large one may be one rank's alone."""
    model, local = config.model, config.model.num_local_experts // config.parallel.expert
    embedding = min(model.vocab_size * model.hidden_size // config.parallel.tensor, held.dense_updated)
    return max(embedding, min(local * 2 * model.intermediate_size * model.hidden_size, held.experts_updated))


def _step_temporaries(config: Config, held: Held) -> int:
    """Dense and expert parameters are stepped one after the other. Clipping, which comes first, has one parameter's gradient twice."""
    largest = largest_update(config, held)
    if not planned_optimizer(config):
        return 4 * max(largest, held.dense_updated, held.experts_updated)  # PyTorch's takes the roots of all second moments at once
    return 4 * max(largest, 6 * min(largest, OPTIMIZER_CHUNK))  # moments in float32, noise and what is made of it


def _host_bytes(config: Config, held: Held) -> int:
    """States, and of the dense and the expert optimizer each: four buffers of a chunk for what travels, and one of noise for rounding."""
    if not config.trainer.optimizer_offload:
        return 0
    states = held.updated * (2 * BYTES[config.trainer.optimizer_states] + 4)  # a copy of the original even where the weight is float32
    noise = config.trainer.optimizer_states != "float32"
    buffers = 2 * (4 + noise) * 4 * min(largest_update(config, held), OPTIMIZER_CHUNK)
    return round(states * config.trainer.optimizer_offload) + buffers


# ---- what comes and goes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """Sizes of one microbatch on one rank, per the legend above."""

    b: int
    t: int
    n: int
    rows_sent: int  # top-k rows of this rank's tokens
    rows: int  # R, with the imbalance of routing where experts are divided
    q: int
    kv: int
    heads: int


def flow(config: Config) -> Flow:
    model, parallel = config.model, config.parallel
    t = config.trainer.tokens_per_microbatch // parallel.context
    n = t // parallel.tensor
    sent = n * model.num_experts_per_tok
    imbalance = parallel.expert_imbalance if parallel.expert > 1 else 1.0
    heads, kv_heads = model.num_attention_heads // parallel.tensor, model.num_key_value_heads // parallel.tensor
    size = model.head_dim
    return Flow(BYTES[config.trainer.dtype], t, n, sent, ceil(sent * imbalance), heads * size, kv_heads * size, heads)


def attention_kept(config: Config, f: Flow) -> int:
    """What a layer's attention, with both norms, keeps for backward. The layer's own input is counted in `layer_input`."""
    hidden = config.model.hidden_size
    norms = f.n * (2 * 4 + hidden * f.b)  # reciprocal deviations in float32; the first norm's output, which qkv multiplies
    rotated = f.t * (f.q + f.kv) * f.b  # q and k
    if config.trainer.rotary == "fused":
        before = f.t * f.kv * f.b  # values, a tensor of their own; all layers share one table of cosines and sines
    else:
        before = f.t * (f.q + 2 * f.kv) * f.b  # qkv, one tensor: v is a part of it and the rest is kept with it
        rotated += 4 * f.t * config.model.head_dim * f.b  # cosines and sines of each
    output = f.t * f.q * f.b + f.t * f.heads * 4  # and its log-sum-exp
    return norms + before + rotated + output + f.n * hidden * f.b  # the last: the sum with the residual, input of the second norm


def moe_input(config: Config, f: Flow) -> int:
    return f.n * config.model.hidden_size * f.b


def moe_kept(config: Config, f: Flow) -> int:
    """What the router and the experts keep beyond their input."""
    model = config.model
    hidden, wide, k = model.hidden_size, model.intermediate_size, model.num_experts_per_tok
    router = f.n * (model.num_local_experts * 4 + k * (8 + 4))  # logits; chosen ids and their weights
    ids = f.rows_sent * 24  # a row's token and cell, a token's rows
    if config.trainer.experts == "grouped":
        experts = f.rows * ((hidden + 2 * wide) * f.b + 4)  # rows, their products before the bias, their weights
    else:  # plain PyTorch keeps six tensors more that the steps of the activation made
        experts = f.rows * ((hidden + 2 * wide + 6 * wide) * f.b + 4)
    return router + ids + experts


def layer_input(config: Config, f: Flow) -> int:
    return f.n * config.model.hidden_size * f.b


def kept_of_layer(config: Config, f: Flow, recompute: str) -> int:
    """What stays of one layer from its forward to its backward pass."""
    kept = layer_input(config, f)
    if recompute != "full":
        kept += attention_kept(config, f) + moe_input(config, f)
    if recompute == "none":
        kept += moe_kept(config, f)
    return kept


def _experts_backward(config: Config, f: Flow) -> int:
    """The largest sum of tensors that the experts' backward makes beside what was kept."""
    hidden, wide = config.model.hidden_size, config.model.intermediate_size
    local = config.model.num_local_experts // config.parallel.expert
    gradients = f.rows * (hidden + 4 * wide) * f.b  # of the output, of the activation (and that again), of the product before it
    at_the_end = f.rows * (2 * hidden + 2 * wide) * f.b + local * 3 * hidden * wide * f.b  # both matrices' gradients, of the input
    return max(gradients, at_the_end)


def _attention_backward(config: Config, f: Flow) -> int:
    gradients = f.t * 2 * (f.q + f.kv) * f.b + f.t * f.q * 4 + f.t * f.heads * 4  # of the output, q, k, v; q's sum and row sums in float32
    if config.trainer.attention == "reference":  # all weights at once, their gradients and a product of the two
        gradients += 3 * f.heads * f.t * min(config.rollout.max_sequence_tokens, f.t) * 4
    # Context ranks deal heads out: what is sent and received lies there once more.
    return gradients + (2 * f.t * (f.q + 2 * f.kv) * f.b if config.parallel.context > 1 else 0)


def _pass(config: Config, stage: int) -> Iterable[MemoryPart]:
    trainer, model, parallel = config.trainer, config.model, config.parallel
    f, hidden = flow(config), config.model.hidden_size
    in_flight = parallel.pipeline - stage  # microbatches that have gone forward and not yet backward
    layers = stages(config)[stage]
    kept = layers * kept_of_layer(config, f, trainer.recompute)
    words = {"none": "all", "selective": "attention's", "full": "layer inputs"}[trainer.recompute]
    yield MemoryPart(f"activations kept ({words})", in_flight * kept, "pass")

    again = kept_of_layer(config, f, "none") - kept_of_layer(config, f, trainer.recompute)
    if again:
        yield MemoryPart("one layer computed again", again, "layer")
    yield MemoryPart("attention's gradients and workspace", max(_attention_backward(config, f) - _experts_backward(config, f), 0), "layer")
    yield MemoryPart("experts' gradients", _experts_backward(config, f), "layer")
    if parallel.expert > 1:
        yield MemoryPart("all-to-all buffers", (f.rows_sent + f.rows) * hidden * f.b, "layer")
    yield MemoryPart("residual's gradient", 2 * layer_input(config, f), "layer")

    if stage == parallel.pipeline - 1:
        vocabulary = model.vocab_size // parallel.tensor
        logits = min(trainer.logprob_chunk, f.t) * vocabulary
        yield MemoryPart("logits of a chunk", logits * f.b, "head")
        if trainer.logprob == "reference":
            yield MemoryPart("its float32 copies", 4 * logits * 4, "head")
        # Final norm's input, hidden states gathered and picked, their gradient, and that summed over tiles in float32.
        yield MemoryPart("hidden states and their gradients", f.n * hidden * f.b + f.t * hidden * (3 * f.b + 4), "head")
        yield MemoryPart("the head's gradient before it is added up", vocabulary * hidden * f.b, "head")


def _stage(config: Config, stage: int) -> RankMemory:
    held = held_parameters(config, stage)
    critic = held_by_critic(config, stage) if config.rl.has_critic else None
    parts = (*_weights(config, held, critic), *_pass(config, stage))
    host = _host_bytes(config, held) + (_host_bytes(config, critic) if critic else 0)
    return RankMemory(stage, parts, tuple(_overhead(config, RankMemory(stage, parts, (), host))), host)


def _overhead(config: Config, memory: RankMemory) -> Iterable[MemoryPart]:
    if config.cluster.device == "cpu":
        return
    p = config.parallel
    ranks = p.tensor * p.context * p.data
    groups = sum(
        size > 1 for size in (ranks * p.pipeline, p.tensor, p.context, p.pipeline, p.data * p.context, p.expert, ranks // p.expert)
    )
    yield MemoryPart("CUDA and its libraries", CUDA_BYTES)
    if groups:
        yield MemoryPart(f"NCCL, {groups} groups", groups * NCCL_BYTES_PER_GROUP)
    yield MemoryPart(GAPS_NAME, round(GAPS * (memory.allocated - memory.sum(*ALL_THE_TIME))), "asleep")
    if config.cluster.share_gpus:
        yield MemoryPart("the engine, asleep", ASLEEP_BYTES, "asleep")
        yield MemoryPart("the engine's share", round(config.rollout.gpu_memory_fraction * config.cluster.gpu_memory_gib * GIB), "awake")
