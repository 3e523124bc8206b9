"""What is measured beside the loss: ratios, clipping, entropy, and how far trainer and engine stand apart.

In: per-token values of the microbatches. Out: sums and maxima that add up over microbatches and ranks, and the means made of them.
Nothing here touches the loss.

Legend: N trained tokens; all log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Order of the entries of `Totals.sums` and `Totals.maxima`. Sums and maxima travel between ranks as two plain tensors, one all-reduce each.
SUMS = ("tokens", "loss", "clipped", "entropy", "kl_ref", "k1", "k3", "logp_abs", "weight", "weight_sq", "truncated")
MAXIMA = ("ratio_dev", "logp_abs")


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

    def mean(self, name: str) -> float:
        """Mean per trained token; 0.0 on an empty step rather than nan, which would read as a fault."""
        tokens = self.sum("tokens")
        return self.sum(name) / tokens if tokens else 0.0

    @property
    def ess(self) -> float:
        """Effective sample size of the token weights, (sum w)^2 / (n sum w^2), in 0..1; 1.0 on an empty step."""
        denominator = self.sum("tokens") * self.sum("weight_sq")
        return self.sum("weight") ** 2 / denominator if denominator else 1.0

    def add(
        self,
        *,
        loss_sum: Tensor,
        logp_N: Tensor,
        engine_logp_N: Tensor,
        entropy_N: Tensor,
        ratio_N: Tensor,
        clipped_N: Tensor,
        kl_ref_N: Tensor,
        weight_N: Tensor,
        truncated_N: Tensor,
    ) -> None:
        """Add one microbatch. `logp_N` is the trainer's log-prob of the policy that sampled, i.e. before this step's updates."""
        gap_N = (logp_N - engine_logp_N).detach().double()
        # k1 and k3 estimate KL(engine || trainer), sampled from the engine: r = trainer/engine, k1 = -log r, k3 = r - 1 - log r.
        parts = {
            "tokens": torch.tensor(float(gap_N.numel()), device=gap_N.device),
            "loss": loss_sum,
            "clipped": clipped_N.sum(),
            "entropy": entropy_N.sum(),
            "kl_ref": kl_ref_N.sum(),
            "k1": (-gap_N).sum(),
            "k3": (torch.expm1(gap_N) - gap_N).sum(),
            "logp_abs": gap_N.abs().sum(),
            "weight": weight_N.double().sum(),
            "weight_sq": weight_N.double().square().sum(),
            "truncated": truncated_N.sum(),
        }
        self.sums += torch.stack([parts[name].detach().double() for name in SUMS])
        if gap_N.numel():
            peaks = torch.stack([(ratio_N.double() - 1.0).abs().max(), gap_N.abs().max()])
            self.maxima = torch.maximum(self.maxima, peaks)
