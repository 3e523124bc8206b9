"""The experts as Megatron builds, calls, saves and loads them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_gptoss.errors import MachineError
from tests.helpers.tiny_model import TINY, our_model, strong_tensors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_outside = pytest.mark.skipif(INTERPRETED, reason="runs once, not once more in the interpreter's process")
only_kernels = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")

C, I, E, K = TINY.hidden_size, TINY.intermediate_size, TINY.num_local_experts, TINY.num_experts_per_tok


def config_of(one_rank, **fields):
    from megatron_gptoss.model.build import megatron_config

    config = megatron_config(TINY, one_rank, dtype=torch.float32)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def groups():
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def fill(module, seed=0):
    """Random values by name, with biases that reach the clamp."""
    for name, p in sorted(module.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        p.data = (3.0 if name.endswith("fc1.bias") else 0.3) * torch.randn(p.shape, generator=generator)
    return module


def sequential(config):
    """Megatron's one MLP per expert, without its bug 1."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    made = SequentialMLP(E, config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), pg_collection=groups())
    for expert in made.local_experts:
        expert.linear_fc2.explicit_expert_comm = True
    return made


@only_outside
def test_the_loop_has_the_bits_of_megatrons_sequential_mlp(one_rank):
    """Gradients to rounding: a transposed product may add in another order."""
    from megatron_gptoss.model.experts import GroupedExperts

    config = config_of(one_rank)
    ours, theirs = fill(GroupedExperts(E, config, pg_collection=groups())), sequential(config)
    with torch.no_grad():
        for e, expert in enumerate(theirs.local_experts):
            for name, p in expert.named_parameters():
                p.copy_(ours.get_parameter(name)[e])
    counts = torch.tensor([5, 0, 9, 3])
    x = torch.randn(17, C, requires_grad=True)
    weight = torch.rand(17, requires_grad=True)
    dout = torch.randn(17, C)
    outputs = [module(x, counts, weight)[0] for module in (ours, theirs)]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(out, (x, weight), dout, retain_graph=True) for out in outputs]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for out in outputs:
        out.backward(dout)
    for name, p in ours.named_parameters():
        stacked = torch.stack([expert.get_parameter(name).grad for expert in theirs.local_experts])
        torch.testing.assert_close(p.grad, stacked, rtol=1e-5, atol=1e-4)


def moe_layer(config, builder):
    """An MoE layer with random weights, its router among them."""
    layer = fill(builder(config=config, pg_collection=groups(), is_mtp_layer=False))
    layer.set_layer_number(1)
    return layer


@only_outside
def test_our_dispatcher_moves_tokens_as_megatrons_does(one_rank):
    """The same layer with either: outputs bit for bit, and all gradients."""
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    from megatron_gptoss.model.experts import GroupedExperts, moe_spec
    from megatron_gptoss.model.router import router_spec

    plain = partial(MoELayer, submodules=MoESubmodules(experts=GroupedExperts, router=router_spec()))
    found = []
    x = torch.randn(3, 7, C, generator=torch.Generator().manual_seed(1))
    for builder in (moe_spec(), plain):
        layer = moe_layer(config_of(one_rank), builder)
        leaf = x.clone().requires_grad_()
        out, bias = layer(leaf)
        assert bias is None
        out.backward(x.flip(0))
        found.append([out.detach(), leaf.grad, *(p.grad for _, p in sorted(layer.named_parameters()))])
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@only_kernels
@pytest.mark.parametrize("tokens", [23, 0])
def test_a_layer_with_grouped_experts_equals_one_with_the_loop(one_rank, tokens):
    from megatron_gptoss.model.experts import moe_spec

    found = []
    x = torch.randn(tokens, 1, C, generator=torch.Generator().manual_seed(1))
    for backend in ("loop", "grouped"):
        layer = moe_layer(config_of(one_rank, expert_backend=backend), moe_spec())
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf)
        out.backward(x.flip(0))
        found.append([out.detach(), leaf.grad, *(p.grad for _, p in sorted(layer.named_parameters()))])
    for a, b in zip(*found, strict=True):
        if b.numel():
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


