"""A run goes on from its checkpoint in any layout as if it had not stopped: weights, master weights and moments are the same bits, Adam's
count of updates is the same, and the losses of the next three steps equal those of the run that was never stopped.

One rank trains and saves; four ranks load that, save it again and go on; two ranks load what four wrote; one rank what two wrote. Every
link of the chain is compared with the first. Imports take long, so four processes are started once, and two of them go on as two ranks.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.training import MILD, samples, trainer

MODEL = MILD.model_copy(update={"num_hidden_layers": 3})
BATCHES = [samples(7, seed=seed, longest=31) for seed in range(5)]  # two before the checkpoint, three after it
BEFORE, STEPS = 2, 3

FOUR = {  # layout -> whose checkpoint it goes on from
    "TP2xPP2xEP2": (ParallelShape(world=4, tensor=2, pipeline=2, expert=2), "one"),
    "EP4": (ParallelShape(world=4, expert=4), "one"),
    "DP4": (ParallelShape(world=4), "one"),  # a data-parallel rank's range begins and ends inside rows
}
TWO = {
    "PP2-uneven": (ParallelShape(world=2, pipeline=2, stage_layers=(1, 2)), "TP2xPP2xEP2"),
    "TP2xEP2": (ParallelShape(world=2, tensor=2, expert=2), "DP4"),
    "CP2": (ParallelShape(world=2, context=2), "EP4"),
}


def parts(t) -> dict:
    return {"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule}


def train(t, shape, rank, batches) -> list[float]:
    from megatron_gptoss.trainer.how import Update

    losses = []
    for batch in batches:
        mine = pack(batch, ranks=shape.data, tokens_per_microbatch=64)[shape.data_index(rank)]
        losses.append(t.update([mine], Update(policy=None)).loss)
    return losses


def adam_steps(t) -> set[float]:
    return {float(state["step"]) for part in t.optimizer.chained_optimizers for state in part.optimizer.state.values()}


def draws() -> tuple:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def go_on(shape, rank, folder: Path, source: str, name: str) -> dict:
    """A trainer of other weights in this layout loads `source`, saves it at once as `name`, and trains on."""
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import begin_save, load_training_state

    t = trainer(shape, model=MODEL, seed=50)
    torch.manual_seed(1000 + rank)
    progress = load_training_state(folder / source, **parts(t))
    fresh = draws()
    torch.manual_seed(1000 + rank)
    saving = begin_save(folder / name, config=MODEL, progress=progress, **parts(t))
    losses = train(t, shape, rank, BATCHES[BEFORE:])  # while it is written
    saving.wait()
    assert progress == Progress(BEFORE, BEFORE, 14)
    return {"steps": adam_steps(t), "losses": losses, "fresh": fresh}


def random_states(shape, rank, folder: Path) -> dict:
    """What each rank draws after a save, and after a load in the same layout."""
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import load_training_state, save_training_state

    t = trainer(shape, model=MODEL, seed=50)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 + rank)
    save_training_state(folder / "random", config=MODEL, progress=Progress(1, 1, 0), **parts(t))
    saved = draws()
    load_training_state(folder / "random", **parts(t))
    return {"saved": saved, "loaded": draws()}


def one_rank_fails(shape, rank, folder: Path) -> dict:
    """Rank 1's disk is full: what each rank hears of it, and what is left. Then rank 1 is slow: what is there before it has finished."""
    from megatron_gptoss.checkpoint import background
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import begin_save

    t, write = trainer(shape, model=MODEL, seed=50), background.write

    def full(*_):
        raise OSError(28, "No space left on device")

    def slow(*arguments):
        background.Meeting.hear(release, "go on")
        return write(*arguments)

    background.write = full if rank == 1 else write
    saving = begin_save(folder / "step-9", config=MODEL, progress=Progress(9, 9, 0), **parts(t))
    with pytest.raises(CheckpointError) as failure:
        saving.wait()
    found = {"failure": str(failure.value), "again": saving.wait() > 0, "left": sorted(p.name for p in folder.glob("*step-9*"))}

    release = background.Meeting("the slow rank", 60)
    background.write = slow if rank == 1 else write
    saving = begin_save(folder / "step-10", config=MODEL, progress=Progress(10, 10, 0), **parts(t))
    if rank == 0:
        saving._thread.join(0.5)
        found["early"] = saving.done() or (folder / "step-10").exists()
        release.say("go on", True)
    saving.wait()
    background.write = write
    return found | {"late": (folder / "step-10" / "COMPLETE").exists()}


