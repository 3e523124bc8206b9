"""The self-test's tools over ranks: a fault is the same fault in every layout, and pieces are compared where experts are divided."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.model import reference
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.parity import FAULT_WORDS, NEAR_TIES
from tests.helpers.tiny_model import strong_tensors
from tests.helpers.training import MILD, samples, trainer

SHAPES = {
    "EP2": ParallelShape(world=2, expert=2),
    "TP2": ParallelShape(world=2, tensor=2),
    "CP2": ParallelShape(world=2, context=2),
    "PP2": ParallelShape(world=2, pipeline=2),
}
FAULTS = ("none", "no-sinks", "window", "no-window", "yarn", "yarn-rounded", "router-bias", "gate-up", "temperature")
TEMPERATURE = 0.7


def batches():
    made = samples(6, seed=8, shortest=20, longest=30)  # the window is 8
    return made, [make_microbatch(made[:3]), make_microbatch(made[3:])]


def two_ranks(rank: int, folder: str) -> None:
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.model import router
    from megatron_gptoss.model.faults import broken
    from megatron_gptoss.model.pieces import compare, watched
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    found = {}
    for name, shape in SHAPES.items():
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        t, mine = trainer(shape), batches()[1]
        for fault in FAULTS:
            with broken(t.module, fault):
                found[name, fault] = [s.logp_N for s in t.score(mine, temperature=TEMPERATURE)]
                if name == "EP2":
                    with watched(t.module) as seen:
                        logp = [s.logp_N for s in t.score(mine, temperature=TEMPERATURE)]
                    found["pieces", fault] = compare(seen, export_hf(t.module, MILD), MILD, mine, logp, TEMPERATURE, 1e-4)
        router.ROUNDING_OF_INPUT = 1.0  # or too few tokens of so small a model change their experts
        with broken(t.module, NEAR_TIES):
            found[name, NEAR_TIES] = [s.logp_N for s in t.score(mine, temperature=TEMPERATURE)]
        dist.barrier()
        destroy_groups()
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(two_ranks, args=(str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("layout", SHAPES)
def test_a_fault_is_the_references_in_every_layout(found, layout):
    weights = {n: 0.5 * t if "norm" not in n else t for n, t in strong_tensors(MILD, 3)}
    made, _ = batches()
    for fault in FAULTS:
        logp = reference.log_probs_of(weights, MILD, [s.token_ids for s in made], temperature=TEMPERATURE, fault=fault)
        expected = torch.cat([x[torch.tensor(s.trained)[1:]] for x, s in zip(logp, made, strict=True)])
        for rank in found:
            torch.testing.assert_close(torch.cat(rank[layout, fault]), expected, atol=5e-5, rtol=1e-5, msg=lambda m, f=fault: f"{f}: {m}")


@pytest.mark.parametrize("fault", FAULTS)
def test_pieces_are_judged_on_both_ranks_with_experts_divided(found, fault):
    for rank in found:
        bad = {(p.piece, p.fault) for p in rank["pieces", fault] if p.bad}
        piece = "head" if fault == "temperature" else FAULT_WORDS.get(fault, ("", ""))[0]
        assert bad == (set() if fault == "none" else {(piece, fault)})


@pytest.mark.parametrize("layout", SHAPES)
def test_near_ties_are_taken_the_other_way_in_every_layout(found, layout):
    shaken, right = (torch.stack([torch.cat(rank[layout, which]) for rank in found]) for which in (NEAR_TIES, "none"))
    assert shaken.isfinite().all() and (shaken - right).abs().amax(dim=1).min() > 1e-2, "on both ranks"
    if layout != "EP2":  # there each rank has sequences, and noise, of its own
        assert torch.equal(shaken[0], shaken[1])
