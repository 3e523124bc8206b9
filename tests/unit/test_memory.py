"""Laws of the memory plan: byte counts worked by hand, what each choice moves, and advice that was tried before it is given."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gptoss.config import rules
from megatron_gptoss.config.fit import changed_config, cures, does_not_fit, fits
from megatron_gptoss.config.host_memory import checkpoint_per_node, host_bytes_per_node, optimizers_per_node
from megatron_gptoss.config.load import Loaded, load, parse_flags
from megatron_gptoss.config.memory import checkpoint_bytes, count_parameters, engine_memory
from megatron_gptoss.config.preflight import check_engine_memory, check_memory
from megatron_gptoss.config.rank_memory import (
    ASLEEP_BYTES,
    GIB,
    fits_beside_a_starting_engine,
    held_parameters,
    trainer_memory,
    worst_rank,
)
from megatron_gptoss.config.rules import broken_rules
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError
from megatron_gptoss.obs.plan_table import predicted_and_measured
from megatron_gptoss.types import PeakMemory

CONFIGS = Path(__file__).parents[2] / "configs"


def loaded(*arguments: str) -> Loaded:
    names = {"tiny", "20b", "120b", "scaled", "small_h200"}
    return load(*parse_flags([str(CONFIGS / f"{a}.toml") if a in names else a for a in arguments]))


def parts(config: Config, stage: int = 0) -> dict[str, int]:
    memory = trainer_memory(config)[stage]
    return {part.name: part.num_bytes for part in (*memory.parts, *memory.overhead)}


# ---- by hand ------------------------------------------------------------------------------------------------------------------------


def test_a_small_model_worked_by_hand():
    # configs/tiny.toml: 2 layers, hidden 128, 4 query heads and 2 kv heads of 64, 4 experts of width 64 top-2, 512 ids, float32.
    config = loaded("tiny", "--trainer.tokens_per_microbatch=256", "--trainer.recompute=full").config
    found = parts(config)
    assert found["weights"] == 4 * 529_296 and found["gradients"] == 4 * 529_296
    assert found["optimizer"] == 8 * 529_296  # two float32 moments; float32 weights are their own originals
    assert found["activations kept (layer inputs)"] == 2 * 256 * 128 * 4
    attention = (
        256 * (2 * 4 + 128 * 4)  # two norms' reciprocal deviations, the first norm's output
        + 256 * (256 + 2 * 128) * 4  # queries, keys and values as one tensor
        + 256 * (256 + 128) * 4  # rotated queries and keys
        + 4 * 256 * 64 * 4  # cosines and sines, of queries and of keys
        + 256 * 256 * 4  # attention's output
        + 256 * 4 * 4  # its log-sum-exp
        + 256 * 128 * 4  # the residual stream behind attention
    )
    router = 256 * (4 * 4 + 2 * (8 + 4)) + 512 * 24  # 512 = 256 x top-2 rows
    experts = 512 * ((128 + 8 * 64) * 4 + 4)  # a loop in plain PyTorch
    assert found["one layer computed again"] == attention + 256 * 128 * 4 + router + experts
    assert found["experts' gradients"] == 512 * (2 * 128 + 2 * 64) * 4 + 4 * 3 * 128 * 64 * 4
    assert found["logits of a chunk"] == 256 * 512 * 4  # no more tokens than there are
    assert "all-to-all buffers" not in found and "CUDA and its libraries" not in found


def test_20b_on_two_gpus_worked_by_hand():
    config = loaded(
        "20b", "--parallel.data=2", "--parallel.expert=2", "--trainer.recompute=full", "--trainer.optimizer_offload=0.75"
    ).config
    found = parts(config)
    dense, experts = 1_797_824_064, 19_116_933_120  # of the 20,914,757,184
    assert (count_parameters(config.model).dense, count_parameters(config.model).experts) == (dense, experts)
    held = dense + experts // 2  # each rank has all that is dense and 16 of 32 experts
    assert found["weights"] == 2 * held == 22_712_581_248
    assert found["gradients"] == 4 * held == 45_425_162_496
    updated = dense // 2 + experts // 2  # dense states are divided over two ranks; nobody else has these experts
    assert updated == 10_457_378_592
    assert found["optimizer"] == 12 * updated // 4 == 31_372_135_776
    # Original and two moments; for the dense and the expert optimizer two buffers of a chunk for gradients and two for weights.
    assert trainer_memory(config)[0].host_bytes == 12 * updated * 3 // 4 + 2 * 4 * 4 * 2**24
    # Clipping has one gradient twice. A rank's half of the dense parameters may hold the whole embedding, the largest one.
    assert found["AdamW's temporaries"] == 4 * 201088 * 2880
    assert found["activations kept (layer inputs)"] == 24 * 16384 * 2880 * 2
    rows = 16384 * 4 * 5 // 4  # top-4, and an imbalance of 1.25
    again = (
        16384 * (8 + 5760)  # norms
        + 16384 * 512 * 2  # values
        + 16384 * (4096 + 512) * 2  # rotated queries and keys
        + 16384 * (4096 * 2 + 64 * 4)  # output, log-sum-exp
        + 16384 * 5760  # residual
        + 16384 * 5760  # the experts' input
        + 16384 * (32 * 4 + 4 * 12)  # router
        + 16384 * 4 * 24  # who goes where
        + rows * ((2880 + 5760) * 2 + 4)  # rows, first product
    )
    assert found["one layer computed again"] == again
    # Both products' gradients, that of the rows, of the output; then both matrices' of 16 experts.
    assert found["experts' gradients"] == rows * 4 * 2880 * 2 + 16 * 3 * 2880 * 2880 * 2
    assert found["all-to-all buffers"] == (65536 + rows) * 2880 * 2
    assert found["logits of a chunk"] == 1024 * 201088 * 2


# ---- what each choice moves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["20b", "120b"])
def test_all_ranks_together_hold_each_expert_once_a_copy_and_each_moment_once(name):
    flags = ("--parallel.tensor=2", "--parallel.context=2", "--parallel.pipeline=4", "--parallel.data=4", "--parallel.expert=8")
    config = loaded(name, *flags).config
    count = count_parameters(config.model)
    held = [held_parameters(config, stage) for stage in range(4)]
    assert sum(h.experts for h in held) * 8 == count.experts
    assert sum(h.experts_updated for h in held) * 16 == count.experts  # ranks of a stage: 2 x 2 x 4
    # What tensor ranks divide is half on each; norms, routers and the projection's bias are on both.
    whole = config.model.num_hidden_layers * (3 * 2880 + (2880 + 1) * config.model.num_local_experts) + 2880
    assert 2 * sum(h.dense for h in held) == count.dense + whole
    assert sum(h.dense_updated for h in held) * 8 == pytest.approx(sum(h.dense for h in held), abs=8 * 8)  # data x context = 8


def test_every_choice_moves_its_own_part():
    base = loaded("20b").config
    before = parts(base)

    def after(**values: object) -> dict[str, int]:
        return parts(changed_config(base, {key.replace("__", "."): value for key, value in values.items()}))

    assert after(trainer__optimizer_states="bfloat16")["optimizer"] == before["optimizer"] * 8 // 12
    assert after(trainer__optimizer_offload=0.5)["optimizer"] == before["optimizer"] // 2
    assert after(trainer__optimizer_offload=1.0)["optimizer"] == 0
    # PyTorch's AdamW takes the roots of all second moments of the experts' optimizer, the larger one; ours, a GPU's, works in chunks.
    assert after(cluster__device="cpu")["AdamW's temporaries"] == 4 * 19_116_933_120 // 4
    quarter = 4 * 1_797_824_064 // 4  # of the dense parameters: less than the embedding
    assert before["AdamW's temporaries"] == after(trainer__optimizer_states="bfloat16")["AdamW's temporaries"] == quarter
    kept = [
        sum(v for k, v in after(trainer__recompute=r).items() if k.startswith("activations kept")) for r in ("none", "selective", "full")
    ]
    assert kept[0] > 2 * kept[1] > 4 * kept[2]
    # The fused kernel leaves queries and keys of before the rotation, and each layer's cosines and sines, to nobody.
    saved = 24 * 16384 * (4096 + 512 + 4 * 64) * 2
    name = "activations kept (attention's)"
    assert after(trainer__rotary="reference")[name] - before[name] == saved
    assert after(trainer__logprob_chunk=512)["logits of a chunk"] == before["logits of a chunk"] // 2
    assert after(rl__kl_coef=0.1)["reference policy"] == before["weights"]
    # Context ranks share tokens, and nothing else; tensor ranks share heads and vocabulary too.
    context = after(parallel__context=2)
    assert context["activations kept (attention's)"] * 2 == before["activations kept (attention's)"]
    assert context["weights"] == before["weights"]
    assert after(parallel__tensor=2)["logits of a chunk"] * 2 == before["logits of a chunk"]


def test_the_peak_is_what_is_always_there_and_the_worst_of_the_rest():
    for name in ("tiny", "20b", "120b"):
        memory = worst_rank(loaded(name).config)
        assert memory.allocated == sum(part.num_bytes for part in memory.at_the_peak())
        phases = {part.phase for part in memory.parts} - {"always", "pass"}
        assert all(memory.allocated >= memory.sum("always", p, *(["pass"] if p in ("layer", "head") else [])) for p in phases)
        assert memory.total >= memory.reserved >= memory.allocated


def test_earlier_stages_keep_more_microbatches():
    config = loaded("20b", "--parallel.pipeline=4", "--parallel.data=2", "--parallel.expert=2", "--parallel.pipeline_layers=6,6,6,6").config
    kept = [memory.sum("pass") for memory in trainer_memory(config)]
    assert kept == [4 * kept[3], 3 * kept[3], 2 * kept[3], kept[3]]
    assert [memory.sum("head") > 0 for memory in trainer_memory(config)] == [False, False, False, True]


def test_two_gpus_are_told_a_plan_for_the_20b_that_a_run_carries_out():
    """docs/memory.md names it. The first cure changes one key and computes in float32 as before."""
    plan = loaded("20b", "--parallel.data=2", "--parallel.expert=2")
    assert rules.not_built_yet(plan) == []
    assert "Would fit: trainer.optimizer_offload = 0.75; or " in does_not_fit(plan)
    chosen = changed_config(plan.config, {"trainer.optimizer_offload": 0.75})
    small = changed_config(chosen, {"run.save_in_background": False})
    assert fits(chosen) and host_bytes_per_node(small) < 200 * GIB  # of the 256 of a host with two
    assert worst_rank(chosen).total < 0.95 * 139.8 * GIB
    long = {"parallel.data": 1, "parallel.context": 2, "trainer.recompute": "full"}
    assert fits(changed_config(chosen, long | {"trainer.tokens_per_microbatch": 65536, "rollout.max_sequence_tokens": 65536}))
    assert not fits(changed_config(plan.config, {"trainer.optimizer_states": "bfloat16", "trainer.recompute": "full"}))  # not alone


def test_an_engine_on_the_rank_s_gpu_has_its_share_when_the_rank_rests_and_little_when_it_works():
    arguments = ("20b", "--parallel.data=8", "--parallel.expert=8", "--trainer.recompute=none", "--cluster.share_gpus=true")
    alone = worst_rank(loaded(*arguments[:4]).config)
    config = loaded(*arguments, "--rollout.gpu_memory_fraction=0.4").config
    memory, share = worst_rank(config), round(0.4 * 139.8 * GIB)
    assert parts(config)["the engine's share"] == share and engine_memory(config)[0].num_bytes == 2 * 20_914_757_184
    assert memory.worst_phase != "engine" and memory.total == alone.total + ASLEEP_BYTES  # they are not there at once
    assert memory.total >= memory.sum("always", "publish") + share
    greedy = loaded(*arguments, "--rollout.gpu_memory_fraction=0.8")
    memory = worst_rank(greedy.config)
    assert memory.worst_phase == "engine" and memory.allocated == alone.allocated
    assert memory.total == sum(part.num_bytes for part in (*memory.at_the_peak(), *memory.beside_them())) > 139.8 * GIB
    # Between updates gradients are given back; only while both start they are there beside the engine.
    assert "gradients" not in {part.name for part in memory.at_the_peak()} and parts(greedy.config)["gradients"] > 15 * GIB
    assert memory.while_both_start == memory.sum("always", "build") + parts(greedy.config)["gradients"] + sum(
        part.num_bytes for part in memory.beside_them()
    )
    message = does_not_fit(greedy)
    assert "while it rests beside an engine with its rollout.gpu_memory_fraction = 0.8 (flag" in message
    assert "; or rollout.gpu_memory_fraction = 0.6; or " in message
    assert does_not_fit(loaded(*arguments, "--rollout.gpu_memory_fraction=0.4")) == ""


def test_the_20b_on_two_gpus_that_trainer_and_engines_share():
    """Weights 21.2, optimizer 29.2, what is published 4.2, CUDA and NCCL 4.0, half of the GPU 69.9: 128.4 GiB while engines work; the
    gradients' 42.3 would not fit beside them."""
    flags = ("--parallel.data=2", "--parallel.expert=2", "--trainer.optimizer_offload=0.75", "--rollout.num_engines=2")
    plan = loaded("20b", *flags, "--cluster.share_gpus=true", "--rollout.gpu_memory_fraction=0.5")
    assert does_not_fit(plan) == "" and broken_rules(plan) == []
    memory = worst_rank(plan.config)
    assert memory.worst_phase == "engine" and round(memory.total / GIB, 1) == 128.4
    assert memory.total + parts(plan.config)["gradients"] > 139.8 * GIB
    # 128.4 and the gradients, less what is published: as they start, one has to come after the other. The small one's 35.2 fit at once.
    assert round(memory.while_both_start / GIB, 1) == 168.7 and not fits_beside_a_starting_engine(plan.config)
    small = loaded("small_h200").config
    assert fits_beside_a_starting_engine(small) and small.cluster.share_gpus
    # 95 % are 132.8; the trainer's part is 7.2, and the engine's share 124.4 or 125.8.
    fits = [fits_beside_a_starting_engine(changed_config(small, {"rollout.gpu_memory_fraction": share})) for share in (0.89, 0.9)]
    assert fits == [True, False]


