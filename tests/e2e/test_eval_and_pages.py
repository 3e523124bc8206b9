"""`gptoss eval` of every kind of weights, and what can be read of a run: its scores, its page, its plain text."""

import json
import math
import re
import subprocess
import sys

import pytest

from megatron_gptoss.obs.rollouts_page import blocks_of
from megatron_gptoss.rollout.scores import read_scores
from tests.helpers.runs import CONFIGS, ROOT, SMALL, metrics, must

EVAL = [*CONFIGS, str(ROOT / "configs" / "deterministic.toml"), "--eval.prompts=4", "--eval.samples_per_prompt=2"]
PER_TOKEN = ("token_ids", "sampled", "logp")


def view(*arguments: object) -> str:
    tool = [sys.executable, str(ROOT / "tools" / "view_rollouts.py"), *map(str, arguments)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(warm, tmp_path_factory):
    """The same weights as a run directory, as one checkpoint and as a Hugging Face folder: kind -> run directory of its evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    must("convert", str(warm), str(folder / "hf"), "--to", "hf", cwd=folder)
    (checkpoint,) = sorted((warm / "checkpoints").glob("step-*"))[-1:]
    kinds = {"run": warm, "checkpoint": checkpoint, "hf": folder / "hf"}
    texts = {kind: must("eval", *EVAL, f"--run.id={kind}", "--init", str(path), cwd=folder) for kind, path in kinds.items()}
    return {kind: (folder / "runs" / f"demo-{kind}", text) for kind, text in texts.items()}


def test_any_kind_of_checkpoint_is_evaluated_and_the_same_weights_say_the_same(evaluated):
    found = {kind: lines(run / "rollouts" / "eval-step-0.jsonl") for kind, (run, _) in evaluated.items()}
    assert len(found["run"]) == 8
    assert found["checkpoint"] == found["run"]
    assert [[r[name] for name in PER_TOKEN] for r in found["hf"]] == [[r[name] for name in PER_TOKEN] for r in found["run"]]


def test_file_table_metrics_and_archive_of_an_evaluation_agree(evaluated):
    run, text = evaluated["run"]
    result, row = json.loads((run / "eval.json").read_text()), metrics(run)[0]
    rollouts = lines(run / "rollouts" / "eval-step-0.jsonl")
    assert (result["prompts"], result["samples_per_prompt"], list(result["pass_at"])) == (4, 2, ["1", "2"])
    successes = [sum(r["reward"] >= 1 for r in rollouts if r["group"] == group) for group in range(4)]
    assert [each["successes"] for each in result["per_prompt"]] == successes
    mean, both = result["pass_at"]["1"], result["pass_at"]["2"]
    assert mean["value"] == sum(successes) / 8 and both["value"] == sum(c > 0 for c in successes) / 4
    shares = [c / 2 - mean["value"] for c in successes]
    assert mean["standard_error"] == pytest.approx(math.sqrt(sum(x * x for x in shares) / 3 / 4))
    assert (row["eval/pass_at_2"], row["eval/pass_at_1_se"]) == (both["value"], mean["standard_error"])
    assert re.search(rf"pass@1 +{mean['value']:.3f}\b", text) and re.search(r"a success is +reward >= 1\b", text)
    ids = {r["prompt_id"] for r in rollouts}
    assert len(ids) == 4 and len({tuple(r["token_ids"]) for r in rollouts}) > 4, "two rollouts of a prompt are two, with seeds of their own"


@pytest.fixture(scope="module")
def trained(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    # Two trainer ranks: each knows the scores of its own samples.
    must("train", *CONFIGS, *SMALL, "--run.steps=2", "--parallel.data=2", "--run.id=t", "--init", str(warm), cwd=folder)
    return folder / "runs" / "demo-t"


def test_the_scores_of_a_step_are_those_its_metrics_were_made_of(trained):
    for step in (1, 2):
        archive = lines(trained / "rollouts" / f"step-{step}.jsonl")
        scores = read_scores(trained / "rollouts" / f"step-{step}.scores.jsonl")
        row, gaps = metrics(trained)[step], []
        assert len(scores) == len(archive) == 16
        for r in archive:
            engine = [x for x, flag in zip(r["logp"], r["sampled"], strict=True) if flag]
            gaps += [a - b for a, b in zip(scores[f"{r['prompt_id']}#{r['index']}"].trainer_logp, engine, strict=True)]
        assert max(map(abs, gaps)) == pytest.approx(row["mismatch/logp_abs_max"], rel=1e-3)
        assert sum(map(abs, gaps)) / len(gaps) == pytest.approx(row["mismatch/logp_abs_mean"], rel=1e-3)
        by_group = {}
        for r in archive:
            by_group.setdefault(r["group"], []).append((r["reward"], scores[f"{r['prompt_id']}#{r['index']}"].advantage[0]))
        for group in by_group.values():
            assert sum(a for _, a in group) == pytest.approx(0.0, abs=1e-5), "GRPO's advantages of a group add up to nothing"
            assert sorted(group) == sorted(group, key=lambda pair: pair[1]) or len({r for r, _ in group}) == 1


def test_every_token_of_the_run_is_on_its_page_once(trained):
    said = view(trained, "--html")
    page = trained / "rollouts.html"
    assert str(page) in said
    data = dict(blocks_of(page.read_text()))
    archives = {f"train-{step}": f"step-{step}.jsonl" for step in (1, 2)} | {f"eval-{step}": f"eval-step-{step}.jsonl" for step in (0, 2)}
    assert set(data) == {"run", "pieces", *archives}
    for key, name in archives.items():
        written = [r["token_ids"] for r in lines(trained / "rollouts" / name)]
        shown = [[data["pieces"][number][0] for number in r["t"]] for group in data[key]["groups"] for r in group["rollouts"]]
        assert shown == written
    assert {step["key"]: step["scored"] for step in data["run"]["steps"]} == {key: key.startswith("train") for key in archives}


def test_plain_text_shows_what_was_asked_for(trained):
    archive = lines(trained / "rollouts" / "step-1.jsonl")
    text = view(trained, "--step", 1, "--n", 99, "--reward", 0)
    wrong = [r for r in archive if r["reward"] == 0]
    assert text.count("\n== ") + text.startswith("== ") == len(wrong)
    assert f"{len(wrong)} of {len(wrong)} shown; 16 conversations" in text and "\x1b" not in text
    for r in wrong:
        assert f"== {r['prompt_id']} #{r['index']}, " in text
    numbers = view(trained, "--step", 1, "--n", 1, "--tokens")
    assert sum(line.split()[2:3] == ["0"] for line in numbers.splitlines()) == sum(archive[0]["sampled"])
