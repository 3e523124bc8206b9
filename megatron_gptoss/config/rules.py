"""Which values do not fit each other?

In: `Loaded`. Out: one message for each broken rule, naming what is set and where, the rule, and values that would work. Only rules that
join keys; the type and range of a single key belong to the schema. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron_gptoss.config.layout import balanced_stages, stages, world_size
from megatron_gptoss.config.load import FIELDS, Loaded, to_toml
from megatron_gptoss.config.memory import kv_bytes_per_token
from megatron_gptoss.config.schema import Config

# Ids the model must have room for. The tiny tokenizer uses 339 of its 512.
TOKENIZER_IDS = {"tiny": 512, "gpt-oss": 201088}

# Keys, or single values of a key, that a plan understands and a run does not honour yet. Whoever builds one deletes its line here.
# `gptoss plan` says so and goes on; the commands that run refuse.
NOT_BUILT_YET: dict[str, tuple[object, ...] | None] = {  # key -> the values meant; None: all but the default
}


def broken_rules(loaded: Loaded) -> list[str]:
    rules = (
        _batch_rules, _rl_rules, _overlap_rules, _model_rules, _division_rules, _expert_rules, _stage_rules, _data_rules, _length_rules,
        _attention_rules, _engine_rules, _cpu_rules, _sync_rules, _other_rules,
    )  # fmt: skip
    return [message for rule in rules for message in rule(loaded)]


def not_built_yet(loaded: Loaded) -> list[str]:
    """One message for each value that a run would ignore."""
    found = []
    for key, values in NOT_BUILT_YET.items():
        value, default = loaded.value(key), FIELDS[key].default
        if value in values if values is not None else value != default:
            found.append(
                f"{loaded.show(key)} can be planned, but a run would ignore it: it is not built yet. Use {key} = {to_toml(default)}."
            )
    return found


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
    if rollout.group_size < 2 and rl.advantage not in ("reinforce++", "gae"):
        yield (
            f"{show('rollout.group_size')} leaves a rollout nothing to be compared with: its advantage is always 0. Use 2 or more, or "
            'rl.advantage = "reinforce++".'
        )
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


def _rl_rules(loaded: Loaded) -> Iterator[str]:
    """What the parts of a policy update ask of each other."""
    rl, rollout, show = loaded.config.rl, loaded.config.rollout, loaded.show
    if rl.advantage == "gae" and rl.credit == "sequence":
        yield f'{show("rl.advantage")} values single tokens or turns, and {show("rl.credit")}. Use rl.credit = "token" or "turn".'
    if rl.has_critic and rl.critic_warmup_steps >= loaded.config.run.steps:
        yield (
            f"{show('rl.critic_warmup_steps')} leaves no step of {show('run.steps')} in which the policy learns. "
            f"Use at most {loaded.config.run.steps - 1}."
        )
    if rl.gamma < 1 and rl.credited == "sequence":
        yield f'{show("rl.gamma")} discounts by token or turn, and {show("rl.credit")}. Use rl.gamma = 1.0, or rl.credit = "turn".'
    if rl.dual_clip and rl.surrogate == "cispo":
        yield f"{show('rl.dual_clip')} bounds a clipped ratio's loss, and {show('rl.surrogate')} has none. Use rl.dual_clip = 0.0."
    if 0 < rl.dual_clip <= 1:
        yield f"{show('rl.dual_clip')} would cut the loss of a policy that has not moved. Use more than 1, such as 3.0, or 0.0 for none."
    if (rl.aggregation == "sequence-sum") != (rl.aggregation_length > 0):
        yield (
            f"{show('rl.aggregation')} with {show('rl.aggregation_length')}: sequence-sum divides by that length, and nothing else does. "
            f'Use rl.aggregation_length = {rollout.max_sequence_tokens} with rl.aggregation = "sequence-sum", or 0 with another.'
        )
    if rl.kl_in == "reward" and rl.kl_estimator == "unbiased":
        yield f'{show("rl.kl_estimator")} is k3 with another gradient, and {show("rl.kl_in")} has none. Use rl.kl_estimator = "k1" or "k3".'
    if rl.kl_coef > 0 and rl.kl_in == "loss" and rl.kl_estimator == "k1":
        yield (
            f"{show('rl.kl_estimator')} with {show('rl.kl_in')}: as a loss its expected gradient is 0, so it adds noise and holds nothing "
            'near the reference. Use rl.kl_estimator = "k3", "k2" or "unbiased", or rl.kl_in = "reward".'
        )
    model = loaded.config.model
    if rl.router_replay != "none" and not (model.num_experts_per_tok >= 2 and model.num_local_experts <= 256):
        yield (
            f"{show('rl.router_replay')} keeps a byte for each expert of a token, and a row of zeros means that none is known: it needs at "
            f"least 2 experts a token and at most 256 in all. Here {show('model.num_experts_per_tok')} and "
            f'{show("model.num_local_experts")}. Use rl.router_replay = "none".'
        )
    if rl.router_replay == "scored" and rl.minibatches * rl.epochs == 1 and rl.old_logp == "auto":
        yield (
            f"{show('rl.router_replay')} takes over the experts of the pass that scores old log-probs, and an on-policy update has none "
            f'({show("rl.old_logp")}, one update a step). Use rl.router_replay = "engine" or "none", or rl.old_logp = "scored".'
        )
    if rl.overlong_buffer_tokens >= rollout.max_sequence_tokens:
        yield (
            f"{show('rl.overlong_buffer_tokens')} leaves no length without punishment, as {show('rollout.max_sequence_tokens')}. "
            f"Use less, such as {rollout.max_sequence_tokens // 5}."
        )


def _overlap_rules(loaded: Loaded) -> Iterator[str]:
    """What rollouts that run ahead of training ask of the rest."""
    config, show = loaded.config, loaded.show
    if not config.rollout.max_lag_steps:
        return
    ahead = show("rollout.max_lag_steps")
    if config.rl.correction == "none":
        yield (
            f"{ahead} trains on tokens of older policies, and {show('rl.correction')} does not make up for it. Use rl.correction = "
            '"tis" or another of docs/rollout_correction.md, or rollout.max_lag_steps = 0.'
        )
    if config.rollout.deterministic:
        yield (
            f"{ahead} lets the clock decide which policy samples a token, and {show('rollout.deterministic')} promises the same tokens "
            "every time. Use rollout.deterministic = false, or rollout.max_lag_steps = 0."
        )
    if config.cluster.share_gpus:
        yield (
            f"{ahead} samples while the trainer computes, and {show('cluster.share_gpus')} lets them take turns on the same GPUs. Use "
            "cluster.share_gpus = false, or rollout.max_lag_steps = 0."
        )


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


def _division_rules(loaded: Loaded) -> Iterator[str]:
    """Tensor ranks share heads and vocabulary; tensor and context ranks share tokens."""
    config, show = loaded.config, loaded.show
    model, parallel = config.model, config.parallel
    tensor, shared = parallel.tensor, parallel.tensor * parallel.context
    common = math.gcd(model.num_attention_heads, model.num_key_value_heads, model.vocab_size)
    reasons = {
        "model.num_attention_heads": "Every rank computes the same number of query heads",
        "model.num_key_value_heads": "Every rank computes whole kv heads",
        "model.vocab_size": "Every rank holds the same number of rows of the embedding and the head",
    }
    for key, reason in reasons.items():
        if loaded.value(key) % tensor:
            yield (
                f"{show('parallel.tensor')} does not divide {show(key)}. {reason}. "
                f"Nearest working sizes: {nearest(divisors(common), tensor)}."
            )
            return  # the rest of this function would only say what follows from it
    budget = config.trainer.tokens_per_microbatch
    if budget % shared:
        around = f"{budget // shared * shared or shared}, {budget // shared * shared + shared}"
        yield (
            f"{show('trainer.tokens_per_microbatch')} is not a multiple of parallel.tensor x parallel.context = {shared}. Every rank takes "
            f"the same number of a microbatch's tokens. Nearest working numbers: {', '.join(dict.fromkeys(around.split(', ')))}."
        )
    on_gpus, node = config.cluster.device == "cuda", config.cluster.gpus_per_node
    if on_gpus and node % tensor:
        yield (
            f"{show('parallel.tensor')} does not divide {show('cluster.gpus_per_node')}. Tensor ranks talk in every layer and must share a "
            f"node. Nearest working sizes: {nearest([d for d in divisors(node) if common % d == 0], tensor)}."
        )
    world = tensor * parallel.context * parallel.pipeline * parallel.data
    if on_gpus and world > node and world % node:
        one = world // parallel.data
        unit = node // math.gcd(one, node)  # the least number of data-parallel groups that fills whole nodes
        around = ", ".join(str(n) for n in (parallel.data // unit * unit, (parallel.data // unit + 1) * unit) if n)
        yield (
            f"{show('parallel.data')} makes a world of tensor x context x pipeline x data = {world} ranks, which is not a multiple of "
            f"{show('cluster.gpus_per_node')}. A trainer on several nodes takes whole ones. Nearest working sizes: {around}."
        )


def _expert_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    parallel, expert, experts = config.parallel, config.parallel.expert, config.model.num_local_experts
    ranks = parallel.tensor * parallel.context * parallel.data  # of a pipeline stage, among which the experts are divided
    working = [d for d in divisors(experts) if ranks % d == 0]
    if ranks % expert:
        over = show("parallel.data") if ranks == parallel.data else f"parallel.tensor x parallel.context x parallel.data = {ranks}"
        yield (
            f"{show('parallel.expert')} does not divide {over}. The experts are divided over the ranks of a pipeline stage. "
            f"Nearest working sizes: {nearest(working, expert)}."
        )
    if experts % expert:
        yield (
            f"{show('parallel.expert')} does not divide {show('model.num_local_experts')}. Every rank holds the same number of experts. "
            f"Nearest working sizes: {nearest(working, expert)}."
        )


def _stage_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    pipeline, layers, given = config.parallel.pipeline, config.model.num_hidden_layers, config.parallel.pipeline_layers
    if pipeline > layers:
        more = f"{show('parallel.pipeline')} is more than {show('model.num_hidden_layers')}"
        yield f"{more}. Every stage needs a layer. Use at most {layers}."
        return
    if not given:
        return
    numbers = stages(config)
    advice = f'Use "{",".join(map(str, balanced_stages(config.model, pipeline)))}", or leave it empty for that.'
    if len(numbers) != pipeline:
        yield f"{show('parallel.pipeline_layers')} names {len(numbers)} stages, and {show('parallel.pipeline')}. {advice}"
    elif sum(numbers) != layers:
        yield f"{show('parallel.pipeline_layers')} adds up to {sum(numbers)} layers, and {show('model.num_hidden_layers')}. {advice}"
    elif min(numbers) < 1:
        yield f"{show('parallel.pipeline_layers')} has a stage without a layer. Every stage needs one. {advice}"


def _data_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    data, rl, sft = config.parallel.data, config.rl, config.sft
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
    task, turns = config.task, config.rollout.max_turns
    if task.name == "arithmetic" and task.operations >= turns:
        yield (
            f"{show('task.operations')} takes a turn for each and one for the answer, and {show('rollout.max_turns')}. No solution could "
            f"be right. Use rollout.max_turns = {task.operations + 1} or more, or at most {turns - 1} operations."
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
    windowed = list(backends)[-1]
    if backends[windowed] == "te" and loaded.config.parallel.context > 1:
        yield (
            f"{show('parallel.context')} puts other ranks' keys in front of a window, which {show(windowed)} cannot compute. "
            'Use trainer.attention_windowed = "triton" or "flash", or parallel.context = 1.'
        )
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


def engine_sizes(config: Config) -> list[int]:
    """GPUs (on a CPU: processes) that one engine may have. vLLM gives each whole kv heads and as many columns of every expert; it pads the
    vocabulary."""
    model, cluster = config.model, config.cluster
    working = divisors(math.gcd(model.num_attention_heads, model.num_key_value_heads, model.intermediate_size))
    if cluster.device == "cpu":
        return working
    return [n for n in working if n <= cluster.gpus_per_node and not (cluster.share_gpus and cluster.gpus_per_node % n)]


def _engine_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    rollout, cluster = config.rollout, config.cluster
    size, working = rollout.tensor_parallel, nearest(engine_sizes(config), rollout.tensor_parallel)
    for key in ("model.num_attention_heads", "model.num_key_value_heads", "model.intermediate_size"):
        if loaded.value(key) % size:
            yield (
                f"{show('rollout.tensor_parallel')} does not divide {show(key)}. Every GPU of an engine computes as many heads and columns "
                f"of an expert. Nearest working sizes: {working}."
            )
            break
    if cluster.device == "cuda" and size > cluster.gpus_per_node:
        yield (
            f"{show('rollout.tensor_parallel')} is more than {show('cluster.gpus_per_node')}. An engine's GPUs talk in every layer and "
            f"must share a node. Nearest working sizes: {working}."
        )
    elif cluster.share_gpus and cluster.gpus_per_node % size:
        yield (
            f"{show('rollout.tensor_parallel')} does not divide {show('cluster.gpus_per_node')}, and with {show('cluster.share_gpus')} an "
            f"engine would lie on two nodes. Nearest working sizes: {working}."
        )
    ranks = world_size(config)
    if cluster.share_gpus and rollout.num_engines * size > ranks:
        yield (
            f"{show('rollout.num_engines')} of {show('rollout.tensor_parallel')} need {rollout.num_engines * size} GPUs, and with "
            f"{show('cluster.share_gpus')} they have those of the trainer's {ranks} ranks. Use at most {max(ranks // size, 1)} engines."
        )
    running = 1 if rollout.deterministic else rollout.max_running
    if 0 < rollout.max_in_flight < running:
        yield (
            f"{show('rollout.max_in_flight')} is less than {show('rollout.max_running')}, which an engine could then never reach. "
            f"Use {running} or more, or 0 for {2 * running}."
        )


# Values that need a GPU -> what to use without one.
GPU_ONLY: dict[str, tuple[object, str]] = {
    "trainer.transformer": ("te", '"local"'),
    "trainer.experts": ("grouped", '"loop"'),
    "trainer.dispatcher": ("deepep", '"alltoall"'),
    "trainer.rotary": ("fused", '"reference"'),
    "trainer.logprob": ("fused", '"reference"'),
    "cluster.share_gpus": (True, "false"),
}


def _cpu_rules(loaded: Loaded) -> Iterator[str]:
    """What a CPU cannot do, and what a GPU needs for it."""
    show, trainer = loaded.show, loaded.config.trainer
    if loaded.config.cluster.device == "cpu":
        for key, (value, instead) in GPU_ONLY.items():
            if loaded.value(key) == value:
                yield f'{show(key)} runs on GPUs only, and {show("cluster.device")}. Use {key} = {instead}, or cluster.device = "cuda".'
        if trainer.optimizer_offload > 0:
            yield (
                f"{show('trainer.optimizer_offload')} moves the optimizer from a GPU to the host, and {show('cluster.device')}, where all "
                'of it is in host memory. Use trainer.optimizer_offload = 0.0, or cluster.device = "cuda".'
            )
        return
    sixteen_bits = {
        "trainer.experts": ("grouped", "multiplies in 16 bits only", "loop"),
        "trainer.transformer": ("te", "multiplies float32 in TensorFloat-32, with 10 bits after the point", "local"),
        "trainer.dispatcher": ("deepep", "carries 16-bit numbers only", "alltoall"),
    }
    for key, (value, reason, instead) in sixteen_bits.items():
        if loaded.value(key) == value and trainer.dtype == "float32":
            yield f'{show(key)} {reason}, and {show("trainer.dtype")}. Use {key} = "{instead}", or trainer.dtype = "bfloat16".'
    if trainer.dispatcher == "deepep" and loaded.config.parallel.expert == 1:
        yield (
            f"{show('trainer.dispatcher')} has nobody to carry tokens to, as {show('parallel.expert')}. "
            'Use trainer.dispatcher = "alltoall", or divide the experts with parallel.expert.'
        )
    if trainer.experts == "grouped":
        for key in ("model.hidden_size", "model.intermediate_size"):
            if loaded.value(key) % 8:
                around = f"{loaded.value(key) // 8 * 8 or 8}, {loaded.value(key) // 8 * 8 + 8}"
                yield (
                    f"{show(key)} is not a multiple of 8, and {show('trainer.experts')} needs rows of whole 16 bytes. "
                    f'Use trainer.experts = "loop". Nearest working sizes: {around}.'
                )


def _sync_rules(loaded: Loaded) -> Iterator[str]:
    """How engines are given weights, and where."""
    config, show = loaded.config, loaded.show
    sync, shares = config.rollout.weight_sync, config.cluster.share_gpus
    if sync == "shared" and config.cluster.device == "cuda" and not shares:
        yield (
            f"{show('rollout.weight_sync')} goes through memory of a GPU that trainer and engine share, and {show('cluster.share_gpus')}. "
            'Use rollout.weight_sync = "auto", or cluster.share_gpus = true.'
        )
    if sync == "shared" and config.cluster.device == "cpu" and config.cluster.nodes > 1:
        yield (
            f"{show('rollout.weight_sync')} goes through memory of one host, and {show('cluster.nodes')}. "
            'Use rollout.weight_sync = "broadcast" or "inline".'
        )
    if sync in ("broadcast", "inline") and shares:
        reason = "NCCL takes no two processes of one GPU" if sync == "broadcast" else "it would pass a whole copy through the host"
        yield f'{show("rollout.weight_sync")} with {show("cluster.share_gpus")}: {reason}. Use rollout.weight_sync = "auto".'


def _other_rules(loaded: Loaded) -> Iterator[str]:
    config, show = loaded.config, loaded.show
    # Only as flags together: a run's own config.toml keeps the init it began with, and may be resumed.
    if all(loaded.origins[key].startswith("flag") for key in ("run.resume", "run.init")) and config.run.resume and config.run.init:
        yield (
            f"{show('run.resume')} and {show('run.init')} exclude each other. A resumed run goes on from its own checkpoint; "
            "leave out one of them."
        )
    if (most := config.eval.ks[-1]) > config.eval.samples_per_prompt:
        yield (
            f"{show('eval.k')} asks for pass@{most}, and {show('eval.samples_per_prompt')} rollouts of a prompt hold no {most}. "
            f"Use eval.samples_per_prompt = {most} or more."
        )
    run = config.run
    if run.save_every and run.keep_every % run.save_every:
        working = ", ".join(str(n) for n in _multiples_around(run.keep_every, run.save_every))
        yield (
            f"{show('run.keep_every')} is no multiple of {show('run.save_every')}: most of its steps have no checkpoint that could stay. "
            f"Nearest working numbers: {working}; 0: none stays for good."
        )
    if config.cluster.address == "local" and config.cluster.nodes > 1:
        yield (
            f'{show("cluster.nodes")}, and {show("cluster.address")} starts Ray on this node alone. Use cluster.address = "auto" in a job '
            "that has started Ray on its nodes (launch/train.sbatch does), or cluster.nodes = 0."
        )
    last = config.cluster.first_port + config.cluster.num_ports - 1
    if last > 65535:
        yield (
            f"{show('cluster.first_port')} with {show('cluster.num_ports')} ends at port {last}, and 65535 is the last there is. "
            f"Use cluster.first_port = {max(65536 - config.cluster.num_ports, 1024)}."
        )


def _multiples_around(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [n for n in (below, below + unit) if n]
