"""Did the weights that arrived equal the weights that were sent? One number that both sides compute.

In: named tensors, on any device, in any order. Out: `digest`, a 64-bit number.
It moves no weights and compares nothing itself: the sender computes it, each engine reports its own, `rollout/pool.py` compares.

The digest is made of integer sums modulo 2^64 on the tensor's own device, so it does not depend on the order of reduction, on the number
of buckets, or on CPU against GPU, and runs at memory speed. It guards against faults, not against an adversary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_gptoss.types import PolicyVersion

NO_WEIGHTS: PolicyVersion = -1  # version of an engine that was never given a whole policy, or whose last update failed half-way
MASK = (1 << 64) - 1
WORDS_PER_CHUNK = 1 << 22  # 32-bit words summed at once: bounds the int64 scratch at 32 MiB and a few


def digest(named_tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Checksum over names, dtypes, shapes and bytes; 0 for no tensors, and the sum (mod 2^64) of its parts for a union of tensors."""
    return sum(tensor_digest(name, tensor) for name, tensor in named_tensors) & MASK


def tensor_digest(name: str, tensor: Tensor) -> int:
    """Checksum of one tensor. Every change of a single 32-bit word changes it."""
    label = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()
    key = zlib.crc32(label) | zlib.crc32(label, 0x9E3779B9) << 32
    return _mix(key + _mix(_weighted_sum(_words(tensor))))


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int32 words, padded with zeros to a multiple of 4."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 4:
        octets = torch.nn.functional.pad(octets, (0, 4 - octets.numel() % 4))
    # A view of another dtype needs an aligned start, which a slice of a byte buffer may lack.
    return (octets if octets.storage_offset() % 4 == 0 and octets.data_ptr() % 4 == 0 else octets.clone()).view(torch.int32)


def _weighted_sum(words: Tensor) -> int:
    """Sum of word_i * (2i + 1) mod 2^64. An odd weight is invertible: no changed word hides. The weights differ: no swapped words hide."""
    total = 0
    for start in range(0, words.numel(), WORDS_PER_CHUNK):
        chunk = words[start : start + WORDS_PER_CHUNK].to(torch.int64)
        weight = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device).mul_(2).add_(1)
        total += int((chunk * weight).sum())  # int64 wraps, which is what mod 2^64 means
    return total & MASK


def _mix(x: int) -> int:
    """splitmix64's finalizer, so that sums of digests of related tensors do not cancel."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
