"""What rollout/engine.py does with vLLM's answers, without vLLM; tests/e2e/test_engine.py has the real one."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from megatron_gptoss.rollout.engine import EngineDied, flat_log_probs, keep_out_of_garbage_collections


def test_log_probs_are_those_of_the_sampled_tokens():
    told = SimpleNamespace(token_ids=[7, 7, 3], logprobs=[-0.5, -1.5, -2.5])
    assert flat_log_probs([7, 7, 3], told) == (-0.5, -1.5, -2.5)
    assert flat_log_probs([], None) == flat_log_probs((), []) == ()
    for other in ([7, 3, 7], [7, 7], [7, 7, 3, 1]):
        with pytest.raises(EngineDied, match="of other tokens than it sampled"):
            flat_log_probs(other, told)
    with pytest.raises(EngineDied, match="0 for 1"):
        flat_log_probs([7], None)


def test_what_is_there_at_the_start_is_left_out_of_collections():
    kept = [object() for _ in range(3)], {}
    before = gc.get_freeze_count()
    try:
        keep_out_of_garbage_collections()
        assert gc.get_freeze_count() > before + 1000
        assert not any(each is kept for generation in range(3) for each in gc.get_objects(generation))
    finally:
        gc.unfreeze()
