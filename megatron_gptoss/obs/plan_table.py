"""How does a plan read?

In: `Loaded`, `RunPlan`. Out: name and value rows, for `gptoss plan` and for the table at the start of a run. Decides nothing.
"""

from __future__ import annotations

from megatron_gptoss.config.host_memory import checkpoint_per_node, optimizers_per_node
from megatron_gptoss.config.load import FIELDS, Loaded
from megatron_gptoss.config.memory import MemoryPart, engine_memory
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.rank_memory import GIB, RankMemory, trainer_memory
from megatron_gptoss.config.schema import Config
from megatron_gptoss.obs.console import ALARM
from megatron_gptoss.types import PeakMemory


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
        ("trainer", _trainer(plan) + f"; {config.trainer.dtype}"),
        *([("a rank", _rank(plan))] if plan.world_size > plan.data_parallel else []),
        (
            "attention",
            (
                plan.attention_full
                if plan.attention_full == plan.attention_windowed
                else f"{plan.attention_full} in full layers, {plan.attention_windowed} in windowed ones"
            )
            + ("; deterministic" if config.trainer.deterministic_attention else ""),
        ),
        *([("how it computes", how)] if (how := _how(loaded)) else []),
        (
            "engines",
            f"{plan.num_engines}{_each(plan)} on {plan.device}; {rollout.dtype}, {_number(plan.engine_max_running, 'conversation')} "
            f"at once in each, {plan.engine_max_in_flight} given to it" + ("; deterministic" if rollout.deterministic else ""),
        ),
        (
            "weight sync",
            plan.weight_sync + (", the engines asleep while the trainer works" if plan.shares_gpus else ""),
        ),
        (
            "a step",
            f"{_number(plan.groups_per_step, 'group')} of {rollout.group_size} = {plan.sequences_per_step} conversations, "
            f"at most {plan.max_tokens_per_step:,} tokens",
        ),
        *([("overlap", _overlap(rollout.max_lag_steps))] if rollout.max_lag_steps else []),
        (
            "updates",
            f"{_number(plan.updates_per_step, 'update')} a step, of {plan.sequences_per_minibatch} sequences over all ranks; "
            + ("on-policy, so nothing is scored twice" if plan.on_policy else "old log-probs are scored first"),
        ),
        *([("critic", _critic(config))] if config.rl.has_critic else []),
        (
            "length",
            f"at most {_number(rollout.max_turns, 'turn')} of {rollout.max_turn_tokens} tokens, {plan.engine_max_model_len} tokens in all",
        ),
        ("steps", f"{config.run.steps} of train; {config.sft.steps} of sft, {config.sft.sequences_per_step} sequences each"),
        *memory_rows(loaded),
        ("memory of an engine" + ("'s GPU" if plan.placement.engine_gpus > 1 else ""), _memory(engine_memory(config))),
        *([("not built yet", ", ".join(m.split(" can be")[0] for m in plan.not_built))] if plan.not_built else []),
    ]


def _overlap(max_lag_steps: int) -> str:
    return f"rollouts run ahead by at most {_number(max_lag_steps, 'step')}; an update interrupts turns, which go on under the new policy"


def memory_rows(loaded: Loaded) -> list[tuple[str, str]]:
    """What the worst rank holds at its worst moment, the other stages' sums, and what the host holds for the GPUs."""
    config = loaded.config
    ranks = trainer_memory(config)
    worst = max(ranks, key=lambda rank: rank.total)
    of = f" of {config.cluster.gpu_memory_gib:g}" if config.cluster.device == "cuda" else ""
    parts = ", ".join(f"{part.name} {_size(part.num_bytes)}" for part in (*worst.at_the_peak(), *worst.beside_them()))
    name = "memory of a rank" if len(ranks) == 1 else f"memory, stage {worst.stage}"
    rows = [(name, f"{_size(worst.total)}{of}, {WORST[worst.worst_phase]}: {parts}")]
    if len(ranks) > 1:
        rows.append(("memory, all stages", ", ".join(_size(rank.total) for rank in ranks)))
    if config.cluster.device == "cuda":
        held = {"optimizers": optimizers_per_node(config), "a checkpoint that is being written": checkpoint_per_node(config)}
        words = ", ".join(f"{name} {_size(size)}" for name, size in held.items() if size)
        rows.append(
            ("memory of a node", f"{_size(sum(held.values()))} of {config.cluster.host_memory_gib:g}" + (f": {words}" if words else ""))
        )
    return rows


