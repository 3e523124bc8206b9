"""Held-out evaluation: how often is the policy right on problems that training never sees?

In: a session whose engines hold the policy. Out: success and behaviour as shares, and the archived rollouts. Sampling is as in training
(same temperature): that is the policy that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.types import Rollout


@dataclass(frozen=True)
class Evaluation:
    rollouts: tuple[Rollout, ...]

    @property
    def success(self) -> float:
        """Mean reward over held-out prompts; for a 0/1 reward the share that is right."""
        return sum(r.reward for r in self.rollouts) / len(self.rollouts)

    def metrics(self) -> dict[str, float]:
        n = len(self.rollouts)
        values = {
            "eval/success": self.success,
            "eval/prompts": float(n),
            "eval/parseable": sum(r.stop_reason == "final" for r in self.rollouts) / n,
            "eval/tokens_mean": sum(sum(r.sampled) for r in self.rollouts) / n,
        }
        for label in sorted({label for r in self.rollouts for label in r.labels}):
            values[f"eval/{label}"] = sum(label in r.labels for r in self.rollouts) / n
        both = [r for r in self.rollouts if "called-both" in r.labels]
        if both:
            values["eval/right_given_both_calls"] = sum("right" in r.labels for r in both) / len(both)
        return values


def evaluate(session: Session, num_prompts: int, *, step: int, show: int = 0) -> Evaluation:
    """One rollout for each of the first `num_prompts` held-out prompts, archived as rollouts/eval-step-N.jsonl; prints `show` of them."""
    prompts = session.task.prompts("heldout", 0, num_prompts)
    groups = session.collect(
        prompts, group_size=1, step=step, version=session.progress.policy_version, words=f"held-out evaluation after step {step}"
    )
    write_archive(session.dir.rollouts / f"eval-step-{step}.jsonl", step, groups, session.tokenizer)
    result = Evaluation(tuple(r for g in groups for r in g.rollouts))
    for rollout in examples(result.rollouts, show):
        session.console.rollout(rollout, session.tokenizer.decode(rollout.token_ids))
    words = " ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in result.metrics().items() if name != "eval/prompts")
    session.console.say(f"held-out after step {step}, {num_prompts} prompts: {words}")
    return result


def examples(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """The first rollouts, but with a failure among them when there is one: success alone teaches a reader little."""
    chosen = list(rollouts[:count])
    if chosen and all(r.reward > 0 for r in chosen):
        failure = next((r for r in rollouts if r.reward <= 0), None)
        if failure is not None:
            chosen[-1] = failure
    return chosen


def run_evaluation(loaded: Loaded, plan: RunPlan) -> None:
    """`gptoss eval`: held-out success of the weights that run.init points to."""
    with open_session(loaded, plan, "eval") as session:
        c = session.config
        session.console.table(f"gptoss eval: {session.dir.path}", [("weights", c.run.init or "random"), ("task", c.task.name)])
        session.start_ray(num_actors=plan.world_size + plan.num_engines)
        session.make_trainer(c.rl, total_updates=1)
        session.make_engines()
        with session.console.waiting("starting trainer and engines"):
            session.start()
        session.publish(0)
        result = evaluate(session, c.run.final_eval_prompts, step=0, show=3)
        session.metrics.write(0, result.metrics())
