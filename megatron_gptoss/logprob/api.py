"""The room's front door: `selected_logprob`, log-probs and entropies of predicted tokens without holding the logits of all of them.

In: last hidden states, the output matrix or this rank's part of it, target ids. Out: one log-prob and one entropy per target,
differentiable in hidden states and matrix. It checks its arguments once, here, and never chooses a backend by itself.

One buffer holds a tile of logits (tiles.py), forward and backward, in the inputs' dtype. Forward reduces each tile to three numbers a
token; backward computes the tile again, turns it into gradients in place and multiplies it with both inputs. The last tile is still there
when backward begins, so logits that fit the buffer are never computed twice. Scoring and training run the same code: the same bits.

The formulas, with z = logit / temperature, m their largest, p = softmax(z), l = log p and H the entropy:
    S = sum_j exp(z_j - m), W = sum_j exp(z_j - m) (z_j - m), logp = z_target - m - log S, H = log S - W / S
    dlogp / dz_j = [j = target] - p_j, dH / dz_j = -p_j (l_j + H)

The target's own logit is computed apart, in float32: rounded to bfloat16 a logit of 20 is off by up to 0.06, which would be the largest
error of the log-prob by far and make ratios of policies move in steps.

Divided vocabulary: two collectives a call, the maximum and then the three sums of all tokens at once; backward has none.

Shape legend: N predicted tokens, C hidden size, V vocabulary (of this rank, if it is divided), P parts that V was cut into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gptoss.errors import MachineError
from megatron_gptoss.logprob import tiles

BACKENDS = ("reference", "fused")


@dataclass(frozen=True)
class Backend:
    """Raw passes over one tile, none of them seen by autograd; signatures and meaning as in reference.py."""

    name: str
    target_logit: Callable[..., Tensor]
    statistics: Callable[..., tuple[Tensor, Tensor, Tensor]]
    rewrite_: Callable[..., None]


def selected_logprob(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution under softmax(hidden @ weight.T / temperature).

    target_N: integer ids in the whole vocabulary. N may be 0. chunk: the buffer holds the logits of so many tokens; None: as many as fit
    tiles.DEFAULT_BYTES. From `chunk` >= N on nothing is computed twice.

    group: the tensor-parallel ranks over which the vocabulary is divided, in equal parts: rank r holds rows r*V to (r+1)*V. Hidden states
    and targets are the same on all of them, and so are the results. The matrix's gradient is complete on each rank; that of the hidden
    states is THIS RANK'S PART of a sum over the group, which the caller makes: Megatron's tensor-parallel regions do it in their backward,
    gather_from_sequence_parallel_region(hidden) by a reduce-scatter, copy_to_tensor_model_parallel_region(hidden) by an all-reduce.

    Returns logp_N and entropy_N in float32 (float64 for float64 inputs), nats. The product runs in the inputs' dtype, everything after it
    and the target's own logit in float32.

    Memory beyond inputs, results and their gradients: the buffer, in training held from forward to backward; for 16-bit inputs [N, C] in
    float32 (a [V, C] instead where tokens are cut, tiles.py); some numbers a token. The reference backend adds temporaries of a tile.

    Raises ValueError for arguments that contradict each other, MachineError for a backend that this machine cannot run. Inputs are never
    written.
    """
    N, C = hidden_NC.shape
    if weight_VC.ndim != 2 or weight_VC.shape[1] != C or target_N.shape != (N,):
        raise ValueError(f"hidden {tuple(hidden_NC.shape)}, weight {tuple(weight_VC.shape)}, target {tuple(target_N.shape)} do not fit")
    if temperature <= 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"temperature = {temperature} and chunk = {chunk} must be positive")
    if weight_VC.dtype != hidden_NC.dtype or weight_VC.device != hidden_NC.device or target_N.device != hidden_NC.device:
        raise ValueError(
            f"hidden is {hidden_NC.dtype} on {hidden_NC.device}, weight {weight_VC.dtype} on {weight_VC.device}, target on "
            f"{target_N.device}; they must share a device, and hidden and weight a dtype"
        )
    V = weight_VC.shape[0]
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    _check_targets(target_N, ranks * V)
    return _SelectedLogprob.apply(  # pyright: ignore[reportReturnType]
        hidden_NC,
        weight_VC,
        target_N - rank * V,
        1.0 / temperature,
        tiles.plan_tiles(N, V, chunk or tiles.default_chunk(V, hidden_NC.element_size())),
        group if ranks > 1 else None,
        find_backend(backend, hidden_NC),
    )


def find_backend(name: str, hidden_NC: Tensor) -> Backend:
    """The backend of that name, or an error that says what is missing for it on hidden's device and dtype."""
    if name not in BACKENDS:
        raise ValueError(f"backend = {name!r} is unknown; one of {', '.join(BACKENDS)}")
    module = import_module(f"megatron_gptoss.logprob.{name}")
    missing = module.missing(hidden_NC.device, hidden_NC.dtype)
    if missing:
        raise MachineError(f"logprob backend {name!r} cannot run here: {missing}")
    return Backend(name, module.target_logit, module.statistics, module.rewrite_)


def _check_targets(target_N: Tensor, vocabulary: int) -> None:
    """On a GPU the check waits for nobody: it stops the device, with its message, when the kernels get there."""
    if target_N.dtype.is_floating_point or target_N.dtype == torch.bool:
        raise ValueError(f"target is {target_N.dtype}; ids are integers")
    fine = ((target_N >= 0) & (target_N < vocabulary)).all()
    if fine.is_cuda:
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage, reportCallIssue]
            fine, f"a target id is outside of the vocabulary of {vocabulary}"
        )
    elif not fine:
        raise ValueError(f"target ids run from {int(target_N.min())} to {int(target_N.max())}; the vocabulary has {vocabulary}")


