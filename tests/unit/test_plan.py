"""Laws of the plan: sizes multiply out, every rule is refused with values that work, and a run starts only from what is really there."""

import json
import random
import re
import socket
from datetime import datetime
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config import preflight
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.layout import EMBEDDING_IN_LAYERS, balanced_stages, head_in_layers
from megatron_gptoss.config.load import FIELDS, Flag, load, parse_flags, to_toml
from megatron_gptoss.config.machine import checkpoints_at_once, machine_checks
from megatron_gptoss.config.memory import checkpoint_bytes, count_parameters
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.config.preflight import check_inputs, check_run, check_run_target, free_port
from megatron_gptoss.config.rules import NOT_BUILT_YET, divisors, nearest, not_built_yet
from megatron_gptoss.config.schema import ClusterConfig, Config, ModelConfig, RunConfig
from megatron_gptoss.errors import CheckpointError, ConfigError, DataError, GptossError, MachineError
from megatron_gptoss.obs.run_dir import RunDir, write_atomic
from megatron_gptoss.tasks.arithmetic import Arithmetic
from megatron_gptoss.tasks.registry import make_task

CONFIGS = Path(__file__).parents[2] / "configs"
LAPTOP = Cluster(num_cpus=2, num_gpus=0)
NOON = datetime(2026, 1, 2, 12, 0, 0)


def plan(*arguments: str, cluster: Cluster = LAPTOP):
    return make_plan(load(*parse_flags(arguments)), cluster, NOON)


def tiny(*arguments: str):
    return load(*parse_flags([str(CONFIGS / "tiny.toml"), *arguments]))


# ---- what follows -------------------------------------------------------------------------------------------------------------------


def test_the_demo_worked_by_hand():
    made = plan(str(CONFIGS / "tiny.toml"), str(CONFIGS / "demo.toml"))
    assert made.run_dir == Path("runs/demo-20260102-120000")
    assert (made.groups_per_step, made.sequences_per_step, made.sequences_per_minibatch) == (16, 128, 128)
    assert (made.updates_per_step, made.total_updates, made.on_policy) == (1, 40, True)
    assert (made.world_size, made.experts_per_rank, made.engine_max_model_len, made.engine_max_running) == (1, 4, 200, 64)
    assert made.max_tokens_per_step == 128 * 200
    assert made.shortfall == ""


@given(st.integers(1, 6), st.integers(2, 8), st.integers(1, 6), st.integers(1, 3))
def test_sizes_multiply_out(groups, group_size, minibatches, epochs):
    sequences = groups * group_size * minibatches
    batch = (f"--rl.sequences_per_step={sequences}", f"--rollout.group_size={group_size}", f"--rl.minibatches={minibatches}")
    made = plan(*batch, f"--rl.epochs={epochs}")
    assert made.groups_per_step * group_size == sequences == made.sequences_per_minibatch * minibatches
    assert made.updates_per_step == minibatches * epochs
    assert made.on_policy == (minibatches == 1 and epochs == 1)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_actors_never_ask_for_more_cpus_than_there_are(cpus, ranks, engines, threads):
    made = plan(
        f"--parallel.data={ranks}", f"--rollout.num_engines={engines}", f"--trainer.threads_per_rank={threads}", cluster=Cluster(cpus, 0)
    )
    hundredths = [round(100 * actor.num_cpus) for actor in (made.trainer_resources, made.engine_resources)]
    assert ranks * hundredths[0] + engines * hundredths[1] <= 100 * cpus
    assert made.trainer_resources.num_cpus > 0 and made.engine_resources.num_cpus > 0


def test_a_plan_for_gpus_can_be_made_without_them_and_says_what_is_missing():
    assert plan(str(CONFIGS / "20b.toml")).shortfall.endswith("need 8 GPUs, this machine has 0")
    made = plan(str(CONFIGS / "20b.toml"), cluster=Cluster(128, 8))
    assert made.shortfall == "" and made.trainer_resources.num_gpus == made.engine_resources.num_gpus == 1


