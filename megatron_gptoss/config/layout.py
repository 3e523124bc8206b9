"""Which rank holds which layers, heads, experts and tokens?

In: `Config`. Out: numbers. Values that do not divide are rules.py's to refuse; here they are taken as they are. Pure, no torch.
"""

from __future__ import annotations

from megatron_gptoss.config.schema import Config, ModelConfig, WeightSync

# The embedding is a look-up, but its rows, gradients and optimizer state weigh as much as the layers they displace, and the first stage
# of a pipeline keeps the most microbatches. One layer's worth lies between its time (none) and its memory (0.7 of a layer of the 20B).
EMBEDDING_IN_LAYERS = 1.0


def world_size(config: Config) -> int:
    p = config.parallel
    return p.tensor * p.context * p.pipeline * p.data


def layer_multiplications(model: ModelConfig) -> int:
    """Parameters of a layer that multiply one token: attention's matrices, the router, and the experts it visits."""
    hidden, wide = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    return hidden * (2 * q + 2 * kv) + hidden * model.num_local_experts + model.num_experts_per_tok * 3 * hidden * wide


def head_in_layers(model: ModelConfig) -> float:
    """The output head's work in layers, for one token: 4.6 in the 20B and the 120B, since the vocabulary is large and few experts work."""
    return model.vocab_size * model.hidden_size / layer_multiplications(model)


def balanced_stages(model: ModelConfig, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage so that the slowest stage is as fast as whole layers allow, the embedding and the head counted as layers.

    Every stage has at least one layer. Where a layer can go to several stages, a later one gets it: earlier ones keep more microbatches.
    """
    if pipeline == 1:
        return (model.num_hidden_layers,)
    extra = [0.0] * pipeline
    extra[0] += EMBEDDING_IN_LAYERS
    extra[-1] += head_in_layers(model)
    layers = [1] * pipeline
    for _ in range(model.num_hidden_layers - pipeline):
        lightest = min(range(pipeline), key=lambda s: (layers[s] + extra[s], -s))
        layers[lightest] += 1
    return tuple(layers)


def stages(config: Config) -> tuple[int, ...]:
    """Layers of each pipeline stage, as configured or balanced."""
    given = config.parallel.pipeline_layers
    if given:
        return tuple(int(n) for n in given.split(","))
    return balanced_stages(config.model, config.parallel.pipeline)


def weight_sync(config: Config) -> WeightSync:
    """What "auto" comes to."""
    if config.rollout.weight_sync != "auto":
        return config.rollout.weight_sync
    if config.cluster.device == "cpu":
        return "inline"
    return "shared" if config.cluster.share_gpus else "broadcast"
