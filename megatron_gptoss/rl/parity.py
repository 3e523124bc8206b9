"""How far trainer and engine stand apart, and what that says.

In: log-probs of both for the same sampled tokens; what the trainer says with one fault at a time; how each piece of it compares with the
reference. Out: the gap by position, which fault explains it, and words and tables for a person. It decides nothing else and computes no
model. docs/self_test.md has the method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# No fault: every pass sends some tokens to an expert whose logit is almost that of a chosen one (model/faults.py).
NEAR_TIES = "near-ties"
# A few passes see a few of the ways in which near-ties of many layers fall together: they may move a token so many times as far.
REACH = 4.0

# Fault -> piece that has it, what it is. {window} is the right one, {wider} and {narrower} its neighbours, {T} rollout.temperature.
FAULT_WORDS = {
    "no-sinks": ("attention", "attention sinks are ignored"),
    "window": ("attention", "the sliding window is {wider} keys instead of {window}"),
    "window-short": ("attention", "the sliding window is {narrower} keys instead of {window}"),
    "no-window": ("attention", "windowed layers see all earlier tokens"),
    "yarn": ("rope", "rotary angles are plain RoPE, without YaRN"),
    "yarn-rounded": ("rope", "YaRN's borders are rounded to whole dimensions (Hugging Face's truncate = true)"),
    "router-bias": ("router", "the router's bias is missing"),
    "gate-up": ("experts", "gate and up are swapped in gate_up_proj"),
    "temperature": ("sampler", "log-probs are taken without the temperature {T:g}"),
    "shifted": ("head", "log-probs lie one token too late"),
    "shifted-early": ("head", "log-probs lie one token too early"),
}

# Piece -> its name for a person, and where to look for a fault of it in the trainer and in the engine.
PIECE_WORDS = {
    "embedding": ("embedding", "the embedding in model/gpt_oss.py and its row in checkpoint/weight_map.py", "vLLM's embedding"),
    "projection": ("qkv projection", "linear_qkv in model/build.py and its rows in checkpoint/weight_map.py", "vLLM's qkv_proj"),
    "rope": ("RoPE", "YarnAngles in model/layer.py, model/rotary.py and trainer.rotary", "rope_parameters in RUN/engine/config.json"),
    "attention": (
        "attention",
        'attention/module.py and the backend that trainer.attention names; try trainer.attention = "reference"',
        "vLLM's attention backend (its name is in RUN/logs/engine-0.log) and sliding_window in RUN/engine/config.json",
    ),
    "attention output": ("attention's output projection", "linear_proj in model/build.py and checkpoint/weight_map.py", "vLLM's o_proj"),
    "norm": ("norm before the experts", "the norm that trainer.transformer chooses (model/parts.py)", "vLLM's norms"),
    "router": ("router", "model/router.py and its rows in checkpoint/weight_map.py", "vLLM's router and the bias it was given"),
    "experts": (
        "experts",
        "model/experts.py, the backend that trainer.experts names, and the layout of gate_up_proj in checkpoint/weight_map.py",
        "vLLM's MoE backend and the layout in which it keeps gate_up_proj after a weight update",
    ),
    "residual": ("residual sum", "the layer in model/build.py", "vLLM's decoder layer"),
    "final norm": ("final norm", "final_layernorm in model/gpt_oss.py", "vLLM's final norm"),
    "head": ("head", "logprob/ and Trainer._forward in trainer/step.py", "how rollout/engine.py pairs tokens with log-probs"),
    "sampler": (
        "sampler (temperature)",
        "Trainer._forward in trainer/step.py, which divides logits by rollout.temperature",
        'logprobs_mode in rollout/vllm_settings.py, which must be "processed_logprobs"',
    ),
}


@dataclass(frozen=True)
class Band:
    """What is taken for rounding, nats. Both limits must hold."""

    largest: float  # of |trainer - engine|, for each token
    mean: float = 0.0  # over all tokens; 0: no limit

    def holds(self, largest: float, mean: float) -> bool:
        """nan is outside."""
        return largest <= self.largest and (not self.mean or mean <= self.mean)

    def __str__(self) -> str:
        mean = f", its mean {self.mean:g} (parity.max_mean_gap)" if self.mean else ""
        return f"the largest gap may be {self.largest:g} nats (parity.max_abs_gap){mean}"


@dataclass(frozen=True)
class PositionGap:
    """Tokens at positions first..last of their sequences."""

    first: int
    last: int
    tokens: int
    mean: float  # of |trainer - engine|, nats
    max: float


@dataclass(frozen=True)
class PieceGap:
    """One piece of one layer of the trainer, beside the reference on the same inputs."""

    layer: int  # from 0; -1: after the layers
    piece: str  # of PIECE_WORDS
    error: float  # norm of the difference over the norm; of the head the largest difference in nats
    limit: float  # what rounding explains
    fault: str  # of FAULT_WORDS, when the difference is what that fault would make; else ""

    @property
    def bad(self) -> bool:
        return bool(self.fault) or not self.error <= self.limit


@dataclass(frozen=True)
class Fit:
    """What is left of the gap when the trainer computes with a fault, too."""

    fault: str
    gap_mean: float  # of |trainer - engine|, nats
    left: float  # largest |trainer with the fault - engine|, nats
    left_mean: float  # its mean
    explained: float  # share of the gap's square that is gone, 1 at best
    changed: float  # largest change that the fault makes to the trainer, nats
    changed_mean: float


@dataclass(frozen=True)
class Cause:
    """The verdict."""

    side: str  # "trainer" | "engine" | "unknown"
    piece: str  # of PIECE_WORDS, "" when unknown
    fault: str  # of FAULT_WORDS, "" when the piece's fault has no name here
    layers: tuple[int, ...] = ()  # where; (): everywhere, or not in a layer


def gap_by_position(
    positions: Sequence[int], trainer_logp: Sequence[float], engine_logp: Sequence[float], *, edges: Sequence[int]
) -> list[PositionGap]:
    """Bins [edge_i, edge_i+1) with at least one token. All sequences have the same length; positions count from 0."""
    bins: dict[int, list[float]] = {}
    for position, a, b in zip(positions, trainer_logp, engine_logp, strict=True):
        index = max(i for i, edge in enumerate(edges) if edge <= position)
        bins.setdefault(index, []).append(abs(a - b))
    rows = []
    for index in sorted(bins):
        gaps = bins[index]
        last = edges[index + 1] - 1 if index + 1 < len(edges) else max(positions)
        # nan compares false with everything: a gap that is not a number must count as the largest
        worst = float("nan") if any(g != g for g in gaps) else max(gaps)
        rows.append(PositionGap(edges[index], last, len(gaps), sum(gaps) / len(gaps), worst))
    return rows


def within(rows: Sequence[PositionGap], limit: float) -> bool:
    """True when every position is inside the limit; nan is outside."""
    return all(row.max <= limit for row in rows)


def mean_gap(rows: Sequence[PositionGap]) -> float:
    """Over all tokens, nats."""
    return sum(row.mean * row.tokens for row in rows) / sum(row.tokens for row in rows)


def agree(rows: Sequence[PositionGap], band: Band) -> bool:
    return within(rows, band.largest) and band.holds(0.0, mean_gap(rows))


def fit(fault: str, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> Fit:
    """Log-probs of each sequence: the trainer's, the engine's, and the trainer's with the fault. Of a shift the first or the last token of
    each sequence is left out: what it would have got is not known."""
    keep = {"shifted": slice(1, None), "shifted-early": slice(None, -1)}.get(fault, slice(None))
    rows = [row for a, b, c in zip(trainer, engine, changed, strict=True) for row in list(zip(a, b, c, strict=True))[keep]]
    if not rows:
        return Fit(fault, math.nan, math.nan, math.nan, 0.0, math.nan, math.nan)
    gap = sum((a - b) ** 2 for a, b, _ in rows)
    left = sum((c - b) ** 2 for _, b, c in rows)
    return Fit(
        fault,
        gap_mean=sum(abs(a - b) for a, b, _ in rows) / len(rows),
        left=_largest(c - b for _, b, c in rows),
        left_mean=sum(abs(c - b) for _, b, c in rows) / len(rows),
        explained=1.0 - left / gap if gap > 0.0 else 0.0,
        changed=_largest(c - a for a, _, c in rows),
        changed_mean=sum(abs(c - a) for a, _, c in rows) / len(rows),
    )


def farthest(trainer: Sequence[Sequence[float]], passes: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[float, ...], ...]:
    """How far the passes move each token at most, nats; inf where one is not a number, 0 where there are none."""

    def moved(logp: float, passed: Iterable[float]) -> float:
        moves = [abs(other - logp) for other in passed]
        return max(moves, default=0.0) if all(map(math.isfinite, moves)) else math.inf

    return tuple(
        tuple(moved(logp, (passed[i][t] for passed in passes)) for t, logp in enumerate(sequence)) for i, sequence in enumerate(trainer)
    )


def steady_tokens(trainer: Sequence[float], moved: Sequence[float], limit: float) -> tuple[bool, ...]:
    """Of one sequence. What the trainer itself does not know is no near-tie: it stays, to be seen."""
    return tuple(move <= limit or not math.isfinite(logp) for logp, move in zip(trainer, moved, strict=True))


def strays(trainer: Sequence[float], engine: Sequence[float], moved: Sequence[float], band: Band) -> list[float]:
    """Of one sequence: gaps that are larger than what is allowed and what near-ties may move together. nan is."""
    gaps = [(abs(a - b), band.largest + REACH * move) for a, b, move in zip(trainer, engine, moved, strict=True)]
    return [gap for gap, limit in gaps if not gap <= limit]


def is_blind(change: Fit, band: Band) -> bool:
    """A comparison within this band would not notice such a change. One that is not a number is noticed."""
    return band.holds(change.changed, change.changed_mean)


def _largest(values: Iterable[float]) -> float:
    """nan when one is not finite: no limit is above it."""
    found = [abs(value) for value in values]
    return max(found, default=0.0) if all(math.isfinite(value) for value in found) else float("nan")


def shift(logp: Sequence[float], fault: str) -> list[float]:
    """Log-probs of one sequence, one place too late ("shifted") or too early ("shifted-early")."""
    return [*logp[:1], *logp[:-1]] if fault == "shifted" else [*logp[1:], *logp[-1:]]


def cause_in_trainer(pieces: Sequence[PieceGap]) -> Cause | None:
    """None when every piece is right. With several at fault the first names the cause, in the order of computation."""
    bad = [p for p in pieces if p.bad]
    if not bad:
        return None
    first = bad[0]
    same = [p for p in bad if (p.piece, p.fault) == (first.piece, first.fault)]
    piece = FAULT_WORDS[first.fault][0] if first.fault else first.piece
    return Cause("trainer", piece, first.fault, tuple(p.layer for p in same if p.layer >= 0))


def cause_in_engine(fits: Sequence[Fit], band: Band) -> Cause:
    """The fault with which the trainer equals the engine: what is left is inside the band, and most of the gap is gone, of its square and
    of its mean: a single token that is far off has nearly all of the square, and any fault may happen to move it. When several do, the
    best."""
    good = [f for f in fits if band.holds(f.left, f.left_mean) and f.explained > 0.5 and f.left_mean < 0.5 * f.gap_mean]
    if not good:
        return Cause("unknown", "", "")
    best = max(good, key=lambda f: f.explained)
    return Cause("engine", FAULT_WORDS[best.fault][0], best.fault)


def words_of(fault: str, *, window: int, temperature: float) -> str:
    return FAULT_WORDS[fault][1].format(window=window, wider=window + 1, narrower=window - 1, T=temperature)


def sentence(cause: Cause, *, window: int, temperature: float, trainer_was_seen: bool, layers: int = 0) -> str:
    """The cause, and what to do, for a person."""
    if cause.side == "unknown":
        if trainer_was_seen:
            return (
                "Cause: not the trainer, whose every piece equals the reference, and no single known fault of an engine. Compare "
                "RUN/engine/config.json with the model, the engine's log, and the weights it confirmed; "
                "tools/compare_logprobs.py shows the worst tokens."
            )
        return (
            "Cause: no single known fault of the engine makes it; suspect the trainer. Its pieces are compared one by one only where a "
            "rank holds the whole model: run `gptoss check CONFIG --parity` with parallel.tensor, context and pipeline = 1, on a smaller "
            "model if need be."
        )
    name, in_trainer, in_engine = PIECE_WORDS[cause.piece]
    what = f": {words_of(cause.fault, window=window, temperature=temperature)}" if cause.fault else ", which differs from the reference"
    where = f" in {_layers(cause.layers)}" if cause.layers and len(cause.layers) != layers else ""
    return f"Cause: the {cause.side}'s {name}{where}{what}. Look at {in_trainer if cause.side == 'trainer' else in_engine}."


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def format_gaps(rows: Sequence[PositionGap], *, limit: float, window: int) -> str:
    """A plain table: which positions, how many tokens, mean and largest gap; those beyond the window are marked."""
    lines = [f"  {'position':>12}  {'tokens':>6}  {'mean gap':>10}  {'max gap':>10}"]
    for row in rows:
        marks = [] if row.max <= limit else ["over the limit"]
        if row.first >= window:
            marks.append("beyond the window")
        span = f"{row.first}-{row.last}"
        lines.append(f"  {span:>12}  {row.tokens:>6}  {row.mean:>10.2e}  {row.max:>10.2e}  {', '.join(marks)}".rstrip())
    return "\n".join(lines)


def format_pieces(pieces: Sequence[PieceGap]) -> str:
    """The trainer's pieces beside the reference: one line a piece, its worst layer, and what a difference looks like."""
    by_piece: dict[str, list[PieceGap]] = {}
    for gap in pieces:
        by_piece.setdefault(gap.piece, []).append(gap)
    lines = [f"  {'trainer beside reference':<30}  {'error':>8}  {'rounding':>8}"]
    for piece, gaps in by_piece.items():
        bad = [g for g in gaps if g.bad]
        worst = max(bad or gaps, key=lambda g: g.error)
        unit = " nats" if piece == "head" else ""
        layers = [g.layer for g in bad if g.layer >= 0]
        verdict = (f"  DIFFERS{f' in {_layers(layers)}' if layers else ''}{f': {worst.fault}' if worst.fault else ''}") if bad else ""
        lines.append(f"  {PIECE_WORDS[piece][0]:<30}  {worst.error:>8.1e}  {worst.limit:>8.0e}{unit}{verdict}")
    return "\n".join(lines)


def format_fits(fits: Sequence[Fit], *, band: Band) -> str:
    """What each fault would leave of the gap, best first."""
    lines = [f"  {'if the engine had this fault':<30}  {'max left':>10}  {'mean left':>10}  {'explained':>9}"]
    for f in sorted(fits, key=lambda f: (not math.isfinite(f.left), f.left)):
        verdict = "  inside the limits" if band.holds(f.left, f.left_mean) else ""
        lines.append(f"  {f.fault:<30}  {f.left:>10.2e}  {f.left_mean:>10.2e}  {f.explained:>9.1%}{verdict}")
    return "\n".join(lines)


def format_changes(changes: Sequence[Fit], *, band: Band) -> str:
    """How far each perturbation moved the trainer."""
    lines = [f"  {'perturbed in the trainer':<30}  {'max change':>10}  {'mean change':>11}"]
    for f in changes:
        lines.append(f"  {f.fault:<30}  {f.changed:>10.2e}  {f.changed_mean:>11.2e}{'  NOT SEEN' if is_blind(f, band) else ''}")
    return "\n".join(lines)
