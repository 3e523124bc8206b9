"""`gptoss train` with rollout.max_lag_steps above 0: the story of train.py, with rollouts that run ahead while the trainer works.

In: configuration and plan. Out: what train.py leaves, with `rollout/lag_*`, `rollout/groups_stale` and `time/wait_s` in the metrics. The
verbs are train.py's, but for the rollouts: a stream in the event loop begins them (rollout/stream.py), and new weights interrupt and
continue them (rollout/collect.py). docs/overlap.md says what is exact about it and what is corrected.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.loop.train import finish, has_samples, measure, publish, record, save_and_evaluate_if_due, start, steps, update
from megatron_gptoss.rl.advantages import keep_informative
from megatron_gptoss.rollout.stream import RolloutStream, Taken
from megatron_gptoss.rollout.versions import continued_turns
from megatron_gptoss.types import Prompt, RolloutGroup


def run_overlapped(loaded: Loaded, plan: RunPlan) -> None:
    with open_session(loaded, plan, "train") as session:
        start(session)
        stream = open_stream(session)
        for step in steps(session):
            taken = take_rollouts(session, stream, step)
            kept = keep_informative(taken.groups, drop_uniform=session.config.rl.leaves_out_uniform_groups)
            stats = update(session, step, kept.groups) if has_samples(kept.groups) else measure(session, taken.groups)
            publish(session, stats)
            session.run(stream.run_ahead())
            record(session, step, taken.groups, kept, stats, stream_metrics(taken))
            save_and_evaluate_if_due(session, step)
        finish(session)


def open_stream(session: Session) -> RolloutStream:
    """Rollouts of the prompts that were not trained on yet. Those on their way when a run ended are begun again when it is resumed."""
    c, plan, progress = session.config, session.plan, session.progress

    async def roll(prompt: Prompt, number: int) -> RolloutGroup:
        (group,) = await session.collecting(
            [prompt],
            group_size=c.rollout.group_size,
            step=session.progress.step,
            version=None,
            routes=c.rl.router_replay == "engine",
            order=number + 1,  # the step that waits first; and an evaluation, for which all wait, before it
        )
        return group

    stream = RolloutStream(
        lambda number, count: session.task.prompts("train", number, count),
        roll,
        first=progress.prompt_cursor,
        groups_per_step=plan.groups_per_step,
        max_lag_steps=c.rollout.max_lag_steps,
        num_steps=c.run.steps - progress.step,
    )
    session.ending.callback(lambda: session.run(stream.close()))
    session.run(stream.run_ahead())
    return stream


def take_rollouts(session: Session, stream: RolloutStream, step: int) -> Taken:
    """The step's groups, when the last of them is finished, and the archive of them planned."""
    with session.clock("wait"), session.console.waiting(f"step {step}: waiting for rollouts"):
        taken = session.run(stream.take(session.progress.policy_version))
    session.archiving.plan(session.dir.rollouts / f"step-{step}.jsonl", step, taken.groups, session.tokenizer)
    session.progress = replace(session.progress, prompt_cursor=session.progress.prompt_cursor + taken.num_prompts)
    return taken


def stream_metrics(taken: Taken) -> dict[str, float]:
    return {
        "rollout/groups_stale": float(taken.num_stale),
        "rollout/continued_turns": float(sum(continued_turns(rollout) for group in taken.groups for rollout in group.rollouts)),
        "rollout/span_s": taken.span_s,  # no part of the step's time: other work goes on meanwhile
    }
