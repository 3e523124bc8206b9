"""How large is the model, and what of it does a checkpoint or one engine hold?

In: `Config`. Out: parameter counts and bytes by part. Pure arithmetic, no torch. What a trainer rank holds is rank_memory.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gptoss.config.layout import weight_sync
from megatron_gptoss.config.schema import Config, ModelConfig

BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER_CHUNK = 2**24  # parameters that trainer/adamw.py updates at once: 64 MiB in float32, 256 blocks of its kernel on a GPU


@dataclass(frozen=True)
class Parameters:
    """20B: 20,914,757,184 in all, of which 3,608,307,264 are used for one token."""

    dense: int  # every rank holds these
    experts: int  # divided over the expert-parallel ranks
    active: int  # used for one token, the output head included; the embedding is a look-up and is not counted

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class MemoryPart:
    name: str
    num_bytes: int
    # When it is there: "always"; whenever the rank is at "work"; in a "pass", forward and backward, all through, in its worst "layer" or at
    # its "head"; in the optimizer's "step"; while the "reference" is scored; while the model is "build"; when weights are "publish"ed
    phase: str = "always"


def count_parameters(model: ModelConfig) -> Parameters:
    hidden, wide = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    attention = hidden * q + q + 2 * (hidden * kv + kv) + q * hidden + hidden + model.num_attention_heads  # the last: sinks
    router = hidden * model.num_local_experts + model.num_local_experts
    expert = hidden * 2 * wide + 2 * wide + wide * hidden + hidden
    layers = model.num_hidden_layers
    dense = layers * (attention + router + 2 * hidden) + 2 * model.vocab_size * hidden + hidden
    active = dense - model.vocab_size * hidden + layers * model.num_experts_per_tok * expert
    return Parameters(dense, layers * model.num_local_experts * expert, active)


def kv_bytes_per_token(config: Config) -> int:
    """Keys and values of one token in every layer. An upper bound: sliding layers forget what their window has passed."""
    model = config.model
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * BYTES[config.rollout.dtype]


def checkpoint_bytes(config: Config) -> int:
    """A training checkpoint on disk, over all ranks: every parameter once as a weight in `trainer.dtype`, and its optimizer's state. 16
    bytes per parameter for fp32, 14 for bf16, 10 with bf16 moments; random states are not counted. A critic is as much again, with a value
    head instead of the output layer.
    """
    model = config.model
    parameters = count_parameters(model).total
    if config.rl.has_critic:
        parameters += parameters - model.vocab_size * model.hidden_size + value_head_parameters(model)
    return parameters * (BYTES[config.trainer.dtype] + written_state_bytes(config))


def written_state_bytes(config: Config) -> int:
    """Of one parameter in a checkpoint: an fp32 original (Megatron writes one for fp32 weights too) and two moments."""
    return 4 + 2 * BYTES[config.trainer.optimizer_states]


def bucket_bytes(config: Config) -> int:
    """The largest bucket of weights that travels: rollout.weight_bucket_mib, or the largest tensor where that is more."""
    model = config.model
    matrix = model.num_local_experts * 2 * model.intermediate_size * model.hidden_size  # of a layer's first expert products
    largest = max(matrix, model.vocab_size * model.hidden_size) * BYTES[config.rollout.dtype]
    whole = count_parameters(model).total * BYTES[config.rollout.dtype]
    return min(max(int(config.rollout.weight_bucket_mib * 2**20), largest), whole)


def value_head_parameters(model: ModelConfig) -> int:
    return model.hidden_size + 1


def engine_memory(config: Config) -> list[MemoryPart]:
    """What each GPU of one engine holds, or the process of a CPU engine. On a GPU the KV cache takes what `rollout.gpu_memory_fraction`
    leaves, so only its least size is known; what has the phase "publish" lies outside that fraction."""
    model, size = config.model, config.rollout.tensor_parallel
    # Every GPU has all routers, norms, and biases that are added to a sum over GPUs: attention's last one, and each expert's.
    router = model.num_local_experts * (model.hidden_size + 1)
    whole = model.num_hidden_layers * (router + (3 + model.num_local_experts) * model.hidden_size) + model.hidden_size
    divided = count_parameters(model).total - whole
    weights = MemoryPart("weights", (whole + -(-divided // size)) * BYTES[config.rollout.dtype])
    if config.cluster.device == "cpu":
        return [weights, MemoryPart("KV cache", int(config.rollout.kv_cache_gib * 2**30))]
    cache = MemoryPart("KV cache, at least", config.rollout.max_sequence_tokens * kv_bytes_per_token(config) // size)
    if weight_sync(config) != "broadcast":
        return [weights, cache]
    return [weights, cache, MemoryPart("two buckets of weights to be received", 2 * bucket_bytes(config), "publish")]
