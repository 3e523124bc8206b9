"""The self-test before the first step: do trainer and engine give the same log-probs to the same tokens, and could we tell if not?

In: a session whose engines hold the trainer's weights. Out: the gap by position and what each perturbation changed, or ParityError with
tables and the cause. Sequences run past the attention window on both sides of the prompt's end, since short ones hide a wrong window or
YaRN. docs/self_test.md has the method; the arithmetic is rl/parity.py's.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import and_
from pathlib import Path

from megatron_gptoss.checkpoint.weight_map import hf_shapes
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.data.harmony import generation_prefix, render
from megatron_gptoss.errors import ParityError
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.rl.parity import (
    NEAR_TIES,
    Band,
    Cause,
    Fit,
    PieceGap,
    PositionGap,
    agree,
    cause_in_engine,
    cause_in_trainer,
    farthest,
    fit,
    format_changes,
    format_fits,
    format_gaps,
    format_pieces,
    gap_by_position,
    is_blind,
    mean_gap,
    sentence,
    shift,
    steady_tokens,
    strays,
)
from megatron_gptoss.types import Sample, TurnRequest, TurnResult

NEW_TOKENS = 24  # sampled after each prompt, as in training: decoding is the path that must agree
# What an engine is suspected of when the trainer is right. The last two are shifts of numbers that are there already.
SUSPECTS = ("no-sinks", "window", "window-short", "no-window", "yarn", "yarn-rounded", "router-bias", "gate-up", "temperature")
SHIFTS = ("shifted", "shifted-early")
SHAKES = 8  # passes; a near-tie goes the other way in up to every second one
UNSTEADY = 0.25  # of the largest gap allowed: a token that moves by more in one of them is left out


@dataclass(frozen=True)
class Probe:
    """Sequences that the engine continued, and its log-probs of what it sampled."""

    samples: tuple[Sample, ...]
    engine: tuple[tuple[float, ...], ...]
    steady: tuple[tuple[bool, ...], ...]  # tokens that count
    moved: tuple[tuple[float, ...], ...]  # how far near-ties of routers move each token, nats
    note: str = ""  # for a person, about tokens that hang on them

    @property
    def positions(self) -> list[list[int]]:
        return [[t for t, trained in enumerate(sample.trained) if trained] for sample in self.samples]

    def tokens(self, from_position: int = 0) -> tuple[int, int]:
        """How many there are from this position of their sequences on, and how many of these count."""
        tokens = zip(chain(*self.positions), chain(*self.steady), strict=True)
        counts = [counts for position, counts in tokens if position >= from_position]
        return len(counts), sum(counts)

    def where(self, steady: Sequence[Sequence[bool]]) -> Probe:
        """Tokens count that are steady there too."""
        return replace(self, steady=tuple(tuple(map(and_, *rows)) for rows in zip(self.steady, steady, strict=True)))

    def counted[Value](self, rows: Sequence[Sequence[Value]]) -> list[list[Value]]:
        """Of one value a token those of the tokens that count."""
        return [list(compress(row, steady)) for row, steady in zip(rows, self.steady, strict=True)]


@dataclass(frozen=True)
class SelfTest:
    """Passed."""

    rows: tuple[PositionGap, ...]
    changes: tuple[Fit, ...]  # of the trainer's log-probs, by each perturbation
    unsteady: str  # words about tokens that were left out
    seconds: float

    def words(self) -> str:
        seen = f"; {', '.join(f.fault for f in self.changes)} would have been seen" if self.changes else ""
        return (
            f"largest gap between trainer and engine {max(r.max for r in self.rows):.1e} nats over {sum(r.tokens for r in self.rows)} "
            f"tokens{seen}{self.unsteady and '; '}{self.unsteady} (self-test {self.seconds:.1f} s)"
        )


def self_test(session: Session) -> SelfTest:
    """Sample with the engine, score with the trainer, compare; then perturb the trainer. Raises ParityError when the gap is over its
    limits, with the cause, or when a perturbation does not show."""
    began = time.perf_counter()
    band, window = band_of(session), session.config.model.sliding_window
    probe = take_probe(session)
    session.rest_engines()
    trainer = session.score(probe.samples)
    probe = _without_near_ties(session, probe, trainer)
    rows = _rows(session, probe, trainer)
    strayed = _strays(probe, trainer, band)
    if not agree(rows, band) or strayed:
        if strayed:  # they have to explain something now
            probe = replace(probe, steady=tuple((True,) * len(row) for row in probe.steady))
            rows = _rows(session, probe, trainer)
            probe = replace(
                probe, note=f"{probe.note}, but for {len(strayed)} that are {max(strayed):.3g} nats off, which is too far for that"
            )
        raise ParityError(
            f"trainer and engine disagree on the same tokens: {band}. The run does not start.\n"
            f"{format_gaps(rows, limit=band.largest, window=window)}\n"
            f"{probe.note}\n{diagnose(session, probe, trainer)}"
        )
    perturbations = [fault for fault in session.config.parity.perturb.split(",") if fault]
    changes = [_fit(probe, fault, trainer, _broken_scores(session, probe, fault)) for fault in perturbations]
    blind = [change.fault for change in changes if is_blind(change, band)]
    if blind:
        raise ParityError(
            f"trainer and engine agree, but the comparison could not have seen {', '.join(blind)}: such a fault moves the trainer's "
            f"log-probs by no more than is allowed ({band}). The run does not start.\n"
            f"{format_changes(changes, band=band)}\n"
            f"The measured gap is {max(r.max for r in rows):.1e} at most and {mean_gap(rows):.1e} in the mean: lower parity.max_abs_gap or "
            "set parity.max_mean_gap nearer to it, raise rollout.max_sequence_tokens (longer probes show more), or take out of "
            "parity.perturb what cannot show in this model."
        )
    session.wake_engines()
    return SelfTest(tuple(rows), tuple(changes), probe.note, time.perf_counter() - began)


def _without_near_ties(session: Session, probe: Probe, trainer: Sequence[Sequence[float]]) -> Probe:
    """In 16 bits a router's near-tie goes one way in the trainer and the other in the engine, and a token that hangs on it moves by nats,
    in a right engine too. The trainer alone can say which tokens do: it takes near-ties the other way, several times."""
    moved = _moved(session, probe, trainer)
    some = replace(probe.where(_steady(session, trainer, moved)), moved=moved)
    (tokens, counted), window = some.tokens(), session.config.model.sliding_window
    beyond, counted_beyond = some.tokens(from_position=window)
    if counted == tokens:
        return some
    note = f"{tokens - counted} of {tokens} tokens hang on near-ties of a router"
    if 2 * counted >= tokens and 2 * counted_beyond >= beyond:
        return replace(some, note=f"{note} and do not count")
    return replace(
        probe, note=f'{note}, so many that all count (rl.router_replay = "engine" with parity.enabled = false trains such a model)'
    )


def _moved(session: Session, probe: Probe, trainer: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """How far near-ties move what the trainer, as it is now, says of each token."""
    if "bfloat16" not in (session.config.trainer.dtype, session.config.rollout.dtype):
        return farthest(trainer, [])
    with session.world.broken(NEAR_TIES):
        return farthest(trainer, [session.score(probe.samples) for _ in range(SHAKES)])


def _steady(session: Session, trainer: Sequence[Sequence[float]], moved: Sequence[Sequence[float]]) -> list[tuple[bool, ...]]:
    limit = UNSTEADY * band_of(session).largest
    return [steady_tokens(*rows, limit) for rows in zip(trainer, moved, strict=True)]


def _strays(probe: Probe, trainer: Sequence[Sequence[float]], band: Band) -> list[float]:
    """Gaps of tokens that hang on near-ties, and are further off than these explain."""
    left_out = replace(probe, steady=tuple(tuple(not counts for counts in row) for row in probe.steady))
    rows = zip(*(left_out.counted(of) for of in (trainer, probe.engine, probe.moved)), strict=True)
    return [gap for logp, engine, moved in rows for gap in strays(logp, engine, moved, band)]


def _fit(probe: Probe, fault: str, trainer: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> Fit:
    return fit(fault, probe.counted(trainer), probe.counted(probe.engine), probe.counted(changed))


def band_of(session: Session) -> Band:
    return Band(session.config.parity.max_abs_gap, session.config.parity.max_mean_gap)


def diagnose(session: Session, probe: Probe, trainer: Sequence[Sequence[float]]) -> str:
    """Tables and a sentence: which side is wrong, in which piece, and how."""
    config, band, tables = session.config, band_of(session), []
    window, T = config.model.sliding_window, config.rollout.temperature
    pieces, why_not = _pieces(session, probe)
    tables.append(format_pieces(pieces) if pieces else f"  (the trainer's pieces are not compared with the reference: {why_not})")
    cause: Cause | None = cause_in_trainer(pieces)
    if cause is None:
        fits = _fits(session, probe, trainer)
        tables.append(format_fits(fits, band=band))
        cause = cause_in_engine(fits, band)
    layers = config.model.num_hidden_layers
    tables.append(sentence(cause, window=window, temperature=T, trainer_was_seen=bool(pieces), layers=layers))
    return "\n\n".join(tables)


def _pieces(session: Session, probe: Probe) -> tuple[list[PieceGap], str]:
    """The trainer beside the reference, or why that cannot be done here."""
    plan, config = session.plan, session.config
    if plan.tensor_parallel * plan.context_parallel * plan.pipeline_parallel > 1:
        return [], "no rank holds the whole model; set parallel.tensor, context and pipeline to 1 for it"
    need = largest_layer_gib(config.model)
    if need > config.parity.reference_gib:
        return [], f"a layer takes {need:.1f} GiB in float32, and parity.reference_gib is {config.parity.reference_gib:g}"
    batches = session.pack(probe.samples)[0]
    return session.world.compare_pieces(batches, config.rollout.temperature, config.parity.max_abs_gap), ""


def largest_layer_gib(model: ModelConfig) -> float:
    """The float32 weights of one layer, or of the head."""
    sizes: dict[str, int] = {}
    for name, shape in hf_shapes(model).items():
        of = ".".join(name.split(".")[:3]) if ".layers." in name else name
        sizes[of] = sizes.get(of, 0) + 4 * math.prod(shape)
    return max(sizes.values()) / 2**30


def _fits(session: Session, probe: Probe, trainer: Sequence[Sequence[float]]) -> list[Fit]:
    """The trainer with each fault that an engine may have, through its own switches."""
    suspects = [s for s in SUSPECTS if s != "temperature" or session.config.rollout.temperature != 1.0]
    fits = []
    for fault in suspects:
        with session.world.broken(fault):
            scores = session.score(probe.samples)
            steady = _steady(session, scores, _moved(session, probe, scores))  # with a fault other tokens hang on near-ties
        some = probe.where(steady)
        few = 2 * some.tokens()[1] < probe.tokens()[1]  # would fit anything
        fits.append(fit(fault, [], [], []) if few else _fit(some, fault, trainer, scores))
    return fits + [_fit(probe, fault, trainer, [shift(logp, fault) for logp in trainer]) for fault in SHIFTS]


def _broken_scores(session: Session, probe: Probe, fault: str) -> list[list[float]]:
    with session.world.broken(fault):
        return session.score(probe.samples)


def _rows(session: Session, probe: Probe, trainer: Sequence[Sequence[float]]) -> list[PositionGap]:
    window, longest = session.config.model.sliding_window, session.plan.engine_max_model_len
    return gap_by_position(
        list(chain(*probe.counted(probe.positions))),
        list(chain(*probe.counted(trainer))),
        list(chain(*probe.counted(probe.engine))),
        edges=[0, *(window * k // 2 for k in range(1, 2 + 2 * longest // window))],
    )


# ---- what is asked of the engine ----------------------------------------------------------------------------------------------------


def probe_lengths(window: int, longest: int, new_tokens: int) -> list[int]:
    """Prompt lengths below, at and well beyond the window, as far as a conversation may grow."""
    wanted = [window // 2, window - new_tokens // 2, window + 1, 2 * window + 3, 4 * window + 5]
    return sorted({max(1, min(n, longest - new_tokens)) for n in wanted})


def take_probe(session: Session) -> Probe:
    """Held-out text, continued by the engine."""
    longest = session.plan.engine_max_model_len
    new_tokens = min(NEW_TOKENS, longest // 2)
    prompts = _probe_prompts(session, probe_lengths(session.config.model.sliding_window, longest, new_tokens))
    results = session.run(_sample(session, prompts, new_tokens))
    samples = tuple(
        Sample(
            name=f"parity/{i}",
            token_ids=(*prompt, *result.token_ids),
            trained=(False,) * len(prompt) + (True,) * len(result.token_ids),
            engine_logp=(0.0,) * len(prompt) + result.logp,
            advantage=0.0,
        )
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    )
    engine = tuple(result.logp for result in results)
    return Probe(samples, engine, tuple((True,) * len(logp) for logp in engine), farthest(engine, []))


def _probe_prompts(session: Session, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Held-out prompts one after another, cut to length: real text of the task, as long as needed."""
    prompts, stream = [], []
    number = 0
    while len(stream) < max(lengths) + len(lengths):
        for prompt in session.task.prompts("heldout", number, 8):
            stream += render(session.task.begin(prompt).opening(), session.tokenizer) + generation_prefix(session.tokenizer)
        number += 8
    for i, length in enumerate(lengths):
        prompts.append(tuple(stream[i : i + length]))  # another start each time, so that no prefix is shared
    return prompts


