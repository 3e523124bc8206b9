"""What does a person see while a run goes on?

In: names and numbers. Out: a table at the start, a progress bar while something long runs, one line a step, a rollout in full. Calm: in
a pipe, a file or CI there is no bar and no control character, and a long phase leaves one line. Worker logs do not come here, they go to
files. Does not measure and does not decode tokens. No torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatron_gptoss.types import Rollout

LONG_PHASE_S = 10.0  # without a terminal, a phase that took less leaves no line of its own; the line of its step has the time
ALARM = "not a normal run"  # a table's row of this name is red
PIPE_WIDTH = 140  # rich assumes 80 where there is no terminal

# The line of a step: metric, word, format. What was not measured is left out.
STEP_WORDS = (
    ("reward/mean", "reward", ".2f"),
    ("eval/success", "success", ".3f"),
    ("mismatch/logp_abs_max", "mismatch", ".0e"),
    ("grad/norm", "grad", ".2f"),
    ("policy/entropy", "entropy", ".3f"),
)
PHASES = ("wait", "rollout", "score", "update", "sync")  # time/<phase>_s


class Bar:
    """What a phase reports while it runs. Safe to call from several threads and from asyncio."""

    def __init__(self, show: Callable[[int, str], None]):
        self.done, self.rate = 0, ""
        self._show = show

    def update(self, done: int, rate: str = "") -> None:
        """`done` in all so far. `rate`: "310 tokens/s", shown beside the bar; empty keeps the last."""
        self.done, self.rate = done, rate or self.rate
        self._show(self.done, self.rate)

    def advance(self, n: int = 1, rate: str = "") -> None:
        """`n` more are done."""
        self.update(self.done + n, rate)


class Console:
    def __init__(self, console: RichConsole | None = None, clock: Callable[[], float] = time.monotonic):
        self._rich = console or RichConsole(highlight=False)
        if not self._rich.is_terminal:
            self._rich.width = PIPE_WIDTH
        self._clock = clock

    def say(self, text: str) -> None:
        """One plain line. Markup in it stays text."""
        self._rich.print(Text(text), soft_wrap=True)

    def alarm(self, text: str) -> None:
        """One line in red, where there is colour: what a person must not overlook."""
        self._rich.print(Text(text, style="bold red"), soft_wrap=True)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """What runs: name and value, one a row."""
        table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False, box=box.SIMPLE, padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value), style="bold red" if name == ALARM else None)
        self._rich.print(table)

    @contextmanager
    def progress(self, name: str, total: int, unit: str = "") -> Iterator[Bar]:
        """A bar from 0 to `total` while the block runs: `with console.progress("rollouts", 64, "conversations") as bar: ...`."""
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn(unit),
            TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        shown = Progress(*columns, console=self._rich, transient=True, disable=not self._rich.is_terminal)
        task = shown.add_task(name, total=total, rate="")
        bar = Bar(lambda done, rate: shown.update(task, completed=done, rate=rate))
        with self._phase(name, lambda: f", {bar.done}/{total} {unit}".rstrip(), lambda: f" ({bar.rate})" if bar.rate else ""), shown:
            yield bar

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """As `progress`, for a phase that has no count."""
        shown = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._rich, transient=True,
                         disable=not self._rich.is_terminal)  # fmt: skip
        shown.add_task(name, total=None)
        with self._phase(name, lambda: "", lambda: ""), shown:
            yield

    @contextmanager
    def _phase(self, name: str, count: Callable[[], str], rate: Callable[[], str]) -> Iterator[None]:
        """Leaves the line of a phase that ended early, or that was long and had no bar."""
        start, ended = self._clock(), "stopped"
        try:
            yield
            ended = "done"
        finally:
            seconds = self._clock() - start
            if ended == "stopped" or (seconds >= LONG_PHASE_S and not self._rich.is_terminal):
                self.say(f"{name}: {ended}{count()} in {seconds:.1f} s{rate()}")

    def step(self, step: int, total: int, values: Mapping[str, float | int | bool | str]) -> None:
        self.say(step_line(step, total, values))

    def rollout(self, rollout: Rollout, text: str) -> None:
        """One conversation in full. `text`: its token ids decoded with special tokens."""
        parts: list[Text] = []
        for who, content in split_conversation(text):
            parts.append(Text(who, style="bold magenta" if who.startswith("assistant") else "bold cyan"))
            parts.append(Text(visible(content) + "\n"))
        reward = f"reward {rollout.reward:g}" + "".join(f"   {part.name} {part.value:g}" for part in rollout.reward_parts)
        verdict = f"answer {visible(rollout.answer or '')!r}   gold {rollout.prompt.gold!r}   stop {rollout.stop_reason}"
        labels = f"   {', '.join(rollout.labels)}" if rollout.labels else ""
        sampled = f"{len(rollout.token_ids)} tokens, {sum(rollout.sampled)} of them sampled"
        style = "green" if rollout.reward > 0 else "red"
        parts += [Text(f"{reward}   {verdict}{labels}", style=style), Text(sampled, style="dim")]
        title = Text(f"{rollout.prompt.id} #{rollout.index}")
        self._rich.print(Panel(Group(*parts), title=title, title_align="left", border_style=style, width=min(self._rich.width, PIPE_WIDTH)))


def step_line(step: int, total: int, values: Mapping[str, float | int | bool | str]) -> str:
    """`step 12/40  reward 0.75  mismatch 3e-06  grad 0.31  entropy 0.040  6.8 s (rollout 6.1 score 0.0 update 0.3 sync 0.1)`."""
    words = [f"step {step:{len(str(total))}d}/{total}"]
    for name, word, form in STEP_WORDS:
        value = values.get(name)
        if isinstance(value, int | float):
            words.append(f"{word} {value:{form}}")
    if values.get("train/skipped"):
        words.append("no update")
    split = [(p, values[f"time/{p}_s"]) for p in PHASES if f"time/{p}_s" in values]
    whole = values.get("time/step_s")
    if isinstance(whole, int | float):
        inside = " ".join(f"{phase} {seconds:.1f}" for phase, seconds in split)
        words.append(f"{whole:.1f} s" + (f" ({inside})" if inside else ""))
    return "  ".join(words)


def split_conversation(text: str) -> list[tuple[str, str]]:
    """Harmony text as (who, what) pairs: ("assistant to functions.calc, commentary", '{"expression":"1+2"}').

    For the eye only. Whatever is not a whole message, such as a malformed turn, is shown as it stands.
    """
    pieces: list[tuple[str, str]] = []
    for chunk in text.split("<|start|>"):
        if not chunk:
            continue
        first = True
        # One turn may hold several messages, ended by <|end|> and opened by <|channel|> alone.
        for message in re.split(r"(?<=<\|end\|>)|(?<=<\|call\|>)|(?<=<\|return\|>)", chunk):
            header, mark, content = message.partition("<|message|>")
            if not message:
                continue
            if not mark:
                pieces.append(("assistant, malformed" if not first else "unfinished", message))
            else:
                pieces.append((_who(header), re.sub(r"<\|(end|call|return)\|>$", "", content)))
            first = False
    return pieces


def _who(header: str) -> str:
    """`assistant<|channel|>commentary to=functions.calc <|constrain|>json` -> "assistant to functions.calc, commentary"."""
    speaker, _, channel = header.partition("<|channel|>")
    found = re.search(r"\bto=(\S+?)(?=\s|<|$)", header)
    recipient = f" to {found[1]}" if found else ""
    name = re.sub(r"\s*\bto=\S+", "", speaker).strip()
    where = re.split(r"[\s<]", channel.strip())[0] if channel.strip() else ""
    return f"{name or 'assistant'}{recipient}{f', {where}' if where else ''}"


def visible(text: str) -> str:
    """Control characters, which a model or a log may hold, as escapes: they must not steer the terminal. Newline and tab stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
