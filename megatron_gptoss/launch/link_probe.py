"""How fast do GPUs and nodes reach each other, and does what is sent arrive? NCCL between GPUs; between CPUs Gloo, two processes a node.

    python -m megatron_gptoss.launch.link_probe '{"device": "cuda", "ranks": 8, "hosts": ["node1", "node2"], "me": "node2",
                                                 "meet": "10.0.0.1:29499", "fit": true, "patience_s": 90}'

In: the above, called at once on each host; the first host keeps the meeting point. Out: one JSON object on stdout, whole on the first host:
who came, GB/s one way of each pair of ranks of a host and of each pair of hosts (all their ranks at once, both ways at once), and of an
all-reduce over everybody (its bus bandwidth, as NCCL's own tests count it). A host that is not fit, or does not come in time, is named and
left out. It judges no speed (node_checks.py does). No network but that between the hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

GPU_BYTES, CPU_BYTES = 2**28, 2**24
REPEATS = 5
START_S, MEASURE_S = 60, 60  # until all ranks of the world are there; until all is measured


Rank = list[Any]  # [host, its number there], as JSON has it


@dataclass(frozen=True)
class Order:
    device: str  # "cpu" | "cuda"
    ranks: int  # of this host
    hosts: list[str]
    me: str
    meet: str  # address:port; port 0 with a single host: any
    fit: bool = True  # an unfit host comes only to say so
    patience_s: float = 60.0
    world: list[Rank] | None = None  # of a rank: every (host, its own number there)
    rank: int = 0


# ---- a host -------------------------------------------------------------------------------------------------------------------------


def of_host(order: Order) -> dict[str, Any]:
    """Meets the other hosts, starts this one's ranks, and on the first host gathers what all have found."""
    address, _, port = order.meet.rpartition(":")
    first = order.me == order.hosts[0]
    try:
        store = TCPStore(
            address, int(port), is_master=first, wait_for_workers=False, timeout=timedelta(seconds=order.patience_s)
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        return {"error": f"no meeting at {order.meet}, seen from {order.me}: {_line(error)}"}
    store.set(f"came/{order.me}", json.dumps({"ranks": order.ranks if order.fit else 0}))
    try:
        world, missing, unfit = _agree(store, order) if first else json.loads(store.get("world"))
        store.set(f"knows/{order.me}", "")
    except (RuntimeError, OSError) as error:
        return {"error": f"{order.hosts[0]} did not say who takes part: {_line(error)}"}
    found: dict[str, Any] = {"missing": missing, "unfit": unfit, "hosts": [host for host, local in world if local == 0]}
    found |= {"pairs": [], "between": [], "together": None}
    if len(world) < 2 or not order.fit:
        if first:
            _until_all_know(store, [host for host in order.hosts if host not in missing])
        return found
    mine = [rank for rank, (host, _) in enumerate(world) if host == order.me]
    meet = f"{address}:{store.port}"
    processes = [_start(replace(order, world=world, rank=rank, meet=meet)) for rank in mine]
    errors = _end(processes, time.monotonic() + START_S + MEASURE_S)
    if errors:
        found["error"] = f"{order.me}: {errors[0]}"
    if not first:
        store.set(f"done/{order.me}", found.get("error", ""))
        return found
    problems = [found["error"]] if errors else []
    for host in found["hosts"][1:]:
        try:
            problems += [words] if (words := store.get(f"done/{host}").decode()) else []
        except (RuntimeError, OSError):
            problems.append(f"{host}: did not end")
    results = [json.loads(store.get(f"found/{rank}")) for rank in range(len(world)) if store.check([f"found/{rank}"])]
    late = [f"{host} rank {local}" for rank, (host, local) in enumerate(world) if not store.check([f"joined/{rank}"])]
    return found | gather(world, results) | ({"error": "; ".join(problems), "late": late} if problems else {})


def _agree(store: TCPStore, order: Order) -> tuple[list[Rank], list[str], list[str]]:
    """Ranks of the hosts that came and are fit, those that are missing, and those that came unfit; told to everybody."""
    deadline = time.monotonic() + order.patience_s
    while (missing := [h for h in order.hosts if not store.check([f"came/{h}"])]) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = {h: json.loads(store.get(f"came/{h}"))["ranks"] for h in order.hosts if h not in missing}
    world = [[host, local] for host, count in ranks.items() for local in range(count)]
    unfit = [host for host, count in ranks.items() if not count]
    store.set("world", json.dumps([world, missing, unfit]))
    return world, missing, unfit


def _until_all_know(store: TCPStore, hosts: list[str]) -> None:
    """The meeting point ends with the first host, so it waits for those who have yet to hear that there is nothing to do."""
    deadline = time.monotonic() + 10
    while not store.check([f"knows/{host}" for host in hosts]) and time.monotonic() < deadline:
        time.sleep(0.1)


def _start(order: Order) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_gptoss.launch.link_probe", json.dumps(asdict(order))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _end(processes: list[subprocess.Popen[str]], deadline: float) -> list[str]:
    """What ranks died of, those that NCCL's own timeout ended last: the first is the cause."""
    errors = []
    for number, process in enumerate(processes):
        try:
            _, words = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors.append(f"rank {number} did not end in time")
            continue
        if process.returncode:
            last = next((line for line in reversed(words.splitlines()) if "rror" in line), f"exit code {process.returncode}")
            errors.append(f"rank {number}: {last.strip()[:300]}")
    return sorted(errors, key=lambda words: "time" in words.lower())


def gather(world: list[Rank], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Ranks' figures as those of pairs of ranks of one host, of pairs of hosts (sums over ranks), and of all together."""
    pairs, between, wrong = [], {}, []
    for result in results:
        (host, local), rank = world[result["rank"]], result["rank"]
        for peer, speed, right in result["pairs"]:
            there, other = world[peer]
            if not right:
                wrong.append(f"{there}:{other} to {host}:{local}")
            if there == host:
                pairs.append({"host": host, "from": other, "to": local, "gb_per_s": speed})
            else:
                between[there, host] = between.get((there, host), 0.0) + speed
        if not result["together"]["right"]:
            wrong.append(f"the sum over all on {host}:{local} (rank {rank})")
    speeds = [result["together"]["gb_per_s"] for result in results]
    return {
        "pairs": pairs,
        "between": [{"from": a, "to": b, "gb_per_s": speed} for (a, b), speed in between.items()],
        "together": min(speeds) if len(speeds) == len(world) else None,
        "wrong": wrong,
    }


# ---- a rank -------------------------------------------------------------------------------------------------------------------------


def of_rank(order: Order) -> None:
    assert order.world is not None
    on_gpu, local = order.device == "cuda", order.world[order.rank][1]
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    address, _, port = order.meet.rpartition(":")
    store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=START_S))
    store.set(f"joined/{order.rank}", "")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=order.rank,
        world_size=len(order.world),
        timeout=timedelta(seconds=MEASURE_S),
        device_id=device if on_gpu else None,  # the communicator is made now, and pairs use it too
    )
    together = all_reduce(order.rank, len(order.world), device)
    pairs = [(peer, *exchange(order.rank, peer, device)) for peer in peers(order.world, order.rank)]
    store.set(f"found/{order.rank}", json.dumps({"rank": order.rank, "pairs": pairs, "together": together}))
    dist.barrier()
    dist.destroy_process_group()