# phase -> when the peak is
WORST = {
    "layer": "worst in a layer's backward pass",
    "head": "worst at the output head",
    "step": "worst in the optimizer's step",
    "reference": "worst while the reference is scored",
    "build": "worst while the model is built",
    "publish": "worst while weights are published",
    "engine": "worst beside an engine that works",
}


def predicted_and_measured(predicted: RankMemory, measured: PeakMemory, resting: PeakMemory | None = None) -> list[tuple[str, str]]:
    """Peak memory of one rank as planned beside as it was, for a table after the first step. `predicted`: that of the rank's stage.
    `resting`: when it has given back what it can, where an engine shares its GPU."""
    rest = [("kept beside an engine at work", _beside(predicted.sum("always"), resting.reserved_now))] if resting else []
    return [
        ("tensors at the peak", _beside(predicted.allocated, measured.allocated)),
        ("held by the allocator, with gaps", _beside(predicted.reserved, measured.reserved)),
        ("on the GPU in all", _beside(predicted.while_it_works, measured.device)),  # engines that share it sleep when this is measured
        *rest,
    ]


def _beside(predicted: int, measured: int) -> str:
    off = f", predicted {100 * (predicted / measured - 1):+.1f} %" if measured else ""
    return f"predicted {_size(predicted)}, measured {_size(measured)}{off}"


def _critic(config: Config) -> str:
    rl = config.rl
    first = f"learns alone in the first {_number(rl.critic_warmup_steps, 'step')}" if rl.critic_warmup_steps else "learns with the policy"
    epochs = _number(rl.critic_epochs, "epoch")
    return f"values each {rl.credited}, beginning from the policy's weights; {epochs} a step at rate {rl.critic_lr:g}, {first}"


def _trainer(plan: RunPlan) -> str:
    degrees = {
        "tensor": plan.tensor_parallel,
        "context": plan.context_parallel,
        "pipeline": plan.pipeline_parallel,
        "data": plan.data_parallel,
    }
    shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1 or name == "data")
    copies = f", {plan.expert_copies} copies of each" if plan.expert_copies > 1 and plan.expert_parallel > 1 else ""
    experts = f"expert {plan.expert_parallel} ({_number(plan.experts_per_rank, 'expert')} a rank{copies})"
    return f"{_number(plan.world_size, 'rank')} on {plan.device}: {shown}, {experts}"


def _each(plan: RunPlan) -> str:
    """How an engine is divided, and whose GPUs it has."""
    size, part = plan.engine_tensor_parallel, "GPUs" if plan.device == "cuda" else "processes"
    return (f" of {size} {part}" if size > 1 else "") + (", on the trainer's GPUs," if plan.placement.engine_ranks else "")


def _rank(plan: RunPlan) -> str:
    heads = f"{_number(plan.heads_per_rank, 'query head')}, {_number(plan.kv_heads_per_rank, 'kv head')}, {plan.vocabulary_per_rank} ids"
    tokens = f"{plan.tokens_per_rank} of {plan.tokens_per_microbatch} tokens of a microbatch"
    if plan.pipeline_parallel == 1:
        return f"{heads}; {tokens}"
    layers = "+".join(map(str, plan.layers_per_stage))
    return f"{heads}; {tokens}; stages of {layers} layers, at least {plan.least_microbatches} microbatches"


def _how(loaded: Loaded) -> str:
    """The trainer's choices that are not the defaults."""
    keys = ("transformer", "experts", "rotary", "dispatcher", "logprob", "recompute", "optimizer_states", "optimizer_offload")
    chosen = {key: loaded.value(f"trainer.{key}") for key in keys}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items() if value != FIELDS[f"trainer.{key}"].default)


def _memory(parts: list[MemoryPart]) -> str:
    whole = sum(part.num_bytes for part in parts)
    return f"{_size(whole)} ({', '.join(f'{part.name} {_size(part.num_bytes)}' for part in parts)})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _count(n: int) -> str:
    return next((f"{n / size:.2f} {unit}" for size, unit in ((10**9, "billion"), (10**6, "million")) if n >= size), f"{n:,}")


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
