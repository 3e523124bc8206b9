"""What DeepEP's Buffer promises, over a gloo all-to-all: a stand-in for the package `deep_ep` on hosts without a GPU.

It has the names that Megatron-Core's fused_a2a.py calls, takes the arguments that are documented (deep_ep/buffer.py of 1.2) and no others,
and refuses inputs that the real one refuses, but for one: it takes float32 tokens too, so that a model can be compared exactly. It shows
that the calls fit together; it says nothing about DeepEP's kernels, streams or speed.

Shape legend: T tokens of this rank, R tokens that arrive, K experts per token, P ranks, E experts of all ranks, L of a rank, C hidden size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

calls: dict[str, int] = {}


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        pass


@dataclass(frozen=True)
class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class Handle:
    """Of one dispatch: which ranks each token went to, and how many tokens went to and came from each rank."""

    goes_TP: Tensor
    sent: list[int]
    arrived: list[int]


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        """(tokens for each rank, None within a node, rows for each expert, which token goes to which rank, event)."""
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        P = self.group.size()
        goes_TP = torch.zeros(topk_idx.shape[0], P, dtype=torch.bool).scatter_(1, topk_idx // (num_experts // P), True)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return goes_TP.sum(0).int(), None, per_expert, goes_TP, EventOverlap()

    def dispatch(
        self, x: Tensor, handle: Handle | None = None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        """(tokens [R, C] by source rank, their experts here or -1 [R, K], weights [R, K], rows of each local expert, handle, event); with a
        handle of before only the tokens."""
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert x.is_contiguous()
        assert x.dtype in (torch.bfloat16, torch.float32)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            calls["dispatch again"] = calls.get("dispatch again", 0) + 1
            return self._send(x, handle), None, None, None, None, EventOverlap()
        calls["dispatch"] = calls.get("dispatch", 0) + 1
        assert topk_weights.dtype == torch.float32
        sent = num_tokens_per_rank.tolist()
        arrived = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(arrived, num_tokens_per_rank, group=self.group)
        handle = Handle(is_token_in_rank, sent, arrived.tolist())
        expert_RK = self._send(topk_idx, handle)
        L = num_tokens_per_expert.shape[0] // self.group.size()
        here_RK = expert_RK // L == self.group.rank()
        weight_RK = self._send(topk_weights, handle).where(here_RK, 0.0)
        expert_RK = (expert_RK - L * self.group.rank()).where(here_RK, -1)
        rows = torch.bincount(expert_RK[here_RK], minlength=L).tolist()
        return self._send(x, handle), expert_RK, weight_RK, rows, handle, EventOverlap()

    def combine(self, x: Tensor, handle: Handle, topk_weights=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        """(sums [T, C] of what the ranks made of each token, in the order of ranks, the same of its weights [T, K], event)."""
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert x.is_contiguous()
        calls["combine"] = calls.get("combine", 0) + 1
        weights = None if topk_weights is None else self._return(topk_weights, handle)
        return self._return(x, handle), weights, EventOverlap()

    def _send(self, x: Tensor, handle: Handle) -> Tensor:
        leaving = torch.cat([x[goes_T] for goes_T in handle.goes_TP.unbind(1)])
        arriving = x.new_empty(sum(handle.arrived), x.shape[1])
        dist.all_to_all_single(arriving, leaving, handle.arrived, handle.sent, group=self.group)
        return arriving

    def _return(self, x: Tensor, handle: Handle) -> Tensor:
        assert x.shape[0] == sum(handle.arrived)
        back = x.new_empty(sum(handle.sent), x.shape[1])
        dist.all_to_all_single(back, x, handle.sent, handle.arrived, group=self.group)
        total = torch.zeros(handle.goes_TP.shape[0], x.shape[1])
        for goes_T, part in zip(handle.goes_TP.unbind(1), back.split(handle.sent), strict=True):
            total[goes_T] += part
        return total.to(x.dtype)


def _check_events(previous_event, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    assert not allocate_on_comm_stream or (previous_event is not None and async_finish), "DeepEP asserts it"


def install() -> None:
    """As `deep_ep` in this process; before megatron.core.transformer.moe.fused_a2a is imported."""
    assert "megatron.core.transformer.moe.fused_a2a" not in sys.modules, "too late: Megatron has looked for deep_ep already"
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, utils.EventHandle, utils.EventOverlap = Buffer, EventHandle, EventOverlap  # type: ignore[attr-defined]
    package.utils = utils  # type: ignore[attr-defined]
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
