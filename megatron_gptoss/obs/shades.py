"""Which colour has a number, and which numbers have the strongest one?

In: values of tokens. Out: a strength from -1 to 1 for each, and colours of strengths for a terminal. The page has the same scale in its own
language (rollouts.js); what both need of a step, its limits, is found here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_gptoss.obs.transcript import Measure, Token

RGB = tuple[int, int, int]
LOGP_LIMIT = 3.0  # nats: a token of 5 % has the strongest colour
# Below nothing and above it. Log-probs are never above.
HUES: dict[Measure, tuple[RGB, RGB]] = {
    "advantage": ((198, 52, 66), (30, 132, 73)),
    "mismatch": ((20, 110, 180), (204, 102, 0)),
    "logp": ((126, 58, 172), (126, 58, 172)),
}
VERSIONS: tuple[RGB, ...] = ((38, 98, 158), (176, 96, 24), (46, 120, 84), (140, 62, 120), (110, 104, 40), (150, 58, 58))
GROUND: RGB = (58, 61, 66)  # of a sampled token that has no strength: sampled shows


def limits(tokens: Iterable[Token]) -> dict[Measure, float]:
    """The size that gets the strongest colour, of each measure: the largest there is among these tokens, 0.0 where all are 0 or unknown."""
    most: dict[Measure, float] = {"advantage": 0.0, "mismatch": 0.0, "logp": LOGP_LIMIT}
    for token in tokens:
        for measure in ("advantage", "mismatch"):
            value = token.value(measure)
            if value is not None and math.isfinite(value):
                most[measure] = max(most[measure], abs(value))
    return most


def strength(value: float | None, limit: float) -> float:
    """-1 to 1, with the value's sign. A square root, so that small values are seen beside a large one; what is not finite is strongest."""
    if value is None or value == 0.0:
        return 0.0
    if not math.isfinite(value):
        return -1.0 if value < 0 else 1.0
    if limit <= 0.0:
        return 0.0
    return math.copysign(math.sqrt(min(abs(value) / limit, 1.0)), value)


def shade(token: Token, measure: Measure, limit: float) -> RGB | None:
    """The ground a sampled token stands on; None for a token that was not sampled, and without a measure."""
    if not token.sampled or measure == "none":
        return None
    if measure == "version":
        return GROUND if token.version is None else VERSIONS[token.version % len(VERSIONS)]
    power = strength(token.value(measure), limit)
    return blend(GROUND, HUES[measure][power > 0], abs(power))


def blend(a: RGB, b: RGB, share: float) -> RGB:
    """`share` of b in a."""
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue
