"""Weights over connections of their own, with real trainers and real engines on CPUs: the protocol is that of GPUs.

That log-probs follow, and that each expert arrives where it belongs, tools/bench_sync.py shows too; here it is a run that must not notice.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.types import TurnRequest, TurnResult
from tests.helpers.runs import CONFIGS, ROOT, metrics, must, timeless, wait_for

# Two ranks that divide the experts, so that all weights are gathered; an entropy term, so that they change from the first step on.
FLAGS = [
    *CONFIGS, str(ROOT / "configs" / "deterministic.toml"), "--run.steps=3", "--run.save_every=0", "--run.eval_every=0",
    "--run.final_eval_prompts=0", "--rl.sequences_per_step=8", "--rollout.group_size=4", "--rl.drop_uniform_groups=false",
    "--rl.entropy_coef=0.05", "--rl.warmup_steps=0", "--parallel.data=2", "--parallel.expert=2", "--rollout.weight_bucket_mib=0.3",
]  # fmt: skip
TURN_TIMEOUT_S = 300


def test_a_run_is_the_same_whatever_way_its_weights_go(tmp_path: Path) -> None:
    runs = {}
    for way in ("inline", "broadcast", "shared"):
        text = must("train", *FLAGS, f"--rollout.weight_sync={way}", f"--run.id={way}", cwd=tmp_path)
        assert f"weight sync           {way}" in text
        runs[way] = {step: timeless(row) for step, row in metrics(tmp_path / "runs" / f"demo-{way}").items()}
        assert f'"weight_sync": "{way}"' in (tmp_path / "runs" / f"demo-{way}" / "manifest.json").read_text()
    assert runs["inline"] == runs["broadcast"] == runs["shared"]
    steps = runs["inline"]
    assert [row["policy/version"] for row in steps.values()] == [1, 2, 3]
    assert len({row["policy/entropy"] for row in steps.values()}) == 3, "the weights did not change, so nothing was shown"
    assert max(row["mismatch/logp_abs_max"] for row in steps.values()) < 1e-4, "the engine did not follow"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory):
    """A trainer of one rank and two engines, which have been given version 0."""
    folder = tmp_path_factory.mktemp("killed")
    flags = [
        "--rollout.weight_sync=broadcast",
        "--rollout.weight_bucket_mib=0.1",
        "--rollout.num_engines=2",
        f"--rollout.turn_timeout_s={TURN_TIMEOUT_S}",
    ]
    loaded = load(*parse_flags([*CONFIGS, *flags, f"--run.dir={folder}", "--rollout.start_timeout_s=400"]))
    plan = make_plan(loaded, Cluster(num_cpus=2, num_gpus=0))
    with open_session(loaded, plan, "train") as session:
        session.start_ray(num_actors=3)
        session.make_trainer(loaded.config.rl, total_updates=1)
        session.make_engines()
        session.start()
        session.publish(0)
        yield session


async def answer(engine: Any, request: TurnRequest) -> TurnResult:
    return await engine.generate(request)


def test_an_engine_killed_in_the_middle_of_an_update_is_replaced_and_holds_what_the_other_holds(session: Session) -> None:
    assert session.link is not None
    digest, version = session.link.digest, 1
    for victim in ("actor and all its children", "core"):
        engine: Any = session.pool.slots[1].engine
        actor = psutil.Process(engine.pid)
        processes = [*actor.children(recursive=True), *([actor] if victim != "core" else [])]
        for process in processes:
            process.send_signal(signal.SIGSTOP)  # so that the update cannot end before the kill
        publishing = threading.Thread(target=session.publish, args=(version,))
        publishing.start()
        time.sleep(2)
        assert publishing.is_alive()
        for process in processes:
            process.kill()
        # Long before the update's deadline, for which alone vLLM would wait when its core dies.
        wait_for(lambda: session.pool.slots[1].engine is not engine, f"the end of the {victim}", timeout=TURN_TIMEOUT_S / 4)  # noqa: B023
        publishing.join(400)
        assert not publishing.is_alive() and session.pool.counts.restarts == version
        assert session.link.digest == digest, "the same weights"
        assert session.pool.slots[1].engine is not engine

        for slot in session.pool.slots:
            request = TurnRequest(f"r{version}/{slot.index}", f"c{slot.index}", (5, 6, 7), 4, (), 1.0)
            assert session.run(answer(slot.engine, request)).version == version
        version += 1
    # All together again, in one group.
    session.publish(version)
    assert session.link.digest == digest and session.pool.counts.restarts == 2
