"""From ModelConfig to a model: the only place that knows how Megatron-Core spells GPT-OSS.

In: ModelConfig, ParallelShape, dtype. Out: GptOssModel on this rank, weights allocated but NOT initialised (checkpoint.weight_map.load_hf
fills them, from a checkpoint or from random_init). Process groups must exist (parallel.groups.init_groups).

`fault` breaks the model on purpose (faults.py), so that one can see the self-test refuse. The switches of [diagnose] break it on purpose
too, to find where a fault comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_gptoss.attention.module import AttentionOptions, SinkAttention
from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, TrainerConfig
from megatron_gptoss.errors import ConfigError, MachineError
from megatron_gptoss.model import deepep
from megatron_gptoss.model.experts import moe_spec
from megatron_gptoss.model.faults import break_model
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.model.layer import RotatedSelfAttention
from megatron_gptoss.model.parts import Parts, parts_of
from megatron_gptoss.model.rotary import BACKENDS as ROTARY
from megatron_gptoss.model.rotary import missing as rotary_lacks
from megatron_gptoss.parallel.shape import ParallelShape

# What the backward pass computes again instead of keeping: nothing, every layer from its input, or the mixture of experts alone.
RECOMPUTE = ("none", "full", "selective")
# What carries tokens to the ranks of their experts.
DISPATCHERS = ("alltoall", "deepep")


@dataclass
class GptOssMegatronConfig(TransformerConfig):
    """TransformerConfig has no YaRN fields; Megatron's attention reads these names from the config when they are there."""

    position_embedding_type: str = "yarn"
    rotary_base: float = 150000.0
    yarn_rotary_scaling_factor: float = 32.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    # None, None: the factor on cosines and sines is 0.1 ln(scaling factor) + 1, as in YaRN's paper.
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = False  # Hugging Face's truncate=false
    max_position_embeddings: int = 131072
    # Read by SinkAttention, which ignores Megatron's own attention_backend.
    sink_attention: AttentionOptions = field(default_factory=AttentionOptions)
    # Read by GroupedExperts; one of experts.BACKENDS.
    expert_backend: str = "loop"
    # Read by RotatedSelfAttention and GptOssModel; one of rotary.BACKENDS.
    rotary_backend: str = "reference"
    # Read by DispatchingMoELayer; one of DISPATCHERS.
    dispatcher: str = "alltoall"


def attention_options(trainer: TrainerConfig, diagnose: DiagnoseConfig) -> AttentionOptions:
    """What the configuration says about attention, in the attention room's words."""
    return AttentionOptions(
        backend=trainer.attention,
        backend_windowed=trainer.backend_of_windowed_layers,
        deterministic=trainer.deterministic_attention,
        ignore_sinks=diagnose.ignore_sinks,
        drop_sink_gradient=diagnose.drop_sink_gradient,
        ignore_window=diagnose.ignore_window,
    )


