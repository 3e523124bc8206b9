"""Hugging Face config.json of GPT-OSS <-> ModelConfig.

In: a config.json (published, or saved by transformers, or by us). Out: ModelConfig, and the other way round. Anything about the
architecture that ModelConfig cannot say (tied embeddings, another layer pattern, rounded YaRN borders) is refused, never ignored.
Quantised weights are the business of checkpoint/, not of this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError

# Fields with the same name and meaning on both sides.
SAME_NAME = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts",
    "num_experts_per_tok", "vocab_size", "sliding_window", "max_position_embeddings", "rms_norm_eps", "initializer_range",
)  # fmt: skip

# ModelConfig's name -> name inside rope_parameters (transformers 5) or rope_scaling (transformers 4 and the published files).
ROPE_NAME = {
    "rope_factor": "factor",
    "rope_original_max_position": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}

# What GPT-OSS is by definition; a file that says otherwise describes another model.
FIXED: dict[str, Any] = {"model_type": "gpt_oss", "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu"}


def layer_types(num_hidden_layers: int) -> list[str]:
    """The alternating pattern: layer 0 slides, layer 1 sees everything, and so on."""
    return ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(num_hidden_layers)]


def read_hf_config(path: Path) -> ModelConfig:
    """Read `path` (a config.json or the folder that holds one). Raises CheckpointError with the file and the field."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: not a JSON object")

    for field, wanted in FIXED.items():
        # tie_word_embeddings is left out by files that follow transformers' default for GPT-OSS; model_type never is.
        if found.get(field, None if field == "model_type" else wanted) != wanted:
            raise CheckpointError(f"{file}: {field} = {found.get(field)!r}, GPT-OSS has {wanted!r}")

    values = {name: _need(found, name, file) for name in SAME_NAME}
    values["swiglu_limit"] = float(found.get("swiglu_limit", 7.0))  # transformers fixes 7.0 in code and leaves the field out
    values.update(_rope_values(found, file))
    for name in ("rms_norm_eps", "initializer_range"):
        values[name] = float(values[name])

    pattern = found.get("layer_types")
    if pattern is not None and pattern != layer_types(values["num_hidden_layers"]):
        raise CheckpointError(f"{file}: layer_types is not the alternation of sliding (first) and full attention")
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{file}: {'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}") from error


def quantization(folder: Path) -> str | None:
    """How the weights of a Hugging Face folder are packed ("mxfp4" in the published ones), None when they are plain numbers."""
    try:
        found = json.loads((folder / "config.json").read_text())["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a config.json that cannot be read is read_hf_config's to refuse
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None


def write_hf_config(
    model: ModelConfig,
    path: Path,
    *,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write `path` (a config.json or an existing folder) in the layout that transformers 5.17 and vLLM 0.26 both read."""
    file = path / "config.json" if path.is_dir() else path
    rope = {ours: getattr(model, ours) for ours in ROPE_NAME}
    rope_scaling = {ROPE_NAME[ours]: value for ours, value in rope.items()} | {"rope_type": "yarn", "truncate": False}
    content: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        **FIXED,
        **{name: getattr(model, name) for name in SAME_NAME},
        "layer_types": layer_types(model.num_hidden_layers),
        # transformers 5 reads rope_parameters; transformers 4 and the published files say the same in two fields.
        "rope_parameters": {**rope_scaling, "rope_theta": model.rope_theta},
        "rope_scaling": rope_scaling,
        "rope_theta": model.rope_theta,
        "swiglu_limit": model.swiglu_limit,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    file.write_text(json.dumps(content, indent=2) + "\n")


def difference(a: ModelConfig, b: ModelConfig) -> list[tuple[str, object, object]]:
    """The fields in which two architectures differ: (field, value in a, value in b)."""
    return [(name, getattr(a, name), getattr(b, name)) for name in ModelConfig.model_fields if getattr(a, name) != getattr(b, name)]


def _need(found: dict[str, Any], name: str, file: Path) -> Any:
    if found.get(name) is None:
        raise CheckpointError(f"{file}: {name} is missing")
    return found[name]


def _rope_values(found: dict[str, Any], file: Path) -> dict[str, Any]:
    """YaRN's numbers, from whichever of the two layouts the file has."""
    where = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
    rope = _need(found, where, file)
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        raise CheckpointError(f"{file}: {where}.rope_type = {kind!r}, GPT-OSS has 'yarn'")
    if rope.get("truncate") is not False:
        raise CheckpointError(f"{file}: {where}.truncate = {rope.get('truncate')!r}, GPT-OSS has false")
    values = {}
    for ours, theirs in ROPE_NAME.items():
        value = _need(rope, theirs, file)
        values[ours] = int(value) if ours == "rope_original_max_position" else float(value)
    theta = rope.get("rope_theta", found.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"{file}: rope_theta is missing")
    return {**values, "rope_theta": float(theta)}
