"""The critic on one rank: values before each trained token, and updates towards what they should have been.

In: the policy's module to begin from, and the same microbatches as the policy's trainer gets. Out: values, or an updated critic with what
was measured, the same on all ranks. It has its own weights, gradients, optimizer and schedule, and shares ranks and process groups with the
policy. It makes no advantages (rl/advantages.py), and learns nothing from a batch without targets.

Legend: N predicted tokens of a microbatch, M of them on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, OptimizerFields, RlConfig, TrainerConfig
from megatron_gptoss.model.build import attention_options, build_model
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.model.value import GptOssValueModel, ValueHead
from megatron_gptoss.parallel.context import LocalBatch
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.aggregate import token_scale
from megatron_gptoss.rl.value_loss import value_loss
from megatron_gptoss.trainer.passes import Minibatch, TrainedModel
from megatron_gptoss.types import CriticStats

# What an update adds up over its tokens and ranks.
LOSS, CLIPPED = range(2)
WEIGHT, TAUGHT = range(2)


class Critic(TrainedModel):
    """All ranks call the same methods in the same order. The value head is zero at first: every value is 0, as good as none."""

    def __init__(
        self,
        policy: GptOssModel,
        model: ModelConfig,
        trainer: TrainerConfig,
        shape: ParallelShape,
        optimizer: OptimizerFields,
        *,
        total_updates: int,
        diagnose: DiagnoseConfig = DiagnoseConfig(),
    ) -> None:
        module = build_model(
            model,
            shape,
            dtype=getattr(torch, trainer.dtype),
            attention=attention_options(trainer, diagnose),
            recompute=trainer.recompute,
            experts=trainer.experts,
            rotary=trainer.rotary,
            dispatcher=trainer.dispatcher,
            transformer=trainer.transformer,
            kind=GptOssValueModel,
        )
        super().__init__(module, trainer, shape, optimizer, total_updates=total_updates)
        self.begin_from(policy)

    @torch.no_grad()
    def begin_from(self, policy: GptOssModel) -> None:
        """Take the policy's weights of now, all but its output layer's. Ranks are divided alike, so nothing is sent."""
        theirs = dict(policy.named_parameters())
        for name, parameter in self.module.named_parameters():
            if not name.startswith("value_head."):
                parameter.copy_(theirs[name])
        self.weights_changed()

    def _forward(self, batch: LocalBatch, temperature: float, model: torch.nn.Module) -> Tensor:
        """[1, M]: the value before each predicted token, from the position it is predicted at. On a pipeline stage that is not the last,
        hidden states."""

        def head(hidden: Tensor, value_head: ValueHead) -> Tensor:
            return value_head(hidden.reshape(-1, hidden.shape[-1])[batch.predict_M])[None]

        return self._run(batch, model, head)  # pyright: ignore[reportArgumentType]

    def values(self, batches: Minibatch) -> list[Tensor]:
        """float32 [N] for each microbatch, whole on every rank, on the CPU."""
        return [found[0].contiguous() for found in self._whole(batches, 1.0, 1)]

    def update(self, minibatches: Sequence[Minibatch], rl: RlConfig) -> CriticStats:
        """One optimizer update per minibatch and epoch of its own; none for a minibatch that teaches nothing. The microbatches carry
        values from before the step, and targets."""
        first, every = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)  # loss and tokens; clipped and tokens
        norms: list[float] = []
        stepped, problem = True, ""
        for epoch, minibatch in ((e, m) for e in range(rl.critic_epochs) for m in minibatches):
            weights, found = self._accumulate(minibatch, rl)
            if not weights[TAUGHT]:
                continue  # the gradient is 0, but moments and decay would move the weights
            norm, stepped = self._step(found)
            if epoch == 0:
                first += torch.stack([found[LOSS] * weights[TAUGHT], weights[TAUGHT]]).cpu()
            every += torch.stack([found[CLIPPED], weights[TAUGHT]]).cpu()
            norms.append(norm)
            if not stepped:
                problem = f"the critic's loss is {float(found[LOSS])} and the norm of its gradient {norm}"
                break
        self._count_skips(stepped, problem)
        return CriticStats(
            loss=float(first[0] / first[1].clamp(min=1.0)),
            clip_fraction=float(every[0] / every[1].clamp(min=1.0)),
            grad_norm=sum(norms) / max(len(norms), 1),
            learning_rate=self.learning_rate,
            num_updates=len(norms) - (not stepped),
            skipped=not stepped,
            problem=problem,
        )

    def _accumulate(self, minibatch: Minibatch, rl: RlConfig) -> tuple[Tensor, Tensor]:
        """Forward and backward over the microbatches: gradients of sum c l / sum c over the tokens that teach something, on all ranks, with
        the factors c of rl.aggregation. Returns, the same on all ranks, (sum of c, tokens) and (that loss, clipped tokens)."""
        tokens = [self._tokens(batch) for batch in minibatch]
        totals = self._totals(tokens)
        local = [self._local(batch) for batch in minibatch]
        scales = [
            self._scale(batch, token_scale(rl.aggregation, of, totals, length=rl.aggregation_length))
            for batch, of in zip(local, tokens, strict=True)
        ]
        weights = torch.stack([torch.stack([scale_M.sum(), (scale_M > 0).sum().double()]) for scale_M in scales]).sum(0)
        self._over_data(weights)
        found = torch.zeros(2, dtype=torch.float64, device=self.device)

        def add(j: int, batch: LocalBatch, value_1M: Tensor) -> Tensor:
            assert batch.value_M is not None and batch.value_target_M is not None
            each = value_loss(value_1M[0], batch.value_M, batch.value_target_M, clip=rl.value_clip)
            loss = (scales[j].to(each.loss_N.dtype) * each.loss_N).sum() / weights[WEIGHT].clamp(min=1e-12).to(each.loss_N.dtype)
            found[LOSS] += loss.detach().double()
            found[CLIPPED] += each.clipped_N.sum()
            return loss

        self._no_gradients()
        self._passes(minibatch, 1.0, add, backward=True)
        self._over_data(found)
        self._over_stages(found)
        return weights, found

    @staticmethod
    def _scale(batch: LocalBatch, scale_M: Tensor | None) -> Tensor:
        """float64 [M]: what a token weighs, 0 where it teaches nothing."""
        if batch.value_target_M is None:
            raise ValueError("the critic learns from targets, and a microbatch has none")
        taught_M = (~batch.value_target_M.isnan()).double()
        return taught_M if scale_M is None else taught_M * scale_M