def test_weights_go_the_way_that_the_place_of_the_engines_allows():
    gpus = (str(CONFIGS / "20b.toml"),)
    ways = [plan().weight_sync, plan(*gpus).weight_sync, plan(*gpus, "--cluster.share_gpus=true").weight_sync]
    assert ways == ["inline", "broadcast", "shared"]
    assert plan("--rollout.weight_sync=shared").weight_sync == "shared" and not plan().shares_gpus
    assert plan(*gpus, "--cluster.share_gpus=true").shares_gpus


def test_deterministic_engines_decode_one_conversation_at_a_time():
    assert plan("--rollout.deterministic=true").engine_max_running == 1


@pytest.mark.parametrize("files", ["tiny demo", "tiny gsm8k", "tiny demo deterministic", "tiny demo scaled", "20b", "120b", "20b gsm8k"])
def test_shipped_files_plan(files):
    plan(*(str(CONFIGS / f"{name}.toml") for name in files.split()))


# ---- sizes against published numbers ------------------------------------------------------------------------------------------------


def test_parameters_are_the_published_ones():
    # Model card of GPT-OSS (arXiv 2508.10925, table 1): 20.91 B and 3.61 B active; 116.83 B and 5.13 B active.
    small, large = count_parameters(load([CONFIGS / "20b.toml"]).config.model), count_parameters(load([CONFIGS / "120b.toml"]).config.model)
    assert (small.total, large.total) == (20_914_757_184, 116_829_156_672)
    assert (round(small.active / 1e9, 2), round(large.active / 1e9, 2)) == (3.61, 5.13)


def test_a_checkpoint_holds_every_parameter_once_whatever_the_layout():
    # Measured for the tiny model: 9,020,133 bytes, of which half a million are random states and Megatron's own lists.
    assert checkpoint_bytes(tiny().config) == 16 * 529_296
    assert checkpoint_bytes(tiny("--parallel.data=4", "--parallel.expert=2").config) == 16 * 529_296
    assert checkpoint_bytes(tiny("--trainer.dtype=bfloat16").config) == 14 * 529_296


@pytest.mark.parametrize(
    ("steps", "every", "keep", "count"),
    [(40, 20, 2, 2), (60, 20, 2, 3), (61, 20, 2, 3), (600, 20, 1, 2), (600, 20, 0, 30), (601, 20, 0, 31), (600, 0, 2, 1), (600, 0, 0, 1)],
)
def test_checkpoints_that_a_disk_must_hold_worked_by_hand(steps, every, keep, count):
    assert checkpoints_at_once(RunConfig(steps=steps, save_every=every, keep_checkpoints=keep)) == count


# ---- rules --------------------------------------------------------------------------------------------------------------------------

GPU = ("--cluster.device=cuda", "--trainer.dtype=bfloat16")

