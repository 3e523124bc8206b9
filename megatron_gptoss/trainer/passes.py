"""What every trained model of a rank can do, whatever it predicts: passes through Megatron's schedules, counts over ranks, a guarded step.

In: a module built for this rank, and microbatches of this data-parallel rank. Out: what the last pipeline stage's head said of the
predicted tokens, gradients, updated weights. It knows no loss; `step.py` has the policy's and `critic.py` the critic's.

A microbatch becomes a rank's part of it, padded to what context- and tensor-parallel ranks can divide, on its way to the device
(parallel/context.py).

Legend: N predicted tokens of a microbatch, M of them on this context-parallel rank.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_gptoss.checkpoint.training_state import random_state
from megatron_gptoss.config.schema import OptimizerFields, TrainerConfig
from megatron_gptoss.errors import TrainerFailed
from megatron_gptoss.model.gpt_oss import GptOssModel, Head, packed_params
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.parallel.context import LocalBatch, take_shard
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.aggregate import UpdateTotals, count
from megatron_gptoss.rl.tokens import Tokens, tokens_of
from megatron_gptoss.trainer.optimizer import guarded_step, make_optimizer, make_schedule
from megatron_gptoss.types import MicroBatch

Record = TypeVar("Record")  # a dataclass with tensors
Minibatch = Sequence[MicroBatch]  # this rank's microbatches of one optimizer update
Around = Callable[[int], AbstractContextManager[None]]  # index of a microbatch -> a context for its forward pass


class TrainedModel:
    """Module, optimizer and schedule of one rank. All ranks call the same methods in the same order."""

    def __init__(
        self, module: GptOssModel, trainer: TrainerConfig, shape: ParallelShape, optimizer: OptimizerFields, *, total_updates: int
    ) -> None:
        self.module, self.config, self.shape = module, trainer, shape
        self.dtype = getattr(torch, trainer.dtype)
        self.groups = module.pg_collection
        wrapped = Float16Module(module.config, module) if self.dtype == torch.bfloat16 else module
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False)
        self.model = DistributedDataParallel(module.config, ddp, wrapped)
        self.optimizer = make_optimizer(
            optimizer,
            self.model,
            dtype=self.dtype,
            moments=getattr(torch, trainer.optimizer_states),
            host_share=trainer.optimizer_offload,
        )
        self.schedule = make_schedule(optimizer, self.optimizer, total_updates=total_updates)
        self.device = next(module.parameters()).device
        self.skipped_in_a_row = 0

    # -- weights -------------------------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, str]:
        """sha256 of weights, moments, schedule and random states of this rank: equal digests mean equal bits."""
        parts: dict[str, object] = {
            "weights": {name: p.detach() for name, p in self.module.named_parameters()},
            "moments": [
                [dict(sorted(state.items())) for state in part.optimizer.state.values()] for part in self.optimizer.chained_optimizers
            ],
            "schedule": self.schedule.state_dict(),
            "random": random_state(self.module),
        }
        digests = {}
        for name, value in parts.items():
            buffer = io.BytesIO()
            torch.save(_plain(value), buffer)
            digests[name] = hashlib.sha256(buffer.getvalue()).hexdigest()
        return digests

    def weights_changed(self) -> None:
        """Call after the module's parameters were written from outside: the optimizer takes its master weights from them."""
        self.optimizer.reload_model_params()

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # -- passes --------------------------------------------------------------------------------------------------------------------------

    def _passes(
        self,
        minibatch: Minibatch,
        temperature: float,
        use: Callable[[int, LocalBatch, Tensor], Tensor],
        *,
        backward: bool,
        around: Around | None = None,
    ) -> None:
        """Megatron's schedule over the microbatches, forward and perhaps backward; gradients are added up over microbatches and ranks.

        On the last pipeline stage `use(j, local, scores)` gets what `_forward` says of microbatch j and returns this rank's part of the
        loss. On every stage `around(j)` is a context around the forward pass of microbatch j.
        """

        # All of them first: bringing one to the device waits until it has done what it was given before.
        parts = [self._local(batch) for batch in minibatch]

        def forward_step(todo: Iterator[int], model: torch.nn.Module):
            j = next(todo)
            local = parts[j]

            def loss(scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                # Filled there: a number brought to the device would be waited for.
                return use(j, local, scores), torch.full((), local.target_M.numel(), dtype=torch.int, device=self.device), {}

            with around(j) if around is not None else nullcontext(), SPANS("forward"):
                return self._forward(local, temperature, model), loss

        with SPANS("forward, loss and backward" if backward else "scores"):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(range(len(minibatch))),
                model=[self.model],
                num_microbatches=len(minibatch),
                seq_length=0,  # stages tell each other the shapes
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _forward(self, batch: LocalBatch, temperature: float, model: torch.nn.Module) -> Tensor:
        """What is said of the predicted tokens, M on the last axis. On a pipeline stage that is not the last, hidden states."""
        raise NotImplementedError

    def _run(self, batch: LocalBatch, model: torch.nn.Module, head: Head) -> Tensor:
        return model(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            attention_mask=None,
            packed_seq_params=packed_params(batch.cu_seqlens, batch.max_seqlen),
            head=head,
        )

    @torch.no_grad()
    def _whole(self, batches: Minibatch, temperature: float, rows: int, around: Around | None = None) -> list[Tensor]:
        """float32 [rows, N] for each microbatch: what `_forward` says, without gradients, whole on every rank, on the CPU.

        In training mode as in an update: the same code path gives the same bits.
        """
        if not batches:
            return []
        found = [torch.zeros(rows, b.target_N.numel(), device=self.device) for b in batches]

        def keep(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            found[j][:, local.mine_M] = scores
            return scores.sum()

        self._passes(batches, temperature, keep, backward=False, around=around)
        return self._over_shards(found)

    def _over_shards(self, found: Sequence[Tensor]) -> list[Tensor]:
        """[..., N] for each microbatch, on the CPU, from what each rank knows of its tokens. Each token is known on one rank of the
        context- and pipeline-parallel groups; the others hold zeros."""
        everything = torch.cat(list(found), dim=-1)
        for group in (self.groups.cp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(everything, group=group)
        return list(everything.cpu().split([each.shape[-1] for each in found], dim=-1))

    def _local(self, batch: MicroBatch) -> LocalBatch:
        """This rank's part of a microbatch, on its device."""
        return self._here(self._shard(batch))

    def _shard(self, batch: MicroBatch) -> LocalBatch:
        cp = self.groups.cp
        return take_shard(batch, rank=cp.rank(), ranks=cp.size(), multiple=self.shape.padding_multiple)

    def _here(self, record: Record) -> Record:
        """A record of tensors on this rank's device."""
        named: Any = record
        moved = {f.name: v.to(self.device) for f in fields(named) if isinstance(v := getattr(record, f.name), Tensor)}
        return replace(named, **moved)

    # -- counts --------------------------------------------------------------------------------------------------------------------------

    def _tokens(self, batch: MicroBatch) -> Tokens:
        """Which trained tokens this rank has, and how they add up over a sequence that several ranks share."""
        cp = self.groups.cp

        def across(x: Tensor) -> Tensor:
            if cp.size() > 1:
                dist.all_reduce(x, group=cp)
            return x

        return tokens_of(batch, self._shard(batch).mine_M).to(self.device, across)

    def _totals(self, tokens: Sequence[Tokens]) -> UpdateTotals:
        """Tokens and sequences of a minibatch, over all ranks."""
        sums = count(tokens).to(self.device)
        self._over_data(sums)
        return UpdateTotals(*sums.tolist())

    def _over_data(self, sums: Tensor) -> None:
        """Add up what each rank knows of its own tokens."""
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)

    def _over_stages(self, sums: Tensor) -> None:
        """Add up what only the last pipeline stage knows; the others hold zeros."""
        if self.groups.pp.size() > 1:
            dist.all_reduce(sums, group=self.groups.pp)

    # -- step ----------------------------------------------------------------------------------------------------------------------------

    def give_gradients_back(self) -> None:
        """Their memory, until the next update. They are of no use between updates."""
        on_gpu = self.device.type == "cuda"
        self.model.offload_grad_buffers(synchronize=on_gpu, empty_cache=on_gpu)

    def _no_gradients(self) -> None:
        self.model.restore_grad_buffers(synchronize=False)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _step(self, sums: Tensor) -> tuple[float, bool]:
        """The optimizer step, unless `sums`, the same on all ranks, or the gradient norm are not finite. Norm before clipping; stepped."""
        if not bool(torch.isfinite(sums).all()):
            return float("nan"), False
        self.schedule.step(increment=1)
        with SPANS("optimizer"):
            result = guarded_step(self.optimizer)
        if not result.stepped:
            self.schedule.step(increment=-1)  # an update that was not made does not count
        return result.grad_norm, result.stepped

    def _count_skips(self, stepped: bool, problem: str) -> None:
        self.skipped_in_a_row = 0 if stepped else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise TrainerFailed(
                f"{self.skipped_in_a_row} updates in a row were skipped because values were not finite "
                f"(trainer.max_skipped_updates = {self.config.max_skipped_updates}). The last one: {problem}"
            )


def _plain(value: object) -> object:
    """Tensors as bytes, containers as lists, so that equal values serialise equally whatever holds them."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), data]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes()]
    if isinstance(value, dict):
        return [[str(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return repr(value)