@only_outside
def test_all_of_this_in_tritons_interpreter():
    """The kernels, in a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@only_outside
def test_a_backend_that_cannot_run_or_does_not_exist_is_refused(one_rank):
    from megatron_gptoss.model.experts import GroupedExperts

    with pytest.raises(MachineError, match="expert backend 'grouped' cannot run here"):
        GroupedExperts(E, config_of(one_rank, expert_backend="grouped"), pg_collection=groups())
    with pytest.raises(ValueError, match="one of loop, grouped"):
        GroupedExperts(E, config_of(one_rank, expert_backend="fastest"), pg_collection=groups())


@only_outside
def test_memory_of_parameters_is_megatrons(one_rank):
    """Stacked, but in the same layout: expert e's matrix is SequentialMLP's, contiguous."""
    from megatron_gptoss.model.experts import GroupedExperts

    ours, theirs = GroupedExperts(E, config_of(one_rank), pg_collection=groups()), sequential(config_of(one_rank))
    for name, p in theirs.local_experts[0].named_parameters():
        stacked = ours.get_parameter(name)
        assert stacked.shape == (E, *p.shape) and stacked.is_contiguous() and stacked.allreduce is False


@dataclass
class Place:
    """A process group, as far as a sharded state dict asks."""

    place: int
    ranks: int

    def rank(self):
        return self.place

    def size(self):
        return self.ranks


def sharded(module, layer):
    """Without `_extra_state`, fp8 scales that nobody has: SequentialMLP asks for them, and Megatron can be told to do without."""
    entries = module.sharded_state_dict("mlp.experts.", ((0, layer, 2),))
    return {name: entry for name, entry in entries.items() if "_extra_state" not in name}


def shards(one_rank, ranks, seed=0):
    """What each of `ranks` expert-parallel ranks has of the same experts: modules, one for each rank."""
    from megatron_gptoss.model.experts import GroupedExperts

    whole = fill(GroupedExperts(E, config_of(one_rank), pg_collection=groups()), seed)
    made = []
    for rank in range(ranks):
        module = GroupedExperts(E // ranks, config_of(one_rank), pg_collection=groups())
        module.ep_group = Place(rank, ranks)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(whole.get_parameter(name).chunk(ranks)[rank])
        made.append(module)
    return made


def of_all_ranks(modules):
    """Their entries in a model of two layers, whose experts are entries of the same keys. One process plays all ranks, since loading takes
    each key's tensor to be whole over the processes."""
    return {f"{layer}.{rank}": sharded(module, layer) for layer in (0, 1) for rank, module in enumerate(modules)}


def saved(path, modules):
    from megatron.core import dist_checkpointing

    path.mkdir(exist_ok=True)
    dist_checkpointing.save(of_all_ranks(modules), str(path))
    return path


def loaded(path, modules):
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(of_all_ranks(modules), str(path))
    for rank, module in enumerate(modules):
        module.load_state_dict({name.removeprefix("mlp.experts."): x for name, x in state[f"1.{rank}"].items()})


@only_outside
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_any_number_of_ranks_loads_what_any_number_saved(one_rank, tmp_path, before, after):
    path = saved(tmp_path, shards(one_rank, before, seed=3))
    found = shards(one_rank, after, seed=8)
    loaded(path, found)
    for module, right in zip(found, shards(one_rank, after, seed=3), strict=True):
        for name, p in module.named_parameters():
            assert torch.equal(p, right.get_parameter(name)), name


@only_outside
def test_checkpoints_of_sequential_mlp_load_and_ours_load_there(one_rank, tmp_path):
    ours, other = (shards(one_rank, 1, seed=seed)[0] for seed in (3, 11))
    theirs = fill(sequential(config_of(one_rank)), seed=5)
    loaded(saved(tmp_path / "theirs", [theirs]), [ours])
    for e, expert in enumerate(theirs.local_experts):
        for name, p in expert.named_parameters():
            assert torch.equal(ours.get_parameter(name)[e], p), name
    loaded(saved(tmp_path / "ours", [other]), [theirs])
    for e, expert in enumerate(theirs.local_experts):
        for name, p in expert.named_parameters():
            assert torch.equal(other.get_parameter(name)[e], p), name


@only_outside
def test_a_whole_model_marks_experts_and_only_experts_for_the_experts_optimizer(one_rank):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    marked = {name for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    assert marked == {name for name, _ in model.named_parameters() if ".mlp.experts." in name} and len(marked) == 4 * TINY.num_hidden_layers