# Flags that break one rule, and the words the message must have. Keys that are named must be in the message too.
RULES = [
    (["--rollout.group_size=7", "--rl.sequences_per_step=256"], "Nearest working sizes: 4, 8."),
    (["--rollout.group_size=1"], "Use 2 or more"),
    (["--rl.minibatches=3"], "Nearest working numbers: 2, 4."),
    (["--parallel.expert=3", "--parallel.data=4"], "Nearest working sizes: 2, 4."),
    (["--parallel.expert=3", "--parallel.data=6"], "Nearest working sizes: 2."),
    (["--parallel.tensor=3"], "Nearest working sizes: 2, 4."),
    (["--parallel.tensor=16"], "Nearest working sizes: 8."),
    (["--trainer.tokens_per_microbatch=8190", "--parallel.context=4"], "Nearest working numbers: 8188, 8192."),
    (["--parallel.tensor=8", "--cluster.gpus_per_node=4", "--cluster.device=cuda"], "Nearest working sizes: 4."),
    (["--parallel.data=3", "--parallel.tensor=4", "--cluster.device=cuda"], "Nearest working sizes: 2, 4."),
    (["--parallel.expert=3", "--parallel.tensor=2", "--parallel.context=2"], "Nearest working sizes: 2, 4."),
    (["--parallel.expert=64", "--parallel.data=32", "--parallel.context=2"], "Nearest working sizes: 32."),
    (["--parallel.pipeline=25"], "Use at most 24."),
    (["--parallel.pipeline_layers=12,12", "--parallel.pipeline=4"], 'Use "6,7,8,3", or leave it empty'),
    (["--parallel.pipeline_layers=12,13", "--parallel.pipeline=2"], 'Use "14,10", or leave it empty'),
    (["--parallel.pipeline_layers=24,0", "--parallel.pipeline=2"], "Every stage needs one."),
    (["--trainer.experts=grouped", "--trainer.dtype=bfloat16"], 'Use trainer.experts = "loop", or cluster.device = "cuda".'),
    (["--trainer.logprob=fused"], 'Use trainer.logprob = "reference", or cluster.device = "cuda".'),
    (["--trainer.transformer=te", "--trainer.dtype=bfloat16"], 'Use trainer.transformer = "local", or cluster.device = "cuda".'),
    (
        ["--trainer.dispatcher=deepep", "--trainer.dtype=bfloat16", "--parallel.expert=2", "--parallel.data=2"],
        'Use trainer.dispatcher = "alltoall", or cluster.device = "cuda".',
    ),
    (["--trainer.optimizer_offload=0.5"], 'Use trainer.optimizer_offload = 0.0, or cluster.device = "cuda".'),
    (["--trainer.experts=grouped", "--cluster.device=cuda"], 'trainer.dtype = "bfloat16".'),
    (["--trainer.transformer=te", "--cluster.device=cuda"], 'Use trainer.transformer = "local", or trainer.dtype = "bfloat16".'),
    (["--trainer.dispatcher=deepep", "--parallel.expert=2", "--parallel.data=2", "--cluster.device=cuda"], "carries 16-bit numbers only"),
    (["--trainer.dispatcher=deepep", *GPU], 'Use trainer.dispatcher = "alltoall", or divide the experts with parallel.expert.'),
    (["--parallel.context=2", "--trainer.attention=te", *GPU], 'Use trainer.attention_windowed = "triton" or "flash"'),
    (["--model.hidden_size=2884", "--trainer.experts=grouped", *GPU], "Nearest working sizes: 2880, 2888."),
    (["--model.num_key_value_heads=7"], "Nearest working numbers: 4, 8."),
    (["--model.num_experts_per_tok=33"], "Use at most 32."),
    (["--model.head_dim=63"], "Nearest working sizes: 62, 64."),
    (["--rollout.max_turn_tokens=200"], "Use rollout.max_turn_tokens = 100, or rollout.max_sequence_tokens = 400."),
    (["--rollout.max_sequence_tokens=512", "--model.max_position_embeddings=256"], "Use at most 256."),
    (["--task.operations=5"], "No solution could be right. Use rollout.max_turns = 6 or more, or at most 4 operations."),
    (["--trainer.tokens_per_microbatch=100"], "Use 200 or more."),
    (["--model.vocab_size=512"], 'Use model.vocab_size = 201088 or more, or tokenizer.name = "tiny".'),
    (["--model.vocab_size=100", "--tokenizer.name=tiny"], "Use model.vocab_size = 512 or more."),
    (["--sft.guess_fraction=0.6"], "lower one by 0.13"),
    (["--parallel.data=64", "--rl.minibatches=2", "--sft.sequences_per_step=64"], "Use at most 32 ranks, or rl.sequences_per_step = 128."),
    (["--parallel.data=33"], "Use at most 32 ranks, or sft.sequences_per_step = 33."),
    (["--rollout.kv_cache_gib=0.01"], "Use rollout.kv_cache_gib = 0.02 or more"),
    (["--rollout.tensor_parallel=3"], "Nearest working sizes: 2, 4."),
    (
        ["--rollout.tensor_parallel=16", "--model.num_key_value_heads=16", "--model.num_attention_heads=64", *GPU],
        "Nearest working sizes: 8.",
    ),
    (["--rollout.tensor_parallel=4", "--cluster.gpus_per_node=6", "--cluster.share_gpus=true", "--parallel.data=6", *GPU], "sizes: 2."),
    (["--rollout.num_engines=3", "--rollout.tensor_parallel=2", "--cluster.share_gpus=true", "--parallel.data=4", *GPU], "Use at most 2"),
    (["--rollout.max_in_flight=63"], "Use 64 or more, or 0 for 128."),
    (["--rollout.weight_sync=shared", *GPU], 'Use rollout.weight_sync = "auto", or cluster.share_gpus = true.'),
    (["--rollout.weight_sync=shared", "--cluster.nodes=2", "--cluster.address=auto"], 'Use rollout.weight_sync = "broadcast" or "inline".'),
    (["--rollout.weight_sync=broadcast", "--cluster.share_gpus=true", *GPU], 'Use rollout.weight_sync = "auto".'),
    (["--cluster.first_port=65500"], "Use cluster.first_port = 65436."),
    (["--run.resume=a", "--run.init=b"], "leave out one of them"),
]


