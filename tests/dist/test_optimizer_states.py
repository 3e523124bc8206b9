"""Planned optimizer states over ranks: what two ranks save, one rank has, and goes on alike; tensor-parallel ranks that update their own
copies of a norm with rounded moments stay equal."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.trainer.how import Update
from tests.helpers.training import MILD, samples, trainer

CHOICES = {
    "rounded": {"optimizer_states": "bfloat16", "optimizer_offload": 0.5},
    "host": {"optimizer_states": "float32", "optimizer_offload": 1.0},
}
NAMES = ("param", "exp_avg", "exp_avg_sq")


def batch(rank, seed):
    return [make_microbatch(samples(4, seed=10 * seed + rank))]


def owned(t):
    """(name, where this rank's part begins) -> its original and moments, flat, in float32."""
    names = {p: name for name, p in t.module.named_parameters()}
    found = {}
    for part in t.optimizer.chained_optimizers:
        for ranges in (bucket for by_dtype in part.gbuf_ranges for buckets in by_dtype.values() for bucket in buckets):
            for parameter, where in ranges["param_map"].items():
                state = part._get_main_param_and_optimizer_states(parameter)
                found[names[parameter], where["param"].start] = [state[n].detach().float().view(-1).clone() for n in NAMES]
    return found


def checkpoint(t, path):
    from megatron_gptoss.checkpoint.training_state import save_training_state

    save_training_state(path, config=MILD, model=t.model, optimizer=t.optimizer, schedule=t.schedule, progress=Progress(2, 2, 0, 0))


def two_ranks(rank: int, folder) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)

    def join(shape, name):
        init_groups(shape, rank=rank, init_method=f"file://{folder}/{name}", timeout_s=120, seed=0, backend="gloo")
        return shape

    found = {}
    shape = join(ParallelShape(world=2, expert=2), "experts")
    for name, choices in CHOICES.items():
        t = trainer(shape, lr=1e-3, **choices)
        for seed in (1, 2):
            t.update([batch(rank, seed)], Update(policy=None))
        checkpoint(t, folder / name)
        found[name] = {"owned": owned(t), "next": t.update([batch(rank, 3)], Update(policy=None)), "after": owned(t)}
    destroy_groups()

    t = trainer(join(ParallelShape(world=2, tensor=2), "tensor"), dtype="bfloat16", **CHOICES["rounded"])
    for seed in (1, 2, 3):
        t.update([batch(0, seed)], Update(policy=None))
    found["whole"] = {n: p.detach().clone() for n, p in t.module.named_parameters() if not getattr(p, "tensor_model_parallel", False)}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    destroy_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    mp.spawn(two_ranks, (made,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return made


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def pairs(of_ranks, whole):
    """Each rank's part beside that of the one rank that has everything. Experts are divided, so rank 1 has the second half of a tensor."""
    for rank, parts in enumerate(of_ranks):
        for (name, start), theirs in parts.items():
            if ".experts." in name:
                start += rank * whole[name, 0][0].numel() // 2
            stretch = slice(start, start + theirs[0].numel())
            yield name, theirs, [tensor[stretch] for tensor in whole[name, 0]]


@pytest.mark.parametrize("name", CHOICES)
def test_one_rank_goes_on_with_what_two_have_saved(ranks, folder, one_rank, name):
    from megatron_gptoss.checkpoint.training_state import load_training_state

    t = trainer(one_rank, lr=1e-3, seed=99, **CHOICES[name])
    load_training_state(folder / name, model=t.model, optimizer=t.optimizer, schedule=t.schedule)
    whole, counted = owned(t), 0
    for parameter, theirs, ours in pairs([rank[name]["owned"] for rank in ranks], whole):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), parameter
        counted += theirs[0].numel()
    assert counted == sum(tensors[0].numel() for tensors in whole.values())
    assert all(state["step"] == 2 for part in t.optimizer.chained_optimizers for state in part.optimizer.state.values())

    stats = t.update([[*batch(0, 3), *batch(1, 3)]], Update(policy=None))
    assert stats.loss == pytest.approx(ranks[0][name]["next"].loss, rel=1e-5)
    assert stats.grad_norm == pytest.approx(ranks[0][name]["next"].grad_norm, rel=1e-4)
    # The noise of rounding depends on the place in a shard, so another layout has other noise: at most one neighbour away.
    apart = {"host": (1e-6, 1e-4), "rounded": (2**-7, 2**-6)}[name]
    for parameter, theirs, ours in pairs([rank[name]["after"] for rank in ranks], owned(t)):
        assert (theirs[0] - ours[0]).abs().max() < 1e-4, parameter  # of an update of 1e-3
        for a, b in zip(theirs[1:], ours[1:], strict=True):
            assert torch.allclose(a, b, rtol=apart[1], atol=apart[0] * float(b.abs().max())), parameter


def test_tensor_ranks_round_their_copies_alike(ranks):
    one, two = (rank["whole"] for rank in ranks)
    assert any("norm" in name for name in one) and any("router" in name for name in one)
    for name in one:
        assert torch.equal(one[name], two[name]), name
