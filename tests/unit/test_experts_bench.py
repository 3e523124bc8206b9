"""What tools/bench_experts.py counts and draws, worked by hand; and that it runs on a CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "tools" / "bench_experts.py"
    specification = importlib.util.spec_from_file_location("bench_experts", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_experts"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def test_routing_is_what_its_name_says(bench):
    balanced, natural = (bench.choose(1024, 32, 4, name, torch.Generator().manual_seed(0)) for name in ("balanced", "natural"))
    assert (balanced.sum(1) == 4).all() and (natural.sum(1) == 4).all()
    assert (balanced.sum(0) == 128).all()
    assert 3 * 128 < natural.sum(0).max() < 8 * 128 and natural.sum(0).min() < 128 / 4


def test_flops_by_hand(bench):
    """A row costs 2 C 2I forward in the first product and 2 I C in the second."""
    options = bench.parse(["--device", "cpu"])
    data = bench.make(options, "natural")
    rows = options.tokens * options.per_token
    assert data.forward_flops == rows * (2 * 64 * 96 + 2 * 48 * 64)
    assert sum(data.counts) == rows and len(data.counts) == options.experts


def test_it_runs_on_a_cpu_and_says_what_cannot(bench, tmp_path, capsys):
    written = tmp_path / "lines.json"
    assert bench.main(["--device", "cpu", "--json", str(written)]) == 0
    lines = json.loads(written.read_text())["lines"]
    assert [(line["name"], line["routing"]) for line in lines] == [("loop layer", "balanced"), ("loop layer", "natural")]
    assert all(line["forward_ms"] > 0 and line["backward_ms"] > 0 for line in lines)
    assert "on a CPU use 'loop'" in capsys.readouterr().out
