"""What is measured beside the loss: ratios, clipping, entropy, and how far trainer and engine stand apart.

In: what objective.py left of each microbatch. Out: sums and maxima that add up over microbatches and ranks, and the numbers made of them,
which therefore do not depend on packing or ranks. Nothing here touches the loss. docs/rollout_correction.md has the formulas.

A GPU is never waited for while a step goes on: nothing here reads a value, and no shape hangs on one. `Totals.on_host` waits, once.

Legend: N trained tokens of this rank, S sequences, B buckets; all log-probs in nats. gap = trainer - engine.
"""

from __future__ import annotations

from collections.abc import Sequence
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
OF_TOKENS = (
    "tokens", "usable", "clipped", "entropy", "kl_ref", "k1", "k3", "logp_abs", "weight", "weight_sq", "truncated", "masked", "rejected",
    "rho", "rho_sq",
)  # fmt: skip
OF_SEQUENCES = (
    "sequences", "seq_rho", "seq_rho_sq", "log_ppl", "log_ppl_engine", "log_ppl_abs", "seq_rejected", "seq_truncated",
)  # fmt: skip
SUMS = ("loss", *OF_TOKENS, *OF_SEQUENCES, *(f"{bucket}/{name}" for bucket in BUCKETS for name in IN_BUCKET))
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

    def on_host(self) -> Totals:
        """On the CPU, in one copy, where reading a value costs nothing."""
        sums, maxima = torch.cat([self.sums, self.maxima]).cpu().split([len(SUMS), len(MAXIMA)])
        return Totals(sums, maxima)

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
        self.sums += sums
        self.maxima = torch.maximum(self.maxima, maxima)

    def add_likelihood(self, loss_sum: Tensor, entropy_N: Tensor) -> None:
        """Add one microbatch of a warm start, where there is no engine and no ratio."""
        ones = torch.ones_like(entropy_N).sum()
        known = {"tokens": ones, "usable": ones, "loss": loss_sum, "entropy": entropy_N.sum(), "weight": ones, "weight_sq": ones}
        self.sums += torch.stack([known.get(name, torch.zeros_like(ones)).detach().double() for name in SUMS])


def _measure(found: Objective, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """In the order of SUMS and MAXIMA. As rows of a few tensors: on a GPU each operation is a launch, whatever its size."""
    correction, usable_N = found.correction, found.usable_N.double()
    gap_N = (found.before_N - found.engine_N).double()  # 0 where not usable
    near_N = gap_N.clamp(-GAP_LIMIT, GAP_LIMIT)
    size_N, rho_N, weight_N = gap_N.abs(), near_N.exp() * usable_N, correction.weight_N.double()
    # k1 and k3 estimate KL(engine || trainer), sampled from the engine: rho = trainer/engine, k1 = -log rho, k3 = rho - 1 - log rho.
    in_bucket_4N = torch.stack([usable_N, -gap_N, torch.expm1(near_N) - near_N, size_N])
    _, k1_N, k3_N, _ = in_bucket_4N
    rejected_N = tokens.spread(correction.rejected_S) & found.usable_N
    of_tokens = (
        torch.ones_like(gap_N), usable_N, found.clipped_N, found.entropy_N, found.kl_ref_N, k1_N, k3_N, size_N, weight_N,
        weight_N.square(), correction.truncated_N, correction.masked_N, rejected_N, rho_N, rho_N.square(),
    )  # fmt: skip
    of_sequences, log_ppl_gap = _by_sequence(found, tokens, gap_N)
    of_buckets, peaks_B = _by_bucket(in_bucket_4N, tokens)
    sums = [found.loss_sum.detach().double()[None], _sums(of_tokens), of_sequences, of_buckets]
    peaks = _largest(torch.stack([(found.ratio_N.double() - 1.0).abs(), size_N]))
    return torch.cat(sums), torch.cat([peaks, log_ppl_gap, peaks_B])


def _sums(rows: Sequence[Tensor]) -> Tensor:
    """float64, one for each row; rows of any dtype."""
    return torch.stack([row.detach().double() for row in rows]).sum(1)


def _largest(rows: Tensor) -> Tensor:
    """Of each row; 0 of nothing."""
    return rows.amax(1) if rows.shape[1] else rows.new_zeros(len(rows))


def _by_sequence(found: Objective, tokens: Tokens, gap_N: Tensor) -> tuple[Tensor, Tensor]:
    """(the sums of OF_SEQUENCES, [1] the largest difference of log-perplexities). A sequence counts once, on the rank that owns it, and
    only when it has a usable token."""
    usable_S = tokens.sum(found.usable_N)
    mine_S = tokens.owned_S & (usable_S > 0)
    number_S = usable_S.clamp(min=1.0)
    gap_S = tokens.sum(gap_N)
    rho_S = gap_S.clamp(-GAP_LIMIT, GAP_LIMIT).exp()
    apart_S = (gap_S / number_S).abs()
    each = (
        torch.ones_like(rho_S), rho_S, rho_S.square(), -tokens.sum(found.before_N) / number_S, -tokens.sum(found.engine_N) / number_S,
        apart_S, found.correction.rejected_S, tokens.sum(found.correction.truncated_N) > 0,
    )  # fmt: skip
    return _sums([torch.where(mine_S, row, 0.0) for row in each]), _largest(torch.where(mine_S, apart_S, 0.0)[None])


def _by_bucket(in_bucket_4N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """([B 4] sums, [B] the largest gap) by place in the sequence and by assistant turn."""
    # Compared with numbers: a tensor of edges would have to be brought to the GPU, for which it would be waited.
    place_N = torch.stack([tokens.position_N >= edge for edge in POSITION_EDGES[1:]]).sum(0)
    turn_N = tokens.turn_N.clamp(max=TURNS - 1) + len(POSITION_EDGES)
    bucket_B1 = torch.arange(len(BUCKETS), device=place_N.device)[:, None]
    inside_BN = (place_N == bucket_B1) | (turn_N == bucket_B1)
    sums_B4 = inside_BN.to(in_bucket_4N.dtype) @ in_bucket_4N.T
    return sums_B4.flatten(), _largest(torch.where(inside_BN, in_bucket_4N[-1], 0.0))


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
