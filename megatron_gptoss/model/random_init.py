"""Random weights as Hugging Face's GPT-OSS initialises them, the same for every parallel layout.

In: ModelConfig and a seed. Out: Hugging Face tensors, for checkpoint.weight_map.load_hf. Each tensor has its own generator, seeded by its
name, so no rank's draws depend on what another holds. The values are not transformers' values for that seed, only its distributions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_gptoss.checkpoint.weight_map import hf_shapes
from megatron_gptoss.config.schema import ModelConfig


def random_hf_tensors(model: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor on `device`, where it is drawn) of every tensor. A GPU draws other values than the host, the same on all ranks.
    The host takes 0.5 s for 100 million (two cores of an EPYC, 2026-12-01).

    Source: GptOssPreTrainedModel._init_weights of transformers 5.17. normal(0, initializer_range) for matrices, embeddings, experts, sinks
    and the router with its bias; zeros for the other biases; ones for norms.
    """
    for name, shape in hf_shapes(model).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, device=device)
        elif name.endswith("bias") and not name.endswith("router.bias"):
            yield name, torch.zeros(shape, device=device)
        else:
            drawn = torch.empty(shape, device=device)
            yield name, drawn.normal_(0.0, model.initializer_range, generator=_generator(seed, name, device))


def _generator(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # manual_seed takes 63 bits