@pytest.mark.parametrize(("arguments", "words"), RULES)
def test_a_broken_rule_names_what_is_set_where_and_what_would_work(arguments, words):
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    found = str(caught.value)
    assert words in found
    key = arguments[0].removeprefix("--").split("=")[0]
    assert f"(flag --{key})" in found and f"{key} = " in found


@pytest.mark.parametrize(("arguments", "words"), RULES)
def test_values_that_a_message_recommends_do_work(arguments, words):
    key = arguments[0].removeprefix("--").split("=")[0]
    lists = re.search(r"Nearest working \w+: ([\d, ]+)", words)
    named = re.findall(r"([a-z]+\.[a-z_]+) = \"?([\w.]+[\w])", words)
    bare = re.search(r"Use (?:at most )?(\d+)", words)
    cures = [(key, v) for v in lists[1].split(", ")] if lists else named or ([(key, bare[1])] if bare else [])
    for cured, value in cures:
        plan(*arguments, f"--{cured}={value.strip()}")  # does not raise


def test_the_message_of_the_design():
    with pytest.raises(ConfigError) as caught:
        plan("--rollout.group_size=7", "--rl.sequences_per_step=256")
    assert str(caught.value) == (
        "rollout.group_size = 7 (flag --rollout.group_size) does not divide rl.sequences_per_step = 256 (flag --rl.sequences_per_step). "
        "A group must land in one step. Nearest working sizes: 4, 8."
    )


def test_degrees_multiply_out_and_every_piece_exists_once():
    flags = ["--parallel.tensor=2", "--parallel.context=4", "--parallel.pipeline=4", "--parallel.data=3", "--parallel.expert=8"]
    made = plan(*flags)
    assert made.world_size == 2 * 4 * 4 * 3
    assert sum(made.layers_per_stage) == 24 and made.layers_per_stage == (6, 7, 8, 3)
    assert made.heads_per_rank * made.tensor_parallel == 64 and made.kv_heads_per_rank * made.tensor_parallel == 8
    assert made.vocabulary_per_rank * made.tensor_parallel == 201_088
    assert (made.experts_per_rank * made.expert_parallel, made.expert_copies * made.expert_parallel) == (32, 2 * 4 * 3)
    assert made.tokens_per_rank * made.context_parallel == made.tokens_per_microbatch == 8192
    assert (made.tokens_multiple, made.least_microbatches) == (8, 4)


@given(st.integers(1, 64), st.integers(1, 16))
def test_balanced_stages_hold_all_layers_and_none_could_be_faster(layers, pipeline):
    pipeline = min(layers, pipeline)
    model = ModelConfig(num_hidden_layers=layers)
    found = balanced_stages(model, pipeline)
    assert len(found) == pipeline and sum(found) == layers and min(found) >= 1
    if pipeline > 1:
        load = [n + (s == 0) * EMBEDDING_IN_LAYERS + (s == pipeline - 1) * head_in_layers(model) for s, n in enumerate(found)]
        slowest = load.index(max(load))
        # Taking a layer from the slowest stage would make another one as slow, or leave it without any.
        assert found[slowest] == 1 or min(n for s, n in enumerate(load) if s != slowest) + 1 >= max(load) - 1e-9


