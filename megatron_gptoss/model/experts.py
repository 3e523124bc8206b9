"""The mixture-of-experts layer: Megatron's MoELayer around our experts and our dispatcher.

In: the configuration's `expert_backend` ("loop" or "grouped"), a router. Out: `moe_spec()`, what a layer spec names as its mlp. How experts
compute is in expert_reference.py and expert_grouped.py, who goes to them is the router's, how they get there is in dispatch.py.

All experts of a rank are four parameters, as Megatron's grouped experts would have them, under one expert's names: `linear_fc1.weight`
[E, 2I, C], `linear_fc1.bias` [E, 2I], `linear_fc2.weight` [E, C, I], `linear_fc2.bias` [E, C]. In distributed checkpoints they are the
entries of Megatron's SequentialMLP and TEGroupedMLP, one tensor over layers and experts, so each loads the others' weights, and any number
of ranks may divide the experts.

Seen in megatron-core 0.19.2, and not met here because its expert matrices are not used (tests/unit/test_model_megatron_bugs.py fails when
one of them is mended):
1. Without expert or tensor parallelism, training an expert with biases raises "Output 0 of _ReduceFromModelParallelRegionBackward is a
   view and is being modified inplace": MLP.forward adds the bias in place to what RowParallelLinear's reduction returned, which is a view.
2. RowParallelLinear marks an expert's bias as sequence-parallel, so that with tensor parallelism finalize_model_grads sums the bias
   gradients of *different* experts.
3. bias_activation_fusion clamps before it adds the bias.

Shape legend: N rows (tokens times experts per token), E experts of this rank, C hidden size, I expert width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from torch import Tensor

from megatron_gptoss.errors import MachineError
from megatron_gptoss.model import expert_grouped, expert_reference
from megatron_gptoss.model.dispatch import DispatchingMoELayer
from megatron_gptoss.model.router import router_spec

BACKENDS = ("loop", "grouped")


class StackedLinear(torch.nn.Module):
    """The matrices and biases of all local experts; computing is not its business."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(experts, outputs, inputs, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.empty(experts, outputs, dtype=dtype, device=device))
        # Megatron builds two optimizers (dense, experts) when experts are divided and one when they are not, and a checkpoint of one kind
        # does not load into the other. allreduce=False marks expert parameters; set always, there are always two.
        # Unmarked are tensor_model_parallel and sequence_parallel: experts are whole on their rank and no other tensor rank's.
        self.weight.allreduce = self.bias.allreduce = False  # type: ignore[attr-defined]


class GroupedExperts(MegatronModule):
    """The local experts, as MoELayer builds and calls them. Parameters are not initialised here."""

    swap_gate_up = False  # wrong on purpose: the gate's half of linear_fc1 is taken for the other (faults.py)

    def __init__(
        self, num_local_experts: int, config: Any, *, pg_collection: ProcessGroupCollection | None = None, name: str | None = None
    ) -> None:
        """Reads `expert_backend` from config ("loop" when it has none). Raises MachineError when that cannot run here."""
        super().__init__(config=config)
        assert pg_collection is not None, "MoELayer hands its process groups on"
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        self.limit = float(config.activation_func_clamp_value)
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        sizes: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.linear_fc1 = StackedLinear(num_local_experts, hidden, 2 * width, **sizes)
        self.linear_fc2 = StackedLinear(num_local_experts, width, hidden, **sizes)

        self.backend = getattr(config, "expert_backend", "loop")
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown expert backend {self.backend!r}; one of {', '.join(BACKENDS)}")
        self.permutation: Any = expert_reference
        if self.backend == "grouped":
            lacking = expert_grouped.missing(device, config.params_dtype, hidden, width)
            if lacking:
                raise MachineError(f"expert backend 'grouped' cannot run here: {lacking}")
            from megatron_gptoss.model import expert_kernels

            self.permutation = expert_kernels

    def forward(self, hidden_NC: Tensor, tokens_per_expert: Tensor, weight_N: Tensor) -> tuple[Tensor, None]:
        """Rows sorted by expert, how many each has (int, anywhere), router weights -> (output [N, C], no bias left to add)."""
        fc1: Any = (self.linear_fc1.weight, self.linear_fc1.bias)
        if self.swap_gate_up:
            fc1 = tuple(x.roll(x.shape[1] // 2, dims=1) for x in fc1)
        parameters: Any = (*fc1, self.linear_fc2.weight, self.linear_fc2.bias, self.limit)
        if self.backend == "loop":
            return expert_reference.experts(hidden_NC, weight_N, tokens_per_expert.tolist(), *parameters), None
        offs_E = tokens_per_expert.cumsum(0).to(hidden_NC.device, torch.int32)
        return expert_grouped.experts(hidden_NC, weight_N, offs_E, *parameters), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """SequentialMLP's entries: one key for all experts of all ranks, the expert axis divided over the expert-parallel ranks."""
        axis = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}",
                parameter,
                *sharded_offsets,
                (axis, self.ep_group.rank(), self.ep_group.size()),
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=axis,
            )
            for name, parameter in self.named_parameters()
        }

    def backward_dw(self) -> None:
        """Megatron's call for weight gradients that were put off; ours never are."""


def moe_spec(*, router: Any = router_spec()) -> Any:
    """Builder of one MoE layer, for TransformerLayerSubmodules.mlp."""
    return partial(DispatchingMoELayer, submodules=MoESubmodules(experts=GroupedExperts, router=router))  # pyright: ignore[reportArgumentType]
