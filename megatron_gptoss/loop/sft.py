"""`gptoss sft`: the warm start. Imitates generated transcripts, some of them flawed, so that there is something left to learn.

In: configuration and plan. Out: a run directory with metrics and a checkpoint. No engine runs: how well the model copies, which decides
whether reinforcement learning can succeed, is computed exactly from log-probs instead of being sampled.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.data.harmony import render_marked
from megatron_gptoss.errors import RunFailed
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.obs.plan_table import plan_rows
from megatron_gptoss.tasks.base import Demonstrator
from megatron_gptoss.trainer.how import Update
from megatron_gptoss.types import Sample

NOT_IN_SFT = ("engines", "a step", "updates", "length", "memory of an engine")  # rows of the plan that are about reinforcement learning
GATE_TRANSCRIPTS = 200  # held-out; the probability is exact for each, so the rest is the spread between problems


def run_sft(loaded: Loaded, plan: RunPlan) -> None:
    with open_session(loaded, plan, "sft") as session:
        c = session.config
        start(session)
        total = c.sft.steps
        train(session, total)
        while (copied := gate(session)) < c.sft.min_copy_probability:
            if session.progress.step >= total + c.sft.extra_steps:
                raise RunFailed(
                    f"after {session.progress.step} steps the model copies right with probability {copied:.3f}, and "
                    f"sft.min_copy_probability = {c.sft.min_copy_probability} is wanted. Reinforcement learning would not teach it. "
                    "Train longer (sft.steps, sft.extra_steps) or take another run.seed."
                )
            session.console.say(f"copying is not there yet ({copied:.3f} < {c.sft.min_copy_probability}); training on")
            train(session, session.progress.step + max(1, c.sft.extra_steps // 3))
        session.save()
        session.finish_save()
        session.console.say(f"checkpoint {session.dir.checkpoint(session.progress.step)}")


def start(session: Session) -> None:
    c, plan = session.config, session.plan
    rows = [row for row in plan_rows(session.loaded, plan) if row[0] not in NOT_IN_SFT]
    session.console.table(f"gptoss sft: {session.dir.path}", [*rows, ("logs", str(session.dir.logs))])
    session.start_ray(num_actors=plan.world_size)
    session.make_trainer(c.sft, total_updates=c.sft.steps)
    with session.console.waiting("starting the trainer"):
        session.start()
    if session.progress.step:
        session.say_resumed()


def train(session: Session, until: int) -> None:
    """Update by update up to step `until`. Transcripts depend on seed and step only, so a resumed run sees the same ones."""
    c = session.config
    how = Update(policy=None, dump_dir=session.dir.path.absolute() / "dumps", label="sft")
    began, tokens, losses = time.perf_counter(), 0, []
    with session.console.progress("warm start", total=until - session.progress.step, unit="steps") as bar:
        while session.progress.step < until:
            session.stop_if_asked()
            step = session.progress.step + 1
            batch = session.pack(demonstrations(session, step))
            with session.clock("update"):
                stats = session.world.update(batch, replace(how, label=f"sft-{step}"))
            session.note_skip(step, stats)
            session.show_memory()
            tokens += stats.num_tokens
            losses.append(stats.loss)
            session.progress = replace(session.progress, step=step)
            session.metrics.write(
                step,
                {
                    "train/loss": stats.loss,
                    "train/lr": stats.learning_rate,
                    "train/tokens": float(stats.num_tokens),
                    "train/skipped": float(stats.skipped),
                    "grad/norm": stats.grad_norm,
                    "policy/entropy": stats.entropy,
                    "time/update_s": session.clock.take()["update"],
                },
            )
            bar.advance(1, f"loss {sum(losses[-20:]) / len(losses[-20:]):.3f}  {tokens / (time.perf_counter() - began):.0f} tokens/s")
            if c.sft.save_every and step % c.sft.save_every == 0 and step < until:
                session.save()
            else:
                session.notice_save()


def demonstrations(session: Session, step: int) -> list[Sample]:
    task = cast(Demonstrator, session.task)
    rng = random.Random(f"sft/{session.config.run.seed}/{step}")
    samples = []
    for i in range(session.config.sft.sequences_per_step):
        demo = task.demonstration(rng)
        marked = render_marked(demo.messages, session.tokenizer)
        n = len(marked.token_ids)
        samples.append(Sample(f"{demo.kind}/{step}/{i}", marked.token_ids, marked.said, (0.0,) * n, advantage=1.0))
    return samples


def gate(session: Session) -> float:
    """Mean over held-out problems of the exact probability that every operand, result and answer is copied right, given the format.

    Said beside it: the probability of the whole right transcript, format and all calls, which held-out success at temperature 1 hardly
    exceeds. How far it stands below the copying is what the flawed demonstrations left for reinforcement to mend.
    """
    marked = [
        render_marked(demo.messages, session.tokenizer, demo.copied)
        for demo in cast(Demonstrator, session.task).copy_transcripts("heldout", 0, GATE_TRANSCRIPTS)
    ]
    copied = mean_probability(session, [(each.token_ids, each.copied) for each in marked])
    right = mean_probability(session, [(each.token_ids, each.said) for each in marked])
    session.metrics.write(session.progress.step, {"sft/copy_probability": copied, "sft/right_probability": right})
    session.console.say(
        f"copies right with probability {copied:.3f}, says the whole right transcript with {right:.3f} (means over {len(marked)} held-out "
        "problems)"
    )
    return copied


def mean_probability(session: Session, marked: Sequence[tuple[tuple[int, ...], tuple[bool, ...]]]) -> float:
    """Of all the marked tokens of a transcript at once, mean over transcripts. `marked`: token ids, and which of them count."""
    samples = [Sample(f"gate/{i}", ids, mask, (0.0,) * len(ids), advantage=0.0) for i, (ids, mask) in enumerate(marked)]
    found = [math.exp(math.fsum(logps)) for logps in session.score(samples)]
    return sum(found) / len(found)
