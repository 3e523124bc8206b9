"""Hugging Face <-> Megatron: nothing lost, nothing mixed up, nothing guessed; and the folders that hold the tensors."""

import json
import math

import pytest
import torch

from megatron_gptoss.checkpoint.hf_files import read_hf_tensors, write_hf_folder
from megatron_gptoss.checkpoint.weight_map import entries, export_hf, hf_shapes, load_hf
from megatron_gptoss.config.hf_config import difference, read_hf_config, write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.model.random_init import random_hf_tensors
from tests.helpers.tiny_model import SQUARE, TINY, our_model, strong_tensors

BIG = ModelConfig(num_hidden_layers=36, num_local_experts=128)


@pytest.mark.parametrize(("model", "parameters"), [(ModelConfig(), 20_914_757_184), (BIG, 116_829_156_672)])
def test_published_parameter_counts(model, parameters):
    assert sum(math.prod(shape) for shape in hf_shapes(model).values()) == parameters


def test_names_and_shapes_are_those_of_transformers():
    from transformers import GptOssConfig, GptOssForCausalLM

    with torch.device("meta"):
        hf = GptOssForCausalLM(GptOssConfig(**TINY.model_dump(include={
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "num_local_experts", "num_experts_per_tok", "vocab_size",
        })))  # fmt: skip
    assert hf_shapes(TINY) == {name: tuple(p.shape) for name, p in hf.named_parameters()}


@pytest.mark.parametrize("model", [TINY, SQUARE])
def test_there_and_back_is_bit_equal(one_rank, model):
    tensors = dict(strong_tensors(model, seed=3))
    back = dict(export_hf(our_model(model, one_rank, tensors), model))
    assert list(back) == list(hf_shapes(model))
    for name, tensor in back.items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.is_contiguous() and not tensor.requires_grad


def test_rearrangements_worked_by_hand(one_rank):
    """The published model's expert matrices are square, so only values can tell a transpose."""
    tensors = dict(strong_tensors(SQUARE, seed=3))
    layer = our_model(SQUARE, one_rank, tensors).decoder.layers[1]
    experts = "model.layers.1.mlp.experts."
    expert, width, D = layer.mlp.experts, SQUARE.intermediate_size, SQUARE.head_dim
    for unit in (0, 1, width - 1):
        gate_up = tensors[experts + "gate_up_proj"][2]
        assert torch.equal(expert.linear_fc1.weight[2, unit], gate_up[:, 2 * unit])  # gate
        assert torch.equal(expert.linear_fc1.weight[2, width + unit], gate_up[:, 2 * unit + 1])  # up
        assert expert.linear_fc1.bias[2, width + unit] == tensors[experts + "gate_up_proj_bias"][2, 2 * unit + 1]
        assert torch.equal(expert.linear_fc2.weight[2, :, unit], tensors[experts + "down_proj"][2, unit])
    # four query heads over two kv heads: q0 q1 k0 v0 q2 q3 k1 v1
    heads = layer.self_attention.linear_qkv.weight.unflatten(0, (8, D))
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"].unflatten(0, (-1, D)) for x in "qkv")
    assert torch.equal(heads, torch.stack([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]))


@pytest.mark.parametrize("model", [TINY, SQUARE])
def test_packed_rows_are_put_in_the_order_of_megatron_s(model):
    """Moving packed rows and turning numbers are one and the same."""
    tensors, packed = dict(strong_tensors(model, seed=3)), [entry for entry in entries(model) if entry.row.packed]
    assert {entry.hf_names[0].rsplit(".", 1)[1] for entry in packed} == {"gate_up_proj", "down_proj"} and len(packed) == 4
    for entry in packed:
        x = tensors[entry.hf_names[0]][1]
        assert torch.equal(entry.row.packed(x.t()), entry.row.to_megatron(model, x)), entry.hf_names


def test_every_parameter_is_in_the_table(one_rank):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 0)))
    assert {e.megatron_name() for e in entries(TINY)} == {name for name, _ in model.named_parameters()}


def test_divided_axes_are_the_ones_megatron_divides(one_rank):
    """The table's axis against the attribute that Megatron itself puts on its parameters."""
    parameters = dict(our_model(TINY, one_rank, dict(strong_tensors(TINY, 0))).named_parameters())
    for entry in entries(TINY):
        p = parameters[entry.megatron_name()]
        theirs = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        assert entry.row.tensor_axis == theirs, entry.megatron_name()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "1 missing: lm_head.weight"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), "1 missing: model.layers.1.self_attn.k_proj.bias"),
        (lambda t: t.update({"model.layers.2.self_attn.sinks": torch.ones(4)}), "1 unexpected: model.layers.2.self_attn.sinks"),
        (lambda t: t.update({"model.norm.weight": torch.ones(95)}), r"1 misshaped: model.norm.weight \[95\] instead of \[96\]"),
    ],
)
def test_weights_that_do_not_fit_are_listed(one_rank, change, words):
    tensors = dict(strong_tensors(TINY, 0))
    model = our_model(TINY, one_rank, tensors)
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        load_hf(model, TINY, tensors.items())