def test_a_value_that_a_run_would_ignore_is_planned_and_not_run():
    for key, values in NOT_BUILT_YET.items():
        default = FIELDS[key].default
        choices = [c for c in get_args(FIELDS[key].annotation) if c != default] or [
            not default if isinstance(default, bool) else 1 + default
        ]
        value = (values or choices)[0]
        loaded = load([], [Flag(key, value if isinstance(value, str) else to_toml(value), f"--{key}")])
        (message,) = not_built_yet(loaded)
        assert message.startswith(f"{key} = ") and f"(flag --{key})" in message and f"Use {key} = {to_toml(default)}." in message
    assert not_built_yet(load()) == []


def test_commands_that_run_refuse_what_is_planned_only(tmp_path, monkeypatch):
    monkeypatch.setitem(NOT_BUILT_YET, "parallel.context", None)
    loaded = tiny("--parallel.context=2", f"--run.dir={tmp_path}")
    made = make_plan(loaded, LAPTOP, NOON)
    with pytest.raises(
        ConfigError, match=r"^parallel\.context = 2 \(flag --parallel\.context\) can be planned.*Use parallel\.context = 1\.$"
    ):
        check_run(loaded, made, "train")


def test_shares_that_add_up_to_one_in_decimals_are_accepted():
    for guess, stop, digit in ((0.3, 0.3, 0.4), (0.33, 0.56, 0.11)):  # the sum of the latter is 1.0000000000000002 in floats
        shares = (f"--sft.guess_fraction={guess}", f"--sft.stop_fraction={stop}", f"--sft.digit_fraction={digit}")
        plan(*shares)
        task = make_task(tiny(*shares).config)
        assert isinstance(task, Arithmetic) and task.demonstration(random.Random(0)).kind != "clean"


@given(st.integers(1, 300), st.integers(1, 300))
def test_nearest_brackets_the_value(n, value):
    around = [int(word) for word in nearest(divisors(n), value).split(", ") if word]
    assert all(n % d == 0 for d in around) and all(d < value for d in around[:-1])
    assert not any(n % d == 0 for d in range(min(around, default=value) + 1, max(around, default=value)) if d != value)


# ---- where a run starts -------------------------------------------------------------------------------------------------------------


def make_run(path: Path, config: Config, *steps: int, command: str = "train") -> RunDir:
    """A run directory as training leaves it, without the weights."""
    run = RunDir.create(path, config)
    write_atomic(run.manifest_file, f'{{"command": "{command}"}}')
    for step in steps:
        run.checkpoint(step).mkdir()
        write_hf_config(config.model, run.checkpoint(step))
        (run.checkpoint(step) / MARKER).write_text("")
    return run


def target(loaded, command: str = "train"):
    check_run_target(loaded, make_plan(loaded, LAPTOP, NOON), command)


def test_a_run_directory_is_never_overwritten(tmp_path):
    flags = [f"--run.dir={tmp_path}", "--run.id=1"]
    target(tiny(*flags))
    make_run(tmp_path / "run-1", tiny().config)
    with pytest.raises(ConfigError, match=r"run-1 exists already.*another run\.id \(empty: date and time\)\.$"):
        target(tiny(*flags))
    make_run(tmp_path / "run-2", tiny().config, 20)
    with pytest.raises(ConfigError, match=r"--resume .*run-2\.$"):
        target(tiny(f"--run.dir={tmp_path}", "--run.id=2"))


