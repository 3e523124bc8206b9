"""What the configuration can change about attention: which backend computes which layers, and the switches of [diagnose]. Each switch shows
its effect by value, and with all of them off nothing differs by a bit."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from rich.console import Console as RichConsole

from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config import preflight
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.machine import machine_checks
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.preflight import check_attention, check_run_target
from megatron_gptoss.config.schema import AttentionBackend, DiagnoseConfig, RlConfig, TrainerConfig
from megatron_gptoss.errors import ConfigError, MachineError
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.plan_table import plan_rows
from megatron_gptoss.obs.run_dir import RunDir
from megatron_gptoss.parallel.packing import pack_step
from tests.helpers.tiny_model import TINY, strong_tensors
from tests.helpers.training import MILD, samples

CONFIGS = Path(__file__).parents[2] / "configs"
WINDOWED, FULL = 1, 2  # layer numbers, as Megatron counts
CU = torch.tensor([0, 11, 30], dtype=torch.int32)


def core(one_rank, layer, **options):
    """One attention module of the tiny model with random sinks."""
    from megatron_gptoss.attention.module import AttentionOptions, SinkAttention
    from megatron_gptoss.model.build import megatron_config

    made = SinkAttention(megatron_config(TINY, one_rank, dtype=torch.float32, attention=AttentionOptions(**options)), layer)
    with torch.no_grad():
        made.softmax_offset.copy_(torch.tensor([-2.0, 0.5, 3.0, 6.0]))
    return made


def run(attention):
    """[out, dq, dk, dv, dsink] of `attention(q, k, v)` on random tensors; dsink is what `attention` says it is."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(30, n, TINY.head_dim, generator=generator).requires_grad_() for n in (4, 2, 2)]
    out, sinks = attention(*inputs)
    out.backward(torch.randn(out.shape, generator=generator))
    return [out.detach(), *(x.grad for x in inputs), sinks.grad]


def through(module):
    from megatron_gptoss.model.gpt_oss import packed_params

    return run(lambda q, k, v: (module(q, k, v, None, packed_seq_params=packed_params(CU, 19)), module.softmax_offset))


def by_hand(module, window, *, with_sinks=True):
    from megatron_gptoss.attention.api import attend

    sinks = module.softmax_offset.detach().clone().requires_grad_()
    return run(lambda q, k, v: (attend(q, k, v, sinks if with_sinks else None, cu_seqlens=CU, window=window)[0].flatten(1), sinks))


