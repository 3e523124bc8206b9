"""Rollouts on disk: `rollouts/step-N.jsonl`, one JSON object a rollout, for people and for replay.

In: the groups of a step. Out: a file that reads back to the same groups, every float exact. It does not choose names, compress or delete.
`text` and `step` are for the reader's eye and are not read back. `routes` is null where the engine was not asked for them; else they are
the larger part of the file (docs/router_replay.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_gptoss.data.prompts import read_json_lines
from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.errors import DataError
from megatron_gptoss.obs.disk import disk_errors
from megatron_gptoss.obs.json_floats import NOT_FINITE, all_to_json, json_line, to_json
from megatron_gptoss.rollout.routes import routes_from_json, routes_to_json
from megatron_gptoss.rollout.scores import scores_beside
from megatron_gptoss.rollout.versions import versions_from_json, versions_to_json
from megatron_gptoss.types import Prompt, RewardPart, Rollout, RolloutGroup


def write_archive(path: str | Path, step: int, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
    """Writes all rollouts of a step. The file appears whole or not at all; one of that name is replaced, and its scores, which are of other
    rollouts then, go first: a resumed run does steps again.

    ValueError for an empty group, MachineError when the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                for number, rollout in _numbered(groups):
                    file.write(json_line(_to_json(step, number, rollout, tokenizer)))
                file.flush()
                os.fsync(file.fileno())
            scores_beside(path).unlink(missing_ok=True)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _numbered(groups: Sequence[RolloutGroup]) -> Iterator[tuple[int, Rollout]]:
    for number, group in enumerate(groups):
        if not group.rollouts:
            raise ValueError(f"group {number} ({group.prompt.id}) has no rollouts, and a file of rollouts cannot hold it")
        for rollout in group.rollouts:
            yield number, rollout


def read_archive(path: str | Path) -> list[RolloutGroup]:
    """The groups of a file, in their order. DataError with the line number for a line that is no rollout."""
    groups: dict[int, list[Rollout]] = {}
    for line, value in read_json_lines(path):
        try:
            number, rollout = _from_json(value)
            if groups.setdefault(number, [rollout])[0].prompt != rollout.prompt:
                raise ValueError(f"group {number} has rollouts of two prompts")
        except (KeyError, TypeError, ValueError) as error:
            why = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}:{line}: this line is not a rollout: {why}.") from error
        if groups[number][-1] is not rollout:
            groups[number].append(rollout)
    return [RolloutGroup(rollouts[0].prompt, tuple(rollouts)) for rollouts in groups.values()]


def _to_json(step: int, group: int, rollout: Rollout, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "step": step,
        "group": group,
        "index": rollout.index,
        "prompt_id": rollout.prompt.id,
        "task": rollout.prompt.task,
        "prompt": rollout.prompt.text,
        "gold": rollout.prompt.gold,
        "answer": rollout.answer,
        "reward": _number(rollout.reward),
        "reward_parts": [{"name": part.name, "value": _number(part.value)} for part in rollout.reward_parts],
        "labels": list(rollout.labels),
        "stop_reason": rollout.stop_reason,
        "num_tool_calls": rollout.num_tool_calls,
        "versions": versions_to_json(rollout.versions),
        "text": tokenizer.decode(rollout.token_ids),
        "token_ids": list(rollout.token_ids),
        "sampled": [int(flag) for flag in rollout.sampled],
        "logp": all_to_json(rollout.logp),
        "routes": routes_to_json(rollout.routes),
    }


def _from_json(value: dict[str, Any]) -> tuple[int, Rollout]:
    sampled = tuple(bool(flag) for flag in value["sampled"])
    rollout = Rollout(
        prompt=Prompt(value["prompt_id"], value["task"], value["prompt"], value["gold"]),
        index=value["index"],
        token_ids=tuple(value["token_ids"]),
        sampled=sampled,
        logp=tuple(_float(number) for number in value["logp"]),
        versions=versions_from_json(value["versions"], sampled),
        num_tool_calls=value["num_tool_calls"],
        stop_reason=value["stop_reason"],
        answer=value["answer"],
        reward=_float(value["reward"]),
        reward_parts=tuple(RewardPart(part["name"], _float(part["value"])) for part in value["reward_parts"]),
        labels=tuple(value["labels"]),
        routes=routes_from_json(value.get("routes")),  # archives of older versions have no such field
    )
    rollout.check()
    return value["group"], rollout


def _number(value: float) -> float | str:
    return to_json(float(value))


def _float(value: Any) -> float:
    return NOT_FINITE[value] if value in NOT_FINITE else float(value)