def test_random_weights_depend_on_seed_and_name_only_and_follow_transformers():
    first, again, other = (dict(random_hf_tensors(TINY, seed)) for seed in (0, 0, 1))
    drawn = [name for name in first if not (name.endswith("norm.weight") or (name.endswith("bias") and "router" not in name))]
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == (name not in drawn), name
    assert len({float(first[name].flatten()[0]) for name in drawn}) == len(drawn), "two tensors share their draws"
    for name in drawn:
        if first[name].numel() > 1000:
            n = first[name].numel()
            # five standard errors of a standard deviation
            assert abs(first[name].std() / TINY.initializer_range - 1) < 5 / math.sqrt(2 * n), name
    assert all((first[n] == 1).all() for n in first if n.endswith("norm.weight"))
    assert all((first[n] == 0).all() for n in first if n.endswith("_proj.bias") or n.endswith("_proj_bias"))


@pytest.mark.parametrize("max_shard_bytes", [5e9, 60e3])
def test_folder_holds_what_was_written_and_transformers_reads_it(tmp_path, max_shard_bytes):
    from transformers import GptOssForCausalLM

    tensors = dict(strong_tensors(TINY, 4))
    folder = tmp_path / "out" / "model"
    write_hf_folder(folder, TINY, tensors.items(), max_shard_bytes=max_shard_bytes, eos_token_id=3, pad_token_id=0)
    back = dict(read_hf_tensors(folder))
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    shards = sorted(folder.glob("*.safetensors"))
    assert [p.name for p in folder.parent.iterdir()] == ["model"], "a temporary folder was left behind"
    if max_shard_bytes == 60e3:
        largest = max(t.numel() * 4 for t in tensors.values())
        assert len(shards) > 3 and max(s.stat().st_size for s in shards) < max(60e3, largest) + 10_000  # headers
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    hf = GptOssForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, tensors[name]) for name, p in hf.named_parameters())
    assert hf.config.eos_token_id == 3 and hf.config.pad_token_id == 0


def test_a_folder_is_whole_or_absent(tmp_path):
    def torn():
        yield "model.norm.weight", torch.ones(96)
        raise RuntimeError("the source failed half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_hf_folder(tmp_path / "model", TINY, torn())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_hf_folder(tmp_path / "model", TINY, [])


def test_missing_and_torn_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        list(read_hf_tensors(tmp_path / "absent"))
    write_hf_folder(tmp_path / "m", TINY, strong_tensors(TINY, 0), max_shard_bytes=60e3)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=shard.name):
        list(read_hf_tensors(tmp_path / "m"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, missing"):
        list(read_hf_tensors(tmp_path / "m"))


def test_config_survives_the_file_and_transformers(tmp_path):
    from transformers import AutoConfig

    odd = TINY.model_copy(update={"rope_theta": 1e4, "rope_factor": 8.0, "rope_original_max_position": 512, "rms_norm_eps": 1e-6,
                                  "max_position_embeddings": 4096, "initializer_range": 0.05})  # fmt: skip
    write_hf_config(odd, tmp_path, eos_token_id=[1, 2], pad_token_id=0)
    assert read_hf_config(tmp_path) == odd
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters == {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "rope_theta": 1e4,
    }  # fmt: skip
    assert (theirs.sliding_window, theirs.layer_types) == (8, ["sliding_attention", "full_attention"])
    assert (theirs.eos_token_id, theirs.tie_word_embeddings, theirs.attention_bias) == ([1, 2], False, True)
    theirs.save_pretrained(tmp_path / "saved")
    assert read_hf_config(tmp_path / "saved") == odd


# openai/gpt-oss-20b's config.json, without its quantization_config
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
                     "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_the_published_config_is_the_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert difference(read_hf_config(tmp_path / "config.json"), ModelConfig()) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"layer_types": ["full_attention"] * 24}, "layer_types"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "truncate": True}}, "truncate"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type"),
        ({"rope_theta": None}, "rope_theta"),
    ],
)
def test_another_architecture_is_refused_by_field(tmp_path, change, field):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(CheckpointError, match=field) as error:
        read_hf_config(file)
    assert str(file) in str(error.value)


def test_difference_names_the_fields():
    assert difference(ModelConfig(), BIG) == [("num_hidden_layers", 24, 36), ("num_local_experts", 32, 128)]
