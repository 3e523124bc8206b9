"""Did the weights that arrived equal the weights that were sent? One number that both sides compute.

In: named tensors, on any device, in any order, or buckets of a `SyncPlan` one by one. Out: a 64-bit number.
It moves no weights and compares nothing itself: the sender computes it, each engine reports its own, `rollout/pool.py` compares.

The digest is made of integer sums modulo 2^64 on the tensor's own device, so it does not depend on the order of reduction, on the number
of buckets, or on CPU against GPU, and runs at memory speed. It guards against faults, not against an adversary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_gptoss.sync.plan import BucketPlan, SyncPlan
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
    return _mix(key + _mix(int(weighted_sum(_words(tensor)))))


class BucketDigests:
    """The digest of a policy that travels as a plan's buckets; what is summed stays on the device until `total`.

    It covers the plan (names, shapes, dtype, places) and every byte of every bucket, in the layout that travels. Each side keeps one.
    """

    def __init__(self, plan: SyncPlan, device: torch.device) -> None:
        self.plan = plan
        self.sums = torch.zeros(len(plan.buckets), dtype=torch.int64, device=device)

    def add(self, bucket: BucketPlan, buffer: Tensor) -> None:
        """`buffer`: uint8, begins with the bucket. On a GPU nothing waits for it."""
        words = buffer[: bucket.num_bytes].view(torch.int32)
        if words.is_cuda:
            from megatron_gptoss.sync.digest_kernel import add_weighted_sum

            add_weighted_sum(words, self.sums[bucket.index])
        else:
            self.sums[bucket.index] += weighted_sum(words)

    def total(self) -> int:
        """Waits for the device. Call it when every bucket has been added, once."""
        return sum(_mix(self.plan.key + bucket + _mix(value)) for bucket, value in enumerate(self.sums.tolist())) & MASK


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int32 words, padded with zeros to a multiple of 4."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 4:
        octets = torch.nn.functional.pad(octets, (0, 4 - octets.numel() % 4))
    # A view of another dtype needs an aligned start, which a slice of a byte buffer may lack.
    return (octets if octets.storage_offset() % 4 == 0 and octets.data_ptr() % 4 == 0 else octets.clone()).view(torch.int32)


def weighted_sum(words: Tensor) -> Tensor:
    """int64 [], on the words' device: sum of word_i * (2i + 1) mod 2^64. An odd weight is invertible: no changed word hides. The weights
    differ: no swapped words hide."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), WORDS_PER_CHUNK):
        chunk = words[start : start + WORDS_PER_CHUNK].to(torch.int64)
        weight = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device).mul_(2).add_(1)
        total += (chunk * weight).sum()  # int64 wraps, which is what mod 2^64 means
    return total


def _mix(x: int) -> int:
    """splitmix64's finalizer, so that sums of digests of related tensors do not cancel."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