def equal(found, expected):
    return [a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


# ---- the switches, in one module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "window"), [(WINDOWED, TINY.sliding_window), (FULL, None)])
def test_with_all_switches_off_the_module_is_attend_bit_for_bit(one_rank, layer, window):
    module = core(one_rank, layer)
    found = through(module)
    assert all(equal(found, by_hand(module, window)))
    assert found[4].abs().min() > 0


@pytest.mark.parametrize(("layer", "window"), [(WINDOWED, TINY.sliding_window), (FULL, None)])
def test_ignore_sinks_is_plain_softmax(one_rank, layer, window):
    module = core(one_rank, layer, ignore_sinks=True)
    found = through(module)
    assert all(equal(found, by_hand(module, window, with_sinks=False)))
    assert found[4] is None
    assert not torch.equal(found[0], through(core(one_rank, layer))[0])


@pytest.mark.parametrize("layer", [WINDOWED, FULL])
def test_drop_sink_gradient_changes_that_gradient_and_no_other_bit(one_rank, layer):
    found = through(core(one_rank, layer, drop_sink_gradient=True))
    assert equal(found, through(core(one_rank, layer))) == [True, True, True, True, False]
    assert found[4] is None


def test_ignore_window_lets_windowed_layers_see_everything_and_leaves_the_others(one_rank):
    module = core(one_rank, WINDOWED, ignore_window=True)
    assert all(equal(through(module), by_hand(module, None)))
    assert not torch.equal(through(module)[0], through(core(one_rank, WINDOWED))[0])
    assert all(equal(through(core(one_rank, FULL, ignore_window=True)), through(core(one_rank, FULL))))


# ---- backends -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What the module asks the front door for, answered by the reference."""
    from megatron_gptoss.attention import module as room
    from megatron_gptoss.attention.api import attend

    calls = []

    def recorded(*tensors, backend, deterministic, **more):
        calls.append((backend, deterministic))
        return attend(*tensors, **more)

    monkeypatch.setattr(room, "attend", recorded)
    monkeypatch.setattr(room, "find_backend", lambda *_args, **_kwargs: None)
    return calls


def test_full_and_windowed_layers_take_their_own_backend(one_rank, asked):
    pair = {"backend": "flash", "backend_windowed": "triton"}
    through(core(one_rank, FULL, **pair))
    through(core(one_rank, WINDOWED, **pair, deterministic=True))
    through(core(one_rank, WINDOWED, **pair, ignore_window=True))  # it then is a full layer
    assert asked == [("flash", False), ("triton", True), ("flash", False)]


def test_megatrons_deterministic_mode_is_heard(one_rank, asked):
    from megatron_gptoss.attention.module import SinkAttention
    from megatron_gptoss.model.build import megatron_config

    config = megatron_config(TINY, one_rank, dtype=torch.float32)
    config.deterministic_mode = True
    through(SinkAttention(config, FULL))
    assert asked == [("reference", True)]


def test_configuration_reaches_the_modules(one_rank, monkeypatch):
    from megatron_gptoss.attention import module as room
    from megatron_gptoss.model.build import attention_options, build_model

    monkeypatch.setattr(room, "find_backend", lambda *_args, **_kwargs: None)
    trainer = TrainerConfig(attention="flash", attention_windowed="triton", deterministic_attention=True)
    diagnose = DiagnoseConfig(ignore_sinks=True, drop_sink_gradient=True)
    model = build_model(TINY, one_rank, attention=attention_options(trainer, diagnose))
    first, second = (layer.self_attention.core_attention for layer in model.decoder.layers)
    assert (first.backend, second.backend, first.window, second.window) == ("triton", "flash", TINY.sliding_window, None)
    assert all(m.deterministic and m.ignore_sinks and m.drop_sink_gradient for m in (first, second))
    assert attention_options(TrainerConfig(attention="te"), DiagnoseConfig()).backend_windowed == "te"
    assert attention_options(TrainerConfig(), DiagnoseConfig(ignore_window=True)).ignore_window


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may have them all")
@pytest.mark.parametrize("backend", ["flash", "te"])
def test_a_backend_that_cannot_run_here_is_refused_when_the_model_is_built(one_rank, backend):
    from megatron_gptoss.attention.module import AttentionOptions
    from megatron_gptoss.model.build import build_model

    for options in (AttentionOptions(backend=backend), AttentionOptions(backend_windowed=backend)):
        with pytest.raises(MachineError, match=f"attention backend '{backend}' cannot run here"):
            build_model(TINY, one_rank, attention=options)


# ---- the switches, in training ------------------------------------------------------------------------------------------------------


def trainer(shape, *, fault="none", seed=4, dtype="float32", **switches):
    """As tests.helpers.training.trainer, with switches on. With seed 4 every expert gets tokens."""
    from megatron_gptoss.trainer.step import Trainer

    optimizer = RlConfig(lr=1e-2, decay="constant", warmup_steps=0)
    made = Trainer(MILD, TrainerConfig(dtype=dtype), shape, optimizer, total_updates=10, fault=fault, diagnose=DiagnoseConfig(**switches))
    made.load_hf((n, 0.5 * t if "norm" not in n else t) for n, t in strong_tensors(MILD, seed))
    made.weights_changed()
    return made


def packed(batch, budget=8192):
    return [m[0] for m in pack_step(batch, minibatches=1, ranks=1, tokens_per_microbatch=budget)]


def update(made, seed=1, **fields):
    from megatron_gptoss.trainer.how import Update

    batch = [replace(s, **fields) for s in samples(6, seed=seed)]
    return made.update(packed(batch, budget=60), Update(policy=RlConfig()))


def weights(made):
    return {name: p.detach().clone() for name, p in made.module.named_parameters()}


def of_attention(name):
    return ".self_attention." in name or ".input_layernorm." in name


def moved(made, before):
    return {name for name, p in weights(made).items() if not torch.equal(p, before[name])}


def test_a_healthy_update_moves_every_weight(one_rank):
    """The control of all that follows."""
    made = trainer(one_rank)
    before = weights(made)
    update(made)
    assert moved(made, before) == set(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_freeze_attention_keeps_its_weights_bit_for_bit_and_moves_all_others(one_rank, dtype):
    free, frozen = trainer(one_rank, dtype=dtype), trainer(one_rank, dtype=dtype, freeze_attention=True)
    before = weights(frozen)
    kept = {name for name in before if of_attention(name)}
    # 2 layers of: norm, qkv weight and bias, sinks, projection weight and bias
    assert len(kept) == 12 and sum("softmax_offset" in name for name in kept) == 2
    stats, healthy = update(frozen), update(free)
    assert stats.loss == healthy.loss, "the forward pass is the same"
    assert 0 < stats.grad_norm < healthy.grad_norm, "the norm is that of what is trained"
    update(frozen, seed=2)
    assert moved(frozen, before) == set(before) - kept


@pytest.mark.parametrize("switch", ["drop_sink_gradient", "ignore_sinks"])
def test_sinks_without_a_gradient_stay_and_all_else_moves(one_rank, switch):
    made = trainer(one_rank, **{switch: True})
    before = weights(made)
    update(made)
    assert moved(made, before) == {name for name in before if "softmax_offset" not in name}


def test_what_a_switch_changes_in_the_scores(one_rank):
    batch = packed(samples(5, seed=4))[0]
    plain = trainer(one_rank).score(batch)[0].logp_N
    for switch, same in (("drop_sink_gradient", True), ("freeze_attention", True), ("ignore_sinks", False), ("ignore_window", False)):
        assert torch.equal(trainer(one_rank, **{switch: True}).score(batch)[0].logp_N, plain) == same, switch


def test_the_fault_of_the_parity_check_is_the_same_mechanism(one_rank):
    batch = packed(samples(5, seed=4))[0]
    switched, faulty = (trainer(one_rank, **how).score(batch)[0].logp_N for how in ({"ignore_sinks": True}, {"fault": "no-sinks"}))
    assert torch.equal(switched, faulty)


def save(made, path):
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import save_training_state

    save_training_state(
        path, config=MILD, model=made.model, optimizer=made.optimizer, schedule=made.schedule, progress=Progress(1, 1, 0, 0)
    )


def resume(made, path):
    from megatron_gptoss.checkpoint.training_state import load_training_state

    load_training_state(path, model=made.model, optimizer=made.optimizer, schedule=made.schedule)


def test_a_frozen_run_resumes_to_the_bit_and_its_weights_load_anywhere(one_rank, tmp_path):
    from megatron_gptoss.checkpoint.training_state import load_training_state

    made = trainer(one_rank, freeze_attention=True)
    update(made)
    save(made, tmp_path / "step-1")
    other = trainer(one_rank, seed=99, freeze_attention=True)
    assert moved(other, weights(made))
    resume(other, tmp_path / "step-1")
    assert other.fingerprint() == made.fingerprint()
    for seed in (2, 3):
        update(made, seed), update(other, seed)
    assert other.fingerprint() == made.fingerprint()

    healthy = trainer(one_rank, seed=98)
    load_training_state(tmp_path / "step-1", model=healthy.model)
    healthy.weights_changed()
    before = weights(healthy)
    assert not any(torch.equal(before[name], p) for name, p in weights(made).items() if not of_attention(name))
    assert all(torch.equal(before[name], p) for name, p in weights(made).items() if of_attention(name))
    update(healthy)
    assert moved(healthy, before) == set(before)


def test_a_checkpoint_without_moments_of_attention_cannot_go_on_with_all_of_it(one_rank, tmp_path):
    """Found before anything starts, by the run's own configuration; the other way round works."""
    free = trainer(one_rank)
    update(free)
    save(free, tmp_path / "step-1")
    frozen = trainer(one_rank, seed=99, freeze_attention=True)
    resume(frozen, tmp_path / "step-1")
    assert not moved(frozen, weights(free))

    run_dir = RunDir.create(tmp_path / "run", tiny("--diagnose.freeze_attention=true").config)
    run_dir.checkpoint(1).mkdir()
    write_hf_config(tiny().config.model, run_dir.checkpoint(1))
    (run_dir.checkpoint(1) / MARKER).write_text("")
    for flags in (["--diagnose.freeze_attention=true"], []):
        loaded = tiny(f"--run.resume={run_dir.path}", *flags)
        if flags:
            check_run_target(loaded, make_plan(loaded, Cluster(2, 0)))
            continue
        with pytest.raises(ConfigError, match=rf"^diagnose\.freeze_attention = false \(default\).*--init {run_dir.path}\.$"):
            check_run_target(loaded, make_plan(loaded, Cluster(2, 0)))


def test_the_engines_get_every_weight_of_a_frozen_trainer(one_rank):
    from megatron_gptoss.sync.gather import gather_buckets

    made = trainer(one_rank, freeze_attention=True)
    sent = {name: tensor for bucket in gather_buckets(made.module, MILD) for name, tensor in bucket}
    given = {n: 0.5 * t if "norm" not in n else t for n, t in strong_tensors(MILD, 4)}
    assert set(sent) == set(given)
    assert all(torch.equal(sent[name], given[name]) for name in given)


def test_a_value_that_is_not_finite_is_explained_in_a_frozen_trainer_too(one_rank):
    made = trainer(one_rank, freeze_attention=True)
    stats = update(made, advantage=float("nan"))
    assert stats.skipped and "loss nan in microbatch 0 of rank 0" in stats.problem


# ---- the configuration --------------------------------------------------------------------------------------------------------------


def tiny(*flags):
    return load(*parse_flags([str(CONFIGS / "tiny.toml"), *flags]))


def planned(*flags):
    return make_plan(tiny(*flags), Cluster(2, 0))


def test_the_schema_knows_the_backends_of_the_attention_room():
    from megatron_gptoss.attention.api import BACKENDS

    assert get_args(AttentionBackend) == BACKENDS
    assert get_args(TrainerConfig.model_fields["attention_windowed"].annotation) == ("same", *BACKENDS)


ON_GPU = ("--cluster.device=cuda", "--trainer.dtype=bfloat16")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--trainer.attention=flash"], ['trainer.attention = "flash" (flag --trainer.attention)', 'cluster.device = "cpu" (default)']),
        (["--trainer.attention_windowed=te"], ['trainer.attention_windowed = "te" (flag --trainer.attention_windowed)', "GPUs only"]),
        (["--trainer.attention=flash", "--cluster.device=cuda"], ["16 bits", 'trainer.dtype = "float32" (default)']),
        (["--trainer.attention=te", "--trainer.deterministic_attention=true", *ON_GPU], ["deterministic", 'trainer.attention = "te"']),
    ],
)
def test_a_backend_that_does_not_fit_is_one_line_with_key_value_rule_and_working_values(flags, parts):
    with pytest.raises(ConfigError) as caught:
        planned(*flags)
    found = str(caught.value)
    assert all(part in found for part in parts), found
    assert "\n" not in found and " Use " in found


