"""tools/compare_logprobs.py and tools/compare_runs.py on inputs made by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from megatron_gptoss.config.load import dump, load
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.model import reference
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.rollout.versions import runs_of
from megatron_gptoss.types import Prompt, RewardPart, Rollout, RolloutGroup
from tests.helpers.checkpoints import write_source
from tests.helpers.tiny_model import TINY, strong_tensors

ROOT = Path(__file__).parents[2]


def tool(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


logprobs, runs = tool("compare_logprobs"), tool("compare_runs")

# ---- log-probs ----------------------------------------------------------------------------------------------------------------------


def rollout(index, ids, sampled, logp):
    return Rollout(
        prompt=Prompt("p", "arithmetic", "1+1", "2"), index=index, token_ids=tuple(ids), sampled=tuple(sampled), logp=tuple(logp),
        versions=runs_of([(0, sum(sampled))]), num_tool_calls=0, stop_reason="final", answer="2", reward=1.0,
        reward_parts=(RewardPart("right", 1.0),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load([ROOT / "configs" / "tiny.toml"]).config)


@pytest.fixture(scope="module")
def weights():
    return {name: (0.5 * x if "norm" not in name else x) for name, x in strong_tensors(TINY, seed=3)}


@pytest.fixture
def archive(tmp_path, tokenizer, weights):
    """Two rollouts whose archived log-probs are the reference model's at temperature 0.7, but for one token: there it is 0.25 lower."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index, n in enumerate((30, 17)):
        ids = torch.randint(0, TINY.vocab_size, (n,), generator=generator).tolist()
        sampled = [t > n // 2 for t in range(n)]
        logp = [0.0, *reference.log_probs(weights, TINY, ids, temperature=0.7).tolist()]
        logp = [lp if yes else 0.0 for lp, yes in zip(logp, sampled, strict=True)]
        if index == 0:
            logp[20] -= 0.25
        made.append(rollout(index, ids, sampled, logp))
    path = tmp_path / "step-1.jsonl"
    write_archive(path, 1, [RolloutGroup(made[0].prompt, tuple(made))], tokenizer)
    return path, made


@pytest.fixture
def folder(tmp_path, weights):
    from megatron_gptoss.checkpoint.hf_files import write_hf_folder

    write_hf_folder(tmp_path / "hf", TINY, weights.items())
    return tmp_path / "hf"


def printed(capsys, function, *arguments, **options):
    function(*arguments, **options)
    return capsys.readouterr().out


def compare_logprobs(a, b, **options):
    return logprobs.compare(a, b, **{"tokens": None, "temperature": 0.7, "most": 0, "worst": 3, "limit": 0.0, "picture": None} | options)


def test_an_archive_beside_the_weights_it_came_from_names_the_one_token_that_differs(archive, folder, capsys, tmp_path):
    path, made = archive
    out = printed(capsys, compare_logprobs, path, folder, picture=tmp_path / "gap.png")
    first = out[out.index("worst tokens") :].splitlines()[1]
    assert first.split()[0] == "2.50e-01" and "p#0 @20" in first and str(made[0].token_ids[20]) in first
    assert f"tokens {sum(sum(r.sampled) for r in made)}" in out
    assert (tmp_path / "gap.png").stat().st_size > 5000
    with pytest.raises(typer.Exit) as ended:
        compare_logprobs(path, folder, limit=0.2)
    assert ended.value.exit_code == 1
    assert "over the limit" in capsys.readouterr().out
    compare_logprobs(path, folder, limit=0.3)


def test_summary_by_hand():
    one = rollout(0, [1, 2, 3], [False, True, True], [0.0, -1.0, -2.0])
    rows = logprobs.rows_of([one], [[-1.0, -2.0]], [[-1.5, -2.0]])
    found = logprobs.summary(rows)
    assert [row.position for row in rows] == [1, 2]
    assert found["tokens"] == 2 and found["max |A - B|"] == 0.5 and found["mean |A - B|"] == 0.25
    assert found["k1"] == pytest.approx(0.25)
    assert found["k3"] == pytest.approx((math.exp(-0.5) + 0.5 - 1) / 2)


def test_a_gap_that_is_no_number_is_the_worst(tokenizer):
    one = rollout(0, [65, 66, 67], [False, True, True], [0.0, -1.0, -2.0])
    rows = logprobs.rows_of([one], [[-1.0, math.nan]], [[-9.0, -2.0]])
    first, second = logprobs.worst_words(rows, 2, tokenizer)
    assert "@2" in first and "@1" in second
    assert repr(tokenizer.decode([67])) in first and tokenizer.decode([65, 66]).strip() in first


def test_the_temperature_and_the_tokenizer_are_those_of_the_run(archive, folder, capsys, tmp_path):
    run = tmp_path / "runs" / "r"
    (run / "checkpoints").mkdir(parents=True)
    (run / "rollouts").mkdir()
    config = load([ROOT / "configs" / "tiny.toml"]).config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.7})})
    (run / "config.toml").write_text(dump(config))
    moved = archive[0].rename(run / "rollouts" / "step-1.jsonl")
    out = printed(capsys, compare_logprobs, moved, folder, temperature=0.0)
    assert "temperature 0.7" in out and ">>" in out, "the worst tokens come with their text"
    assert float(out[out.index("worst tokens") :].splitlines()[2].split()[0]) < 1e-5, "all but one agree"


