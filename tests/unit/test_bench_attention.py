"""What tools/bench_attention.py counts, worked by hand; and that it runs on a CPU, with the absent peers named."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_gptoss.attention.layout import Layout
from tests.unit.test_attention_exact import visible


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "tools" / "bench_attention.py"
    specification = importlib.util.spec_from_file_location("bench_attention", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_attention"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def test_visible_pairs_by_hand(bench):
    assert bench.visible_pairs(4, None) == 1 + 2 + 3 + 4
    assert bench.visible_pairs(4, 2) == 1 + 2 + 2 + 2
    assert bench.visible_pairs(4, 1) == 4
    assert bench.visible_pairs(3, 128) == 1 + 2 + 3
    assert bench.visible_pairs(0, 128) == 0
    assert bench.visible_pairs(131_072, 128) == 131_072 * 128 - 128 * 127 // 2


@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_pairs_and_flops_of_packed_sequences_count_the_mask(bench, window):
    problem = bench.Problem("", (0, 5, 5, 35, 36), window, H=64, K=8, D=64)
    pairs = int(visible(Layout(problem.bounds), window).sum())
    assert problem.pairs == pairs
    assert (problem.forward_flops, problem.backward_flops) == (4 * 64 * 64 * pairs, 10 * 64 * 64 * pairs)
    assert problem.longest == 30 and problem.is_packed


def test_the_packed_batch_is_the_same_everywhere(bench):
    lengths = bench.packed_lengths(32_768, 2_000)
    assert sum(lengths) == 32_768 and min(lengths) >= 1
    assert lengths[:4] == [3721, 2837, 1091, 599]
    assert 1_500 < 32_768 / len(lengths) < 2_500


def test_it_runs_on_a_cpu_and_names_what_is_absent(bench, tmp_path, capsys):
    written = tmp_path / "rows.json"
    names = ["reference", "eager", "flash", "flex"] if torch.cuda.is_available() else ["reference", "eager", "flash", "cudnn", "flex"]
    code = bench.main(["--device", "cpu", "--only", *names, "--repeats", "2", "--json", str(written)])
    assert code == 0
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) == len(names) * 2 * 2  # sizes, windows
    for row in rows:
        if row["implementation"] in ("reference", "eager"):
            assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and max(row["errors"].values()) < 1e-5
            flops = 4 * 8 * 16 * bench.visible_pairs(96, row["window"])
            if row["problem"] == "96":
                assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9)
        else:
            assert row["note"] and row["forward_ms"] is None
    assert "not installed" in capsys.readouterr().out or torch.cuda.is_available()


def test_one_that_is_wrong_is_not_timed_and_one_that_fails_does_not_end_the_run(bench, monkeypatch, capsys):
    right = bench.eager

    def without_sinks(problem):
        def attention(x):
            low = bench.Data(x.q_THD, x.k_TKD, x.v_TKD, x.sink_H - 50.0, x.dout_THD, x.cu_seqlens)
            return right(problem)(low)

        return attention

    def broken(problem):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(bench, "eager", without_sinks)
    monkeypatch.setattr(bench, "flex", broken)
    assert bench.main(["--device", "cpu", "--only", "eager", "flex", "--sizes", "96", "--windows", "16", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "WRONG: dsink" in printed and "failed: RuntimeError: no such kernel" in printed

    monkeypatch.setattr(bench, "ours", lambda name, problem: right(problem) if name == "reference" else without_sinks(problem))
    assert bench.main(["--device", "cpu", "--only", "triton", "--sizes", "96", "--windows", "16", "--repeats", "1"]) == 1
