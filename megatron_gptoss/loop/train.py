"""`gptoss train`: the story of a reinforcement-learning run, one verb a line.

In: configuration and plan. Out: a run directory with metrics, rollouts, checkpoints and a picture. Each verb returns its measurements; they
are logged once, at the end of the step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.schema import Config
from megatron_gptoss.loop.evaluate import evaluate
from megatron_gptoss.loop.parity import self_test
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.loop.worst import write_worst
from megatron_gptoss.obs.plan_table import plan_rows
from megatron_gptoss.obs.report import write_report
from megatron_gptoss.obs.spans import SPANS, STEP
from megatron_gptoss.rl.advantages import AdvantageRule, Kept, keep_informative
from megatron_gptoss.rl.kl_reward import kl_rewards
from megatron_gptoss.rl.samples import by_sample, is_trained, make_samples
from megatron_gptoss.rl.value_loss import value_figures
from megatron_gptoss.rollout.scores import write_scores
from megatron_gptoss.rollout.versions import lags
from megatron_gptoss.trainer.how import Update
from megatron_gptoss.types import CriticStats, MicroBatch, RolloutGroup, Sample, StepStats

SHOWN_ROLLOUTS = 3
NOTHING: Mapping[str, float] = MappingProxyType({})
NO_VALUES = AdvantageRule("group-mean")  # makes samples when advantages do not matter, or not yet


def run_training(loaded: Loaded, plan: RunPlan) -> None:
    with open_session(loaded, plan, "train") as session:
        start(session)
        for step in steps(session):
            groups = take_rollouts(session, step)
            session.rest_engines()
            kept = keep_informative(groups, drop_uniform=session.config.rl.leaves_out_uniform_groups)
            stats = update(session, step, kept.groups) if has_samples(kept.groups) else measure(session, groups)
            publish(session, stats)
            record(session, step, groups, kept, stats)
            save_and_evaluate_if_due(session, step)
        finish(session)


def start(session: Session) -> None:
    """Everything up, the engines on the trainer's weights, both seen to agree, and the starting point measured."""
    c, plan = session.config, session.plan
    began = time.perf_counter()
    session.start_trace()
    session.console.table(f"gptoss train: {session.dir.path}", [*plan_rows(session.loaded, plan), ("logs", str(session.dir.logs))])
    session.start_ray(num_actors=plan.world_size + plan.num_engines)
    session.make_trainer(c.rl, total_updates=plan.total_updates)
    session.make_engines()
    with session.console.waiting("starting trainer and engines"):
        session.start()
    session.publish(session.progress.policy_version)
    agreed = ""
    if c.parity.enabled:
        agreed = f"; {self_test(session).words()}"
    session.console.say(f"ready after {time.perf_counter() - began:.0f} s{agreed}")
    if session.progress.step == 0:
        if c.run.final_eval_prompts:
            session.metrics.write(0, evaluate(session, c.run.final_eval_prompts, step=0).metrics())
    else:
        session.say_resumed()
    session.clock.take()


def steps(session: Session) -> Iterator[int]:
    """Step numbers still to do, counted from 1. A step's time runs from here until it is recorded."""
    for step in range(session.progress.step + 1, session.config.run.steps + 1):
        session.stop_if_asked()
        session.clock.take()
        session.step_began = time.perf_counter()
        yield step


def take_rollouts(session: Session, step: int) -> list[RolloutGroup]:
    """The step's prompts, all their rollouts, and the archive of them planned."""
    with session.clock("rollout"):
        prompts = session.task.prompts("train", session.progress.prompt_cursor, session.plan.groups_per_step)
        groups = session.collect(
            prompts,
            group_size=session.config.rollout.group_size,
            step=step,
            version=session.progress.policy_version,
            words=f"step {step}: rollouts",
            routes=session.config.rl.router_replay == "engine",
        )
    session.archiving.plan(session.dir.rollouts / f"step-{step}.jsonl", step, groups, session.tokenizer)
    session.progress = replace(session.progress, prompt_cursor=session.progress.prompt_cursor + len(prompts))
    return groups


