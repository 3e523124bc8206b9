"""Laws of --continue: it resumes what has a whole checkpoint, sets aside what has none, and begins where there is nothing."""

import json
from datetime import datetime
from pathlib import Path

from megatron_gptoss.cli import _load
from megatron_gptoss.config.load import load
from megatron_gptoss.config.plan import run_directory
from megatron_gptoss.launch.restart import can_go_on
from megatron_gptoss.obs.run_dir import RunDir
from tests.helpers.runs import CONFIGS


def begun(path: Path) -> RunDir:
    return RunDir.create(path, load(CONFIGS).config)


def whole(run: RunDir, step: int) -> None:
    run.checkpoint(step).mkdir()
    (run.checkpoint(step) / "COMPLETE").write_text(json.dumps({"step": step, "files": {}}))


def test_nothing_there_begins(tmp_path):
    assert not can_go_on(tmp_path / "demo-7")
    assert list(tmp_path.iterdir()) == []


def test_without_a_whole_checkpoint_the_run_is_set_aside_with_all_it_wrote(tmp_path):
    for count in (1, 2):
        run = begun(tmp_path / "demo-7")
        run.metrics_file.write_text(f"attempt {count}")
        (run.checkpoints / ".tmp-step-000002").mkdir()
        assert not can_go_on(run.path)
        assert not run.path.exists()
        assert (tmp_path / f"demo-7.ended-{count}" / "metrics.jsonl").read_text() == f"attempt {count}"


def test_a_whole_checkpoint_is_resumed_and_init_then_means_nothing(tmp_path):
    whole(begun(tmp_path / "demo-7"), 2)
    line = [*CONFIGS, f"--run.dir={tmp_path}", "--run.id=7"]
    loaded = _load(line, "", "elsewhere", go_on=True)
    assert loaded.config.run.resume == str(tmp_path / "demo-7")
    assert loaded.config.run.init == ""
    fresh = _load([*line, "--run.id=8"], "", "elsewhere", go_on=True)
    assert (fresh.config.run.resume, fresh.config.run.init) == ("", "elsewhere")
    assert run_directory(fresh.config, datetime.now()) == tmp_path / "demo-8"
