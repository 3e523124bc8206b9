"""Whole runs: what a step promises, exact resume after SIGKILL, survival of an engine's death, a full disk, expert parallelism."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.recovery import killed_and_resumed
from tests.helpers.runs import CONFIGS, ROOT, SMALL, alive, finished, gptoss, metrics, must, timeless, tree, wait_for, words_of

DETERMINISTIC = [*CONFIGS, str(ROOT / "configs" / "deterministic.toml"), *SMALL]


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """Four deterministic steps without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = must("train", *DETERMINISTIC, "--run.id=a", "--init", str(warm), cwd=folder)
    return folder / "runs" / "demo-a", text


def test_what_every_step_promises(undisturbed):
    run, text = undisturbed
    rows = metrics(run)
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        row = rows[step]
        assert row["policy/ratio_max_abs_dev"] == 0.0
        assert row["policy/clip_fraction"] == 0.0
        assert row["mismatch/logp_abs_max"] < 1e-4
        assert row["policy/version"] == step, "every update reached the engine"
        assert {f"time/{part}_s" for part in ("rollout", "score", "update", "sync", "step")} <= row.keys()
        archive = [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()]
        assert len(archive) == 16
        assert {v for r in archive for v, _ in r["versions"]} == {step - 1}, "rollouts come from the policy of the step before"
        assert sum(sum(r["sampled"]) for r in archive) == row["rollout/tokens"]
    assert rows[4]["eval/prompts"] == 4
    assert (run / "report.png").stat().st_size > 10_000
    assert text.count("reward 0   right 0") + text.count("reward 1   right 1") == 3, "three rollouts are printed in full"
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
    assert "\x1b" not in text, "no control characters in a pipe"


def test_sigkill_then_resume_continues_bit_for_bit(undisturbed, warm, tmp_path):
    reference, _ = undisturbed
    driver = gptoss("train", *DETERMINISTIC, "--run.id=b", "--init", str(warm), cwd=tmp_path, background=True)
    run = tmp_path / "runs" / "demo-b"
    # step 3 has begun: its rollouts are archived beside its update
    wait_for(lambda: (run / "rollouts" / "step-3.jsonl").exists() or driver.poll() is not None, "step 3")
    family = tree(driver.pid)
    assert len(family) > 5
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not alive(family), f"the end of {alive(family)}", timeout=30)
    assert (run / "checkpoints" / "step-000002" / "COMPLETE").exists()
    assert not (run / "checkpoints" / "step-000004").exists()

    must("train", "--resume", str(run), cwd=tmp_path)
    mine, theirs = metrics(run), metrics(reference)
    assert sorted(mine) == sorted(theirs)
    for step in mine:
        assert timeless(mine[step]) == timeless(theirs[step]), f"step {step}"
    for step in range(1, 5):
        name = f"step-{step}.jsonl"
        assert (run / "rollouts" / name).read_text() == (reference / "rollouts" / name).read_text(), f"rollouts of step {step}"
    assert saved_tensors(run, 4) == saved_tensors(reference, 4), "weights and moments after the last step"


