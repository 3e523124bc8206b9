"""Break a model on purpose, in one known way, for a moment or for good.

In: a GptOssModel and a fault's name. Out: the same model, computing something wrong; its weights are never touched, so what it exports is
right. For the self-test, which has to see such a fault, and for finding out whether it explains the engine's log-probs. Faults of the head
are only noted on the model: the head is its caller's. NEAR_TIES is no fault: it does what another order of sums might do to the routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_gptoss.attention.module import AttentionOptions, SinkAttention
from megatron_gptoss.model.experts import GroupedExperts
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.model.layer import RotatedSelfAttention, YarnAngles
from megatron_gptoss.model.router import rounding_noise, routers_of
from megatron_gptoss.rl.parity import NEAR_TIES

MODEL_FAULTS = ("no-sinks", "window", "window-short", "no-window", "yarn", "yarn-rounded", "router-bias", "gate-up")
HEAD_FAULTS = ("temperature", "shifted")
FAULTS = ("none", *MODEL_FAULTS, *HEAD_FAULTS)


def break_model(model: GptOssModel, fault: str) -> Callable[[], None]:
    """Returns what mends it. "none" breaks nothing."""
    if fault not in (*FAULTS, NEAR_TIES):
        raise ValueError(f"unknown fault {fault!r}; one of {', '.join((*FAULTS, NEAR_TIES))}")
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def mend() -> None:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
        YarnAngles.forward.cache_clear()

    if fault in ("no-sinks", "window", "window-short", "no-window"):
        _break_attention(model, fault, put)
    elif fault == "yarn-rounded":
        put(model.rotary_pos_emb, "correction_range_round_to_int", True)
    elif fault == "yarn":  # plain RoPE: every dimension turns as fast as without YaRN, and no factor
        put(model.rotary_pos_emb, "inv_freq_inter", model.rotary_pos_emb.inv_freq_extra)
        put(model.rotary_pos_emb, "scaling_factor", 1.0)
        for attention in (m for m in model.modules() if isinstance(m, RotatedSelfAttention)):
            put(attention, "_yarn_concentration_factor", 1.0)
    elif fault == "router-bias":
        for router in routers_of(model):
            put(router, "ignore_bias", True)
    elif fault == NEAR_TIES:
        for router in routers_of(model):
            put(router, "noise", rounding_noise(router))
    elif fault in HEAD_FAULTS:
        put(model, "head_fault", fault)
    elif fault == "gate-up":
        for experts in (m for m in model.modules() if isinstance(m, GroupedExperts)):
            put(experts, "swap_gate_up", True)
    YarnAngles.forward.cache_clear()
    return mend


def _break_attention(model: GptOssModel, fault: str, put: Callable[[Any, str, Any], None]) -> None:
    full: Any = getattr(model.config, "sink_attention", AttentionOptions())
    for core in (m for m in model.modules() if isinstance(m, SinkAttention)):
        if fault == "no-sinks":
            put(core, "ignore_sinks", True)
        elif core.window is not None and fault == "no-window":
            put(core, "window", None)
            put(core, "backend", full.backend)  # that of layers which see everything
        elif core.window is not None:
            put(core, "window", core.window + (1 if fault == "window" else -1))


@contextmanager
def broken(model: GptOssModel, fault: str) -> Iterator[None]:
    """The model computes with this fault inside the block."""
    mend = break_model(model, fault)
    try:
        yield
    finally:
        mend()
