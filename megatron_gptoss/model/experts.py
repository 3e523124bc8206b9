"""The mixture-of-experts layer: Megatron's router, token dispatcher and SequentialMLP, with two of its bugs worked around.

In: nothing. Out: `moe_spec()`, what a layer spec names as its mlp. Experts run one after another; grouped matrix products are later work.

Seen in megatron-core 0.19.2 (tests/unit/test_model_megatron_bugs.py fails when one of them is mended):
1. Without expert or tensor parallelism, training an expert with biases raises "Output 0 of _ReduceFromModelParallelRegionBackward is a
   view and is being modified inplace": MLP.forward adds the bias in place to what RowParallelLinear's reduction returned, which is a view.
2. RowParallelLinear marks an expert's bias as sequence-parallel, so that with tensor parallelism finalize_model_grads sums the bias
   gradients of *different* experts.
A third, bias_activation_fusion clamping before it adds the bias, is avoided by leaving that fusion off (build.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules


class ExpertDownProjection(RowParallelLinear):
    """An expert's second matrix, without the two bugs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bug 1. The flag leaves the reduction to the token dispatcher, where Megatron does it for experts anyway.
        self.explicit_expert_comm = True
        # Bug 2. An expert's bias is whole on its rank and belongs to it alone.
        if self.bias is not None:
            self.bias.sequence_parallel = False  # type: ignore[attr-defined]


class Experts(SequentialMLP):
    """The local experts, always in the experts' optimizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron builds two optimizers (dense, experts) when experts are divided and one when they are not, and a checkpoint of one kind
        # does not load into the other. allreduce=False marks expert parameters; set always, there are always two.
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


def moe_spec() -> Any:
    """Builder of one MoE layer, for TransformerLayerSubmodules.mlp."""
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertDownProjection)  # pyright: ignore[reportArgumentType]
    return partial(MoELayer, submodules=MoESubmodules(experts=partial(Experts, submodules=matrices)))  # pyright: ignore[reportArgumentType]
