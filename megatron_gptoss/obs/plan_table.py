"""How does a plan read?

In: `Loaded`, `RunPlan`. Out: name and value rows, for `gptoss plan` and for the table at the start of a run. Decides nothing.
"""

from __future__ import annotations

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.memory import MemoryPart, engine_memory, trainer_memory
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.obs.console import ALARM


def plan_rows(loaded: Loaded, plan: RunPlan) -> list[tuple[str, str]]:
    config, model, rollout = loaded.config, loaded.config.model, loaded.config.rollout
    alarm = [(ALARM, "; ".join(plan.switches))] if plan.switches else []
    return [
        *alarm,
        ("run", str(plan.run_dir) + (" (resumed)" if plan.resumed else "")),
        ("task", f"{config.task.name}, tokenizer {config.tokenizer.name}"),
        (
            "model",
            f"{_count(plan.parameters.total)} parameters, {_count(plan.parameters.active)} used per token; "
            f"{model.num_hidden_layers} layers, hidden {model.hidden_size}, {model.num_local_experts} experts "
            f"top-{model.num_experts_per_tok}, {model.vocab_size} ids",
        ),
        ("first weights", config.run.resume or config.run.init or f"random, seed {config.run.seed}"),
        (
            "trainer",
            f"{_number(plan.world_size, 'rank')} on {plan.device}: data {plan.data_parallel}, expert {plan.expert_parallel} "
            f"({plan.experts_per_rank} experts a rank); {config.trainer.dtype}",
        ),
        (
            "attention",
            (
                plan.attention_full
                if plan.attention_full == plan.attention_windowed
                else f"{plan.attention_full} in full layers, {plan.attention_windowed} in windowed ones"
            )
            + ("; deterministic" if config.trainer.deterministic_attention else ""),
        ),
        (
            "engines",
            f"{plan.num_engines} on {plan.device}; {rollout.dtype}, {_number(plan.engine_max_running, 'conversation')} at once in each"
            + ("; deterministic" if rollout.deterministic else ""),
        ),
        (
            "a step",
            f"{_number(plan.groups_per_step, 'group')} of {rollout.group_size} = {plan.sequences_per_step} conversations, "
            f"at most {plan.max_tokens_per_step:,} tokens",
        ),
        (
            "updates",
            f"{_number(plan.updates_per_step, 'update')} a step, of {plan.sequences_per_minibatch} sequences over all ranks; "
            + ("on-policy, so nothing is scored twice" if plan.on_policy else "old log-probs are scored first"),
        ),
        (
            "length",
            f"at most {_number(rollout.max_turns, 'turn')} of {rollout.max_turn_tokens} tokens, {plan.engine_max_model_len} tokens in all",
        ),
        ("steps", f"{config.run.steps} of train; {config.sft.steps} of sft, {config.sft.sequences_per_step} sequences each"),
        ("memory of a rank", _memory(trainer_memory(config)) + ", and activations"),
        ("memory of an engine", _memory(engine_memory(config))),
    ]


def _memory(parts: list[MemoryPart]) -> str:
    whole = sum(part.num_bytes for part in parts)
    return f"{_size(whole)} ({', '.join(f'{part.name} {_size(part.num_bytes)}' for part in parts)})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _count(n: int) -> str:
    return next((f"{n / size:.2f} {unit}" for size, unit in ((10**9, "billion"), (10**6, "million")) if n >= size), f"{n:,}")


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