def as_megatron_saves(shape, rank, folder: Path) -> None:
    """The same state saved by us, three times with one planner, and by Megatron's own gathering."""
    from megatron.core import dist_checkpointing

    from megatron_gptoss.checkpoint import training_state
    from megatron_gptoss.checkpoint.background import Planner
    from megatron_gptoss.checkpoint.progress import Progress

    t, planner = trainer(shape, model=MODEL, seed=50), Planner()
    for batch, name in zip(BATCHES, ("first", "second", "ours"), strict=False):
        train(t, shape, rank, [batch])
        training_state.begin_save(folder / name, config=MODEL, progress=Progress(1, 1, 0), planner=planner, **parts(t)).wait()
    metadata = training_state._metadata()
    state = {"model": t.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = t.optimizer.sharded_state_dict(state["model"], metadata=metadata)
    (folder / "theirs").mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder / "theirs"))


def world(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    root = Path(folder)

    def run(name, shape, what):
        if rank < shape.world:
            init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
            torch.save(what(shape, rank), f"{folder}/{name}-rank{rank}.pt")
            dist.barrier()
            destroy_groups()

    for name, (shape, source) in (FOUR | TWO).items():
        run(name, shape, lambda s, r, source=source, name=name: go_on(s, r, root, source, name))
    run("random-states", ParallelShape(world=2, tensor=2), lambda s, r: random_states(s, r, root))
    run("failing", ParallelShape(world=2), lambda s, r: one_rank_fails(s, r, root))
    run("both", ParallelShape(world=2), lambda s, r: as_megatron_saves(s, r, root))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_rank):
    """All checkpoints of the chain, and what each rank of each layout found."""
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import save_training_state

    root = tmp_path_factory.mktemp("chain")
    t = trainer(one_rank, model=MODEL)
    train(t, one_rank, 0, BATCHES[:BEFORE])
    save_training_state(root / "one", config=MODEL, progress=Progress(BEFORE, BEFORE, 14), **parts(t))
    torch.save(train(t, one_rank, 0, BATCHES[BEFORE:]), root / "truth.pt")
    mp.spawn(world, (str(root),), nprocs=4)  # pyright: ignore[reportPrivateImportUsage]
    return root


def found(folder, name) -> list[dict]:
    return [torch.load(p, weights_only=False) for p in sorted(folder.glob(f"{name}-rank*.pt"))]


def tensors(path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    return {k: v for k, v in dist_checkpointing.load_plain_tensors(str(path)).items() if torch.is_tensor(v)}


@pytest.mark.parametrize("layout", FOUR | TWO)
def test_the_next_three_losses_and_adams_count_are_those_of_the_run_that_never_stopped(folder, layout):
    truth = torch.load(folder / "truth.pt")
    assert abs(truth[0] - truth[2]) > 1e-3, "updates move the loss, so that wrong moments would show"
    for rank in found(folder, layout):
        assert rank["losses"] == pytest.approx(truth, abs=1e-5)
        assert rank["steps"] == {float(BEFORE + STEPS)}


@pytest.mark.parametrize("layout", FOUR | TWO)
def test_weights_and_moments_pass_through_a_layout_bit_for_bit(folder, layout):
    ours, first = tensors(folder / layout), tensors(folder / "one")
    assert sorted(ours) == sorted(first)
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in first) == sum("optimizer." not in name for name in first)
    for name, tensor in first.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("source", ["PP2-uneven", "CP2"])
def test_one_rank_goes_on_from_what_two_ranks_wrote(folder, one_rank, source):
    found = go_on(one_rank, 0, folder, source, f"back-{source}")
    assert found["losses"] == pytest.approx(torch.load(folder / "truth.pt"), abs=1e-5)
    assert found["steps"] == {float(BEFORE + STEPS)}


def test_each_rank_gets_its_own_random_states_back_and_keeps_fresh_ones_in_another_layout(folder):
    same = found(folder, "random-states")
    assert all(rank["loaded"] == rank["saved"] for rank in same)
    assert same[0]["saved"] != same[1]["saved"]
    for rank, other in enumerate(found(folder, "DP4")):
        assert other["fresh"][2] == float(torch.rand(1, generator=torch.Generator().manual_seed(1000 + rank)))


def test_one_ranks_full_disk_is_one_error_on_every_rank_and_nothing_is_left(folder):
    ranks = found(folder, "failing")
    assert {rank["failure"] for rank in ranks} == {ranks[0]["failure"]}
    assert "cannot save" in ranks[0]["failure"]
    assert "rank 1" in ranks[0]["failure"]
    assert "No space left on device" in ranks[0]["failure"]
    assert all(rank["again"] for rank in ranks), "the error is raised once"
    assert [rank["left"] for rank in ranks] == [[], []]


def test_the_name_and_the_marker_wait_for_the_slowest_rank(folder):
    ranks = found(folder, "failing")
    assert not ranks[0]["early"]
    assert all(rank["late"] for rank in ranks)


def test_what_each_rank_writes_of_its_own_is_what_megatron_gathers_and_a_plan_that_is_used_again_is_the_same(folder):
    ours, theirs = tensors(folder / "ours"), tensors(folder / "theirs")
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
