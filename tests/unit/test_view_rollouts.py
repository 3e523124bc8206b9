"""tools/view_rollouts.py as a person starts it: in a pipe, on a terminal, for a page; and what it says when it cannot."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from megatron_gptoss.config.load import dump
from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.rl.samples import sample_name
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.rollout.scores import write_scores
from tests.helpers.conversations import TINY, a_step, scores_of

TOOL = [sys.executable, str(Path(__file__).parents[2] / "tools" / "view_rollouts.py")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo-1"
    folder.mkdir()
    (folder / "config.toml").write_text(dump(Config(tokenizer=TokenizerConfig(name="tiny"))))
    for step in (1, 2):
        write_archive(folder / "rollouts" / f"step-{step}.jsonl", step, a_step(), TINY)
        scores = [scores_of(r, sample_name(r)) for g in a_step() for r in g.rollouts]
        write_scores(folder / "rollouts" / f"step-{step}.scores.jsonl", step, scores)
    return folder


def view(*arguments, code=0):
    done = subprocess.run([*TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_in_a_pipe_it_is_plain_text_with_the_filters_that_were_asked_for(run):
    text = view(run, "--n", 9, "--reward", 1, "--label", "right", "--prompt", "p/1")
    assert re.findall(r"^== .*", text, re.MULTILINE) == ["== p/1 #0, group 2", "== p/1 #1, group 2"]
    assert "\x1b" not in text
    assert text.endswith("step-2.jsonl: 2 of 2 shown; 4 conversations, mean reward 0.750\n")
    assert "step-1.jsonl: 1 of 4 shown" in view(run, "--step", 1, "--n", 1)
    assert view(run, "--group", 2, "--n", 1).startswith("== p/1 #0, group 2")


def test_a_run_of_another_version_can_be_read_and_so_can_an_archive_without_a_rollout(run, tmp_path):
    old = tmp_path / "old-1"
    (old / "rollouts").mkdir(parents=True)
    (old / "config.toml").write_text('[tokenizer]\nname = "tiny"\n[rl]\nno_such_key = 1\n[gone]\nx = 2\n')
    (old / "rollouts" / "step-1.jsonl").write_text("")
    assert view(old).endswith("step-1.jsonl: 0 of 0 shown; 0 conversations, mean reward 0.000\n")
    view(old, "--html")
    (old / "config.toml").write_text("[tokenizer")
    assert "ConfigError: " in view(old, code=1) and "does not say which tokenizer" in view(old, code=1)


def test_a_page_goes_where_it_is_said_and_else_into_the_run(run, tmp_path):
    assert str(tmp_path / "p.html") in view(run, "--html", "--out", tmp_path / "p.html")
    view(run, "--html")
    assert (run / "rollouts.html").read_bytes() == (tmp_path / "p.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "ConfigError: --step 7 has no archive. There are steps 1, 2."),
        (["--group", "3"], "ConfigError: --group 3 is not there: step 2 has 2 groups."),
        (["--held-out"], "has no archived rollouts of held-out evaluations; leave out --held-out."),
        (
            ["--html", "--step", "0", "--reward", "0", "--label", "right"],
            "ConfigError: --step, --reward, --label: --html writes the whole run, and its page lets you choose. Leave out one or the",
        ),
        (["--out", "x.html"], "ConfigError: --out x.html says where --html writes its page. Use both, or neither."),
    ],
)
def test_a_mistake_is_one_message(run, arguments, message):
    text = view(run, *arguments, code=1)
    assert message in text and text.count("\n") == 1


def test_on_a_terminal_keys_lead_on_and_the_screen_is_given_back(run):
    pid, ours = pty.fork()
    if pid == 0:
        # Not execv: readline, which pytest loads, writes COLUMNS into the environment past os.environ.
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execve(TOOL[0], [*TOOL, str(run)], {**known, "TERM": "xterm-256color"})
    seen = b""

    def first_rows() -> list[int]:
        """Their widths; a screen is filled up to its right end."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode(errors="replace"))
        return [len(row) for row in re.findall(r"\x1b\[1;1H(.*?)\x1b\[2;1H", plain)]

    def until(words: bytes, width: int = 0) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while words not in seen or (width and width not in first_rows()):
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)

    until(b"rollout 1 of 4")
    assert seen.startswith(b"\x1b[?1049h"), "on a screen of its own"
    for key, words in ((b"n", b"rollout 2 of 4"), (b"\x1b[D", b"rollout 1 of 4"), (b"S", b"step 1 (1 of 2)"), (b"r", b"reward above 0")):
        seen = b""
        os.write(ours, key)
        until(words)
    for columns in (64, 100):
        seen = b""
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        until(b"\x1b[2;1H", columns)  # drawn anew without a key
    seen = b""
    os.write(ours, b"q")
    until(b"\x1b[?1049l")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(ours)
