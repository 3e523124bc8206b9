"""Is what this node computes with in order: processors, attention backends, links, memory, clock?

In: the configuration, the plan, and what the probes beside this file measured, each a process of its own. Out: `Check`s and the figures
behind them. Never raises for a bad machine. Packages, files and ports are config/machine.py's; whether trainer and engine agree is
`gptoss check --parity`'s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_gptoss
from megatron_gptoss.config.host_memory import host_bytes_per_node
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.machine import FILES, NODE, Check, attempt
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.obs.run_dir import find_weights

COMPUTING, ATTENTION, LINKS = "processors", "attention", "links"
HERE = "megatron_gptoss.launch"
PROBE_TIMEOUT_S = 60
ATTENTION_TIMEOUT_S = 75  # kernels are compiled
LINKS_TIMEOUT_S = 150
# Least TFLOP/s of a bfloat16 product of 8192^3 in a healthy GPU; an H200 was measured at 778 (docs/performance.md).
LEAST_TFLOPS = {"H200": 550.0, "H100": 450.0}
# Least GB/s one way between GPUs of a host that NVLink joins. A pair that goes through the host instead has about 50.
LEAST_GB_PER_S = {"NVIDIA H200": 120.0, "NVIDIA H100 80GB HBM3": 120.0}
LEAST_SHARE = 0.8  # of the node's fastest product: a GPU that throttles is slower than its neighbours
LEAST_LINK_SHARE = 0.6  # of the fastest link: one of half the width is found, and noise is not
MAX_CLOCK_S = 5.0  # between this node and the file system that all nodes write to
BACKENDS = ("reference", "triton", "flash", "te")
MAX_ERROR = {"cpu": 1e-4, "cuda": 2e-2}  # relative; in bfloat16 right ones have 3e-3, one that ignores the sink 4e-2 and more


@dataclass(frozen=True)
class Meeting:
    """Which hosts measure their links together, and where they meet."""

    hosts: tuple[str, ...]
    me: str
    at: str  # address:port
    patience_s: float = 90.0  # a host that comes later is named as missing


@dataclass
class Findings:
    checks: list[Check] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)  # cells of the table of backends
    links: dict[str, Any] = field(default_factory=dict)
    bad_hosts: list[str] = field(default_factory=list)  # others that this one found at fault


def node_checks(loaded: Loaded, plan: RunPlan, meeting: Meeting | None = None) -> Findings:
    """One after the other where there are GPUs, since each of them wants the GPUs for itself."""
    found = Findings([_memory(loaded, plan), _clock(plan.run_dir), *_weights(loaded)])
    found.checks += computing(plan.device)
    gpus = [c for c in found.checks if c.about == COMPUTING and c.name.startswith("GPU ")]
    found.attention = try_attention(plan.device, here=plan.device == "cpu" or (gpus[:1] != [] and gpus[0].ok is True))
    found.checks += judge_attention(found.attention, plan.attention_full, plan.attention_windowed, plan.device)
    fit = all(c.ok is not False for c in found.checks if c.about == COMPUTING)
    found.links = measure_links(plan.device, len(gpus) if plan.device == "cuda" else 2, fit, meeting)
    found.checks += judge_links(found.links, gpus[0].found if gpus else "", meeting)
    found.bad_hosts = slow_or_missing(found.links)
    return found


# ---- processors ---------------------------------------------------------------------------------------------------------------------


def computing(device: str) -> list[Check]:
    """What the processors do, measured; `device`: what the run computes on."""
    node = run_probe("gpu_probe")
    if "fault" in node:
        return [Check("CPU", False, f"torch does not compute here: {node['fault']}", COMPUTING)]
    count = node["gpus"] if device == "cuda" else 0
    with ThreadPoolExecutor(max(count, 1)) as pool:
        gpus = list(pool.map(lambda i: run_probe("gpu_probe", str(i)) | {"index": i}, range(count)))
    return judge(node, gpus, device)


def judge(node: dict[str, Any], gpus: Sequence[dict[str, Any]], device: str) -> list[Check]:
    """What the measurements mean. `device`: what the run computes on."""
    checks = [_check("CPU", node["cpu"]["wrong"] == 0, _product_words(node["cpu"], "GFLOP/s", 1e3))]
    if device == "cpu":
        return checks
    if not gpus:
        words = f'torch sees none: {node["why_none"]}. Does nvidia-smi? On a CPU: cluster.device = "cpu"'
        return [*checks, _check("GPUs", False, words)]
    drivers = sorted({of_one["driver"] for of_one in node["smi"].values()})
    versions = [f"{name} {version}" for name, version in node["versions"].items() if version]
    checks.append(_check("driver", True, ", ".join([*versions, f"driver {' and '.join(drivers)}" if drivers else "no nvidia-smi here"])))
    fastest = max((gpu["tflops"] for gpu in gpus if "tflops" in gpu), default=0.0)
    checks += [_gpu(gpu, fastest, node["smi"].get(gpu.get("uuid", ""), {})) for gpu in gpus]
    uuids = [gpu["uuid"] for gpu in gpus if "uuid" in gpu]
    twice = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
    checks.append(_check("GPUs differ", not twice, f"seen twice: {', '.join(twice)}" if twice else f"{len(uuids)} UUIDs"))
    return checks


def _gpu(gpu: dict[str, Any], fastest: float, smi: dict[str, str]) -> Check:
    name = f"GPU {gpu['index']}"
    if fault := gpu.get("error") or gpu.get("fault"):
        return _check(name, False, " ".join(filter(None, [gpu.get("name"), gpu.get("uuid"), fault])))
    least = max(next((tflops for model, tflops in LEAST_TFLOPS.items() if model in gpu["name"]), 0.0), LEAST_SHARE * fastest)
    words = f"{gpu['name']}, {gpu['uuid']}, {gpu['free_gib']:.1f} of {gpu['total_gib']:.1f} GiB free, {_product_words(gpu, 'TFLOP/s', 1.0)}"
    if smi:
        words += f", {smi['celsius']} °C, {smi['ecc']} uncorrected memory errors"
    if gpu["wrong"]:
        return _check(name, False, words)
    if smi.get("ecc", "0").isdigit() and int(smi.get("ecc", "0")):
        return _check(name, False, f"{words}: take it out of service")
    if gpu["tflops"] < least:
        return _check(name, False, f"{words}: too slow, {least:.0f} is the least. Clocks, heat, another process?")
    if gpu["free_gib"] < 0.97 * gpu["total_gib"]:
        return _check(name, False, f"{words}: somebody else's process holds memory (nvidia-smi)")
    return _check(name, True, words)


def _product_words(found: dict[str, Any], unit: str, scale: float) -> str:
    right = "every element right" if not found["wrong"] else f"{found['wrong']} elements of a matrix product WRONG"
    return f"{right}, {found['tflops'] * scale:.0f} {unit} in bfloat16"


# ---- attention ----------------------------------------------------------------------------------------------------------------------


def try_attention(device: str, *, here: bool) -> list[dict[str, Any]]:
    """One cell for each of {backend} x {sinks, none} x {one sequence, packed} x {full, window}. All backends are tried at once, on the
    first GPU; `here`: it is there and sound."""
    # Compilers take long, so that sinks and none are a process each; on a CPU there is nothing to compile.
    kinds: list[tuple[str, ...]] = [("sinks",), ("plain",)] if device == "cuda" else [("sinks", "plain")]
    tries = [(backend, kind) for backend in BACKENDS for kind in kinds]
    with ThreadPoolExecutor(len(tries)) as pool:
        return [cell for cells in pool.map(lambda one: _cells(one[0], one[1], device, here), tries) for cell in cells]


def _cells(backend: str, kinds: Sequence[str], device: str, here: bool) -> list[dict[str, Any]]:
    wanted = [
        {"backend": backend, "sinks": kind == "sinks", "packed": packed, "window": window}
        for kind in kinds
        for packed in (False, True)
        for window in (False, True)
    ]
    if not here:
        return [cell | {"absent": "there is no sound GPU 0"} for cell in wanted]
    if device == "cpu" and (backend in ("flash", "te") or (backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1")):
        return [cell | {"absent": "it needs a GPU"} for cell in wanted]
    lines, fault = _run([sys.executable, "-m", f"{HERE}.attention_probe", backend, device, *kinds], ATTENTION_TIMEOUT_S)
    cells = [json.loads(line) for line in lines if line.startswith('{"backend"')]
    return cells + [cell | {"failed": fault or "no answer"} for cell in wanted[len(cells) :]]


def cell_word(cell: dict[str, Any], device: str) -> str:
    """What a cell of the table says: right; WRONG; not here; refused, by the backend itself; failed, in a way that nobody foresaw."""
    for key, word in (("absent", "not here"), ("refused", "refused"), ("failed", "failed")):
        if key in cell:
            return word
    return "right" if cell["error"] is not None and cell["error"] <= MAX_ERROR[device] else "WRONG"


def judge_attention(cells: Sequence[dict[str, Any]], full: str, windowed: str, device: str) -> list[Check]:
    """A backend that the configuration uses must be right with sinks, packed and not, in the layers that it is used for; of the others it
    is only said what they do."""
    checks = []
    for backend in BACKENDS:
        mine = [c for c in cells if c["backend"] == backend]
        needed = [c for c in mine if c["sinks"] and backend == (windowed if c["window"] else full)]
        faults = [c for c in needed if cell_word(c, device) != "right"]
        told = _told(mine, device)
        if faults:
            told = f"{_where(faults[0])}: {_why(faults[0], device)}"
        checks.append(Check(f"attention {backend}", not faults if needed else None, told + ("" if needed else " (not used)"), ATTENTION))
    return checks


def _told(cells: Sequence[dict[str, Any]], device: str) -> str:
    right = [c for c in cells if cell_word(c, device) == "right"]
    if len(right) == len(cells):
        return f"right with sinks and without, packed and not, full and windowed; largest error {max(c['error'] for c in right):.0e}"
    others = {_why(c, device): _where(c) for c in reversed(cells) if cell_word(c, device) != "right"}  # the first place of each reason
    words = "; ".join(f"{where}: {why}" for why, where in reversed(others.items())) if right else next(iter(others))
    return f"{len(right)} of {len(cells)} cases right; {words}" if right else words


def _where(cell: dict[str, Any]) -> str:
    shape, mask = "packed" if cell["packed"] else "one sequence", "window" if cell["window"] else "full"
    return f"{shape}, {mask}, {'sinks' if cell['sinks'] else 'no sinks'}"


def _why(cell: dict[str, Any], device: str) -> str:
    if cell_word(cell, device) == "WRONG":
        size = "not a number" if cell["error"] is None else f"{cell['error']:.1e}, {MAX_ERROR[device]:.0e} is allowed"
        return f"WRONG {cell['worst']}: relative error {size}"
    return cell.get("absent") or cell.get("refused") or cell["failed"]


# ---- links --------------------------------------------------------------------------------------------------------------------------


def measure_links(device: str, ranks: int, fit: bool, meeting: Meeting | None) -> dict[str, Any]:
    """link_probe.py's figures; of this host alone without a meeting."""
    if meeting is None:
        if ranks < 2 or not fit:
            return {}
        meeting = Meeting(("this host",), "this host", "127.0.0.1:0", 30.0)
    order = {
        "device": device, "ranks": ranks, "hosts": meeting.hosts, "me": meeting.me, "meet": meeting.at, "fit": fit and ranks > 0,
        "patience_s": meeting.patience_s,
    }  # fmt: skip
    return run_probe("link_probe", json.dumps(order), timeout_s=LINKS_TIMEOUT_S + meeting.patience_s)


