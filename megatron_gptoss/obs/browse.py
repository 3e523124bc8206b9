"""Rollouts on a terminal: one conversation at a time, its tokens in colour, and a key for each way to the next one.

In: a run's archives, and keys. Out: what a terminal of so many columns and rows shows. The state is a record and `press` makes the next,
so nothing here needs a terminal but `browse`, the loop at the end. Where there is none, `plain` prints conversations without a control
character. Changes nothing on the disk.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from rich.console import Console as RichConsole
from rich.text import Text

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.errors import MachineError
from megatron_gptoss.obs.console import visible
from megatron_gptoss.obs.shades import GROUND, HUES, RGB, VERSIONS, limits, shade
from megatron_gptoss.obs.shelf import Archive
from megatron_gptoss.obs.transcript import MEASURES, Measure, Message, Token, Transcript

STRONGEST = 5  # tokens named below a conversation
ROLE_STYLES = {"system": "bright_black", "developer": "bright_black", "user": "blue", "assistant": "magenta", "tool": "cyan", "?": "red"}
HELP = (
    ("→ n  ← p", "next rollout, the one before"),
    ("g  G", "next group, the one before"),
    ("s  S", "next step, the one before"),
    ("e", "held-out evaluations, and back to training"),
    ("c  C", "what the colours mean: advantage, mismatch, log-prob, policy version, none"),
    ("r", "which rewards: all, above 0, 0 or less, groups that differ"),
    ("l", "which label"),
    ("↓ j  ↑ k", "a line; space and b: a page; 0: the top"),
    ("?", "this help"),
    ("q", "leave"),
)


def shown(reward: float) -> str:
    """As a reader meets it, and asks for it again: 2/3 is 0.666667."""
    return f"{reward + 0.0:g}"  # -0.0 + 0.0 is 0.0


def one_line(text: str) -> str:
    """Of a model or a task, for where a line must stay one."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


@dataclass(frozen=True)
class Filter:
    """Which rollouts are looked at."""

    reward: str = "all"  # "all" | "above 0" | "0 or less" | "differ" (groups of more than one reward) | a number as `shown` writes it
    label: str = ""  # "": any
    prompt: str = ""  # part of a prompt's id or text

    def keep(self, found: Sequence[Transcript]) -> list[Transcript]:
        rewards: dict[int, set[float]] = {}
        for t in found:
            rewards.setdefault(t.group, set()).add(t.rollout.reward)

        def wanted(t: Transcript) -> bool:
            reward, prompt = t.rollout.reward, t.rollout.prompt
            by_word = {"all": True, "above 0": reward > 0, "0 or less": reward <= 0, "differ": len(rewards[t.group]) > 1}
            fits = by_word[self.reward] if self.reward in by_word else shown(reward) == self.reward
            return fits and (not self.label or self.label in t.rollout.labels) and (self.prompt in prompt.id or self.prompt in prompt.text)

        return [t for t in found if wanted(t)]

    @property
    def words(self) -> str:
        chosen = [f"reward {self.reward}" if self.reward != "differ" else "groups that differ"] if self.reward != "all" else []
        chosen += [f"label {one_line(self.label)}"] if self.label else []
        chosen += [f"prompt {self.prompt!r}"] if self.prompt else []
        return ", ".join(chosen)


@dataclass(frozen=True)
class Place:
    """Where a reader is."""

    archives: tuple[Archive, ...]  # of one kind, by step
    step: int  # which of them
    rollout: int = 0  # which of those that the filter keeps
    measure: Measure = "advantage"
    filter: Filter = field(default_factory=Filter)
    top: int = 0  # first line of the conversation that is seen
    helps: bool = False


