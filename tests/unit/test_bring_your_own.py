"""The user's task of docs/bring_your_own_task.md, as it stands there, and what is said of a task that cannot be loaded."""

import asyncio
import re
from pathlib import Path

import pytest

from megatron_gptoss.config.schema import Config, TaskConfig
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.rollout.collect import CollectLimits, collect
from megatron_gptoss.tasks.base import Task
from megatron_gptoss.tasks.registry import make_task
from tests.unit.test_collect import TINY, ScriptedPool

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_own_task.md"
LIMITS = CollectLimits(max_turns=3, max_turn_tokens=200, max_sequence_tokens=2000, temperature=1.0, seeded=True)
CALL = '<|channel|>commentary to=functions.spell <|constrain|>json<|message|>{"word":"%s"}<|call|>'


def named(name: str) -> Task:
    return make_task(Config(task=TaskConfig(name=name)))


@pytest.fixture
def letters(tmp_path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    path = tmp_path / "letters.py"
    path.write_text(code)
    return path


def spell_then_count(text: str) -> str:
    """A policy that calls the tool and counts in its answer."""
    letter, word = re.findall(r"How many (\w) are in (\w+)\?", text)[-1]
    spelled = re.search(r"functions.spell to=assistant<\|channel\|>commentary<\|message\|>([^<]*)<", text)
    return f"<|channel|>final<|message|>{spelled[1].split().count(letter)}<|return|>" if spelled else CALL % word


def test_the_page_s_task_runs_conversations_with_its_tool(letters):
    task = named(str(letters))
    prompts = task.prompts("train", 0, 6)
    groups = asyncio.run(collect(prompts, 2, ScriptedPool(spell_then_count), task, TINY, LIMITS, run_seed=0, step=0))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {(r.reward, r.num_tool_calls, r.stop_reason, r.labels) for r in rollouts} == {(1.0, 1, "final", ("right",))}
    for prompt in prompts:
        letter, word = re.findall(r"How many (\w) are in (\w+)\?", prompt.text)[0]
        assert prompt.gold == str(sum(c == letter for c in word))
        assert f"{' '.join(word)}<" in TINY.decode(next(r for r in rollouts if r.prompt == prompt).token_ids)
    assert task.prompts("train", 4, 2) == prompts[4:]
    assert not {p.text for p in task.prompts("train", 0, 200)} & {p.text for p in task.prompts("heldout", 0, 200)}
    task.close()


@pytest.mark.parametrize(
    ("said", "reward", "stop_reason"),
    [
        ("<|channel|>final<|message|>-1<|return|>", 0.0, "final"),
        ("<|channel|>commentary to=functions.spell<|message|>[1]<|call|>", 0.0, "malformed"),
        ("<|channel|>commentary<|message|>{}<|call|>", 0.0, "malformed"),
        ("<|channel|>analysis to=python code<|message|>1<|call|>", 0.0, "malformed"),
        (CALL % "a", 0.0, "max_turns"),
    ],
)
def test_what_the_page_s_task_says_of_bad_turns(letters, said, reward, stop_reason):
    task = named(str(letters))
    (group,) = asyncio.run(collect(task.prompts("train", 0, 1), 1, ScriptedPool(lambda _: said), task, TINY, LIMITS, run_seed=0, step=0))
    assert (group.rollouts[0].reward, group.rollouts[0].stop_reason) == (reward, stop_reason)


def test_a_module_and_another_function(letters, monkeypatch):
    letters.write_text(letters.read_text() + "\ndef other(config):\n    return make_task(config)\n")
    monkeypatch.syspath_prepend(letters.parent)
    for name in ("letters:other", f"{letters}:other", "letters:make_task"):
        assert named(name).prompts("train", 0, 1)[0].task == "letters"
    monkeypatch.chdir(letters.parent)
    assert named("letters.py").name == "letters"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (None, "@", r"there is no file .*mine.py\. Paths start from"),
        ("x = 1", "@", r"mine.py has no function make_task\(config\)"),
        ("def make_task(config): return 1", "@", r"make_task\(config\) returned has no name, prompts, epoch_size, begin, close"),
        ("1 / 0", "@", r"mine.py cannot be loaded: ZeroDivisionError: division by zero"),
        ("def f(:", "@", r"mine.py cannot be loaded: SyntaxError"),
        ("x = 1", "@:f", r"mine.py has no function f\(config\)"),
        (None, "no_such.module", r"no_such.module cannot be loaded: ModuleNotFoundError"),
        (
            None,
            "gsm9k",
            r"'gsm9k' is no task. Nearest: gsm8k. There are: arithmetic, gsm8k, retool, verify_if; or name a file .* ./gsm9k.py",
        ),
    ],
)
def test_a_task_that_cannot_be_loaded_says_why(tmp_path, code, name, message):
    path = tmp_path / "mine.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(ConfigError, match=message):
        named(name.replace("@", str(path)))