def judge_links(found: dict[str, Any], gpu: str, meeting: Meeting | None) -> list[Check]:
    """`gpu`: what is said of this node's first one, which begins with its model."""
    if not found:
        return []
    if fault := found.get("fault") or found.get("error"):
        late = f"; never joined: {', '.join(found['late'])}" if found.get("late") else ""
        return [Check("links", False, f"{fault}{late}", LINKS)]
    checks = []
    if found["pairs"]:
        least = LEAST_GB_PER_S.get(gpu.partition(",")[0], 0.0)
        several = len({pair["host"] for pair in found["pairs"]}) > 1
        label = (lambda p: f"{p['host']}:{p['from']} to {p['to']}") if several else (lambda p: f"{p['from']} to {p['to']}")
        checks.append(_speeds("inside a host", found["pairs"], label, least))
    if found["between"]:
        checks.append(_speeds("between hosts", found["between"], lambda p: f"{p['from']} to {p['to']}", 0.0))
    if found["together"]:
        checks.append(Check("all together", True, f"all-reduce {found['together']:.3g} GB/s over {', '.join(found['hosts'])}", LINKS))
    if found.get("wrong"):
        checks.append(Check("what arrives", False, f"other bytes than were sent: {'; '.join(found['wrong'])}", LINKS))
    if meeting is not None and (found["missing"] or found["unfit"]):
        words = [f"{name}: {', '.join(hosts)}" for name, hosts in (("did not come", found["missing"]), ("unfit", found["unfit"])) if hosts]
        checks.append(Check("hosts", False, "; ".join(words), LINKS))
    return checks


