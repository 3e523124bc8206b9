"""Whose norms and dense matrices a layer is made of: Megatron's local ones or TransformerEngine's. The only place that names the latter.

In: trainer.transformer, "local" or "te". Out: the classes that a layer spec and the final norm take. Attention itself, router and experts
are ours and embedding and output layer Megatron's either way. Parameter names and checkpoint keys do not depend on the choice, so weights
and checkpoints move both ways: TransformerEngine's norm and matrix stay two modules (its LayerNormLinear, which is one kernel less, keeps
the norm's weight under another name), and what its norms add to a state dict is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gptoss.errors import MachineError
from megatron_gptoss.model.layer import Norm

TRANSFORMERS = ("local", "te")


@dataclass(frozen=True)
class Parts:
    norm: Any  # (config=, hidden_size=, eps=) -> module
    column: Any  # divides its outputs over tensor-parallel ranks: linear_qkv
    row: Any  # divides its inputs: linear_proj


def parts_of(transformer: str) -> Parts:
    """Raises MachineError when TransformerEngine cannot be imported."""
    if transformer == "local":
        return Parts(Norm, ColumnParallelLinear, RowParallelLinear)
    if transformer != "te":
        raise ValueError(f"unknown transformer {transformer!r}; one of {', '.join(TRANSFORMERS)}")
    extension = import_module("megatron.core.extensions.transformer_engine")
    if not extension.HAVE_TE:
        raise MachineError(f'trainer.transformer = "te" cannot run here: {_why_not()}. Use trainer.transformer = "local".')
    return Parts(_te_norm, extension.TEColumnParallelLinear, extension.TERowParallelLinear)


def _why_not() -> str:
    """Megatron swallows the reason."""
    try:
        import_module("transformer_engine.pytorch.fp8")
    except ImportError as error:
        return f"TransformerEngine cannot be imported ({error})"
    return "Megatron-Core could not import TransformerEngine"


def _te_norm(config: Any, hidden_size: int, eps: float, **_unused: Any) -> torch.nn.Module:
    norm: Any = import_module("megatron.core.extensions.transformer_engine").TENorm(config, hidden_size, eps)
    return without_extra_state(norm)


def without_extra_state(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its `_extra_state` (fp8 scales, of which a norm has none) neither saved nor asked for. Megatron's local matrices have
    such an entry too, for TransformerEngine's sake; its local norms do not."""

    def leave_out(_module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state.pop(f"{prefix}_extra_state", None)

    def do_not_miss(_module: torch.nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        state.setdefault(f"{prefix}_extra_state", None)  # what set_extra_state takes for nothing

    module.register_state_dict_post_hook(leave_out)
    module.register_load_state_dict_pre_hook(do_not_miss)
    return module
