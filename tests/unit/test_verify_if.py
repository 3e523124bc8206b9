"""Laws of verifiable instructions: verdicts are the reference checker's, what cannot be checked is said before a run. In: shared/data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gptoss.config.schema import Config, TaskConfig
from megatron_gptoss.data.harmony import ParsedTurn
from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.tasks.registry import make_task
from megatron_gptoss.tasks.verify_if import Followed, InstructionChecker, VerifyIf
from megatron_gptoss.types import Prompt, RewardPart
from tests.helpers.shared_data import FOLDER, shared_file

WORKER = Path(__file__).parents[2] / "megatron_gptoss" / "tasks" / "if_worker.py"


def nltk_data() -> str:
    shared_file("nltk_data/corpora/stopwords/english")  # skips without it
    return str(FOLDER / "nltk_data")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in shared_file(name).read_text(encoding="utf-8").splitlines()]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def checker():
    made = InstructionChecker(timeout_s=60.0, nltk_data=nltk_data())
    yield made
    made.close()


def test_all_290_published_verdicts_strict_and_loose(checker):
    asked = {row["prompt"]: row for row in rows("ifbench_test.jsonl")}
    judged = 0
    for said, strict, loose in zip(*(rows(f"ifbench_{n}.jsonl") for n in ("sample_output", "eval_strict", "eval_loose")), strict=True):
        assert said["prompt"] == strict["prompt"] == loose["prompt"]
        if (row := asked.get(said["prompt"])) is not None:
            found = checker.check(row["instruction_id_list"], row["kwargs"], row["prompt"], said["response"])
            reference = Followed(tuple(strict["follow_instruction_list"]), tuple(loose["follow_instruction_list"]))
            assert found == reference, (row["key"], row["instruction_id_list"])
            judged += 1
    assert judged == 290


@pytest.mark.parametrize(
    ("instruction", "kwargs", "response", "strict", "loose"),
    [
        ("punctuation:no_comma", {}, "No pause at all.", True, True),
        ("punctuation:no_comma", {}, "Well, one.", False, False),
        ("punctuation:no_comma", {}, "Sure, here it is:\nNo pause at all.", False, True),  # loose forgives a first line
        ("startend:quotation", {}, '**"Quoted."**', False, True),  # and asterisks
        ("keywords:frequency", {"keyword": "owl", "frequency": 2, "relation": "at least"}, "An owl. An owl.", True, True),
        ("keywords:frequency", {"keyword": "owl", "frequency": 2, "relation": "at least"}, "An owl.", False, False),
        ("count:word_count_range", {"min_words": 3, "max_words": 4}, "one two three", True, True),
        ("count:word_count_range", {"min_words": 3, "max_words": 4}, "one two", False, False),
        ("punctuation:no_comma", {}, "", False, False),
    ],
)
def test_verdicts_by_hand(checker, instruction, kwargs, response, strict, loose):
    """IFEval's and IFBench's instructions, whose meaning a person can check."""
    assert checker.check([instruction], [kwargs], "p", response) == Followed((strict,), (loose,))


def test_a_checker_that_fails_is_named_and_others_are_judged(checker):
    found = checker.check(["count:word_count_range", "punctuation:no_comma"], [{"nonsense": 1}, {}], "p", "x")
    assert found == Followed((False, True), (False, True), "checker-error")


def test_a_check_past_its_deadline_follows_nothing():
    checker = InstructionChecker(timeout_s=0.2, nltk_data=nltk_data())
    try:
        assert checker.check(["words:start_verb"], [{}], "p", "x " * 300_000) == Followed((False,), (False,), "timeout")
    finally:
        checker.close()


def test_without_nltk_data_one_message_says_what_to_fetch_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where NLTK looks by itself
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        make_task(Config(task=TaskConfig(name="verify_if", path=path, nltk_data=str(tmp_path / "empty"))))
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "-m nltk.downloader -d FOLDER punkt_tab averaged_perceptron_tagger_eng stopwords",
        "task.nltk_data",
        str(tmp_path / "empty"),
    ):
        assert part in message


def test_the_checkers_open_no_connection():
    """A process that may open no socket judges all the same, and Hugging Face's datasets are never imported."""
    guard = (
        "import runpy, socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('socket')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "sys.modules['datasets'] = None\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    )
    request = json.dumps({"instructions": ["punctuation:no_comma"], "kwargs": [{}], "prompt": "p", "response": "x"})
    run = subprocess.run(
        [sys.executable, "-c", guard], input=request + "\n", capture_output=True, text=True, timeout=120, env={"NLTK_DATA": nltk_data()}
    )
    assert [json.loads(line) for line in run.stdout.splitlines()] == [{"ready": True}, {"strict": [True], "loose": [True], "errors": []}]


