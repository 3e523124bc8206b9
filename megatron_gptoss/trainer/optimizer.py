"""The Megatron-Core optimizer of one training world, its learning-rate schedule, and a step that refuses values that are not finite.

In: a model wrapped for data parallelism. Out: updated parameters. It does not compute losses. Where the optimizer's states lie and how
they are rounded, when that is not on the device and in float32, is adamw.py's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import megatron.core.optimizer as megatron_optimizers
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_gptoss.config.schema import OptimizerFields
from megatron_gptoss.trainer.adamw import PlannedAdamW


def make_optimizer(
    fields: OptimizerFields,
    model: DistributedDataParallel,
    *,
    dtype: torch.dtype,
    moments: torch.dtype = torch.float32,
    host_share: float = 0.0,
) -> ChainedOptimizer:
    """AdamW over dense and expert parameters (two chained optimizers), moments sharded over data-parallel ranks.

    On a GPU it is ours, which needs no second copy of anything; on a CPU with float32 moments torch's.
    """
    _take_torchs_adamw()
    config = OptimizerConfig(
        optimizer="adam",
        lr=fields.lr,
        min_lr=fields.lr * fields.min_lr_ratio,
        adam_beta1=fields.beta1,
        adam_beta2=fields.beta2,
        weight_decay=fields.weight_decay,
        clip_grad=fields.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
    planned = moments != torch.float32 or host_share > 0.0 or next(model.parameters()).is_cuda
    if planned:
        # What Megatron calls a precision-aware optimizer: the inner one owns the float32 originals, is given gradients as `decoupled_grad`
        # (views of DDP's buffer) and writes the weights. `use_precision_aware_optimizer` itself asks for TransformerEngine's FusedAdam.
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    if not planned:
        return optimizer
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # a rank whose parameters are all frozen has none
            part.optimizer = PlannedAdamW(part.optimizer.param_groups, moments=moments, host_share=host_share)
    return PlannedOptimizer(optimizer.chained_optimizers)


def _take_torchs_adamw() -> None:
    """Megatron-Core 0.19.2 takes TransformerEngine's or Apex's FusedAdam wherever one can be imported, so that installing a package would
    change the numbers, and with TransformerEngine 2.20.2's a run cannot be saved: its state_dict does not know the `step` that Megatron
    puts into the state (KeyError, seen on an H200)."""
    megatron_optimizers.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False


class PlannedOptimizer(ChainedOptimizer):
    """Megatron leaves the originals of a precision-aware optimizer alone when weights are written from outside; ours are told."""

    def reload_model_params(self, state_dict: None = None) -> None:
        assert state_dict is None
        for part in self.chained_optimizers:
            if isinstance(part.optimizer, PlannedAdamW):
                part.optimizer.take_weights()


def make_schedule(fields: OptimizerFields, optimizer: ChainedOptimizer, *, total_updates: int) -> OptimizerParamScheduler:
    """Linear warm-up, then decay to `min_lr_ratio` at the last update.

    Update k (from 1) uses the schedule's value at k: the scheduler is advanced before each update, so the first is not made at rate 0.
    """
    warmup = min(fields.warmup_steps, max(total_updates - 1, 0))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=fields.lr,
        min_lr=fields.lr * fields.min_lr_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_updates, warmup + 1),
        lr_decay_style=fields.decay,
        start_wd=fields.weight_decay,
        end_wd=fields.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run takes only the count of updates from its checkpoint; rates and lengths are those of the configuration in force.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


@dataclass(frozen=True)
class StepResult:
    grad_norm: float  # before clipping; may be nan or inf
    stepped: bool


def guarded_step(optimizer: ChainedOptimizer) -> StepResult:
    """Clip and step, unless the gradient norm is not finite: then nothing changes.

    Megatron's own `step()` checks for infinities only under fp16 loss scaling; in fp32 and bf16 a nan would go straight into the weights.
    The norm is reduced over all ranks, so all ranks decide alike.
    """
    found_inf = optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    norm = float(norm) if norm is not None else 0.0
    if found_inf or not math.isfinite(norm):
        return StepResult(norm, stepped=False)
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(list(parameters), part.config.clip_grad, norm, use_decoupled_grad=decoupled)
    return StepResult(norm, stepped=bool(optimizer.step_with_ready_grads()))
