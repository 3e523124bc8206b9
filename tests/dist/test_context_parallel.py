"""Cutting the stream over ranks changes nothing: output, log-sum-exp and every gradient, by every method, against one rank in float64.

One start of eight gloo processes runs all cases, in groups of 2, 3, 4 and 8 of them; the tests look at what they left behind.
"""

import json
import multiprocessing
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.attention import context, reference
from megatron_gptoss.attention.api import Backend, attend
from megatron_gptoss.attention.context import (
    attend_context,
    bytes_sent_per_layer,
    check_method,
    choose_method,
    merge_,
    rows_seen,
    shard_rows,
    traffic,
)

T, D, WORLD = 48, 4, 8
# A group's ranks differ from the world's. Eight are the whole world.
GROUPS = {2: (6, 7), 3: (1, 4, 5), 4: (1, 3, 5, 7)}
BOUNDS = {
    "one": (0, 48),
    "packed": (0, 1, 2, 13, 24, 24, 30, 36, 37, 48),  # of length 1 and 0, begins at shards' first tokens, inside shards and halos
    "edges": (0, 6, 12, 16, 24, 32, 36, 42, 48),  # every bound begins a shard of some group
    "crossing": (0, 5, 47, 48),  # one sequence through nearly all shards
}


@dataclass(frozen=True)
class Case:
    size: int  # ranks
    method: str
    bounds: str
    heads: tuple[int, int] = (16, 8)
    window: int | None = None
    sinks: bool = True
    uses: str = "out and lse"  # what the loss is made of
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        return f"cp{self.size}-{self.method}{window}-{self.bounds}-{self.heads[0]}:{self.heads[1]}" + ("" if self.sinks else "-sinkless")


def cases() -> list[Case]:
    made = []
    for size in (2, 3, 4, 8):
        for bounds in BOUNDS:
            # Shards have 24, 16, 12 or 6 tokens: halos of no key, one, some, those of 2 to 4 ranks, all that there are.
            made += [Case(size, "halo", bounds, window=window) for window in (1, 2, 5, 20, 100)]
            made += [Case(size, "ring", bounds, (8, 2))]
            made += [Case(size, "ulysses", bounds, (12, 3) if size == 3 else (16, 8))]
            made += [Case(size, "ulysses", bounds, (6, 1) if size == 3 else (8, 2 if size > 2 else 1))]  # several ranks read a kv head
    for size in (2, 3, 4, 8):
        made += [Case(size, "ring", "packed", (8, 2), sinks=False), Case(size, "halo", "packed", (8, 2), window=20, sinks=False)]
        made += [Case(size, "ulysses", "packed", (12, 3) if size == 3 else (16, 8), window=5, sinks=False)]
    for method, window in (("ring", None), ("halo", 5), ("halo", 20), ("ulysses", None)):
        made += [Case(4, method, "crossing", window=window, uses=uses) for uses in ("out", "lse")]
    return made


CASES = cases()
ROUNDED = [Case(2, m, "packed", window=window, dtype=torch.bfloat16) for m, window in (("halo", 5), ("ulysses", None), ("ring", None))]


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """q, k, v of the whole stream in one tensor [T, H + 2K, D]; sinks from -6 to 6; cotangents of output and log-sum-exp."""
    H, K = case.heads
    generator = torch.Generator().manual_seed(H + K)
    qkv, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((T, H + 2 * K, D), (T, H, D), (T, H)))
    sinks = torch.linspace(-6, 6, H, dtype=torch.float64) if case.sinks else None
    return (2 * qkv).to(case.dtype), sinks, dout, dlse


def gradients(case: Case, rows: slice, attention) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one shard, or of all with rows = slice(None). Queries, keys and values are views of one tensor."""
    qkv, sinks, dout, dlse = inputs(case)
    H, K = case.heads
    qkv = qkv[rows].clone().requires_grad_()
    sinks = sinks if sinks is None else sinks.clone().requires_grad_()
    out, lse = attention(*qkv.split((H, K, K), dim=1), sinks, cu_seqlens=torch.tensor(BOUNDS[case.bounds]), window=case.window)
    loss = sum(((x * d[rows]).sum() for name, x, d in (("out", out, dout), ("lse", lse, dlse)) if name in case.uses), torch.tensor(0.0))
    before = traffic.bytes
    loss.backward()
    dq, dk, dv = qkv.grad.split((H, K, K), dim=1)
    found = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    found["bytes"] = torch.tensor(traffic.bytes - before)
    if sinks is not None:
        found["dsink"] = sinks.grad
    return found


def on_shard(case: Case, group) -> dict[str, torch.Tensor]:
    """`gradients` of this rank's shard, and the bytes that were sent forward and backward, as counted there and as counted here."""
    handed.clear()
    start = traffic.bytes

    def attention(*tensors, **options):
        result = attend_context(*tensors, group=group, method=case.method, **options)
        forward.append(traffic.bytes - start)
        return result

    forward: list[int] = []
    found = gradients(case, shard_rows(T, group.rank(), group.size()), attention)
    return {**found, "bytes": torch.tensor([*forward, int(found["bytes"])]), "handed": torch.tensor(sum(handed))}


