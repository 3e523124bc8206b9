"""The "reference" backend: the passes over one tile of logits in plain PyTorch, on any device.

In: a tile of logits and what is known of its tokens. Out: sums, or the tile rewritten to gradients. Not differentiable by itself: api.py
has the formulas and the autograd function. `selected_logprob` is named here too, for callers who knew it here first.

Shape legend: N tokens, C hidden size, V columns of the tile, P parts of it (here 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gptoss.logprob.api import selected_logprob

__all__ = ["missing", "rewrite_", "selected_logprob", "statistics", "target_logit"]


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """What this machine lacks for the backend, in one line; None: nothing."""
    return None if dtype.is_floating_point else f"it computes float types, not {dtype}"


def target_logit(hidden_NC: Tensor, weight_VC: Tensor, local_N: Tensor) -> Tensor:
    """hidden . weight[local] of each token in float32 (float64 for float64); any number where `local_N` is not among the V rows."""
    wide = torch.promote_types(hidden_NC.dtype, torch.float32)
    rows_NC = weight_VC[local_N.clamp(0, len(weight_VC) - 1)]
    return torch.linalg.vecdot(hidden_NC.to(wide), rows_NC.to(wide))


def statistics(logit_NV: Tensor, local_N: Tensor, target_N: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Highest logit m [P, N] of each part, sum_j exp(scale (x_j - m)) and sum_j exp(scale (x_j - m)) (x_j - m), wide.

    Column local_N of a token, where that is one of the V, counts as target_N instead of what the tile holds.
    """
    x_NV = _wide(logit_NV, local_N, target_N)
    highest_N1 = x_NV.amax(-1, keepdim=True)
    lower_NV = x_NV - highest_N1
    share_NV = (lower_NV * scale).exp()
    return highest_N1.T, share_NV.sum(-1)[None], (share_NV * lower_NV).sum(-1)[None]


def rewrite_(
    logit_NV: Tensor,
    local_N: Tensor,
    target_N: Tensor,
    highest_N: Tensor,
    log_total_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor,
    scale: float,
) -> None:
    """In place: each logit becomes the gradient in it, given those in log-prob and entropy. Whole-vocabulary numbers of each token:
    `highest_N` is the highest logit (before temperature), `log_total_N` the logarithm of sum_j exp(scale (x_j - highest))."""
    x_NV = _wide(logit_NV, local_N, target_N)
    logp_NV = (x_NV - highest_N[:, None]) * scale - log_total_N[:, None]
    gradient_NV = logp_NV.exp() * (-dlogp_N[:, None] - dentropy_N[:, None] * (logp_NV + entropy_N[:, None]))
    gradient_NV[_places(logit_NV, local_N)] += dlogp_N[_is_here(logit_NV, local_N)]
    logit_NV.copy_(gradient_NV * scale)


def _wide(logit_NV: Tensor, local_N: Tensor, target_N: Tensor) -> Tensor:
    """A copy in float32 or float64, with the targets' own logits in their places."""
    x_NV = logit_NV.to(torch.promote_types(logit_NV.dtype, torch.float32), copy=True)
    x_NV[_places(logit_NV, local_N)] = target_N[_is_here(logit_NV, local_N)]
    return x_NV


def _is_here(logit_NV: Tensor, local_N: Tensor) -> Tensor:
    return (local_N >= 0) & (local_N < logit_NV.shape[1])


def _places(logit_NV: Tensor, local_N: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each target that is in the tile."""
    row_M = _is_here(logit_NV, local_N).nonzero().squeeze(1)
    return row_M, local_N[row_M]
