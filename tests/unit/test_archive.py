"""Laws of the archive: what is read is what was written, and what is wrong says where."""

import errno
import json
import math
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import DataError, MachineError
from megatron_gptoss.loop import archiving
from megatron_gptoss.rollout.archive import read_archive, write_archive
from megatron_gptoss.rollout.scores import scores_beside, write_scores
from megatron_gptoss.rollout.versions import runs_of
from megatron_gptoss.types import Prompt, RewardPart, Rollout, RolloutGroup, SampleScores, VersionRun

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(["\ud800", "\u2028", "\n", '"'])
NUMBERS = st.floats(allow_nan=False)


@st.composite
def rollouts(draw, prompt: Prompt):
    tokens = draw(st.lists(st.tuples(st.integers(0, 600), st.booleans(), NUMBERS), min_size=1, max_size=12))
    sampled = (False, *(flag for _, flag, _ in tokens[1:]))
    return Rollout(
        prompt=prompt,
        index=draw(st.integers(0, 20)),
        token_ids=tuple(token for token, _, _ in tokens),
        sampled=sampled,
        logp=tuple(number if flag else 0.0 for (_, _, number), flag in zip(tokens, sampled, strict=True)),
        versions=runs_of((draw(st.integers(0, 9)), 1) for flag in sampled if flag),
        num_tool_calls=draw(st.integers(0, 5)),
        stop_reason=draw(st.sampled_from(["final", "length"])),
        answer=draw(st.none() | ANY_TEXT),
        reward=draw(NUMBERS),
        reward_parts=tuple(draw(st.lists(st.builds(RewardPart, ANY_TEXT, NUMBERS), max_size=2))),
        labels=tuple(draw(st.lists(ANY_TEXT, max_size=2))),
    )


@st.composite
def groups(draw):
    prompt = draw(st.builds(Prompt, ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_TEXT))
    return RolloutGroup(prompt, tuple(draw(st.lists(rollouts(prompt), min_size=1, max_size=3))))