def peers(world: list[Rank], rank: int) -> Iterator[int]:
    """With whom a rank measures, in order: all ranks of its own host, then the one of its own number on each other host. In every round of
    either each rank (each host) has one peer, so that nobody waits for a busy one."""
    host, local = world[rank]
    number = {tuple(place): n for n, place in enumerate(world)}
    count = sum(h == host for h, _ in world)
    for other in opponents(local, count):
        yield number[host, other]
    hosts = list(dict.fromkeys(h for h, _ in world))
    for other in opponents(hosts.index(host), len(hosts)):
        if (hosts[other], local) in number:
            yield number[hosts[other], local]


def opponents(me: int, count: int) -> list[int]:
    """Everybody else, one a round, so that in each round all are paired (one has a rest where `count` is odd): round r pairs those whose
    numbers add up to r, and the last one with whoever that leaves alone."""
    size = count + count % 2
    met = []
    for r in range(size - 1):
        if me == size - 1:
            other = next(x for x in range(size - 1) if 2 * x % (size - 1) == r)
        else:
            other = (r - me) % (size - 1)
            other = size - 1 if other == me else other
        if other < count:
            met.append(other)
    return met


def exchange(rank: int, peer: int, device: torch.device) -> tuple[float, bool]:
    """GB/s one way while as much goes the other way, and whether what came is what was sent."""
    mine = torch.full((GPU_BYTES if device.type == "cuda" else CPU_BYTES,), rank % 251, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    seconds = _timed(lambda: _swap(mine, theirs, peer), device)
    return mine.numel() / seconds / 1e9, bool((theirs == peer % 251).all())


def _swap(mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()


def all_reduce(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Bus bandwidth in GB/s: bytes / seconds * 2 (n - 1) / n. Whole numbers, so that the sum is exact in any order."""
    numbers = torch.full(((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4,), float(rank + 1), device=device)
    total = numbers.clone()
    dist.all_reduce(total)
    right = bool((total == size * (size + 1) / 2).all())
    seconds = _timed(lambda: dist.all_reduce(numbers.fill_(1.0)), device)
    return {"gb_per_s": numbers.numel() * 4 / seconds * 2 * (size - 1) / size / 1e9, "right": right and bool((numbers == size).all())}


def _timed(work: Any, device: torch.device) -> float:
    """Seconds of one, after one that is not counted: it opens connections."""
    work()
    _wait(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    _wait(device)
    return (time.perf_counter() - start) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def main(text: str) -> None:
    order = Order(**json.loads(text))
    if len(order.hosts) == 1:  # all traffic stays in the host, whatever its name stands for
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if order.world is not None:
        of_rank(order)
    else:
        print(json.dumps(of_host(order)))


if __name__ == "__main__":
    main(sys.argv[1])
