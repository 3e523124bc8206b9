"""GPT-OSS as an own class over Megatron-Core's parts.

In: token ids and positions, packed or batched. Out: logits, or what the caller's `head` makes of the last hidden states; from a pipeline
stage that is not the last, hidden states for the next one. Parameter names (layers counted on their stage) and checkpoint keys are those of
Megatron's GPTModel, so checkpoints are interchangeable; GPTModel itself is deprecated, and its heir HybridModel has no hook for a head and
needs TransformerEngine. Losses and log-probs are the head's business. No inference cache.

Shape legend: T packed tokens (of this context-parallel rank), s sequence, b batch, C hidden size, V vocabulary (of this tensor-parallel
rank), D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.recompute import checkpointed_forward
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_gptoss.model.layer import YarnAngles
from megatron_gptoss.model.rotary import table_of

Head = Callable[[Tensor, Tensor], Any]  # (hidden_TC or [s, b, C], weight_VC) -> what the trainer wants


def packed_params(cu_seqlens: Tensor, max_seqlen: int) -> PackedSeqParams:
    """What Megatron's layers need to know about packed sequences.

    cu_seqlens: int32 [S+1], first 0, last T; under context parallelism that of the whole stream. max_seqlen in tokens.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


class LayerStack(MegatronModule):
    """A contiguous range of transformer layers and the final norm, in place of Megatron's TransformerBlock."""

    def __init__(self, config: Any, layer_spec: Any, norm: Any, groups: ProcessGroupCollection, layers: Sequence[int]) -> None:
        """`layers`: global layer indices from 0; the final norm follows when the last one is among them."""
        super().__init__(config=config)
        self.pg_collection, self.tp_group = groups, groups.tp
        self.layers = torch.nn.ModuleList(
            build_module(  # pyright: ignore[reportArgumentType]
                layer_spec,
                config=config,
                layer_number=index + 1,  # Megatron counts from 1
                add_layer_offset=False,
                pp_layer_offset=layers[0],
                pg_collection=groups,
            )
            for index in layers
        )
        self.num_layers_per_pipeline_rank = len(layers)  # read by checkpointed_forward
        last = layers[-1] == config.num_layers - 1
        self.final_layernorm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon) if last else None

    def forward(self, hidden: Tensor, rotary: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """[s, b, C] (packed: [T, 1, C]) -> the same, after the final norm if it is here. Under sequence parallelism the first axis is this
        tensor-parallel rank's part."""
        if self.config.recompute_granularity == "full" and self.training:
            hidden = checkpointed_forward(  # pyright: ignore[reportAssignmentType]
                self,
                hidden_states=hidden,
                attention_mask=None,  # pyright: ignore[reportArgumentType]
                context=None,
                context_mask=None,
                rotary_pos_emb=rotary,
                attention_bias=None,
                packed_seq_params=packed_seq_params,  # pyright: ignore[reportArgumentType]
                use_inner_quantization_context=False,
            )
        else:
            for layer in self.layers:
                hidden, _ = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed_seq_params)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """TransformerBlock's keys: all layers in one tensor, along a new first axis."""
        state: dict[str, Any] = {}
        for place, layer in enumerate(self.layers):
            own = f"{prefix}layers.{place}."
            offset = (0, layer.layer_number - 1, self.config.num_layers)  # pyright: ignore[reportOperatorIssue]
            tensors = layer.sharded_state_dict(own, [offset], metadata)  # pyright: ignore[reportCallIssue]
            replace_prefix_for_sharding(tensors, own, f"{prefix}layers.")
            state.update(tensors)
        if self.final_layernorm is None:
            return state
        own = f"{prefix}final_layernorm."
        whole = ()  # this tensor is not stacked over layers
        state.update(
            sharded_state_dict_default(self.final_layernorm, own, whole, metadata, tp_group=self.tp_group)  # pyright: ignore[reportArgumentType]
        )
        return state


