"""The published failures of GPT-OSS reinforcement learning, their causes one by one, and the cure: the same run under a table of settings.

    python tools/reproduce.py configs/small_h200.toml                     all settings, seeds 0 and 1, one run at a time, then the figures
    python tools/reproduce.py configs/small_h200.toml --only b,c --jobs 4 --minutes 9
    python tools/reproduce.py --draw                                      the figures and tables again, from what is kept

In: configuration files and flags, which go to every run. Out: of each run the few metrics that the figures need, docs/reproduction/*.jsonl,
and one figure for each question with a table in docs/reproduction.md; of the long run also whether it met its bars, and the timeline of its
last steps (with --run.trace_steps=3). All runs of a seed begin from one warm start of that seed, made first when there is none. A run whose
metrics are kept, with the same values, flags and steps, is not made again; after `--minutes`, and at Ctrl-C, what runs is stopped, kept as
far as it came, and made again by the next call. What is kept never gives way to less. What figures say in words is written by hand, between
the tables.

A setting is a layer of flags over the configuration. Several runs share a GPU (--jobs) when each engine's share is small: by default
each then takes 0.6 of a GPU over the jobs on it, less its trainer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError, DataError, GptossError
from megatron_gptoss.obs.curves import Panel, Rows, draw_curves
from megatron_gptoss.obs.json_floats import NOT_FINITE, to_json
from megatron_gptoss.obs.metrics import read_metrics
from megatron_gptoss.obs.report import points
from megatron_gptoss.obs.run_dir import RunDir, write_atomic
from megatron_gptoss.obs.spans import STEP, TRACE, chrome_trace_spans, crowds, shares, table_rows, write_trace

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("step", "reward/mean", "eval/success", "grad/norm", "policy/entropy", "policy/kl_ref", "policy/clip_fraction",
        "policy/ratio_max_abs_dev", "mismatch/k3", "mismatch/logp_abs_mean", "mismatch/log_ppl_diff", "mismatch/log_ppl_abs_diff",
        "mismatch/ess", "mismatch/masked_fraction", "mismatch/truncated_fraction", "mismatch/truncated_seq_fraction",
        "router/replayed_fraction", "rollout/length_mean", "train/skipped", "time/step_s")  # fmt: skip
PANELS = (
    Panel("Reward of the training rollouts", "reward/mean", "mean of 5 steps", smooth=5),
    Panel("Success on held-out problems", "eval/success", "share solved"),
    Panel("Gradient norm, before clipping", "grad/norm", logarithmic=True),
    Panel("Entropy of the policy", "policy/entropy", "nats per token"),
    Panel("KL to the warm start", "policy/kl_ref", "nats per token (k3)"),
    Panel("Tokens whose ratio is clipped", "policy/clip_fraction", "share"),
    Panel("Trainer against engine, KL (k3)", "mismatch/k3", "nats per token", logarithmic=True),
    Panel("Trainer against engine, log-perplexity", "mismatch/log_ppl_abs_diff", "mean absolute gap", logarithmic=True),
)
# Of every run. The KL term is far too small to matter; with it the distance to the warm start is measured.
COMMON = ("--run.save_every=0", "--run.save_at_end=false", "--run.archive_scores=false", "--rl.kl_coef=1e-6")
NOISE = "--diagnose.routing_noise=0.1"
ANOTHER_MODEL = "--parity.enabled=false"  # the trainer is wrong on purpose, and the self-test would say so
# An update moves an output by the width behind it times the learning rate, and the dense model is eight times as wide as four experts: at
# the recipe's rates it does not learn to copy (docs/reproduction.md).
DENSE_RATES = ("--sft.lr=1.5e-4", "--sft.steps=800", "--rl.lr=2.5e-5")
STARTING, START_APART_S = threading.Lock(), 3.0
FINISHED, STOPPED, FAILED = "finished", "out of time", "failed"
LONG = "main"  # the setting whose run has bars to meet, and a timeline


@dataclass(frozen=True)
class Setting:
    words: str
    flags: tuple[str, ...] = ()
    warm: str = "moe"  # which warm start it begins from
    own_steps: bool = False  # as many as the configuration says, not the call


SETTINGS = {
    "main": Setting("everything on, the long run", own_steps=True),
    "all-on": Setting("everything on"),
    "sinks-ignored": Setting("sinks ignored in the trainer", ("--diagnose.ignore_sinks=true", ANOTHER_MODEL)),
    "sinks-untrained": Setting("sinks forward, but no gradient", ("--diagnose.drop_sink_gradient=true",)),
    "noise-scored": Setting("routing noise, old log-probs scored", (NOISE, ANOTHER_MODEL, "--rl.old_logp=scored")),
    "noise-detached": Setting("routing noise, old log-probs detached", (NOISE, ANOTHER_MODEL)),
    "noise-replayed": Setting("routing noise, the engine's experts replayed", (NOISE, ANOTHER_MODEL, "--rl.router_replay=engine")),
    "none": Setting("no correction", ("--rl.correction=none",)),
    "sequence": Setting("correction by sequence (seq-tis)", ("--rl.correction=seq-tis",)),
    "geometric": Setting("geometric correction (geo-tis)", ("--rl.correction=geo-tis",)),
    "replay": Setting("the engine's experts replayed", ("--rl.router_replay=engine",)),
    "frozen-attention": Setting("attention frozen", ("--diagnose.freeze_attention=true",)),
    "frozen-experts": Setting("experts frozen", ("--diagnose.freeze_experts=true",)),
    "frozen-router": Setting("router frozen", ("--diagnose.freeze_router=true",)),
    "dense": Setting("a dense model of the same size", warm="dense"),
    "sinks-ignored-none": Setting("sinks ignored, no correction", ("--diagnose.ignore_sinks=true", ANOTHER_MODEL, "--rl.correction=none")),
    "sinks-ignored-sequence": Setting(
        "sinks ignored, correction by sequence", ("--diagnose.ignore_sinks=true", ANOTHER_MODEL, "--rl.correction=seq-tis")
    ),
}


@dataclass(frozen=True)
class Question:
    title: str
    settings: tuple[str, ...]  # the first is what the others are compared with


QUESTIONS = {
    "a": Question("Everything on", ("main",)),
    "b": Question("Sinks ignored in the trainer, as FlashAttention 2 did", ("all-on", "sinks-ignored")),
    "c": Question("Sinks in the forward pass, but no gradient for them", ("all-on", "sinks-untrained")),
    "d": Question("Old log-probs from a pass of their own under routing noise", ("noise-detached", "noise-scored")),
    "e": Question("Corrections for what trainer and engine compute differently", ("all-on", "none", "sequence", "geometric")),
    "f": Question("With and without router replay", ("all-on", "replay", "noise-detached", "noise-replayed")),
    "g": Question("One part of the model not trained", ("all-on", "frozen-attention", "frozen-experts", "frozen-router")),
    "h": Question("Mixture of experts and a dense model of the same size", ("all-on", "dense")),
    "i": Question(
        "Do corrections cure a trainer without sinks?", ("sinks-ignored", "sinks-ignored-none", "sinks-ignored-sequence")
    ),
}  # fmt: skip


# ---- what is kept of a run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One file of docs/reproduction: a line about the run, then a line a step."""

    setting: str
    seed: int
    steps: int  # that the run was to have
    ended: str  # FINISHED, STOPPED or FAILED
    seconds: float  # from its start to its end, engines and all; without the warm start
    warm: str  # which warm start it began from: a mark of its records
    made_from: list[str]  # configuration files by name and values, and flags
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.seed}"

    def write(self, folder: Path) -> bool:
        """False, and nothing is written, where a run is kept that came further."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.name}.jsonl"
        if self.ended != FINISHED and file.exists():
            before = read_kept(file)
            if before.ended == FINISHED or len(before.rows) > len(self.rows):
                return False
        about = asdict(self)
        del about["rows"]
        rows = [{k: _short(v) for k, v in row.items() if k in KEPT} for row in self.rows]
        write_atomic(file, "".join(json.dumps(each) + "\n" for each in (about, *rows)))
        return True


def _short(value: Any) -> Any:
    """Five digits are more than a figure shows."""
    return to_json(float(f"{value:.5g}")) if isinstance(value, float) else value


def read_kept(file: Path) -> Kept:
    try:
        about, *rows = map(json.loads, file.read_text().splitlines())
        return Kept(rows=[{k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()} for row in rows], **about)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is no line about a run with a line for each of its steps below: {error}. Remove it.") from None


def kept_runs(folder: Path) -> dict[str, list[Kept]]:
    """Setting -> its runs by seed, in the order of SETTINGS."""
    found = [read_kept(file) for file in sorted(folder.glob("*.jsonl"))]
    runs = {name: sorted((k for k in found if k.setting == name), key=lambda k: k.seed) for name in SETTINGS}
    return {name: of for name, of in runs.items() if of}


# ---- running ----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What one call does."""

    configs: list[str]
    flags: list[str]
    runs: Path
    out: Path
    steps: int
    jobs: int
    gpus: int
    deadline: float  # of time.monotonic()
    warm: dict[tuple[str, int], Path] = field(default_factory=dict)  # of a kind of model, of a seed
    slots: queue.Queue[int] = field(default_factory=queue.Queue)
    longest_s: float = 0.0  # of the runs that ended well in this call

    def steps_of(self, setting: Setting) -> int:
        return config_of(self.configs, self.flags).run.steps if setting.own_steps else self.steps

    def layer(self, name: str) -> list[str]:
        setting = SETTINGS[name]
        short = () if setting.own_steps else ("--run.eval_every=0",)  # held-out success of the long run is a curve, of the others its ends
        return [*COMMON, *short, *self.flags_of(setting.warm), *setting.flags]

    def flags_of(self, kind: str) -> list[str]:
        """The call's, for one kind of model. Later flags win: the call's over the dense model's rates, its sizes over the call's."""
        return [*DENSE_RATES, *self.flags, *dense_flags(self.configs, self.flags)] if kind == "dense" else self.flags

    def made_from(self, name: str) -> list[str]:
        return [*map(values_of, self.configs), *self.layer(name)]

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def config_of(configs: Sequence[str], flags: Sequence[str]) -> Config:
    return load(*parse_flags([*configs, *flags])).config


