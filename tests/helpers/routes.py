"""Samples as an engine would have sampled them, with its routes: real ones from a forward pass of a trainer, or arbitrary ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.types import Sample, TokenRoutes


def record_of(experts_TLK: torch.Tensor, model: ModelConfig) -> TokenRoutes:
    _, num_layers, top_k = experts_TLK.shape
    return TokenRoutes(experts_TLK.to(torch.uint8).numpy().tobytes(), num_layers, top_k, model.num_local_experts)


def rows_of(routes: TokenRoutes) -> torch.Tensor:
    """uint8 [T, L, K]."""
    return torch.frombuffer(bytearray(routes.experts), dtype=torch.uint8).view(-1, routes.num_layers, routes.top_k)


def sampled_by(engine, batch: list[Sample]) -> list[Sample]:
    """`engine` is a trainer of one rank: its log-probs become the engine's, its routes come without the last token's row."""
    made = []
    for sample in batch:
        (scores,) = engine.score([make_microbatch([sample])], router_replay="scored")
        coming = iter(scores.logp_N.tolist())
        logp = tuple(next(coming) if trained else 0.0 for trained in sample.trained)
        ran_TLK = scores.routes.experts_LTK.transpose(0, 1)[: len(sample.token_ids) - 1].contiguous()
        made.append(replace(sample, engine_logp=logp, routes=record_of(ran_TLK, engine.model_config)))
    return made


def sent_anywhere(batch: list[Sample], model: ModelConfig, *, seed: int) -> list[Sample]:
    """Arbitrary experts for every token but the last: what no router of ours would choose by itself."""
    g = torch.Generator().manual_seed(seed)

    def anywhere(n: int) -> TokenRoutes:
        order = torch.rand(n - 1, model.num_hidden_layers, model.num_local_experts, generator=g).argsort(-1)
        return record_of(order[..., : model.num_experts_per_tok].contiguous(), model)

    return [replace(s, routes=anywhere(len(s.token_ids))) for s in batch]
