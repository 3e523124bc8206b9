"""Trainer and engine score the same tokens before the first step: equal when all is well, refused when the trainer is broken on purpose."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers.runs import CONFIGS, SMALL


@pytest.fixture(scope="module")
def session(warm, tmp_path_factory):
    """A session whose engine holds the warm start's weights. The trainer is replaced by each test; the engine stays as it is."""
    from megatron_gptoss.config.load import load, parse_flags
    from megatron_gptoss.config.plan import make_plan
    from megatron_gptoss.config.preflight import detect_cluster
    from megatron_gptoss.loop.session import open_session

    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("parity"))
    paths, flags = parse_flags([*CONFIGS, *SMALL, "--run.id=p", f"--run.init={warm}"])
    loaded = load(paths, flags)
    plan = make_plan(loaded, detect_cluster())
    with open_session(loaded, plan, "train") as opened:
        opened.start_ray(num_actors=plan.world_size + plan.num_engines)
        opened.make_trainer(loaded.config.rl, total_updates=1)
        opened.make_engines()
        opened.start()
        opened.publish(0)
        yield opened
    os.chdir(before)


def test_equal_at_every_position_also_beyond_the_window(session):
    from megatron_gptoss.loop.parity import check_parity

    rows = check_parity(session)
    window = session.config.model.sliding_window
    assert max(row.max for row in rows) < 1e-5
    assert sum(row.tokens for row in rows if row.first >= 2 * window) >= 24, "most of what is compared lies beyond the window"
    assert any(row.first < window for row in rows)


@pytest.mark.parametrize("fault", ["no-sinks", "window", "yarn"])
def test_a_broken_trainer_is_refused_with_the_gap_by_position(session, fault):
    from megatron_gptoss.errors import ParityError
    from megatron_gptoss.loop.parity import check_parity

    session.trainer.stop()
    healthy = session.config
    session.config = healthy.model_copy(update={"parity": healthy.parity.model_copy(update={"trainer_fault": fault})})
    try:
        session.make_trainer(session.config.rl, total_updates=1)
        session.world.start()
        with pytest.raises(ParityError) as refused:
            check_parity(session)
    finally:
        session.config = healthy
    text = str(refused.value)
    assert "The run does not start" in text
    gaps = [(int(a), float(b)) for a, b in re.findall(r"^\s+(\d+)-\d+\s+\d+\s+\S+\s+(\S+)", text, re.M)]
    assert len(gaps) >= 4
    assert max(gap for _, gap in gaps) > 1e-3
    if fault == "window":
        inside = [gap for first, gap in gaps if first < session.config.model.sliding_window // 2 + 1]
        assert all(gap < 1e-4 for gap in inside), "a wider window changes nothing before the window is full"