def update(session: Session, step: int, groups: Sequence[RolloutGroup]) -> StepStats:
    """Score when the update is not on-policy, or its rewards need log-probs, or its advantages a critic's values; then update."""
    c, rule = session.config, advantage_rule(session.config)
    kl_in_reward, kl_ref, paid = c.rl.kl_coef > 0.0 and c.rl.kl_in == "reward", None, None
    samples = make_samples(groups, NO_VALUES if c.rl.has_critic else rule)
    batch = session.pack(samples, minibatches=c.rl.minibatches)
    session.archiving.begin()
    with session.clock("score"):
        old = None
        if kl_in_reward or not session.plan.on_policy:
            old = session.world.score(batch, c.rollout.temperature, router_replay=c.rl.router_replay)
        if old is not None and kl_in_reward:
            ref = session.world.score(batch, c.rollout.temperature, reference=True)
            paid = kl_rewards(session.world.by_microbatch(batch, old, ref), estimator=c.rl.kl_estimator, coef=c.rl.kl_coef)
            rewards = [reward for each in paid.values() for reward in each]
            kl_ref = sum(-reward for reward in rewards) / c.rl.kl_coef / len(rewards)
        values = by_sample(session.world.values(batch)) if c.rl.has_critic else None
        if paid is not None or values is not None:
            # The same lengths give the same packing, so what was scored still fits.
            samples = make_samples(groups, rule, token_rewards=paid, values=values)
            batch = session.pack(samples, minibatches=c.rl.minibatches)
    if session.plan.on_policy:
        old = None  # the update's own log-probs, detached: a ratio of exactly 1
    how = Update(
        policy=c.rl,
        temperature=c.rollout.temperature,
        dump_dir=session.dir.path.absolute() / "dumps",
        label=f"step-{step}",
        keep_scores=c.run.archive_scores,
    )
    with session.clock("update"):
        critic = update_critic(session, step, batch, samples) if c.rl.has_critic else None
        if critic is not None and step <= c.rl.critic_warmup_steps:
            stats = session.world.measure(session.pack(samples)[0], how)
        else:
            stats = session.world.update(batch, how, old)
            session.note_skip(step, stats)
    session.show_memory()
    stats = stats if kl_ref is None else replace(stats, kl_ref=kl_ref)
    return stats if critic is None else replace(stats, critic=critic)


def update_critic(session: Session, step: int, batch: list[list[list[MicroBatch]]], samples: Sequence[Sample]) -> CriticStats:
    """Towards the targets that the step's samples carry. How good the values were is measured on those that made the advantages."""
    stats, figures = session.world.update_critic(batch, session.config.rl), value_figures(samples)
    session.note_critic(step, stats)
    return replace(stats, value_mean=figures.mean, explained_variance=figures.explained_variance)


def advantage_rule(config: Config) -> AdvantageRule:
    """The configuration's words about advantages."""
    given = {field.name: getattr(config.rl, field.name) for field in fields(AdvantageRule) if field.name != "max_sequence_tokens"}
    return replace(AdvantageRule(**given), credit=config.rl.credited, max_sequence_tokens=config.rollout.max_sequence_tokens)


def has_samples(groups: Sequence[RolloutGroup]) -> bool:
    return any(is_trained(rollout) for group in groups for rollout in group.rollouts)


def measure(session: Session, groups: Sequence[RolloutGroup]) -> StepStats | None:
    """No group has anything to teach, so nothing is updated; how far trainer and engine stand apart is measured all the same.

    None when no rollout has a token to measure.
    """
    samples = make_samples(groups, NO_VALUES)
    if not samples:
        return None
    c = session.config
    how = Update(policy=c.rl, temperature=c.rollout.temperature, keep_scores=c.run.archive_scores)
    (batch,) = session.pack(samples)
    session.archiving.begin()
    with session.clock("score"):
        return session.world.measure(batch, how)


def publish(session: Session, stats: StepStats | None) -> None:
    """New weights go to the engines; a step that changed none publishes none."""
    if stats is None or stats.num_updates == 0:
        with session.clock("sync"):
            session.wake_engines()
        return
    version = session.progress.policy_version + 1
    with session.clock("sync"):
        session.publish(version)
    session.progress = replace(session.progress, policy_version=version)


@SPANS("record")
def record(
    session: Session, step: int, groups: Sequence[RolloutGroup], kept: Kept, stats: StepStats | None, more: Mapping[str, float] = NOTHING
) -> None:
    """`more`: what another story measured of its own, by metric name."""
    session.archiving.finish()  # scores and metrics speak of rollouts that are there
    values = rollout_metrics(groups, kept) | step_metrics(stats) | session.engine_metrics() | dict(more)
    updated_from = session.progress.policy_version - (stats is not None and stats.num_updates > 0)
    values["rollout/lag_mean"], values["rollout/lag_max"] = lags([r for g in groups for r in g.rollouts], updated_from)
    seconds = session.clock.take()
    for part in ("wait" if "wait" in seconds else "rollout", "score", "update", "sync"):
        values[f"time/{part}_s"] = seconds.get(part, 0.0)
    values["time/step_s"] = time.perf_counter() - session.step_began
    # Rollouts that run beside the rest have the whole step for it.
    values["rollout/tokens_per_s"] = values["rollout/tokens"] / seconds.get("rollout", values["time/step_s"])
    if "update" in seconds and stats is not None:
        values["train/tokens_per_s"] = stats.num_tokens / seconds["update"]
    values["policy/version"] = session.progress.policy_version
    session.progress = replace(session.progress, step=step)
    session.metrics.write(step, values)
    if stats is not None and stats.worst:
        write_worst(session.dir.path / "worst_tokens.jsonl", step, stats.worst, groups, session.tokenizer)
    if stats is not None and stats.scores:
        write_scores(session.dir.rollouts / f"step-{step}.scores.jsonl", step, stats.scores)
    session.console.step(step, session.config.run.steps, values)
    SPANS.note(f"{STEP}{step}", time.perf_counter() - session.step_began)


