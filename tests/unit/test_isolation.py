"""The switches of [diagnose] outside attention: what is frozen keeps its bits while all else learns, noise on the choice of experts is
there only when it is asked for, and each is said aloud. Engines in bfloat16 beside a trainer in float32 are such an experiment without a
switch: rollout.dtype."""

from pathlib import Path

import pytest
import torch

from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.preflight import check_run_target
from megatron_gptoss.config.schema import DiagnoseConfig, RlConfig, TrainerConfig
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.parallel.packing import pack_step
from tests.helpers.tiny_model import strong_tensors
from tests.helpers.training import MILD, samples

FILE = str(Path(__file__).parents[2] / "configs" / "tiny.toml")
PARTS = {"freeze_experts": ".mlp.experts.", "freeze_router": ".mlp.router."}


def tiny(*flags):
    return load(*parse_flags([FILE, *flags]))


def trainer(shape, *, dtype="float32", **switches):
    """With seed 4 every expert gets tokens."""
    from megatron_gptoss.trainer.step import Trainer

    optimizer = RlConfig(lr=1e-2, decay="constant", warmup_steps=0)
    made = Trainer(MILD, TrainerConfig(dtype=dtype), shape, optimizer, total_updates=10, diagnose=DiagnoseConfig(**switches))
    made.load_hf((n, 0.5 * t if "norm" not in n else t) for n, t in strong_tensors(MILD, 4))
    made.weights_changed()
    return made


def update(made, seed=1):
    from megatron_gptoss.trainer.how import Update

    (batches,) = (m[0] for m in pack_step(samples(6, seed=seed), minibatches=1, ranks=1, tokens_per_microbatch=60))
    return made.update([batches], Update(policy=RlConfig()))


def moved_by(made) -> tuple[set[str], set[str]]:
    """Names of the parameters that two updates change, and of all."""
    before = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    for seed in (1, 2):
        assert not update(made, seed).skipped
    return {name for name, p in made.module.named_parameters() if not torch.equal(p, before[name])}, set(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("switches", [("freeze_experts",), ("freeze_router",), ("freeze_experts", "freeze_router")])
def test_frozen_weights_keep_their_bits_and_all_others_move(one_rank, switches, dtype):
    frozen = trainer(one_rank, dtype=dtype, **dict.fromkeys(switches, True))
    moved, everything = moved_by(frozen)
    kept = {name for name in everything if any(PARTS[switch] in name for switch in switches)}
    assert len(kept) >= 4 * len(switches) and moved == everything - kept
    free, frozen = update(trainer(one_rank, dtype=dtype)), update(trainer(one_rank, dtype=dtype, **dict.fromkeys(switches, True)))
    assert frozen.loss == free.loss, "the forward pass is the same"
    assert 0 < frozen.grad_norm < free.grad_norm, "the norm is that of what is trained"


def test_all_three_frozen_leave_norms_embedding_and_head(one_rank):
    moved, everything = moved_by(trainer(one_rank, freeze_attention=True, freeze_experts=True, freeze_router=True))
    rest = {name for name in everything if not any(part in name for part in (".self_attention.", ".input_layernorm.", ".mlp."))}
    assert moved == rest and {name.split(".")[-2] for name in rest} >= {"pre_mlp_layernorm", "final_layernorm"}


def test_noise_changes_routes_and_nothing_when_it_is_zero(one_rank):
    plain, zero, noisy = (update(trainer(one_rank, **switches)) for switches in ({}, {"routing_noise": 0.0}, {"routing_noise": 2.0}))
    assert (plain.loss, plain.grad_norm) == (zero.loss, zero.grad_norm)
    assert noisy.loss != plain.loss and noisy.grad_norm > 0


def test_noise_goes_on_where_a_checkpoint_left_it(one_rank, tmp_path):
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import load_training_state, save_training_state

    made, again = trainer(one_rank, routing_noise=2.0), trainer(one_rank, routing_noise=2.0)
    update(made)
    parts = {"model": made.model, "optimizer": made.optimizer, "schedule": made.schedule}
    save_training_state(tmp_path / "step-1", config=MILD, progress=Progress(1, 1, 0), **parts)
    load_training_state(tmp_path / "step-1", model=again.model, optimizer=again.optimizer, schedule=again.schedule)
    assert again.fingerprint() == made.fingerprint()
    assert update(made, 2) == update(again, 2) and again.fingerprint() == made.fingerprint()


@pytest.mark.parametrize("switch", ["freeze_experts=true", "freeze_router=true", "routing_noise=0.5"])
def test_a_switch_is_said_at_the_start(switch):
    key, value = switch.split("=")
    assert make_plan(tiny(), Cluster(2, 0)).switches == ()
    assert make_plan(tiny(f"--diagnose.{switch}"), Cluster(2, 0)).switches == (f"diagnose.{key} = {value} (flag --diagnose.{key})",)
    with pytest.raises(ConfigError, match=r"diagnose\.routing_noise"):
        tiny("--diagnose.routing_noise=-1")


@pytest.mark.parametrize("part", ["experts", "router"])
def test_a_run_with_frozen_weights_cannot_go_on_with_all_of_them(tmp_path, part):
    """Its checkpoints have no moments for them."""
    run_dir = RunDir.create(tmp_path / "run", tiny(f"--diagnose.freeze_{part}=true").config)
    run_dir.checkpoint(1).mkdir()
    write_hf_config(tiny().config.model, run_dir.checkpoint(1))
    (run_dir.checkpoint(1) / MARKER).write_text("")
    loaded = tiny(f"--run.resume={run_dir.path}")
    with pytest.raises(ConfigError, match=rf"^diagnose\.freeze_{part} = false \(default\).*state for {part}.*--init {run_dir.path}\.$"):
        check_run_target(loaded, make_plan(loaded, Cluster(2, 0)))


def test_engines_in_bfloat16_beside_a_trainer_in_float32_need_no_switch():
    plan = make_plan(tiny("--rollout.dtype=bfloat16"), Cluster(2, 0))
    assert plan.switches == () and tiny("--rollout.dtype=bfloat16").config.trainer.dtype == "float32"
