"""What is still to come from here on: discounted returns, generalized advantages, whitening.

In: rewards, perhaps a critic's values, of many sequences one after another. Out: the same shape. It knows no groups and no rollouts; an
entry may stand for a token or for a whole turn.

Legend: N entries of all sequences, in order; S sequences; L entries of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8  # whitening nothing but equal values gives 0, not nan


def gae(reward_N: Tensor, value_N: Tensor, lengths: Sequence[int], *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438):

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   and V = A = 0 after a sequence's last entry.

    The next entry is the next *trained* one: what a tool said in between is part of the environment's step. A sequence that was cut off is
    treated as one that ended. The critic's target is A + V.
    """
    if reward_N.numel() != sum(lengths) or value_N.numel() != sum(lengths):
        raise ValueError(f"{reward_N.numel()} rewards and {value_N.numel()} values for sequences of {sum(lengths)} entries")
    length_S = torch.tensor(lengths, dtype=torch.int64)
    longest = max(lengths, default=0)
    inside_SL = torch.arange(longest) < length_S[:, None]
    reward_SL, value_SL = (torch.zeros(len(lengths), longest + 1, dtype=torch.float64) for _ in range(2))
    reward_SL[:, :longest][inside_SL] = reward_N.double()
    value_SL[:, :longest][inside_SL] = value_N.double()
    advantage_SL = torch.zeros_like(reward_SL)
    for t in range(longest - 1, -1, -1):  # behind a sequence's end all is 0, and stays 0
        delta_S = reward_SL[:, t] + gamma * value_SL[:, t + 1] - value_SL[:, t]
        advantage_SL[:, t] = delta_S + gamma * lam * advantage_SL[:, t + 1]
    return advantage_SL[:, :longest][inside_SL]


def discounted(reward_N: Tensor, lengths: Sequence[int], *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}: what is still to come, this entry's own reward included."""
    return gae(reward_N, torch.zeros_like(reward_N), lengths, gamma=gamma, lam=1.0)


def whiten(values_N: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), with the sample variance (n - 1). Fewer than two values have nothing to be compared with: 0."""
    if values_N.numel() < 2:
        return torch.zeros_like(values_N)
    centred_N = values_N - values_N.mean()
    return centred_N / (centred_N.square().sum() / (values_N.numel() - 1) + VARIANCE_FLOOR).sqrt()
