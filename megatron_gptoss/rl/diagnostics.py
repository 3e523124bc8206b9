"""What is measured beside the loss: ratios, clipping, entropy, and how far trainer and engine stand apart.

In: what objective.py left of each microbatch. Out: sums and maxima that add up over microbatches and ranks, and the numbers made of them,
which therefore do not depend on packing or ranks. Nothing here touches the loss. docs/rollout_correction.md has the formulas.

Legend: N trained tokens of this rank, S sequences, B buckets; all log-probs in nats. gap = trainer - engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gptoss.rl.objective import Objective
from megatron_gptoss.rl.tokens import Tokens
from megatron_gptoss.types import Measure

POSITION_EDGES = (0, 128, 512, 2048, 8192, 32768)  # the first ends with the window of the windowed layers
TURNS = 8  # the last takes all later turns
BUCKETS = (*(f"position/{edge}" for edge in POSITION_EDGES), *(f"turn/{turn}" for turn in range(TURNS)))
IN_BUCKET = ("tokens", "k1", "k3", "logp_abs")  # summed for each bucket

# Order of the entries of `Totals.sums` and `Totals.maxima`. Sums and maxima travel between ranks as two plain tensors, one all-reduce each.
SUMS = (
    "tokens", "usable", "loss", "clipped", "entropy", "kl_ref", "k1", "k3", "logp_abs", "weight", "weight_sq", "truncated", "masked",
    "rejected", "rho", "rho_sq", "sequences", "seq_rho", "seq_rho_sq", "log_ppl", "log_ppl_engine", "log_ppl_abs", "seq_rejected",
    "seq_truncated", *(f"{bucket}/{name}" for bucket in BUCKETS for name in IN_BUCKET),
)  # fmt: skip
MAXIMA = ("ratio_dev", "logp_abs", "log_ppl_abs", *(f"{bucket}/logp_abs" for bucket in BUCKETS))
GAP_LIMIT = 300.0  # e^300 squared and added up over a step stays inside float64


@dataclass
class Totals:
    """Running totals of one step. float64, so that adding up in another order changes nothing that is printed."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Totals:
        """`device`: that of the collectives which will add the ranks' totals up."""
        return cls(torch.zeros(len(SUMS), dtype=torch.float64, device=device), torch.zeros(len(MAXIMA), dtype=torch.float64, device=device))

    def merge(self, other: Totals) -> None:
        self.sums = self.sums + other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)

    def sum(self, name: str) -> float:
        return float(self.sums[SUMS.index(name)])

    def maximum(self, name: str) -> float:
        return float(self.maxima[MAXIMA.index(name)])

    def mean(self, name: str, over: str = "usable") -> float:
        """Mean per token with usable log-probs, or over another count; 0.0 of nothing rather than nan, which would read as a fault."""
        number = self.sum(over)
        return self.sum(name) / number if number else 0.0

    @property
    def ess(self) -> float:
        """Effective sample size of the applied token weights, (sum w)^2 / (n sum w^2), in 0..1."""
        return self._ess("weight", "weight_sq", "usable")

    @property
    def ess_seq(self) -> float:
        """The same of the sequences' whole ratios: what importance sampling by sequences would have to work with."""
        return self._ess("seq_rho", "seq_rho_sq", "sequences")

    def _ess(self, total: str, squares: str, number: str) -> float:
        """1.0 of nothing, 0.0 when every weight is 0."""
        if not self.sum(number):
            return 1.0
        denominator = self.sum(number) * self.sum(squares)
        return self.sum(total) ** 2 / denominator if denominator else 0.0

    def add(self, found: Objective, tokens: Tokens) -> None:
        """Add one microbatch."""
        sums, maxima = _measure(found, tokens)
        self.sums += torch.stack([sums[name].detach().double() for name in SUMS])
        self.maxima = torch.maximum(self.maxima, torch.stack([maxima[name].detach().double() for name in MAXIMA]))

    def add_likelihood(self, loss_sum: Tensor, entropy_N: Tensor) -> None:
        """Add one microbatch of a warm start, where there is no engine and no ratio."""
        ones = torch.ones_like(entropy_N).sum()
        known = {"tokens": ones, "usable": ones, "loss": loss_sum, "entropy": entropy_N.sum(), "weight": ones, "weight_sq": ones}
        self.sums += torch.stack([known.get(name, torch.zeros_like(ones)).detach().double() for name in SUMS])


