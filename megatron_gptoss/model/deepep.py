"""Tokens to the ranks of their experts and back with DeepEP, behind the front of dispatch.py's dispatcher.

In: hidden states, router weights and the boolean map of who goes where. Out: rows sorted by local expert for the experts module, and the
sum of each token's rows afterwards. The calls of DeepEP's Buffer and their gradients are Megatron-Core's (fused_a2a.py); what is done with
what arrives is rows.py's.

A token travels once to each rank that has some of its experts, where the all-to-all sends it once for each expert. On the way back each
rank adds the token's rows in the order of their experts in float32 and rounds, and DeepEP adds the ranks' sums, in the order of ranks as we
read its kernels (1.2). So the bits should be the same every time, but they are not the all-to-all's, which rounds once. We have never run
DeepEP itself: docs/parallelism.md.

Shape legend: T tokens of this rank, R tokens that arrive here, E experts (of all ranks before dispatch, of this rank after it), K experts
per token, N rows (one for each expert that a token visits here), C hidden size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_gptoss.errors import MachineError
from megatron_gptoss.model.rows import Rows, find_rows, from_experts, to_experts, weight_of_rows

# As Megatron calls DeepEP by default: on its own stream, which the caller's waits for.
ON_ITS_STREAM: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}


def require() -> None:
    """Raises MachineError when DeepEP is not here."""
    if fused_a2a.HAVE_DEEP_EP:
        return
    reason = "the package deep_ep (DeepEP, built from its source) is not installed"
    if find_spec("deep_ep") is not None:
        reason = "the package deep_ep is installed, but has no Buffer and utils.EventOverlap to import; DeepEP 1.2 has"
    raise MachineError(f'trainer.dispatcher = "deepep" cannot run here: {reason}. Use trainer.dispatcher = "alltoall".')


class DeepEpDispatcher(MoETokenDispatcher):
    """One layer's dispatcher; all layers of a process group share one Buffer."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: ProcessGroupCollection, backend: Any) -> None:
        """`backend` has gather_rows and sum_rows."""
        super().__init__(config=config, pg_collection=pg_collection)
        if self.ep_size == 1 or self.tp_size > 1:
            raise ValueError("DeepEP divides whole experts over two ranks or more")
        self.num_experts, self.num_local_experts, self.backend = config.num_moe_experts, num_local_experts, backend
        self.rows: Rows | None = None
        self.handle: Any = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, C] -> tokens [T, C] and the weights of their experts [T, K], by expert."""
        self.hidden_shape = hidden_states.shape
        K = self.config.moe_router_topk
        # A stable sort leaves experts in order, and the host need not be told how many there are.
        self.expert_TK = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :K].contiguous()
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs.gather(1, self.expert_TK)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[T, C], [T, K] -> [R, C], [R, K]: every token that has an expert here, once. The host waits to hear how many there are."""
        x_RC, self.expert_RK, weight_RK, self.counts, self.handle = fused_a2a.fused_dispatch(  # pyright: ignore[reportOptionalCall]
            hidden_states, self.expert_TK, probs.float(), self.num_experts, self.ep_group, **ON_ITS_STREAM
        )
        return x_RC, weight_RK

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by local expert, how many each has (on the host), weights."""
        (R, K), E = probs.shape, self.num_local_experts
        # An expert of another rank is -1 and goes into one column more, which is cut off.
        column_RK = self.expert_RK.where(self.expert_RK >= 0, E).long()
        map_RE = torch.zeros(R, E + 1, dtype=torch.bool, device=probs.device).scatter_(1, column_RK, True)[:, :E]
        weight_RE = probs.new_zeros(R, E + 1).scatter(1, column_RK, probs)[:, :E]
        self.rows = find_rows(map_RE, min(K, E), N=int(self.counts.sum()))
        return to_experts(hidden_states, self.rows, self.backend), self.counts, weight_of_rows(weight_RE, self.rows)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """[N, C] -> [R, C]."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        return from_experts(hidden_states, rows, self.backend)

    def token_combine(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """[R, C] -> [T, C]."""
        handle, self.handle = self.handle, None
        return fused_a2a.fused_combine(hidden_states, self.ep_group, handle, **ON_ITS_STREAM)[0]  # pyright: ignore[reportOptionalCall]

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self.hidden_shape)
