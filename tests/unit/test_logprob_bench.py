"""tools/bench_logprob.py runs on a CPU, and names the bars that are missed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "tools" / "bench_logprob.py"
    specification = importlib.util.spec_from_file_location("bench_logprob", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_logprob"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def test_it_runs_on_a_cpu(bench, tmp_path):
    written = tmp_path / "rows.json"
    assert bench.main(["--device", "cpu", "--repeats", "1", "--json", str(written)]) == 0
    rows = json.loads(written.read_text())["rows"]
    assert [r["implementation"] for r in rows] == ["products", "reference", "eager", "checkpoint"]
    assert all(r["forward_ms"] > 0 and r["backward_ms"] > 0 for r in rows)
    assert max(r["logp_error"] for r in rows[1:]) < 1e-5


def test_bars_by_hand(bench):
    """The fast chunk needs too much memory, the small one too much time: each bar is met by one of them, so none is missed."""
    rows = [
        bench.Row("products", 64, None, 1.0, 2.0, 1.0),
        bench.Row("fused", 64, 16, 1.5, 2.7, 1.4, extra_bytes=2_000_000_000, logp_error=0.01),
        bench.Row("fused", 64, 32, 1.3, 2.3, 1.2, extra_bytes=4_000_000_000, logp_error=0.01),
        bench.Row("eager", 64, None, 2.0, 2.0, 1.3, logp_error=0.02),
    ]
    options = bench.parse(["--tokens", "64"])
    assert bench.misses(rows, options) == []
    rows[2].times_products, rows[1].extra_bytes, rows[1].logp_error = 1.3, 3_000_000_000, 0.03
    assert bench.misses(rows, options) == [
        "64 tokens, chunk 16: log-prob error 3.00e-02, eager 2.00e-02",
        "64 tokens: 1.30 times the three products, the bar is 1.25",
        "64 tokens: 3.00 GB extra, the bar is 2.5",
    ]