class Reader:
    """A place, with what is read there. A step is read when somebody looks at it, and the last one is kept."""

    def __init__(self, every: Sequence[Archive], place: Place, tokenizer: Tokenizer):
        self.every, self.place, self.tokenizer = every, place, tokenizer
        self._read: tuple[Archive, list[Transcript]] | None = None
        self._wrapped: tuple[Transcript | None, tuple[Measure, int], list[Text]] | None = None

    @property
    def archive(self) -> Archive:
        return self.place.archives[self.place.step]

    @property
    def all(self) -> list[Transcript]:
        if self._read is None or self._read[0] != self.archive:
            self._read = self.archive, self.archive.read(self.tokenizer)
        return self._read[1]

    @property
    def kept(self) -> list[Transcript]:
        return self.place.filter.keep(self.all)

    @property
    def here(self) -> Transcript | None:
        kept = self.kept
        return kept[self.place.rollout] if self.place.rollout < len(kept) else None

    def press(self, key: str, page: int = 20) -> bool:
        """False when the reader wants to leave. Keys without a meaning change nothing. `page`: lines that are seen at once."""
        self.place = self._after(key, page)
        return key != "q"

    def _after(self, key: str, page: int) -> Place:
        place, kept = self.place, self.kept
        groups = [t.group for t in kept]
        starts = [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]
        if place.helps:
            return replace(place, helps=False)
        if key in ("n", "right", "p", "left"):
            return self._rollout(place.rollout + (1 if key in ("n", "right") else -1))
        if key == "g":
            return self._rollout(next((i for i in starts if i > place.rollout), place.rollout))
        if key == "G":
            return self._rollout(next((i for i in reversed(starts) if i < place.rollout and groups[i] != groups[place.rollout]), 0))
        if key in ("s", "S"):
            step = min(max(place.step + (1 if key == "s" else -1), 0), len(place.archives) - 1)
            return replace(place, step=step, rollout=0, top=0) if step != place.step else place
        if key == "e":
            other = tuple(a for a in self.every if a.held_out != self.archive.held_out)
            near = min(range(len(other)), key=lambda i: abs(other[i].step - self.archive.step), default=0)
            return replace(place, archives=other, step=near, rollout=0, top=0) if other else place
        if key in ("c", "C"):
            return replace(place, measure=_next(list(MEASURES), place.measure, 1 if key == "c" else -1))
        if key == "r":
            return self._filtered(replace(place.filter, reward=_next(["all", "above 0", "0 or less", "differ"], place.filter.reward, 1)))
        if key == "l":
            labels = ["", *sorted({label for t in self.all for label in t.rollout.labels})]
            return self._filtered(replace(place.filter, label=_next(labels, place.filter.label, 1)))
        lines = {"down": 1, "j": 1, "up": -1, "k": -1, " ": page, "b": -page, "0": -place.top}
        if key in lines:
            return replace(place, top=max(place.top + lines[key], 0))
        return replace(place, helps=key == "?")

    def _rollout(self, number: int) -> Place:
        inside = min(max(number, 0), max(len(self.kept) - 1, 0))
        return replace(self.place, rollout=inside, top=0) if inside != self.place.rollout else self.place

    def _filtered(self, chosen: Filter) -> Place:
        """The same rollout where the new filter keeps it, else the first."""
        kept, here = chosen.keep(self.all), self.here
        return replace(self.place, filter=chosen, rollout=kept.index(here) if here in kept else 0, top=0)

    @cached_property
    def _limits(self) -> dict[Archive, dict[Measure, float]]:
        return {}

    @property
    def limit(self) -> float:
        """What has the strongest colour, of the whole step, so that colours mean the same in all its rollouts."""
        if self.archive not in self._limits:
            self._limits[self.archive] = limits(token for t in self.all for token in t.tokens)
        return self._limits[self.archive].get(self.place.measure, 0.0)

    # -- what is seen --------------------------------------------------------------------------------------------------------------------

    def screen(self, width: int, height: int) -> list[Text]:
        """`height` lines or fewer, none wider than `width`."""
        if self.place.helps:
            return [Text(f"  {keys:10} {words}") for keys, words in HELP][:height]
        head, foot, lines = self._head(), self._foot(), self._lines(width)
        room = max(height - len(head) - len(foot), 1)
        top = min(self.place.top, max(len(lines) - room, 0))
        self.place = replace(self.place, top=top)
        shown = lines[top : top + room]
        if top + room < len(lines):
            more = len(lines) - top - room
            foot[0] = Text(f"{more} more line{'s' if more > 1 else ''} below (↓)", style="yellow")
        for line in (*head, *foot):
            line.truncate(width, overflow="ellipsis")
        return [*head, *shown, *[Text()] * (room - len(shown)), *foot][:height]

    def _lines(self, width: int) -> list[Text]:
        """The conversation, wrapped. Kept while only the place in it changes: of a long one it takes seconds."""
        here, measure = self.here, self.place.measure
        if self._wrapped is None or self._wrapped[0] is not here or self._wrapped[1] != (measure, width):
            parts = conversation(here, measure, self.limit) if here else [Text("Nothing matches the filter.", style="yellow")]
            console = RichConsole(width=width, color_system=None)
            self._wrapped = here, (measure, width), [line for part in parts for line in part.wrap(console, width)]
        return self._wrapped[2]

    def _head(self) -> list[Text]:
        place, kept, here = self.place, self.kept, self.here
        steps = f"{self.archive.words} ({place.step + 1} of {len(place.archives)})"
        count = f"rollout {place.rollout + 1} of {len(kept)}" if kept else "no rollout"
        found = f"{count}{f' with {place.filter.words}' if place.filter.words else ''}"
        mean = sum(t.rollout.reward for t in self.all) / max(len(self.all), 1)
        first = Text.assemble((steps, "bold"), f"   {found}", (f"   mean reward {mean:.3f} of {len(self.all)}", "dim"))
        if here is None:
            return [first, Text()]
        groups = Text.assemble((f"group {here.group + 1} of {len({t.group for t in self.all})}  ", "dim"))
        for t in (t for t in self.all if t.group == here.group):
            style = ("green" if t.rollout.reward > 0 else "red") + (" reverse" if t is here else "" if t in kept else " dim")
            groups.append(f" {shown(t.rollout.reward)} ", style=style)
        return [first, groups, verdict(here), Text()]

    def _foot(self) -> list[Text]:
        here, measure = self.here, self.place.measure
        keys = Text("←→ rollout  g group  s step  c colour  r reward  l label  e held-out  ? help  q leave", style="dim")
        strongest = Text() if here is None else strongest_words(here, measure)
        return [Text(), strongest, legend(measure, self.limit, here), keys]


