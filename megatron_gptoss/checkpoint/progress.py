"""Where a run stands, as a checkpoint remembers it.

In: nothing. Out: a record and the name of the marker file. No torch, so that the driver can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

MARKER = "COMPLETE"  # written last into a checkpoint; a folder without it is torn


@dataclass(frozen=True)
class Progress:
    """Beside weights, moments and random states."""

    step: int  # finished training steps; also the tracker's step
    policy_version: int  # version the engines were last given
    prompt_cursor: int  # training prompts taken so far
    skipped_in_a_row: int = 0
