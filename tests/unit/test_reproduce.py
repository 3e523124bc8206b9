"""tools/reproduce.py: its settings, what it keeps, what it makes again, and its figures. In: runs made up here, and those that are kept."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.obs.curves import Panel, draw_curves, mean_of_seeds
from megatron_gptoss.obs.spans import FOLDER
from tests.helpers.runs import alive, tree, wait_for

ROOT = Path(__file__).parents[2]
SMALL = [str(ROOT / "configs" / "small_h200.toml")]

specification = importlib.util.spec_from_file_location("reproduce", ROOT / "tools" / "reproduce.py")
assert specification is not None and specification.loader is not None
reproduce = sys.modules["reproduce"] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(reproduce)


def plan(tmp_path, *, configs=SMALL, flags=(), jobs=1, minutes=60.0, **changed):
    return reproduce.Plan(
        list(configs), list(flags), tmp_path / "runs", tmp_path / "out", changed.get("steps", 60), jobs, 1, time.monotonic() + 60 * minutes
    )


def rows(steps=12, slope=0.05, **changed):
    made = [{"step": 0, "eval/success": 0.3}]
    for step in range(1, steps + 1):
        made.append(
            {"step": step, "reward/mean": 0.3 + slope * step, "grad/norm": 0.5, "policy/entropy": 0.1, "policy/kl_ref": 1e-3 * step,
             "policy/clip_fraction": 0.0, "policy/ratio_max_abs_dev": 0.0, "mismatch/k3": 1e-4 * step, "mismatch/log_ppl_abs_diff": 1e-3,
             "label/right": 0.5, **changed}
        )  # fmt: skip
    made[-1]["eval/success"] = 0.9
    return made


def kept(name="all-on", seed=0, *, steps=12, ended=reproduce.FINISHED, seconds=100.0, warm="w", made_from=("x.toml",), of=None, **changed):
    return reproduce.Kept(name, seed, steps, ended, seconds, warm, list(made_from), rows(**changed) if of is None else of)


def keep(folder, name, seed=0, **how):
    assert kept(name, seed, **how).write(folder)


# ---- settings ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reproduce.SETTINGS)
def test_every_setting_is_a_plan_that_can_run_on_one_gpu(name, tmp_path):
    of = plan(tmp_path, jobs=4)
    loaded = load(*parse_flags([*SMALL, *of.layer(name), *reproduce.share_flags(of)]))
    made = make_plan(loaded, Cluster(num_cpus=16, num_gpus=1))
    assert (made.not_built, made.shortfall) == ((), "")
    wrong_on_purpose = [flag for flag in reproduce.SETTINGS[name].flags if flag.startswith("--diagnose.")]
    assert len(made.switches) == len(wrong_on_purpose)
    assert made.on_policy == (name != "noise-scored")
    another = loaded.config.diagnose.ignore_sinks or loaded.config.diagnose.routing_noise > 0
    assert loaded.config.parity.enabled == (not another)  # the self-test goes wherever the trainer is meant to be right


def test_every_setting_answers_a_question_and_every_question_has_settings():
    asked = {name for question in reproduce.QUESTIONS.values() for name in question.settings}
    assert asked == set(reproduce.SETTINGS)
    assert len({setting.words for setting in reproduce.SETTINGS.values()}) == len(reproduce.SETTINGS)


def test_the_dense_model_is_of_the_same_size_and_has_nothing_to_choose(tmp_path):
    moe, dense = (
        make_plan(load(*parse_flags([*SMALL, *plan(tmp_path).layer(name)])), Cluster(16, 1)).parameters for name in ("all-on", "dense")
    )
    assert abs(dense.total / moe.total - 1) < 0.01
    assert dense.active > 5 * moe.active
    model = load(*parse_flags([*SMALL, *plan(tmp_path).layer("dense")])).config.model
    assert model.num_local_experts == model.num_experts_per_tok


def test_what_is_chosen():
    assert reproduce.chosen("b") == ["all-on", "sinks-ignored"]
    assert reproduce.chosen("dense,a") == ["main", "dense"]
    everything = reproduce.chosen("")
    assert "main" not in everything and "sinks-ignored-none" not in everything and len(everything) == len(reproduce.SETTINGS) - 3
    with pytest.raises(ConfigError, match="--only sink is neither a question"):
        reproduce.chosen("b,sink")


def test_the_long_run_has_the_configurations_own_steps(tmp_path):
    of = plan(tmp_path, steps=7)
    assert (of.steps_of(reproduce.SETTINGS["main"]), of.steps_of(reproduce.SETTINGS["dense"])) == (150, 7)


def test_runs_beside_each_other_share_the_gpu_and_what_a_person_sets_stays(tmp_path):
    assert reproduce.share_flags(plan(tmp_path)) == []
    assert reproduce.share_flags(plan(tmp_path, jobs=4)) == ["--rollout.gpu_memory_fraction=0.150", "--rollout.gpu_kv_cache_gib=2.0"]
    given = plan(tmp_path, jobs=4, flags=["--rollout.gpu_kv_cache_gib=9"])
    assert reproduce.share_flags(given) == ["--rollout.gpu_memory_fraction=0.150"]


# ---- what is kept ------------------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_small_and_comes_back(tmp_path):
    made = [*rows(3), {"step": 4, "grad/norm": math.nan, "mismatch/k3": 0.123456789, "rollout/tokens": 9.0}]
    written = kept("all-on", 1, steps=4, ended=reproduce.FAILED, made_from=["x.toml", "--a.b=1"], of=made)
    assert written.write(tmp_path)
    (read,) = reproduce.kept_runs(tmp_path)["all-on"]
    assert replace(read, rows=[]) == replace(written, rows=[]) and read.name == "all-on-1"
    assert read.rows[1]["reward/mean"] == pytest.approx(0.35)
    assert math.isnan(read.rows[4]["grad/norm"]) and read.rows[4]["mismatch/k3"] == 0.12346
    assert set().union(*read.rows) <= set(reproduce.KEPT)


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        (("finished", 12), ("out of time", 5), True),
        (("finished", 12), ("failed", 20), True),
        (("out of time", 9), ("out of time", 5), True),
        (("out of time", 9), ("failed", 9), False),
        (("failed", 9), ("finished", 12), False),
        (("finished", 20), ("finished", 12), False),
    ],
)
def test_what_is_kept_never_gives_way_to_less(tmp_path, before, after, stays):
    for ended, steps in (before, after):
        wrote = kept(ended=ended, of=rows(steps)).write(tmp_path)
    (read,) = reproduce.kept_runs(tmp_path)["all-on"]
    assert wrote != stays and (read.ended, len(read.rows) - 1) == (before if stays else after)


@pytest.mark.parametrize("text", ["", "{}\n", '{"setting": "all-on"}\n', '{"setting": "all-on", "se', "[]\n", "5\n6\n"])
def test_a_file_that_is_no_run_is_named(tmp_path, text):
    (tmp_path / "all-on-0.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"all-on-0\.jsonl is no line about a run"):
        reproduce.kept_runs(tmp_path)


def test_only_a_finished_run_with_the_same_flags_is_done(tmp_path):
    of = plan(tmp_path)
    assert not reproduce.is_done(of, "none", 0)
    for ended, steps, flags, done in [
        (reproduce.FAILED, 60, of.made_from("none"), False),
        (reproduce.STOPPED, 60, of.made_from("none"), False),
        (reproduce.FINISHED, 30, of.made_from("none"), False),
        (reproduce.FINISHED, 60, [*of.made_from("none"), "--rl.lr=1.0"], False),
        (reproduce.FINISHED, 60, of.made_from("none"), True),
    ]:
        keep(of.out, "none", steps=steps, ended=ended, made_from=flags)
        assert reproduce.is_done(of, "none", 0) == done


def test_a_changed_value_of_the_configuration_makes_it_another_run_and_a_comment_does_not(tmp_path):
    own = tmp_path / "own.toml"
    text = Path(SMALL[0]).read_text()
    marks = []
    for each in (text, text + "\n# a word\n", text.replace("operations = 5", "operations = 4")):
        own.write_text(each)
        marks.append(plan(tmp_path, configs=[str(own)]).made_from("none")[0])
    assert marks[0] == marks[1] != marks[2] and marks[0].startswith("own.toml@")


# ---- running, with a gptoss of our own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """gptoss as it would go; `fails` holds what ends with 1."""
    seen: list[list[str]] = []
    fails: set[str] = set()

    def fake(of, arguments, log, slot):
        seen.append(list(arguments))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("copies right with probability 0.9\nlast words\n")
        named = {a.split("=")[0]: a.split("=", 1)[1] for a in arguments if a.startswith("--run.")}
        run = Path(named["--run.dir"]) / f"{named['--run.name']}-{named['--run.id']}"
        assert not run.exists(), "a run directory is never written over"
        if named["--run.name"] in fails:
            return 1
        run.mkdir(parents=True)
        if arguments[0] == "sft":
            (run / "checkpoints" / "step-000001").mkdir(parents=True)
            (run / "checkpoints" / "step-000001" / "COMPLETE").touch()
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3, of_its_own=run.name)))
        return 0

    monkeypatch.setattr(reproduce, "gptoss", fake)
    return seen, fails


def names(seen):
    return [f"{a.split('=')[1]}" for call in seen for a in call if a.startswith("--run.name=")]


def test_seed_after_seed_each_from_a_warm_start_of_its_own_and_never_twice(tmp_path, calls):
    seen, _ = calls
    of = plan(tmp_path)
    assert reproduce.run_all(of, ["all-on", "none"], [0, 1]) == []
    assert sorted(names(seen)[:2]) == ["warm-moe", "warm-moe"] and names(seen)[2:] == ["all-on", "none", "all-on", "none"]
    assert [call[0] for call in seen] == ["sft", "sft", "train", "train", "train", "train"]
    for call, seed in zip(seen, (0, 1, 0, 0, 1, 1), strict=True):
        assert f"--run.seed={seed}" in call and f"--run.id={seed}" in call
        assert call[0] == "sft" or [a for a in call if f"warm-moe-{seed}" in a]
    assert reproduce.run_all(plan(tmp_path), ["all-on", "none"], [0, 1]) == []
    assert len(seen) == 6
    # Other flags: another run, beside the directory of the last one.
    assert reproduce.run_all(plan(tmp_path, flags=["--rl.lr=1e-5"]), ["none"], [0]) == []
    assert names(seen)[6:] == ["none"]
    assert (of.runs / "none-0.unfinished-1").is_dir()


def test_a_run_from_another_seeds_warm_start_is_made_again(tmp_path, calls):
    of = plan(tmp_path)
    made = of.made_from("none")
    keep(tmp_path / "out", "all-on", warm="a", made_from=of.made_from("all-on"), steps=of.steps)
    keep(tmp_path / "out", "none", warm="b", seed=1, made_from=made, steps=of.steps)
    assert reproduce.is_done(of, "none", 1) and reproduce.is_done(of, "all-on", 0)
    keep(tmp_path / "out", "none", warm="a", seed=1, made_from=made, steps=of.steps)
    keep(tmp_path / "out", "dense", warm="a", seed=2, made_from=of.made_from("dense"), steps=of.steps)
    assert not reproduce.is_done(of, "none", 1) and reproduce.is_done(of, "all-on", 0)
    assert reproduce.is_done(of, "dense", 2), "another kind of model"


def test_what_the_call_says_of_rates_wins_over_the_dense_models_own(tmp_path):
    of = plan(tmp_path, flags=["--rl.lr=1e-6", "--sft.steps=20"])
    config = load(*parse_flags([*SMALL, *of.layer("dense")])).config
    assert (config.rl.lr, config.sft.steps, config.sft.lr, config.model.num_local_experts) == (1e-6, 20, 1.5e-4, 2)
    assert load(*parse_flags([*SMALL, *plan(tmp_path).layer("dense")])).config.rl.lr == 2.5e-5


def test_the_dense_warm_start_has_the_dense_rates(tmp_path, calls):
    seen, _ = calls
    assert reproduce.run_all(plan(tmp_path), ["dense"], [0]) == []
    assert seen[0][0] == "sft" and {*reproduce.DENSE_RATES, "--model.num_experts_per_tok=2"} <= set(seen[0])


def test_what_fails_is_said_and_the_rest_goes_on(tmp_path, calls, monkeypatch):
    seen, fails = calls
    fails |= {"none", "warm-dense"}
    monkeypatch.setattr(reproduce, "START_APART_S", 0.0)
    problems = reproduce.run_all(plan(tmp_path, jobs=2), ["all-on", "none", "dense"], [0])
    assert sorted(names(seen)) == ["all-on", "none", "warm-dense", "warm-moe"]
    assert [("none, seed 0: ended with 1" in p, "last words" in p) for p in problems if "warm" not in p.split()[0]] == [(True, True)]
    assert any(p.startswith("warm-dense, seed 0, ended with 1, and no run can begin from it") for p in problems)
    assert list(reproduce.kept_runs(tmp_path / "out")) == ["all-on"]


def test_no_run_begins_that_would_not_end_in_time(tmp_path, calls):
    seen, _ = calls
    of = plan(tmp_path, minutes=1)
    of.longest_s = 61.0
    assert reproduce.run_all(of, ["all-on"], [0]) == ["all-on, seed 0: no time left for it"]
    assert names(seen) == ["warm-moe"]


POPEN = subprocess.Popen


def child(monkeypatch, script):
    """gptoss is this script of Python."""
    monkeypatch.setattr(reproduce.subprocess, "Popen", lambda _command, **how: POPEN([sys.executable, "-c", script], **how))


@pytest.fixture
def hears_ctrl_c():
    """As from a terminal, and as main() sees to it: who is started in the background is deaf to it, and so are his children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_child_is_ended_at_the_deadline_as_by_ctrl_c(tmp_path, monkeypatch):
    child(monkeypatch, "import time\ntry: print('begun', flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('ended in order')")
    of, log = plan(tmp_path), tmp_path / "log"
    with ThreadPoolExecutor(1) as thread:
        code = thread.submit(reproduce.gptoss, of, [], log, 0)
        wait_for(lambda: log.exists() and "begun" in log.read_text(), "the child")
        of.deadline = time.monotonic()
        assert code.result() is None
    assert log.read_text() == "begun\nended in order\n"
    child(monkeypatch, "raise SystemExit(7)")
    assert reproduce.gptoss(plan(tmp_path), [], tmp_path / "log", 0) == 7