def test_resume_wants_a_run_with_a_complete_checkpoint_of_this_command_and_architecture(tmp_path):
    run = make_run(tmp_path / "run-1", tiny().config, 20)
    target(tiny(f"--run.resume={run.path}"))
    with pytest.raises(ConfigError, match=r"is a run of `gptoss train`.*--init"):
        target(tiny(f"--run.resume={run.path}"), "sft")
    with pytest.raises(CheckpointError, match=r"model\.hidden_size = 256 \(flag --model\.hidden_size\), the checkpoint has 128"):
        target(tiny(f"--run.resume={run.path}", "--model.hidden_size=256"))
    with pytest.raises(ConfigError, match=rf"does not exist\. Newest runs in .*: {run.path}"):
        target(tiny(f"--run.resume={tmp_path}/run-9", f"--run.dir={tmp_path}"))
    with pytest.raises(ConfigError, match="is not a run directory"):
        target(tiny(f"--run.resume={tmp_path}"))
    (run.checkpoint(20) / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"only torn ones \(step-000020\)"):
        target(tiny(f"--run.resume={run.path}"))


def test_init_takes_a_run_a_checkpoint_or_a_hugging_face_folder_and_nothing_else(tmp_path):
    run = make_run(tmp_path / "run-1", tiny().config, 20)
    torn = run.checkpoint(40)
    torn.mkdir()
    write_hf_config(tiny().config.model, torn)
    hf = tmp_path / "hf"
    hf.mkdir()
    for path, error, words in [
        (tmp_path / "none", ConfigError, "does not exist"),
        (hf, ConfigError, "neither a run directory"),
        (torn, CheckpointError, r"is torn.*newest complete one is .*step-000020"),
    ]:
        with pytest.raises(error, match=words) as caught:
            target(tiny(f"--run.dir={tmp_path}", f"--run.init={path}"))
        assert f'run.init = "{path}" (flag --run.init)' in str(caught.value)
    write_hf_config(tiny().config.model, hf)
    (hf / "model.safetensors").write_text("")
    for path in (run.path, run.checkpoint(20), hf):
        target(tiny(f"--run.dir={tmp_path}", f"--run.init={path}"))
        with pytest.raises(CheckpointError, match=r"model\.sliding_window = 16 .*the checkpoint has 32"):
            target(tiny(f"--run.dir={tmp_path}", f"--run.init={path}", "--model.sliding_window=16"))


def test_a_folder_for_runs_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        target(tiny(f"--run.dir={tmp_path}/file/runs"))


def test_prompt_files_must_be_there_and_hold_something(tmp_path):
    missing, empty = tmp_path / "none.jsonl", tmp_path / "empty.jsonl"
    empty.write_text("")
    for path, words in ((missing, "is not a file"), (empty, "is empty")):
        with pytest.raises(DataError, match=words):
            check_inputs(tiny("--task.name=gsm8k", f"--task.path={path}").config)
    with pytest.raises(ConfigError, match=r"task\.path"):
        check_inputs(tiny("--task.name=gsm8k").config)
    with pytest.raises(ConfigError, match="arithmetic"):
        check_inputs(tiny("--task.name=arithmetik").config)
    check_inputs(tiny().config)


