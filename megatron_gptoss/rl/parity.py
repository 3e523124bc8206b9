"""How far trainer and engine stand apart, position by position.

In: log-probs of both for the same sampled tokens. Out: the gap by position, as numbers and as a table to print. It decides nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PositionGap:
    """Tokens at positions first..last of their sequences."""

    first: int
    last: int
    tokens: int
    mean: float  # of |trainer - engine|, nats
    max: float


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