def test_the_values_those_messages_recommend_work():
    deterministic = "--trainer.deterministic_attention=true"
    for backend, more in (
        ("reference", []),
        ("flash", ON_GPU),
        ("triton", ON_GPU[:1]),
        ("flash", [*ON_GPU, deterministic]),
        ("te", ON_GPU),
    ):
        planned(f"--trainer.attention={backend}", *more)


def test_triton_on_a_cpu_wants_its_interpreter_and_says_so_before_anything_starts(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for key in ("trainer.attention", "trainer.attention_windowed"):
        with pytest.raises(MachineError, match=rf'^{key} = "triton" \(flag --{key}\).*Set TRITON_INTERPRET=1.*or {key} = "reference"\.$'):
            check_attention(tiny(f"--{key}=triton"))
        check_attention(tiny(f"--{key}=triton", "--cluster.device=cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_attention(tiny("--trainer.attention=triton"))


@pytest.mark.parametrize(("backend", "package", "folder"), [("flash", "flash-attn-4", "cute"), ("te", "transformer-engine", "pytorch")])
def test_a_package_that_is_missing_is_named_before_anything_starts(monkeypatch, tmp_path, backend, package, folder):
    loaded = tiny(f"--trainer.attention={backend}", *ON_GPU)
    monkeypatch.setattr(preflight, "find_spec", lambda _name: None)
    with pytest.raises(MachineError, match=f"needs the package {package}, which is not installed"):
        check_attention(loaded)
    checks = {c.name: c for c in machine_checks(loaded, make_plan(loaded, Cluster(2, 0)))}
    assert not checks["attention"].ok and package in checks["attention"].found
    check_attention(tiny(f"--trainer.attention={backend}", *ON_GPU, "--cluster.address=auto"))  # only its nodes know
    monkeypatch.setattr(preflight, "find_spec", lambda _name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(MachineError):  # flash-attn 2 has the same name, and no folder cute
        check_attention(loaded)
    (tmp_path / folder).mkdir()
    check_attention(loaded)


def test_the_plan_says_what_computes_attention():
    made = planned()
    assert (made.attention_full, made.attention_windowed, made.switches) == ("reference", "reference", ())
    pair = ["--trainer.attention=flash", "--trainer.attention_windowed=triton", "--trainer.deterministic_attention=true", *ON_GPU]
    rows = dict(plan_rows(tiny(*pair), planned(*pair)))
    assert rows["attention"] == "flash in full layers, triton in windowed ones; deterministic"
    assert dict(plan_rows(tiny(), planned()))["attention"] == "reference"
    assert "not a normal run" not in dict(plan_rows(tiny(), planned()))


SWITCHED = ("--diagnose.ignore_window=true", "--parity.trainer_fault=yarn")


def shown(terminal):
    out = io.StringIO()
    console = Console(RichConsole(file=out, highlight=False, force_terminal=terminal, color_system="standard" if terminal else None))
    console.table("plan", plan_rows(tiny(*SWITCHED), planned(*SWITCHED)))
    console.alarm("not a normal run: everything")
    return out.getvalue()


def test_switches_are_in_the_plan_and_red_where_there_is_colour():
    assert set(planned(*SWITCHED).switches) == {
        "diagnose.ignore_window = true (flag --diagnose.ignore_window)",
        'parity.trainer_fault = "yarn" (flag --parity.trainer_fault)',
    }
    red = "\x1b[1;31m"
    lines = [line for line in shown(terminal=True).splitlines() if "not a normal run" in line]
    assert len(lines) == 2 and all(red in line for line in lines)
    assert shown(terminal=True).count(red) >= 3 and "\x1b" not in shown(terminal=False)
    assert "diagnose.ignore_window = true" in shown(terminal=False)


def test_a_session_begins_with_the_switches_and_writes_them_down(tmp_path, capsys):
    from megatron_gptoss.loop.session import open_session

    for flags, name in ((SWITCHED, "on"), ((), "off")):
        loaded = tiny(*flags, f"--run.dir={tmp_path}", f"--run.id={name}")
        with open_session(loaded, make_plan(loaded, Cluster(2, 0)), "sft"):
            pass
    said = capsys.readouterr().out
    assert said.startswith("not a normal run: ") and said.count("not a normal run") == 1 and "ignore_window = true" in said
    on, off = (json.loads((tmp_path / f"run-{name}" / "manifest.json").read_text()) for name in ("on", "off"))
    assert len(on["plan"]["switches"]) == 2 and off["plan"]["switches"] == []
    wanted = {"attention": "reference", "attention_windowed": "reference", "attention_deterministic": "false"}
    assert wanted.items() <= off["backends"].items()


def test_trainer_ranks_on_a_cpu_get_tritons_interpreter_only_when_they_need_it(monkeypatch, tmp_path):
    from megatron_gptoss.parallel.shape import ParallelShape
    from megatron_gptoss.trainer import start
    from megatron_gptoss.trainer.worker import FirstWeights, TrainerSettings

    found = []

    def options(**how):
        found.append(how["runtime_env"]["env_vars"])
        return SimpleNamespace(remote=lambda *_: None)

    monkeypatch.setattr(start.ray, "remote", lambda _kind: SimpleNamespace(options=options))
    windowed, all_layers = TrainerConfig(attention_windowed="triton"), TrainerConfig(attention="triton")
    for attention, gpu in ((TrainerConfig(), False), (windowed, False), (all_layers, False), (all_layers, True)):
        settings = TrainerSettings(
            model=MILD, trainer=attention, optimizer=RlConfig(), shape=ParallelShape(world=1), first_weights=FirstWeights("random"),
            total_updates=1, keep_reference=False, critic=None, seed=0, fault="none", diagnose=DiagnoseConfig(), first_port=29500,
            num_ports=1, use_gpu=gpu, log_dir=str(tmp_path),
        )  # fmt: skip
        start.TrainingWorld(settings, start.RankResources(1.0, 0.0), ["0" * 56])
    assert [env.get("TRITON_INTERPRET") for env in found] == [None, "1", "1", None]