def build_model(
    model: ModelConfig,
    shape: ParallelShape,
    *,
    dtype: torch.dtype = torch.float32,
    attention: AttentionOptions = AttentionOptions(),
    fault: str = "none",
    recompute: str = "none",
    experts: str = "loop",
    rotary: str = "reference",
    dispatcher: str = "alltoall",
    transformer: str = "local",
    kind: type[GptOssModel] = GptOssModel,
) -> GptOssModel:
    """The layers of this rank, on its GPU or on the host; `kind` says with which head. Raises ConfigError for a layout that does not fit
    the model, MachineError for a backend of attention, experts or rotary embedding, a dispatcher or a transformer that cannot run here."""
    check_layout(model, shape)
    if rotary == "fused" and (lacking := rotary_lacks(torch.device("cuda" if torch.cuda.is_available() else "cpu"), model.head_dim)):
        raise MachineError(f"rotary backend 'fused' cannot run here: {lacking}")
    parts = parts_of(transformer)
    if dispatcher == "deepep":
        deepep.require()
    config = megatron_config(
        model,
        shape,
        dtype=dtype,
        attention=attention,
        recompute=recompute,
        experts=experts,
        rotary=rotary,
        dispatcher=dispatcher,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layers = shape.layers_of_stages(model.num_hidden_layers)[groups.pp.rank()]
    built = kind(config, layer_spec(parts), parts.norm, model.vocab_size, groups, layers)
    for parameter in built.parameters():  # torch's norm is float32 whatever the config says; a checkpoint has one dtype
        parameter.data = parameter.data.to(dtype)
    break_model(built, fault)
    # Megatron allocates router weights on the host everywhere and moves them in the first forward pass, too late for DDP's buffers.
    return built.cuda() if torch.cuda.is_available() else built


def check_layout(model: ModelConfig, shape: ParallelShape) -> None:
    """Raise ConfigError, with the sizes that would work, when the ranks cannot divide the model evenly."""
    divided = {
        "tensor": ("num_attention_heads", "num_key_value_heads", "vocab_size"),
        "expert": ("num_local_experts",),
    }
    for axis, fields in divided.items():
        size = getattr(shape, axis)
        for name in fields:
            if getattr(model, name) % size:
                working = [n for n in range(1, 1025) if all(getattr(model, f) % n == 0 for f in fields)]
                raise ConfigError(
                    f"parallel.{axis} = {size} does not divide model.{name} = {getattr(model, name)}. "
                    f"Working sizes: {', '.join(map(str, working))}."
                )
    if shape.pipeline > model.num_hidden_layers:
        raise ConfigError(
            f"parallel.pipeline = {shape.pipeline} is more than model.num_hidden_layers = {model.num_hidden_layers}; "
            f"each stage needs a layer. Working sizes: 1 to {model.num_hidden_layers}."
        )
    try:
        shape.layers_of_stages(model.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def freeze(model: GptOssModel, diagnose: DiagnoseConfig) -> None:
    """What [diagnose] freezes is no longer trained. Before DDP and the optimizer, which take up what is trained. The norm before the
    experts and their router belongs to neither."""
    for layer in model.decoder.layers:
        mlp: Any = layer.mlp
        parts = [
            (diagnose.freeze_attention, layer.input_layernorm),
            (diagnose.freeze_attention, layer.self_attention),
            (diagnose.freeze_experts, mlp.experts),
            (diagnose.freeze_router, mlp.router),
        ]
        for is_frozen, part in parts:
            if is_frozen:
                part.requires_grad_(False)  # pyright: ignore[reportCallIssue]


def megatron_config(
    model: ModelConfig,
    shape: ParallelShape,
    *,
    dtype: torch.dtype,
    attention: AttentionOptions = AttentionOptions(),
    recompute: str = "none",
    experts: str = "loop",
    rotary: str = "reference",
    dispatcher: str = "alltoall",
) -> GptOssMegatronConfig:
    """GPT-OSS in Megatron's words. A new TransformerConfig field matters only if it is set here."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {recompute!r}; one of {', '.join(RECOMPUTE)}")
    if rotary not in ROTARY:
        raise ValueError(f"unknown rotary backend {rotary!r}; one of {', '.join(ROTARY)}")
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"unknown dispatcher {dispatcher!r}; one of {', '.join(DISPATCHERS)}")
    config = GptOssMegatronConfig(
        # sizes
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        moe_ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        # norms and biases; add_bias_linear puts one on qkv, proj, fc1, fc2 AND the router
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        add_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # attention
        softmax_type="learnable",
        window_size=(model.sliding_window - 1, 0),  # Megatron counts the keys before the token, Hugging Face counts the token too
        window_attn_skip_freq=2,  # every second layer sees everything; Megatron counts layers from 1, so the first is windowed
        rotary_base=model.rope_theta,
        yarn_rotary_scaling_factor=model.rope_factor,
        yarn_original_max_position_embeddings=model.rope_original_max_position,
        yarn_beta_fast=model.rope_beta_fast,
        yarn_beta_slow=model.rope_beta_slow,
        # clamped SwiGLU: x * sigmoid(1.702 x) of the gate, times (linear + 1)
        gated_linear_unit=True,
        activation_func=quick_gelu,
        glu_linear_offset=1.0,
        activation_func_clamp_value=model.swiglu_limit,
        bias_activation_fusion=False,  # our experts do it themselves; Megatron's fused form clamps before it adds the bias
        bias_dropout_fusion=False,
        # router: softmax over the chosen experts' logits, in fp32, no balancing loss
        num_moe_experts=model.num_local_experts,
        moe_router_topk=model.num_experts_per_tok,
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        # ranks
        tensor_model_parallel_size=shape.tensor,
        sequence_parallel=shape.tensor > 1,  # Megatron trains experts under tensor parallelism in no other way
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        expert_tensor_parallel_size=1,
        variable_seq_lengths=True,  # a packed microbatch has as many tokens as it has; stages tell each other
        # memory
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        recompute_modules=["moe"] if recompute == "selective" else None,
        # numbers
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Megatron marks its parameters as divided or not only while it initialises them, so it must think that it does.
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        gradient_accumulation_fusion=False,
        # the loss is a sum over tokens, which the trainer has divided by the number of tokens of all ranks
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finish_gradients,
        sink_attention=attention,
        expert_backend=experts,
        rotary_backend=rotary,
        dispatcher=dispatcher,
    )
    # Set after Megatron's own checks, which allow uneven stages only in forms of its own. Nobody reads it but optional features.
    config.pipeline_model_parallel_size = shape.pipeline
    config.deallocate_pipeline_outputs = shape.pipeline > 1
    return config


def layer_spec(parts: Parts) -> ModuleSpec:
    """One GPT-OSS layer: Megatron's, with these norms and matrices, our attention and our experts."""
    attention = SelfAttentionSubmodules(
        linear_qkv=parts.column,
        core_attention=SinkAttention,  # pyright: ignore[reportArgumentType]
        linear_proj=parts.row,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=parts.norm,
        self_attention=ModuleSpec(module=RotatedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        pre_mlp_layernorm=parts.norm,
        mlp=moe_spec(),
        mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        # The local GPTModel's checkpoint keys. TransformerEngine's GPTModel writes pre_mlp_layernorm under its own name: that one key
        # must be renamed when such a checkpoint is read.
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _leave_uninitialised(tensor: Any) -> Any:
    return tensor


def _finish_gradients(model: list[Any], num_tokens: Any = None, **others: Any) -> None:
    """Megatron's reductions over ranks, without its division by num_tokens: that reads and writes all gradients once more, 83 ms for 20
    billion in bfloat16 on an H200, for a factor that the loss can have for nothing."""
    finalize_model_grads(model, None, **others)