def _speeds(name: str, links: Sequence[dict[str, Any]], label: Any, least: float) -> Check:
    speeds = [link["gb_per_s"] for link in links]
    least = max(least, LEAST_LINK_SHARE * max(speeds) if len(links) > 2 else 0.0)
    slow = [link for link in links if link["gb_per_s"] < least]
    words = f"{len(links)} directed pairs, {min(speeds):.3g} to {max(speeds):.3g} GB/s"
    if slow:
        words += f"; below {least:.3g}: " + ", ".join(f"{label(link)} {link['gb_per_s']:.3g}" for link in slow[:8])
        words += f" and {len(slow) - 8} more" if len(slow) > 8 else ""
    return Check(name, not slow, words, LINKS)


def slow_or_missing(found: dict[str, Any]) -> list[str]:
    """Hosts that did not come, or all of whose links to others are slow. Of one slow link between two sound hosts neither is to blame."""
    between = found.get("between", [])
    least = LEAST_LINK_SHARE * max((link["gb_per_s"] for link in between), default=0.0)
    hosts = sorted({link["from"] for link in between}) if len(between) > 2 else []
    slow = [h for h in hosts if all(link["gb_per_s"] < least for link in between if h in (link["from"], link["to"]))]
    return [*found.get("missing", []), *found.get("unfit", []), *slow]


