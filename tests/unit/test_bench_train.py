"""What tools/bench_train.py counts, worked by hand; that its routing is balanced and its weights are random; and that it runs on a CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.memory import count_parameters
from megatron_gptoss.config.rank_memory import trainer_memory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    specification = importlib.util.spec_from_file_location("bench_train", ROOT / "tools" / "bench_train.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_train"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def test_useful_flops_of_the_tiny_model_by_hand(bench):
    """A layer: attention 128 x (2 x 256 + 2 x 128), router 128 x 4, two experts of 3 x 128 x 64 = 147,968 multiplications a token.
    100 tokens, two layers: 29,593,600. Head for 99 of them: 99 x 512 x 128 = 6,488,064. Pairs: window 32: 32 x 33 / 2 + 68 x 32 = 2,704;
    full: 100 x 101 / 2 = 5,050; each 4 x 4 x 64 FLOPs."""
    tiny = load([ROOT / "configs" / "tiny.toml"]).config.model
    one = 2 * (29_593_600 + 6_488_064) + 1_024 * (2_704 + 5_050)
    assert bench.forward_flops(tiny, bench.Load(1, 100, 1)) == one == 80_103_424
    assert bench.forward_flops(tiny, bench.Load(2, 100, 3)) == 6 * one


def test_useful_flops_of_the_20b_are_two_a_used_parameter_and_attention(bench):
    """Biases, norms and sinks are parameters that multiply nothing, 0.05 % of those used; attention adds 11.5 % at 8,192 tokens:
    16,384 x 415,187,712 pairs = 6.80e12 to 2 x 3.607e9 x 8,192 = 5.91e13."""
    model = load([ROOT / "configs" / "20b.toml"]).config.model
    n = 8192
    pairs = 12 * (128 * 129 // 2 + (n - 128) * 128) + 12 * n * (n + 1) // 2
    matrices = bench.forward_flops(model, bench.Load(1, n, 1)) - 4 * 64 * 64 * pairs
    assert matrices / n == pytest.approx(2 * count_parameters(model).active, rel=1e-3)
    assert 4 * 64 * 64 * pairs / matrices == pytest.approx(6.80 / 59.1, rel=2e-3)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "layer"), [(64, 32, 4, 0), (50, 32, 4, 5), (7, 4, 2, 1)])
def test_balanced_routing_gives_every_expert_as_many_tokens(bench, tokens, experts, top_k, layer):
    from megatron_gptoss.model.router import choose_experts

    chosen_TK = choose_experts(bench.Balanced(layer, top_k)(torch.randn(tokens, experts)), top_k)
    assert all(len(set(row)) == top_k for row in chosen_TK.tolist())
    counts = chosen_TK.flatten().bincount(minlength=experts)
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) == tokens * top_k


def test_it_runs_on_a_cpu(bench, tmp_path, capsys):
    written = tmp_path / "found.json"
    sizes = ["--tokens", "64", "--sequence", "32", "--microbatches", "2", "--repeats", "1"]
    code = bench.main([str(ROOT / "configs" / "tiny.toml"), *sizes, "--profile", "--json", str(written), "--trainer.recompute=full"])
    assert code == 0, capsys.readouterr().err
    found = json.loads(written.read_text())
    phases = {p["name"]: p for p in found["phases"]}
    assert list(phases) == ["score", "forward + backward", "optimizer", "step"]
    assert phases["step"]["ms"] == pytest.approx(phases["forward + backward"]["ms"] + phases["optimizer"]["ms"])
    assert phases["score"]["tokens_per_s"] == pytest.approx(2 * 64 / phases["score"]["ms"] * 1e3)
    tiny = load([ROOT / "configs" / "tiny.toml"]).config.model
    done = 3 * bench.forward_flops(tiny, bench.Load(2, 32, 2)) / phases["forward + backward"]["ms"] * 1e3
    assert phases["forward + backward"]["share_of_peak"] == pytest.approx(done / found["peak_flops"])
    assert len(found["kernels"]) == 5
    flags = ["--trainer.recompute=full", "--trainer.tokens_per_microbatch=64", "--rollout.max_sequence_tokens=32"]
    predicted = trainer_memory(load(*parse_flags([str(ROOT / "configs" / "tiny.toml"), *flags])).config)[0]
    assert (found["memory"]["predicted_bytes"], found["memory"]["predicted_moment"]) == (predicted.allocated, predicted.worst_phase)
    assert found["memory"]["measured"] is None and found["memory"]["process_bytes"] > 2**27  # torch alone takes more

    ours = ["--trainer.dtype=bfloat16", "--trainer.optimizer_states=bfloat16", "--trainer.optimizer_offload=0.75"]
    code = bench.main([str(ROOT / "configs" / "tiny.toml"), *sizes, *ours, "--json", str(written)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "optimizer bfloat16, 75% on the host" in " ".join(printed.out.split())
    assert json.loads(written.read_text())["memory"]["predicted_host_bytes"] > 0.75 * 8 * 529_296

    half = ["--without-optimizer", "--gradients", "bfloat16", "--trainer.dtype=bfloat16"]
    code = bench.main([str(ROOT / "configs" / "tiny.toml"), *sizes, "--routing", "natural", *half, "--json", str(written)])
    assert code == 0, capsys.readouterr().err
    assert [p["name"] for p in json.loads(written.read_text())["phases"]] == ["score", "forward + backward"]


def test_the_peak_of_a_run_is_that_of_its_worst_moment(bench, monkeypatch):
    """Each phase begins at 10 bytes again; free memory is what it is."""
    held = iter([(10, 20), (70, 90), (30, 95)])
    now = [(0, 0)]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now[0][0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: now[0][1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - now[0][1] - 7, 1000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: now.__setitem__(0, next(held, (0, 0))))
    peaks = bench.Peaks(on_gpu=True)
    assert [peaks.note() for _ in range(4)] == [0, 10, 70, 30]
    assert (peaks.most.allocated, peaks.most.reserved, peaks.most.device) == (70, 95, 102)


def test_the_prediction_is_for_the_load_that_is_given(bench):
    options, config = bench.parse([str(ROOT / "configs" / "20b.toml"), "--tokens", "65536", "--sequence", "65536", "--rl.kl_coef=0.1"])
    plan = bench.as_loaded(config, bench.load_of(options, config), options)
    assert (plan.trainer.tokens_per_microbatch, plan.rollout.max_sequence_tokens) == (65536, 65536)
    assert plan.parallel.expert_imbalance == 1.0 and plan.rl.kl_coef == 0.0
    options.routing = "natural"
    assert bench.as_loaded(config, bench.load_of(options, config), options).parallel.expert_imbalance == config.parallel.expert_imbalance


def test_the_commands_in_its_words_are_plans_that_fit(bench):
    """Two H200s of one host with 256 GiB: the docstring's command lines, as they stand."""
    import shlex

    from megatron_gptoss.config.fit import fits
    from megatron_gptoss.config.host_memory import optimizers_per_node
    from megatron_gptoss.config.rules import broken_rules

    commands = [c for c in bench.__doc__.replace("\\\n", " ").splitlines() if "--nproc-per-node 2" in c]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.split("tools/bench_train.py")[1])
        options, config = bench.parse([str(ROOT / words[0]), *words[1:]])
        plan = bench.as_loaded(config, bench.load_of(options, config), options)
        assert plan.parallel.data * plan.parallel.context == 2 and fits(plan)
        assert optimizers_per_node(plan) < 200 * 2**30, "it writes no checkpoint"
        flags = [w for w in words if w.startswith("--") and "." in w and "=" in w]
        tokens = ["--trainer.tokens_per_microbatch=65536", "--rollout.max_sequence_tokens=65536"] if options.tokens == 65536 else []
        assert broken_rules(load(*parse_flags([str(ROOT / words[0]), *flags, *tokens]))) == []


