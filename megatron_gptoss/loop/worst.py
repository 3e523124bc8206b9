"""On which words do trainer and engine disagree most?

In: the worst tokens of a step, and its rollouts. Out: lines of RUN/worst_tokens.jsonl, with the token's text and what stands before it. It
measures nothing; rl/worst.py did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.obs.disk import disk_errors
from megatron_gptoss.obs.run_dir import write_atomic
from megatron_gptoss.rl.samples import sample_name
from megatron_gptoss.types import RolloutGroup, WorstToken

CONTEXT = 16  # tokens shown before the worst one


def write_worst(path: Path, step: int, worst: Sequence[WorstToken], groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> None:
    """One line a token, the largest gap first. What is there of this step and later ones was written before a resume, and goes.
    MachineError when the disk is full."""
    _drop_from(path, step)
    token_ids = {sample_name(rollout): rollout.token_ids for group in groups for rollout in group.rollouts}
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        for token in worst:
            before = token_ids[token.name][max(token.position - CONTEXT, 0) : token.position]
            line = {
                "step": step,
                "sample": token.name,
                "position": token.position,
                "token_id": token.token_id,
                "text": tokenizer.decode([token.token_id]),
                "before": tokenizer.decode(before),
                "trainer_logp": token.trainer_logp,
                "engine_logp": token.engine_logp,
            }
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _drop_from(path: Path, step: int) -> None:
    """Leave the lines of earlier steps; a torn one belongs to none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
    if len(kept) < len(lines):
        write_atomic(path, "".join(kept))