def one_prompt(**kwargs) -> Prompt:
    gold = {"instructions": ["punctuation:no_comma", "count:word_count_range"], "kwargs": [{}, {"min_words": 2, "max_words": 9}]}
    return Prompt("p", "verify_if", "Say hello.", json.dumps(gold | kwargs))


@pytest.mark.parametrize(
    ("judging", "partial", "text", "reward", "labels"),
    [
        ("strict", False, "Hello you", 1.0, ("strict", "loose")),
        ("strict", False, "Hello, you", 0.0, ()),
        ("strict", True, "Hello, you", 0.5, ()),
        ("strict", False, "Well, then\nHello you", 0.0, ("loose",)),
        ("strict", True, "Well, then\nHello you", 0.5, ("loose",)),
        ("loose", False, "Well, then\nHello you", 1.0, ("loose",)),
    ],
)
def test_rewards(tmp_path, judging, partial, text, reward, labels):
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})
    task = VerifyIf(path, judging=judging, partial=partial, nltk_data=nltk_data(), check_timeout_s=60.0)
    try:
        verdict = task.begin(one_prompt()).reply(ParsedTurn("final", text, "final"))
        assert (verdict.reward, verdict.labels, verdict.stop_reason) == (reward, labels, "final")  # type: ignore[union-attr]
        assert verdict.parts == (RewardPart("followed", reward),)  # type: ignore[union-attr]
        called = task.begin(one_prompt()).reply(ParsedTurn("call", "{}", "commentary", "functions.f"))
        assert (called.reward, called.labels) == (0.0, ("malformed",))  # type: ignore[union-attr]
        assert task.begin(one_prompt()).cut("length").reward == 0.0
    finally:
        task.close()


def test_the_real_file(tmp_path):
    task = VerifyIf(str(shared_file("ifbench_test.jsonl")), nltk_data=nltk_data())
    try:
        assert task.epoch_size("train") + task.epoch_size("heldout") == 300
        prompts = task.prompts("train", 0, 300)
        assert len({p.text for p in prompts}) == task.epoch_size("train")
        assert not {p.text for p in prompts} & {p.text for p in task.prompts("heldout", 0, 60)}
        assert task.begin(prompts[0]).opening()[-1].content == prompts[0].text
    finally:
        task.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": " "}, r"a.jsonl:2: the field 'prompt'"),
        ({"prompt": "p", "instruction_id_list": []}, r"a.jsonl:2: the field 'instruction_id_list'"),
        (
            {"prompt": "p", "instruction_id_list": ["a"], "kwargs": []},
            r"a.jsonl:2: the field 'kwargs' must hold one object for each of the 1",
        ),
        ({"prompt": "p", "instruction_id_list": ["a:b"], "kwargs": [{}]}, r"a.jsonl:2: no checker of IFEval or IFBench is called a:b"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, line, message):
    good = {"prompt": "q", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    with pytest.raises(DataError, match=message):
        VerifyIf(write(tmp_path / "a.jsonl", good, line), nltk_data=nltk_data())
    with pytest.raises(DataError, match=r"holds no prompt"):
        VerifyIf(write(tmp_path / "b.jsonl"), nltk_data=nltk_data())
    with pytest.raises(ConfigError, match=r"task.path is empty"):
        VerifyIf("")
