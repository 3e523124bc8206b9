"""Router replay through the trainer in every layout: whatever rank a router is on, it takes the engine's experts for the tokens and layers
it has, in scoring and in the update, and loss, gradients and counts are those of one rank, although own choices are noisy."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import DiagnoseConfig, RlConfig, TrainerConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.gradients import furthest, whole_gradients
from tests.helpers.routes import sent_anywhere
from tests.helpers.tiny_model import strong_tensors
from tests.helpers.training import MILD, samples

MODEL = MILD.model_copy(update={"num_hidden_layers": 3, "num_local_experts": 8})  # two stages are uneven
LAYERS = MODEL.num_hidden_layers
LAYOUTS = {
    "one": ParallelShape(world=1),
    "EP2": ParallelShape(world=2, expert=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "CP2": ParallelShape(world=2, context=2),
    "TP2": ParallelShape(world=2, tensor=2),
}
FAR = sent_anywhere(samples(9, seed=5, longest=31), MODEL, seed=7)
FAR[4] = replace(FAR[4], routes=None)
ROWS = LAYERS * sum(len(s.token_ids) for s in FAR)
MISSING = LAYERS * (len(FAR) - 1 + len(FAR[4].token_ids))
POLICY = RlConfig(router_replay="engine", correction="none")


def trainer(shape: ParallelShape, **switches):
    from megatron_gptoss.trainer.step import Trainer

    t = Trainer(
        MODEL, TrainerConfig(recompute="full"), shape, RlConfig(decay="constant", warmup_steps=0, clip_grad=1e9), total_updates=10,
        diagnose=DiagnoseConfig(**switches),
    )  # fmt: skip
    t.load_hf((n, 0.5 * x if "norm" not in n else x) for n, x in strong_tensors(MODEL, 3))
    t.weights_changed()
    return t


def step(shape: ParallelShape, rank: int) -> dict:
    from megatron_gptoss.model.router import GptOssRouter
    from megatron_gptoss.trainer.how import Update

    seen: list[tuple[int, torch.Tensor]] = []  # (layer, experts) of every routing on this rank
    plain = GptOssRouter.route

    def route(self, hidden):
        found = plain(self, hidden)
        seen.append((self.layer, found[1]))
        return found

    mine = pack(FAR, ranks=shape.data, tokens_per_microbatch=64)[shape.data_index(rank)]
    t, found = trainer(shape, routing_noise=2.0), {}
    GptOssRouter.route = route
    found["in_scoring"] = check(t, mine, seen, lambda: found.update(old=t.score(mine, router_replay="engine")), passes=1)
    found["in_update"] = check(t, mine, seen, lambda: found.update(on_policy=t.update([mine], Update(policy=POLICY))), passes=2)
    GptOssRouter.route = plain
    found["engine"] = [b.routes.experts_LTK for b in mine]
    found["old"] = [scores.routes.experts_LTK for scores in found["old"]]
    t = trainer(shape, routing_noise=2.0)
    found["off_policy"] = t.update([mine], Update(policy=POLICY), [t.score(mine, router_replay="engine")])
    t = trainer(shape)
    found["quiet"] = t.update([mine], Update(policy=POLICY))
    found["gradients"] = whole_gradients(t)
    return found | frozen_step(shape, mine)


def frozen_step(shape: ParallelShape, mine: list) -> dict:
    from megatron_gptoss.trainer.how import Update

    t = trainer(shape, freeze_experts=True, freeze_router=True)
    before = {name: p.detach().clone() for name, p in t.module.named_parameters()}
    stats = t.update([mine], Update(policy=POLICY))
    return {
        "frozen": stats,
        "unmoved": {name for name, p in t.module.named_parameters() if torch.equal(p, before[name])},
        "all": set(before),
    }


class Rows(NamedTuple):
    """Of one rank's routers, where the engine told a route; padding aside."""

    wrong: int
    right: int


def check(t, batches, seen, go, *, passes: int) -> Rows:
    """What the routers took in `passes` runs of every microbatch against the engine's routes."""
    seen.clear()
    go()
    wrong = right = 0
    for b in batches:
        T, rows = b.tokens_T.numel(), t.place.rows(b.tokens_T.numel())
        part = t.place.cut(b.routes, T)
        for place, layer in enumerate(part.layers):
            theirs = part.experts_LTK[place].long()
            told = theirs.any(-1)
            runs = sum(at == layer and len(e) == len(theirs) and torch.equal(e[told], theirs[told]) for at, e in seen)
            real = int(told[: max(0, T - rows.start)].sum())
            right, wrong = (right + real, wrong) if runs == passes else (right, wrong + real)
    assert len(seen) == passes * len(batches) * len(part.layers)
    return Rows(wrong, right)


def world(rank: int, folder: str, names: list[str]) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    for name in names:
        shape = LAYOUTS[name]
        if rank < shape.world:
            init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
            torch.save(step(shape, rank), f"{folder}/{name}-rank{rank}.pt")
            dist.barrier()
            destroy_groups()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    mp.spawn(world, args=(str(folder), list(LAYOUTS)), nprocs=2, join=True)  # pyright: ignore[reportPrivateImportUsage]
    load = lambda name, rank: torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False)  # noqa: E731
    return {name: [load(name, rank) for rank in range(shape.world)] for name, shape in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_that_the_engine_told_is_the_engines(found, layout):
    """100 % of them, in scoring and, forward and recomputed, in the update; together the ranks have every row once."""
    for phase in ("in_scoring", "in_update"):
        assert [rank[phase].wrong for rank in found[layout]] == [0] * len(found[layout])
        assert sum(rank[phase].right for rank in found[layout]) == ROWS - MISSING
    for rank in found[layout]:
        for scored, engine in zip(rank["old"], rank["engine"], strict=True):
            told = engine.any(-1)
            assert torch.equal(scored[:, : engine.shape[1]][told], engine[told])
            assert scored.any(-1).all(), "and where it told nothing the routers' own choice is remembered"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_missing_is_counted_over_all_ranks(found, layout):
    for rank in found[layout]:
        for kind in ("on_policy", "off_policy"):
            measured = {m.name: m.value for m in rank[kind].measures}
            assert measured["router/missing_rows"] == MISSING
            assert measured["router/replayed_fraction"] == pytest.approx(1 - MISSING / ROWS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_with_the_scored_routes_has_ratio_one_under_noise(found, layout):
    for rank in found[layout]:
        for kind in ("on_policy", "off_policy"):
            assert (rank[kind].ratio_max_abs_dev, rank[kind].clip_fraction) == (0.0, 0.0)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_loss_and_gradients_are_those_of_one_rank(found, layout):
    truth = found["one"][0]
    for rank in found[layout]:
        for field in ("loss", "grad_norm", "k3", "entropy"):
            assert getattr(rank["quiet"], field) == pytest.approx(getattr(truth["quiet"], field), rel=1e-5), field
    assert all(gradient.abs().max() > 0 for gradient in truth["gradients"].values()), "the routers' among them"
    for rank in found[layout]:
        deviation, name = furthest(rank["gradients"], truth["gradients"])
        assert deviation < 1e-5, (name, deviation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_experts_and_routers_stay_in_every_layout(found, layout):
    for rank in found[layout]:
        assert rank["unmoved"] == {name for name in rank["all"] if ".mlp.experts." in name or ".mlp.router." in name} != set()
        assert rank["frozen"].grad_norm == pytest.approx(found["one"][0]["frozen"].grad_norm, rel=1e-5)
