"""Laws of saving while training goes on: the state of the moment is written, a failure is one error, a torn save is never chosen."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.checkpoint.marker import read_marker, replace_folder, take_back_old, why_torn
from megatron_gptoss.checkpoint.progress import MARKER, Progress
from megatron_gptoss.config.load import Flag
from megatron_gptoss.config.load import load as load_config
from megatron_gptoss.config.machine import checkpoints_at_once
from megatron_gptoss.config.rules import broken_rules
from megatron_gptoss.config.schema import RunConfig
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.obs.run_dir import checkpoints_to_remove, find_weights, latest_checkpoint, torn_since
from megatron_gptoss.parallel.packing import pack
from tests.helpers.runs import ROOT, wait_for
from tests.helpers.training import MILD, samples, trainer


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    from megatron_gptoss.checkpoint.optimizer_shards import boxes

    elements = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, elements.numel()))
    stop = data.draw(st.integers(start, elements.numel()))
    found = list(boxes(tuple(shape), start, stop))
    assert len(found) <= 2 * len(shape) - 1
    seen = []
    for offset, size in found:
        assert 0 not in size
        box = elements
        for axis, (begin, length) in enumerate(zip(offset, size, strict=True)):
            box = box.narrow(axis, begin, length)
        seen += box.flatten().tolist()
    assert seen == list(range(start, stop))


def begin(t, path, step=2, **kw):
    from megatron_gptoss.checkpoint.training_state import begin_save

    parts = {"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule}
    return begin_save(path, config=MILD, progress=Progress(step, step, 7), **parts, **kw)


def load(t, path):
    from megatron_gptoss.checkpoint.training_state import load_training_state

    return load_training_state(path, model=t.model, optimizer=t.optimizer, schedule=t.schedule)


def update(t, seed):
    from megatron_gptoss.trainer.how import Update

    return t.update([pack(samples(4, seed=seed), ranks=1, tokens_per_microbatch=8192)[0]], Update(policy=None))


@pytest.fixture
def held(monkeypatch):
    """Writing does not begin before the event is set."""
    from megatron_gptoss.checkpoint import background

    write, event = background.write, threading.Event()

    def wait_and_write(*arguments):
        assert event.wait(60)
        return write(*arguments)

    monkeypatch.setattr(background, "write", wait_and_write)
    yield event
    event.set()


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_what_is_written_is_the_state_when_the_save_began_whatever_training_does_meanwhile(one_rank, tmp_path, held, moments):
    t = trainer(one_rank, optimizer_states=moments)
    update(t, 1)
    then = t.fingerprint()
    saving = begin(t, tmp_path / "step-2")
    update(t, 2)
    assert t.fingerprint()["moments"] != then["moments"]
    assert not saving.done()
    assert [p.name for p in tmp_path.iterdir()] == [".tmp-step-2"]
    held.set()
    assert saving.wait() > 0
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    other = trainer(one_rank, seed=99, optimizer_states=moments)
    assert load(other, tmp_path / "step-2") == Progress(2, 2, 7)
    assert other.fingerprint() == then


@pytest.mark.parametrize("in_background", [True, False])
def test_moments_are_copied_only_for_a_save_in_the_background(one_rank, tmp_path, monkeypatch, in_background):
    from megatron_gptoss.checkpoint import background

    t, write, found = trainer(one_rank), background.write, []

    def look_and_write(parts, transforms):
        found.extend((item.index.fqn, data.data_ptr()) for part in parts for item, data in part.tensors)
        return write(parts, transforms)

    monkeypatch.setattr(background, "write", look_and_write)
    begin(t, tmp_path / "step-2", background=in_background).wait()
    own = {
        state["exp_avg"].data_ptr()
        for part in t.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    }  # fmt: skip
    written = [pointer for name, pointer in found if "exp_avg." in name]
    assert len(written) == len(own) > 10
    assert own.isdisjoint(written) if in_background else own == set(written)


def test_a_save_that_training_waits_for_is_whole_when_it_returns(one_rank, tmp_path):
    saving = begin(trainer(one_rank), tmp_path / "step-2", background=False)
    assert saving.done()
    assert why_torn(tmp_path / "step-2") == ""


@pytest.mark.parametrize("stage", ["write", "_write_item", "write_marker"])
def test_a_failure_in_the_background_is_one_error_and_leaves_what_was_whole(one_rank, tmp_path, monkeypatch, stage):
    from megatron_gptoss.checkpoint import background, training_state

    t = trainer(one_rank)
    begin(t, tmp_path / "step-1", step=1).wait()

    def full(*_args, **_kw):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(training_state if stage == "write_marker" else background, stage, full)
        saving = begin(t, tmp_path / "step-2")  # nothing has failed yet: it is not said where it began
        with pytest.raises(CheckpointError, match=r"cannot save .*step-2: .*No space left.*step-1, is intact"):
            saving.wait()
        saving.wait()  # it has been said
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    begin(t, tmp_path / "step-2").wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_a_checkpoint_of_the_same_name_is_replaced_when_the_new_one_is_whole(one_rank, tmp_path, held):
    t, path = trainer(one_rank), tmp_path / "step-2"
    held.set()
    begin(t, path).wait()
    held.clear()
    update(t, 3)
    saving = begin(t, path)
    assert why_torn(path) == "", "the old one stays until then"
    held.set()
    saving.wait()
    other = trainer(one_rank, seed=99)
    load(other, path)
    assert other.fingerprint() == t.fingerprint()
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


KILLED = """
import sys, threading, time
from pathlib import Path
import torch
from megatron_gptoss.parallel.groups import init_groups
from megatron_gptoss.parallel.shape import ParallelShape
folder = Path(sys.argv[1])
init_groups(ParallelShape(world=1), rank=0, init_method=f"file://{folder}/meet", timeout_s=60, seed=0, backend="gloo")
from megatron_gptoss.checkpoint import background
from tests.helpers.training import trainer
from tests.unit.test_training_state import begin
t = trainer(ParallelShape(world=1))
begin(t, folder / "checkpoints" / "step-000001", step=1).wait()
write_item, count = background._write_item, 0
def stop_halfway(*arguments):
    global count
    count += 1
    if count == 20:
        time.sleep(3600)
    return write_item(*arguments)
