"""One page of a run's rollouts: rollouts.html, to be opened from the disk, without a server, a network or a library.

In: a run directory's archives, with the scores beside them. Out: one HTML file that holds every token it shows as data, a block of JSON for
each step, and draws a step when somebody looks at it (rollouts.js). Text of a model or a prompt never becomes markup: the JSON has no "<",
and the script only ever sets text. Where a run is too large for a page, each step shows some of its groups, and says how many of how many.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.obs.console import Bar
from megatron_gptoss.obs.json_floats import to_json
from megatron_gptoss.obs.run_dir import write_atomic
from megatron_gptoss.obs.shades import HUES, VERSIONS, limits
from megatron_gptoss.obs.shelf import Archive
from megatron_gptoss.obs.transcript import Transcript

TOKENS = 1_000_000  # about 15 MB


@dataclass
class Pieces:
    """Every (token id, text) once; tokens of the page are numbers into it."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)  # [token id, text] or [token id, text, 1] for a special token

    def number(self, token_id: int, text: str, special: bool) -> int:
        key = (token_id, text)
        if key not in self.numbers:
            self.numbers[key] = len(self.rows)
            self.rows.append([token_id, text, 1] if special else [token_id, text])
        return self.numbers[key]


def write_page(
    name: str, archives: Sequence[Archive], tokenizer: Tokenizer, out: Path, *, tokens: int = TOKENS, bar: Bar | None = None
) -> None:
    """`name`: the run's, a title. `tokens`: about how many the page may show, divided evenly over the archives; at least a group of the
    last. Where a share holds no whole group, it is saved up until it does: then some steps show none.

    DataError for an archive that cannot be read, MachineError when the disk is full.
    """
    pieces, steps, blocks, used = Pieces(), [], [], 0
    for done, archive in enumerate(reversed(archives), start=1):  # the page opens with the last, so that has the first share
        groups = [list(each) for _, each in groupby(archive.read(tokenizer), key=lambda t: t.group)]
        sizes = [sum(len(t.rollout.token_ids) for t in group) for group in groups]
        shown = spread(groups, sizes, tokens * done // len(archives) - used, at_least=int(done == 1))
        used += sum(len(t.rollout.token_ids) for group in shown for t in group)
        steps.insert(0, _summary(archive, groups, shown))
        blocks.insert(0, (archive.key, {"groups": [_group(group, pieces) for group in shown]}))
        if bar is not None:
            bar.advance()
    run = {"name": name, "steps": steps, "prompts": _met_again(blocks), "hues": HUES, "versions": VERSIONS}
    data = {"run": run, "pieces": pieces.rows} | dict(blocks)
    parts = {
        "title": _escaped(name),
        "style": _asset("rollouts.css"),
        "data": "\n".join(_block(key, value) for key, value in data.items()),
        "script": _asset("rollouts.js"),
    }
    # In one go: what a model wrote may look like one of the marks.
    write_atomic(out, re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("rollouts.html")))


def _met_again(blocks: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, list[str]]:
    """Prompt id -> the archives that have it, of those that more than one has."""
    found: dict[str, list[str]] = {}
    for key, block in blocks:
        for group in block["groups"]:
            found.setdefault(group["id"], []).append(key)
    return {prompt: keys for prompt, keys in found.items() if len(keys) > 1}


def spread(groups: Sequence[list[Transcript]], sizes: Sequence[int], budget: int, *, at_least: int = 1) -> list[list[Transcript]]:
    """As many whole groups as the budget holds, evenly over the step."""
    count = len(groups)
    while count > at_least and sum(sizes[i] for i in _evenly(count, len(groups))) > budget:
        count -= 1
    return [groups[i] for i in _evenly(count, len(groups))]


def _evenly(count: int, of: int) -> list[int]:
    return [i * of // count for i in range(count)]


def _summary(archive: Archive, groups: Sequence[list[Transcript]], shown: Sequence[list[Transcript]]) -> dict[str, Any]:
    """What is said of a step before its block is opened. Of all its rollouts, not only of those the page shows."""
    every = [t for group in groups for t in group]
    rewards = [t.rollout.reward for t in every]
    most = limits(token for t in every for token in t.tokens)
    return {
        "key": archive.key,
        "step": archive.step,
        "heldOut": archive.held_out,
        "mean": _number(sum(rewards) / len(rewards)) if rewards else None,  # math.fsum raises at inf - inf
        "rollouts": len(every),
        "groups": len(groups),
        "shownGroups": len(shown),
        "shown": sum(map(len, shown)),
        "scored": archive.is_scored,
        "limits": {name: _number(value) for name, value in most.items()},
    }


def _group(group: Sequence[Transcript], pieces: Pieces) -> dict[str, Any]:
    prompt = group[0].rollout.prompt
    rollouts = [_rollout(t, pieces) for t in group]
    return {"g": group[0].group, "id": prompt.id, "task": prompt.task, "prompt": prompt.text, "gold": prompt.gold, "rollouts": rollouts}


def _rollout(t: Transcript, pieces: Pieces) -> dict[str, Any]:
    """lp, mm, adv, v are of the sampled tokens: a list, or one number that all share. s: lengths of stretches, the first not sampled."""
    r, tokens = t.rollout, list(t.tokens)
    sampled = [token for token in tokens if token.sampled]
    stretches = [sum(1 for _ in each) for _, each in groupby(token.sampled for token in tokens)]
    return {
        "i": r.index,
        "reward": _number(r.reward),
        "parts": [[part.name, _number(part.value)] for part in r.reward_parts],
        "labels": list(r.labels),
        "answer": r.answer,
        "stop": r.stop_reason,
        "calls": r.num_tool_calls,
        "t": [pieces.number(token.token_id, token.text, token.special) for token in tokens],
        "s": stretches,
        "lp": [_number(token.logp) for token in sampled],
        "mm": _same_or_list([_number(token.mismatch, 3) for token in sampled]),
        "adv": _same_or_list([_number(token.advantage) for token in sampled]),
        "v": _same_or_list([token.version for token in sampled]),
        "m": [[m.role, m.name, m.channel, m.recipient, len(m.header), len(m.body), len(m.end)] for m in t.messages],
    }


def _same_or_list(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _number(value: float | None, digits: int = 4) -> float | int | str | None:
    """Fewer digits than the archive has: the page is for the eye."""
    if value is None or not math.isfinite(value):
        return None if value is None else to_json(value)
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def _block(key: str, value: Any) -> str:
    return f'<script type="application/json" id="data-{key}">{_harmless(value)}</script>'


def _harmless(value: Any) -> str:
    """JSON that cannot end the element it stands in: no <, > or & outside of an escape."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _asset(name: str) -> str:
    return files("megatron_gptoss.obs").joinpath("page", name).read_text(encoding="utf-8")


def blocks_of(page: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of every block of data, for whoever wants to read a page again."""
    from html.parser import HTMLParser

    found: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            self.inside = (named.get("id") or "") if tag == "script" and named.get("type") == "application/json" else ""

        def handle_data(self, data: str) -> None:
            if getattr(self, "inside", ""):
                found.append((self.inside.removeprefix("data-"), data))
                self.inside = ""

    Reader().feed(page)
    for key, text in found:
        yield key, json.loads(text)
