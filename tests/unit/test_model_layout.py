"""Parallel sizes that fit and that do not fit, and how layers are divided over pipeline stages."""

import pytest

from megatron_gptoss.errors import ConfigError
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.tiny_model import TINY


def test_every_rank_is_in_exactly_one_data_group():
    shape = ParallelShape(world=64, tensor=2, pipeline=4, context=2, expert=8)
    shape.check()
    assert shape.data * shape.tensor * shape.pipeline * shape.context == shape.world
    assert ParallelShape(world=8, expert=8).data == 8, "expert-parallel ranks see different tokens"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ParallelShape(world=8, tensor=3), "not a multiple"),
        (ParallelShape(world=8, pipeline=2, expert=8), "expert = 8 does not divide the 4 ranks"),
        (ParallelShape(world=0), "world = 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(shape, words):
    with pytest.raises(ValueError, match=words):
        shape.check()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ParallelShape(world=3, expert=3), r"parallel.expert = 3 does not divide model.num_local_experts = 4. Working sizes: 1, 2, 4"),
        (ParallelShape(world=4, tensor=4), r"parallel.tensor = 4 does not divide model.num_key_value_heads = 2. Working sizes: 1, 2\."),
        (ParallelShape(world=3, pipeline=3), r"parallel.pipeline = 3 is more than .* Working sizes: 1 to 2"),
        (ParallelShape(world=2, pipeline=2, stage_layers=(2, 1)), r"stages of \[2, 1\] layers do not fit pipeline = 2 and 2 layers"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(shape, words):
    from megatron_gptoss.model.build import build_model

    with pytest.raises(ConfigError, match=words):
        build_model(TINY, shape)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(24, 4, [6, 6, 6, 6]), (36, 8, [4, 5, 5, 5, 5, 4, 4, 4]), (3, 2, [2, 1]), (5, 3, [2, 2, 1])]
)
def test_spare_layers_go_to_the_middle_then_to_the_first_stage(layers, stages, counts):
    shape = ParallelShape(world=stages, pipeline=stages)
    divided = shape.layers_of_stages(layers)
    assert [i for stage in divided for i in stage] == list(range(layers)), "every layer once, in order"
    assert [len(stage) for stage in divided] == counts


def test_ranks_of_one_model_replica_see_the_same_data():
    shape = ParallelShape(world=16, tensor=2, context=2, pipeline=2)
    assert [shape.data_index(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert all(shape.data_index(shape.first_rank(d)) == d for d in range(shape.data))


def test_a_host_without_gpu_needs_torchdynamo_off(monkeypatch):
    import torch

    from megatron_gptoss.errors import MachineError
    from megatron_gptoss.model import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.raises(MachineError, match="TORCHDYNAMO_DISABLE=1"):
        cpu.install()
