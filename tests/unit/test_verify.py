"""The digest sees every change of names, dtypes, shapes, bytes and positions, and nothing else."""

from __future__ import annotations

import itertools

import torch

from megatron_gptoss.sync import verify
from megatron_gptoss.sync.verify import MASK, digest


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"embed": (33, 8), "sinks": (4,), "odd": (5,), "down": (2, 6, 4)}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return tensors | {"half": torch.randn(7, 3, generator=g).bfloat16(), "flags": torch.arange(5, dtype=torch.uint8)}


def test_order_buckets_layout_and_chunk_size_do_not_matter(monkeypatch) -> None:
    named = list(weights().items())
    whole = digest(named)
    assert 0 < whole <= MASK and digest(reversed(named)) == whole
    assert (digest(named[:2]) + digest(named[2:])) & MASK == whole
    assert digest((name, tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor) for name, tensor in named) == whole
    shifted = torch.empty(1 + 21, dtype=torch.bfloat16)[1:]  # starts at an odd half-word
    assert digest((n, shifted.copy_(t.flatten()).view(7, 3) if n == "half" else t) for n, t in named) == whole
    monkeypatch.setattr(verify, "WORDS_PER_CHUNK", 3)
    assert digest(named) == whole


def test_every_single_bit_counts() -> None:
    torch.set_num_threads(1)  # thousands of tiny sums
    for name, tensor in weights().items():
        tensor = tensor[:3]
        before = digest([(name, tensor)])
        octets = tensor.reshape(-1).view(torch.uint8)
        for at, bit in itertools.product(range(octets.numel()), range(8)):
            octets[at] ^= 1 << bit
            assert digest([(name, tensor)]) != before, (name, at, bit)
            octets[at] ^= 1 << bit


def test_names_shapes_dtypes_positions_and_multiplicity_count() -> None:
    base = torch.arange(1.0, 7.0)
    before = digest([("a", base)])
    others = [
        [("b", base)],
        [("a", base.view(2, 3))],
        [("a", base.view(torch.int32))],
        [("a", base.flip(0))],
        [("a", torch.cat([base, torch.zeros(1)]))],
        [("a", base), ("a", base)],
        [],
    ]
    assert len({before, *map(digest, others)}) == len(others) + 1
    a, b = torch.randn(4), torch.randn(4)
    assert digest([("a", a), ("b", b)]) != digest([("a", b), ("b", a)])
