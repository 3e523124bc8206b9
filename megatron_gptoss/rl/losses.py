"""The warm start's loss of one microbatch, as a sum over its trained tokens. The policy's is in objective.py.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from torch import Tensor


def nll_loss(logp_N: Tensor, weight_N: Tensor) -> Tensor:
    """Negative log-likelihood summed over N: the warm start's loss."""
    return -(weight_N * logp_N).sum()
