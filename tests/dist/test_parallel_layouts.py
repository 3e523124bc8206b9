"""However the model and the data are divided over ranks, a training step is the same one: losses, scores, gradient norm and the gradient of
every parameter, gathered to Hugging Face's names, equal those of one rank. Imports take long, so each world size is started once.

Every layout computes the same batch, packed for its number of data-parallel ranks, some of them in other microbatches too; fp32 on gloo.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers import fake_deep_ep
from tests.helpers.training import MILD, samples, trainer

# Three layers, so that two stages are uneven; a window shorter than the sequences; lengths that nothing divides.
MODEL = MILD.model_copy(update={"num_hidden_layers": 3})
BATCH = samples(7, seed=5, longest=31)
SPOILT = [*BATCH[:-1], replace(BATCH[-1], advantage=float("nan"))]
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
ALONE = 32  # the longest sequence fills most of it: nearly every sequence is a microbatch of its own

# What changes beside the layout, and must not change the result: name -> layout, fields of TrainerConfig.
VARIANTS = {
    "CP2-alone": ("CP2", {"tokens_per_microbatch": ALONE}),
    "PP2-alone": ("PP2", {"tokens_per_microbatch": ALONE}),
    **{f"{name}-{kind}": (name, {"recompute": kind}) for name in ("TP2xEP2", "PP2") for kind in ("full", "selective")},
    # Over a stand-in for DeepEP: its calls, not its kernels.
    "EP4-deepep": ("EP4", {"dispatcher": "deepep"}),
    "TP2xEP2-deepep": ("TP2xEP2", {"dispatcher": "deepep", "recompute": "selective"}),
}
CASES = {name: (name, {}) for name in LAYOUTS} | VARIANTS


def whole_gradient(wrapped):
    """A parameter's gradient after the distributed optimizer's reduce-scatter, of which each data-parallel rank holds a part."""
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return lambda p: p.main_grad


def step(shape: ParallelShape, rank: int, **fields) -> dict:
    """One training step in this layout: what it scored, its gradients before clipping, what it reported, the weights after it; then a step
    with a value that is not finite."""
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.trainer.how import Update

    fields = {"tokens_per_microbatch": TOKENS_PER_MICROBATCH, **fields}
    t = trainer(shape, model=MODEL, **fields)
    t.keep_reference()
    with torch.no_grad():
        for p in t.module.parameters():
            p.mul_(1.02)  # away from the reference, so that its term counts
    t.weights_changed()
    packed = pack(BATCH, ranks=shape.data, tokens_per_microbatch=fields["tokens_per_microbatch"])
    mine = packed[shape.data_index(rank)]
    how = Update(policy=HOW, temperature=0.8)
    scores = t.score(mine, temperature=0.8)
    loaded = {name: tensor.clone() for name, tensor in export_hf(t.module, MODEL)}
    old = [replace(s, logp_N=s.logp_N - 0.05) for s in scores]
    reference = t.score(mine, temperature=0.8, reference=True)
    measured = t.measure(mine, how)
    t._accumulate(mine, how, t._known(mine, how, old, reference))
    gradients = {name: g.clone() for name, g in export_hf(t.model, MODEL, value=whole_gradient(t.model))}
    stats = t.update([mine], how, [old])
    after = {name: tensor.clone() for name, tensor in export_hf(t.module, MODEL)}
    logps = {name: [] for name in (s.name for s in BATCH)}
    for batch, score in zip(mine, scores, strict=True):
        for sample, logp in zip(batch.sample_N.tolist(), score.logp_N.tolist(), strict=True):
            logps[batch.names[sample]].append(logp)

    before = t.fingerprint()["weights"]
    spoilt = pack(SPOILT, ranks=shape.data, tokens_per_microbatch=fields["tokens_per_microbatch"])[shape.data_index(rank)]
    refused = t.update([spoilt], how)
    return {
        "logps": logps, "loaded": loaded, "gradients": gradients, "measured": measured, "stats": stats, "after": after,
        "refused": refused, "unchanged": t.fingerprint()["weights"] == before,
    }  # fmt: skip


def world(rank: int, size: int, folder: str, only: list[str]) -> None:
    """Every case of a world size, one after the other. Rank r leaves what it found in `folder`."""
    fake_deep_ep.install()
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    for name in only:
        layout, fields = CASES[name]
        shape = LAYOUTS[layout]
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        fake_deep_ep.calls.clear()
        found = step(shape, rank, **fields)
        found["deepep"] = dict(fake_deep_ep.calls)
        if rank:
            found = {key: value for key, value in found.items() if key not in ("loaded", "gradients", "after")}
        torch.save(found, f"{folder}/{name}-rank{rank}.pt")
        dist.barrier()
        destroy_groups()
    if size == 2:
        torch.save(resume_elsewhere(rank, folder), f"{folder}/resumed-rank{rank}.pt")


def resume_elsewhere(rank: int, folder: str) -> dict[str, dict]:
    """A run in one layout that saves after its first update, and its second update there and in another layout."""
    from pathlib import Path

    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import load_training_state, save_training_state
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.trainer.how import Update

    found, path = {}, Path(folder) / "step-1"
    for name, seed in (("TP2xEP2", 3), ("PP2-uneven", 4)):
        shape = LAYOUTS[name]
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-resume-{name}", timeout_s=120, seed=0, backend="gloo")
        t = trainer(shape, model=MODEL, seed=seed)
        mine = pack(BATCH, ranks=shape.data, tokens_per_microbatch=TOKENS_PER_MICROBATCH)[shape.data_index(rank)]
        parts = {"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule}
        if not path.exists():
            t.update([mine], Update(policy=HOW.model_copy(update={"kl_coef": 0.0})))
            save_training_state(path, config=MODEL, progress=Progress(1, 1, 0), **parts)
        else:
            load_training_state(path, **parts)
        saved = {n: tensor.clone() for n, tensor in export_hf(t.module, MODEL)}
        stats = t.update([mine], Update(policy=HOW.model_copy(update={"kl_coef": 0.0})))
        found[name] = {"saved": saved, "stats": stats, "after": {n: tensor.clone() for n, tensor in export_hf(t.module, MODEL)}}
        dist.barrier()
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank of each layout found; worlds are started when first asked for."""
    folder = tmp_path_factory.mktemp("layouts")
    started = set()

    def of(name: str) -> list[dict]:
        size = 2 if name == "resumed" else LAYOUTS[CASES[name][0]].world
        if size not in started:
            started.add(size)
            only = [n for n, (layout, _) in CASES.items() if LAYOUTS[layout].world == size]
            mp.spawn(world, (size, str(folder), only), nprocs=size)  # pyright: ignore[reportPrivateImportUsage]
        return [torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False) for rank in range(size)]

    return of