def _next(values: list, value: object, by: int):
    at = values.index(value) if value in values else -by if by > 0 else 0
    return values[(at + by) % len(values)]


# -- a conversation as rich text -----------------------------------------------------------------------------------------------------------


def verdict(t: Transcript) -> Text:
    r = t.rollout
    parts = "".join(f"  {one_line(part.name)} {part.value:g}" for part in r.reward_parts)
    line = Text.assemble(
        (f"reward {shown(r.reward)}", "bold green" if r.reward > 0 else "bold red"),
        f"{parts}   answer {visible(r.answer or '')!r}   gold {visible(r.prompt.gold)!r}   ended by {one_line(r.stop_reason)}",
    )
    if r.labels:
        line.append(f"   {one_line(', '.join(r.labels))}")
    if t.advantage is not None:
        line.append(f"   advantage {t.advantage:+.3g}")
    return line


def conversation(t: Transcript, measure: Measure, limit: float) -> Iterator[Text]:
    """Each message: who speaks, then the tokens. A sampled token stands on a ground of its colour; others are dim, with none."""
    for message in t.messages:
        yield Text.assemble((one_line(message.title), f"bold {ROLE_STYLES[message.role]}"), (f"  {told(message)}", "dim"))
        text = Text()
        for token in message.tokens:
            text.append(visible(token.text), style=_style(token, shade(token, measure, limit)))
        yield text
        yield Text()


def told(message: Message) -> str:
    """`9 sampled`, `5 of 12 sampled`, `12 tokens, given`."""
    count, sampled = len(message.tokens), sum(token.sampled for token in message.tokens)
    if not sampled:
        return f"{count} token{'s' if count > 1 else ''}, given"
    return f"{sampled} sampled" if sampled == count else f"{sampled} of {count} sampled"


def _style(token: Token, ground: RGB | None) -> str:
    if not token.sampled:
        return "dim"
    weight = "dim " if token.special and ground is None else ""
    return f"{weight}bold" if ground is None else f"{weight}{_colour((240, 240, 240))} on {_colour(ground)}"


def _colour(rgb: RGB) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def number(value: float) -> str:
    """+1.2e-06, -0.42, 0"""
    return "0" if value == 0.0 else f"{value:+.2e}" if abs(value) < 1e-3 else f"{value:+.3g}"


def strongest_words(t: Transcript, measure: Measure) -> Text:
    """The tokens with the largest values, where tokens differ."""
    if measure not in ("mismatch", "logp"):
        return Text()
    found = [f"{visible(token.text)!r} {number(value)}" for token in t.strongest(measure, STRONGEST) if (value := token.value(measure))]
    words = "least likely" if measure == "logp" else "largest mismatch"
    return Text(f"{words}, nats: {'   '.join(found)}" if found else "")


def legend(measure: Measure, limit: float, t: Transcript | None) -> Text:
    line = Text.assemble((f"{MEASURES[measure]}  ", "bold"))
    if measure == "version":
        for version in sorted({token.version for token in t.tokens if token.version is not None} if t else ()):
            line.append(f" {version} ", style=f"{_colour((240, 240, 240))} on {_colour(VERSIONS[version % len(VERSIONS)])}").append(" ")
        return line
    if measure == "none":
        return line.append("sampled", style="bold").append("  given", style="dim")
    if t is not None and not any(token.value(measure) is not None for token in t.tokens):
        return line.append("not known of this rollout: ", style="yellow").append(_why_unknown(measure), style="dim")
    below, above = HUES[measure]
    ends = [(number(-limit), below), (" 0 ", GROUND), *([] if measure == "logp" else [(number(limit), above)])]
    for words, hue in ends:
        line.append(f" {words.strip()} ", style=f"{_colour((240, 240, 240))} on {_colour(hue)}")
    return line.append("" if measure == "advantage" else "  nats", style="dim")


