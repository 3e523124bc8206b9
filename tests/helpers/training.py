"""Samples and trainers for tests of the training world."""

from __future__ import annotations

from unittest.mock import Mock, patch

import torch

from megatron_gptoss.config.schema import DiagnoseConfig, RlConfig, TrainerConfig
from megatron_gptoss.types import Sample
from tests.helpers.tiny_model import TINY, strong_tensors

MILD = TINY.model_copy(update={"initializer_range": 0.05})


def samples(count: int, *, seed: int, vocab_size: int = TINY.vocab_size, shortest: int = 5, longest: int = 30) -> list[Sample]:
    """Random sequences of mixed length with about half their tokens trained, and engine log-probs near those of a random model."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        n = int(torch.randint(shortest, longest + 1, (1,), generator=g))
        trained = [False, *(torch.rand(n - 1, generator=g) < 0.5).tolist()]
        trained[-1] = True
        logp = (-5.0 + 0.1 * torch.randn(n, generator=g)).tolist()
        made.append(
            Sample(
                name=f"s{i}",
                token_ids=tuple(torch.randint(0, vocab_size, (n,), generator=g).tolist()),
                trained=tuple(trained),
                engine_logp=tuple(lp if t else 0.0 for lp, t in zip(logp, trained, strict=True)),
                advantage=float(torch.randn(1, generator=g)),
            )
        )
    return made


def trainer(shape, *, model=MILD, lr: float = 1e-2, seed: int = 3, updates: int = 10, clip_grad: float = 1.0, diagnose=None, **fields):
    """A trainer of this rank with strong asymmetric weights. `diagnose`: keys of that section. Process groups must exist."""
    from megatron_gptoss.trainer.step import Trainer

    optimizer = RlConfig(lr=lr, decay="constant", warmup_steps=0, clip_grad=clip_grad)
    switches = DiagnoseConfig(**(diagnose or {}))
    made = Trainer(model, TrainerConfig(**fields), shape, optimizer, total_updates=updates, diagnose=switches)
    made.load_hf((n, 0.5 * t if "norm" not in n else t) for n, t in strong_tensors(model, seed))
    made.weights_changed()
    return made


def trainer_in_float64(shape, *, model=MILD, seed: int = 3):
    """The same one with weights, activations and gradients in float64, which no configuration offers: what is left of a difference there
    is no rounding of float32. It has no optimizer, and gradients are whole on every rank."""
    from megatron_gptoss.trainer import passes
    from megatron_gptoss.trainer.step import Trainer

    plain = passes.DistributedDataParallelConfig
    whole = lambda **fields: plain(**{**fields, "use_distributed_optimizer": False, "grad_reduce_in_fp32": False})  # noqa: E731
    config = TrainerConfig().model_copy(update={"dtype": "float64"})
    with patch.multiple(passes, make_optimizer=Mock(), make_schedule=Mock(), DistributedDataParallelConfig=whole):
        made = Trainer(model, config, shape, RlConfig(), total_updates=1)
    made.load_hf((n, (0.5 * t if "norm" not in n else t).double()) for n, t in strong_tensors(model, seed))
    return made
