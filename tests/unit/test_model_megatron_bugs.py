"""Megatron's bugs that we work around are still there. A failure here is good news: remove the workaround that the test names."""

import inspect
from functools import partial

import pytest
import torch

from tests.helpers.tiny_model import TINY, our_model, packed_batch, strong_tensors


def plain_moe_spec():
    """An MoE layer of Megatron's own parts: one MLP per expert, its own dispatcher."""
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
    """Our model with Megatron's MoE layers, and the same weights."""
    from megatron_gptoss.model import build

    ours = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    monkeypatch.setattr(build, "moe_spec", plain_moe_spec)
    model = build.build_model(TINY, one_rank).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            before, is_expert, after = name.partition("local_experts.")
            expert, _, rest = after.partition(".")
            parameter.copy_(ours.get_parameter(before + rest)[int(expert)] if is_expert else ours.get_parameter(name))
    return model


def test_bug_1_expert_bias_is_added_in_place_to_a_view(one_rank, monkeypatch):
    """Workaround: model/experts.py has its own matrices."""
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        run(plain_model(one_rank, monkeypatch)).sum().backward()


def test_bug_2_expert_bias_is_marked_sequence_parallel(one_rank):
    """Workaround: model/experts.py has its own matrices. Seen at the parameter, since tensor parallelism needs two ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from megatron_gptoss.model.build import megatron_config
    from megatron_gptoss.model.experts import GroupedExperts

    config = megatron_config(TINY, one_rank, dtype=torch.float32)
    config.sequence_parallel = True
    theirs = RowParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=True, input_is_parallel=True, skip_bias_add=True, is_expert=True
    )
    ours = GroupedExperts(2, config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    assert getattr(theirs.bias, "sequence_parallel", False)
    assert not any(getattr(p, "sequence_parallel", False) for p in ours.parameters())


def test_bug_3_fused_activation_clamps_before_it_adds_the_bias(one_rank, monkeypatch):
    """Workaround: model/experts.py has its own activation, and build.megatron_config leaves bias_activation_fusion off."""
    model = plain_model(one_rank, monkeypatch)
    with torch.no_grad():
        right = run(model)
        for layer in model.decoder.layers:
            for expert in layer.mlp.experts.local_experts:
                expert.config.bias_activation_fusion = True
        assert (run(model) - right).abs().max() > 1e-2


def test_tokens_are_put_together_again_by_atomic_additions():
    """Workaround: model/rows.py. Read in the source, since only on a GPU is the order of scatter_add_'s and index_add_'s additions open."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    assert "output_tokens.scatter_add_(" in inspect.getsource(unpermute)
    assert "tokens.index_select(0, sorted_indices)" in inspect.getsource(permute)  # whose gradient is index_add_


def test_undivided_experts_would_join_the_dense_optimizer(one_rank, monkeypatch):
    """Workaround: StackedLinear marks its parameters allreduce=False."""
    plain = plain_model(one_rank, monkeypatch)
    monkeypatch.undo()
    ours = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    name = "decoder.layers.0.mlp.experts.{}linear_fc1.weight"
    assert getattr(plain.get_parameter(name.format("local_experts.0.")), "allreduce", True) is True
    assert ours.get_parameter(name.format("")).allreduce is False
    assert getattr(ours.get_parameter("decoder.layers.0.mlp.router.weight"), "allreduce", True) is True
