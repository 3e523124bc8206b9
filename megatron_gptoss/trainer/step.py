"""One rank of a training world: scores and updates packed microbatches.

In: microbatches of this data-parallel rank, whole, whatever part of them the rank computes. Out: log-probs, or updated weights with what
was measured, the same on all ranks. It knows no Ray, no engine and no task; `worker.py` puts it into an actor.

Passes, counts and the step itself are passes.py's, which the critic shares.

Legend: T packed tokens, N predicted tokens of a microbatch, M of them on this context-parallel rank, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.checkpoint.weight_map import load_hf
from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, OptimizerFields, TrainerConfig
from megatron_gptoss.errors import TrainerFailed
from megatron_gptoss.logprob.api import selected_logprob
from megatron_gptoss.model.build import attention_options, build_model, freeze
from megatron_gptoss.model.router import inject_choice_noise
from megatron_gptoss.parallel.context import LocalBatch
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.aggregate import UpdateTotals
from megatron_gptoss.rl.correction import correct, mean_weight, weight_sums
from megatron_gptoss.rl.diagnostics import Totals, mismatch_measures, require_on_policy, too_many_unusable
from megatron_gptoss.rl.losses import nll_loss
from megatron_gptoss.rl.objective import Objective, correction_recipe, objective, usable
from megatron_gptoss.rl.samples import sample_scores
from megatron_gptoss.rl.tokens import Tokens
from megatron_gptoss.rl.worst import worst_of, worst_rows, worst_tokens
from megatron_gptoss.trainer.how import TokenScores, Update
from megatron_gptoss.trainer.passes import Around, Minibatch, TrainedModel
from megatron_gptoss.trainer.routing import Place, Routing, routing_measures
from megatron_gptoss.types import MicroBatch, SampleScores, StepStats, WorstToken


@dataclass
class Known:
    """What is known of a minibatch before its update, and where the pass puts what it measures. Lists: an entry for each microbatch."""

    tokens: list[Tokens]
    totals: UpdateTotals
    old: Sequence[Tensor] | None  # float32, nats, of the tokens this rank has, on its device, as `ref`; None: the update is on-policy
    ref: Sequence[Tensor] | None
    measured: Totals
    routing: Routing | None  # whose choice of experts the passes follow; None: everywhere the routers' own
    worst: list[Tensor] = field(default_factory=list)
    logp: list[Tensor] | None = None  # [N] of the policy that sampled, of the tokens of this rank, 0.0 elsewhere; None: not kept

    @property
    def around(self) -> Around | None:
        return None if self.routing is None else self.routing.around


class Trainer(TrainedModel):
    """The policy on one rank. All ranks call the same methods in the same order."""

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
        seed: int = 0,
    ) -> None:
        """`seed`: of diagnose.routing_noise; every rank has noise of its own, for tokens of its own."""
        module = build_model(
            model,
            shape,
            dtype=getattr(torch, trainer.dtype),
            attention=attention_options(trainer, diagnose),
            fault=fault,
            recompute=trainer.recompute,
            experts=trainer.experts,
            rotary=trainer.rotary,
            dispatcher=trainer.dispatcher,
            transformer=trainer.transformer,
        )
        freeze(module, diagnose)
        inject_choice_noise(module, diagnose.routing_noise, seed + 1_000_003 * dist.get_rank())
        super().__init__(module, trainer, shape, optimizer, total_updates=total_updates)
        self.model_config = model
        self.reference: list[Tensor] | None = None
        self.place = Place(model, module, shape, self.device)

    # -- weights -------------------------------------------------------------------------------------------------------------------------

    def load_hf(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from full Hugging Face tensors, each rank its part. Raises CheckpointError when they do not fit."""
        load_hf(self.module, self.model_config, tensors)

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

    def _forward(self, batch: LocalBatch, temperature: float, model: torch.nn.Module) -> Tensor:
        """[2, M]: log-probs and entropies of the predicted tokens. Only their positions pass through the head. On a pipeline stage that is
        not the last, hidden states."""

        def head(hidden: Tensor, weight_VC: Tensor) -> Tensor:
            hidden_MC = hidden.reshape(-1, hidden.shape[-1])[batch.predict_M]
            both = selected_logprob(
                hidden_MC,
                weight_VC,
                batch.target_M,
                temperature=1.0 if self.module.head_fault == "temperature" else temperature,
                chunk=self.config.logprob_chunk,
                group=self.groups.tp,
                backend=self.config.logprob,
            )
            scores = torch.stack(both)
            return scores.roll(1, dims=1) if self.module.head_fault == "shifted" else scores

        return self._run(batch, model, head)

    @torch.no_grad()
    def score(
        self, batches: Minibatch, *, temperature: float = 1.0, reference: bool = False, router_replay: str = "none"
    ) -> list[TokenScores]:
        """Log-probs of the trained tokens under the current (or the reference) policy, without gradients, whole on every rank.

        In training mode as in an update: the same code path gives the same bits. router_replay: as in the configuration; the scores then
        hold the routes that an update has to take to be the same policy. The reference is another policy and routes for itself.
        """
        if reference:
            with self._reference_weights():
                return self.score(batches, temperature=temperature)
        routing = None if router_replay == "none" else Routing(self.place, batches, router_replay, keep=True)
        parts = self._whole(batches, temperature, 2, None if routing is None else routing.around)
        routes = [None] * len(batches) if routing is None else routing.whole()
        return [TokenScores(part[0].contiguous(), part[1].contiguous(), of_batch) for part, of_batch in zip(parts, routes, strict=True)]

    # -- update --------------------------------------------------------------------------------------------------------------------------

    def update(self, minibatches: Sequence[Minibatch], how: Update, old: Sequence[Sequence[TokenScores]] | None = None) -> StepStats:
        """One optimizer update per minibatch and epoch; none for a minibatch without a trained token.

        `old` holds the log-probs scored before the first update, in the same packing. None means the update is on-policy: the old log-prob
        is the current one, detached, so the ratio is exactly 1 however the forward pass rounds.
        """
        epochs = how.policy.epochs if how.policy else 1
        on_policy = old is None
        assert not on_policy or how.policy is None or (epochs == 1 and len(minibatches) == 1)
        ref: list[list[TokenScores]] | None = None
        if _needs_reference(how):
            ref = [self.score(m, temperature=how.temperature, reference=True) for m in minibatches]
        first, every = Totals.empty(), Totals.empty()  # first epoch: the policy that sampled; every: the updates
        norms: list[float] = []
        worst: list[WorstToken] = []
        scores: list[SampleScores] = []
        routed = torch.zeros(2, dtype=torch.int64)
        stepped, problem = True, ""
        for epoch, i in ((e, i) for e in range(epochs) for i in range(len(minibatches))):
            known = self._known(minibatches[i], how, old[i] if old is not None else None, ref[i] if ref is not None else None)
            if not known.totals.tokens:
                continue  # nothing to learn from, and a step of the optimizer would decay the weights all the same
            if how.keep_scores and epoch == 0:
                known.logp = self._no_logp(minibatches[i])
            totals = self._accumulate(minibatches[i], how, known)
            if on_policy and how.policy is not None:
                require_on_policy(totals)
            every.merge(totals)
            if epoch == 0:
                first.merge(totals)
                worst += worst_tokens(known.worst, minibatches[i])
                scores += self._scores(minibatches[i], known)
                if known.routing is not None:
                    routed += known.routing.counts
            norm, stepped = self._step(totals.sums)
            norms.append(norm)
            if not stepped:
                problem = self._explain(minibatches[i], how, known)
                break
        self._count_skips(stepped, problem)
        made, norm = len(norms) - (not stepped), sum(norms) / max(len(norms), 1)
        stats = self._stats(first, every, worst, grad_norm=norm, num_updates=made, skipped=not stepped, problem=problem)
        return self._with_routing(replace(stats, scores=tuple(scores)), how, routed)

    @torch.no_grad()
    def measure(self, minibatch: Minibatch, how: Update) -> StepStats:
        """What an update would measure, without making one: for a step whose rollouts have nothing to teach."""
        ref = self.score(minibatch, temperature=how.temperature, reference=True) if _needs_reference(how) else None
        known = self._known(minibatch, how, None, ref)
        if how.keep_scores:
            known.logp = self._no_logp(minibatch)

        def add(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            return self._loss(j, local, scores, how, known)

        if minibatch:
            self._passes(minibatch, how.temperature, add, backward=False, around=known.around)
        totals = self._over_ranks(known.measured)
        self._require_usable(totals, how)
        worst = worst_tokens(known.worst, minibatch)
        stats = self._stats(totals, totals, worst, grad_norm=0.0, num_updates=0, skipped=False, problem="")
        stats = replace(stats, scores=tuple(self._scores(minibatch, known)))
        return self._with_routing(stats, how, known.routing.counts if known.routing is not None else torch.zeros(2, dtype=torch.int64))

    def _no_logp(self, minibatch: Minibatch) -> list[Tensor]:
        return [torch.zeros(batch.target_N.numel(), device=self.device) for batch in minibatch]

    def _scores(self, minibatch: Minibatch, known: Known) -> list[SampleScores]:
        """Of this data-parallel rank's samples, the same on every rank that shares them; [] where nobody asked, or there are none."""
        return [] if not known.logp else sample_scores(minibatch, self._over_shards(known.logp))

    def _with_routing(self, stats: StepStats, how: Update, routed: Tensor) -> StepStats:
        if _router_replay(how) == "none":
            return stats
        return replace(stats, measures=(*stats.measures, *routing_measures(routed, self.device)))

    def _known(self, minibatch: Minibatch, how: Update, old: Sequence[TokenScores] | None, ref: Sequence[TokenScores] | None) -> Known:
        """Count the tokens and sequences of a minibatch over all ranks; with normalised weights, their mean too, from a scoring pass."""
        tokens = [self._tokens(batch) for batch in minibatch]
        totals = self._totals(tokens)
        old_logp, ref_logp = (None if scores is None else self._own_logp(minibatch, scores) for scores in (old, ref))
        if how.policy is not None and how.policy.correction_normalize:
            scored = old_logp or self._own_logp(
                minibatch, self.score(minibatch, temperature=how.temperature, router_replay=_router_replay(how))
            )
            recipe, weights = correction_recipe(how.policy), torch.zeros(2, dtype=torch.float64, device=self.device)
            for j, (batch, of_batch) in enumerate(zip(minibatch, tokens, strict=True)):
                logp_N, engine_N = scored[j], self._local(batch).engine_logp_M
                usable_N = usable(logp_N, engine_N, ref_logp[j] if ref_logp is not None else None)
                weights += weight_sums(recipe, correct(recipe, logp_N, engine_N, of_batch, usable_N), of_batch)
            self._over_data(weights)
            totals = replace(totals, weight_mean=mean_weight(weights))
        mode = _router_replay(how)
        routing = None if mode == "none" else Routing(self.place, minibatch, mode, old)
        return Known(tokens, totals, old_logp, ref_logp, Totals.empty(self.device), routing)

    def _own_logp(self, minibatch: Minibatch, scores: Sequence[TokenScores]) -> list[Tensor]:
        """Log-probs of the tokens that this rank has, on its device before the passes begin: bringing them there waits for the device."""
        return [of.logp_N[self._shard(batch).mine_M].to(self.device) for batch, of in zip(minibatch, scores, strict=True)]

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
            learning_rate=self.learning_rate,
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

    def _require_usable(self, totals: Totals, how: Update) -> None:
        """`totals` are already the same on all ranks, so all stop together."""
        if how.policy is not None and (trouble := too_many_unusable(totals, how.policy.max_unusable_fraction)):
            raise TrainerFailed(f"{how.label or 'measuring'}: {trouble}")

    def _over_ranks(self, totals: Totals) -> Totals:
        """Added up, and on the CPU: what a step decides and reports is read there, and the device is waited for once."""
        others_data: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for group in (others_data, self.groups.pp):  # only the last pipeline stage measures, the others hold zeros
            if group.size() > 1:
                dist.all_reduce(totals.sums, group=group)
                dist.all_reduce(totals.maxima, op=dist.ReduceOp.MAX, group=group)
        return totals.on_host()

    def _accumulate(self, minibatch: Minibatch, how: Update, known: Known) -> Totals:
        """Forward and backward over the microbatches. Returns totals over all ranks; gradients are those of the mean over all tokens."""
        self._no_gradients()

        def add(j: int, local: LocalBatch, scores: Tensor) -> Tensor:
            return self._loss(j, local, scores, how, known) / max(known.totals.tokens, 1.0)

        self._passes(minibatch, how.temperature, add, backward=True, around=known.around)
        totals = self._over_ranks(known.measured)
        self._require_usable(totals, how)
        return totals

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
            old_logp_N=None if known.old is None else known.old[j],
            engine_logp_N=batch.engine_logp_M,
            advantage_N=batch.advantage_M,
            ref_logp_N=None if known.ref is None else known.ref[j],
        )
        self._diagnose(j, found, tokens, known)
        if known.logp is not None:
            known.logp[j][batch.mine_M] = torch.where(found.usable_N, found.before_N, torch.nan).float()
        return found.loss_sum

    def _diagnose(self, j: int, found: Objective, tokens: Tokens, known: Known) -> None:
        """Measure microbatch j, beside its loss."""
        known.measured.add(found, tokens)
        known.worst.append(worst_rows(found, tokens, j))

    # -- when a value is not finite ------------------------------------------------------------------------------------------------------

    def _explain(self, minibatch: Minibatch, how: Update, known: Known) -> str:
        """Find the microbatch, and the rank that holds it, whose loss or gradient is not finite; dump it; say so on every rank.

        Each rank looks at its own microbatches one by one, before anything is reduced. Runs only after a fault, and costs a pass.
        """
        found = ""
        for j, batch in enumerate(minibatch):
            self.model.zero_grad_buffer()
            own_totals = Totals.empty(self.device)
            alone = replace(known, measured=own_totals, worst=[], logp=None)

            def add(_: int, local: LocalBatch, scores: Tensor, j=j, alone=alone) -> Tensor:
                return self._loss(j, local, scores, how, alone)

            with self.model.no_sync(), self._unreduced():
                around = None if known.routing is None else lambda _, j=j, routing=known.routing: routing.around(j)
                self._passes([batch], how.temperature, add, backward=True, around=around)
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
        # A loss says more than the gradients it made not finite on other stages and shards.
        reports = sorted((f for f in everyone if f), key=lambda f: not f.startswith("loss"))
        return next(iter(reports), "not finite over all microbatches together, but finite in each alone")

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


def _router_replay(how: Update) -> str:
    return "none" if how.policy is None else how.policy.router_replay


def _needs_reference(how: Update) -> bool:
    return how.policy is not None and how.policy.kl_coef > 0.0 and how.policy.kl_in == "loss"
