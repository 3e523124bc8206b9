"""Parallel sizes that fit, that do not fit, and that are not built yet."""

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
        (ParallelShape(world=2, tensor=2), "tensor = 2 is not built yet"),
        (ParallelShape(world=2, context=2), "context = 2 is not built yet"),
        (ParallelShape(world=3, expert=3), r"expert = 3 does not divide .* Working sizes: 1, 2, 4"),
    ],
)
def test_layouts_that_are_not_built_are_refused(shape, words):
    from megatron_gptoss.model.build import build_model

    with pytest.raises(ConfigError, match=words):
        build_model(TINY, shape)


def test_a_host_without_gpu_needs_torchdynamo_off(monkeypatch):
    import torch

    from megatron_gptoss.errors import MachineError
    from megatron_gptoss.model import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.raises(MachineError, match="TORCHDYNAMO_DISABLE=1"):
        cpu.install()