handed: list[int] = []  # bytes that left for other ranks, seen where torch.distributed takes them


def watch_transport() -> None:
    batch, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def watched_batch(operations):
        handed.extend(p.tensor.numel() * p.tensor.element_size() for p in operations if p.op is dist.isend)
        return batch(operations)

    def watched_all_to_all(received, sent, group, async_op):
        handed.append(sent.numel() * sent.element_size() * (group.size() - 1) // group.size())
        return all_to_all(received, sent, group=group, async_op=async_op)

    dist.batch_isend_irecv, dist.all_to_all_single = watched_batch, watched_all_to_all


def rank_of_eight(rank: int, folder: str) -> None:
    """All cases of the groups that this rank belongs to, into one file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    groups = {size: dist.new_group(list(ranks)) for size, ranks in GROUPS.items()} | {8: dist.group.WORLD}
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    watch_transport()
    found: dict[str, object] = {}
    for case in CASES + ROUNDED:
        if case.size == WORLD or rank in GROUPS[case.size]:
            found[repr(case)] = on_shard(case, groups[case.size])
    if rank in GROUPS[4]:
        case = Case(4, "ring", "one", (8, 2))
        find_backend = context.find_backend
        context.find_backend = lambda *_, **__: Backend("sink in every part", SinkEverywhere(case), reference.backward)
        found["sink in every part"] = on_shard(case, groups[4])
        context.find_backend = find_backend
        found["errors"] = errors(groups[4])
        twice = (case, Case(4, "halo", "crossing", window=20), Case(4, "ulysses", "one", (8, 2)))
        found["again"] = [same_bits(case, groups[4]) for case in twice]
    if rank == 0:
        found["alone"] = on_shard(Case(1, "ulysses", "packed"), alone)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class SinkEverywhere:
    """A wrong ring's forward pass: every part has the sinks in its denominator."""

    def __init__(self, case: Case) -> None:
        self.sinks = inputs(case)[1]

    def __call__(self, q, k, v, _sinks, *rest):
        return reference.forward(q, k, v, self.sinks, *rest)


def same_bits(case: Case, group) -> bool:
    once, again = on_shard(case, group), on_shard(case, group)
    return all(torch.equal(once[name], again[name]) for name in once)


WRONG = {
    "no equal shards": ({"cu_seqlens": torch.tensor([0, 21])}, "T = 21 packed tokens cannot be cut into 4 equal shards .*CP = 4.*20 or 24"),
    "shard's bounds": ({"cu_seqlens": torch.tensor([0, 8])}, "T = 8, so each of CP = 4 ranks holds 2 tokens, and q_THD of rank . has 5"),
    "unsorted bounds": ({"cu_seqlens": torch.tensor([0, 9, 3, 20])}, "decreases"),
    "unknown method": ({"method": "zigzag"}, "'zigzag' is unknown; one of halo, ulysses, ring"),
    "halo without window": ({"method": "halo"}, "no window"),
    "ring with window": ({"method": "ring", "window": 5}, "window = 5; use 'halo'"),
    "te with a halo": ({"backend": "te", "window": 5}, "'te' cannot put other ranks' keys in front, as method = 'halo' does"),
    "ulysses without heads": ({"method": "ulysses"}, "6 query heads over 3 kv heads out to 4 ranks. Numbers .* work: 1, 3, 6; 'ring'"),
}


def errors(group) -> dict[str, str]:
    """What the front door says to wrong arguments; every rank says it, before anything is sent."""
    said = {}
    for name, (options, _) in WRONG.items():
        handed.clear()
        try:
            attend_context(torch.zeros(5, 6, D), torch.zeros(5, 3, D), torch.zeros(5, 3, D), None, group=group, **options)
        except ValueError as error:
            said[name] = str(error) if not handed else f"after sending {handed}: {error}"
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["megatron_gptoss.attention.context", "hypothesis"])  # imported once, not eight times
    mp.start_processes(rank_of_eight, args=(str(folder),), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def shards(ranks, case: Case) -> list[dict[str, torch.Tensor]]:
    return [ranks[r][repr(case)] for r in GROUPS.get(case.size, range(WORLD))]


def whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of all ranks in order; the sinks' gradient is the sum."""
    found = {name: torch.cat([part[name] for part in parts]) for name in ("out", "lse", "dq", "dk", "dv")}
    if "dsink" in parts[0]:
        found["dsink"] = torch.stack([part["dsink"] for part in parts]).sum(0)
    return found


def one_rank(case: Case) -> dict[str, torch.Tensor]:
    found = gradients(case, slice(None), attend)
    found.pop("bytes")
    return found


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_rank(ranks, case):
    found, expected = whole(shards(ranks, case)), one_rank(case)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert x.abs().max() > 1e-3 or (case.uses == "lse" and name == "dv"), f"{name} would not show a difference"
        assert worst(found[name], x) < 1e-12, name


def test_a_sink_counted_in_every_part_would_be_seen(ranks):
    case = Case(4, "ring", "one", (8, 2))
    found, expected = whole([ranks[r]["sink in every part"] for r in GROUPS[4]]), one_rank(case)
    assert all(worst(found[name], expected[name]) > 1e-2 for name in expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.sinks], ids=str)
