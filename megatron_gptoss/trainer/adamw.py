"""AdamW whose moments may be bfloat16, and of which a share may live in host memory and be updated there.

In: parameters of one device with their gradients in `decoupled_grad`. Out: updated parameters. It stands inside Megatron's
DistributedOptimizer, which divides parameters over ranks and asks for state by name, as it asks TransformerEngine's FusedAdam. It reduces
and clips nothing.

The arithmetic is torch's fused AdamW in float32, on the device and on the host, over one chunk of elements after the other: no second copy
of all gradients or moments exists at any time. What is offloaded is pageable memory; only four buffers of a chunk are pinned, since pinned
blocks are rounded up to powers of two and would take up to twice their size.

Moments in bfloat16 are rounded stochastically. To the nearest they would stick: bfloat16 has 8 significant bits, so neighbours are 0.4 to
0.8 % apart, and an average that moves by less than half of that a step, as the second moment with beta2 = 0.999 does (0.1 %), would never
move. Stochastic rounding goes up as often as the dropped bits say, so that the mean is right. Its noise is a function of the number of the
update and of an element's place, not of a generator's state: a resumed run repeats it, and tensor-parallel ranks, which each update their
own copy of a norm, stay equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_gptoss.config.memory import OPTIMIZER_CHUNK

MOMENTS = ("exp_avg", "exp_avg_sq")
CACHE_BLOCK = 2**16  # parameters a CPU thread updates at once: 256 KiB a tensor, which a dozen operations find in its cache


@dataclass(frozen=True)
class Piece:
    """A chunk of one parameter: flat views of the same elements."""

    group: dict[str, Any]  # rates and the number of this update
    weight: Tensor  # on the device, in the model's dtype
    gradient: Tensor  # on the device, float32
    master: Tensor  # float32, where the piece is updated; the weight itself where that is float32 and on the device
    exp_avg: Tensor
    exp_avg_sq: Tensor
    key: int  # of its noise


class PlannedAdamW(torch.optim.Optimizer):
    """`moments`: their dtype. `host_share`: of all elements, the share whose state is on the host, by whole parameters."""

    def __init__(
        self, param_groups: list[dict[str, Any]], *, moments: torch.dtype, host_share: float, chunk: int = OPTIMIZER_CHUNK
    ) -> None:
        super().__init__(param_groups, {})
        self.moments, self.chunk = moments, chunk
        self.on_host: set[Tensor] = set()
        self._noise: dict[torch.device, Tensor] = {}
        self._staging: _Staging | None = None
        total = hosted = 0
        for group in self.param_groups:
            group["step"] = 0
            for p in group["params"]:
                total += p.numel()
                if hosted + p.numel() / 2 <= host_share * total:  # as near to the share, all the way through, as whole parameters allow
                    hosted += p.numel()
                    self.on_host.add(p)
                self.state[p] = self._first_state(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Taken as it is: Megatron's shards of float32 weights are views, which torch's own would refuse."""
        self.param_groups.append(param_group)

    def _first_state(self, p: Tensor) -> dict[str, Tensor]:
        device = torch.device("cpu") if p in self.on_host else p.device
        in_place = p.dtype == torch.float32 and p not in self.on_host
        return {
            "step": torch.tensor(0.0),  # torch's own keeps it here, and Megatron looks for it; the groups' is what counts
            "master_param": p if in_place else p.detach().to(device, copy=True).float(),
            **{name: torch.zeros(p.shape, dtype=self.moments, device=device) for name in MOMENTS},
        }

    # -- what Megatron asks --------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_weights(self) -> None:
        """The parameters were written from outside: make them the originals."""
        for p, state in self.state.items():
            if state["master_param"] is not p:
                state["master_param"].copy_(p)

    def get_unscaled_state(self, p: Tensor, name: str) -> Tensor:
        return self.state[p][name]

    @torch.no_grad()
    def set_scaled_state(self, p: Tensor, name: str, value: Tensor) -> None:
        """From a checkpoint of any dtype; to bfloat16 it is rounded to the nearest, so what was bfloat16 comes back as it was."""
        self.state[p][name].copy_(value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Values are copied into the tensors that are there: torch's own would change their dtype and place, which this run chose."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            group["step"] = int(group["step"])
        for index, saved in state_dict["state"].items():
            for name in ("master_param", *MOMENTS):
                if saved[name] is not self.state[parameters[index]][name]:
                    self.set_scaled_state(parameters[index], name, saved[name])
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.tensor(float(group["step"]))

    # -- a step --------------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                self.state[p]["step"].fill_(group["step"])
        pieces = list(self._pieces())
        hosted = [piece for piece, on_host in pieces if on_host]
        staging = self._begin_staging(hosted)
        for piece in (piece for piece, on_host in pieces if not on_host):  # queued on a GPU, done while the host works
            self._update(piece, piece.gradient)
            if piece.master is not piece.weight:
                piece.weight.copy_(piece.master)
        if staging:
            self._step_on_host(hosted, staging)

    def _pieces(self) -> Iterator[tuple[Piece, bool]]:
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                weight = p.view(-1)
                gradient = p.decoupled_grad.view(-1)
                master = weight if state["master_param"] is p else state["master_param"].view(-1)
                exp_avg, exp_avg_sq = (state[name].view(-1) for name in MOMENTS)
                for start in range(0, p.numel(), self.chunk):
                    part = slice(start, min(start + self.chunk, p.numel()))
                    cut = weight[part]
                    key = random.Random(f"{group['step']}/{index}").getrandbits(32) - 2**31
                    original = cut if master is weight else master[part]
                    yield Piece(group, cut, gradient[part], original, exp_avg[part], exp_avg_sq[part], key), p in self.on_host
                    index += 1

    def _update(self, piece: Piece, gradient: Tensor) -> None:
        """The originals and moments of one piece, where they are; `gradient` is there too."""
        block = CACHE_BLOCK * torch.get_num_threads() if piece.master.device.type == "cpu" else self.chunk
        for start in range(0, gradient.numel(), block):
            self._update_block(piece, gradient, slice(start, min(start + block, gradient.numel())))

    def _update_block(self, piece: Piece, gradient: Tensor, block: slice) -> None:
        group, rounded, original = piece.group, self.moments != torch.float32, piece.master[block]
        exp_avg, exp_avg_sq = (m[block].float() if rounded else m[block] for m in (piece.exp_avg, piece.exp_avg_sq))
        adamw(
            [original], [gradient[block]], [exp_avg], [exp_avg_sq], [],
            [torch.full((), group["step"] - 1.0, device=original.device)],  # counted up in there
            fused=True, amsgrad=False, maximize=False, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            beta1=group["betas"][0], beta2=group["betas"][1],
        )  # fmt: skip
        if rounded:
            bits = self._bits(original.device)[block] ^ piece.key
            _round_stochastically(piece.exp_avg[block], exp_avg, bits & 0xFFFF)
            _round_stochastically(piece.exp_avg_sq[block], exp_avg_sq, bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF))

    def _bits(self, device: torch.device) -> Tensor:
        """32 random bits for each element of a chunk. Every piece of every update flips them by its own random key, so that those of one
        element are independent over updates, and those of any two elements of this optimizer of each other. Other ranks and the other
        optimizer have the same bits at the same places."""
        if device not in self._noise:
            generator = torch.Generator().manual_seed(0)
            longest = min(self.chunk, max(p.numel() for p in self.state))
            self._noise[device] = torch.empty(longest, dtype=torch.int32).random_(-(2**31), 2**31, generator=generator).to(device)
        return self._noise[device]

    # -- the share on the host -----------------------------------------------------------------------------------------------------------

    def _begin_staging(self, hosted: list[Piece]) -> _Staging | None:
        if not hosted:
            return None
        if self._staging is None:
            self._staging = _Staging(hosted[0].weight.device, max(piece.weight.numel() for piece in hosted))
        self._staging.begin(hosted[0])
        return self._staging

    def _step_on_host(self, hosted: list[Piece], staging: _Staging) -> None:
        """While the host updates one piece, the next one's gradient comes and the last one's weights go."""
        for i, piece in enumerate(hosted):
            if i + 1 < len(hosted):
                staging.fetch(i + 1, hosted[i + 1])
            self._update(piece, staging.gradient(i, piece))
            staging.send(i, piece)
        staging.end()


