"""An engine's routes of a conversation: which of several turns' accounts of the same token to believe.

In: what vLLM returns as `routed_experts`, turn after turn. Out: `TokenRoutes` of the whole conversation. Nothing is replayed here.

A later turn tells of the whole prefix again. From the prefix cache it has the very rows that an earlier turn wrote; where the prefix was
run again, rounding may have sent a token elsewhere. The first account stays: with it the log-prob of the token after was sampled, and that
is what the trainer has to match. What is different in a later one is counted, but not across an update of the weights, where it is no
rounding. A turn that an update interrupts tells no routes, so turns whose routes are wanted are not interrupted (collect.py).
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.types import TokenRoutes, TurnRequest, TurnResult


def token_routes(routed: Any, num_experts: int) -> TokenRoutes | None:
    """vLLM's `routed_experts`, uint8 [tokens it ran, L, K]; None stays None."""
    if routed is None:
        return None
    _, num_layers, top_k = routed.shape
    return TokenRoutes(np.ascontiguousarray(routed, dtype=np.uint8).tobytes(), num_layers, top_k, num_experts)


def add_turn(known: TokenRoutes | None, request: TurnRequest, result: TurnResult, *, same_policy: bool = True) -> TokenRoutes | None:
    """The conversation's routes after one more turn. Rows that are missing in `known` are taken from the turn. `same_policy`: the turn
    before was sampled by it too.

    Raises EngineFailed when the turn tells of other tokens than it ran, of none at all, or of experts that there are not.
    """
    told = result.routes
    if result.stop_reason == "abort":
        return known  # such a conversation is not trained on, and its turn may never have begun
    ran = len(request.token_ids) + len(result.token_ids) - 1
    if told is None or told.num_tokens != ran:
        number = "no routes" if told is None else f"routes of {told.num_tokens} tokens"
        raise EngineFailed(f'{request.request_id}: the engine ran {ran} tokens and returned {number} (rl.router_replay = "engine")')
    told.check()
    if not any(told.experts):
        raise EngineFailed(
            f"{request.request_id}: all routes that the engine returned are zeros, so its experts are chosen where vLLM does not record it "
            '(a kernel that routes by itself). Use another backend for the experts, or rl.router_replay = "none" or "scored".'
        )
    later_TLK = _rows(told)
    if int(later_TLK.max()) >= told.num_experts:
        raise EngineFailed(f"{request.request_id}: the engine sent a token to expert {later_TLK.max()} of {told.num_experts}")
    if known is None:
        return told
    earlier_TLK = _rows(known)
    again_TLK = later_TLK[: known.num_tokens]
    in_both_TL = earlier_TLK.any(-1) & again_TLK.any(-1)
    elsewhere_TL = in_both_TL & (np.sort(earlier_TLK, -1) != np.sort(again_TLK, -1)).any(-1)
    kept_TLK = np.where(earlier_TLK.any(-1, keepdims=True), earlier_TLK, again_TLK)
    whole = np.concatenate([kept_TLK, later_TLK[known.num_tokens :]])
    return replace(known, experts=whole.tobytes(), num_rerouted=known.num_rerouted + same_policy * int(elsewhere_TL.sum()))


def _rows(routes: TokenRoutes) -> np.ndarray:
    return np.frombuffer(routes.experts, np.uint8).reshape(-1, routes.num_layers, routes.top_k)


def routes_to_json(routes: TokenRoutes | None) -> dict[str, Any] | None:
    """For the archive: the bytes deflated, in base64."""
    if routes is None:
        return None
    return {
        "num_layers": routes.num_layers,
        "top_k": routes.top_k,
        "num_experts": routes.num_experts,
        "num_rerouted": routes.num_rerouted,
        "experts": base64.b64encode(zlib.compress(routes.experts, level=1)).decode("ascii"),
    }


def routes_from_json(value: dict[str, Any] | None) -> TokenRoutes | None:
    """Raises KeyError or ValueError for what is no such value."""
    if value is None:
        return None
    try:
        experts = zlib.decompress(base64.b64decode(value["experts"], validate=True))
    except zlib.error as error:
        raise ValueError(f"routes cannot be read: {error}") from None
    return TokenRoutes(experts, value["num_layers"], value["top_k"], value["num_experts"], value["num_rerouted"])
