"""What the driver says to a training world and hears from it, beside microbatches. No megatron, so that the driver can import it.

In: nothing. Out: records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gptoss.config.schema import OptimizerFields, RlConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_gptoss.model.replay import Routes


@dataclass(frozen=True)
class TokenScores:
    """What a forward pass knows about the predicted tokens of one microbatch."""

    logp_N: Tensor  # float32, nats
    entropy_N: Tensor  # float32, nats
    routes: Routes | None = None  # where its tokens went, padding included; None where nobody asked (rl.router_replay)


@dataclass(frozen=True)
class CriticSettings:
    """What a critic has of its own beside the policy's settings."""

    optimizer: OptimizerFields
    total_updates: int


@dataclass(frozen=True)
class Update:
    """Everything an update needs beside the microbatches."""

    policy: RlConfig | None  # None: negative log-likelihood (warm start)
    temperature: float = 1.0
    dump_dir: Path | None = None  # where a microbatch that is not finite is written
    label: str = ""  # "step-12", for dumps
    keep_scores: bool = False  # StepStats.scores: the log-prob of every trained token, which is else only measured