def saved_tensors(run, step) -> str:
    """One digest over every tensor of a checkpoint: weights, fp32 copies, both moments."""
    code = (
        "import sys, hashlib; from megatron_gptoss.model import cpu; cpu.install(); import torch;"
        "from megatron.core import dist_checkpointing as dc;"
        "import torch.distributed as dist; dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=0, world_size=1);"
        "t = dc.load_plain_tensors(sys.argv[1]); h = hashlib.sha256();"
        "[h.update(k.encode() + v.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for k, v in sorted(t.items()) "
        "if torch.is_tensor(v)]; print(len(t), h.hexdigest())"
    )
    meet = run / f"meet-{step}"
    out = subprocess.run(
        [sys.executable, "-c", code, str(run / "checkpoints" / f"step-{step:06d}"), str(meet)],
        capture_output=True, text=True, env={**os.environ, "TORCHDYNAMO_DISABLE": "1"}, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    count, digest = out.stdout.split()[-2:]
    assert int(count) > 40
    return digest


def test_replaying_archived_rollouts_gives_loss_and_gradient_norm_bit_for_bit(undisturbed):
    run, _ = undisturbed
    tool = [sys.executable, str(ROOT / "tools" / "replay_step.py"), str(run), "--step", "3"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal") == 6
    # the control: other rollouts give another loss
    archive = run / "rollouts" / "step-3.jsonl"
    kept = archive.read_text()
    shutil.copy(run / "rollouts" / "step-2.jsonl", archive)
    try:
        other = subprocess.run(tool, capture_output=True, text=True)
        assert other.returncode == 1
        assert "DIFFERENT" in other.stdout, other.stderr
    finally:
        archive.write_text(kept)


def test_an_engine_killed_in_the_middle_of_a_step_is_replaced(warm, tmp_path):
    small = [f for f in SMALL if "steps" not in f]
    driver = gptoss(
        "train", *CONFIGS, *small, "--run.steps=2", "--rl.sequences_per_step=512", "--rollout.max_running=16", "--run.id=k",
        "--init", str(warm), cwd=tmp_path, background=True,
    )  # fmt: skip
    run = tmp_path / "runs" / "demo-k"
    try:
        wait_for(lambda: driver.poll() is not None or finished(run, 1), "step 1")
        time.sleep(1.0)  # step 2's 512 conversations take several seconds
        (engine,) = [p for p in tree(driver.pid) if words_of(p).startswith("ray::Engine")]
        before = tree(driver.pid)
        computing = [p for p in before if words_of(p).startswith(("ray::Engine", "ray::TrainerWorker"))]
        assert [p.nice() for p in computing] == [psutil.Process(driver.pid).nice()] * 2, "the driver is no more urgent"
        assert not (run / "rollouts" / "step-2.jsonl").exists(), "the kill must come in the middle of the step"
        engine.kill()
        driver.wait(timeout=300)
    finally:
        driver.kill()
    text = (tmp_path / "terminal.txt").read_text()
    assert driver.returncode == 0, text
    rows = metrics(run)
    assert rows[2]["rollout/engine_restarts"] == 1
    assert rows[2]["rollout/redispatched_turns"] > 0
    assert rows[2]["mismatch/logp_abs_max"] < 1e-4, "the new engine holds the same weights"
    wait_for(lambda: not alive(before), "the end of every process", timeout=20)
    assert "(raylet)" not in text


def test_an_engine_s_death_is_mended_and_a_trainer_s_is_gone_on_from(warm, tmp_path):
    killed_and_resumed(*CONFIGS, "--rl.sequences_per_step=64", "--rollout.group_size=4", "--init", str(warm), cwd=tmp_path, patience_s=400)


def test_an_engine_that_cannot_be_replaced_ends_the_run_with_its_name_and_log(warm, tmp_path):
    small = [f for f in SMALL if "steps" not in f]
    driver = gptoss(
        "train", *CONFIGS, *small, "--run.steps=2", "--rl.sequences_per_step=512", "--run.id=k", "--init", str(warm),
        "--rollout.max_restarts=0", cwd=tmp_path, background=True,
    )  # fmt: skip
    run = tmp_path / "runs" / "demo-k"
    try:
        wait_for(lambda: driver.poll() is not None or finished(run, 1), "step 1")
        time.sleep(1.0)
        family = tree(driver.pid)
        core = [p for p in family if "EngineCore" in words_of(p)]
        victim = core[0] if core else next(p for p in family if words_of(p).startswith("ray::Engine"))
        victim.kill()
        killed = time.monotonic()
        driver.wait(timeout=60)
        assert time.monotonic() - killed < 60
    finally:
        driver.kill()
    text = (tmp_path / "terminal.txt").read_text()
    assert driver.returncode == 1, text
    assert "EngineFailed" in text
    assert "engine-0" in text
    assert str(run.name) in text
    assert "engine-0.log" in text
    wait_for(lambda: not alive(family), "the end of every process", timeout=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_the_run_and_the_last_checkpoint_is_whole(warm, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=13m", "tmpfs", str(disk)], check=True)
    try:
        flags = ["--sft.steps=30", "--sft.save_every=10", "--sft.min_copy_probability=0.0", "--sft.sequences_per_step=4"]
        done = gptoss("sft", *CONFIGS, *flags, f"--run.dir={disk}", "--run.name=full", "--run.id=0", cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "CheckpointError: cannot save" in done.stderr
        assert "step-000010, is intact" in done.stderr, done.stderr
        assert sorted(p.name for p in (disk / "full-0" / "checkpoints").iterdir()) == ["step-000010"]
        shutil.copytree(disk / "full-0", tmp_path / "runs" / "full-0")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    must("sft", "--resume", str(tmp_path / "runs" / "full-0"), "--run.dir=runs", cwd=tmp_path)


def test_experts_over_two_ranks_give_the_losses_of_one(tmp_path):
    flags = ["--sft.steps=12", "--sft.min_copy_probability=0.0", "--run.name=ep"]
    must("sft", *CONFIGS, *flags, "--run.id=1", cwd=tmp_path)
    must("sft", *CONFIGS, *flags, "--run.id=2", "--parallel.data=2", "--parallel.expert=2", cwd=tmp_path)
    one, two = metrics(tmp_path / "runs" / "ep-1"), metrics(tmp_path / "runs" / "ep-2")
    assert sorted(one) == sorted(two) == list(range(1, 13))
    for step in one:
        assert two[step]["train/loss"] == pytest.approx(one[step]["train/loss"], abs=1e-5), f"step {step}"
        assert two[step]["grad/norm"] == pytest.approx(one[step]["grad/norm"], rel=1e-4), f"step {step}"


def test_two_expert_ranks_train_as_one_and_a_longer_run_resumes(undisturbed, warm, tmp_path):
    """Same seeds, same weights: the engine samples the same rollouts, so the first update must be that of one rank."""
    reference, _ = undisturbed
    start = tmp_path / "start"
    shutil.copytree(warm, start)
    flags = [*DETERMINISTIC, "--run.id=two", "--parallel.data=2", "--parallel.expert=2", "--run.steps=1", "--init", str(start)]
    must("train", *flags, cwd=tmp_path)
    run = tmp_path / "runs" / "demo-two"
    one, two = metrics(reference)[1], metrics(run)[1]
    assert two["rollout/tokens"] == one["rollout/tokens"]
    assert two["policy/ratio_max_abs_dev"] == 0.0
    assert two["mismatch/logp_abs_max"] < 1e-4
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
    assert two["grad/norm"] == pytest.approx(one["grad/norm"], rel=1e-4)

    shutil.rmtree(start)  # a resumed run does not need what it once started from
    must("train", "--resume", str(run), "--run.steps=2", "--run.keep_checkpoints=1", cwd=tmp_path)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000002"], "the older checkpoint is gone whole"
    rows = metrics(run)
    assert sorted(rows) == [0, 1, 2]
    assert rows[2]["policy/version"] == 2
    assert rows[2]["mismatch/logp_abs_max"] < 1e-4, "the engine was given the restored weights"


def test_ctrl_c_while_starting_ends_everything(warm, tmp_path):
    driver = gptoss("train", *CONFIGS, *SMALL, "--run.id=c", "--init", str(warm), cwd=tmp_path, background=True)
    log = tmp_path / "runs" / "demo-c" / "logs" / "trainer-0.log"
    try:
        wait_for(lambda: driver.poll() is not None or log.exists(), "the trainer's start")
        time.sleep(2.0)
        family = tree(driver.pid)
        driver.send_signal(signal.SIGINT)
        driver.wait(timeout=60)
    finally:
        driver.kill()
    text = (tmp_path / "terminal.txt").read_text()
    assert driver.returncode == 130, text
    assert "interrupted" in text
    assert "Traceback" not in text
    wait_for(lambda: not alive(family), f"the end of {alive(family)}", timeout=20)
