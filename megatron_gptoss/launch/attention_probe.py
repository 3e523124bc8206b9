"""Does an attention backend compute what GPT-OSS needs on this machine: sinks, packed sequences, windows?

    python -m megatron_gptoss.launch.attention_probe BACKEND cpu|cuda sinks|plain...

In: a backend, a device, with sinks or without or both. Out: one JSON object a line, for each of {one sequence, packed} x {full, window}:
the largest relative error of output and gradients against a softmax written out below in float64, or why there is none. It times
nothing and judges nothing (node_checks.py does). Kernels are compiled here, which may take a minute.

Shape legend: T packed tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.attention.api import attend, find_backend
from megatron_gptoss.errors import MachineError

NAMES = ("out", "dq", "dk", "dv", "dsink")


def exact(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, bounds: tuple[int, ...], window: int | None) -> Tensor:
    """Output [T, H, D], by the definition: a sink is one more column of scores, whose share is thrown away."""
    T, H, D = q_THD.shape
    k_THD, v_THD = (x.repeat_interleave(H // k_TKD.shape[1], dim=1) for x in (k_TKD, v_TKD))
    position = torch.arange(T, device=q_THD.device)
    sequence = torch.bucketize(position, torch.tensor(bounds[1:], device=q_THD.device), right=True)
    distance = position[:, None] - position[None]
    seen = (sequence[:, None] == sequence[None]) & (distance >= 0) & (distance < (window or T))
    scores_HTT = torch.einsum("thd,uhd->htu", q_THD, k_THD).div(D**0.5).masked_fill(~seen, -torch.inf)
    if sink_H is not None:
        scores_HTT = torch.cat([scores_HTT, sink_H[:, None, None].expand(H, T, 1)], dim=2)
    return torch.einsum("htu,uhd->thd", scores_HTT.softmax(dim=2)[..., :T], v_THD)


def probe(backend: str, device: str, sinks: bool, packed: bool, windowed: bool) -> dict[str, Any]:
    """{"error": relative, "worst": which} or {"absent": words} or {"refused": words} or {"failed": words}."""
    on_gpu = device == "cuda"
    H, K, D, window = (16, 2, 64, 128) if on_gpu else (4, 2, 16, 12)
    bounds = ((0, 311, 312, 640, 777) if packed else (0, 777)) if on_gpu else ((0, 30, 31, 64) if packed else (0, 64))
    make = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def normal(heads: int) -> Tensor:
        return torch.randn(bounds[-1], heads, D, generator=make, device=device).to(dtype)

    # A sink of 0 could hide a backend that ignores it: its share would be small beside hundreds of keys.
    leaves = [normal(H), normal(K), normal(K)] + ([torch.linspace(-6, 6, H, device=device)] if sinks else [])
    dout_THD = normal(H)

    def run(leaves: list[Tensor], forward: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in leaves]
        out_THD = forward(*leaves[:3], leaves[3] if sinks else None)
        return [out_THD.detach(), *torch.autograd.grad(out_THD, leaves, dout_THD.to(out_THD.dtype))]

    shown = {
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device) if packed else None,
        "window": window if windowed else None,
    }
    try:
        find_backend(backend, leaves[0])
    except MachineError as error:
        return {"absent": str(error).partition("cannot run here: ")[2] or str(error)}
    try:
        found = run(leaves, lambda *x: attend(*x, **shown, backend=backend)[0])
    except MachineError as error:
        return {"refused": str(error)}
    except Exception as error:  # a backend's own words, whatever they are
        return {"failed": f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0][:300]}"}
    truth = run([x.double() for x in leaves], lambda q, k, v, sink: exact(q, k, v, sink, bounds, shown["window"]))
    errors = {n: float((f.double() - t).norm() / t.norm()) for n, f, t in zip(NAMES, found, truth, strict=False)}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else torch.inf)
    return {"error": errors[worst] if errors[worst] == errors[worst] else None, "worst": worst}  # None: not a number


def main(backend: str, device: str, *kinds: str) -> None:
    for sinks, packed, windowed in product([kind == "sinks" for kind in kinds], (False, True), (False, True)):
        cell = {"backend": backend, "sinks": sinks, "packed": packed, "window": windowed}
        print(json.dumps(cell | probe(backend, device, sinks, packed, windowed)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
