"""How do floats that are not finite get through JSON, which has no numbers for them?

In: a float. Out: itself, or the text "nan", "inf" or "-inf"; and back.
"""

from __future__ import annotations

import math

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: float) -> float | str:
    """`str` of a float that is not finite is exactly its key in NOT_FINITE."""
    return value if math.isfinite(value) else str(value)
