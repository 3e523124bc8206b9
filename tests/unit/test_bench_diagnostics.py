"""tools/bench_diagnostics.py: its bare update is the diagnosed one without the diagnostics, its figures are worked by hand, and it runs."""

import json
from pathlib import Path

import pytest

from tests.helpers.training import samples, trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_diagnostics

    return bench_diagnostics


def test_it_runs_on_a_cpu(bench, tmp_path, capsys):
    """The first of this file: it makes its own process group, and so does `one_rank`, for the rest of the file."""
    written = tmp_path / "found.json"
    sizes = ["--tokens", "64", "--sequence", "32", "--microbatches", "2", "--rounds", "2"]
    assert bench.main([str(ROOT / "configs" / "tiny.toml"), *sizes, "--json", str(written)]) == 0, capsys.readouterr().err
    costs = {cost["kind"]: cost for cost in json.loads(written.read_text())["costs"]}
    assert list(costs) == list(bench.KINDS) and all(cost["wall"] > 0 for cost in costs.values())
    assert costs["bare"]["inside"] == 0 < costs["diagnosed"]["inside"] < costs["diagnosed"]["wall"]
    assert bench.main([str(ROOT / "configs" / "tiny.toml"), *sizes, "--without-optimizer"]) != 0
    assert "no whole update" in capsys.readouterr().err


def test_a_bare_update_measures_nothing_and_leaves_the_same_weights_bit_for_bit(bench, one_rank, monkeypatch):
    from megatron_gptoss.config.schema import RlConfig
    from megatron_gptoss.parallel.packing import pack
    from megatron_gptoss.rl.diagnostics import Totals
    from megatron_gptoss.trainer.how import Update

    (batch,) = pack(samples(5, seed=2), ranks=1, tokens_per_microbatch=60)
    diagnosed, bare = trainer(one_rank), trainer(one_rank)
    with bench.watched(diagnosed) as inside:
        stats = diagnosed.update([batch], Update(policy=RlConfig()))
    assert inside[0] > 0 and stats.num_tokens > 0 and stats.measures
    with monkeypatch.context() as patch, bench.bare(bare):
        patch.setattr(Totals, "add", None)  # a call of it would fail
        assert bare.update([batch], Update(policy=RlConfig())).num_updates == 1
    assert bare.fingerprint() == diagnosed.fingerprint()
    assert bare.update([batch], Update(policy=RlConfig())).measures, "outside it measures again"


def test_a_bare_update_is_still_refused_when_its_loss_is_not_finite(bench, one_rank):
    from dataclasses import replace

    from megatron_gptoss.config.schema import RlConfig
    from megatron_gptoss.parallel.packing import pack
    from megatron_gptoss.trainer.how import Update

    first, *rest = samples(3, seed=2)
    (batch,) = pack([replace(first, advantage=float("nan")), *rest], ranks=1, tokens_per_microbatch=60)
    t = trainer(one_rank)
    with bench.bare(t):
        assert t.update([batch], Update(policy=RlConfig())).skipped


def test_a_difference_is_taken_within_its_round(bench):
    """The second round is ten times as slow; medians of both kinds differ by 52, and the middle of the differences is 2 and 20: 11."""
    rounds = [
        {kind: bench.Time(wall, wall / 2, inside) for kind, wall, inside in zip(bench.KINDS, walls, (0.0, 1.5, 1.5), strict=True)}
        for walls in ((100.0, 102.0, 103.0), (1000.0, 1020.0, 1030.0))
    ]
    bare, diagnosed, _ = bench.costs(rounds)
    assert (bare.wall, bare.more_wall, bare.inside) == (550.0, 0.0, 0.0)
    assert (diagnosed.more_wall, diagnosed.more_process, diagnosed.inside) == (11.0, 5.5, 1.5)
