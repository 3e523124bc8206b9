"""Log-probs and entropies of predicted tokens, without holding the logits of all of them.

In: last hidden states, the output matrix, target ids. Out: one log-prob and one entropy per target, differentiable in hidden states and
matrix. At most [chunk, V] logits exist at a time, forward and backward (they are computed twice). The whole vocabulary must be on this
rank; dividing it over tensor-parallel ranks is later work.

Shape legend: N predicted tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def selected_logprob(
    hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution under softmax(hidden @ weight.T / temperature).

    Returns logp_N and entropy_N in float32 (float64 for float64 inputs), nats. The product runs in the inputs' dtype, everything after
    it in float32. N may be 0. Raises ValueError when shapes contradict each other.
    """
    N, C = hidden_NC.shape
    if weight_VC.ndim != 2 or weight_VC.shape[1] != C or target_N.shape != (N,):
        raise ValueError(f"hidden {tuple(hidden_NC.shape)}, weight {tuple(weight_VC.shape)}, target {tuple(target_N.shape)} do not fit")
    if temperature <= 0 or chunk < 1:
        raise ValueError(f"temperature = {temperature} and chunk = {chunk} must be positive")

    logps, entropies = [], []
    for begin in range(0, max(N, 1), chunk):  # one empty chunk for N = 0 keeps the graph: gradients are zeros, not None
        rows = slice(begin, begin + chunk)
        if torch.is_grad_enabled() and len(target_N) > chunk:
            logp, entropy = checkpoint(  # pyright: ignore[reportGeneralTypeIssues]
                _one_chunk, hidden_NC[rows], weight_VC, target_N[rows], temperature, use_reentrant=False, preserve_rng_state=False
            )
        else:  # a single chunk is within the promised memory already
            logp, entropy = _one_chunk(hidden_NC[rows], weight_VC, target_N[rows], temperature)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def _one_chunk(hidden_NC: Tensor, weight_VC: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logit_NV = hidden_NC @ weight_VC.t()
    logit_NV = logit_NV.to(torch.promote_types(logit_NV.dtype, torch.float32))
    if temperature != 1.0:
        logit_NV = logit_NV / temperature
    logp_NV = logit_NV.log_softmax(-1)
    logp_N = logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_N, entropy_N
