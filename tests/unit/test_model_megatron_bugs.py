"""Megatron's bugs that we work around are still there. A failure here is good news: remove the workaround that the test names."""

from functools import partial

import pytest
import torch

from tests.helpers.tiny_model import TINY, our_model, packed_batch, strong_tensors


def plain_moe_spec():
    """model/experts.py's spec without its workarounds."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(MoELayer, submodules=MoESubmodules(experts=partial(SequentialMLP, submodules=matrices)))


def run(model):
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = packed_batch([9], TINY.vocab_size, 0)
    return model(input_ids=tokens, position_ids=positions, packed_seq_params=packed_params(cu_seqlens, 9))


def plain_model(one_rank, monkeypatch):
    from megatron_gptoss.model import build

    monkeypatch.setattr(build, "moe_spec", plain_moe_spec)
    return our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))


def test_bug_1_expert_bias_is_added_in_place_to_a_view(one_rank, monkeypatch):
    """Workaround: ExpertDownProjection.explicit_expert_comm."""
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        run(plain_model(one_rank, monkeypatch)).sum().backward()


def test_bug_2_expert_bias_is_marked_sequence_parallel(one_rank):
    """Workaround: ExpertDownProjection resets bias.sequence_parallel. Seen at the parameter, since tensor parallelism needs two ranks."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from megatron_gptoss.model.build import megatron_config
    from megatron_gptoss.model.experts import ExpertDownProjection

    config = megatron_config(TINY, one_rank, dtype=torch.float32)
    config.sequence_parallel = True
    marks = []
    for kind in (RowParallelLinear, ExpertDownProjection):
        matrix = kind(
            8, 8, config=config, init_method=config.init_method, bias=True, input_is_parallel=True, skip_bias_add=True, is_expert=True
        )
        marks.append(getattr(matrix.bias, "sequence_parallel", False))
    assert marks == [True, False]


def test_bug_3_fused_activation_clamps_before_it_adds_the_bias(one_rank):
    """Workaround: build.megatron_config leaves bias_activation_fusion off."""
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    with torch.no_grad():
        right = run(model)
        for layer in model.decoder.layers:
            for expert in layer.mlp.experts.local_experts:
                expert.config.bias_activation_fusion = True
        assert (run(model) - right).abs().max() > 1e-2


def test_undivided_experts_would_join_the_dense_optimizer(one_rank, monkeypatch):
    """Workaround: Experts marks its parameters allreduce=False."""
    plain = plain_model(one_rank, monkeypatch)
    monkeypatch.undo()
    ours = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    assert getattr(plain.get_parameter(name), "allreduce", True) is True
    assert ours.get_parameter(name).allreduce is False
    assert getattr(ours.get_parameter("decoder.layers.0.mlp.router.weight"), "allreduce", True) is True