def test_each_rank_returns_its_own_part_of_the_sinks_gradient(ranks, case):
    """ulysses: the whole of its own heads and nothing else; halo and ring: -sum over its own queries of exp(sink - lse) (dO . O - dlse)."""
    _, sinks, dout, dlse = inputs(case)
    expected = one_rank(case)
    for rank, part in enumerate(shards(ranks, case)):
        if case.method == "ulysses":
            own = shard_rows(case.heads[0], rank, case.size)
            mine_H = torch.zeros_like(sinks)
            mine_H[own] = expected["dsink"][own]
        else:
            delta_TH = (dout * expected["out"]).sum(-1) * ("out" in case.uses) - dlse * ("lse" in case.uses)
            mine_H = -(torch.exp(sinks - expected["lse"]) * delta_TH)[shard_rows(T, rank, case.size)].sum(0)
        assert worst(part["dsink"], mine_H) < 1e-12


@pytest.mark.parametrize("case", CASES + ROUNDED, ids=str)
def test_bytes_on_the_way_are_those_of_the_formula(ranks, case):
    H, K = case.heads
    for rank, part in enumerate(shards(ranks, case)):
        expected = bytes_sent_per_layer(
            case.method, rank=rank, size=case.size, bounds=BOUNDS[case.bounds], num_heads=H, num_kv_heads=K, head_dim=D,
            itemsize=case.dtype.itemsize, window=case.window, uses_lse="lse" in case.uses,
        )  # fmt: skip
        if case.uses == "lse" and case.method == "ulysses":
            continue  # the output has no cotangent to send; the formula is that of training, where it has
        assert part["bytes"].tolist() == [expected.forward, expected.backward]
        assert part["handed"] == expected.forward + expected.backward


@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_bfloat16_is_as_near_to_the_truth_as_on_one_rank(ranks, case):
    """Twice the error of one rank, and one rounding: parts and halo gradients are rounded before they are added."""
    qkv = inputs(case)[0]
    exact = gradients(case, slice(None), lambda *x, **o: attend(*(None if y is None else y.double() for y in x), **o))
    assert exact["out"].dtype == torch.float64 and qkv.dtype == torch.bfloat16
    found, single = whole(shards(ranks, case)), one_rank(case)
    for name, x in single.items():
        assert worst(found[name].double(), exact[name]) <= 2 * worst(x.double(), exact[name]) + torch.finfo(torch.bfloat16).eps / 2, name


def test_a_group_of_one_is_attend_bit_for_bit(ranks):
    found, expected = ranks[0]["alone"], one_rank(Case(1, "ulysses", "packed"))
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert found["bytes"].tolist() == [0, 0]


def test_the_same_bits_twice(ranks):
    assert all(ranks[r]["again"] == [True] * 3 for r in GROUPS[4])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_on_every_rank_before_anything_is_sent(ranks, name):
    for rank in GROUPS[4]:
        assert re.search(WRONG[name][1], ranks[rank]["errors"][name]), ranks[rank]["errors"].get(name)


