"""Held-out evaluation: how often is the policy right on problems that training never sees?

In: a session whose engines hold the policy. Out: success and behaviour, as metrics and the archived rollouts. `gptoss train` takes one
rollout of each prompt now and then; `gptoss eval` several, for pass@k, of whatever weights run.init names. Sampling is as in training (the
[rollout] section): that is the policy that is trained. The arithmetic is pass_at_k.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.schema import Config, EvalConfig
from megatron_gptoss.loop.pass_at_k import Estimate, over_prompts, pass_rates, unseen_share
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.obs.json_floats import to_json
from megatron_gptoss.obs.run_dir import write_atomic
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class Evaluation:
    groups: tuple[RolloutGroup, ...]

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(r for g in self.groups for r in g.rollouts)

    @property
    def success(self) -> float:
        """Mean reward over held-out rollouts; for a 0/1 reward the share that is right."""
        return sum(r.reward for r in self.rollouts) / len(self.rollouts)

    def metrics(self) -> dict[str, float]:
        rollouts = self.rollouts
        n = len(rollouts)
        values = {
            "eval/success": self.success,
            "eval/prompts": float(len(self.groups)),
            "eval/parseable": sum(r.stop_reason == "final" for r in rollouts) / n,
            "eval/tokens_mean": sum(sum(r.sampled) for r in rollouts) / n,
        }
        for label in sorted({label for r in rollouts for label in r.labels}):
            values[f"eval/{label}"] = sum(label in r.labels for r in rollouts) / n
        both = [r for r in rollouts if "called-both" in r.labels]
        if both:
            values["eval/right_given_both_calls"] = sum("right" in r.labels for r in both) / len(both)
        return values


def evaluate(session: Session, num_prompts: int, *, step: int, show: int = 0) -> Evaluation:
    """One rollout for each of the first `num_prompts` held-out prompts, archived as rollouts/eval-step-N.jsonl; prints `show` of them."""
    result = sample(session, num_prompts, samples_per_prompt=1, step=step, show=show, words=f"held-out evaluation after step {step}")
    words = " ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in result.metrics().items() if name != "eval/prompts")
    session.console.say(f"held-out after step {step}, {num_prompts} prompts: {words}")
    return result


def sample(session: Session, num_prompts: int, *, samples_per_prompt: int, step: int, show: int, words: str) -> Evaluation:
    """Rollouts of the first held-out prompts, archived; prints `show` of them."""
    prompts = session.task.prompts("heldout", 0, num_prompts)
    groups = session.collect(prompts, group_size=samples_per_prompt, step=step, version=session.progress.policy_version, words=words)
    write_archive(session.dir.rollouts / f"eval-step-{step}.jsonl", step, groups, session.tokenizer)
    result = Evaluation(tuple(groups))
    for rollout in examples(result.rollouts, show):
        session.console.rollout(rollout, session.tokenizer.decode(rollout.token_ids))
    return result


def examples(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """The first rollouts, but with a failure among them when there is one: success alone teaches a reader little."""
    chosen = list(rollouts[:count])
    if chosen and all(r.reward > 0 for r in chosen):
        failure = next((r for r in rollouts if r.reward <= 0), None)
        if failure is not None:
            chosen[-1] = failure
    return chosen


# -- gptoss eval -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `gptoss eval` found."""

    evaluation: Evaluation
    success: str  # what counted as one: "reward >= 1"
    successes: tuple[tuple[int, int], ...]  # (rollouts, successes) of each prompt
    mean_reward: Estimate
    pass_at: dict[int, Estimate]

    def metrics(self) -> dict[str, float]:
        values = self.evaluation.metrics()
        values |= {"eval/rollouts": float(len(self.evaluation.rollouts)), "eval/success_se": self.mean_reward.error}
        for k, each in self.pass_at.items():
            values |= {f"eval/pass_at_{k}": each.value, f"eval/pass_at_{k}_se": each.error}
        return values

    def rows(self) -> list[tuple[str, str]]:
        """For a table. Behaviour comes as shares of all rollouts."""
        rows = [("a success is", self.success), ("mean reward", self.mean_reward.words())]
        rows += [(f"pass@{k}", self._pass_words(each)) for k, each in self.pass_at.items()]
        others = self.evaluation.metrics()
        for name in ("eval/success", "eval/prompts"):
            del others[name]
        return rows + [(name.removeprefix("eval/"), f"{value:.3f}") for name, value in others.items()]

    def _pass_words(self, each: Estimate) -> str:
        if each.error != 0.0:
            return each.words()
        least = unseen_share(len(self.successes))
        return f"{each.value:.3f}   all prompts alike: up to {least:.3f} of others may differ (95 %)"

    def to_json(self, config: Config) -> dict[str, Any]:
        def plain(each: Estimate) -> dict[str, float | str]:
            return {"value": to_json(each.value), "standard_error": to_json(each.error)}

        shares = {name.removeprefix("eval/"): value for name, value in self.evaluation.metrics().items()}
        counts = zip(self.evaluation.groups, self.successes, strict=True)
        return {
            "weights": config.run.init or "random",
            "task": config.task.name,
            "prompts": len(self.successes),
            "samples_per_prompt": config.eval.samples_per_prompt,
            "temperature": config.rollout.temperature,
            "success": self.success,
            "mean_reward": plain(self.mean_reward),
            "pass_at": {str(k): plain(each) for k, each in self.pass_at.items()},
            "shares": {name: to_json(value) for name, value in shares.items() if name not in ("success", "prompts")},
            "per_prompt": [
                {"id": group.prompt.id, "successes": c, "mean_reward": to_json(_mean(r.reward for r in group.rollouts))}
                for group, (_, c) in counts
            ],
        }


