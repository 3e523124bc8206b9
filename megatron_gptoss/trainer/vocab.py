"""Log-probs and entropies where tensor-parallel ranks hold a part of the vocabulary each: a plain version in chunks.

In: whole hidden states, this rank's rows of the output matrix, target ids. Out: what logprob.reference gives for the whole matrix, on every
rank. The gradient of the hidden states is this rank's part; whoever gathered them sums it.

Shape legend: N predicted tokens, C hidden size, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def divided_logprob(
    hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor, *, group: Any, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """logp_N and entropy_N, float32, nats. Every rank of the group makes the same call."""
    logps, entropies = [], []
    for begin in range(0, max(len(target_N), 1), chunk):
        rows = slice(begin, begin + chunk)
        arguments = (hidden_NC[rows], weight_VC, target_N[rows], group, temperature)
        if torch.is_grad_enabled():
            logp, entropy = checkpoint(_one_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            logp, entropy = _one_chunk(*arguments)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def _one_chunk(hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor, group: Any, temperature: float) -> tuple[Tensor, Tensor]:
    return _DividedSoftmax.apply((hidden_NC @ weight_VC.t()).float() / temperature, target_N, group)  # pyright: ignore[reportReturnType]


class _DividedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logit_NV: Tensor, target_N: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        top_N = logit_NV.max(-1).values
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NV = logit_NV - top_N[:, None]
        exp_NV = shifted_NV.exp()
        V = logit_NV.shape[1]
        local_N = target_N - group.rank() * V
        mine_N = (local_N >= 0) & (local_N < V)
        picked_N = torch.where(mine_N, shifted_NV.gather(1, local_N.clamp(0, V - 1)[:, None])[:, 0], 0.0)
        sums_3N = torch.stack([exp_NV.sum(-1), (exp_NV * shifted_NV).sum(-1), picked_N])
        dist.all_reduce(sums_3N, group=group)
        total_N, mean_N = sums_3N[0], sums_3N[1] / sums_3N[0]
        ctx.save_for_backward(exp_NV / total_N[:, None], shifted_NV - mean_N[:, None], local_N, mine_N)
        return sums_3N[2] - total_N.log(), total_N.log() - mean_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dlogp_N, dentropy_N = gradients
        p_NV, centred_NV, local_N, mine_N = ctx.saved_tensors
        dlogit_NV = -p_NV * (dlogp_N[:, None] + dentropy_N[:, None] * centred_NV)
        rows = mine_N.nonzero()[:, 0]
        dlogit_NV[rows, local_N[rows]] += dlogp_N[rows]
        return dlogit_NV, None, None