@pytest.fixture(scope="module")
def truth(one_rank):
    return step(one_rank, 0)


def worst(ours: dict, theirs: dict) -> tuple[float, str]:
    assert list(ours) == list(theirs)
    return max((float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()), n) for n in theirs)


@pytest.mark.parametrize("layout", CASES)
def test_every_gradient_equals_one_rank(found, truth, layout):
    for name, gradient in truth["gradients"].items():
        assert gradient.abs().max() > 0, f"{name} is not tested"
    deviation, name = worst(found(layout)[0]["gradients"], truth["gradients"])
    print(f"{layout}: {deviation:.1e} ({name})")
    assert deviation < TOLERANCE, f"{name}: {deviation:.1e} of its largest entry"


@pytest.mark.parametrize("layout", CASES)
def test_what_a_step_reports_equals_one_rank_and_is_the_same_on_all(found, truth, layout):
    for kind in ("measured", "stats"):
        ranks = [rank[kind] for rank in found(layout)]
        assert all(stats == ranks[0] for stats in ranks)
        compare(ranks[0], truth[kind])


def compare(ours, theirs):
    for field in ("num_tokens", "num_updates", "skipped", "problem"):
        assert getattr(ours, field) == getattr(theirs, field)
    for field in ("loss", "grad_norm", "entropy", "kl_ref", "clip_fraction", "ratio_max_abs_dev", "k1", "k3", "ess", "logp_abs_max"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=TOLERANCE, abs=1e-7), field


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_norm_counts_every_entry_once(found, layout):
    """A part that Megatron takes for a copy is left out, a copy taken for a part is counted again. The least one would see are the sinks of
    one tensor-parallel rank, 4e-6 of the norm here; float32's rounding was 2e-7."""
    rank = found(layout)[0]
    whole = sum(float(g.double().square().sum()) for g in rank["gradients"].values()) ** 0.5
    assert rank["stats"].grad_norm == pytest.approx(whole, rel=1e-6)


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


@pytest.mark.parametrize("name", [name for name, (_, fields) in VARIANTS.items() if set(fields) == {"recompute"}])
def test_recomputing_changes_no_bit(found, name):
    ours, theirs = found(name)[0], found(VARIANTS[name][0])[0]
    assert all(torch.equal(ours["gradients"][n], theirs["gradients"][n]) for n in theirs["gradients"])
    assert ours["stats"] == theirs["stats"]


@pytest.mark.parametrize("name", CASES)
def test_deepep_carries_the_tokens_when_it_is_asked_for_and_only_then(found, name):
    for rank in found(name):
        asked = "dispatcher" in CASES[name][1]
        assert set(rank["deepep"]) == ({"dispatch", "dispatch again", "combine"} if asked else set())
        # Forward: one each way; backward: the other way round.
        assert not asked or rank["deepep"]["combine"] == rank["deepep"]["dispatch"] + rank["deepep"]["dispatch again"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_that_is_not_finite_is_refused_and_named_on_all_ranks(found, layout):
    ranks = found(layout)
    assert all(rank["refused"].skipped and rank["unchanged"] for rank in ranks)
    problems = {rank["refused"].problem for rank in ranks}
    assert len(problems) == 1 and " in microbatch " in problems.pop()


def test_a_checkpoint_of_one_layout_continues_in_another(found):
    for rank in found("resumed"):
        saved, loaded = rank.values()
        assert all(torch.equal(loaded["saved"][n], tensor) for n, tensor in saved["saved"].items())
        assert loaded["stats"].grad_norm == pytest.approx(saved["stats"].grad_norm, rel=TOLERANCE)
        assert loaded["stats"].learning_rate == saved["stats"].learning_rate
        # Without the moments, or with another count of updates, AdamW would move every entry by another amount, of the order lr = 1e-2.
        moved = [(loaded["after"][n] - tensor).abs() for n, tensor in saved["after"].items()]
        assert max(float((m > 1e-4).float().mean()) for m in moved) < 1e-2
