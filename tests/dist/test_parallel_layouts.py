"""However the model and the data are divided over ranks, a training step is the same one: losses, scores, the gradient norm and the gradient
of every parameter, gathered to Hugging Face's names, equal those of one rank. Imports take long, so each world size is started once.

Every layout computes the same batch, packed for its number of data-parallel ranks; fp32 on gloo.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.training import MILD, samples, trainer

# Three layers, so that two stages are uneven; a window shorter than the sequences; lengths that nothing divides.
MODEL = MILD.model_copy(update={"num_hidden_layers": 3})
BATCH = samples(7, seed=5, longest=31)
HOW = RlConfig(entropy_coef=0.01, kl_coef=0.1)
TOLERANCE = 1e-5  # of a tensor's largest entry

LAYOUTS = {
    "TP2": ParallelShape(world=2, tensor=2),
    "EP2": ParallelShape(world=2, expert=2),
    "CP2": ParallelShape(world=2, context=2),
    "DP2": ParallelShape(world=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "PP2-uneven": ParallelShape(world=2, pipeline=2, stage_layers=(1, 2)),
    "EP4": ParallelShape(world=4, expert=4),
    "TP2xEP2": ParallelShape(world=2, tensor=2, expert=2),
    "CP2xEP2": ParallelShape(world=2, context=2, expert=2),
    "DP2xCP2": ParallelShape(world=4, context=2),
    "PP2xEP2": ParallelShape(world=4, pipeline=2, expert=2),
    "TP2xEP4": ParallelShape(world=4, tensor=2, expert=4),  # experts divided over tensor- and data-parallel ranks
    "TP2xCP2xEP2": ParallelShape(world=4, tensor=2, context=2, expert=2),
    "TP2xPP2xEP2": ParallelShape(world=4, tensor=2, pipeline=2, expert=2),
}
TOKENS_PER_MICROBATCH = 64


def whole_gradient(wrapped):
    """A parameter's gradient after the distributed optimizer's reduce-scatter, of which each data-parallel rank holds a part."""
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return lambda p: p.main_grad


def step(shape: ParallelShape, rank: int, **fields) -> dict:
    """One training step in this layout: what it scored, its gradients before clipping, what it reported, the weights after it."""
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.trainer.how import Update

    t = trainer(shape, model=MODEL, tokens_per_microbatch=TOKENS_PER_MICROBATCH, **fields)
    t.keep_reference()
    with torch.no_grad():
        for p in t.module.parameters():
            p.mul_(1.02)  # away from the reference, so that its term counts
    t.weights_changed()
    packed = pack(BATCH, ranks=shape.data, tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    mine = packed[shape.data_index(rank)]
    how = Update(policy=HOW, temperature=0.8)
    scores = t.score(mine, temperature=0.8)
    loaded = {name: tensor.clone() for name, tensor in export_hf(t.module, MODEL)}
    old = [replace(s, logp_N=s.logp_N - 0.05) for s in scores]
    reference = t.score(mine, temperature=0.8, reference=True)
    t._accumulate(mine, how, old, reference)
    gradients = {name: g.clone() for name, g in export_hf(t.model, MODEL, value=whole_gradient(t.model))}
    stats = t.update([mine], how, [old])
    after = {name: tensor.clone() for name, tensor in export_hf(t.module, MODEL)}
    logps = {name: [] for name in (s.name for s in BATCH)}
    for batch, score in zip(mine, scores, strict=True):
        for sample, logp in zip(batch.sample_N.tolist(), score.logp_N.tolist(), strict=True):
            logps[batch.names[sample]].append(logp)
    return {"logps": logps, "loaded": loaded, "gradients": gradients, "stats": stats, "after": after}


def world(rank: int, size: int, folder: str, only: list[str]) -> None:
    """Every layout of a world size, one after the other. Rank r leaves what it found in `folder`."""
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    for name in only:
        shape = LAYOUTS[name]
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        found = step(shape, rank)
        if rank:
            found = {key: found[key] for key in ("logps", "stats")}
        torch.save(found, f"{folder}/{name}-rank{rank}.pt")
        dist.barrier()
        destroy_groups()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank of each layout found; worlds are started when first asked for."""
    folder = tmp_path_factory.mktemp("layouts")
    started = set()

    def of(name: str) -> list[dict]:
        size = LAYOUTS[name].world
        if size not in started:
            started.add(size)
            only = [n for n, shape in LAYOUTS.items() if shape.world == size]
            mp.spawn(world, (size, str(folder), only), nprocs=size)  # pyright: ignore[reportPrivateImportUsage]
        return [torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False) for rank in range(size)]

    return of


@pytest.fixture(scope="module")
def truth(one_rank):
    return step(one_rank, 0)


def worst(ours: dict, theirs: dict) -> tuple[float, str]:
    assert list(ours) == list(theirs)
    return max((float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()), n) for n in theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_equals_one_rank(found, truth, layout):
    for name, gradient in truth["gradients"].items():
        assert gradient.abs().max() > 0, f"{name} is not tested"
    deviation, name = worst(found(layout)[0]["gradients"], truth["gradients"])
    print(f"{layout}: {deviation:.1e} ({name})")
    assert deviation < TOLERANCE, f"{name}: {deviation:.1e} of its largest entry"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_step_reports_equals_one_rank_and_is_the_same_on_all(found, truth, layout):
    ranks = [rank["stats"] for rank in found(layout)]
    assert all(stats == ranks[0] for stats in ranks)
    for field in ("num_tokens", "num_updates", "skipped", "problem"):
        assert getattr(ranks[0], field) == getattr(truth["stats"], field)
    for field in ("loss", "grad_norm", "entropy", "kl_ref", "clip_fraction", "ratio_max_abs_dev", "k1", "k3", "ess", "logp_abs_max"):
        assert getattr(ranks[0], field) == pytest.approx(getattr(truth["stats"], field), rel=TOLERANCE, abs=1e-7), field


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_whole_on_every_rank_that_shares_the_model(found, truth, layout):
    seen = set()
    for rank in found(layout):
        for name, logps in rank["logps"].items():
            if logps:
                seen.add(name)
                torch.testing.assert_close(torch.tensor(logps), torch.tensor(truth["logps"][name]), rtol=0, atol=TOLERANCE)
    assert seen == {s.name for s in BATCH}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_bit_equal_and_the_update_equals_one_rank(found, truth, layout):
    rank = found(layout)[0]
    assert list(rank["loaded"]) == list(truth["loaded"])
    assert all(torch.equal(rank["loaded"][name], tensor) for name, tensor in truth["loaded"].items())
    # AdamW's first step is lr * sign(gradient) wherever the gradient is not tiny, so a wrong sign shows as 2 * lr = 2e-2.
    moved = {n: (rank["after"][n] - truth["after"][n]).abs() for n in truth["after"]}
    assert max(float((m > 1e-3).float().mean()) for m in moved.values()) < 1e-2
