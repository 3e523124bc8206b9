"""Reads JSON-lines files of prompts, and says which prompt is too long.

In: a path and the fields each line must have. Out: records in the file's order, with their line numbers. It does not shuffle or split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gptoss.errors import ConfigError, DataError
from megatron_gptoss.types import Prompt


@dataclass(frozen=True)
class Record:
    """One line of a prompt file."""

    line: int  # from 1
    fields: dict[str, str]  # the needed ones


def read_prompt_file(path: str | Path, needed: Sequence[str]) -> list[Record]:
    """All records of a file. DataError names file and line: no file, no record, not JSON, or a needed field that is absent or no text."""
    records = []
    for line, value in read_json_lines(path):
        for field in needed:
            if not isinstance(value.get(field), str) or not value[field].strip():
                has = ", ".join(sorted(value)) or "nothing"
                raise DataError(f"{path}:{line}: the field {field!r} is missing, empty or no text; the line has {has}.")
        records.append(Record(line, {field: value[field] for field in needed}))
    if not records:
        raise DataError(f"{path} holds no prompt; it needs one JSON object a line, with {', '.join(needed)}.")
    return records


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. DataError for a file that cannot be read and a line that is no JSON object."""
    try:
        # Split at \n alone: JSON text may hold U+2028 and its like, which str.splitlines takes for line ends.
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: this line is not JSON ({error}).") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}:{number}: this line is {type(value).__name__}, not a JSON object.")
        yield number, value


def require_room(prompt: Prompt, num_tokens: int, max_sequence_tokens: int, max_turn_tokens: int) -> None:
    """ConfigError for a prompt whose `num_tokens`, with instructions and generation prefix, leave no token for an answer."""
    if num_tokens >= max_sequence_tokens:
        begins = prompt.text if len(prompt.text) <= 40 else prompt.text[:40] + "..."
        raise ConfigError(
            f"prompt {prompt.id} ({begins!r}) has {num_tokens} tokens with its instructions, and rollout.max_sequence_tokens = "
            f"{max_sequence_tokens} leaves no room for an answer. Set it to at least {num_tokens + max_turn_tokens} (one turn more, "
            f"rollout.max_turn_tokens = {max_turn_tokens}), or take the prompt out."
        )