def test_a_run_that_is_stopped_is_kept_as_far_as_it_came_and_says_so(tmp_path, calls, monkeypatch):
    run_it = reproduce.gptoss
    monkeypatch.setattr(reproduce, "gptoss", lambda of, a, log, slot: (run_it(of, a, log, slot), None if a[0] == "train" else 0)[1])
    assert reproduce.run_all(plan(tmp_path), ["all-on"], [0]) == ["all-on, seed 0: stopped by the deadline"]
    (read,) = reproduce.kept_runs(tmp_path / "out")["all-on"]
    assert read.ended == "out of time" and read.rows[-1]["step"] == 3 and read.warm
    assert not reproduce.is_done(plan(tmp_path), "all-on", 0)


INTERRUPTED = """
import importlib.util, sys
specification = importlib.util.spec_from_file_location("reproduce", {tool!r})
reproduce = sys.modules["reproduce"] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(reproduce)
from pathlib import Path
real = reproduce.subprocess.Popen
script = "import sys, time; open(sys.argv[1], 'a').write('begun '); time.sleep(120)"
reproduce.subprocess.Popen = lambda command, **how: real([sys.executable, "-c", script, {seen!r}], **how)
reproduce.START_APART_S = 0.0
runs = Path({runs!r})
reproduce.main([{config!r}], only="all-on,none,sequence", jobs=1, runs=runs, out=runs / "out", page=runs / "p.md")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_runs_and_begins_nothing_more(tmp_path, how):
    seen = tmp_path / "seen"
    warm = tmp_path / "runs" / "warm-moe-0" / "checkpoints" / "step-1"
    warm.mkdir(parents=True)
    (warm / "COMPLETE").touch()
    script = INTERRUPTED.format(
        tool=str(ROOT / "tools" / "reproduce.py"), seen=str(seen), config=SMALL[0], runs=str(tmp_path / "runs")
    )  # fmt: skip
    # Deaf to Ctrl-C, as what a shell puts into the background is.
    deaf = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen([sys.executable, "-c", script], preexec_fn=deaf, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: seen.exists() or process.poll() is not None, "the first run")
    family = tree(process.pid)
    process.send_signal(how)
    assert process.wait(timeout=60) != 0
    assert seen.read_text() == "begun " and alive(family) == []


# ---- figures -----------------------------------------------------------------------------------------------------------------------------


def test_panels_hold_the_lines_of_all_seeds_and_their_mean(tmp_path):
    seeds = {"one": [rows(), rows(slope=0.03)], "other": [rows(**{"mismatch/k3": 0.0})]}
    panels = [Panel("Reward", "reward/mean", "mean", smooth=5), Panel("k3", "mismatch/k3", logarithmic=True), Panel("Nothing", "a/b")]
    figure = draw_curves("Title", seeds, panels, tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").stat().st_size > 10_000
    reward, k3, nothing, *_ = figure.axes
    assert [ax.get_title() for ax in (reward, k3, nothing)] == ["Reward", "k3", "Nothing"]
    assert len(reward.lines) == 5  # two seeds and their mean, one seed and its running mean
    assert list(reward.lines[0].get_ydata()) == pytest.approx([0.3 + 0.05 * step for step in range(1, 13)])
    assert len(k3.lines) == 3 and k3.get_yscale() == "log"  # zeros have no place on it
    assert not nothing.lines and nothing.texts[0].get_text() == "not measured"
    same = draw_curves("Title", {"one": [rows(**{"mismatch/k3": 0.0})]}, panels, tmp_path / "y.png").axes[1]
    assert not same.lines and same.texts[0].get_text() == "0 at every step"
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["one", "other"]


def test_the_mean_of_seeds_is_over_steps_that_all_have():
    assert mean_of_seeds([[(1, 1.0), (2, 3.0), (3, 5.0)], [(2, 1.0), (3, 1.0)]]) == [(2, 2.0), (3, 3.0)]
    assert mean_of_seeds([]) == []


def test_the_page_keeps_what_a_person_wrote(tmp_path):
    folder, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("# Title\n\nBy hand.\n")
    for name in ("all-on", "sinks-ignored"):
        keep(folder, name)
        keep(folder, name, seed=1, ended=reproduce.STOPPED)
    assert reproduce.draw(folder, page) == [folder / "b.png"]
    text = page.read_text()
    assert text.startswith("# Title\n\nBy hand.\n\n## (b) Sinks ignored")
    assert "| sinks ignored in the trainer | 0 1 | 12 12 (out of time) | 0.300 0.300 | 0.900 0.900 |" in text
    assert "![figure](out/b.png)" in text
    page.write_text(text.replace("<!-- b: end -->", "<!-- b: end -->\n\nIt fell."))
    keep(folder, "sinks-ignored", of=rows(slope=0.0))
    reproduce.draw(folder, page)
    again = page.read_text()
    assert again.endswith("<!-- b: end -->\n\nIt fell.\n") and again.count("made by") == 1 and again != text
    page.write_text(again.replace("<!-- b: end -->", ""))
    with pytest.raises(DataError, match="has the mark"):
        reproduce.draw(folder, page)


def test_a_comparison_of_one_is_not_drawn(tmp_path):
    keep(tmp_path / "out", "all-on")
    assert reproduce.draw(tmp_path / "out", tmp_path / "page.md") == []
    keep(tmp_path / "out", "main")
    assert reproduce.draw(tmp_path / "out", tmp_path / "page.md") == [tmp_path / "out" / "a.png"]


def test_a_row_of_the_table_worked_by_hand(tmp_path):
    made = [{"step": 0, "eval/success": 0.25, "eval/other": 1.0}]
    for step in range(1, 13):  # rewards 0.1 .. 1.2: the last ten have mean 0.75
        made.append({"step": step, "reward/mean": step / 10, "mismatch/k3": step / 1000, "mismatch/log_ppl_abs_diff": step,
                     "train/skipped": 0.0, "policy/clip_fraction": 0.5 * (step == 12),
                     "policy/ratio_max_abs_dev": 0.25 * (step == 3)})  # fmt: skip
    for row, norm in zip(made[1:], [1, 2, 3, 4, 5, 6, 7, 8, 9, 100], strict=False):
        row["grad/norm"] = norm
    made[11]["train/skipped"] = made[12]["train/skipped"] = 1.0  # the last two made no update, and so have no gradient
    made[12]["eval/success"] = 0.75
    keep(tmp_path, "all-on", of=made)
    cells = reproduce._cells(reproduce.kept_runs(tmp_path)["all-on"][0])
    assert cells == ["12 (2 without update)", "0.250", "0.750", "0.750", "5.5", "100", "0.0065", "0.012", "7.5", "0.0417", "0.25"]
    made[5]["grad/norm"], made[6]["mismatch/k3"] = math.inf, math.nan
    cells = reproduce._cells(kept(of=made, ended=reproduce.FAILED))
    assert cells[0] == "12 (failed, 2 without update)" and (cells[5], cells[7]) == ("inf", "nan"), "the largest hides nothing"
    assert reproduce._cells(kept(of=[{"step": 0}])) == ["0", *["-"] * 10]
    assert reproduce._cells(kept(of=made[:1]))[1:3] == ["0.250", "-"], "once measured is not before and after"


GOOD = {"steps": 150, "slope": 0.001}


@pytest.mark.parametrize(
    ("change", "how", "missed"),
    [
        (lambda _: None, {}, []),
        (lambda made: made.pop(77), {}, [0]),
        (lambda _: None, {"seconds": 540.1}, [0]),
        (lambda _: None, {"ended": "out of time"}, []),
        (lambda made: made[-1].update({"eval/success": 0.59}), {}, [1]),
        (lambda made: made[-1].pop("eval/success"), {}, [1]),
        (lambda made: made[0].pop("eval/success"), {}, [1]),
        (lambda made: (made[0].pop("eval/success"), made[5].update({"eval/success": 0.1})), {}, [1]),
        (lambda made: made[40].update({"policy/ratio_max_abs_dev": 1e-7}), {}, [2]),
        (lambda made: made[40].pop("policy/ratio_max_abs_dev"), {}, [2]),
        (lambda made: made[40].update({"mismatch/k3": 0.002}), {}, [3]),
        (lambda made: made[40].update({"mismatch/k3": math.nan}), {}, [3]),
        (lambda made: made[40].update({"mismatch/k3": math.inf}), {}, [3]),
        (lambda made: made.__delitem__(slice(0, None)), {}, [0, 1, 2, 3]),
    ],
)
def test_the_bars_of_the_long_run(tmp_path, change, how, missed):
    made = [row | ({"mismatch/k3": 1e-3} if row["step"] else {}) for row in rows(**GOOD)]
    change(made)
    keep(tmp_path, "main", of=made, **how)
    (read,) = reproduce.kept_runs(tmp_path)["main"]
    assert [number for number, bar in enumerate(reproduce.bars(read)) if not bar.met] == missed
    assert [line.startswith("NOT MET: ") for line in reproduce.bar_lines(read)] == [number in missed for number in range(4)]


def test_the_bars_stand_below_the_table_and_are_printed(tmp_path, capsys):
    keep(tmp_path / "out", "main")
    reproduce.main(only_draw=True, out=tmp_path / "out", page=tmp_path / "docs" / "page.md")
    printed, page = capsys.readouterr().out, (tmp_path / "docs" / "page.md").read_text()
    line = "NOT MET: at least 150 steps in one run of at most 9 minutes, engine start included (12 steps in 100 s)"
    assert f"main-0: {line}\n" in printed and f"\n- {line}\n" in page
    assert "- met: held-out success rises by at least 0.3 over the warm start (0.300 -> 0.900, after step 12)\n" in page


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"steps": 13}, ["Made with other values"]),
        ({"made_from": ["x.toml", "--rl.lr=1.0", "--diagnose.ignore_sinks=true"]}, ["Made with other values"]),
        ({"warm": "another"}, ["Begun from different warm starts"]),
    ],
)
def test_runs_that_differ_in_more_than_the_question_are_said(tmp_path, changed, words):
    sinks = {"made_from": ["x.toml", *reproduce.SETTINGS["sinks-ignored"].flags]} | changed
    dense = {"made_from": ["x.toml", "--model.num_local_experts=2", *reproduce.DENSE_RATES], "warm": "of its own"}
    keep(tmp_path / "out", "all-on")
    keep(tmp_path / "out", "dense", **dense)
    keep(tmp_path / "out", "sinks-ignored", **sinks)
    reproduce.draw(tmp_path / "out", tmp_path / "page.md")
    blocks = (tmp_path / "page.md").read_text().split("## ")[1:]
    assert [words_ for words_ in ("Made with other values", "Begun from different warm starts") if words_ in blocks[0]] == words
    assert "**" not in blocks[1], "a dense model has a warm start, sizes and learning rates of its own"


def test_each_seed_has_a_warm_start_of_its_own_and_all_its_runs_the_same(tmp_path):
    for seed, warm in ((0, "a"), (1, "b")):
        for name in ("all-on", "sinks-untrained"):
            keep(tmp_path / "out", name, seed=seed, warm=warm)
    reproduce.draw(tmp_path / "out", tmp_path / "page.md")
    assert "**" not in (tmp_path / "page.md").read_text()
    keep(tmp_path / "out", "sinks-untrained", seed=1, warm="a")
    reproduce.draw(tmp_path / "out", tmp_path / "page.md")
    assert "warm starts of a seed:** all-on-0, sinks-untrained-0; all-on-1; sinks-untrained-1." in (tmp_path / "page.md").read_text()


def test_the_timeline_of_a_traced_long_run_is_kept_and_drawn_again(tmp_path, calls, monkeypatch):
    run_it = reproduce.gptoss

    def traced(of, arguments, log, slot):
        code = run_it(of, arguments, log, slot)
        if arguments[0] == "train":
            folder = of.runs / "main-0" / FOLDER
            folder.mkdir()
            spans = [
                ("step 1", 0, 100),
                ("step 2", 1000, 1000),
                ("rollout", 1000, 600),
                ("sync", 1600, 50),
                ("in it", 1660, 200),
                ("update", 1650, 300),
                ("pack", 1950, 10),
            ]
            lines = [json.dumps([name, 1000 * start, 1000 * length, False]) + "\n" for name, start, length in spans]
            (folder / "driver.jsonl").write_text("".join(lines))
            (folder / "engine-0.jsonl").write_text('["turn", 1100000, 200000, true]\n')
        return code

    monkeypatch.setattr(reproduce, "gptoss", traced)
    assert reproduce.run_all(plan(tmp_path, flags=["--run.trace_steps=1"]), ["main"], [0]) == []
    out, page = tmp_path / "out", tmp_path / "page.md"
    trace = json.loads(gzip.decompress((out / "main-0.trace.json.gz").read_bytes()))
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"} == {"step 2", "rollout", "sync", "update", "in it", "pack"}
    page.write_text("# Title\n\n<!-- timeline: made by tools/reproduce.py -->\n<!-- timeline: end -->\n\nThe end.\n")
    reproduce.draw(out, page)
    text = page.read_text()
    assert "the three largest parts are: rollout 600 ms (60%), update 300 ms (30%), sync 50 ms (5%)." in text
    assert text.index("rollout        ") < text.index("The end.") and text.count("side by side") == 1


def test_an_empty_folder_is_said(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        reproduce.main(only_draw=True, out=tmp_path, page=tmp_path / "page.md")
    assert "keeps no runs yet" in capsys.readouterr().err


def test_the_kept_runs_make_the_figures_and_tables_of_the_page(tmp_path):
    """What is committed: every question with runs gets a figure with data in it, and the page's tables are theirs."""
    folder, page = ROOT / "docs" / "reproduction", ROOT / "docs" / "reproduction.md"
    runs = reproduce.kept_runs(folder)
    assert {"main", *reproduce.chosen("")} <= {*runs}, "every setting that is made when none is named is kept"
    copy = tmp_path / "docs" / "reproduction"
    copy.mkdir(parents=True)
    for file in (*folder.glob("*.jsonl"), *folder.glob("*.gz")):
        (copy / file.name).write_bytes(file.read_bytes())
    (copy.parent / "reproduction.md").write_text(page.read_text())
    figures = reproduce.draw(copy, copy.parent / "reproduction.md")
    assert figures and all(figure.stat().st_size > 20_000 for figure in figures)
    assert {figure.name for figure in figures} == {file.name for file in folder.glob("*.png")}
    assert (copy.parent / "reproduction.md").read_text() == page.read_text(), "python tools/reproduce.py --draw makes the page anew"
    for figure in figures:
        shown = [name for name in reproduce.QUESTIONS[figure.stem].settings if name in runs]
        drawn = draw_curves(
            "", {reproduce.SETTINGS[n].words: [k.rows for k in runs[n]] for n in shown}, reproduce.PANELS, tmp_path / "x.png"
        )
        assert [ax.get_title() for ax in drawn.axes] == [panel.title for panel in reproduce.PANELS]
        assert all(drawn.axes[number].lines for number in (0, 2, 3)), "reward, gradient norm and entropy are measured in every run"
        assert [t.get_text() for t in drawn.legends[0].get_texts()] == [reproduce.SETTINGS[n].words for n in shown]


def test_when_nothing_could_be_made_the_reason_is_said_and_not_that_there_is_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "run_all", lambda *_: ["warm-moe, seed 0, ended with 2, and no run can begin from it: no GPU"])
    with pytest.raises(typer.Exit) as ended:
        reproduce.main(SMALL, only="a", seeds="0", out=tmp_path / "out", page=tmp_path / "page.md", runs=tmp_path / "runs")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "warm-moe, seed 0, ended with 2, and no run can begin from it: no GPU\n"