async def _sample(session: Session, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[TurnResult]:
    requests = [
        TurnRequest(
            request_id=f"parity-{i}",
            conversation_id=f"parity-{i}",
            token_ids=prompt,
            max_new_tokens=new_tokens,
            stop_token_ids=(),
            temperature=session.config.rollout.temperature,
            seed=i if session.config.rollout.deterministic else None,
        )
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*(session.pool.generate(r) for r in requests)))


# ---- gptoss check --parity ----------------------------------------------------------------------------------------------------------


def run_check(loaded: Loaded, plan: RunPlan) -> None:
    """Start trainer and engines, run the self-test, print what it saw, stop. Leaves no run directory."""
    with tempfile.TemporaryDirectory(prefix="gptoss-check-") as scratch:
        elsewhere = replace(plan, run_dir=Path(scratch) / plan.run_dir.name)
        with open_session(loaded, elsewhere, "check") as session:
            session.start_ray(num_actors=plan.world_size + plan.num_engines)
            session.make_trainer(session.config.rl, total_updates=plan.total_updates)
            session.make_engines()
            with session.console.waiting("starting trainer and engines"):
                session.start()
            session.publish(session.progress.policy_version)
            passed = self_test(session)
            band, window = band_of(session), session.config.model.sliding_window
            session.console.say(format_gaps(passed.rows, limit=band.largest, window=window))
            session.console.say(format_changes(passed.changes, band=band))
            session.console.say(f"PASS  parity: {passed.words()}")
