"""Laws of what a run leaves behind: nothing is overwritten or lost, what is written reads back, and a pipe sees plain text only."""

import io
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config.load import load
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError, MachineError
from megatron_gptoss.obs.console import Console, split_conversation, step_line, visible
from megatron_gptoss.obs.json_floats import NOT_FINITE, to_json
from megatron_gptoss.obs.logs import last_lines
from megatron_gptoss.obs.manifest import git_state, versions, write_manifest
from megatron_gptoss.obs.metrics import MetricsLog, read_metrics
from megatron_gptoss.obs.report import points, running_mean, write_report
from megatron_gptoss.obs.run_dir import RunDir, checkpoints_to_remove, latest_checkpoint, write_atomic
from megatron_gptoss.types import Prompt, RewardPart, Rollout, VersionRun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "run-1", Config())


# ---- run directory ------------------------------------------------------------------------------------------------------------------


def test_a_run_directory_is_made_once(run):
    before = run.config_file.read_text()
    with pytest.raises(ConfigError, match="exists already"):
        RunDir.create(run.path, Config())
    assert run.config_file.read_text() == before
    assert load([run.config_file]).config == Config()
    assert all(folder.is_dir() for folder in (run.tensorboard, run.rollouts, run.checkpoints, run.logs))


def test_a_place_that_cannot_hold_a_run_is_a_machine_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"run\.dir"):
        RunDir.create(tmp_path / "file" / "run-1", Config())


def test_a_resumed_run_keeps_what_its_config_said_before(run):
    longer = load([], []).config.model_copy(update={"run": Config().run.model_copy(update={"steps": 80, "resume": str(run.path)})})
    RunDir.resume(run.path, longer, step=20)
    assert load([run.config_file]).config.run.steps == 80
    assert load([run.config_file]).config.run.resume == ""  # the file describes the run, not how this session began
    assert load([run.path / "config-before-step-000020.toml"]).config == Config()
    RunDir.resume(run.path, longer, step=20)  # nothing new to say, nothing kept
    RunDir.resume(run.path, Config(), step=20)
    assert sorted(p.name for p in run.path.glob("config*")) == [
        "config-before-step-000020-2.toml", "config-before-step-000020.toml", "config.toml",
    ]  # fmt: skip


def test_rollouts_of_steps_that_a_resume_does_again_go(run):
    kept = ["eval-step-20.jsonl", "step-20.jsonl", "step-20.scores.jsonl", "step-9.jsonl", "step-99.txt", "sub-step-99.jsonl"]
    for name in (*kept, "eval-step-30.jsonl", "step-21.jsonl", "step-21.scores.jsonl", "step-100.jsonl"):
        (run.rollouts / name).write_text("")
    RunDir.resume(run.path, Config(), step=20)
    assert sorted(file.name for file in run.rollouts.iterdir()) == kept


def test_the_latest_checkpoint_is_the_highest_complete_one(run):
    assert latest_checkpoint(run.path) is None
    for name in ("step-000009", "step-1000000", "step-2000000", ".tmp-step-3000000", "step-x"):
        (run.checkpoints / name).mkdir()
        if name != "step-2000000":
            (run.checkpoints / name / MARKER).write_text("")
    assert latest_checkpoint(run.path) == run.checkpoint(1000000)  # by number: "9" sorts after "1000000" as text


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 9])
def test_the_newest_complete_checkpoints_stay_and_torn_ones_are_nobodys(run, keep):
    for step in (20, 40, 1000000, 60):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / MARKER).write_text("")
    for name in ("step-000010", "step-2000000", ".tmp-step-3000000", "step-x"):  # never complete, or not a checkpoint
        (run.checkpoints / name).mkdir()
    (run.checkpoints / ".tmp-step-3000000" / MARKER).write_text("")
    oldest_first = [run.checkpoint(step) for step in (20, 40, 60, 1000000)]
    removed = checkpoints_to_remove(run.path, keep)
    assert removed == (oldest_first[: max(4 - keep, 0)] if keep else [])
    assert latest_checkpoint(run.path) not in removed


def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "a"
    write_atomic(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "new \ud800")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


# ---- metrics ------------------------------------------------------------------------------------------------------------------------


def test_metrics_are_one_object_a_step_at_once_and_not_finite_values_come_back(run):
    log = MetricsLog(run, clock=lambda: 5.0)
    log.write(1, {"reward/mean": 0.5, "train/skipped": True, "problem": "inf in grad", "a": math.nan, "b": math.inf, "c": -math.inf})
    log.write(1, {"eval/success": 0.25, "reward/mean": 0.75})
    log.write(2, {"reward/mean": 1.0})
    lines = run.metrics_file.read_text().splitlines()  # before close: it is flushed
    log.close()
    assert json.loads(lines[0], parse_constant=pytest.fail) == {
        "step": 1, "time": 5.0, "reward/mean": 0.75, "train/skipped": True, "problem": "inf in grad",
        "a": "nan", "b": "inf", "c": "-inf", "eval/success": 0.25,
    }  # fmt: skip
    first, second = read_metrics(run.metrics_file)
    assert math.isnan(first["a"]) and first["b"] == math.inf and first["c"] == -math.inf
    assert second == {"step": 2, "time": 5.0, "reward/mean": 1.0}


