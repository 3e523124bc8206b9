"""What training made of each sampled token: `rollouts/step-N.scores.jsonl`, beside the archive of the step, one JSON object a sample.

In: advantages and the trainer's log-probs of a step's samples. Out: a file that reads back to the same, every float exact. Rollouts that
gave no sample, such as those of groups without signal, are not in it. Which text the tokens are, the archive knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gptoss.data.prompts import read_json_lines
from megatron_gptoss.errors import DataError
from megatron_gptoss.obs.json_floats import NOT_FINITE, all_to_json, json_line, to_json
from megatron_gptoss.obs.run_dir import write_atomic
from megatron_gptoss.types import SampleScores


def scores_beside(archive: Path) -> Path:
    """rollouts/step-3.jsonl -> rollouts/step-3.scores.jsonl"""
    return archive.with_suffix(".scores.jsonl")


def write_scores(path: Path, step: int, scores: Sequence[SampleScores]) -> None:
    """The file appears whole or not at all; one of that name is replaced. MachineError when the disk is full."""
    lines = []
    for each in scores:
        if len(each.advantage) != len(each.trainer_logp):
            raise ValueError(f"{each.name}: {len(each.advantage)} advantages but {len(each.trainer_logp)} log-probs")
        bits = np.array(each.advantage, np.float64).view(np.int64)  # -0.0 is not 0.0
        same = bits.size > 0 and bool((bits == bits[0]).all())  # one number says it, as for most rules of advantages
        line = {
            "step": step,
            "sample": each.name,
            "advantage": to_json(float(each.advantage[0])) if same else all_to_json(each.advantage),
            "trainer_logp": all_to_json(each.trainer_logp),
        }
        lines.append(json_line(line).decode())
    write_atomic(path, "".join(lines))


def read_scores(path: Path) -> dict[str, SampleScores]:
    """By sample name. DataError with the line number for a line that holds no scores."""
    found = {}
    for number, value in read_json_lines(path):
        try:
            each = _from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            why = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}:{number}: this line holds no scores: {why}.") from error
        found[each.name] = each
    return found


def _from_json(value: dict[str, Any]) -> SampleScores:
    logp = tuple(_float(x) for x in value["trainer_logp"])
    given = value["advantage"]
    advantage = tuple(_float(x) for x in given) if isinstance(given, list) else (_float(given),) * len(logp)
    if len(advantage) != len(logp):
        raise ValueError(f"{len(advantage)} advantages but {len(logp)} log-probs")
    return SampleScores(value["sample"], advantage, logp)


def _float(value: Any) -> float:
    return NOT_FINITE[value] if value in NOT_FINITE else float(value)