def test_buckets_that_are_sent_are_counted_where_there_are_any():
    config = loaded("20b").config
    assert parts(config)["two buckets of weights to be sent"] == 2 * 201_088 * 2880 * 2  # the embedding is more than a GiB
    assert parts(changed_config(config, {"rollout.weight_bucket_mib": 2048.0}))["two buckets of weights to be sent"] == 2 * 2 * GIB
    assert "two buckets of weights to be sent" not in parts(changed_config(config, {"rollout.weight_sync": "inline"}))


@pytest.mark.parametrize("name", ["20b", "120b", "tiny"])
def test_the_gpus_of_an_engine_hold_the_model_once_and_some_small_parts_each(name):
    def weights(size: int) -> int:
        return engine_memory(loaded(name, f"--rollout.tensor_parallel={size}").config)[0].num_bytes

    model = loaded(name).config.model
    # By hand: of each layer a router with its bias, two norms, attention's last bias, and the last bias of every expert; the final norm.
    router = model.hidden_size * model.num_local_experts + model.num_local_experts
    whole = model.num_hidden_layers * (router + 3 * model.hidden_size + model.num_local_experts * model.hidden_size) + model.hidden_size
    width = 4 if name == "tiny" else 2
    assert 2 * weights(2) - weights(1) == width * whole
    assert weights(1) == width * count_parameters(model).total