class GptOssModel(LanguageModule):
    """The layers of one pipeline stage: the first has the embedding, the last the final norm and the output layer.

    Built by build.build_model; parameters are not initialised here.
    """

    head_fault = "none"  # wrong on purpose (faults.py); read by whoever makes the head

    def __init__(
        self, config: Any, layer_spec: Any, norm: Any, vocab_size: int, groups: ProcessGroupCollection, layers: Sequence[int]
    ) -> None:
        """`layers`: global indices, from 0, of this stage's."""
        super().__init__(config=config, pg_collection=groups)
        # Read by Megatron: LanguageModule, finalize_model_grads and the pipeline schedules.
        self.pre_process, self.post_process, self.vp_stage = layers[0] == 0, layers[-1] == config.num_layers - 1, None
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder
        self.stage_input: Tensor | None = None

        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=vocab_size,
                max_sequence_length=config.max_position_embeddings,
                position_embedding_type="none",  # positions enter through RoPE
                tp_group=groups.tp,
            )
        self.rotary_pos_emb = YarnAngles(
            kv_channels=config.kv_channels,
            rotary_base=config.rotary_base,
            scaling_factor=config.yarn_rotary_scaling_factor,
            original_max_position_embeddings=config.yarn_original_max_position_embeddings,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            mscale=config.yarn_mscale,
            mscale_all_dim=config.yarn_mscale_all_dim,
            correction_range_round_to_int=config.yarn_correction_range_round_to_int,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=groups.cp,
        )
        self.decoder = LayerStack(config, layer_spec, norm, groups, layers)
        if self.post_process:
            self._add_head(config, vocab_size)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def _add_head(self, config: Any, vocab_size: int) -> None:
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )

    def set_input_tensor(self, tensor: Any) -> None:
        """The pipeline schedules hand in what the stage before sent, [T, 1, C] (None on the first stage), alone or in a list."""
        self.stage_input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        head: Head | None = None,
    ) -> Any:
        """One forward pass.

        Packed: input_ids and position_ids [1, T], packed_seq_params from `packed_params`; position_ids restart at 0 in every sequence.
        Batched: both [b, s], positions 0 .. s-1 in every row. attention_mask must be None: attention is causal inside each sequence.

        With `head`, returns head(hidden_TC, weight_VC), where hidden (batched: [s, b, C]) comes after the final norm and weight_VC is the
        output layer's. Without, logits [b, s, V] (packed: [1, T, V]). V is this tensor-parallel rank's part, hidden is whole on each of
        them, and the gradient that the head gives for hidden must be this rank's part too: the parts are summed here.

        A pipeline stage that is not the last returns its hidden states, [T, 1, C], and leaves the head to the last.
        """
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
        else:
            assert self.stage_input is not None, "a later pipeline stage runs inside Megatron's schedules, which set its input"
            # Megatron's schedules free the data of what a stage has sent; a view would keep it.
            hidden = make_viewless_tensor(inp=self.stage_input, requires_grad=True, keep_graph=True)
        rotary = self._rotary(position_ids, packed_seq_params)
        hidden = self.decoder(hidden, rotary, packed_seq_params)
        return self._use_head(hidden, packed_seq_params, head) if self.post_process else hidden

    def _use_head(self, hidden: Tensor, packed_seq_params: PackedSeqParams | None, head: Head | None) -> Any:
        if head is not None:
            weight_VC: Any = self.output_layer.weight
            if self.config.sequence_parallel:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
            return head(hidden if packed_seq_params is None else hidden.squeeze(1), weight_VC)
        logits, _ = self.output_layer(hidden)
        return logits.transpose(0, 1).contiguous()

    def _rotary(self, position_ids: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """RoPE angles, [s, 1, 1, D] or one per packed token, [T, 1, 1, D]: SelfAttention takes cosines and applies YaRN's factor. For the
        fused kernel that has been done."""
        if packed_seq_params is None:
            if getattr(self.config, "rotary_backend", "reference") == "fused":
                raise ValueError("the fused rotary kernel takes packed sequences only; give packed_seq_params")
            if self.pg_collection.cp.size() > 1:
                raise ValueError("context parallelism divides packed sequences only; give packed_seq_params")
            angles, _ = self.rotary_pos_emb(position_ids.shape[1])
            return angles
        angles, factor = self.rotary_pos_emb(packed_seq_params.max_seqlen_q)
        if getattr(self.config, "rotary_backend", "reference") == "fused":
            angles = table_of(angles, factor, self.config.params_dtype)
        # One row per token instead of a table: Megatron then rotates the whole pack at once, not sequence by sequence.
        return angles[position_ids[0]]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """GPTModel's entries, for megatron.core.dist_checkpointing."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # pyright: ignore[reportArgumentType]
        state.pop(f"{prefix}output_layer._extra_state", None)  # an fp8 scale that nobody has; GPTModel leaves it out too
        return state
