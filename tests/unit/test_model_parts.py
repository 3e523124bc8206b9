"""Whose layers and whose dispatcher: what is chosen, what is refused, and that a checkpoint does not show the choice.

TransformerEngine itself needs a GPU: tests/gpu/test_te_layers_gpu.py. DeepEP has never been run; its calls over a stand-in are in
tests/dist/test_parallel_layouts.py.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension

from megatron_gptoss.config import preflight
from megatron_gptoss.config.preflight import check_packages
from megatron_gptoss.errors import MachineError
from megatron_gptoss.model.build import build_model, layer_spec
from megatron_gptoss.model.layer import Norm
from megatron_gptoss.model.parts import parts_of, without_extra_state
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.tiny_model import TINY, our_model, strong_tensors
from tests.unit.test_plan import GPU, tiny


def test_transformer_engine_gives_norms_and_both_matrices_and_nothing_else(monkeypatch):
    monkeypatch.setattr(extension, "HAVE_TE", True)
    monkeypatch.setattr(extension, "TENorm", lambda *given: torch.nn.RMSNorm(given[1]))
    ours, theirs = (layer_spec(parts_of(transformer)).submodules for transformer in ("local", "te"))
    changed = {name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)}
    assert changed - {"mlp"} == {"input_layernorm", "pre_mlp_layernorm", "self_attention"}
    assert ours.mlp.func is theirs.mlp.func, "a partial is never equal to another"
    assert ours.input_layernorm is Norm
    assert type(theirs.input_layernorm(config=None, hidden_size=8, eps=1e-5)) is torch.nn.RMSNorm
    attention = theirs.self_attention.submodules
    assert attention.linear_qkv is extension.TEColumnParallelLinear
    assert attention.linear_proj is extension.TERowParallelLinear
    assert attention.core_attention is ours.self_attention.submodules.core_attention
    assert theirs.self_attention.module is ours.self_attention.module, "the class that rotates"


def test_transformer_engine_that_is_not_here_is_refused_when_the_model_is_built(one_rank, monkeypatch):
    monkeypatch.setattr(extension, "HAVE_TE", False)
    with pytest.raises(MachineError, match=r'^trainer.transformer = "te" cannot run here: .*Use trainer.transformer = "local"\.$'):
        build_model(TINY, one_rank, transformer="te")
    with pytest.raises(ValueError, match="unknown transformer 'bridge'; one of local, te"):
        build_model(TINY, one_rank, transformer="bridge")


def test_deepep_that_is_not_here_is_refused_when_the_model_is_built(one_rank, monkeypatch):
    from megatron.core.transformer.moe import fused_a2a

    from megatron_gptoss.model import deepep

    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", False)
    with pytest.raises(MachineError, match=r'"deepep" cannot run here: the package deep_ep .* not installed\. Use .* = "alltoall"\.$'):
        build_model(TINY, one_rank, dispatcher="deepep")
    monkeypatch.setattr(deepep, "find_spec", lambda _name: SimpleNamespace())
    with pytest.raises(MachineError, match=r"has no Buffer and utils\.EventOverlap to import"):
        build_model(TINY, one_rank, dispatcher="deepep")
    with pytest.raises(ValueError, match="unknown dispatcher 'pigeon'; one of alltoall, deepep"):
        build_model(TINY, one_rank, dispatcher="pigeon")


@pytest.mark.parametrize(
    ("flags", "package", "advice"),
    [
        (
            ["--trainer.transformer=te"],
            "transformer-engine",
            'Install the extra "gpu" of this package, or use trainer.transformer = "local"',
        ),
        (["--trainer.dispatcher=deepep", "--parallel.expert=2", "--parallel.data=2"], "deep_ep", 'or use trainer.dispatcher = "alltoall"'),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_starts(monkeypatch, flags, package, advice):
    monkeypatch.setattr(preflight, "find_spec", lambda _name: None)
    key = flags[0].removeprefix("--").split("=")[0]
    with pytest.raises(
        MachineError, match=rf"^{key} = .*\(flag --{key}\) needs the package {package}, which is not installed.*{advice}\.$"
    ):
        check_packages(tiny(*flags, *GPU))
    check_packages(tiny(*flags, *GPU, "--cluster.address=auto"))  # only its nodes know
    check_packages(tiny())


class Scaled(torch.nn.RMSNorm):
    """A norm with an `_extra_state`, as all of TransformerEngine's modules have one."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None


def test_a_norms_extra_state_is_neither_saved_nor_missed():
    theirs, ours = torch.nn.Sequential(without_extra_state(Scaled(8))), torch.nn.Sequential(torch.nn.RMSNorm(8))
    assert "0._extra_state" in torch.nn.Sequential(Scaled(8)).state_dict(), "what is left out"
    ours.load_state_dict(theirs.state_dict())  # strict
    torch.nn.init.normal_(ours[0].weight)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs[0].weight, ours[0].weight)


def test_checkpoint_keys_of_a_model_with_such_norms_are_those_of_ours(one_rank, monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    def keys(model):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        entries = model.sharded_state_dict(metadata={"dp_cp_group": group})
        return {name: (entry.key, entry.global_offset) for name, entry in entries.items() if isinstance(entry, ShardedBase)}

    tensors = dict(strong_tensors(TINY, seed=1))
    ours = our_model(TINY, one_rank, tensors)
    theirs = our_model(TINY, one_rank, tensors)
    for layer in theirs.decoder.layers:
        layer.input_layernorm, layer.pre_mlp_layernorm = (without_extra_state(Scaled(TINY.hidden_size)) for _ in range(2))
    theirs.decoder.final_layernorm = without_extra_state(Scaled(TINY.hidden_size))
    assert keys(theirs) == keys(ours)
    theirs.load_state_dict(ours.state_dict())


def test_deepep_needs_somebody_to_send_to(one_rank, monkeypatch):
    from megatron.core.transformer.moe import fused_a2a

    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    with pytest.raises(ValueError, match="over two ranks or more"):
        build_model(TINY, ParallelShape(world=1), dispatcher="deepep")
