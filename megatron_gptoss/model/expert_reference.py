"""What the experts compute, in plain PyTorch: the "loop" backend, and the exact twin of the kernels.

In: rows sorted by expert and how many each has. Out: each row's expert output times its router weight. Differentiable by autograd, in any
dtype, anywhere. It is the definition that expert_kernels.py and expert_grouped.py are held against; it is not fast for many experts.

Shape legend: N rows (tokens times experts per token), T tokens, K experts per token, E experts of this rank, C hidden size, I expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def activate(h_N2I: Tensor, bias_2I: Tensor, weight_N: Tensor, limit: float) -> Tensor:
    """[N, I] in h's dtype: weight * (up + 1) * gate * sigmoid(1.702 gate), of h + bias = [gate, up]; gate <= limit, |up| <= limit."""
    gate_NI, up_NI = (h_N2I + bias_2I).chunk(2, dim=-1)
    gate_NI, up_NI = gate_NI.clamp(max=limit), up_NI.clamp(-limit, limit)
    return (gate_NI * torch.sigmoid(1.702 * gate_NI) * (up_NI + 1.0) * weight_N.unsqueeze(1)).to(h_N2I.dtype)


def experts(
    x_NC: Tensor, weight_N: Tensor, counts: list[int], w1_E2IC: Tensor, b1_E2I: Tensor, w2_ECI: Tensor, b2_EC: Tensor, limit: float
) -> Tensor:
    """weight * (W2 activation(W1 x + b1) + b2) of every row, by its expert: [N, C] in x's dtype.

    An expert without rows computes on nothing, so that its parameters have gradients: zeros.
    """
    outputs = []
    parameters = zip(w1_E2IC.unbind(), b1_E2I.unbind(), w2_ECI.unbind(), b2_EC.unbind(), strict=True)
    for (w1, b1, w2, b2), x, weight in zip(parameters, x_NC.split(counts), weight_N.split(counts), strict=True):
        # The weight goes onto the activation, not the output: Megatron's choice, which spares backward the output itself.
        y = torch.nn.functional.linear(activate(torch.nn.functional.linear(x, w1), b1, weight, limit), w2)
        outputs.append((y + b2 * weight.unsqueeze(1)).to(x.dtype))
    return torch.cat(outputs)


def gather_rows(x_TC: Tensor, token_N: Tensor) -> Tensor:
    """out[n] = x[token[n]]."""
    return x_TC.index_select(0, token_N)


def sum_rows(y_NC: Tensor, row_TK: Tensor) -> Tensor:
    """out[t] = y[row[t, 0]] + y[row[t, 1]] + ..., added in this order in float32 at least and rounded once; row -1 is none."""

    def rows(row_T: Tensor) -> Tensor:
        return y_NC.index_select(0, row_T.clamp(min=0)).masked_fill_(row_T.unsqueeze(1) < 0, 0.0)

    first, *others = row_TK.unbind(1)
    total = rows(first).to(torch.promote_types(y_NC.dtype, torch.float32))
    for row_T in others:
        total += rows(row_T)
    return total.to(y_NC.dtype)