background._write_item = stop_halfway
saving = begin(t, folder / "checkpoints" / "step-000002")
while count < 20:
    time.sleep(0.01)
(folder / "reached").touch()
threading.Event().wait()
"""


def test_sigkill_while_writing_leaves_a_temporary_folder_and_the_checkpoint_before(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "reached").exists() or process.poll() is not None, "half a file", timeout=120)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    checkpoints = tmp_path / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [".tmp-step-000002", "step-000001"]
    assert list((checkpoints / ".tmp-step-000002").glob("*.distcp")), "half of it was there"
    newest = latest_checkpoint(tmp_path)
    assert newest == checkpoints / "step-000001"
    assert torn_since(newest) == [(".tmp-step-000002", "its save never ended")]


@pytest.mark.parametrize("switch", ["freeze_experts", "freeze_router", "freeze_attention"])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_a_run_with_frozen_parts_is_resumed(one_rank, tmp_path, switch, states):
    """With frozen experts there is one optimizer instead of two."""
    one, other = (trainer(one_rank, seed=seed, diagnose={switch: True}, optimizer_states=states) for seed in (0, 9))
    update(one, 1)
    begin(one, tmp_path / "step-000002", background=False).wait()
    load(other, tmp_path / "step-000002")
    assert other.fingerprint() == one.fingerprint()
    update(one, 2), update(other, 2)
    assert other.fingerprint() == one.fingerprint()


def test_freezing_something_else_than_before_is_refused_by_name(one_rank, tmp_path):
    begin(trainer(one_rank), tmp_path / "step-000002", background=False).wait()
    with pytest.raises(CheckpointError, match=r"2 optimizers and this run 1 .* what \[diagnose\] freezes has changed"):
        load(trainer(one_rank, diagnose={"freeze_experts": True}), tmp_path / "step-000002")


def test_when_the_new_one_cannot_take_the_name_the_old_one_keeps_it(tmp_path, monkeypatch):
    path, new = tmp_path / "step-000002", tmp_path / ".tmp-step-000002"
    for folder, text in ((path, "old"), (new, "new")):
        folder.mkdir()
        (folder / "data").write_text(text)
    monkeypatch.setattr(type(path), "replace", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        replace_folder(path, new)
    assert (path / "data").read_text() == "old"
    monkeypatch.undo()
    replace_folder(path, new)
    assert (path / "data").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_killed_between_two_names_the_old_one_is_taken_back(tmp_path):
    old = tmp_path / ".tmp-old-step-000002"
    old.mkdir()
    (old / MARKER).write_text('{"files": {}}')
    take_back_old(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


class TestTorn:
    """A checkpoint by its files alone."""

    @pytest.fixture(scope="class")
    def saved(self, one_rank, tmp_path_factory):
        folder = tmp_path_factory.mktemp("torn") / "checkpoints"
        for step in (1, 2):
            begin(trainer(one_rank), folder / f"step-00000{step}", step=step).wait()
        (folder.parent / "config.toml").touch()
        return folder

    @pytest.fixture
    def run(self, saved, tmp_path):
        """A copy of its own, of hard links."""
        subprocess.run(["cp", "-rl", str(saved.parent), str(tmp_path / "run")], check=True)
        return tmp_path / "run"

    def test_the_marker_names_every_file_with_its_size(self, saved):
        files = read_marker(saved / "step-000002")["files"]
        assert {p.name for p in (saved / "step-000002").iterdir()} == {*files, MARKER}
        assert sum(files.values()) > 8 * sum(p.stat().st_size for p in saved.glob("step-000002/config.json"))

    @pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json", "config.json"])
    @pytest.mark.parametrize("fault", ["missing", "short"])
    def test_the_one_before_is_chosen_and_the_fault_is_said(self, run, name, fault):
        newest = run / "checkpoints" / "step-000002"
        assert latest_checkpoint(run) == newest
        whole = (newest / name).read_bytes()
        (newest / name).unlink()
        if fault == "short":
            (newest / name).write_bytes(whole[:-1])
        before = run / "checkpoints" / "step-000001"
        assert latest_checkpoint(run) == before
        assert find_weights(run).path == before
        ((torn, why),) = torn_since(before)
        assert torn == "step-000002"
        assert name in why
        assert ("missing" in why) if fault == "missing" else (f"has {len(whole) - 1} bytes" in why and str(len(whole)) in why)
        with pytest.raises(CheckpointError, match=r"torn.*newest complete one is .*step-000001"):
            find_weights(newest)

    def test_what_is_short_is_found_before_loading(self, run, one_rank):
        path = run / "checkpoints" / "step-000002"
        t = trainer(one_rank)
        before = t.fingerprint()
        shard = path / "__0_0.distcp"
        whole = shard.read_bytes()
        shard.unlink()
        shard.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp has"):
            load(t, path)
        assert t.fingerprint() == before

    def test_a_marker_that_is_cut_short(self, run):
        marker = run / "checkpoints" / "step-000002" / MARKER
        text = marker.read_text()
        marker.unlink()
        marker.write_text(text[: len(text) // 2])
        assert torn_since(latest_checkpoint(run)) == [("step-000002", f"its file {MARKER} is cut short")]

    def test_a_marker_that_never_reached_the_disk(self, run):
        (run / "checkpoints" / "step-000002" / MARKER).unlink()
        assert torn_since(latest_checkpoint(run)) == [("step-000002", f"it has no file {MARKER}, so its save never ended")]


class TestWhichStay:
    """The newest n, and every m-th for good."""

    @pytest.mark.parametrize(
        ("keep", "every", "removed"),
        [(2, 0, [2, 4, 6]), (2, 4, [2, 6]), (1, 4, [2, 6]), (1, 6, [2, 4, 8]), (0, 4, []), (9, 0, []), (1, 2, [])],
    )
    def test_by_hand(self, tmp_path, keep, every, removed):
        for step in (2, 4, 6, 8, 10):
            (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
            (tmp_path / "checkpoints" / f"step-{step:06d}" / MARKER).touch()
        assert checkpoints_to_remove(tmp_path, keep, every) == [tmp_path / "checkpoints" / f"step-{step:06d}" for step in removed]

    @settings(deadline=None)
    @given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 4), st.integers(0, 5))
    def test_the_disk_is_planned_for_as_many_as_there_ever_are(self, steps, save_every, keep, multiple):
        every = save_every * multiple
        run = RunConfig(steps=steps, save_every=save_every, keep_checkpoints=keep, keep_every=every)
        there, most = [], 0
        for step in range(1, steps + 1):
            if step == steps or (save_every and step % save_every == 0):
                there.append(step)  # the new one beside the old ones
                most = max(most, len(there))
                old = there[:-keep] if keep else []
                there = [s for s in there if s not in old or (every and s % every == 0)]
        assert checkpoints_at_once(run) == most

    def test_steps_that_are_never_saved_cannot_stay(self):
        values = {"save_every": 20, "keep_every": 50}
        (message,) = broken_rules(load_config([], [Flag(f"run.{key}", str(n), f"--run.{key}") for key, n in values.items()]))
        assert message.startswith("run.keep_every = 50 ")
        assert "no multiple of run.save_every = 20" in message
        assert "40, 60" in message


def test_a_rank_that_is_not_heard_of_is_named(one_rank):
    from megatron_gptoss.checkpoint.background import Meeting

    with pytest.raises(RuntimeError, match=r"nothing was heard of rank 7 within 0 s"):
        Meeting("nobody", 0.3).hear("rank 7")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_while_writing_leaves_the_checkpoint_before(one_rank, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        t = trainer(one_rank)
        begin(t, disk / "step-1", step=1).wait()
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))
        saving = begin(t, disk / "step-2")
        with pytest.raises(CheckpointError, match=r"cannot save .*step-2: rank 0: .*No space left.*Free some space.*step-1, is intact"):
            saving.wait()
        assert sorted(p.name for p in disk.iterdir()) == ["filler", "step-1"]
        assert why_torn(disk / "step-1") == ""
        filler.unlink()
        begin(t, disk / "step-2").wait()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_no_process_is_started(one_rank, tmp_path, monkeypatch):
    """Megatron's own writer starts a manager, which takes seconds at the first save and outlives a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = psutil.Process().children()
    begin(trainer(one_rank), tmp_path / "step-2").wait()
    assert psutil.Process().children() == before


def test_the_marker_says_which_layout_wrote_it(one_rank, tmp_path):
    begin(trainer(one_rank), tmp_path / "step-2").wait()
    assert json.loads((tmp_path / "step-2" / MARKER).read_text())["layout"] == {
        "world": 1, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1,
    }  # fmt: skip