def test_steps_never_go_down(run):
    log = MetricsLog(run)
    log.write(2, {"x": 1})
    with pytest.raises(ValueError, match="step 1 after step 2"):
        log.write(1, {"x": 1})
    log.close()


def test_a_resumed_log_continues_as_if_it_had_never_gone_further(run):
    log = MetricsLog(run, clock=lambda: 0.0)
    for step in range(1, 6):
        log.write(step, {"x": float(step)})
    log.close()
    with run.metrics_file.open("a") as file:
        file.write('{"step": 6, "x"')  # a write that was interrupted
    log = MetricsLog(run, resumed_step=3, clock=lambda: 0.0)
    log.write(3, {"y": 1.0})  # joins the step that was kept
    log.write(4, {"x": 40.0})
    log.close()
    assert [(row["step"], row["x"]) for row in read_metrics(run.metrics_file)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert read_metrics(run.metrics_file)[2]["y"] == 1.0


def test_a_new_run_does_not_append_to_an_old_log(run):
    log = MetricsLog(run)
    log.write(1, {"x": 1})
    log.close()
    with pytest.raises(ValueError, match="not resumed"):
        MetricsLog(run)


def test_tensorboard_reads_the_same_numbers_and_forgets_what_a_resume_undid(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(run)
    for step in range(1, 6):
        log.write(step, {"reward/mean": step / 8})
    log.close()
    # TensorBoard reads its files in the order of their names: a second, then a counter of the process, of which 10 comes before 9. A run
    # that is resumed is another process, seconds later.
    time.sleep(1.0)
    log = MetricsLog(run, resumed_step=3)
    log.write(4, {"reward/mean": 0.5})
    log.close()
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]


def test_the_driver_needs_no_torch_to_log():
    code = (
        "import sys, megatron_gptoss.obs.metrics, megatron_gptoss.obs.console, megatron_gptoss.obs.report, megatron_gptoss.obs.manifest;"
        "sys.exit(bool({'torch', 'ray', 'vllm', 'megatron', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- manifest -----------------------------------------------------------------------------------------------------------------------


def test_the_manifest_says_with_what_and_keeps_the_one_before(run):
    plan = make_plan(load(), Cluster(2, 0))
    write_manifest(run, "train", plan, {"attention": "reference"})
    write_manifest(run, "train", plan, {"attention": "reference"}, resumed_step=20)
    manifest = json.loads(run.manifest_file.read_text())
    assert manifest["command"] == "train" and manifest["resumed_after_step"] == 20
    assert manifest["versions"]["pydantic"] == versions()["pydantic"] is not None
    assert manifest["plan"]["sequences_per_step"] == 64
    assert json.loads((run.path / "manifest-before-step-000020.json").read_text())["resumed_after_step"] is None


def test_a_folder_without_git_has_no_git_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None


# ---- console ------------------------------------------------------------------------------------------------------------------------


def piped() -> tuple[Console, io.StringIO, list[float]]:
    """A console without a terminal, and its clock's next readings."""
    out, times = io.StringIO(), [0.0]
    return Console(RichConsole(file=out, highlight=False), clock=lambda: times[-1]), out, times


def test_the_line_of_a_step():
    values = {
        "reward/mean": 0.75, "mismatch/logp_abs_max": 3.1e-6, "grad/norm": 0.312, "policy/entropy": 0.04, "time/step_s": 6.8,
        "time/rollout_s": 6.1, "time/score_s": 0.0, "time/update_s": 0.3, "time/sync_s": 0.1, "other": 1.0,
    }  # fmt: skip
    assert step_line(2, 40, values) == (
        "step  2/40  reward 0.75  mismatch 3e-06  grad 0.31  entropy 0.040  6.8 s (rollout 6.1 score 0.0 update 0.3 sync 0.1)"
    )
    assert step_line(2, 40, {"train/skipped": True}) == "step  2/40  no update"


def test_a_pipe_gets_one_line_for_a_long_phase_none_for_a_short_one_and_no_control_characters():
    console, out, times = piped()
    with console.progress("rollouts", 64, "conversations") as bar:
        bar.advance(8, "300 tokens/s")
    assert out.getvalue() == ""
    with console.progress("rollouts", 64, "conversations") as bar:
        bar.update(64, "310 tokens/s")
        times.append(12.5)
    with console.waiting("starting engines"):
        times.append(40.0)
    console.table("run", [("model", "tiny [bold]")])
    console.step(1, 2, {"reward/mean": 1.0})
    text = out.getvalue()
    assert text.startswith("rollouts: done, 64/64 conversations in 12.5 s (310 tokens/s)\nstarting engines: done in 27.5 s\n")
    assert "tiny [bold]" in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_phase_that_fails_says_how_far_it_came():
    console, out, _ = piped()
    with pytest.raises(RuntimeError), console.progress("rollouts", 64) as bar:
        bar.advance(3)
        raise RuntimeError
    assert out.getvalue() == "rollouts: stopped, 3/64 in 0.0 s\n"


TEXT = (
    "<|start|>user<|message|>(37+58)*4<|end|><|start|>assistant<|channel|>analysis<|message|>two steps<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"expression":"37+58"}<|call|>'
    "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>95<|end|>"
    "<|start|>assistant<|channel|>final<|message|>3\x1b[31m80<|return|>"
)


def test_a_conversation_is_split_into_who_and_what():
    assert split_conversation(TEXT) == [
        ("user", "(37+58)*4"),
        ("assistant, analysis", "two steps"),
        ("assistant to functions.calc, commentary", '{"expression":"37+58"}'),
        ("functions.calc to assistant, commentary", "95"),
        ("assistant, final", "3\x1b[31m80"),
    ]
    assert split_conversation("<|start|>assistant to=f<|channel|>x<|message|>a") == [("assistant to f, x", "a")]
    assert "".join(what for _, what in split_conversation("garbage <|call|> more")) == "garbage <|call|> more"


def test_a_rollout_is_shown_whole_and_cannot_steer_the_terminal():
    console, out, _ = piped()
    prompt = Prompt("arithmetic/train/17", "arithmetic", "(37+58)*4", "380")
    parts = (RewardPart("right", 1.0),)
    console.rollout(
        Rollout(prompt, 3, (1, 2), (False, True), (0.0, -1.0), (VersionRun(0, 1),), 1, "final", "380", 1.0, parts, ("right",)), TEXT
    )
    text = out.getvalue()
    shown = ("arithmetic/train/17 #3", '{"expression":"37+58"}', "95", r"3\x1b[31m80", "reward 1", "gold '380'", "stop final", "1 of them")
    assert all(words in text for words in shown)
    assert "\x1b" not in text


def test_visible_keeps_text_and_escapes_control():
    assert visible("ä\n\t\x07\x1b]0;x") == "ä\n\t\\x07\\x1b]0;x"


# ---- logs and disks -----------------------------------------------------------------------------------------------------------------


def test_the_last_lines_of_a_log_however_long_it_is(tmp_path):
    log = tmp_path / "rank-1.log"
    log.write_text("x" * 100_000 + "\n" + "\n".join(f"line {i}" for i in range(100)) + "\n")
    assert last_lines(log, 2) == ["line 98", "line 99"]
    assert len(last_lines(log, 200)) == 101 and len(last_lines(log, 200)[0]) < 65536  # what came earlier is not read
    log.write_bytes(b"")
    assert last_lines(log, 2) == ["(empty)"]
    assert last_lines(tmp_path / "none", 3) == ["(No such file or directory)"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_not_finite_goes_through_json_and_back(value):
    back = NOT_FINITE[json.loads(json.dumps(to_json(value), allow_nan=False))]
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_a_full_disk_is_a_machine_error_with_the_file_the_room_and_the_cure(run):
    log = MetricsLog(run)
    log.write(1, {"x": 1.0})
    with files_end_at(200):
        with pytest.raises(MachineError, match=r"metrics\.jsonl cannot be written: .* MiB are free in .*--resume.*run\.dir"):
            log.write(2, {"x": 2.0, "why": "y" * 4096})
        log.close()  # does not raise again, which would hide the first error
    with files_end_at(200), pytest.raises(MachineError, match=r"config\.toml cannot be written"):
        write_atomic(run.config_file, "z" * 4096)
    assert load([run.config_file]).config == Config()


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """As on a full disk: writing past `num_bytes` of any file is an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- report -------------------------------------------------------------------------------------------------------------------------


def test_a_running_mean_worked_by_hand():
    assert running_mean([2, 4, 6], 2) == [2, 3, 5]
    assert running_mean([1.0, 1.0, 1.0], 5) == [1.0, 1.0, 1.0]


def test_points_are_what_was_measured_and_is_finite():
    rows = [{"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": math.nan}, {"step": 4, "x": 2}]
    assert points(rows, "x") == [(1, 1.0), (4, 2.0)]


@pytest.mark.parametrize("full", [True, False])
def test_a_picture_is_drawn_from_any_metrics(run, full):
    log = MetricsLog(run)
    for step in range(4):
        values = {
            "reward/mean": step / 4, "eval/success": step / 4, "mismatch/logp_abs_max": 0.0 if step else 1e-6, "mismatch/k3": 0.0,
            "grad/norm": math.nan if step == 2 else 0.3, "train/skipped": step == 2, "policy/entropy": 0.1, "time/step_s": 2.0,
            "time/rollout_s": 1.0, "time/update_s": 0.5,
        }  # fmt: skip
        log.write(step, values if full else {"sft/loss": 1.0})
    log.close()
    write_report(run.path, run.path / "report.png")
    assert (run.path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_without_steps_has_no_picture(run):
    MetricsLog(run).close()
    with pytest.raises(ValueError, match="no steps"):
        write_report(run.path, run.path / "report.png")
