"""MXFP4 <-> plain numbers: what a block of 32 weights in 17 bytes means, and which block comes nearest to 32 given weights.

In: blocks and scales as GPT-OSS publishes them, or a matrix. Out: the matrix in bfloat16, exactly; or blocks, scales and how far they are
from the matrix. It knows no tensor names and no files.

A block is 32 neighbours along a matrix's rows (OCP Microscaling Formats v1.0): 16 bytes of two E2M1 codes each, the earlier one in the low
four bits, and one byte s that multiplies all of them by 2^(s - 127). E2M1 has a sign and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. s = 255
is not a number.

Canonical blocks. The same 32 numbers may fit at several scales (codes up to 3 at s are codes up to 6 at s - 1). `quantise` takes the
smallest, so the largest magnitude of a block is 4 or 6, and s = 0 for a block of zeros. OCP's rule (the largest number's exponent less two)
and ceil(log2(max / 6)), which triton_kernels uses, agree with it wherever the numbers are representable. A published block that is not
canonical gives the same numbers but other bytes; `like` gives its own bytes back.

Shape legend: G blocks in a row, 16 bytes of a block; matrices are [..., 32 G].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NOT_A_NUMBER = 255
LARGEST_FINITE = 252  # scales up to here: 6 * 2^125 is a bfloat16, 6 * 2^126 is not
BLOCKS_AT_ONCE = 1 << 14  # half a million numbers: intermediate results stay in the processor's cache

# Four codes at once: all 65,536 pairs of bytes -> four bfloat16 numbers, as one 64-bit word.
_CODE = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16)
_FOUR_NUMBERS = _CODE[torch.arange(1 << 16).unsqueeze(1) >> torch.tensor([0, 4, 8, 12]) & 15].view(torch.int64).flatten()
# 2^-127 and 2^127 are exact in bfloat16 (the first is subnormal), so that multiplying by a scale rounds nothing.
_SCALE = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - BIAS)
_SCALE[NOT_A_NUMBER] = math.nan


@dataclass(frozen=True)
class Loss:
    """How far a quantised tensor is from what it was made of; of several parts with `+`."""

    max_abs: float = 0.0  # largest difference of two numbers
    largest: float = 0.0  # largest magnitude of the tensor
    squared_error: float = 0.0  # sums over the tensor
    squared: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            max(self.max_abs, other.max_abs),
            max(self.largest, other.largest),
            self.squared_error + other.squared_error,
            self.squared + other.squared,
        )

    @property
    def relative(self) -> float:
        """Root of the summed squared differences, over that of the numbers."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a matrix [..., n] -> of its blocks [..., n / 32, 16] and scales [..., n / 32]. ValueError when 32 does not divide n."""
    *lead, n = shape
    if n % BLOCK:
        raise ValueError(f"rows of {n} numbers are not whole blocks of {BLOCK}")
    return (*lead, n // BLOCK, BLOCK // 2), (*lead, n // BLOCK)


def dequantise(blocks: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """uint8 [..., G, 16] and uint8 [..., G] -> bfloat16 [..., 32 G], exactly. A scale of 255 gives NaN; what bfloat16 cannot hold, inf.

    `out`: contiguous, to be filled instead of new memory.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"blocks {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} {list(scales.shape)} do not belong together"
        )
    *lead, G = scales.shape
    out = torch.empty(*lead, G * BLOCK, dtype=torch.bfloat16) if out is None else out
    numbers = out.view(-1, BLOCK)
    words, pairs = numbers.view(torch.int64), blocks.contiguous().view(torch.uint16).view(-1, BLOCK // 4)
    flat_scales, factor = scales.flatten(), _SCALE.to(torch.bfloat16)
    for first in range(0, len(flat_scales), BLOCKS_AT_ONCE):
        part = slice(first, first + BLOCKS_AT_ONCE)
        torch.index_select(_FOUR_NUMBERS, 0, pairs[part].flatten().int(), out=words[part].view(-1))
        numbers[part].mul_(factor.index_select(0, flat_scales[part].int()).unsqueeze(1))
    return out


def quantise(matrix: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor, Loss]:
    """Finite numbers [..., 32 G] -> (blocks uint8 [..., G, 16], scales uint8 [..., G], loss), with the least squared error of all blocks.

    `like`: scales uint8 [..., G] to prefer where they lose nothing; the others are canonical, see above. Ties of rounding go to the even
    code. Raises ValueError when 32 does not divide the rows.
    """
    block_shape, scale_shape = packed_shapes(tuple(matrix.shape))
    numbers = matrix.reshape(-1, BLOCK)
    blocks = torch.empty(len(numbers), BLOCK // 2, dtype=torch.uint8)
    scales = torch.empty(len(numbers), dtype=torch.uint8)
    wanted = None if like is None else like.reshape(-1)
    loss = Loss()
    for first in range(0, len(numbers), BLOCKS_AT_ONCE):
        part = slice(first, first + BLOCKS_AT_ONCE)
        blocks[part], scales[part], own = _quantise(numbers[part].float(), None if wanted is None else wanted[part])
        loss += own
    return blocks.view(block_shape), scales.view(scale_shape), loss


def _quantise(x: Tensor, like: Tensor | None) -> tuple[Tensor, Tensor, Loss]:
    """[n, 32] float32.

    With e = floor(log2(largest)) - 2, the optimum is among e - 1, e and e + 1. From e + 1 on nothing is cut off, and the grid at e + 2 is
    part of the one at e + 1. At e - 2 the largest number, cut to 6 of at least 16 units, loses 100 squared units; the others gain at most
    one each, since only those below 8 units (2 at e, where steps are half) can gain at all.
    """
    magnitude = x.abs()
    largest = magnitude.amax(1)
    canonical = torch.where(largest == 0, -BIAS, torch.frexp(largest).exponent - 3).clamp(-BIAS, NOT_A_NUMBER - 1 - BIAS)
    exponent, (codes, error) = canonical, _round(magnitude, canonical)

    def take(other: Tensor, theirs: Tensor, lost: Tensor, better: Tensor) -> None:
        nonlocal exponent, codes, error
        exponent, error = torch.where(better, other, exponent), torch.where(better, lost, error)
        codes = torch.where(better.unsqueeze(1), theirs, codes)

    for step in (1, -1):
        other = (canonical + step).clamp(-BIAS, NOT_A_NUMBER - 1 - BIAS)
        theirs, lost = _round(magnitude, other)
        lost = torch.ldexp(lost, 2 * (other - canonical))  # in units of the canonical exponent
        take(other, theirs, lost, lost < error)
    if like is not None:
        other = like.int() - BIAS
        theirs, lost = _round(magnitude, other)
        take(other, theirs, lost, (lost == 0) & (like != NOT_A_NUMBER))
    squared_error = torch.ldexp(error.double(), 2 * canonical).sum()
    difference = (magnitude - torch.ldexp(_value(codes), exponent.unsqueeze(1))).abs().max()
    loss = Loss(difference.item(), largest.max().item(), squared_error.item(), (magnitude.double() ** 2).sum().item())
    return _pack(codes, x.signbit()), (exponent + BIAS).to(torch.uint8), loss


def _round(magnitude: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (as float32, without sign) at these scales, and each block's squared error in units of its scale."""
    y = magnitude * _SCALE.float()[BIAS - exponent].unsqueeze(1)
    low = y.clamp(max=6.0)
    # Steps are 0.5 below 2, 1 below 4 and 2 above. Codes as a function of the number are concave: the right branch is the smallest.
    codes = torch.minimum(torch.minimum((2 * low).round_(), low.round() + 2), (low / 2).round_() + 4)
    return codes, (y - _value(codes)).square_().sum(1)


def _value(codes: Tensor) -> Tensor:
    """MAGNITUDES[codes]; numbers as a function of the code are convex."""
    return torch.maximum(torch.maximum(codes / 2, codes - 2), 2 * codes - 8)


def _pack(codes: Tensor, negative: Tensor) -> Tensor:
    nibbles = codes.to(torch.uint8) | negative.to(torch.uint8) << 3
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4
