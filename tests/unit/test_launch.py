"""Laws of `gptoss launch`: what is printed is what the shell would run, word by word; what cannot fit is refused with what would."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gptoss.launch.submit import Submission, prepare, site_value
from tests.helpers.runs import CONFIGS, ROOT, gptoss


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "my site.env"
    path.write_text("SBATCH_PARTITION=gpu\nSBATCH_GPUS_PER_NODE=8\nGPTOSS_RUNS=runs\n")
    monkeypatch.setenv("GPTOSS_SITE", str(path))
    return path


def test_the_shell_runs_the_command_word_by_word_with_the_sites_settings(site, tmp_path):
    words = ["a b.toml", "--run.name=it's", "--init", "x;y"]
    submission = Submission(ROOT, site, "train", 3, tuple(words))
    stand_in = tmp_path / "sbatch"
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$SBATCH_PARTITION" "$GPTOSS_SITE" "$@"\n')
    stand_in.chmod(0o755)
    line = f"PATH={shlex.quote(str(tmp_path))}:$PATH; {submission.shell()}"
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["gpu", str(site), "--parsable", "--nodes=3", str(ROOT / "launch" / "train.sbatch"), *words]


def test_dry_run_prints_command_and_script_and_needs_no_slurm(site, tmp_path):
    done = gptoss("launch", *CONFIGS, "--nodes", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert prepare("train", 2, CONFIGS).shell() in done.stdout
    assert (ROOT / "launch" / "train.sbatch").read_text() in done.stdout
    three = gptoss("launch", *CONFIGS, "--nodes", "3", "--dry-run", cwd=tmp_path)
    assert "1 of 3 nodes would have nothing to do" in three.stdout


def test_what_cannot_fit_is_refused_with_what_would(site, tmp_path):
    big = [str(ROOT / "configs" / "20b.toml"), "--parallel.data=16", "--parallel.expert=8", "--rollout.num_engines=16"]
    done = gptoss("launch", *big, "--nodes", "3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "need 32 GPUs" in done.stderr and "have 24. Use --nodes 4" in done.stderr, done.stderr
    assert gptoss("launch", *big, "--nodes", "4", "--dry-run", cwd=tmp_path).returncode == 0
    crowded = gptoss("launch", *big, "--nodes", "4", "--trainer.tokens_per_microbatch=1048576", "--dry-run", cwd=tmp_path)
    assert crowded.returncode == 2
    assert "GiB" in crowded.stderr


def test_another_number_of_gpus_than_the_sites_is_refused(site, tmp_path):
    done = gptoss("launch", str(ROOT / "configs" / "20b.toml"), "--cluster.gpus_per_node=4", "--nodes=2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "cluster.gpus_per_node = 4" in done.stderr and "SBATCH_GPUS_PER_NODE = 8" in done.stderr, done.stderr


def test_no_settings_and_no_slurm_are_one_message_each(site, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + ":/usr/bin:/bin")
    if not (Path("/usr/bin/sbatch").exists()):
        assert "sbatch is not on this machine" in gptoss("launch", *CONFIGS, "--nodes=2", cwd=tmp_path).stderr
    site.unlink()
    done = gptoss("launch", *CONFIGS, "--nodes=2", cwd=tmp_path)
    assert (done.returncode, "no site settings" in done.stderr) == (2, True), done.stderr


def test_the_example_is_read_by_bash_and_asks_for_what_the_20b_needs():
    example = ROOT / "launch" / "site.env.example"
    assert site_value(example, "SBATCH_GPUS_PER_NODE") == "8"
    assert site_value(example, "GPTOSS_CONTAINER") == "none"
