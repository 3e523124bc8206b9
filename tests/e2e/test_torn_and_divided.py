"""Through the command line: a newest checkpoint that is torn is passed over and named, and a run goes on in another layout with the losses
that it had before."""

import pytest

from tests.helpers.runs import CONFIGS, metrics, must


def test_a_torn_newest_checkpoint_and_other_ranks(tmp_path):
    flags = ["--sft.save_every=3", "--sft.min_copy_probability=0.0", "--sft.sequences_per_step=4", "--run.name=torn"]
    must("sft", *CONFIGS, *flags, "--run.id=0", "--sft.steps=6", cwd=tmp_path)
    run = tmp_path / "runs" / "torn-0"
    before = metrics(run)
    newest = run / "checkpoints" / "step-000006" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-1])
    (run / "checkpoints" / ".tmp-step-000007").mkdir()

    text = must("sft", "--resume", str(run), "--parallel.data=2", "--parallel.expert=2", cwd=tmp_path)
    said = [line for line in text.splitlines() if "is torn and passed over" in line]
    assert len(said) == 2
    assert said[0].startswith("step-000006 ") and "__0_0.distcp has" in said[0]
    assert said[1].startswith(".tmp-step-000007 ")
    assert "resumed after step 3" in text
    assert "written by 1 rank, and goes on with 2 ranks (expert 2)" in text

    after = metrics(run)
    assert sorted(after) == sorted(before) == list(range(1, 7))
    for step in (4, 5, 6):
        assert after[step]["train/loss"] == pytest.approx(before[step]["train/loss"], abs=1e-5), f"step {step}"
    assert abs(before[4]["train/loss"] - before[6]["train/loss"]) > 1e-3, "the losses move, so that wrong moments would show"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    assert "time/save_s" in after[6]
    assert "time/save_write_s" in after[6]