@settings(max_examples=80)
@given(st.lists(groups(), max_size=4))
def test_reading_gives_back_what_was_written(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("archive") / "step-1.jsonl"
    write_archive(path, 1, written, TINY)
    assert read_archive(path) == written
    # == says that 0.0 equals -0.0; the sign must survive too.
    signs = [[math.copysign(1.0, x) for g in gs for r in g.rollouts for x in r.logp] for gs in (written, read_archive(path))]
    assert signs[0] == signs[1]


PROMPT = Prompt("arithmetic/train/1", "arithmetic", "(37+58)*4", "380")
ROLLOUT = Rollout(
    prompt=PROMPT,
    index=0,
    token_ids=(1, 8, 6),
    sampled=(False, True, True),
    logp=(0.0, -0.1, -1e-300),
    versions=(VersionRun(4, 2),),
    num_tool_calls=0,
    stop_reason="final",
    answer="380",
    reward=1.0,
    reward_parts=(RewardPart("right", 1.0),),
    labels=("no-call", "right"),
)


TWO_TURNS = replace(
    ROLLOUT, token_ids=(1, 8, 6, 2, 3), sampled=(False, True, True, False, True), logp=(0.0, -0.1, -0.2, 0.0, -0.3),
    versions=(VersionRun(4, 3),),
)  # fmt: skip


def test_a_line_is_a_line_to_every_program(tmp_path):
    text = "next\x85line, line\u2028 and paragraph\u2029 and \x0b \x0c \x1c \r ends"
    odd = replace(ROLLOUT, prompt=replace(PROMPT, text=text))
    write_archive(tmp_path / "a.jsonl", 0, [RolloutGroup(odd.prompt, (odd,))], TINY)
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == text


def test_two_groups_of_one_prompt_stay_two(tmp_path):
    two = [RolloutGroup(PROMPT, (ROLLOUT, replace(ROLLOUT, index=1))), RolloutGroup(PROMPT, (ROLLOUT,))]
    write_archive(tmp_path / "a.jsonl", 0, two, TINY)
    assert read_archive(tmp_path / "a.jsonl") == two


def test_a_person_can_read_it(tmp_path):
    write_archive(tmp_path / "rollouts" / "step-7.jsonl", 7, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)  # makes the folder
    (line,) = (tmp_path / "rollouts" / "step-7.jsonl").read_text().splitlines()
    read = json.loads(line)
    assert read["text"] == TINY.decode((1, 8, 6))
    wanted = {"step": 7, "prompt": "(37+58)*4", "gold": "380", "answer": "380", "reward": 1.0, "stop_reason": "final"}
    wanted |= {
        "sampled": [0, 1, 1],
        "versions": [[4, 2]],
        "reward_parts": [{"name": "right", "value": 1.0}],
        "labels": ["no-call", "right"],
    }
    assert {key: read[key] for key in wanted} == wanted


def test_scores_of_rollouts_that_are_replaced_go_with_them(tmp_path):
    """A resumed run does steps again. Of as many tokens, old scores would be shown as if they were the new rollouts'."""
    path = tmp_path / "step-7.jsonl"
    write_archive(path, 7, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    write_scores(scores_beside(path), 7, [SampleScores("arithmetic/train/1#0", (1.0, 1.0), (-0.1, -0.2))])
    write_archive(tmp_path / "step-8.jsonl", 8, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    assert scores_beside(path).exists()
    write_archive(path, 7, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step-7.jsonl", "step-8.jsonl"]


def test_an_old_archive_has_a_version_an_assistant_turn(tmp_path):
    path = tmp_path / "a.jsonl"
    write_archive(path, 0, [RolloutGroup(PROMPT, (TWO_TURNS,))], TINY)
    line = json.loads(path.read_text())
    for versions, runs in (
        ([4, 4], (VersionRun(4, 3),)),
        ([4, 5], (VersionRun(4, 2), VersionRun(5, 1))),
        ([4, 4, 4], (VersionRun(4, 3),)),  # a third turn that was aborted before its first token
    ):
        path.write_text(json.dumps(line | {"versions": versions}))
        assert read_archive(path)[0].rollouts[0] == replace(TWO_TURNS, versions=runs)


def test_numbers_that_are_not_finite_are_kept_in_strict_json(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    odd = replace(ROLLOUT, logp=(0.0, float("nan"), float("-inf")), reward=float("inf"))
    write_archive(tmp_path / "a.jsonl", 0, [RolloutGroup(PROMPT, (odd,))], TINY)
    json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=refuse)
    read = read_archive(tmp_path / "a.jsonl")[0].rollouts[0]
    assert math.isnan(read.logp[1])
    assert (read.logp[2], read.reward) == (-math.inf, math.inf)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "step-1.jsonl"
    write_archive(path, 1, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"group 1 .* has no rollouts"):
        write_archive(path, 1, [RolloutGroup(PROMPT, (ROLLOUT,)), RolloutGroup(PROMPT, ())], TINY)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_machine_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step-1.jsonl"
    write_archive(path, 1, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"step-1\.jsonl cannot be written: No space left on device\. .* MiB are free in "):
        write_archive(path, 1, [RolloutGroup(PROMPT, (ROLLOUT,))], TINY)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_it_is_written_beside_the_step_and_whole_before_the_step_is_recorded(tmp_path, monkeypatch):
    """Archiving: a step goes on meanwhile, hears what went wrong at its end, and a run that ends early still has what it planned."""
    go_on, begun = threading.Event(), []

    def slow(path, *rest):
        begun.append(path)
        assert go_on.wait(30)
        write_archive(path, *rest)

    monkeypatch.setattr(archiving, "write_archive", slow)
    first, second, third, fourth = (tmp_path / f"step-{step}.jsonl" for step in (1, 2, 3, 4))
    groups, said = [RolloutGroup(PROMPT, (ROLLOUT,))], []
    console: Any = SimpleNamespace(say=said.append)
    with ExitStack() as ending:
        it = archiving.Archiving(ending, console)
        it.begin()  # nothing was planned
        it.finish()
        it.plan(first, 1, groups, TINY)
        assert begun == []  # the trainer has no work yet
        it.begin()
        assert not first.exists()  # it waits, and this goes on
        go_on.set()
        it.finish()
        assert read_archive(first) == groups
        it.plan(second, 2, [RolloutGroup(PROMPT, ())], TINY)
        with pytest.raises(ValueError, match="has no rollouts"):
            it.finish()  # also of a step that gave the trainer nothing to do
        it.finish()  # said once
        go_on.clear()
        it.plan(third, 3, groups, TINY)
        it.begin()
        threading.Timer(0.2, go_on.set).start()
    assert read_archive(third) == groups
    assert begun == [first, second, third] and {path.name for path in tmp_path.iterdir()} == {first.name, third.name} and not said
    with ExitStack() as ending:  # a run that failed before its trainer was asked
        archiving.Archiving(ending, console).plan(fourth, 4, [RolloutGroup(PROMPT, ())], TINY)
    assert begun[3:] == [fourth] and said == [
        "ValueError: group 0 (arithmetic/train/1) has no rollouts, and a file of rollouts cannot hold it"
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line[: len(line) // 2], r"a.jsonl:2: this line is not JSON"),
        (lambda line: "{}", r"a.jsonl:2: this line is not a rollout: the field '\w+' is missing"),
        (lambda line: line.replace('"sampled":[0,1,1]', '"sampled":[0,1]'), r"a.jsonl:2: .*3 tokens, 2 flags"),
        (lambda line: line.replace('"logp":[0.0', '"logp":["zero"'), r"a.jsonl:2: .*could not convert string to float"),
        (lambda line: line.replace('"logp":[0.0', '"logp":[[0.0]'), r"a.jsonl:2: this line is not a rollout"),
        (lambda line: line.replace('"versions":[[4,2]]', '"versions": [[4, 1]]'), r"a.jsonl:2: .*2 sampled tokens, but policy versions"),
        (lambda line: line.replace('"versions":[[4,2]]', '"versions": [[4, 1], [4, 1]]'), r"a.jsonl:2: .*neighbours of one policy"),
        (lambda line: line.replace('"versions":[[4,2]]', '"versions": [4, 4, 4]'), r"a.jsonl:2: .*3 policy versions for 1 assistant"),
        (lambda line: line.replace("(37+58)*4", "(37+58)*5"), r"a.jsonl:2: .*group 0 has rollouts of two prompts"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, damage, message):
    path = tmp_path / "a.jsonl"
    write_archive(path, 0, [RolloutGroup(PROMPT, (ROLLOUT, replace(ROLLOUT, index=1)))], TINY)
    first, second = path.read_text().splitlines()
    assert damage(second) != second
    path.write_text(first + "\n" + damage(second) + "\n")
    with pytest.raises(DataError, match=message):
        read_archive(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl cannot be read"):
        read_archive(tmp_path / "nothing.jsonl")
