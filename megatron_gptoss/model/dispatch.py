"""Megatron's all-to-all token dispatcher with another permutation, and the MoE layer that uses it.

In: hidden states, router weights and the boolean map of who goes where. Out: rows sorted by expert for the experts module, and the sum of
each token's rows afterwards. What travels between expert-parallel ranks, and how, stays Megatron's.

Megatron-Core 0.19.2 puts rows back with scatter_add_ into zeros, and the gradient of its gather is index_add_: on a GPU atomic additions in
bfloat16, whose order and so whose bits change from run to run. rows.py has both in a fixed order. Megatron also sorts the whole [E, T] map
to find the rows, copies all rows, split and concatenated, once before and once after the experts even where one rank has them all, and
waits for the GPU to tell the host how many rows each expert has.

Shape legend: T tokens of this rank, E experts of all ranks, K experts per token, N = T K rows, C hidden size.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_gptoss.model.deepep import DeepEpDispatcher
from megatron_gptoss.model.rows import find_rows, from_experts, to_experts, weight_of_rows


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's, with the permutation above."""

    def __init__(self, *args: Any, backend: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.drop_and_pad or self.config.moe_expert_capacity_factor is not None or self.config.moe_permute_fusion:
            raise ValueError("the dispatcher knows neither dropped nor padded tokens nor moe_permute_fusion")
        if self.tp_size > 1:
            raise ValueError("the dispatcher divides whole experts over ranks, not parts of them")
        self.backend = backend
        self.divided = self.ep_size > 1  # otherwise the rows are where they must be, and in order

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, C] -> rows [N, C] sorted by expert, and their weights [N]."""
        # Not the weights and the map, which Megatron keeps: where backward runs the layer again they would hold its input and that one's
        # gradient until the next forward pass, two tensors [T, C] a layer.
        self.hidden_shape = hidden_states.shape
        self.tokens_per_expert = self.device_counts = self.preprocess(routing_map)
        if self.divided:  # only how much to send must be known on the host
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.rows = find_rows(routing_map, self.config.moe_router_topk)
        x_NC = to_experts(hidden_states.reshape(-1, hidden_states.shape[-1]), self.rows, self.backend)
        return x_NC, weight_of_rows(probs, self.rows)

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        if not self.divided:
            return permutated_local_input_tokens, permuted_probs
        return super().token_dispatch(permutated_local_input_tokens, permuted_probs)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by local expert, how many each has (on the device: only a loop over experts must know it on the host), weights."""
        if self.divided:
            global_input_tokens, _, global_probs = super().dispatch_postprocess(  # pyright: ignore[reportAssignmentType]
                global_input_tokens, global_probs
            )
        counts, self.device_counts, self.tokens_per_expert = self.device_counts, None, None
        return global_input_tokens, counts, global_probs  # pyright: ignore[reportReturnType]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return super().combine_preprocess(hidden_states) if self.divided else hidden_states

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().token_combine(hidden_states, *args, **kwargs) if self.divided else hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        rows, self.rows = self.rows, None
        return from_experts(permutated_local_input_tokens, rows, self.backend).view(self.hidden_shape)  # pyright: ignore[reportArgumentType]


class DispatchingMoELayer(MoELayer):
    """MoELayer with our dispatcher where Megatron would take its own all-to-all one: the one above, or DeepEP's when config.dispatcher says
    "deepep"."""

    def __init__(self, config: Any, *, pg_collection: ProcessGroupCollection, **kwargs: Any) -> None:
        super().__init__(config, pg_collection=pg_collection, **kwargs)
        if config.moe_token_dispatcher_type != "alltoall":
            return
        permutation = self.experts.permutation  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        if getattr(config, "dispatcher", "alltoall") == "deepep":
            self.token_dispatcher = DeepEpDispatcher(self.num_local_experts, config, pg_collection, permutation)
        else:
            self.token_dispatcher = Dispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=pg_collection,
                backend=permutation,
            )
