"""Laws of placement: a GPU is given once, ranks fill whole nodes in order, engines follow; a plan too big for its nodes says so."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.placement import Place, place, same_gpu
from megatron_gptoss.config.plan import Cluster, make_plan
from megatron_gptoss.loop.nodes import too_few_gpus

CONFIGS = Path(__file__).parents[2] / "configs"


def placed(*arguments: str):
    return place(load(*parse_flags(list(arguments))).config)


@given(ranks=st.integers(1, 40), engines=st.integers(1, 40), per_node=st.integers(1, 8))
def test_no_node_gets_more_than_its_gpus_and_none_is_skipped(ranks, engines, per_node):
    p = placed(
        "--cluster.device=cuda", "--cluster.address=auto", f"--cluster.gpus_per_node={per_node}", f"--parallel.data={ranks}",
        f"--rollout.num_engines={engines}",
    )  # fmt: skip
    counts = Counter(p.trainer + p.engines)
    assert all(counts[node] == per_node for node in range(p.num_nodes - 1)), "all nodes but the last are full"
    assert 0 < counts[p.num_nodes - 1] <= per_node
    assert list(p.trainer + p.engines) == sorted(p.trainer + p.engines), "in order: neighbours share a node"


@given(ranks=st.integers(1, 40), engines=st.integers(1, 20), size=st.sampled_from([1, 2, 4, 8]), shared=st.booleans())
def test_an_engine_s_gpus_lie_on_one_node_and_nobody_is_left_out(ranks, engines, size, shared):
    engines = min(engines, ranks // size) if shared else engines
    if engines == 0:
        return
    p = placed(
        "--cluster.device=cuda", "--cluster.address=auto", f"--parallel.data={ranks}", f"--rollout.num_engines={engines}",
        f"--rollout.tensor_parallel={size}", f"--cluster.share_gpus={str(shared).lower()}",
    )  # fmt: skip
    counts = Counter(p.gpu_nodes(with_engines=True))
    assert max(counts.values()) <= 8 and sum(counts.values()) == ranks + (0 if shared else engines * size)
    if shared:
        taken = [rank for own in p.engine_ranks for rank in own]
        assert taken == list(range(engines * size)), "each rank's GPU at most once, in order"
        assert all({p.trainer[rank] for rank in own} == {node} for own, node in zip(p.engine_ranks, p.engines, strict=True))
    else:
        assert p.engine_ranks == ()
        full = p.num_nodes * 8 - (8 - counts[p.num_nodes - 1])
        assert full - sum(counts.values()) == p.gpus_left_idle < size, "idle are at most the few before the first engine that moved on"


def test_gpus_that_are_too_few_for_an_engine_are_counted_and_named():
    flags = [
        "--cluster.device=cuda",
        "--cluster.address=auto",
        "--parallel.data=6",
        "--rollout.num_engines=2",
        "--rollout.tensor_parallel=4",
    ]
    assert placed(*flags).engines == (1, 1)
    made = make_plan(load(*parse_flags([*flags, "--cluster.nodes=1"])), Cluster(2, 0))
    assert "2 engines of rollout.tensor_parallel = 4 need 16 GPUs (2 of them idle" in made.shortfall
    assert make_plan(load(*parse_flags([*flags, "--cluster.nodes=2"])), Cluster(2, 0)).shortfall == ""


def test_two_nodes_without_gpus_give_the_engine_the_second():
    p = placed(str(CONFIGS / "tiny.toml"), "--cluster.address=auto", "--cluster.nodes=2", "--parallel.data=2")
    assert (p.trainer, p.engines) == ((0, 0), (1,))
    three = placed(str(CONFIGS / "tiny.toml"), "--cluster.address=auto", "--cluster.nodes=3", "--rollout.num_engines=3")
    assert three.engines == (1, 2, 1)
    assert placed(str(CONFIGS / "tiny.toml")).engines == (0,)


def test_a_job_with_too_few_nodes_is_short_of_gpus():
    files = [str(CONFIGS / "120b.toml")]  # 32 ranks and 2 engines of 4
    for nodes, short in ((4, True), (5, False), (0, False)):
        loaded = load(*parse_flags([*files, f"--cluster.nodes={nodes}"]))
        made = make_plan(loaded, Cluster(2, 0))
        assert bool(made.shortfall) == short, nodes
    made = make_plan(load(*parse_flags([*files, "--cluster.nodes=4"])), Cluster(2, 0))
    assert "need 40 GPUs, cluster.nodes = 4 of cluster.gpus_per_node = 8 have 32" in made.shortfall


def test_nodes_with_fewer_gpus_than_planned_are_named():
    wanted = (0,) * 8 + (1,) * 4
    assert too_few_gpus([("node1", 8), ("node2", 4)], wanted) == ""
    assert "node1 has 4 of 8; node2 has 0 of 4" in too_few_gpus([("node1", 4), ("node2", 0)], wanted)


def test_two_on_one_gpu_are_named_and_two_on_a_cpu_are_none():
    a, b = Place("trainer rank 0", "node1", 1, ("GPU-a",)), Place("engine-0", "node1", 2, ("GPU-b", "GPU-a"))
    assert "trainer rank 0 (node1) and engine-0 (node1) on GPU-a" in same_gpu([a, b])
    assert same_gpu([a, Place("engine-0", "node1", 2, ("GPU-b",))]) == ""
    assert same_gpu([Place("trainer rank 0", "node1", 1, ()), Place("engine-0", "node1", 2, ())]) == ""