class _SelectedLogprob(torch.autograd.Function):
    """Saves its inputs and five numbers a token; beside them the buffer, whose last tile backward finds as forward left it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        local_N: Tensor,
        scale: float,
        plan: tiles.Tiles,
        group: dist.ProcessGroup | None,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        hidden_NC, weight_VC = hidden_NC.contiguous(), weight_VC.contiguous()
        target_N = backend.target_logit(hidden_NC, weight_VC, local_N)
        buffer = hidden_NC.new_empty(plan.largest)
        found = []
        for rows in plan.rows:
            parts = []
            for columns in plan.columns:
                logit_NV = _logits(buffer, hidden_NC[rows], weight_VC[columns])
                parts.append(backend.statistics(logit_NV, local_N[rows] - columns.start, target_N[rows], scale))
            highest_PN, total_PN, weighted_PN = (torch.cat(x) for x in zip(*parts, strict=True))
            highest_N = highest_PN.amax(0)
            found.append((highest_N, *_move(highest_PN, total_PN, weighted_PN, highest_N, scale)))
        highest_N, total_N, weighted_N = (torch.cat(x) for x in zip(*found, strict=True))

        is_here_N = (local_N >= 0) & (local_N < weight_VC.shape[0])
        if group is not None:
            mine_1N = highest_N[None].clone()
            dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
            total_N, weighted_N = _move(mine_1N, total_N[None], weighted_N[None], highest_N, scale)
        distance_N = torch.where(is_here_N, target_N - highest_N, 0.0)  # one rank has the target, the others add nothing
        if group is not None:
            sums = torch.stack([total_N, weighted_N, distance_N])
            dist.all_reduce(sums, group=group)
            total_N, weighted_N, distance_N = sums.unbind()
        log_total_N = total_N.log()
        logp_N = distance_N * scale - log_total_N
        entropy_N = log_total_N - scale * weighted_N / total_N

        ctx.save_for_backward(hidden_NC, weight_VC, local_N, target_N, highest_N, log_total_N, entropy_N)
        ctx.rest = (scale, plan, backend)
        ctx.buffer = buffer
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_VC, local_N, *numbers = ctx.saved_tensors
        scale, plan, backend = ctx.rest
        # A second backward through the same graph finds no buffer and computes the last tile again too.
        buffer, ctx.buffer = ctx.buffer, None
        is_last_there = buffer is not None
        buffer = buffer if is_last_there else hidden_NC.new_empty(plan.largest)
        numbers += [torch.zeros_like(numbers[0]) if d is None else d for d in (dlogp_N, dentropy_N)]
        dhidden_NC = torch.empty_like(hidden_NC) if ctx.needs_input_grad[0] else None
        dweight = _Sum(weight_VC, one_term=len(plan.rows) == 1) if ctx.needs_input_grad[1] else None
        for rows in reversed(plan.rows):
            dhidden = _Sum(hidden_NC[rows], one_term=len(plan.columns) == 1) if dhidden_NC is not None else None
            for columns in reversed(plan.columns):
                if is_last_there:
                    logit_NV, is_last_there = _as_tile(buffer, hidden_NC[rows], weight_VC[columns]), False
                else:
                    logit_NV = _logits(buffer, hidden_NC[rows], weight_VC[columns])
                backend.rewrite_(logit_NV, local_N[rows] - columns.start, *(x[rows] for x in numbers), scale)
                if dhidden is not None:
                    dhidden.add(slice(None), logit_NV, weight_VC[columns])
                if dweight is not None:
                    dweight.add(columns, logit_NV.t(), hidden_NC[rows])
            if dhidden_NC is not None and dhidden is not None:
                dhidden_NC[rows] = dhidden.total
        dweight_VC = None if dweight is None else dweight.total.to(weight_VC.dtype)
        return dhidden_NC, dweight_VC, None, None, None, None, None


def _as_tile(buffer: Tensor, hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
    N, V = len(hidden_NC), len(weight_VC)
    return buffer[: N * V].view(N, V)


def _logits(buffer: Tensor, hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
    return torch.mm(hidden_NC, weight_VC.t(), out=_as_tile(buffer, hidden_NC, weight_VC))


def _move(highest_PN: Tensor, total_PN: Tensor, weighted_PN: Tensor, highest_N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The parts' sums, each taken relative to its own highest logit, added up relative to `highest_N`."""
    lower_PN = highest_PN - highest_N
    shrink_PN = (lower_PN * scale).exp()
    return (shrink_PN * total_PN).sum(0), (shrink_PN * (weighted_PN + lower_PN * total_PN)).sum(0)


class _Sum:
    """A gradient that is a sum of products. Several terms of 16-bit inputs are added up in float32; a single one goes to its place."""

    def __init__(self, like: Tensor, *, one_term: bool) -> None:
        self.one_term = one_term
        wide = torch.promote_types(like.dtype, torch.float32)
        self.total = torch.empty_like(like) if one_term else torch.zeros_like(like, dtype=wide)

    def add(self, rows: slice, a: Tensor, b: Tensor) -> None:
        total = self.total[rows]
        if self.one_term:
            torch.mm(a, b, out=total)
        elif total.dtype == a.dtype:
            total.addmm_(a, b)
        elif a.is_cuda:
            # 16-bit factors, float32 in and out, one cuBLAS call: nothing is rounded in between.
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # pyright: ignore[reportCallIssue]
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))  # a host has no such product; it pays with wide copies