def _measure(found: Objective, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    usable_N, correction = found.usable_N, found.correction
    gap_N = (found.before_N - found.engine_N).double()
    near_N = gap_N.clamp(-GAP_LIMIT, GAP_LIMIT)
    rejected_N = tokens.spread(correction.rejected_S) & usable_N
    weight_N = correction.weight_N.double()
    # k1 and k3 estimate KL(engine || trainer), sampled from the engine: rho = trainer/engine, k1 = -log rho, k3 = rho - 1 - log rho.
    each = {"tokens": usable_N.double(), "k1": -gap_N, "k3": torch.expm1(near_N) - near_N, "logp_abs": gap_N.abs()}
    rho_N = torch.where(usable_N, near_N.exp(), 0.0)
    sums = {
        "tokens": torch.ones_like(gap_N).sum(),
        "usable": usable_N.sum(),
        "loss": found.loss_sum,
        "clipped": found.clipped_N.sum(),
        "entropy": found.entropy_N.sum(),
        "kl_ref": found.kl_ref_N.sum(),
        "k1": each["k1"].sum(),
        "k3": each["k3"].sum(),
        "logp_abs": each["logp_abs"].sum(),
        "weight": weight_N.sum(),
        "weight_sq": weight_N.square().sum(),
        "truncated": correction.truncated_N.sum(),
        "masked": correction.masked_N.sum(),
        "rejected": rejected_N.sum(),
        "rho": rho_N.sum(),
        "rho_sq": rho_N.square().sum(),
    }
    peak = gap_N.abs().max() if gap_N.numel() else gap_N.sum()
    dev = (found.ratio_N.double() - 1.0).abs().max() if gap_N.numel() else peak
    maxima = {"ratio_dev": dev, "logp_abs": peak}
    for part, values in zip((sums, maxima), _by_sequence(found, tokens, gap_N), strict=True):
        part |= values
    for part, values in zip((sums, maxima), _by_bucket(each, tokens), strict=True):
        part |= values
    return sums, maxima


def _by_sequence(found: Objective, tokens: Tokens, gap_N: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A sequence counts once, on the rank that owns it, and only when it has a usable token."""
    usable_S = tokens.sum(found.usable_N)
    mine_S = tokens.owned_S & (usable_S > 0)
    number_S = usable_S.clamp(min=1.0)
    gap_S = tokens.sum(gap_N)
    rho_S = gap_S.clamp(-GAP_LIMIT, GAP_LIMIT).exp()
    log_ppl_S, log_ppl_engine_S = -tokens.sum(found.before_N) / number_S, -tokens.sum(found.engine_N) / number_S
    truncated_S = tokens.sum(found.correction.truncated_N) > 0
    per_sequence = {
        "sequences": torch.ones_like(rho_S),
        "seq_rho": rho_S,
        "seq_rho_sq": rho_S.square(),
        "log_ppl": log_ppl_S,
        "log_ppl_engine": log_ppl_engine_S,
        "log_ppl_abs": (gap_S / number_S).abs(),
        "seq_rejected": found.correction.rejected_S.double(),
        "seq_truncated": truncated_S.double(),
    }
    kept = {name: torch.where(mine_S, value, 0.0) for name, value in per_sequence.items()}
    peak = kept["log_ppl_abs"].max() if mine_S.numel() else gap_S.sum()
    return {name: value.sum() for name, value in kept.items()}, {"log_ppl_abs": peak}


def _by_bucket(each: dict[str, Tensor], tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and the largest gap by place in the sequence and by assistant turn."""
    edges = torch.tensor(POSITION_EDGES[1:], device=tokens.position_N.device)
    place_N = torch.bucketize(tokens.position_N, edges, right=True)
    turn_N = tokens.turn_N.clamp(max=TURNS - 1) + len(POSITION_EDGES)
    buckets = torch.arange(len(BUCKETS), device=place_N.device)
    inside_NB = (place_N[:, None] == buckets) | (turn_N[:, None] == buckets)
    sums_B4 = inside_NB.double().T @ torch.stack([each[name] for name in IN_BUCKET], dim=1)
    peaks_NB = torch.where(inside_NB, each["logp_abs"][:, None], 0.0)
    peaks_B = peaks_NB.amax(0) if len(peaks_NB) else peaks_NB.new_zeros(len(BUCKETS))
    sums = {f"{bucket}/{name}": sums_B4[b, i] for b, bucket in enumerate(BUCKETS) for i, name in enumerate(IN_BUCKET)}
    return sums, {f"{bucket}/logp_abs": peaks_B[b] for b, bucket in enumerate(BUCKETS)}


def mismatch_measures(totals: Totals) -> tuple[Measure, ...]:
    """What StepStats has no field for, under the names of metrics.jsonl. Buckets without a token are left out."""
    tokens = totals.sum("tokens")
    values = {
        "mismatch/chi2": totals.mean("rho_sq") - 1.0 if totals.sum("usable") else 0.0,
        "mismatch/chi2_seq": totals.mean("seq_rho_sq", "sequences") - 1.0 if totals.sum("sequences") else 0.0,
        "mismatch/ess_seq": totals.ess_seq,
        "mismatch/log_ppl": totals.mean("log_ppl", "sequences"),
        "mismatch/log_ppl_engine": totals.mean("log_ppl_engine", "sequences"),
        "mismatch/log_ppl_diff": totals.mean("log_ppl", "sequences") - totals.mean("log_ppl_engine", "sequences"),
        "mismatch/log_ppl_abs_diff": totals.mean("log_ppl_abs", "sequences"),
        "mismatch/log_ppl_abs_diff_max": totals.maximum("log_ppl_abs"),
        "mismatch/masked_fraction": totals.mean("masked"),
        "mismatch/rejected_fraction": totals.mean("rejected"),
        "mismatch/truncated_seq_fraction": totals.mean("seq_truncated", "sequences"),
        "mismatch/rejected_seq_fraction": totals.mean("seq_rejected", "sequences"),
        "mismatch/weight_mean": totals.mean("weight"),
        "mismatch/unusable_fraction": (tokens - totals.sum("usable")) / tokens if tokens else 0.0,
    }
    for bucket in BUCKETS:
        if totals.sum(f"{bucket}/tokens"):
            for name, metric in (("k1", "k1"), ("k3", "k3"), ("logp_abs", "logp_abs_mean")):
                values[f"mismatch_{bucket}/{metric}"] = totals.mean(f"{bucket}/{name}", f"{bucket}/tokens")
            values[f"mismatch_{bucket}/logp_abs_max"] = totals.maximum(f"{bucket}/logp_abs")
    return tuple(Measure(name, value) for name, value in values.items())


def require_on_policy(totals: Totals) -> None:
    """Raise AssertionError unless every ratio is exactly 1 and nothing is clipped. By construction so; elsewhere a refactor lost it."""
    dev, clipped = totals.maximum("ratio_dev"), totals.sum("clipped")
    if dev != 0.0 or clipped != 0.0:
        raise AssertionError(f"an on-policy update has a ratio {dev:g} away from 1 and {clipped:g} clipped tokens; both must be exactly 0")


def too_many_unusable(totals: Totals, limit: float) -> str:
    """A message when more than `limit` (a share of the trained tokens) have an infinite or NaN log-prob; else ""."""
    tokens, usable = totals.sum("tokens"), totals.sum("usable")
    if tokens - usable <= limit * tokens:
        return ""
    return (
        f"{tokens - usable:.0f} of {tokens:.0f} trained tokens have a log-prob that is infinite or NaN, from the engine, the trainer or "
        f"the reference. That is a share of {(tokens - usable) / tokens:.2g}, and rl.max_unusable_fraction = {limit:g}. Look at "
        "mismatch/unusable_fraction of the steps before and at this step's archived rollouts; a higher limit masks such tokens and goes on."
    )
