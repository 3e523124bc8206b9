"""Tiny GPT-OSS models for tests: every weight random and asymmetric, so that no swap or forgotten transpose goes unseen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_gptoss.checkpoint.weight_map import hf_shapes
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig

# hidden != width, and down_proj square in PARITY's sibling SQUARE, as in the published models
TINY = ModelConfig(
    num_hidden_layers=2, hidden_size=96, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    num_local_experts=4, num_experts_per_tok=2, vocab_size=160, sliding_window=8,
)  # fmt: skip
SQUARE = TINY.model_copy(update={"intermediate_size": 96})


def strong_tensors(model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors in which everything matters: large biases (the clamp at 7 is reached), sinks of size 1, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_shapes(model).items():
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            yield name, 1 + 0.2 * x
        elif "sinks" in name or "embed" in name:
            yield name, x
        elif "gate_up_proj_bias" in name:
            yield name, 3 * x
        elif "bias" in name:
            yield name, 0.5 * x
        else:
            yield name, 0.15 * x


def hugging_face_model(model: ModelConfig, tensors: dict[str, Tensor], folder: Path):
    """transformers' GptOssForCausalLM (eager attention, float32) with these weights, its config read from a file that we wrote."""
    from transformers import AutoConfig, GptOssForCausalLM

    write_hf_config(model, folder)
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    hf = GptOssForCausalLM(config).float().eval()
    result = hf.load_state_dict(tensors, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    return hf


def our_model(model: ModelConfig, shape, tensors: dict[str, Tensor], *, fault: str = "none"):
    """GptOssModel with these weights; process groups must exist."""
    from megatron_gptoss.checkpoint.weight_map import load_hf
    from megatron_gptoss.model.build import build_model

    built = build_model(model, shape, fault=fault)
    load_hf(built, model, tensors.items())
    return built.train()


def packed_batch(lengths: list[int], vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens_1T, positions_1T (restarting in every sequence), cu_seqlens int32."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return tokens, positions, cu_seqlens
