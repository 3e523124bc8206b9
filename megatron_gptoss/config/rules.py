"""Which values do not fit each other?

In: `Loaded`. Out: one message for each broken rule, naming what is set and where, the rule, and values that would work. Only rules that
join keys; the type and range of a single key belong to the schema. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.memory import kv_bytes_per_token

# Ids the model must have room for. The tiny tokenizer uses 339 of its 512.
TOKENIZER_IDS = {"tiny": 512, "gpt-oss": 201088}


def broken_rules(loaded: Loaded) -> list[str]:
    rules = (_batch_rules, _model_rules, _parallel_rules, _length_rules, _attention_rules, _other_rules)
    return [message for rule in rules for message in rule(loaded)]


def nearest(working: Iterable[int], value: int) -> str:
    """The working values around `value`, for a message: "4, 8"."""
    below = [w for w in working if w < value]
    above = [w for w in working if w > value]
    return ", ".join(str(w) for w in (*sorted(below)[-1:], *sorted(above)[:1]))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _batch_rules(loaded: Loaded) -> Iterator[str]:
    rl, rollout, sft = loaded.config.rl, loaded.config.rollout, loaded.config.sft
    batch, show = rl.sequences_per_step, loaded.show
    if rollout.group_size < 2:
        yield f"{show('rollout.group_size')} leaves a rollout nothing to be compared with: its advantage is always 0. Use 2 or more."
    if batch % rollout.group_size:
        yield (
            f"{show('rollout.group_size')} does not divide {show('rl.sequences_per_step')}. A group must land in one step. "
            f"Nearest working sizes: {nearest(divisors(batch)[1:], rollout.group_size)}."
        )
    if batch % rl.minibatches:
        yield (
            f"{show('rl.minibatches')} does not divide {show('rl.sequences_per_step')}. Every update takes the same number of sequences. "
            f"Nearest working numbers: {nearest(divisors(batch), rl.minibatches)}."
        )
    parts = ("sft.guess_fraction", "sft.stop_fraction", "sft.digit_fraction")
    total = sft.guess_fraction + sft.stop_fraction + sft.digit_fraction
    if total > 1 + 1e-9:  # 0.3 + 0.3 + 0.4 is a little more than 1 in floats
        yield f"{', '.join(show(p) for p in parts)} add up to {total:g}. They are shares of all demonstrations: lower one by {total - 1:g}."


def _model_rules(loaded: Loaded) -> Iterator[str]:
    model, show = loaded.config.model, loaded.show
    if model.num_attention_heads % model.num_key_value_heads:
        yield (
            f"{show('model.num_key_value_heads')} does not divide {show('model.num_attention_heads')}. Each kv head serves the same number "
            f"of query heads. Nearest working numbers: {nearest(divisors(model.num_attention_heads), model.num_key_value_heads)}."
        )
    if model.num_experts_per_tok > model.num_local_experts:
        yield (
            f"{show('model.num_experts_per_tok')} is more than {show('model.num_local_experts')}. A token cannot visit more experts than "
            f"there are. Use at most {model.num_local_experts}."
        )
    if model.head_dim % 2:
        around = f"{model.head_dim - 1}, {model.head_dim + 1}"
        yield f"{show('model.head_dim')} is odd. Rotary positions turn pairs of channels. Nearest working sizes: {around}."
    name = loaded.config.tokenizer.name
    if TOKENIZER_IDS[name] > model.vocab_size:
        smaller = [n for n, ids in TOKENIZER_IDS.items() if ids <= model.vocab_size]
        other = f', or tokenizer.name = "{smaller[0]}"' if smaller else ""
        yield (
            f"{show('tokenizer.name')} has {TOKENIZER_IDS[name]} ids, and {show('model.vocab_size')} has no room for them. "
            f"Use model.vocab_size = {TOKENIZER_IDS[name]} or more{other}."
        )


def _parallel_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    data, expert, experts = config.parallel.data, config.parallel.expert, config.model.num_local_experts
    working = [d for d in divisors(experts) if data % d == 0]
    if data % expert:
        yield (
            f"{show('parallel.expert')} does not divide {show('parallel.data')}. The experts are divided over data-parallel ranks. "
            f"Nearest working sizes: {nearest(working, expert)}."
        )
    if experts % expert:
        yield (
            f"{show('parallel.expert')} does not divide {show('model.num_local_experts')}. Every rank holds the same number of experts. "
            f"Nearest working sizes: {nearest(working, expert)}."
        )
    rl, sft = config.rl, config.sft
    unit = math.lcm(rl.minibatches, config.rollout.group_size)
    enough = math.ceil(data * rl.minibatches / unit) * unit
    if rl.sequences_per_step % rl.minibatches == 0 and data > rl.sequences_per_step // rl.minibatches:
        yield (
            f"{show('parallel.data')} is more than the {rl.sequences_per_step // rl.minibatches} sequences of one update "
            f"({show('rl.sequences_per_step')} over {show('rl.minibatches')}). Every rank needs one. "
            f"Use at most {rl.sequences_per_step // rl.minibatches} ranks, or rl.sequences_per_step = {enough}."
        )
    if data > sft.sequences_per_step:
        yield (
            f"{show('parallel.data')} is more than {show('sft.sequences_per_step')}. Every rank needs one sequence. "
            f"Use at most {sft.sequences_per_step} ranks, or sft.sequences_per_step = {data}."
        )


def _length_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    turn, sequence, positions = config.rollout.max_turn_tokens, config.rollout.max_sequence_tokens, config.model.max_position_embeddings
    if turn >= sequence:
        yield (
            f"{show('rollout.max_turn_tokens')} is not less than {show('rollout.max_sequence_tokens')}. A turn must fit behind its prompt. "
            f"Use rollout.max_turn_tokens = {max(sequence // 2, 1)}, or rollout.max_sequence_tokens = {2 * turn}."
        )
    if sequence > positions:
        yield (
            f"{show('rollout.max_sequence_tokens')} is more than {show('model.max_position_embeddings')}. The model has no positions for "
            f"the rest. Use at most {positions}."
        )
    if config.trainer.tokens_per_microbatch < sequence:
        yield (
            f"{show('trainer.tokens_per_microbatch')} is less than {show('rollout.max_sequence_tokens')}. A sequence is never split over "
            f"microbatches. Use {sequence} or more."
        )
    need_gib = sequence * kv_bytes_per_token(config) / 2**30
    if config.cluster.device == "cpu" and need_gib > config.rollout.kv_cache_gib:
        yield (
            f"{show('rollout.kv_cache_gib')} does not hold one conversation of {show('rollout.max_sequence_tokens')}: that takes "
            f"{need_gib:.2f} GiB with this model. Use rollout.kv_cache_gib = {need_gib * 1.1:.2g} or more."
        )


def _attention_rules(loaded: Loaded) -> Iterator[str]:
    trainer, show = loaded.config.trainer, loaded.show
    backends = {"trainer.attention": trainer.attention}
    if trainer.attention_windowed != "same":
        backends["trainer.attention_windowed"] = trainer.attention_windowed
    for key, backend in backends.items():
        if backend == "te" and trainer.deterministic_attention:
            yield (
                f"{show('trainer.deterministic_attention')}, and {show(key)} has no deterministic gradients with sinks. "
                f'Use {key} = "triton" or "flash", or trainer.deterministic_attention = false.'
            )
        if backend not in ("flash", "te"):
            continue
        if loaded.config.cluster.device == "cpu":
            yield f'{show(key)} runs on GPUs only, and {show("cluster.device")}. Use {key} = "reference", or cluster.device = "cuda".'
        elif trainer.dtype == "float32":
            yield (
                f'{show(key)} computes in 16 bits only, and {show("trainer.dtype")}. Use {key} = "triton", or trainer.dtype = "bfloat16".'
            )


def _other_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    # Only as flags together: a run's own config.toml keeps the init it began with, and may be resumed.
    if all(loaded.origins[key].startswith("flag") for key in ("run.resume", "run.init")) and config.run.resume and config.run.init:
        yield (
            f"{show('run.resume')} and {show('run.init')} exclude each other. A resumed run goes on from its own checkpoint; "
            "leave out one of them."
        )
    last = config.cluster.first_port + config.cluster.num_ports - 1
    if last > 65535:
        yield (
            f"{show('cluster.first_port')} with {show('cluster.num_ports')} ends at port {last}, and 65535 is the last there is. "
            f"Use cluster.first_port = {max(65536 - config.cluster.num_ports, 1024)}."
        )