def test_archives_of_other_tokens_and_missing_archives_are_refused(archive, folder, tmp_path, tokenizer):
    path, made = archive
    other = tmp_path / "step-2.jsonl"
    changed = replace(made[1], token_ids=(*made[1].token_ids[:-1], 3))
    write_archive(other, 2, [RolloutGroup(made[0].prompt, (made[0], changed))], tokenizer)
    with pytest.raises(DataError, match="has other tokens for p#1"):
        compare_logprobs(path, other)
    write_archive(other, 2, [RolloutGroup(made[0].prompt, (made[0],))], tokenizer)
    with pytest.raises(DataError, match="has no p#1"):
        compare_logprobs(path, other)
    with pytest.raises(ConfigError, match="--tokens"):
        compare_logprobs(folder, folder)
    assert all(row.gap == 0 for row in logprobs.rows_of(made, *[logprobs.archived(path, made)] * 2))
    compare_logprobs(folder, folder, tokens=path)


def test_stored_weights_are_the_tensors_of_the_folder_read_a_layer_at_a_time(tmp_path):
    from megatron_gptoss.checkpoint.stored import StoredWeights

    written = write_source(tmp_path / "source")
    stored = StoredWeights(tmp_path / "source")
    assert list(stored) == list(written) and len(stored) == len(written)
    for name in [*written, *reversed(written)]:
        assert torch.equal(stored[name], written[name]), name
        assert {n.split(".")[2] for n in stored._held if ".layers." in n} <= {*name.split(".")[2:3]}
    ids = list(range(20))
    assert torch.equal(reference.log_probs(stored, TINY, ids), reference.log_probs(written, TINY, ids))


def test_bins_begin_fine_and_grow():
    assert logprobs.edges(500, 128) == [0, 64, 128, 256, 512]


# ---- runs ---------------------------------------------------------------------------------------------------------------------------


def make_run(folder, name, rows, **rl):
    run = folder / name
    run.mkdir(parents=True)
    config = load([ROOT / "configs" / "tiny.toml"]).config
    changed = {"rl": config.rl.model_copy(update=rl), "run": config.run.model_copy(update={"id": name})}
    (run / "config.toml").write_text(dump(config.model_copy(update=changed)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def rows(reward, seconds):
    return [
        {
            "step": step,
            "time": seconds * step,
            "reward/mean": r,
            "grad/norm": 0.5,
            "time/step_s": seconds,
            "train/tokens_per_s": 1 / seconds,
        }
        for step, r in enumerate(reward, start=1)
    ]


def compare_runs(*paths, **options):
    return runs.compare(list(paths), **{"metrics": ",".join(runs.SHOWN), "picture": None} | options)


def test_runs_part_where_a_number_differs_and_clocks_do_not_count(tmp_path, capsys):
    a = make_run(tmp_path, "a", rows([0.1, 0.2, 0.3], 5.0), lr=1e-3)
    b = make_run(tmp_path, "b", rows([0.1, 0.25, 0.9], 7.0), lr=2e-3)
    c = make_run(tmp_path, "c", rows([0.1, 0.2], 9.0), lr=1e-3)
    out = printed(capsys, compare_runs, a, b, c, picture=tmp_path / "runs.png")
    assert "b differs from a from step 2 on: reward/mean 0.2 -> 0.25\n" in out
    assert "c is a to the last digit, over 2 steps that both made" in out
    assert [line.split() for line in out.splitlines() if line.strip().startswith("rl.lr")] == [["rl.lr", "0.001", "0.002", "0.001"]]
    assert "run.id" not in out
    # first, last, mean of the last five, steps
    assert ["reward/mean", "b", "0.1", "0.9", "0.4167", "3"] in [line.split() for line in out.splitlines()]
    assert (tmp_path / "runs.png").stat().st_size > 5000


def test_nan_equals_nan_and_a_metric_of_one_run_alone_is_no_difference(tmp_path):
    a = make_run(tmp_path, "a", [{"step": 1, "x": "nan", "y": 1.0}])
    b = make_run(tmp_path, "b", [{"step": 1, "x": "nan", "z": 2.0}])
    assert runs.first_difference(runs.read_run(a), runs.read_run(b)) is None
    assert runs.settings_that_differ([runs.read_run(a), runs.read_run(b)]) == {}


def test_what_is_no_run_or_no_metric_is_refused(tmp_path):
    a = make_run(tmp_path, "a", rows([0.1], 1.0))
    with pytest.raises(ConfigError, match="nothing to be compared with"):
        compare_runs(a)
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.toml"):
        compare_runs(a, tmp_path)
    with pytest.raises(ConfigError, match=r"no run has measured rewards\. There are: grad/norm, reward/mean"):
        compare_runs(a, a, metrics="reward/mean,rewards")