def _why_unknown(measure: Measure) -> str:
    return "nothing was sampled" if measure == "logp" else "it was not trained, or without run.archive_scores"


# -- without a terminal --------------------------------------------------------------------------------------------------------------------


def plain(t: Transcript, *, tokens: bool = False) -> str:
    """A conversation without a control character. `tokens`: a line for each sampled token, with all that is known of it."""
    lines = [f"== {one_line(t.rollout.prompt.id)} #{t.rollout.index}, group {t.group + 1}", verdict(t).plain]
    for message in t.messages:
        lines += [f"-- {one_line(message.title)}: {told(message)}", visible("".join(token.text for token in message.tokens))]
    lines += [words.plain for measure in ("mismatch", "logp") if (words := strongest_words(t, measure)).plain]
    if tokens:
        lines.append(f"{'at':>5} {'token':>7} {'policy':>6} {'engine logp':>12} {'mismatch':>10} {'advantage':>10}  text")
        lines += [_token_line(token) for token in t.tokens if token.sampled]
    return "\n".join(lines) + "\n"


def _token_line(token: Token) -> str:
    def known(value: float | None) -> str:
        return "-" if value is None else number(value)

    version = "-" if token.version is None else token.version
    figures = f"{known(token.logp):>12} {known(token.mismatch):>10} {known(token.advantage):>10}"
    return f"{token.position:5} {token.token_id:7} {version:>6} {figures}  {visible(token.text)!r}"


# -- with one ------------------------------------------------------------------------------------------------------------------------------

ESCAPES = {"\x1b[C": "right", "\x1b[D": "left", "\x1b[A": "up", "\x1b[B": "down", "\x1bOC": "right", "\x1bOD": "left"}
ESCAPES |= {"\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "b", "\x1b[6~": " ", "\x1b[H": "0", "\x1b": "q", "": "q"}


# Linux signals a pseudo-terminal's new size a moment before it can be read, and a window that is dragged changes it many times.
SETTLE_S = 0.05


def browse(reader: Reader) -> None:
    """Until somebody leaves. MachineError when standard input is no terminal."""
    console = RichConsole(highlight=False)
    with keys() as key, console.screen(hide_cursor=True):
        going = True
        while going:
            size = console.size
            lines = reader.screen(size.width, size.height)
            console.update_screen(Text("\n", no_wrap=True).join(lines))
            pressed = key()
            going = pressed == "resized" or reader.press(pressed, page=max(size.height - 8, 1))


@contextmanager
def keys() -> Iterator[Callable[[], str]]:
    """Gives a function that waits for one key, or for another size of the window, which is the key "resized". The terminal is as before
    when the block ends, whatever ended it."""
    if not sys.stdin.isatty():
        raise MachineError("keys are read from a terminal, and standard input is none. Use --plain.")
    import termios
    import tty

    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    resized, resizing = os.pipe()
    before_resize = signal.signal(signal.SIGWINCH, lambda *_: os.write(resizing, b"!"))

    def more() -> bytes:
        """The rest of an escape sequence comes at once, or there is none."""
        return os.read(source, 1) if select.select([source], [], [], 0.02)[0] else b""

    def key() -> str:
        """One, however many lie ready: a key that is held down sends faster than a screen is drawn."""
        if source not in (ready := select.select([source, resized], [], [])[0]) and resized in ready:
            time.sleep(SETTLE_S)
            os.read(resized, 4096)
            return "resized"
        read = os.read(source, 1)
        if read == b"\x1b":
            read += (begins := more())
            while begins in (b"[", b"O") and (byte := more()):
                read += byte
                if 0x40 <= byte[0] <= 0x7E:  # ECMA-48: only the last byte of a sequence is one of these
                    break
        text = read.decode("utf-8", "replace")
        return ESCAPES.get(text, text)

    try:
        tty.setcbreak(source)
        yield key
    finally:
        signal.signal(signal.SIGWINCH, before_resize)
        os.close(resized)
        os.close(resizing)
        termios.tcsetattr(source, termios.TCSADRAIN, before)
