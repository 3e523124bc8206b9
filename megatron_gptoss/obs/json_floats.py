"""How do millions of floats get through JSON, those among them that are not finite, for which it has no numbers?

In: a float. Out: itself, or the text "nan", "inf" or "-inf"; and back. A line of JSON is written by msgspec, in the shortest digits that
read back to the same double, some ten times faster than Python's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec

LINE_ENDS = "\u0085\u2028\u2029"  # to str.splitlines, beside those that JSON escapes anyway
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: float) -> float | str:
    """`str` of a float that is not finite is exactly its key in NOT_FINITE."""
    return value if math.isfinite(value) else str(value)


def all_to_json(values: Iterable[float]) -> list[Any]:
    """`to_json` of each."""
    numbers = list(map(float, values))
    return numbers if all(map(math.isfinite, numbers)) else [to_json(number) for number in numbers]


def json_line(value: Any) -> bytes:
    """Of plain values without a float that is not finite; ends with a line feed, and has nothing else that some programs take for one."""
    try:
        line = msgspec.json.encode(value)
        for character in LINE_ENDS:
            line = line.replace(character.encode(), rb"\u%04x" % ord(character))
        return line + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which has no UTF-8 and is escaped
        return json.dumps(value, ensure_ascii=True, allow_nan=False).encode() + b"\n"