def test_what_a_checkpoint_takes_of_a_node_worked_by_hand():
    dense, experts = 1_797_824_064, 19_116_933_120
    four = loaded("20b").config  # data 4, expert 4, all on one node: what is copied is what lies on the disk afterwards
    assert checkpoint_per_node(four) == 14 * (dense + experts) == checkpoint_bytes(four)
    # Over two nodes the second one's copy is smaller: it writes no dense weights.
    eight = changed_config(four, {"parallel.data": 8, "parallel.expert": 8, "cluster.gpus_per_node": 4})
    assert checkpoint_per_node(eight) == 2 * (dense + experts // 2) + 12 * (dense + experts) // 2
    assert checkpoint_per_node(changed_config(four, {"trainer.optimizer_states": "bfloat16"})) == 10 * (dense + experts)
    nothing = changed_config(four, {"run.save_every": 0, "run.save_at_end": False})
    assert checkpoint_per_node(nothing) == host_bytes_per_node(nothing) == 0

    # While training waits, each rank has one tensor on its way: a quarter of the embedding's float32 original is smaller than its weights.
    waits = changed_config(four, {"run.save_in_background": False})
    assert checkpoint_per_node(waits) == 4 * 4 * min(201088 * 2880, dense // 4)
    # Of two ranks each has a half of every dense parameter, whose part on the host is copied out of its place; experts are a rank's alone.
    two = changed_config(waits, {"parallel.data": 2, "parallel.expert": 2, "trainer.optimizer_offload": 0.75})
    assert checkpoint_per_node(two) == 2 * (4 * 201088 * 2880 + 12 * (dense // 2) * 3 // 4)
    # A critic is saved besides, with a value head in place of the output layer.
    critic = changed_config(four, {"rl.advantage": "gae"})
    above = checkpoint_per_node(critic) - checkpoint_bytes(critic)
    assert checkpoint_bytes(critic) > 27 * (dense + experts) and 0 <= above < 4 * 12  # its odd number of parameters, over four ranks


# ---- what does not fit --------------------------------------------------------------------------------------------------------------

TOO_LARGE = [
    ("20b", "--trainer.recompute=none"),
    ("20b", "--parallel.data=2", "--parallel.expert=2"),
    ("20b", "--parallel.data=2", "--parallel.expert=2", "--trainer.experts=loop", "--trainer.attention=reference"),
    ("20b", "--rollout.max_sequence_tokens=65536", "--trainer.tokens_per_microbatch=65536"),
    ("20b", "--cluster.share_gpus=true"),
    ("120b", "--parallel.data=8", "--parallel.expert=8"),
    ("120b", "--parallel.data=16", "--parallel.expert=16"),
    ("120b", "--parallel.data=8", "--parallel.expert=8", "--trainer.optimizer_offload=1.0", "--cluster.host_memory_gib=1000.0"),
    ("20b", "--cluster.host_memory_gib=256.0"),
    ("20b", "--parallel.data=2", "--parallel.expert=2", "--trainer.optimizer_offload=0.75", "--cluster.host_memory_gib=256.0"),
]


@pytest.mark.parametrize("arguments", TOO_LARGE)
def test_a_plan_that_cannot_fit_names_parts_and_changes_that_do_fit(arguments, monkeypatch):
    monkeypatch.setattr(rules, "NOT_BUILT_YET", {})
    plan = loaded(*arguments)
    assert broken_rules(plan) == [] and not fits(plan.config)
    with pytest.raises(ConfigError) as caught:
        check_memory(plan)
    message = str(caught.value)
    assert "GiB" in message and re.search(r"cluster\.(gpu|host)_memory_gib = ", message)
    found = cures(plan)
    assert found, message
    for cure in found:
        changed = Loaded(changed_config(plan.config, cure), plan.origins)
        assert broken_rules(changed) == [] and fits(changed.config)
        assert all(f"{key} = " in message for key in cure)


def test_a_host_without_room_for_a_checkpoint_is_told_which_key_takes_how_much():
    flags = ("--parallel.data=2", "--parallel.expert=2", "--trainer.optimizer_offload=0.75", "--cluster.host_memory_gib=256.0")
    message = does_not_fit(loaded("20b", *flags))
    assert message.startswith(
        "the ranks of a node need 449.0 GiB of its own memory and cluster.host_memory_gib = 256.0 (flag --cluster.host_memory_gib): "
        "trainer.optimizer_offload = 0.75 (flag --trainer.optimizer_offload) takes 176.3 GiB and a checkpoint that is being written takes "
        "272.7 GiB (run.save_in_background = true (default))."
    ), message
    assert "Would fit: run.save_in_background = false" in message


def test_advice_holds_nothing_that_a_run_would_ignore(monkeypatch):
    monkeypatch.setattr(rules, "NOT_BUILT_YET", {"trainer.recompute": None, "trainer.optimizer_offload": None, "parallel.context": None})
    plan = loaded("20b", "--trainer.recompute=none", "--parallel.data=2", "--parallel.expert=2")
    message = does_not_fit(plan)
    assert "Would fit: parallel.data = " in message
    assert not re.search(r"recompute = \"|optimizer_offload = |context = ", message.split("Would fit")[1])


def test_what_fits_is_not_judged_and_neither_is_a_cpu():
    assert does_not_fit(loaded("20b")) == "" and does_not_fit(loaded("120b")) == ""
    assert does_not_fit(loaded("tiny")) == ""
    assert optimizers_per_node(loaded("20b").config) == 0


def test_an_engine_must_hold_the_model():
    check_engine_memory(loaded("20b"))
    check_engine_memory(loaded("120b"))
    with pytest.raises(
        ConfigError, match=r"needs 218\.2 GiB.*rollout\.gpu_memory_fraction = 0\.85 .*rollout\.tensor_parallel = 2 or more\.$"
    ):
        check_engine_memory(loaded("120b", "--rollout.tensor_parallel=1"))
    with pytest.raises(ConfigError, match=r"Use rollout\.gpu_memory_fraction = 0\.30 or more, or rollout\.tensor_parallel = 2"):
        check_engine_memory(loaded("20b", "--rollout.gpu_memory_fraction=0.2"))
    check_engine_memory(loaded("20b", "--rollout.gpu_memory_fraction=0.3"))


@pytest.mark.parametrize(
    ("arguments", "need", "key", "value", "next_value"),
    [
        # The 120B's largest tensor: 128 experts x 2 x 2880 x 2880 in bf16.
        (("120b",), 2 * 128 * 2 * 2880 * 2880 * 2 / GIB, "rollout.gpu_memory_fraction", 0.94, 0.95),
        (("20b", "--rollout.gpu_kv_cache_gib=90"), 2 * 201_088 * 2880 * 2 / GIB, "rollout.gpu_kv_cache_gib", 98.68, 98.69),
    ],
)
def test_what_an_engine_receives_weights_through_lies_beside_its_share(arguments, need, key, value, next_value):
    assert engine_memory(loaded(*arguments).config)[-1].num_bytes / GIB == need
    check_engine_memory(loaded(*arguments, f"--{key}={value}"))
    with pytest.raises(ConfigError, match=rf"{need:.1f} GiB beside .*{key} = {next_value}.*Use {key} = {value:.2f} or less\.$"):
        check_engine_memory(loaded(*arguments, f"--{key}={next_value}"))


@pytest.mark.parametrize("flags", [["--cluster.share_gpus=true"], ["--rollout.weight_sync=inline"]])
def test_an_engine_that_receives_no_buckets_has_no_room_for_them(flags):
    assert len(engine_memory(loaded("20b", *flags).config)) == 2
    check_engine_memory(loaded("20b", *flags, "--rollout.gpu_memory_fraction=1.0"))
    with pytest.raises(ConfigError, match="two buckets"):
        check_engine_memory(loaded("20b", "--rollout.gpu_memory_fraction=1.0"))


def test_the_layout_of_the_120b_scaled_down_to_four_ranks():
    big, small = loaded("120b").config, loaded("tiny", "scaled").config
    assert small.parallel.data == small.parallel.expert == 4 and big.parallel.data == big.parallel.expert == 32
    assert small.trainer.recompute == big.trainer.recompute
    for flags in (
        ("--parallel.context=2", "--parallel.data=2"),
        ("--parallel.pipeline=2", "--parallel.data=2", "--parallel.expert=2"),
        ("--parallel.tensor=2", "--parallel.data=2"),
    ):
        assert broken_rules(loaded("tiny", "scaled", *flags)) == []


# ---- beside what was measured -------------------------------------------------------------------------------------------------------


def test_prediction_beside_measurement():
    memory = worst_rank(loaded("20b").config)
    rows = predicted_and_measured(memory, PeakMemory(memory.allocated, memory.reserved, round(memory.total / 0.95)))
    assert [value.endswith(percent) for (_, value), percent in zip(rows, ("+0.0 %", "+0.0 %", "-5.0 %"), strict=True)] == [True] * 3
    assert predicted_and_measured(memory, PeakMemory(0, 0, 0))[0][1].endswith("measured 0.0 MiB")
    # After an update an engine that shares the GPU sleeps: its share is no part of what is measured then.
    shared = worst_rank(loaded("small_h200").config)
    assert shared.worst_phase == "engine" and shared.total > shared.while_it_works
    assert predicted_and_measured(shared, PeakMemory(1, 1, shared.while_it_works))[2][1].endswith("+0.0 %")
    resting = PeakMemory(1, 1, 1, reserved_now=round(shared.sum("always") / 0.9))  # what no plan knows of is 10 % of it
    name, words = predicted_and_measured(shared, PeakMemory(1, 1, 1), resting)[3]
    assert name == "kept beside an engine at work" and words.endswith("predicted -10.0 %")


def test_a_run_says_the_fullest_rank_beside_its_own_stage_and_only_once():
    from megatron_gptoss.loop.session import Session

    config = loaded("20b", "--parallel.pipeline=2", "--parallel.data=2", "--parallel.expert=2").config
    peaks = [PeakMemory(1, 1, 1), PeakMemory(1, 1, 1), PeakMemory(5 * GIB, 6 * GIB, 7 * GIB), PeakMemory(2, 2, 2)]
    said: list[tuple[str, list[tuple[str, str]]]] = []
    asked: list[str] = []
    session: Any = SimpleNamespace(
        _memory_shown=False,
        _pool=object(),
        config=config,
        plan=SimpleNamespace(device="cuda", world_size=4, pipeline_parallel=2, shares_gpus=False),
        world=SimpleNamespace(peak_memory=lambda: peaks, free_caches=lambda: asked.append("free_caches")),
        console=SimpleNamespace(table=lambda title, rows: said.append((title, rows))),
    )
    for _ in range(2):
        Session.show_memory(session)
    assert said == [("memory of trainer rank 2", predicted_and_measured(trainer_memory(config)[1], peaks[2]))]
    session._memory_shown, session.plan.device = False, "cpu"
    Session.show_memory(session)
    assert len(said) == 1 and asked == []
    session.plan.device, session.plan.shares_gpus = "cuda", True  # then also what is left when the rank has given back what it can
    Session.show_memory(session)
    assert asked == ["free_caches"] and said[1][1] == predicted_and_measured(trainer_memory(config)[1], peaks[2], peaks[2])
