"""What tools/bench_step.py counts, worked by hand; that the commands it names are plans that fit; and its task."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from megatron_gptoss.config.fit import does_not_fit
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.rules import broken_rules
from tests.helpers.runs import ROOT

TOOL = ROOT / "tools" / "bench_step.py"


@pytest.fixture(scope="module")
def bench():
    specification = importlib.util.spec_from_file_location("bench_step", TOOL)
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_step"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def named_commands():
    text = TOOL.read_text().split('"""')[1].replace("\\\\\n", " ")
    return [line.split("bench_step.py ")[1] for line in text.splitlines() if line.strip().startswith("python tools/")]


def config_of(bench, words):
    words = shlex.split(words)
    options = {"--length": 0, "--sequences": 0, "--group": 8}
    for name in options:
        if name in words:
            at = words.index(name)
            options[name] = int(words[at + 1])
            del words[at : at + 2]
    configs, flags = [str(ROOT / w) for w in words if w.endswith(".toml")], [w for w in words if not w.endswith(".toml")]
    return load(*parse_flags([*configs, *bench.step_flags(*options.values(), 3), *flags]))


@pytest.mark.parametrize("words", named_commands(), ids=range(len(named_commands())))
def test_the_commands_it_names_fit_and_can_run(bench, words):
    loaded = config_of(bench, words)
    assert broken_rules(loaded) == [] and does_not_fit(loaded) == ""
    gpus = 0 if loaded.config.cluster.device == "cpu" else 2 if "parallel.data=2 --parallel.expert=2" in words else 8
    plan = make_plan(loaded, Cluster(num_cpus=128, num_gpus=gpus))
    assert (plan.not_built, plan.shortfall) == ((), "")
    assert plan.groups_per_step * loaded.config.rollout.group_size == loaded.config.rl.sequences_per_step


def test_all_six_are_seen():
    assert len(named_commands()) == 6 and sum("20b.toml" in words for words in named_commands()) == 5


def test_a_step_by_hand(bench):
    """Steps of 10 and 14 s: 12. 1,000 and 3,000 tokens, sampled on four engines in 4 s: 125 a second each; 1,800 trained by two ranks in
    5 s: 180."""
    same = {"time/score_s": 2e-5, "time/update_s": 5.0, "time/sync_s": 1.0}
    rows = [
        {**same, "time/rollout_s": 3.0, "time/step_s": 10.0, "rollout/tokens": 1000, "train/tokens": 900},
        {**same, "time/rollout_s": 5.0, "time/step_s": 14.0, "rollout/tokens": 3000, "train/tokens": 2700},
    ]
    flags = ("--parallel.data=2", "--parallel.expert=2", "--rollout.num_engines=4")
    config = str(ROOT / "configs" / "20b.toml")
    apart = load(*parse_flags([config, *flags])).config
    rollout, update, sync, whole = bench.parts_of(rows, apart)
    assert (rollout.name, rollout.seconds, rollout.tokens_per_s) == ("rollout", 4.0, 125.0)
    assert (update.name, update.seconds, update.tokens_per_s) == ("update", 5.0, 180.0)
    assert (sync.name, sync.seconds, sync.tokens_per_s) == ("sync", 1.0, 0.0)
    assert (whole.seconds, whole.tokens_per_s) == (12.0, 1800 / 12 / 6)
    shared = load(*parse_flags([config, *flags[:2], "--rollout.num_engines=2", "--cluster.share_gpus=true"])).config
    assert bench.parts_of(rows, shared)[-1].gpus == 2
    ahead = [{**row, "time/rollout_s": 0.0, "time/wait_s": 2.0} for row in rows]
    beside, wait = bench.parts_of(ahead, apart)[:2]
    assert (beside.name, beside.seconds, beside.tokens_per_s) == ("rollouts, beside the rest", 12.0, 2000 / 12 / 4)
    assert (wait.name, wait.seconds, wait.tokens_per_s) == ("wait", 2.0, 0.0)


def test_half_of_what_ends_is_worth_something_and_splits_never_meet(bench):
    task = bench.make_task(None)
    prompts = task.prompts("train", 3, 4)
    assert len({p.id for p in (*prompts, *task.prompts("heldout", 3, 4))}) == 8
    ends = [task.begin(prompt).cut("length") for prompt in prompts]
    assert [end.reward for end in ends] == [0.0, 1.0, 0.0, 1.0] and ends[0].stop_reason == "length"


@pytest.mark.parametrize(
    ("words", "how", "message"),
    [
        ([], {}, "which configuration?"),
        (["configs/tiny.toml"], {"steps": 2, "skip": 2}, "--skip 2 leaves nothing of 2 steps to count. Use --skip 1 or less."),
        (["configs/tiny.toml", "--run.steps=1"], {}, "--skip 1 leaves nothing of 1 steps to count. Use --skip 0 or less."),
        (["configs/tiny.toml"], {"keep": Path("nowhere/found.json")}, "--json nowhere/found.json: the folder "),
        (["configs/tiny.toml", "--rollout.sizes=3"], {}, "unknown key 'rollout.sizes'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(bench, capsys, monkeypatch, words, how, message):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench, "train", lambda _: pytest.fail("it ran"))
    with pytest.raises(bench.typer.Exit) as ended:
        bench.main(words, **{"length": 8, "sequences": 8, "group": 4, "steps": 3, "skip": 1, "keep": None} | how)
    said = capsys.readouterr().err
    assert ended.value.exit_code and said.startswith(f"ConfigError: {message}") and said.count("\n") == 1