def rollout_metrics(groups: Sequence[RolloutGroup], kept: Kept) -> dict[str, float]:
    """What the rollouts say by themselves. Shares are over all rollouts of the step; `label/…` are the task's own words."""
    rollouts = [r for g in groups for r in g.rollouts]
    n = len(rollouts)
    labels = Counter(label for r in rollouts for label in r.labels)
    stops = Counter(r.stop_reason for r in rollouts)
    both = [r for r in rollouts if "called-both" in r.labels]
    values = {
        "reward/mean": sum(r.reward for r in rollouts) / n,
        "rollout/tokens": float(sum(sum(r.sampled) for r in rollouts)),
        "rollout/length_mean": sum(len(r.token_ids) for r in rollouts) / n,
        "rollout/tool_calls_mean": sum(r.num_tool_calls for r in rollouts) / n,
        "rollout/groups_informative": float(len(kept.groups)),
        "rollout/groups_uniform": float(kept.dropped_uniform),
        "rollout/groups_uniform_solved": float(kept.dropped_solved),
        "rollout/groups_uniform_failed": float(kept.dropped_failed),
    }
    values |= {f"label/{name}": count / n for name, count in sorted(labels.items())}
    values |= {f"stop/{name}": count / n for name, count in sorted(stops.items())}
    if any(r.routes for r in rollouts):
        values["router/rerouted_rows"] = float(sum(r.routes.num_rerouted for r in rollouts if r.routes))
    if both:
        values["label/right_given_both_calls"] = sum("right" in r.labels for r in both) / len(both)
    return values


def step_metrics(stats: StepStats | None) -> dict[str, float]:
    """StepStats under the names of metrics.jsonl. `train/skipped` says that the step made no update, for whatever reason."""
    if stats is None:
        return {"train/updates": 0.0, "train/skipped": 1.0}
    values = {
        "train/loss": stats.loss,
        "train/lr": stats.learning_rate,
        "train/tokens": float(stats.num_tokens),
        "train/updates": float(stats.num_updates),
        "train/skipped": float(stats.num_updates == 0),
        "policy/ratio_max_abs_dev": stats.ratio_max_abs_dev,
        "policy/clip_fraction": stats.clip_fraction,
        "policy/entropy": stats.entropy,
        "policy/kl_ref": stats.kl_ref,
        "mismatch/k1": stats.k1,
        "mismatch/k3": stats.k3,
        "mismatch/logp_abs_mean": stats.logp_abs_mean,
        "mismatch/logp_abs_max": stats.logp_abs_max,
        "mismatch/ess": stats.ess,
        "mismatch/truncated_fraction": stats.truncated_fraction,
    }
    values |= {measure.name: measure.value for measure in stats.measures}
    if stats.critic is not None:
        values |= {
            "critic/loss": stats.critic.loss,
            "critic/explained_variance": stats.critic.explained_variance,
            "critic/value_mean": stats.critic.value_mean,
            "critic/clip_fraction": stats.critic.clip_fraction,
            "critic/grad_norm": stats.critic.grad_norm,
            "critic/lr": stats.critic.learning_rate,
            "critic/updates": float(stats.critic.num_updates),
        }
    return values | ({"grad/norm": stats.grad_norm} if stats.num_updates or stats.skipped else {})


@SPANS("save and evaluate")
def save_and_evaluate_if_due(session: Session, step: int) -> None:
    """Evaluates before it saves: what a checkpoint says is finished has been measured too, so a resumed run misses nothing."""
    run = session.config.run
    last = step == run.steps
    if last and run.final_eval_prompts:
        session.metrics.write(step, evaluate(session, run.final_eval_prompts, step=step, show=SHOWN_ROLLOUTS).metrics())
    elif not last and run.eval_prompts and run.eval_every and step % run.eval_every == 0:
        session.metrics.write(step, evaluate(session, run.eval_prompts, step=step).metrics())
    if (last and run.save_at_end) or (not last and run.save_every and step % run.save_every == 0):
        session.save()
    else:
        session.notice_save()


def finish(session: Session) -> None:
    session.finish_save()
    picture = session.dir.path / "report.png"
    write_report(session.dir.path, picture)
    session.show_trace()
    session.console.say(f"picture    {picture}")
    session.console.say(f"metrics    {session.dir.metrics_file}")
    session.console.say(f"rollouts   {session.dir.rollouts}")
    if session.config.run.save_at_end:
        session.console.say(f"checkpoint {session.dir.checkpoint(session.progress.step)}")
