"""What does a rollout lose for its length?

In: its length and the limit. Out: a number to add to its reward, never above 0.
"""

from __future__ import annotations


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `penalty`:

    0 up to limit - buffer tokens, then falling linearly to -1 at the limit, -1 above. `buffer` 0: none. `length` counts the whole
    conversation, as rollout.max_sequence_tokens does; the paper counts the one answer it has.
    """
    if buffer <= 0:
        return 0.0
    over = length - (limit - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0)
