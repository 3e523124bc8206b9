"""Laws of GSM8K and of the answer checker, which must agree with every published label. In: shared/data for some tests."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_gptoss.data.harmony import ParsedTurn
from megatron_gptoss.data.prompts import read_prompt_file
from megatron_gptoss.errors import ConfigError, DataError, RunFailed
from megatron_gptoss.tasks.base import Verdict
from megatron_gptoss.tasks.gsm8k import Gsm8k
from megatron_gptoss.tasks.math_check import MathChecker, final_answer
from tests.helpers.shared_data import shared_file
from tools.check_gsm8k_labels import judge

# Python works on these powers in one C call each, far longer than any deadline here, deaf to signals and to its own threads.
ENDLESS = "\\boxed{(3^{(10^{8})}) \\cdot (7^{(10^{8})}) - 1}"


@pytest.fixture(scope="module")
def checker():
    made = MathChecker(timeout_s=20.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So \\boxed{18}.", "18"),
        ("\\boxed{17} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("2 + 2 = 4\n#### 4", "4"),
        ("x\nA: 1,000\n", "1,000"),
        ("A: 3\nA: 4.", "4"),
        ("#### 5\n\\boxed{6}\nA: 7", "6"),
        ("A: 7\n#### 5", "5"),
        ("The answer is 18", None),
        ("Plan A: 18", None),
        ("\\boxed{18", None),
        ("\\boxed{}", None),
        ("", None),
    ],
)
def test_the_answer_a_text_marks(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "text", "outcome"),
    [
        ("18", "\\boxed{18}", "equal"),
        ("18", "\\boxed{18.0}", "equal"),
        ("1000", "\\boxed{1,000}", "equal"),
        ("1,000", "\\boxed{1000}", "equal"),
        ("18", "\\boxed{\\$18}", "equal"),
        ("0.5", "\\boxed{\\frac{1}{2}}", "equal"),
        ("-5", "\\boxed{5}", "different"),
        ("18", "\\boxed{81}", "different"),
        ("18", "\\boxed{17 + 2}", "different"),
        ("18", "\\boxed{((((}", "different"),
        ("18", "It is 18", "no-answer"),
    ],
)
def test_outcomes_by_hand(checker, gold, text, outcome):
    assert checker.check(gold, text) == outcome


def test_all_published_labels():
    judged = judge(shared_file("gsm8k_example_model_solutions.jsonl"), timeout_s=60.0)
    assert len(judged) == 5276
    assert [j for j in judged if not j.agrees] == []
    assert {j.label for j in judged} == {True, False}


def test_every_reference_of_gsm8k_equals_itself(checker):
    """math-verify reads every reference as a number: an unreadable one would make a prompt unsolvable."""
    golds = {r.fields["answer"].rpartition("####")[2].strip() for r in read_prompt_file(shared_file("gsm8k_train.jsonl"), ("answer",))}
    for gold in golds:
        assert checker.compare(gold, gold.replace(",", "")) == "equal", gold


def test_a_hanging_check_is_killed_in_time_and_others_go_on():
    checker = MathChecker(timeout_s=3.0, num_workers=2)
    try:
        assert checker.check("18", "\\boxed{18}") == "equal"  # a first worker is up
        start = time.monotonic()
        with ThreadPoolExecutor(4) as threads:
            hanging = threads.submit(checker.check, "18", ENDLESS)
            others = [threads.submit(checker.check, "18", f"\\boxed{{{n}}}") for n in range(16, 20)]
            assert [f.result() for f in others] == ["different", "different", "equal", "different"]
            assert hanging.result() == "timeout"
        assert time.monotonic() - start < 30.0
        assert checker.check("18", "\\boxed{18}") == "equal"  # the killed one was replaced
    finally:
        checker.close()


def test_many_threads_get_their_own_answers(checker):
    with ThreadPoolExecutor(12) as threads:
        outcomes = list(threads.map(lambda n: checker.check(str(n // 2), f"\\boxed{{{n - n // 2}}}"), range(200)))
    assert outcomes == ["equal" if n % 2 == 0 else "different" for n in range(200)]


def test_a_worker_killed_by_somebody_else_costs_no_reward():
    checker = MathChecker(timeout_s=20.0, num_workers=1)
    try:
        assert checker.check("1", "\\boxed{1}") == "equal"
        (worker,) = checker._workers._all
        os.kill(worker._process.pid, 9)
        assert checker.check("1", "\\boxed{1}") == "equal"
    finally:
        checker.close()


def test_closing_ends_the_processes_and_later_use_is_an_error():
    checker = MathChecker(timeout_s=20.0, num_workers=1)
    assert checker.check("1", "\\boxed{1}") == "equal"
    pids = [worker._process.pid for worker in checker._workers._all]
    checker.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: PTH110
    with pytest.raises(RunFailed):
        checker.check("1", "\\boxed{1}")


@pytest.mark.parametrize("busy", [False, True])
def test_the_worker_dies_with_its_parent(busy):
    """The parent is killed, so no code of ours runs at its end; a worker must still go, also one that hears nothing."""
    ask = f"threading.Thread(target=c.check, args=('1', {ENDLESS!r}), daemon=True).start(); time.sleep(0.3)\n" if busy else ""
    program = (
        "import os, signal, threading, time; from megatron_gptoss.tasks.math_check import MathChecker\n"
        f"c = MathChecker({0.6 if busy else 20.0}, 1); assert c.check('1', r'\\boxed{{1}}') == 'equal'\n"
        f"{ask}print(next(iter(c._workers._all))._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"math worker {pid} outlived its parent")


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- the task


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(numbers):
    return [{"question": f"How much is {n}?", "answer": f"It is.\n#### {n}"} for n in numbers]


def test_an_epoch_is_every_training_prompt_once_in_an_order_of_its_own(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(range(200)))
    task = Gsm8k(path, seed=1)
    size = task.epoch_size("train")
    assert 160 <= size < 200
    first, second = task.prompts("train", 0, size), task.prompts("train", size, size)
    assert {p.text for p in first} == {p.text for p in second}
    assert len({p.text for p in first}) == size
    assert [p.text for p in first] != [p.text for p in second]
    assert len({p.id for p in first + second}) == 2 * size
    assert task.prompts("train", size - 3, 7) == (first + second)[size - 3 : size + 4]
    assert Gsm8k(path, seed=1).prompts("train", 0, 9) == first[:9] != Gsm8k(path, seed=2).prompts("train", 0, 9)
    assert all(p.gold in p.text for p in first)


@pytest.mark.parametrize("with_eval_file", [False, True])
def test_the_splits_never_meet(tmp_path, with_eval_file):
    path = write(tmp_path / "a.jsonl", rows(range(200)))
    eval_path = write(tmp_path / "b.jsonl", rows(range(150, 300))) if with_eval_file else ""
    task = Gsm8k(path, eval_path)
    train, heldout = ({p.text for p in task.prompts(split, 0, 400)} for split in ("train", "heldout"))  # type: ignore[arg-type]
    assert not train & heldout
    assert (len(train), len(heldout)) == (150, 150) if with_eval_file else len(train) + len(heldout) == 200


def test_the_real_file(tmp_path):
    task = Gsm8k(str(shared_file("gsm8k_train.jsonl")), str(shared_file("gsm8k_test.jsonl")))
    assert {p.gold for p in task.prompts("heldout", 0, 1319)} >= {"18", "70000"}
    system, developer, user = task.begin(task.prompts("train", 0, 1)[0]).opening()
    assert "Reasoning: low" in system.content
    assert "\\boxed{}" in developer.content
    assert user.content == task.prompts("train", 0, 1)[0].text


def test_verdicts(tmp_path):
    task = Gsm8k(write(tmp_path / "a.jsonl", rows(range(200))), check_timeout_s=20.0)
    try:
        prompt = task.prompts("train", 0, 1)[0]
        talk = task.begin(prompt)
        right = talk.reply(ParsedTurn("final", f"So \\boxed{{{prompt.gold}}}.", "final"))
        assert right == Verdict(1.0, right.parts, prompt.gold, ("right",), "final")  # type: ignore[union-attr]
        wrong = talk.reply(ParsedTurn("final", "\\boxed{-1}", "final"))
        assert wrong == Verdict(0.0, wrong.parts, "-1", ("wrong",), "final")  # type: ignore[union-attr]
        silent = talk.reply(ParsedTurn("final", f"It is {prompt.gold}", "final"))
        assert silent == Verdict(0.0, silent.parts, None, ("no-answer",), "final")  # type: ignore[union-attr]
        called = talk.reply(ParsedTurn("call", "{}", "commentary", "functions.calc"))
        assert isinstance(called, Verdict)
        assert (called.reward, called.stop_reason) == (0.0, "malformed")
        assert talk.cut("length").reward == 0.0
        # From a thread too, where math-verify by itself scores 0.
        found = []
        thread = threading.Thread(target=lambda: found.append(talk.reply(ParsedTurn("final", f"\\boxed{{{prompt.gold}}}", "final"))))
        thread.start()
        thread.join()
        assert found[0].reward == 1.0
    finally:
        task.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"a.jsonl cannot be read: No such file"),
        ("", r"a.jsonl holds no prompt"),
        ("\n \n", r"a.jsonl holds no prompt"),
        ('{"question": "q", "answer": "#### 1"}\n{"question": \n', r"a.jsonl:2: this line is not JSON"),
        ('\n{"question": "q"}\n', r"a.jsonl:2: the field 'answer' is missing, empty or no text; the line has question"),
        ('{"question": "q", "answer": 1}', r"a.jsonl:1: the field 'answer' is missing, empty or no text"),
        ('{"question": " ", "answer": "#### 1"}', r"a.jsonl:1: the field 'question'"),
        ("[1]", r"a.jsonl:1: this line is list, not a JSON object"),
        ('{"question": "q", "answer": "1"}', r"a.jsonl:1: the answer has no reference after '#### '"),
        (b"\xff\xfe", r"a.jsonl:1: this line is not JSON"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        Gsm8k(str(path))


def test_line_separators_inside_json_text_are_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a\u2028b\x85c", "answer": "#### 1"}\n', encoding="utf-8")
    assert read_prompt_file(path, ("question",))[0].fields["question"] == "a\u2028b\x85c"


def test_a_split_without_prompts_says_what_to_set(tmp_path):
    path = write(tmp_path / "a.jsonl", rows([1]))
    with pytest.raises(DataError, match=r"set task.eval_path"):
        Gsm8k(path).prompts("heldout", 0, 1)
    with pytest.raises(DataError, match=r"every problem of task.path"):
        Gsm8k(path, path).prompts("train", 0, 1)
    assert Gsm8k(path, path).prompts("train", 0, 0) == []
    with pytest.raises(ConfigError, match=r"task.path is empty"):
        Gsm8k("")