def test_weights_are_random_and_the_same_every_time(bench, one_rank):
    config = load([ROOT / "configs" / "tiny.toml"]).config
    first, second = (dict(bench.make_trainer(config, one_rank, with_optimizer=False).module.named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, p in first.items():
        if "norm" in name:
            assert bool((p == 1).all()), name
        elif name.endswith("bias") and "router" not in name:
            assert not p.any(), name
        elif p.numel() > 1000:
            assert float(p.detach().std()) == pytest.approx(config.model.initializer_range, rel=0.1), name
    drawn = [float(p.detach().flatten()[0]) for name, p in first.items() if p.dim() > 1 and not name.endswith("bias")]
    assert len(set(drawn)) == len(drawn) > 10, "each parameter draws its own numbers"


def test_wrong_arguments_are_named(bench, capsys):
    assert bench.main([str(ROOT / "configs" / "20b.toml")]) == 2
    assert "1 processes were started, but parallel.tensor 1 x context 1 x pipeline 1 x data 4 = 4" in capsys.readouterr().err
    assert bench.main(["--tokens", "0"]) == 2
    assert "--tokens 0 must be at least 1" in capsys.readouterr().err
    assert bench.main(["--gradients", "bfloat16"]) == 2
    assert "needs --without-optimizer" in capsys.readouterr().err
