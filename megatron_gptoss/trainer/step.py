"""One rank of a training world: scores and updates packed microbatches.

In: microbatches of this data-parallel rank, whole, whatever part of them the rank computes. Out: log-probs, or updated weights with what
was measured, the same on all ranks. It knows no Ray, no engine and no task; `worker.py` puts it into an actor.

All passes go through Megatron's schedules, with and without a pipeline. A microbatch becomes a rank's part of it, padded to what context-
and tensor-parallel ranks can divide, on its way to the device (parallel/context.py).

Legend: T packed tokens, N predicted tokens of a microbatch, M of them on this context-parallel rank, V vocabulary, C hidden size.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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
from megatron_gptoss.checkpoint.weight_map import load_hf
from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, OptimizerFields, TrainerConfig
from megatron_gptoss.errors import TrainerFailed
from megatron_gptoss.logprob.api import selected_logprob
from megatron_gptoss.model.build import attention_options, build_model, freeze_attention
from megatron_gptoss.model.gpt_oss import packed_params
from megatron_gptoss.parallel.context import LocalBatch, take_shard
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.aggregate import UpdateTotals, count
from megatron_gptoss.rl.correction import correct, mean_weight, weight_sums
from megatron_gptoss.rl.diagnostics import Totals, mismatch_measures, require_on_policy, too_many_unusable
from megatron_gptoss.rl.losses import nll_loss
from megatron_gptoss.rl.objective import correction_recipe, objective, usable
from megatron_gptoss.rl.tokens import Tokens, tokens_of
from megatron_gptoss.rl.worst import worst_of, worst_rows, worst_tokens
from megatron_gptoss.trainer.how import TokenScores, Update
from megatron_gptoss.trainer.optimizer import guarded_step, make_optimizer, make_schedule
from megatron_gptoss.types import MicroBatch, StepStats, WorstToken

Record = TypeVar("Record", LocalBatch, TokenScores)
Minibatch = Sequence[MicroBatch]  # this rank's microbatches of one optimizer update


@dataclass
class Known:
    """What is known of a minibatch before its update, and where the pass puts what it measures. Lists: an entry for each microbatch."""

    tokens: list[Tokens]
    totals: UpdateTotals
    old: Sequence[TokenScores] | None  # of the whole microbatch, as `ref`; None: the update is on-policy
    ref: Sequence[TokenScores] | None
    measured: Totals
    worst: list[Tensor] = field(default_factory=list)


class Trainer:
    """Model, optimizer and schedule of one rank. All ranks call the same methods in the same order."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        shape: ParallelShape,
        optimizer: OptimizerFields,
        *,
        total_updates: int,
        fault: str = "none",
        diagnose: DiagnoseConfig = DiagnoseConfig(),
    ) -> None:
        self.model_config = model
        self.config = trainer
        self.shape = shape
        self.dtype = getattr(torch, trainer.dtype)
        self.module = build_model(
            model,
            shape,
            dtype=self.dtype,
            attention=attention_options(trainer, diagnose),
            fault=fault,
            recompute=trainer.recompute,
            experts=trainer.experts,
            rotary=trainer.rotary,
            dispatcher=trainer.dispatcher,
            transformer=trainer.transformer,
        )
        self.groups = self.module.pg_collection
        if diagnose.freeze_attention:
            freeze_attention(self.module)
        wrapped = Float16Module(self.module.config, self.module) if self.dtype == torch.bfloat16 else self.module
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False)
        self.model = DistributedDataParallel(self.module.config, ddp, wrapped)
        self.optimizer = make_optimizer(
            optimizer,
            self.model,
            dtype=self.dtype,
            moments=getattr(torch, trainer.optimizer_states),
            host_share=trainer.optimizer_offload,
        )
        self.schedule = make_schedule(optimizer, self.optimizer, total_updates=total_updates)
        self.device = next(self.module.parameters()).device
        self.reference: list[Tensor] | None = None
        self.skipped_in_a_row = 0

    # -- weights -------------------------------------------------------------------------------------------------------------------------

    def load_hf(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from full Hugging Face tensors, each rank its part. Raises CheckpointError when they do not fit."""
        load_hf(self.module, self.model_config, tensors)

    def fingerprint(self) -> dict[str, str]:
        """sha256 of weights, moments, schedule and random states of this rank: equal digests mean equal bits."""
        parts: dict[str, object] = {
            "weights": {name: p.detach() for name, p in self.module.named_parameters()},
            "moments": [
                [dict(sorted(state.items())) for state in part.optimizer.state.values()] for part in self.optimizer.chained_optimizers
            ],
            "schedule": self.schedule.state_dict(),
            "random": random_state(),
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

    def keep_reference(self) -> None:
        """Keep the weights of now as the reference policy of the KL term."""
        self.reference = [p.detach().clone() for p in self.module.parameters()]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        assert self.reference is not None
        current = [p.detach().clone() for p in self.module.parameters()]
        with torch.no_grad():
            for p, r in zip(self.module.parameters(), self.reference, strict=True):
                p.copy_(r)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, c in zip(self.module.parameters(), current, strict=True):
                    p.copy_(c)

    # -- forward -------------------------------------------------------------------------------------------------------------------------

    def _passes(
        self, minibatch: Minibatch, temperature: float, use: Callable[[int, LocalBatch, Tensor], Tensor], *, backward: bool
    ) -> None:
        """Megatron's schedule over the microbatches, forward and perhaps backward; gradients are added up over microbatches and ranks.

        On the last pipeline stage `use(j, local, scores)` gets the scores [2, M] of microbatch j and returns this rank's part of the loss.
        """

        def forward_step(todo: Iterator[int], model: torch.nn.Module):
            j = next(todo)
            local = self._local(minibatch[j])

            def loss(scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                return use(j, local, scores), torch.tensor(local.target_M.numel(), dtype=torch.int, device=self.device), {}

            return self._forward(local, temperature, model), loss

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
        """[2, M]: log-probs and entropies of the predicted tokens. Only their positions pass through the head. On a pipeline stage that is
        not the last, hidden states."""

        def head(hidden: Tensor, weight_VC: Tensor) -> Tensor:
            hidden_MC = hidden.reshape(-1, hidden.shape[-1])[batch.predict_M]
            both = selected_logprob(
                hidden_MC,
                weight_VC,
                batch.target_M,
                temperature=temperature,
                chunk=self.config.logprob_chunk,
                group=self.groups.tp,
                backend=self.config.logprob,
            )
            return torch.stack(both)

        return model(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            attention_mask=None,
            packed_seq_params=packed_params(batch.cu_seqlens, batch.max_seqlen),
            head=head,
        )

    @torch.no_grad()
    def score(self, batches: Minibatch, *, temperature: float = 1.0, reference: bool = False) -> list[TokenScores]:
        """Log-probs of the trained tokens under the current (or the reference) policy, without gradients, whole on every rank.

        In training mode as in an update: the same code path gives the same bits.
        """
        if reference:
            with self._reference_weights():
                return self.score(batches, temperature=temperature)
        if not batches:
            return []
        found = [torch.zeros(2, b.target_N.numel(), device=self.device) for b in batches]

        def keep(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            found[j][:, local.mine_M] = scores
            return scores.sum()

        self._passes(batches, temperature, keep, backward=False)
        everything = torch.cat(found, dim=1)
        for group in (self.groups.cp, self.groups.pp):  # each token was scored on one rank of both; the others hold zeros
            if group.size() > 1:
                dist.all_reduce(everything, group=group)
        parts = everything.cpu().split([b.target_N.numel() for b in batches], dim=1)
        return [TokenScores(logp_N=part[0].contiguous(), entropy_N=part[1].contiguous()) for part in parts]

    def _local(self, batch: MicroBatch) -> LocalBatch:
        """This rank's part of a microbatch, on its device."""
        cp = self.groups.cp
        return self._here(take_shard(batch, rank=cp.rank(), ranks=cp.size(), multiple=self.shape.padding_multiple))

    def _here(self, record: Record) -> Record:
        """A record of tensors on this rank's device."""
        moved = {f.name: v.to(self.device) for f in fields(record) if isinstance(v := getattr(record, f.name), Tensor)}
        return replace(record, **moved)

    # -- update --------------------------------------------------------------------------------------------------------------------------

    def update(self, minibatches: Sequence[Minibatch], how: Update, old: Sequence[Sequence[TokenScores]] | None = None) -> StepStats:
        """One optimizer update per minibatch and epoch.

        `old` holds the log-probs scored before the first update, in the same packing. None means the update is on-policy: the old log-prob
        is the current one, detached, so the ratio is exactly 1 however the forward pass rounds.
        """
        epochs = how.policy.epochs if how.policy else 1
        on_policy = old is None
        assert not on_policy or how.policy is None or (epochs == 1 and len(minibatches) == 1)
        ref: list[list[TokenScores]] | None = None
        if _needs_reference(how):
            ref = [self.score(m, temperature=how.temperature, reference=True) for m in minibatches]
        first, every = Totals.empty(self.device), Totals.empty(self.device)  # first epoch: the policy that sampled; every: the updates
        norms: list[float] = []
        worst: list[WorstToken] = []
        stepped, problem = True, ""
        for epoch, i in ((e, i) for e in range(epochs) for i in range(len(minibatches))):
            known = self._known(minibatches[i], how, old[i] if old is not None else None, ref[i] if ref is not None else None)
            totals = self._accumulate(minibatches[i], how, known)
            if on_policy and how.policy is not None:
                require_on_policy(totals)
            every.merge(totals)
            if epoch == 0:
                first.merge(totals)
                worst += worst_tokens(known.worst, minibatches[i])
            norm, stepped = self._step(totals)
            norms.append(norm)
            if not stepped:
                problem = self._explain(minibatches[i], how, known)
                break
        self._count_skips(stepped, problem)
        made = len(norms) - (not stepped)
        return self._stats(first, every, worst, grad_norm=sum(norms) / len(norms), num_updates=made, skipped=not stepped, problem=problem)

    @torch.no_grad()
    def measure(self, minibatch: Minibatch, how: Update) -> StepStats:
        """What an update would measure, without making one: for a step whose rollouts have nothing to teach."""
        ref = self.score(minibatch, temperature=how.temperature, reference=True) if _needs_reference(how) else None
        known = self._known(minibatch, how, None, ref)

        def add(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            return self._loss(j, local, scores, how, known)

        if minibatch:
            self._passes(minibatch, how.temperature, add, backward=False)
        self._over_ranks(known.measured)
        self._require_usable(known.measured, how)
        worst = worst_tokens(known.worst, minibatch)
        return self._stats(known.measured, known.measured, worst, grad_norm=0.0, num_updates=0, skipped=False, problem="")

    def _known(self, minibatch: Minibatch, how: Update, old: Sequence[TokenScores] | None, ref: Sequence[TokenScores] | None) -> Known:
        """Count the tokens and sequences of a minibatch over all ranks; with normalised weights, their mean too, from a scoring pass."""
        tokens = [self._tokens(batch) for batch in minibatch]
        sums = count(tokens).to(self.device)
        self._over_data(sums)
        totals = UpdateTotals(*sums.tolist())
        if how.policy is not None and how.policy.correction_normalize:
            scored = old if old is not None else self.score(minibatch, temperature=how.temperature)
            recipe, weights = correction_recipe(how.policy), torch.zeros(2, dtype=torch.float64, device=self.device)
            for j, (batch, of_batch) in enumerate(zip(minibatch, tokens, strict=True)):
                local = self._local(batch)
                logp_N, engine_N = self._here(scored[j]).logp_N[local.mine_M], local.engine_logp_M
                usable_N = usable(logp_N, engine_N, self._here(ref[j]).logp_N[local.mine_M] if ref is not None else None)
                weights += weight_sums(recipe, correct(recipe, logp_N, engine_N, of_batch, usable_N), of_batch)
            self._over_data(weights)
            totals = replace(totals, weight_mean=mean_weight(weights))
        return Known(tokens, totals, old, ref, Totals.empty(self.device))

    def _tokens(self, batch: MicroBatch) -> Tokens:
        """Which trained tokens this rank has, and how they add up over a sequence that several ranks share."""
        cp = self.groups.cp
        shard = take_shard(batch, rank=cp.rank(), ranks=cp.size(), multiple=self.shape.padding_multiple)

        def across(x: Tensor) -> Tensor:
            if cp.size() > 1:
                dist.all_reduce(x, group=cp)
            return x

        return tokens_of(batch, shard.mine_M).to(self.device, across)

    def _stats(
        self,
        first: Totals,
        every: Totals,
        worst: list[WorstToken],
        *,
        grad_norm: float,
        num_updates: int,
        skipped: bool,
        problem: str,
    ) -> StepStats:
        everyone: list[list[WorstToken]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, worst)
        return StepStats(
            loss=first.mean("loss", "tokens"),
            grad_norm=grad_norm,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            num_tokens=int(first.sum("tokens")),
            num_updates=num_updates,
            skipped=skipped,
            ratio_max_abs_dev=every.maximum("ratio_dev"),
            clip_fraction=every.mean("clipped"),
            entropy=first.mean("entropy"),
            kl_ref=first.mean("kl_ref"),
            k1=first.mean("k1"),
            k3=first.mean("k3"),
            logp_abs_mean=first.mean("logp_abs"),
            logp_abs_max=first.maximum("logp_abs"),
            ess=first.ess,
            truncated_fraction=first.mean("truncated"),
            problem=problem,
            measures=mismatch_measures(first),
            worst=tuple(worst_of(token for found in everyone for token in found)),
        )

    def _over_data(self, sums: Tensor) -> None:
        """Add up what each rank knows of its own tokens."""
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)

    def _require_usable(self, totals: Totals, how: Update) -> None:
        """`totals` are already the same on all ranks, so all stop together."""
        if how.policy is not None and (trouble := too_many_unusable(totals, how.policy.max_unusable_fraction)):
            raise TrainerFailed(f"{how.label or 'measuring'}: {trouble}")

    def _over_ranks(self, totals: Totals) -> None:
        others_data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for group in (others_data, self.groups.pp):  # only the last pipeline stage measures, the others hold zeros
            if group.size() > 1:
                dist.all_reduce(totals.sums, group=group)
                dist.all_reduce(totals.maxima, op=dist.ReduceOp.MAX, group=group)

    def _accumulate(self, minibatch: Minibatch, how: Update, known: Known) -> Totals:
        """Forward and backward over the microbatches. Returns totals over all ranks; gradients are those of the mean over all tokens."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def add(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            return self._loss(j, local, scores, how, known) / max(known.totals.tokens, 1.0)

        self._passes(minibatch, how.temperature, add, backward=True)
        self._over_ranks(known.measured)
        self._require_usable(known.measured, how)
        return known.measured

    def _loss(self, j: int, batch: LocalBatch, scores: Tensor, how: Update, known: Known) -> Tensor:
        """The loss of this rank's part of microbatch j, summed over its tokens; what it measures is added to `known`. From here on N are
        this rank's tokens."""
        logp_N, entropy_N = scores[0], scores[1]
        if how.policy is None:
            loss_sum = nll_loss(logp_N, batch.advantage_M)
            known.measured.add_likelihood(loss_sum, entropy_N)
            return loss_sum
        tokens = known.tokens[j]
        found = objective(
            how.policy,
            tokens,
            known.totals,
            logp_N=logp_N,
            entropy_N=entropy_N,
            old_logp_N=self._here(known.old[j]).logp_N[batch.mine_M] if known.old is not None else None,
            engine_logp_N=batch.engine_logp_M,
            advantage_N=batch.advantage_M,
            ref_logp_N=self._here(known.ref[j]).logp_N[batch.mine_M] if known.ref is not None else None,
        )
        known.measured.add(found, tokens)
        known.worst.append(worst_rows(found, tokens, j))
        return found.loss_sum

    def _step(self, totals: Totals) -> tuple[float, bool]:
        """The optimizer step, unless the loss or the gradient norm is not finite. `totals` are already the same on all ranks."""
        if not bool(torch.isfinite(totals.sums).all()):
            return float("nan"), False
        self.schedule.step(increment=1)
        result = guarded_step(self.optimizer)
        if not result.stepped:
            self.schedule.step(increment=-1)  # an update that was not made does not count
        return result.grad_norm, result.stepped

    # -- when a value is not finite ------------------------------------------------------------------------------------------------------

    def _explain(self, minibatch: Minibatch, how: Update, known: Known) -> str:
        """Find the microbatch, and the rank that holds it, whose loss or gradient is not finite; dump it; say so on every rank.

        Each rank looks at its own microbatches one by one, before anything is reduced. Runs only after a fault, and costs a pass.
        """
        found = ""
        for j, batch in enumerate(minibatch):
            self.model.zero_grad_buffer()
            own_totals = Totals.empty(self.device)
            alone = replace(known, measured=own_totals, worst=[])

            def add(_: int, local: LocalBatch, scores: Tensor, j=j, alone=alone) -> Tensor:
                return self._loss(j, local, scores, how, alone)

            with self.model.no_sync(), self._unreduced():
                self._passes([batch], how.temperature, add, backward=True)
            # Experts are left out: their gradients come from the tokens of all ranks. What is frozen has none.
            trained = (p for p in self.module.parameters() if p.requires_grad)
            own = [p.main_grad for p in trained if getattr(p, "allreduce", True)]  # pyright: ignore[reportAttributeAccessIssue]
            loss_is_fine = bool(torch.isfinite(own_totals.sums).all())
            if not found and not (loss_is_fine and all(bool(torch.isfinite(g).all()) for g in own)):
                what = "a gradient that is not finite" if loss_is_fine else f"loss {own_totals.sum('loss')}"
                found = f"{what} in microbatch {j} of rank {dist.get_rank()}{self._dump(batch, j, how, what)}"
        self.model.zero_grad_buffer()
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        return next((f for f in everyone if f), "not finite over all microbatches together, but finite in each alone")

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Passes in here leave each rank its own gradients."""
        config = self.module.config
        reduce = config.finalize_model_grads_func
        config.finalize_model_grads_func = None
        try:
            yield
        finally:
            config.finalize_model_grads_func = reduce

    def _dump(self, batch: MicroBatch, j: int, how: Update, what: str) -> str:
        names = f" ({', '.join(batch.names[:3])}{', …' if len(batch.names) > 3 else ''})"
        if how.dump_dir is None:
            return names
        how.dump_dir.mkdir(parents=True, exist_ok=True)
        path = how.dump_dir / f"{how.label}-rank{dist.get_rank()}-microbatch{j}.pt"
        torch.save({"microbatch": batch, "why": what}, path)
        return f"{names}; dumped to {path}"

    def _count_skips(self, stepped: bool, problem: str) -> None:
        self.skipped_in_a_row = 0 if stepped else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise TrainerFailed(
                f"{self.skipped_in_a_row} updates in a row were skipped because values were not finite "
                f"(trainer.max_skipped_updates = {self.config.max_skipped_updates}). The last one: {problem}"
            )


def _needs_reference(how: Update) -> bool:
    return how.policy is not None and how.policy.kl_coef > 0.0 and how.policy.kl_in == "loss"


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
