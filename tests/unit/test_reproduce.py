"""tools/reproduce.py: its settings, what it keeps, what it makes again, and its figures. In: runs made up here, and those that are kept."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import pytest
import typer

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.obs.curves import Panel, draw_curves, mean_of_seeds

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


def keep(folder, name, seed=0, finished=True, **changed):
    return reproduce.Kept(name, seed, 12, finished, ["x.toml"], rows(**changed)).write(folder)


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
    file = reproduce.Kept("all-on", 1, 4, False, ["x.toml", "--a.b=1"], made).write(tmp_path)
    kept = reproduce.read_kept(file)
    assert (kept.setting, kept.seed, kept.steps, kept.finished, kept.made_from) == ("all-on", 1, 4, False, ["x.toml", "--a.b=1"])
    assert kept.rows[1]["reward/mean"] == pytest.approx(0.35)
    assert math.isnan(kept.rows[4]["grad/norm"]) and kept.rows[4]["mismatch/k3"] == 0.12346
    assert set().union(*kept.rows) <= set(reproduce.KEPT)


def test_only_a_finished_run_with_the_same_flags_is_done(tmp_path):
    of = plan(tmp_path)
    assert not reproduce.is_done(of, "none", 0)
    for finished, steps, flags, done in [
        (True, 60, of.made_from("none"), True),
        (False, 60, of.made_from("none"), False),
        (True, 30, of.made_from("none"), False),
        (True, 60, [*of.made_from("none"), "--rl.lr=1.0"], False),
    ]:
        reproduce.Kept("none", 0, steps, finished, flags, rows(2)).write(of.out)
        assert reproduce.is_done(of, "none", 0) == done


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
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
        return 0

    monkeypatch.setattr(reproduce, "gptoss", fake)
    return seen, fails


def names(seen):
    return [f"{a.split('=')[1]}" for call in seen for a in call if a.startswith("--run.name=")]


def test_seed_after_seed_from_one_warm_start_and_never_twice(tmp_path, calls):
    seen, _ = calls
    of = plan(tmp_path)
    assert reproduce.run_all(of, ["all-on", "none"], [0, 1]) == []
    assert names(seen) == ["warm-moe", "all-on", "none", "all-on", "none"]
    assert [a for a in seen[1] if "warm-moe-0" in a] and seen[1][0] == "train" and "--run.seed=0" in seen[1] and "--run.seed=1" in seen[3]
    assert reproduce.run_all(plan(tmp_path), ["all-on", "none"], [0, 1]) == []
    assert len(seen) == 5
    # Other flags: another run, beside the directory of the last one.
    assert reproduce.run_all(plan(tmp_path, flags=["--rl.lr=1e-5"]), ["none"], [0]) == []
    assert names(seen)[5:] == ["none"]
    assert (of.runs / "none-0.unfinished-1").is_dir()


def test_what_fails_is_said_and_the_rest_goes_on(tmp_path, calls):
    seen, fails = calls
    fails |= {"none", "warm-dense"}
    problems = reproduce.run_all(plan(tmp_path, jobs=2), ["all-on", "none", "dense"], [0])
    assert sorted(names(seen)) == ["all-on", "none", "warm-dense", "warm-moe"]
    assert [("none, seed 0: ended with 1" in p, "last words" in p) for p in problems if "warm" not in p.split()[0]] == [(True, True)]
    assert any(p.startswith("warm-dense ended with 1, and no run can begin from it") for p in problems)
    assert list(reproduce.kept_runs(tmp_path / "out")) == ["all-on"]


def test_no_run_begins_that_would_not_end_in_time(tmp_path, calls):
    seen, _ = calls
    of = plan(tmp_path, minutes=1)
    of.longest_s = 61.0
    assert reproduce.run_all(of, ["all-on"], [0]) == ["all-on, seed 0: no time left for it"]
    assert names(seen) == ["warm-moe"]


def test_a_child_is_ended_at_the_deadline(tmp_path, monkeypatch):
    of = plan(tmp_path, minutes=0.02)
    real = reproduce.subprocess.Popen
    monkeypatch.setattr(reproduce.subprocess, "Popen", lambda command, **how: real(["sleep", "60"], **how))
    began = time.monotonic()
    assert reproduce.gptoss(of, [], tmp_path / "log", 0) == -1
    assert time.monotonic() - began < 30


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
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["one", "other"]


def test_the_mean_of_seeds_is_over_steps_that_all_have():
    assert mean_of_seeds([[(1, 1.0), (2, 3.0), (3, 5.0)], [(2, 1.0), (3, 1.0)]]) == [(2, 2.0), (3, 3.0)]
    assert mean_of_seeds([]) == []


def test_the_page_keeps_what_a_person_wrote(tmp_path):
    folder, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("# Title\n\nBy hand.\n")
    for name in ("all-on", "sinks-ignored"):
        keep(folder, name)
        keep(folder, name, seed=1, finished=False)
    assert reproduce.draw(folder, page) == [folder / "b.png"]
    text = page.read_text()
    assert text.startswith("# Title\n\nBy hand.\n\n## (b) Sinks ignored")
    assert "| sinks ignored in the trainer | 0 1 | 12 12 (stopped) | 0.300 0.300 | 0.900 0.900 |" in text
    assert "![figure](out/b.png)" in text
    page.write_text(text.replace("<!-- b: end -->", "<!-- b: end -->\n\nIt fell."))
    keep(folder, "sinks-ignored", slope=0.0)
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


def test_an_empty_folder_is_said(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        reproduce.main(only_draw=True, out=tmp_path, page=tmp_path / "page.md")
    assert "keeps no runs yet" in capsys.readouterr().err


def test_the_kept_runs_make_the_figures_and_tables_of_the_page(tmp_path):
    """What is committed: every question with runs gets a figure with data in it, and the page's tables are theirs."""
    folder, page = ROOT / "docs" / "reproduction", ROOT / "docs" / "reproduction.md"
    runs = reproduce.kept_runs(folder)
    if not runs:
        pytest.skip("no runs are kept yet")
    copy = tmp_path / "docs" / "reproduction"
    copy.mkdir(parents=True)
    for file in folder.glob("*.jsonl"):
        (copy / file.name).write_text(file.read_text())
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
