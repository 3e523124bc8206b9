"""Checkpoints on disk for tests: every weight random and asymmetric, every expert different. The MXFP4 and OpenAI folders are written
without the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_gptoss.checkpoint.hf_files import read_hf_tensors, write_hf_folder
from megatron_gptoss.checkpoint.mxfp4 import packed_shapes
from megatron_gptoss.checkpoint.targets import MXFP4_CONFIG
from megatron_gptoss.config.hf_config import write_hf_config
from tests.helpers.tiny_model import TINY, strong_tensors


def write_source(folder: Path, model=TINY, seed=3, dtype=torch.bfloat16, max_shard_bytes=60e3) -> dict[str, torch.Tensor]:
    """A Hugging Face folder in which every weight is random and asymmetric, and files that belong to a tokenizer."""
    tensors = {name: t.to(dtype) for name, t in strong_tensors(model, seed)}
    write_hf_folder(folder, model, tensors.items(), max_shard_bytes=max_shard_bytes, eos_token_id=[3, 5], pad_token_id=0)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 159}]}))
    return tensors


def random_mxfp4(folder: Path, model=TINY, seed=5, *, low_codes: bool = False) -> None:
    """An MXFP4 folder written by hand, without the code under test: random codes, every expert different, scales around 2^-3."""
    g = torch.Generator().manual_seed(seed)
    tensors, like = {}, {name: t.bfloat16() for name, t in strong_tensors(model, seed)}
    for name, tensor in like.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            E, inputs, outputs = tensor.shape
            blocks, scales = packed_shapes((E, outputs, inputs))
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=g, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(121, 124, scales, generator=g, dtype=torch.uint8)
            if low_codes:
                tensors[f"{name}_blocks"][:, ::3] &= 0xBB  # fit at a smaller scale too
                tensors[f"{name}_blocks"][:, 0] = 0
        else:
            tensors[name] = tensor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_hf_config(model, folder, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4_CONFIG}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_hf_tensors(folder))


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def openai_folder(folder: Path, hf: Path) -> None:
    """OpenAI's layout by its own words (gpt_oss/torch/model.py): q, k, v one after another, one file without an index."""
    theirs, tensors = {}, tensors_of(hf)
    names = {
        "input_layernorm.weight": "attn.norm.scale", "self_attn.sinks": "attn.sinks", "self_attn.o_proj.weight": "attn.out.weight",
        "self_attn.o_proj.bias": "attn.out.bias", "post_attention_layernorm.weight": "mlp.norm.scale",
        "mlp.router.weight": "mlp.gate.weight", "mlp.router.bias": "mlp.gate.bias",
        "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
        "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales", "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
        "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks", "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
        "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
    }  # fmt: skip
    for layer in range(TINY.num_hidden_layers):
        for ours, other in names.items():
            theirs[f"block.{layer}.{other}"] = tensors[f"model.layers.{layer}.{ours}"]
        for kind in ("weight", "bias"):
            qkv = [tensors[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            theirs[f"block.{layer}.attn.qkv.{kind}"] = torch.cat(qkv)
    theirs |= {"embedding.weight": tensors["model.embed_tokens.weight"], "norm.scale": tensors["model.norm.weight"],
               "unembedding.weight": tensors["lm_head.weight"]}  # fmt: skip
    folder.mkdir()
    save_file(theirs, folder / "model.safetensors")
    config = {
        "num_hidden_layers": 2, "num_experts": 4, "experts_per_token": 2, "vocab_size": 160, "hidden_size": 96, "intermediate_size": 64,
        "swiglu_limit": 7.0, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8,
        "initial_context_length": 4096, "rope_theta": 150000, "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