def report(evaluation: Evaluation, how: EvalConfig) -> Report:
    """pass@k and the mean reward with their standard errors, prompts as units."""
    succeeded, words = success_rule(how)
    successes = tuple((len(g.rollouts), sum(map(succeeded, g.rollouts))) for g in evaluation.groups)
    mean_reward = over_prompts([_mean(r.reward for r in g.rollouts) for g in evaluation.groups])
    return Report(evaluation, words, successes, mean_reward, pass_rates(successes, how.ks))


def success_rule(how: EvalConfig) -> tuple[Callable[[Rollout], bool], str]:
    """What counts as a success, and that in words."""
    if how.success_label:
        return lambda rollout: how.success_label in rollout.labels, f"label {how.success_label}"
    return lambda rollout: rollout.reward >= how.success_reward, f"reward >= {how.success_reward:g}"


def _mean(values: Any) -> float:
    each = list(values)
    return sum(each) / len(each)


def run_evaluation(loaded: Loaded, plan: RunPlan) -> None:
    """`gptoss eval`: mean and pass@k of the weights that run.init points to, on held-out prompts."""
    with open_session(loaded, plan, "eval") as session:
        c = session.config
        session.console.table(f"gptoss eval: {session.dir.path}", [("weights", c.run.init or "random"), ("task", c.task.name)])
        session.start_ray(num_actors=plan.world_size + plan.num_engines)
        session.make_trainer(c.rl, total_updates=1)
        session.make_engines()
        with session.console.waiting("starting trainer and engines"):
            session.start()
        session.publish(0)
        count = num_prompts(c.eval.prompts, session.task.epoch_size("heldout"))
        words = f"{count} held-out prompts, {c.eval.samples_per_prompt} rollouts of each"
        if count < c.eval.prompts:
            session.console.say(f"{c.task.name} holds {count} prompts out, each of them taken once; eval.prompts = {c.eval.prompts}")
        found = report(sample(session, count, samples_per_prompt=c.eval.samples_per_prompt, step=0, show=3, words=words), c.eval)
        session.metrics.write(0, found.metrics())
        file = session.dir.path / "eval.json"
        write_result(file, found, c)
        session.console.table("held-out success", [("sampled", words), *found.rows()])
        session.console.say("± is one standard error, with prompts as the units (docs/rollouts.md)")
        if c.eval.success_label and not any(c for _, c in found.successes):
            labels = sorted({label for r in found.evaluation.rollouts for label in r.labels})
            session.console.say(f"no rollout has the label {c.eval.success_label}; there are {', '.join(labels) or 'no labels at all'}")
        session.console.say(f"result     {file}")
        session.console.say(f"rollouts   {session.dir.rollouts}")


def num_prompts(wanted: int, epoch: int | None) -> int:
    """A prompt asked twice is no second prompt, and would make the standard error too small. `epoch`: as Task.epoch_size says."""
    return wanted if epoch is None else min(wanted, epoch)


def write_result(file: Path, found: Report, config: Config) -> None:
    """MachineError when the disk is full."""
    write_atomic(file, json.dumps(found.to_json(config), indent=1, allow_nan=False) + "\n")
