"""However ranks share the work, the critic is the same one: values, loss, the gradient of every parameter, the weights after an update, and
what goes on from a checkpoint equal those of one rank. Gradients are compared by the keys of a checkpoint, which name the whole tensors.

fp32 on gloo; three layers, so that stages are uneven, and lengths that nothing divides.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.samples import by_sample
from tests.dist.test_parallel_layouts import whole_gradient
from tests.helpers.critics import critic, valued
from tests.helpers.training import MILD, samples, trainer

MODEL = MILD.model_copy(update={"num_hidden_layers": 3})
BATCH = valued(samples(7, seed=5, longest=31), seed=6, untaught=0.2)
HOW = RlConfig(aggregation="sequence-mean", critic_epochs=1)
TOLERANCE = 1e-5  # of a tensor's largest entry

ONE = ParallelShape(world=1)
LAYOUTS = {
    "DP2": ParallelShape(world=2),
    "CP2": ParallelShape(world=2, context=2),
    "TP2": ParallelShape(world=2, tensor=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "EP2": ParallelShape(world=2, expert=2),
}


def mine(shape: ParallelShape, rank: int) -> list:
    return pack(BATCH, ranks=shape.data, tokens_per_microbatch=64)[shape.data_index(rank)]


def parts(t, c) -> dict:
    from megatron_gptoss.checkpoint.progress import Progress

    return {
        "config": MODEL, "model": t.model, "optimizer": t.optimizer, "schedule": t.schedule, "critic": c, "progress": Progress(1, 1, 0),
    }  # fmt: skip


def step(shape: ParallelShape, rank: int, folder: Path) -> dict:
    """Values, then gradients alone, which are saved in the place of weights; then an update, which is saved too, and one more."""
    from megatron_gptoss.checkpoint.training_state import save_training_state

    t = trainer(shape, model=MODEL)
    c, batches = critic(shape, model=MODEL, policy=t.module), mine(shape, rank)
    values = by_sample(zip(batches, c.values(batches), strict=True))
    c._accumulate(batches, HOW)
    gradient_of = whole_gradient(c.model)
    with torch.no_grad():
        for parameter in c.module.parameters():
            parameter.copy_(gradient_of(parameter))
    save_training_state(folder / "gradients", **parts(t, c))
    c = critic(shape, model=MODEL, policy=t.module)
    first = c.update([batches], HOW)
    save_training_state(folder / "step-1", **parts(t, c))
    return {"values": values, "updates": [first, c.update([batches], HOW)]}


def go_on(shape: ParallelShape, rank: int, path: Path) -> dict:
    """The second update in this layout, from what one rank saved after the first."""
    from megatron_gptoss.checkpoint.training_state import load_training_state

    t = trainer(shape, model=MODEL, seed=9)
    c = critic(shape, model=MODEL, policy=t.module, head_seed=None)
    load_training_state(path, model=t.model, optimizer=t.optimizer, schedule=t.schedule, critic=c)
    return {"resumed": c.update([mine(shape, rank)], HOW)}


def world(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    for name, shape in LAYOUTS.items():
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        root = Path(folder) / name
        if rank == 0:
            root.mkdir()
        dist.barrier()
        found = step(shape, rank, root) | go_on(shape, rank, Path(folder) / "one" / "step-1")
        torch.save(found, root / f"rank{rank}.pt")
        dist.barrier()
        destroy_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_rank):
    root = tmp_path_factory.mktemp("critic")
    (root / "one").mkdir()
    torch.save(step(ONE, 0, root / "one"), root / "one" / "rank0.pt")
    mp.spawn(world, (str(root),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return root


def ranks(folder: Path, name: str) -> list[dict]:
    return [torch.load(path, weights_only=False) for path in sorted((folder / name).glob("rank*.pt"))]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The critic's of a checkpoint, by key."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(path))
    return {k: v for k, v in loaded.items() if k.startswith("critic.") and torch.is_tensor(v) and v.is_floating_point()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        gap = (ours[key] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12)
        assert gap < TOLERANCE, (key, float(gap))


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayout:
    def test_values_are_those_of_one_rank_on_every_rank(self, folder, layout):
        (truth,) = ranks(folder, "one")
        found: dict[str, list[float]] = {}
        for rank in ranks(folder, layout):
            for name, values in rank["values"].items():
                assert found.setdefault(name, values) == values
        assert found.keys() == truth["values"].keys()
        for name, values in truth["values"].items():
            assert found[name] == pytest.approx(values, abs=TOLERANCE)

    def test_every_gradient_is_that_of_one_rank(self, folder, layout):
        weights = lambda name: {k: v for k, v in tensors(folder / name / "gradients").items() if ".optimizer." not in k}  # noqa: E731
        ours, theirs = weights(layout), weights("one")
        assert {"critic.value_head.weight", "critic.value_head.bias"} < set(theirs)
        assert all(v.abs().max() > 0 for v in theirs.values())
        assert_close(ours, theirs)

    def test_updates_report_what_one_rank_reports_also_from_its_checkpoint(self, folder, layout):
        (truth,), found = ranks(folder, "one"), ranks(folder, layout)
        assert all(rank["updates"] == found[0]["updates"] and rank["resumed"] == found[0]["resumed"] for rank in found)
        assert 0 < truth["updates"][0].clip_fraction < 1
        for ours, theirs in zip([*found[0]["updates"], found[0]["resumed"]], [*truth["updates"], truth["updates"][1]], strict=True):
            for field in ("loss", "grad_norm", "clip_fraction", "learning_rate"):
                assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=2 * TOLERANCE), field

    def test_moments_after_an_update_are_those_of_one_rank(self, folder, layout):
        moments = lambda name: {k: v for k, v in tensors(folder / name / "step-1").items() if "exp_avg" in k}  # noqa: E731
        assert_close(moments(layout), moments("one"))
