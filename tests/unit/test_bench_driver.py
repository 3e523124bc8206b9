"""tools/bench_driver.py: every part of the driver's is timed, on what a run would make, and what cannot be asked is said."""

import importlib.util
from pathlib import Path

import pytest
import torch
import typer

spec = importlib.util.spec_from_file_location("bench_driver", Path(__file__).resolve().parents[2] / "tools" / "bench_driver.py")
assert spec is not None and spec.loader is not None
bench_driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_driver)


def test_all_parts_are_timed(capsys):
    bench_driver.main(["configs/tiny.toml"], answers=8, length=16, group=4, ranks=2, routes=True)
    said = capsys.readouterr().out
    for part in ("advantages and samples", "packing", "microbatches sent", "scores read", "archive, beside", "metrics", "scores written"):
        assert part in said


def test_what_is_sent_arrives():
    from megatron_gptoss.parallel.packing import make_microbatch
    from megatron_gptoss.rl.advantages import AdvantageRule
    from megatron_gptoss.rl.samples import make_samples
    from tests.helpers.tiny_model import TINY

    batch = make_microbatch(make_samples(bench_driver.make_groups(TINY, 4, 2, 5, True), AdvantageRule("group-mean")))
    sent = bench_driver.send([batch])
    assert sum(map(len, sent[1])) == sum(t.nbytes for t in vars(batch).values() if isinstance(t, torch.Tensor)) + batch.routes.num_bytes
    (arrived,) = bench_driver.receive(sent)
    assert torch.equal(arrived.routes.experts_LTK, batch.routes.experts_LTK) and torch.equal(arrived.tokens_T, batch.tokens_T)


@pytest.mark.parametrize(
    ("arguments", "sizes", "words"),
    [
        ([], {}, "which configuration"),
        (["configs/tiny.toml"], {"answers": 5}, "--answers 5 are no whole groups of --group 4"),
        (["configs/tiny.toml"], {"length": 10**6}, "trainer.tokens_per_microbatch"),
    ],
)
def test_what_cannot_be_asked_is_said(capsys, arguments, sizes, words):
    with pytest.raises(typer.Exit):
        bench_driver.main(arguments, **({"answers": 8, "length": 16, "group": 4, "ranks": 2, "routes": True} | sizes))
    assert words in capsys.readouterr().err