# ---- memory, clock, files ---------------------------------------------------------------------------------------------------------------


def _memory(loaded: Loaded, plan: RunPlan) -> Check:
    """What the plan puts into host memory is there. Object store and engines' own memory are not counted."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    need = host_bytes_per_node(loaded.config) if plan.device == "cuda" else 0
    words = f"{free / 2**30:.1f} GiB available" + (f", its ranks need {need / 2**30:.1f}" if need else "")
    return Check("host memory", free >= need, words, NODE)


def _weights(loaded: Loaded) -> list[Check]:
    """Of the folder that the run starts from, every file that its index names is there and not cut off. Headers are read, not numbers."""
    run = loaded.config.run

    def look() -> str:
        from megatron_gptoss.checkpoint.shards import find_tensors  # imports torch

        source = find_weights(Path(run.resume or run.init))
        if source.kind != "huggingface":
            return f"{source.path}, a whole checkpoint"
        tensors = find_tensors(source.path)
        return f"{source.path}, {len(tensors)} tensors in {len({place.file for place in tensors.values()})} files"

    return [attempt("weights", look, FILES)] if run.resume or run.init else []


def _clock(run_dir: Path) -> Check:
    """This node's clock against that of the file system with the runs, which is the same for all nodes where it is shared."""
    folder = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".gptoss-clock-") as file:
            before = time.time()
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            skew = Path(file.name).stat().st_mtime - (before + time.time()) / 2
    except OSError as error:
        return Check("clock", False, f"{folder} cannot be written to: {error.strerror}", NODE)
    return Check("clock", abs(skew) <= MAX_CLOCK_S, f"{skew:+.1f} s from the file system of {folder}", NODE)


# ---- probes -------------------------------------------------------------------------------------------------------------------------


def run_probe(name: str, *arguments: str, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Any]:
    """The last object that it printed, or {"fault": words}."""
    lines, fault = _run([sys.executable, "-m", f"{HERE}.{name}", *arguments], timeout_s)
    objects = [line for line in lines if line.startswith("{")]
    return json.loads(objects[-1]) if objects and not fault else {"fault": fault or "no answer"}


def _run(command: Sequence[str], timeout_s: float) -> tuple[list[str], str]:
    """Lines of stdout, and what went wrong."""
    root = str(Path(megatron_gptoss.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A session of its own, so that what a probe has started ends with it.
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipe) as process:
        try:
            out, words = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            out, words = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return out.splitlines(), f"it did not end within {timeout_s:.0f} s; see nvidia-smi and dmesg"
    if process.returncode:
        return out.splitlines(), (words.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
    return out.splitlines(), ""


def _check(name: str, ok: bool, found: str) -> Check:
    return Check(name, ok, found, COMPUTING)