def _round_stochastically(target: Tensor, value: Tensor, bits: Tensor) -> None:
    """float32 to bfloat16: the 16 bits that are dropped decide how likely the magnitude goes up. `value` is spent. Zero stays zero."""
    value.view(torch.int32).add_(bits).bitwise_and_(-(2**16))
    target.copy_(value)  # exact: the dropped bits are zero now


class _Staging:
    """Two buffers for gradients on their way to the host and two for weights on their way back. On a GPU they are pinned and copied by
    streams of their own; where the device is the host itself, copies are just made."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self.on_gpu = device.type == "cuda"
        self.gradients, self.weights = (
            [torch.empty(numel, dtype=torch.float32, pin_memory=self.on_gpu) for _ in range(2)] for _ in range(2)
        )
        self.coming, self.going = (torch.cuda.Stream(device) for _ in range(2)) if self.on_gpu else (None, None)
        self.came: list[torch.cuda.Event | None] = [None, None]
        self.went: list[torch.cuda.Event | None] = [None, None]

    def begin(self, first: Piece) -> None:
        """Fetch the first gradient, behind what has been queued so far: reduction and clipping."""
        if self.coming is not None:
            self.coming.wait_stream(torch.cuda.current_stream())
        self.fetch(0, first)

    def fetch(self, i: int, piece: Piece) -> None:
        self.came[i % 2] = self._copy(self.gradients[i % 2][: piece.gradient.numel()], piece.gradient, self.coming)

    def gradient(self, i: int, piece: Piece) -> Tensor:
        if (event := self.came[i % 2]) is not None:
            event.synchronize()
        return self.gradients[i % 2][: piece.gradient.numel()]

    def send(self, i: int, piece: Piece) -> None:
        """The original, rounded to the weight's dtype."""
        if (event := self.went[i % 2]) is not None:
            event.synchronize()  # what lay in this buffer has left it
        rounded = self.weights[i % 2].view(piece.weight.dtype)[: piece.weight.numel()]
        rounded.copy_(piece.master)
        self.went[i % 2] = self._copy(piece.weight, rounded, self.going)

    def end(self) -> None:
        if self.going is not None:
            torch.cuda.current_stream().wait_stream(self.going)

    def _copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            (done := torch.cuda.Event()).record(stream)
            return done