def test_the_bench_runs_counts_and_checks(tmp_path):
    sizes = ["--tokens=64", "--sequences=3", "--check-tokens=60", "--full-layers=1", "--windowed-layers=1", "--repeats=1", "--warm-ups=0"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tools/bench_context.py"]
    ended = subprocess.run(
        [*launch, "--device=cpu", *sizes, f"--json={tmp_path}/bench.json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["checked"] and [row["method"] for row in found["rows"]] == ["ulysses", "halo", "ulysses + halo"]
    full, windowed, both = (row["counted"] for row in found["rows"])
    # A rank's 32 tokens of 8/2 heads of 8 in float32: half of q, k, v, out and lse. The sequence that crosses ranks begins at token 21.
    assert full == {"forward": 32 * (8 + 4 + 8) * 8 * 4 // 2 + 32 * 8 * 4 // 2, "backward": 32 * (8 + 4 + 8) * 8 * 4 // 2}
    assert windowed["forward"] == windowed["backward"] == (32 - 21) * 2 * 2 * 8 * 4
    assert both == {way: full[way] + windowed[way] for way in full}


# --- Without ranks ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_exactly_the_keys_that_somebody_sees_are_sent(data):
    size, length = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 7))
    total = size * length
    inner = data.draw(st.lists(st.integers(0, total), max_size=6))
    bounds = (0, *sorted(inner), total)
    window = data.draw(st.none() | st.integers(1, total + 2))
    sequence = [s for s, (begin, end) in enumerate(pairwise(bounds)) for _ in range(begin, end)]
    for reader in range(1, size):
        for owner in range(reader):
            queries, keys = (range(total)[shard_rows(total, rank, size)] for rank in (reader, owner))
            seen = {k for q in queries for k in keys if sequence[k] == sequence[q] and (window is None or q - k < window)}
            assert sorted(seen) == list(keys)[length - rows_seen(bounds, length, window, owner, reader) :]


def test_the_rule_for_methods():
    assert choose_method(64, 8, 4, window=128) == "halo"
    assert [choose_method(64, 8, size, None) for size in (2, 3, 4, 5, 6, 8, 16, 24, 64)] == [
        "ulysses", "ring", "ulysses", "ring", "ring", "ulysses", "ulysses", "ring", "ulysses",
    ]  # fmt: skip
    assert choose_method(8, 1, 8, None) == "ulysses" and choose_method(8, 1, 3, None) == "ring"
    for size in range(1, 20):
        for window in (None, 128):
            check_method(choose_method(64, 8, size, window), 64, 8, size, window)


def test_bytes_of_a_layer_worked_by_hand():
    """GPT-OSS-120B, 131,072 tokens over 8 ranks in bfloat16: 2,048 bytes of k and v a token, 8,192 of q."""
    layer = {"size": 8, "bounds": (0, 131_072), "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "itemsize": 2}
    halo = bytes_sent_per_layer("halo", rank=3, window=128, **layer)
    assert (halo.forward, halo.backward) == (127 * 2048, 127 * 2048)
    ring = bytes_sent_per_layer("ring", rank=0, **layer)
    assert (ring.forward, ring.backward) == (7 * 16_384 * 2048, 7 * 16_384 * 2048)
    ring = bytes_sent_per_layer("ring", rank=7, **layer)
    assert (ring.forward, ring.backward) == (0, 7 * 16_384 * 2048)
    ulysses = bytes_sent_per_layer("ulysses", rank=3, **layer)
    seven_eighths = 7 * 16_384 // 8
    assert ulysses.forward == seven_eighths * (8192 + 2048 + 8192 + 64 * 4)
    assert ulysses.backward == seven_eighths * (8192 + 8192 + 2048)


def test_merging_over_keys_in_any_split_is_attention_over_all_of_them():
    """Also where one side, or both, see nothing."""
    generator = torch.Generator().manual_seed(0)
    score_NM, value_MD = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 9), (9, D)))
    score_NM[1, :4] = score_NM[2, 4:] = score_NM[3] = -torch.inf

    def part(keys):
        lse_N = score_NM[:, keys].logsumexp(-1)
        weight_NM = torch.exp(score_NM[:, keys] - lse_N[:, None]).nan_to_num(0.0)
        return (weight_NM @ value_MD[keys]).unsqueeze(1), lse_N.unsqueeze(1)

    out, lse = part(slice(0, 4))
    merge_(out, lse, *part(slice(4, 9)))
    expected_out, expected_lse = part(slice(0, 9))
    torch.testing.assert_close(out, expected_out, atol=1e-14, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-14, rtol=0)
