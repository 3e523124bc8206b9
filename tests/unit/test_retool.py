"""Laws of mathematics with Python: programs run, what they print is no token that the model sampled, and the answer is rewarded."""

import asyncio
import json
import re
import shutil

import pytest

from megatron_gptoss.config.schema import Config, TaskConfig
from megatron_gptoss.data.harmony import Call, ParsedTurn
from megatron_gptoss.errors import DataError, MachineError
from megatron_gptoss.rollout.collect import CollectLimits, collect
from megatron_gptoss.tasks.base import Verdict
from megatron_gptoss.tasks.registry import make_task
from megatron_gptoss.tasks.retool import SAID_OF_AN_END, Retool, said_to_the_model
from megatron_gptoss.tasks.sandbox import ProgramResult, Sandbox, SandboxLimits
from tests.unit.test_collect import TINY, ScriptedPool

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not on this machine")
LIMITS = CollectLimits(max_turns=4, max_turn_tokens=300, max_sequence_tokens=4000, temperature=1.0, seeded=True)
CODE = "<|channel|>analysis to=python code<|message|>%s<|call|>"
FINAL = "<|channel|>final<|message|>So \\boxed{%s}.<|return|>"


def write(path) -> str:
    lines = [{"question": f"What is {n} squared?", "answer": f"{n * n}"} for n in range(100, 200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("retool") / "squares.jsonl")
    settings = TaskConfig(name="retool", path=path, sandbox_timeout_s=60.0, sandbox_modules="", check_timeout_s=60.0, reasoning="high")
    made = make_task(Config(task=settings))
    yield made
    made.close()


def run_it_then_answer(text: str) -> str:
    """A policy that trusts what its program printed, and nothing else."""
    printed = re.search(r"python to=assistant<\|channel\|>analysis<\|message\|>(\d+)<", text)
    problem = re.search(r"user<\|message\|>What is (\d+) squared", text)
    assert problem
    return (
        FINAL % printed[1] if printed else "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CODE % f"print({problem[1]} ** 2)"
    )


@needs_bwrap
def test_a_conversation_runs_its_program_and_is_rewarded_for_the_answer(task):
    pool = ScriptedPool(run_it_then_answer)
    groups = asyncio.run(collect(task.prompts("train", 0, 4), 2, pool, task, TINY, LIMITS, run_seed=0, step=0))
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert (rollout.reward, rollout.num_tool_calls, rollout.stop_reason) == (1.0, 1, "final")
        assert rollout.labels == ("called", "right")
        assert rollout.answer == rollout.prompt.gold
        # What the tool says is in the conversation, and is not trained.
        not_sampled = [t for t, s in zip(rollout.token_ids, rollout.sampled, strict=True) if not s]
        assert f"python to=assistant<|channel|>analysis<|message|>{rollout.prompt.gold}<|end|>" in TINY.decode(not_sampled)
        sampled = TINY.decode([t for t, s in zip(rollout.token_ids, rollout.sampled, strict=True) if s])
        assert sampled.count("<|call|>") == 1 and "python to=assistant" not in sampled


@needs_bwrap
def test_the_model_is_told_of_the_tool(task):
    system, developer, user = task.begin(task.prompts("heldout", 0, 1)[0]).opening()
    assert "Reasoning: high\n\n# Tools\n\n## python\n\n" in system.content
    assert "time out after 60 seconds.\n\n# Valid channels" in system.content
    assert "\\boxed{}" in developer.content and user.content.startswith("What is ")


@needs_bwrap
def test_parallel_calls_are_answered_in_order_and_programs_share_nothing(task):
    talk = task.begin(task.prompts("train", 0, 1)[0])
    calls = (Call("python", "x = 3; print(x)", "analysis"), Call("python", "print(x)", "commentary"))
    one, two = talk.reply(ParsedTurn("call", calls=calls))
    assert (one.content, one.author_name, one.channel, one.recipient) == ("3", "python", "analysis", "assistant")
    assert two.content.endswith("NameError: name 'x' is not defined") and two.channel == "commentary"
    assert talk.cut("max_turns").labels == ("called", "program-error")


@needs_bwrap
@pytest.mark.parametrize(
    ("turn", "reward", "labels", "stop_reason"),
    [
        (ParsedTurn("final", "\\boxed{@}", "final"), 1.0, ("no-call", "right"), "final"),
        (ParsedTurn("final", "\\boxed{@1}", "final"), 0.0, ("no-call", "wrong"), "final"),
        (ParsedTurn("final", "@", "final"), 0.0, ("no-call", "no-answer"), "final"),
        (ParsedTurn("call", "{}", "commentary", "functions.calc"), 0.0, ("no-call", "malformed"), "malformed"),
        (ParsedTurn("malformed", problem="truncated", calls=(Call("python", "1"),)), 0.0, ("no-call", "malformed"), "malformed"),
    ],
)  # fmt: skip
def test_verdicts(task, turn, reward, labels, stop_reason):
    prompt = task.prompts("train", 0, 1)[0]
    turn = ParsedTurn(turn.kind, turn.text.replace("@", prompt.gold), turn.channel, turn.recipient, problem=turn.problem, calls=turn.calls)
    verdict = task.begin(prompt).reply(turn)
    assert isinstance(verdict, Verdict)
    assert (verdict.reward, verdict.labels, verdict.stop_reason) == (reward, labels, stop_reason)


@needs_bwrap
def test_every_end_is_told_and_none_with_silence(task):
    for end in SAID_OF_AN_END:
        assert said_to_the_model(ProgramResult(end, "", 1.0), task.sandbox), end  # type: ignore[arg-type]
    assert said_to_the_model(ProgramResult("timeout", "1\n", 1.0), task.sandbox) == "1\n[stopped: the program ran for 60 s]"
    assert said_to_the_model(ProgramResult("ok", "1\n", 1.0), task.sandbox) == "1"


@needs_bwrap
def test_files(tmp_path):
    sandbox = Sandbox(SandboxLimits(), num_processes=1, modules=())
    try:
        path = tmp_path / "a.jsonl"
        path.write_text('{"question": "q", "answer": "It is so.\\n#### 7"}\n{"question": "r", "answer": "\\\\frac{1}{2}"}\n')
        task = Retool(sandbox, str(path), str(path))
        assert {p.gold for p in task.prompts("heldout", 0, 2)} == {"7", "\\frac{1}{2}"}
        path.write_text('{"question": "q", "answer": "#### "}\n')
        with pytest.raises(DataError, match=r"a.jsonl:1: the answer has no reference"):
            Retool(sandbox, str(path))
    finally:
        sandbox.close()


def test_without_bubblewrap_a_run_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MachineError, match=r"no bwrap on PATH"):
        make_task(Config(task=TaskConfig(name="retool", path=write(tmp_path / "a.jsonl"))))
