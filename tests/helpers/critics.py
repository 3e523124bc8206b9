"""A critic for tests, and samples that carry values and targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_gptoss.config.schema import RlConfig, TrainerConfig
from megatron_gptoss.types import Sample
from tests.helpers.training import MILD, trainer


def critic(shape, *, model=MILD, policy=None, lr: float = 1e-2, head_seed: int | None = 8, **fields):
    """A critic of this rank, of `policy` or of the policy that `trainer` makes; its head is zero when `head_seed` is None."""
    from megatron_gptoss.trainer.critic import Critic

    policy = policy if policy is not None else trainer(shape, model=model, **fields).module
    optimizer = RlConfig(lr=lr, decay="constant", warmup_steps=0)
    made = Critic(policy, model, TrainerConfig(**fields), shape, optimizer, total_updates=20)
    if head_seed is None:
        return made
    if made.module.post_process:  # the head is on the last pipeline stage
        g = torch.Generator().manual_seed(head_seed)
        with torch.no_grad():
            made.module.value_head.weight.copy_(0.2 * torch.randn(model.hidden_size, generator=g))
            made.module.value_head.bias.fill_(0.3)
    made.weights_changed()
    return made


def valued(samples: Sequence[Sample], *, seed: int, untaught: float = 0.0) -> list[Sample]:
    """With values and targets drawn at random; a share `untaught` of the targets is nan."""
    g = torch.Generator().manual_seed(seed)

    def draw(sample: Sample) -> Sample:
        value, target, coin = torch.rand(3, len(sample.token_ids), generator=g).tolist()
        target = [math.nan if c < untaught else x for x, c in zip(target, coin, strict=True)]
        at = lambda each: tuple(x if t else 0.0 for x, t in zip(each, sample.trained, strict=True))  # noqa: E731
        return replace(sample, values=at(value), value_targets=at(target))

    return [draw(sample) for sample in samples]
