"""Parts of the policy update that add up over a whole sequence or a whole update give the same loss, gradient and metrics however ranks
share the work: a sequence's ratio when its tokens lie on two context-parallel ranks, an update's counts and mean weight when two
data-parallel ranks have other samples, what only the last pipeline stage measures, experts on two ranks; and however samples are packed.

Loss, gradient norm and the gradient as a whole agree to 1e-6. A single tensor may be further off where its own gradient is a small
difference of larger terms: measured up to 1.9e-6 of its norm, sinks under tensor parallelism. That this is float32's rounding and nothing
else is seen in float64, where the same steps agree to 1e-13, each tensor for itself (measured: 5e-15, the same sinks).
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.gradients import furthest, whole_gradients
from tests.helpers.training import MILD, samples, trainer, trainer_in_float64

LAYOUTS = {
    "one": ParallelShape(world=1),
    "CP2": ParallelShape(world=2, context=2),
    "DP2": ParallelShape(world=2),
    "EP2": ParallelShape(world=2, expert=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "TP2": ParallelShape(world=2, tensor=2),
    "packed otherwise": ParallelShape(world=1),
}
BATCH = samples(7, seed=5, longest=31)
VARIANTS = {
    "gspo": RlConfig(
        surrogate="gspo", aggregation="sequence-mean", correction="seq-tis", correction_normalize=True, clip_low=0.01, clip_high=0.01
    ),
    "cispo": RlConfig(surrogate="cispo", correction="geo-rs-tis", reject_low=0.7, reject_high=1.3, correction_veto=0.2, entropy_coef=0.01),
    "dr-grpo": RlConfig(aggregation="sequence-sum", aggregation_length=30, correction="icepop", correction_normalize=True, dual_clip=3.0),
}
TOLERANCE = 1e-5  # of measures, some of which are differences
FP32 = 1e-6  # of loss and gradient
FP64 = 1e-13  # of loss and of each tensor's gradient, in float64
WITH_REFERENCE = RlConfig(correction="seq-mis", correction_cap=30.0, kl_coef=0.1, kl_estimator="unbiased", entropy_coef=0.01)


def share_of(name: str, rank: int) -> list:
    batch, budget = (BATCH[::-1], 40) if name == "packed otherwise" else (BATCH, 64)
    shape = LAYOUTS[name]
    return pack(batch, ranks=shape.data, tokens_per_microbatch=budget)[shape.data_index(rank)]


def steps(name: str, rank: int) -> dict:
    from megatron_gptoss.trainer.how import Update

    found, shape, mine = {}, LAYOUTS[name], share_of(name, rank)
    for variant, policy in VARIANTS.items():
        t = trainer(shape)
        scores = t.score(mine)
        # Somewhere else than the policy, by an amount that depends on the token alone.
        old = [replace(s, logp_N=s.logp_N + 0.1 * torch.sin(7.0 * s.logp_N)) for s in scores]
        measured = t.measure(mine, Update(policy=policy, keep_scores=True))
        off_policy = t.update([mine], Update(policy=policy), [old])
        t = trainer(shape, clip_grad=1e9)
        on_policy = t.update([mine], Update(policy=policy))
        found[variant, "scores"] = measured.scores
        found[variant] = {"measured": replace(measured, scores=()), "on_policy": on_policy, "off_policy": off_policy}
        found[variant, "gradients"] = whole_gradients(t)
    return found


def steps_in_float64(name: str, rank: int) -> dict:
    """Loss, gradients and share of clipped tokens. Old and reference policies are numbers that depend on the token alone; scored ones would
    be float32."""
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.trainer.how import TokenScores, Update

    def near_engine(gap_of) -> list:
        return [TokenScores(b.engine_logp_N + gap_of(40.0 * b.engine_logp_N), torch.zeros_like(b.engine_logp_N)) for b in mine]

    found, mine, t = {}, share_of(name, rank), trainer_in_float64(LAYOUTS[name])
    old, ref = near_engine(lambda x: 0.3 * torch.sin(x)), near_engine(lambda x: 0.5 * torch.cos(x))
    on_policy = {"correction_normalize": False}  # its mean weight is of a scoring pass
    cases = {(variant, "off-policy"): (policy, old, None) for variant, policy in VARIANTS.items()}
    cases |= {(variant, "on-policy"): (policy.model_copy(update=on_policy), None, None) for variant, policy in VARIANTS.items()}
    cases["ppo", "with a reference"] = (WITH_REFERENCE, old, ref)
    for case, (policy, its_old, its_ref) in cases.items():
        how = Update(policy=policy)
        totals = t._accumulate(mine, how, t._known(mine, how, its_old, its_ref))
        gradients = {name: g.clone() for name, g in export_hf(t.model, MILD, value=lambda p: p.main_grad)}
        found[case] = {"loss": totals.mean("loss", "tokens"), "gradients": gradients, "clipped": totals.mean("clipped")}
    return found


def world(rank: int, folder: str, names: list[str]) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    for name in names:
        shape = LAYOUTS[name]
        if rank < shape.world:
            init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
            torch.save(steps(name, rank) | {"float64": steps_in_float64(name, rank)}, f"{folder}/{name}-rank{rank}.pt")
            dist.barrier()
            destroy_groups()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    mp.spawn(world, args=(str(folder), list(LAYOUTS)), nprocs=2, join=True)
    load = lambda name, rank: torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False)  # noqa: E731
    return {name: [load(name, rank) for rank in range(shape.world)] for name, shape in LAYOUTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_step_is_that_of_one_rank_and_the_same_on_all(found, layout, variant):
    truth, ranks = found["one"][0][variant], [rank[variant] for rank in found[layout]]
    for kind, theirs in truth.items():
        ours = ranks[0][kind]
        assert all(rank[kind] == ours for rank in ranks)
        for field in ("loss", "grad_norm"):
            # 1e-7: the rounding of terms of size 1, where losses of either sign cancel
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=FP32, abs=1e-7), (kind, field)
        for field in ("entropy", "clip_fraction", "ratio_max_abs_dev", "k1", "k3", "ess", "truncated_fraction"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=TOLERANCE, abs=1e-6), (kind, field)
        assert {m.name: m.value for m in ours.measures} == pytest.approx(
            {m.name: m.value for m in theirs.measures}, rel=TOLERANCE, abs=1e-6
        )
        assert [(w.name, w.position, w.token_id) for w in ours.worst] == [(w.name, w.position, w.token_id) for w in theirs.worst]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_the_gradient_is_that_of_one_rank(found, layout, variant):
    truth = found["one"][0][variant, "gradients"]
    norm = torch.stack([g.norm() for g in truth.values()]).norm()
    for rank in found[layout]:
        ours = rank[variant, "gradients"]
        assert torch.stack([(ours[name] - g).norm() for name, g in truth.items()]).norm() < FP32 * norm
        deviation, name = furthest(ours, truth)
        assert deviation < 5 * FP32, (name, deviation)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_the_scores_of_every_sample_are_those_of_one_rank(found, layout):
    truth = {each.name: each for each in found["one"][0]["gspo", "scores"]}
    assert len(truth) == len(BATCH)
    shape = LAYOUTS[layout]
    first = [found[layout][shape.first_rank(d)]["gspo", "scores"] for d in range(shape.data)]
    assert sorted(each.name for scores in first for each in scores) == sorted(truth), "each sample once, over data-parallel ranks"
    for rank, held in enumerate(found[layout]):
        assert held["gspo", "scores"] == first[shape.data_index(rank)], "ranks that share samples know the same"
    for each in (each for scores in first for each in scores):
        assert each.advantage == truth[each.name].advantage
        assert each.trainer_logp == pytest.approx(truth[each.name].trainer_logp, rel=TOLERANCE)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_in_float64_loss_and_every_tensors_gradient_are_those_of_one_rank(found, layout):
    truth = found["one"][0]["float64"]
    for case, theirs in truth.items():
        for rank in found[layout]:
            ours = rank["float64"][case]
            assert all(g.dtype == torch.float64 and g.norm() > 0 for g in ours["gradients"].values())
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=FP64, abs=1e-15), case
            deviation, name = furthest(ours["gradients"], theirs["gradients"])
            assert deviation < FP64, (case, name, deviation)


def test_the_cases_are_not_idle(found):
    truth = found["one"][0]
    shares = {v: {m.name: m.value for m in truth[v]["off_policy"].measures} for v in VARIANTS}
    assert truth["gspo"]["off_policy"].clip_fraction > 0.05 and truth["gspo"]["off_policy"].ess < 0.9
    assert 0 < shares["cispo"]["mismatch/rejected_fraction"] < 1
    assert 0 < shares["dr-grpo"]["mismatch/masked_fraction"] < 1
    for variant in VARIANTS:
        assert truth[variant]["on_policy"].ratio_max_abs_dev == 0.0 and truth[variant]["on_policy"].grad_norm > 0
    off_policy = {variant: case["clipped"] for (variant, kind), case in truth["float64"].items() if kind != "on-policy"}
    assert len(off_policy) == 4 and all(0.05 < share < 0.95 for share in off_policy.values())
