"""Train one archived step again and compare it with what the run wrote down, bit for bit.

    python tools/replay_step.py RUN --step 12

In: a run directory with a complete checkpoint of the step before, and the step's archived rollouts. Out: loss and gradient norm of the
replay beside those in metrics.jsonl; exit code 1 when any differs. It starts trainer ranks and no engine, and writes nothing into the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from megatron_gptoss.config.load import Flag, load
from megatron_gptoss.config.plan import make_plan
from megatron_gptoss.config.preflight import detect_cluster
from megatron_gptoss.errors import CheckpointError, DataError, GptossError

COMPARED = ("train/loss", "grad/norm", "train/lr", "train/tokens", "mismatch/logp_abs_max", "policy/entropy")
OF_A_CRITIC = ("critic/loss", "critic/grad_norm", "critic/value_mean", "critic/explained_variance")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train one archived step again and compare it bit for bit.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, help="step to train again")
    arguments = parser.parse_args()
    try:
        return replay(arguments.run, arguments.step)
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def replay(run: Path, step: int) -> int:
    from megatron_gptoss.checkpoint.progress import MARKER
    from megatron_gptoss.loop.session import Session
    from megatron_gptoss.loop.train import step_metrics, update
    from megatron_gptoss.obs.metrics import read_metrics
    from megatron_gptoss.obs.run_dir import RunDir
    from megatron_gptoss.rl.advantages import keep_informative
    from megatron_gptoss.rollout.archive import read_archive

    source = RunDir(run)
    checkpoint = source.checkpoint(step - 1)
    if not (checkpoint / MARKER).is_file():
        raise CheckpointError(f"{checkpoint} is no complete checkpoint; replaying step {step} needs the state after step {step - 1}.")
    recorded = next((row for row in read_metrics(source.metrics_file) if row["step"] == step), None)
    if recorded is None or "grad/norm" not in recorded:
        raise DataError(f"{source.metrics_file} has no update at step {step}.")
    archive = source.rollouts / f"step-{step}.jsonl"
    groups = read_archive(archive)

    with tempfile.TemporaryDirectory(prefix="gptoss-replay-") as scratch, ExitStack() as ending:
        elsewhere = [Flag("run.dir", scratch, "replay")]
        if load([source.config_file]).config.rl.kl_coef == 0.0:
            elsewhere.append(Flag("run.init", "", "replay"))  # only the KL term's reference comes from there; it may be gone
        loaded = load([source.config_file], elsewhere)
        plan = make_plan(loaded, detect_cluster())
        if loaded.config.rl.router_replay == "engine" and not any(r.routes for g in groups for r in g.rollouts):
            raise DataError(f'{archive} holds no routes, and the run trained with rl.router_replay = "engine": it cannot be trained again.')
        session = Session(loaded, plan, "train", ending)
        session.start_ray(num_actors=plan.world_size)
        session.make_trainer(session.config.rl, total_updates=plan.total_updates)
        session.start()
        session.world.resume(checkpoint.absolute())
        kept = keep_informative(groups, drop_uniform=session.config.rl.leaves_out_uniform_groups)
        stats = update(session, step, kept.groups)
    values = step_metrics(stats)
    equal = True
    for name in COMPARED + (OF_A_CRITIC if loaded.config.rl.has_critic else ()):
        same = is_same(values.get(name), recorded.get(name))
        equal &= same
        print(f"{name:26} recorded {recorded.get(name)!r:24} replayed {values.get(name)!r:24} {'equal' if same else 'DIFFERENT'}")
    return 0 if equal else 1


def is_same(x: object, y: object) -> bool:
    """To the bit; the norm of a step that was refused may be nan, and is again."""
    return x == y or (x != x and y != y)


if __name__ == "__main__":
    sys.exit(main())