def values_of(config: str) -> str:
    """small_h200.toml@1f0c9ab2: another mark when a value in it has changed, comments and order aside."""
    values = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    return f"{Path(config).name}@{hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]}"


def dense_flags(configs: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Two experts that every token visits, together as wide as all: as many parameters, and nothing to choose. Megatron refuses one."""
    model = config_of(configs, flags).model
    half = model.num_local_experts * model.intermediate_size // 2
    return ["--model.num_local_experts=2", "--model.num_experts_per_tok=2", f"--model.intermediate_size={half}"]


def gptoss(plan: Plan, arguments: Sequence[str], log: Path, slot: int) -> int | None:
    """Run it to its end or to the deadline; None for the latter. Its processes do not outlive it."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(slot % plan.gpus)} if plan.gpus else {})
    command = [sys.executable, "-m", "megatron_gptoss.cli", *arguments, f"--cluster.first_port={29500 + 200 * slot}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        while plan.left_s > 0:  # Ctrl-C makes the deadline now
            try:
                return child.wait(timeout=min(plan.left_s + 0.01, 0.5))
            except subprocess.TimeoutExpired:
                continue
        child.send_signal(signal.SIGINT)  # as Ctrl-C: it ends its engines and trainer
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its keeper (loop/orphans.py) ends the rest
            child.wait()
        return None


def start_apart(plan: Plan) -> None:
    """Ray's heads that start in one moment reach for the same ports."""
    with STARTING:
        time.sleep(START_APART_S if plan.jobs > 1 and plan.left_s > 0 else 0)


def make_warm_start(plan: Plan, kind: str, seed: int) -> str:
    """The common warm start of a seed's runs of one kind of model, unless it is there. "" if all is well; else none of them can be made."""
    name = f"warm-{kind}"
    run, log = plan.runs / f"{name}-{seed}", plan.runs / "logs" / f"{name}-{seed}.log"
    if not list(run.glob("checkpoints/step-*/COMPLETE")):
        put_aside(run)
        arguments = ["sft", *plan.configs, *plan.flags_of(kind), f"--run.dir={plan.runs}", f"--run.name={name}", f"--run.id={seed}",
                     f"--run.seed={seed}"]  # fmt: skip
        slot = plan.slots.get()
        try:
            start_apart(plan)
            began = time.monotonic()
            code = gptoss(plan, arguments, log, slot)
        finally:
            plan.slots.put(slot)
        if code != 0:
            how = f"ended with {code}" if code is not None else "was stopped by the deadline"
            return f"{name}, seed {seed}, {how}, and no run can begin from it: {tail(log)}"
        print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s; {last_line(log, 'copies right')}", flush=True)
    plan.warm[kind, seed] = run
    return ""


def make_run(plan: Plan, name: str, seed: int) -> str:
    """Make it, keep its metrics, and say how it went. "" when all is well."""
    setting, slot = SETTINGS[name], plan.slots.get()
    warm = plan.warm[setting.warm, seed]
    try:
        if plan.left_s < max(plan.longest_s, 5.0):
            return f"{name}, seed {seed}: no time left for it"
        run, log = plan.runs / f"{name}-{seed}", plan.runs / "logs" / f"{name}-{seed}.log"
        put_aside(run)
        arguments = ["train", *plan.configs, *plan.layer(name), f"--run.dir={plan.runs}", f"--run.name={name}", f"--run.id={seed}",
                     f"--run.seed={seed}", f"--run.steps={plan.steps_of(setting)}", "--init", str(warm)]  # fmt: skip
        start_apart(plan)
        began = time.monotonic()
        code = gptoss(plan, [*arguments, *share_flags(plan)], log, slot)
        seconds = time.monotonic() - began
        file = RunDir(run).metrics_file
        rows = read_metrics(file) if file.exists() else []
        ended = FINISHED if code == 0 else STOPPED if code is None else FAILED
        kept = Kept(name, seed, plan.steps_of(setting), ended, round(seconds, 1), mark_of(warm), plan.made_from(name), rows)
        less = any("reward/mean" in row for row in rows) and not keep(plan, kept, run)
        words = ", ".join(
            [f"{seconds:.0f} s", summary(rows), *([ended] if code != 0 else []), *(["less than is kept, which stays"] * less)]
        )
        print(f"{name}, seed {seed}: {words}", flush=True)
        if code == 0:
            plan.longest_s = max(plan.longest_s, seconds)
            return ""
        return f"{name}, seed {seed}: {'stopped by the deadline' if code is None else f'ended with {code}: {tail(log)}'}"
    finally:
        plan.slots.put(slot)


def mark_of(warm: Path) -> str:
    """Two warm starts of the same seed differ on a GPU. Their records have times in them, so these always do."""
    file = RunDir(warm).metrics_file
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.exists() else ""


def keep(plan: Plan, kept: Kept, run: Path) -> bool:
    """Its metrics, and of a traced long run its last steps, also when it was stopped before it wrote them. False: more is kept already."""
    if not kept.write(plan.out):
        return False
    trace_steps = config_of(plan.configs, plan.flags).run.trace_steps
    if kept.setting == LONG and trace_steps and write_trace(run, trace_steps):
        (plan.out / f"{kept.name}.trace.json.gz").write_bytes(gzip.compress((run / TRACE).read_bytes(), mtime=0))
    return True


def share_flags(plan: Plan) -> list[str]:
    """Runs that start beside each other on one GPU are told their cache, since free memory changes while each measures it."""
    per_gpu = -(-plan.jobs // max(plan.gpus, 1))
    given = {flag.key for flag in parse_flags(plan.flags)[1]}
    shares = {"rollout.gpu_memory_fraction": f"{0.6 / per_gpu:.3f}", "rollout.gpu_kv_cache_gib": "2.0"}
    return [f"--{key}={value}" for key, value in shares.items() if per_gpu > 1 and key not in given]


def put_aside(run: Path) -> None:
    """A run directory is never written over: what an earlier call left unfinished gets another name."""
    count = 1
    while (aside := run.with_name(f"{run.name}.unfinished-{count}")).exists():
        count += 1
    if run.exists():
        run.rename(aside)


def is_done(plan: Plan, name: str, seed: int) -> bool:
    file = plan.out / f"{name}-{seed}.jsonl"
    if not file.exists():
        return False
    kept = read_kept(file)
    same = kept.steps == plan.steps_of(SETTINGS[name]) and kept.made_from == plan.made_from(name)
    return kept.ended == FINISHED and same and not from_anothers_warm_start(plan.out, kept)


def from_anothers_warm_start(folder: Path, kept: Kept) -> bool:
    """As runs of a higher seed did before each seed had one of its own."""
    alike = (other for of in kept_runs(folder).values() for other in of if SETTINGS[other.setting].warm == SETTINGS[kept.setting].warm)
    return any(other.warm == kept.warm and other.seed < kept.seed for other in alike)


def run_all(plan: Plan, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Seed after seed, so that a call that ends early has each setting once before any twice. What went wrong, a line each."""
    todo = [(name, seed) for seed in seeds for name in names if not is_done(plan, name, seed)]
    print(f"{len(todo)} runs to make, {len(seeds) * len(names) - len(todo)} kept already", flush=True)
    for slot in range(plan.jobs):
        plan.slots.put(slot)
    wanted = list(dict.fromkeys((SETTINGS[name].warm, seed) for name, seed in todo))
    with ThreadPoolExecutor(plan.jobs) as pool:
        warm = {each: pool.submit(make_warm_start, plan, *each) for each in wanted}  # before all runs, so no run waits for one behind it

        def when_warm(name: str, seed: int) -> str:
            return "" if warm[SETTINGS[name].warm, seed].result() else make_run(plan, name, seed)

        runs = [pool.submit(when_warm, name, seed) for name, seed in todo]
        try:
            problems = [each.result() for each in (*warm.values(), *runs)]
        except BaseException:
            plan.deadline = -math.inf  # what runs is stopped and kept, and nothing begins any more
            pool.shutdown(cancel_futures=True)
            raise
    return [problem for problem in problems if problem]


def tail(log: Path, lines: int = 12) -> str:
    return f"{log} ends with\n" + "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def last_line(log: Path, words: str) -> str:
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if words in line), "")


# ---- bars of the long run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    words: str
    met: bool
    found: str


def bars(kept: Kept) -> list[Bar]:
    """What a stable run of everything on has to show. A value that is missing or not a number meets nothing."""
    steps = [row for row in kept.rows if row["step"] > 0 and "reward/mean" in row]
    success = [(row["step"], row["eval/success"]) for row in kept.rows if "eval/success" in row]
    measured = len(success) > 1 and success[0][0] == 0
    rise = success[-1][1] - success[0][1] if measured else math.nan
    ratio, k3 = (_largest([row.get(name, math.nan) for row in steps]) for name in ("policy/ratio_max_abs_dev", "mismatch/k3"))
    return [
        Bar("at least 150 steps in one run of at most 9 minutes, engine start included", len(steps) >= 150 and kept.seconds <= 540,
            f"{len(steps)} steps in {kept.seconds:.0f} s"),
        Bar("held-out success rises by at least 0.3 over the warm start", rise >= 0.3,
            f"{success[0][1]:.3f} -> {success[-1][1]:.3f}, after step {success[-1][0]}" if measured else "not measured at both ends"),
        Bar("`policy/ratio_max_abs_dev` is 0.0 at every step", ratio == 0.0, f"largest {ratio:.3g}"),
        Bar("`mismatch/k3` is below 0.002 at every step", k3 < 0.002, f"largest {k3:.3g}"),
    ]  # fmt: skip


def _largest(values: Sequence[float]) -> float:
    """nan where one is nan, or there is none."""
    return math.nan if not values or any(math.isnan(value) for value in values) else max(values)


def bar_lines(kept: Kept) -> list[str]:
    return [f"{'met' if bar.met else 'NOT MET'}: {bar.words} ({bar.found})" for bar in bars(kept)]


def summary(rows: Rows) -> str:
    success, reward = (points([dict(r) for r in rows], name) for name in ("eval/success", "reward/mean"))
    parts = [f"held-out {success[0][1]:.3f} -> {success[-1][1]:.3f}"] if success else []
    parts += [f"reward {mean(reward[:5]):.2f} -> {mean(reward[-5:]):.2f} over {len(reward)} steps"] if reward else ["no step was made"]
    return ", ".join(parts)


def mean(found: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in found) / len(found)


# ---- figures and tables -----------------------------------------------------------------------------------------------------------------


def draw(folder: Path, page: Path) -> list[Path]:
    """A figure for each question that has runs, and its table in `page`. Returns the figures."""
    runs = kept_runs(folder)
    if not runs:
        raise ConfigError(f"{folder} keeps no runs yet. Make some: python tools/reproduce.py configs/small_h200.toml")
    figures = []
    for letter, question in QUESTIONS.items():
        shown = {name: runs[name] for name in question.settings if name in runs}
        if len(shown) < min(2, len(question.settings)):
            continue  # nothing to compare
        labels = {SETTINGS[name].words: [kept.rows for kept in of] for name, of in shown.items()}
        figures.append(folder / f"{letter}.png")
        draw_curves(f"({letter}) {question.title}", labels, PANELS, figures[-1])
        text = [table(shown, page, figures[-1]), *unlike(shown)]
        text += [f"\nSeed {kept.seed}:\n\n" + "\n".join(f"- {line}" for line in bar_lines(kept)) for kept in shown.get(LONG, ())]
        write_block(page, letter, f"({letter}) {question.title}", "\n".join(text))
    traces = [file for kept in runs.get(LONG, ()) if (file := folder / f"{kept.name}.trace.json.gz").exists()]
    if traces:
        write_block(page, "timeline", "The step's timeline", timeline(traces[0], page))
    return figures


def unlike(shown: Mapping[str, Sequence[Kept]]) -> list[str]:
    """Said below a table whose runs differ in more than its question."""
    made: dict[tuple[str, ...], list[str]] = {}
    warm: dict[tuple[str, int, str], list[str]] = {}
    for kept in (kept for of in shown.values() for kept in of):
        setting = SETTINGS[kept.setting]
        common = [word for word in kept.made_from if word not in setting.flags and not word.startswith("--model.")]
        for rate in DENSE_RATES if setting.warm == "dense" else ():
            if rate in common:
                common.remove(rate)  # the first is the tool's own; the call may say the same to all
        made.setdefault((str(kept.steps), *common), []).append(kept.name)
        warm.setdefault((setting.warm, kept.seed, kept.warm), []).append(kept.name)
    lines = []
    if len(made) > 1:
        lines.append(f"\n**Made with other values, flags or steps than each other:** {'; '.join(', '.join(of) for of in made.values())}.")
    if len(warm) > len({each[:2] for each in warm}):
        lines.append(f"\n**Begun from different warm starts of a seed:** {'; '.join(', '.join(of) for of in warm.values())}.")
    return lines


def timeline(trace: Path, page: Path) -> str:
    """Where the time of the traced steps went: the driver's three largest parts by name, then everything."""
    spans = chrome_trace_spans(json.loads(gzip.decompress(trace.read_bytes())))
    found, steps = shares(spans), [span for span in spans if span.name.startswith(STEP)]
    parts = sorted((share for share in found if share.process == "driver" and len(share.path) == 1), key=lambda share: -share.seconds)
    largest = ", ".join(f"{share.path[0]} {1e3 * share.seconds:.0f} ms ({share.of_step:.0%})" for share in parts[:3])
    mean_ms = sum(span.duration_us for span in steps) / 1e3 / len(steps)
    rows = table_rows(found, crowds(spans))
    width = max(len(name) for name, _ in rows)
    lines = [f"[{trace.name}]({os.path.relpath(trace, page.parent)}) holds the last {len(steps)} steps of {trace.name.split('.')[0]}. Of a "
             f"step's {mean_ms:.0f} ms the three largest parts are: {largest}.", ""]  # fmt: skip
    return "\n".join([*lines, "```", *(f"{name:{width}}  {words}".rstrip() for name, words in rows), "```"])


COLUMNS = ("setting", "seeds", "steps", "held-out before", "after", "reward, last 10", "gradient norm, median", "largest",
           "k3 to the engine, median", "largest", "log-perplexity gap, last 10", "clipped, mean", "ratio off 1 by")  # fmt: skip


def table(shown: Mapping[str, Sequence[Kept]], page: Path, figure: Path) -> str:
    """Figures of one question in Markdown; values of the seeds with a blank between them."""
    lines = [f"![figure]({os.path.relpath(figure, page.parent)})", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name, of in shown.items():
        cells = zip(*(_cells(kept) for kept in of), strict=True)
        seeds = " ".join(str(kept.seed) for kept in of)
        lines.append(f"| {SETTINGS[name].words} | {seeds} | {' | '.join(' '.join(cell) for cell in cells)} |")
    return "\n".join(lines)


def _cells(kept: Kept) -> list[str]:
    def of(name: str) -> list[float]:
        return [value for _, value in points(kept.rows, name)]

    def largest(name: str) -> str:
        """Of all that was measured, nan and inf too."""
        return show([row[name] for row in kept.rows if isinstance(row.get(name), int | float)], _largest)

    def show(values: Sequence[float], how: Any, digits: str = ".3g") -> str:
        return format(how(values), digits) if values else "-"

    success = of("eval/success")
    last = max((row["step"] for row in kept.rows), default=0)
    average = lambda values: sum(values) / len(values)  # noqa: E731
    without = sum(bool(row.get("train/skipped")) for row in kept.rows)
    found = [*([kept.ended] if kept.ended != FINISHED else []), *([f"{without} without update"] if without else [])]
    remarks = f" ({', '.join(found)})" if found else ""
    return [
        f"{last}{remarks}",
        show(success, lambda v: v[0], ".3f"),
        show(success[1:], lambda v: v[-1], ".3f"),
        show(of("reward/mean")[-10:], average, ".3f"),
        show(of("grad/norm"), median),
        largest("grad/norm"),
        show(of("mismatch/k3"), median),
        largest("mismatch/k3"),
        show(of("mismatch/log_ppl_abs_diff")[-10:], average),
        show(of("policy/clip_fraction"), average),
        largest("policy/ratio_max_abs_dev"),
    ]


def write_block(page: Path, name: str, title: str, text: str) -> None:
    """Between its two marks in the page; what stands outside of marks is a person's, and stays."""
    begin, end = f"<!-- {name}: made by tools/reproduce.py -->", f"<!-- {name}: end -->"
    old = page.read_text() if page.exists() else ""
    before, found, rest = old.partition(begin)
    _, ended, after = rest.partition(end)
    if found and not ended:
        raise DataError(f"{page} has the mark {begin!r} but not {end!r} after it. Put it back.")
    if not found:
        before, after = old + f"\n## {title}\n\n", "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, f"{before}{begin}\n{text}\n{end}{after}")


# ---- the command ------------------------------------------------------------------------------------------------------------------------


def chosen(only: str) -> list[str]:
    """Settings by name or by question, in the order of SETTINGS; all without the long run and question i when nothing is named."""
    words = [word for word in only.split(",") if word]
    unknown = [word for word in words if word not in SETTINGS and word not in QUESTIONS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]} is neither a question ({', '.join(QUESTIONS)}) nor a setting ({', '.join(SETTINGS)}).")
    wanted = {name for word in words or "bcdefgh" for name in (QUESTIONS[word].settings if word in QUESTIONS else (word,))}
    return [name for name in SETTINGS if name in wanted]


def main(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="CONFIG.toml | --SECTION.KEY=VALUE", show_default=False)] = None,
    only: Annotated[str, typer.Option(help="Questions (a to i) or settings, with commas; empty: b to h.")] = "",
    steps: Annotated[int, typer.Option(help="Of each run but the long one.")] = 40,
    seeds: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that jobs are dealt out over; 0: leave that to CUDA_VISIBLE_DEVICES.")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so long; 0: when all is done.")] = 0.0,
    runs: Annotated[Path, typer.Option(help="Where run directories go.")] = Path("runs/reproduce"),
    out: Annotated[Path, typer.Option(help="What is kept of them.")] = ROOT / "docs" / "reproduction",
    page: Annotated[Path, typer.Option(help="The page of the tables.")] = ROOT / "docs" / "reproduction.md",
    only_draw: Annotated[bool, typer.Option("--draw", help="Make no runs.")] = False,
) -> None:
    problems: list[str] = []
    try:
        if not only_draw:
            for stop in (signal.SIGINT, signal.SIGTERM):  # heard also where a shell put this into the background, and then by the runs too
                signal.signal(stop, signal.default_int_handler)
            configs, flags = parse_flags(arguments or [])
            if not configs:
                raise ConfigError("which configuration? Example: python tools/reproduce.py configs/small_h200.toml")
            absolute = [str(Path(config).resolve()) for config in configs]
            texts = [f"--{flag.key}={flag.text}" for flag in flags]
            deadline = time.monotonic() + (60 * minutes or 1e9)
            plan = Plan(absolute, texts, runs.resolve(), out.resolve(), steps, jobs, gpus, deadline)
            if not all(seed.strip().isdecimal() for seed in seeds.split(",")):
                raise ConfigError(f"--seeds {seeds!r} should be whole numbers with commas, such as 0,1.")
            problems = run_all(plan, chosen(only), [int(seed) for seed in seeds.split(",")])
            for problem in problems:  # before anything is drawn, which may fail for want of runs
                print(problem, file=sys.stderr)
            if problems and not kept_runs(plan.out):
                raise typer.Exit(1)
        for figure in draw(out, page):
            print(figure)
        for kept in kept_runs(out).get(LONG, ()):
            print(*(f"{kept.name}: {line}" for line in bar_lines(kept)), sep="\n")
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"ignore_unknown_options": True})(main)
    app()
