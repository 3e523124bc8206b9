"""What `gptoss check` says: of one node, or of many that have each been checked.

In: the configuration and the plan, or the JSON of each node's own check. Out: PASS or FAIL a line, the table of attention backends, and
a last line that says it all; or one JSON object. It measures nothing (node_checks.py and config/machine.py do).
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.machine import FILES, NODE, SOFTWARE, Check, machine_checks, software_checks
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.launch.node_checks import (
    ATTENTION,
    BACKENDS,
    COMPUTING,
    LINKS,
    Findings,
    Meeting,
    cell_word,
    computing,
    node_checks,
)  # fmt: skip

WORDS = {True: ("PASS", "green"), False: ("FAIL", "bold red"), None: ("--", "dim")}
CELLS = {"right": "green", "WRONG": "bold red", "failed": "red", "refused": "yellow", "not here": "dim"}
ABOUT = (SOFTWARE, NODE, FILES, COMPUTING, ATTENTION, LINKS)
VERSION = re.compile(r"\d[\w.+]*")
WIDTH = 140  # where there is no terminal


@dataclass(frozen=True)
class Report:
    host: str
    device: str
    seconds: float
    checks: list[Check]
    attention: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, Any] = field(default_factory=dict)
    bad_hosts: list[str] = field(default_factory=list)  # others, that this one found at fault

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]

    def as_json(self) -> dict[str, Any]:
        return {"host": self.host, "ok": not self.failed, **{k: v for k, v in asdict(self).items() if k != "host"}}


def check_node(loaded: Loaded, plan: RunPlan, *, software: bool, meeting: Meeting | None = None) -> Report:
    """`software`: only what an image holds. `meeting`: measure links to other hosts too, which do the same at the same time."""
    start = time.monotonic()
    if software:
        found, checks = Findings(), [*software_checks(loaded, plan), *computing("cpu")]
    else:
        checks = machine_checks(loaded, plan)
        found = node_checks(loaded, plan, meeting)
        checks += found.checks
    host = meeting.me if meeting else socket.gethostname()
    return Report(host, plan.device, time.monotonic() - start, checks, found.attention, found.links, found.bad_hosts)


def meeting(hosts: str, at: str, me: str) -> Meeting | None:
    """From the command line: hosts by commas, ADDRESS:PORT or "", this host's name among them or ""."""
    if not hosts:
        return None
    names = tuple(filter(None, hosts.split(",")))
    me = me or next((n for n in names if n in (socket.gethostname(), socket.gethostname().partition(".")[0])), "")
    if me not in names:
        raise ConfigError(
            f"--links {hosts} has no {me or socket.gethostname()}. It names all hosts, this one too; --as says which one this is."
        )
    at = at or f"{names[0]}:29499"
    if not at.rpartition(":")[2].isdigit():
        raise ConfigError(f"--meet {at} is not ADDRESS:PORT.")
    return Meeting(names, me, at)


def read_reports(files: Sequence[Path]) -> list[Report]:
    """One for each file, NODE.json; a node whose check did not end has a failed one with its last words."""
    reports = []
    for file in files:
        try:
            text = file.read_text()
        except OSError as error:
            raise ConfigError(f"--read {file}: {error.strerror}") from None
        # srun says in the same file that the step has failed, in lines of its own, in the middle of what a node has still to say.
        found = _object("".join(line for line in text.splitlines(keepends=True) if not line.startswith(("srun: ", "slurmstepd: "))))
        if "checks" not in found:
            last = (text.strip().splitlines() or ["no words"])[-1][:300]
            reports.append(Report(file.stem, "", 0.0, [Check("check", False, f"did not end: {last}")]))
            continue
        found = {k: v for k, v in found.items() if k != "ok"}
        reports.append(Report(**found | {"host": file.stem, "checks": [Check(**check) for check in found["checks"]]}))
    return reports


def _object(text: str) -> dict[str, Any]:
    """The JSON object in it; srun may have said something before and after."""
    try:
        return json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])[0]
    except ValueError:
        return {}


def bad_nodes(reports: Sequence[Report]) -> list[str]:
    """By their own check, or by that of others. A first host that only found others at fault is not bad itself."""
    blamed = {host for report in reports for host in report.bad_hosts}
    own = {r.host for r in reports if any(c.about != LINKS for c in r.failed) or (r.failed and not blamed)}
    return [r.host for r in reports if r.host in own | blamed] + sorted(blamed - {r.host for r in reports})


# ---- for a person -------------------------------------------------------------------------------------------------------------------


def show(report: Report, console: Console | None = None) -> None:
    """Everything of one node."""
    console = console or _console()
    table = _table(f"check of {report.host}")
    for about in ABOUT:
        checks = [check for check in report.checks if check.about == about]
        tested = [check for check in checks if check.ok and VERSION.fullmatch(check.found)]
        if checks:
            table.add_row("", Text(about, style="bold"))
        if tested:
            words = ", ".join(f"{check.name} {check.found}" for check in tested)
            table.add_row(_word(tested[0]), Text(f"as tested: {words}"))
        for check in (c for c in checks if c not in tested):
            table.add_row(_word(check), Text(f"{check.name}: {check.found}"))
    console.print(table)
    if report.attention:
        console.print(_backends(report))
    verdict = f"FAIL: {', '.join(c.name for c in report.failed)}" if report.failed else "PASS"
    console.print(Text(f"{verdict} ({report.host}, {len(report.checks)} checks in {report.seconds:.0f} s)"), soft_wrap=True)


def show_many(reports: Sequence[Report], console: Console | None = None) -> None:
    """A line for each node, what failed on it, and links."""
    console = console or _console()
    table = _table(f"check of {len(reports)} nodes")
    for report in reports:
        gpus = sum(c.name.startswith("GPU ") for c in report.checks)
        words = f"{report.host}: {len(report.checks)} checks in {report.seconds:.0f} s" + (f", {gpus} GPUs" if gpus else "")
        table.add_row(_word(Check("", not report.failed, "")), Text(words))
        for check in report.failed:
            table.add_row("", Text(f"{check.name}: {check.found}"))
        if len(report.links.get("hosts", [])) > 1:
            for check in (c for c in report.checks if c.about == LINKS and c.ok):
                table.add_row("", Text(f"{check.name}: {check.found}"))
    console.print(table)
    bad = bad_nodes(reports)
    console.print(Text(f"FAIL: {', '.join(bad)}" if bad else f"PASS: {', '.join(r.host for r in reports)}"), soft_wrap=True)


def _backends(report: Report) -> Table:
    """Backends against {sinks} x {one sequence, packed} x {full, window}."""
    kinds = [(sinks, packed, window) for sinks in (True, False) for packed in (False, True) for window in (False, True)]
    table = Table(title=Text("attention backends, tried", style="bold"), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column("")
    for sinks, packed, window in kinds:
        table.add_column(f"{'sinks' if sinks else 'no sinks'}\n{'packed' if packed else 'single'}\n{'window' if window else 'full'}")
    for backend in BACKENDS:
        cells = {(c["sinks"], c["packed"], c["window"]): cell_word(c, report.device) for c in report.attention if c["backend"] == backend}
        table.add_row(backend, *(Text(cells[kind], style=CELLS[cells[kind]]) for kind in kinds))
    return table


def _table(title: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False, box=box.SIMPLE, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _word(check: Check) -> Text:
    word, style = WORDS[check.ok]
    return Text(word, style=style)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console