def problems(path: Path, count: int, *longer: tuple[int, str]) -> Path:
    """A GSM8K file of `count` lines, some of them (numbered from 1) with text put before their question."""
    texts = [f"How much is {n}?" for n in range(1, count + 1)]
    for line, text in longer:
        texts[line - 1] = f"{text} {texts[line - 1]}"
    path.write_text("".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("line", [1, 5, 77, 300])
def test_a_prompt_without_room_for_an_answer_is_found_wherever_it_stands_and_the_cure_is_exact(tmp_path, line):
    # Three bytes a character, so the longest in tokens is not the longest in characters.
    file = problems(tmp_path / "a.jsonl", 300, (line, "\u65e5" * 300), (150, "a" * 500))
    flags = ["--task.name=gsm8k", f"--task.path={file}", "--trainer.tokens_per_microbatch=9999"]

    def check(limit: int) -> None:
        check_inputs(tiny(*flags, f"--rollout.max_sequence_tokens={limit}").config, "train")

    with pytest.raises(ConfigError, match=rf"prompt gsm8k/\w+/{line}/0 \('\u65e5+\.\.\.'\).*max_sequence_tokens = 900") as caught:
        check(900)
    found = re.search(r"has (\d+) tokens .* at least (\d+) ", str(caught.value))
    assert found
    check(int(found[2]))
    check(int(found[1]) + 1)  # room for one token
    with pytest.raises(ConfigError):
        check(int(found[1]))


def test_a_prompt_that_a_task_makes_up_is_measured_too():
    # 23 tokens with `<|start|>assistant`, as a rollout begins (test_collect.py).
    with pytest.raises(ConfigError, match=r"prompt arithmetic/.* has 23 tokens .*max_sequence_tokens = 23 "):
        check_inputs(tiny("--rollout.max_sequence_tokens=23").config)


@pytest.mark.parametrize(("key", "low"), [("max_sequence_tokens", 150), ("max_turn_tokens", 8)])
def test_limits_that_no_right_solution_keeps_are_refused_and_the_cure_is_one(key, low):
    hard = ("--task.operations=6", "--task.digits=5", "--rollout.max_turns=7")

    def check(limit: int) -> None:
        check_inputs(tiny(*hard, "--rollout.max_sequence_tokens=400", "--rollout.max_turn_tokens=40", f"--rollout.{key}={limit}").config)

    with pytest.raises(ConfigError, match=rf"rollout\.{key} = \d+, and a .* of task.name = arithmetic may have \d+ tokens") as caught:
        check(low)
    check(int(re.search(r"= (\d+) or more", str(caught.value))[1]))
    check(int(re.search(r"have (\d+) tokens", str(caught.value))[1]))
    with pytest.raises(ConfigError):
        check(int(re.search(r"have (\d+) tokens", str(caught.value))[1]) - 1)


def test_a_split_without_prompts_is_refused_where_the_command_needs_it(tmp_path):
    file = problems(tmp_path / "a.jsonl", 1)
    flags = ("--task.name=gsm8k", "--rollout.max_sequence_tokens=2000", f"--task.path={file}")
    with pytest.raises(DataError, match=r"set task\.eval_path"):
        check_inputs(tiny(*flags).config, "train")
    same = tiny(*flags, f"--task.eval_path={file}").config
    with pytest.raises(DataError, match=r"every problem of task\.path"):
        check_inputs(same, "train")
    check_inputs(same, "eval")  # measuring on a file needs no training prompts


def test_a_plan_downloads_no_tokenizer(monkeypatch):
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.setattr(preflight, "load_tokenizer", lambda config: pytest.fail("asked for a tokenizer that is not on this machine"))
    check_inputs(load([]).config)


def test_packed_weights_are_refused_with_the_way_to_plain_ones(tmp_path):
    write_hf_config(tiny().config.model, tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config \(mxfp4\).*gptoss convert .* --to megatron.*BF16 works"):
        target(tiny(f"--run.dir={tmp_path}", f"--run.init={tmp_path}"))


# ---- ports and the machine ----------------------------------------------------------------------------------------------------------


def test_a_free_port_is_found_behind_taken_ones_and_a_full_range_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"{port} to {port} are taken.*cluster\.first_port.*cluster\.num_ports"):
            free_port(ClusterConfig(first_port=port, num_ports=1))
        if port < 65000:
            assert port < free_port(ClusterConfig(first_port=port, num_ports=200)) < port + 200
    assert free_port(ClusterConfig(first_port=port, num_ports=1)) == port


def test_machine_checks_report_and_never_raise(tmp_path):
    loaded = tiny(f"--run.dir={tmp_path}", "--task.name=gsm8k", "--cluster.device=cuda")
    checks = {c.name: c for c in machine_checks(loaded, make_plan(loaded, LAPTOP, NOON))}
    assert checks["Python"].ok and checks["pydantic"].ok and checks["free port"].ok
    assert not checks["task and prompts"].ok and "task.path" in checks["task and prompts"].found
    assert not checks["CPUs and GPUs"].ok and "GPUs" in checks["CPUs and GPUs"].found


def test_every_error_a_user_can_cause_ends_with_exit_code_2():
    assert {e.exit_code for e in (ConfigError, DataError, CheckpointError, MachineError)} == {2} and GptossError.exit_code == 1
    assert ModelConfig().num_hidden_layers == 24
