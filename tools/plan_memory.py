"""The tables of docs/memory.md: what GPT-OSS takes on a rank, part by part, and the 120B on 2 to 16 nodes.

    python tools/plan_memory.py            print them
    python tools/plan_memory.py --write    put them into docs/memory.md, between its marks

Arithmetic over config/rank_memory.py, nothing is measured and nothing started.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megatron_gptoss.config.fit import changed_config, fits
from megatron_gptoss.config.host_memory import checkpoint_per_node, optimizers_per_node
from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.load import Loaded, load
from megatron_gptoss.config.rank_memory import GIB, RankMemory, worst_rank
from megatron_gptoss.config.rules import broken_rules, divisors
from megatron_gptoss.config.schema import Config

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- tools/plan_memory.py writes from here -->\n", "<!-- to here -->\n"

NODES, LENGTHS = (2, 4, 8, 16), (8192, 24576)
MOST_NODES = 16
SMALLEST_PACK = 16384  # tokens of a microbatch at least
ROOM = 0.95  # of a GPU: a plan of these tables keeps a twentieth free, since none of them was run
SHARED_FRACTION = 0.3  # of a GPU: an eighth of 217.6 GiB of bf16 weights, 10 GiB of keys and values, 4.5 for the rest


TWO_GPUS = {"parallel.data": 2, "parallel.expert": 2, "trainer.optimizer_offload": 0.75}  # the plan that `gptoss plan` tells them first


@dataclass(frozen=True)
class Found:
    config: Config
    rank: RankMemory

    def part(self, name: str) -> int:
        return sum(part.num_bytes for part in self.rank.at_the_peak() if part.name.split(" (")[0] == name)


def tables() -> str:
    return "\n".join([_parts(), _nodes(), _smallest()])


# ---- every part of some plans -------------------------------------------------------------------------------------------------------


def _parts() -> str:
    plans = {
        "20B, 2 GPUs": changed_config(_config("20b"), TWO_GPUS),
        "20B, 2 GPUs, one sequence of 65,536": changed_config(
            _config("20b"),
            TWO_GPUS
            | {"parallel.data": 1, "parallel.context": 2, "trainer.recompute": "full"}
            | {"rollout.max_sequence_tokens": 65536, "trainer.tokens_per_microbatch": 65536},
        ),
        "20B, 4 GPUs (20b.toml)": _config("20b"),
        "20B, 8 GPUs": changed_config(_config("20b"), {"parallel.data": 8, "parallel.expert": 8, "trainer.recompute": "none"}),
        "120B, 32 GPUs (120b.toml)": _config("120b"),
    }
    memories = {name: worst_rank(config) for name, config in plans.items()}
    names: dict[str, str] = {}  # part -> moment, in order of first appearance
    for memory in memories.values():
        for part in memory.parts:
            names.setdefault(part.name, part.phase)
        for part in memory.overhead:
            names.setdefault(part.name, "beside")
    rows = []
    for name, phase in names.items():
        sizes = [next((p.num_bytes for p in (*m.parts, *m.overhead) if p.name == name), 0) for m in memories.values()]
        rows.append([name, phase, *map(_gib, sizes)])
    rows.append(["**tensors at the worst moment**", "", *(f"**{_gib(m.allocated)}** ({m.worst_phase})" for m in memories.values())])
    rows.append(["**in all, of 139.8**", "", *(f"**{_gib(m.total)}**" for m in memories.values())])
    rows.append(["host, a node: optimizers", "", *(_gib(optimizers_per_node(c)) for c in plans.values())])
    rows.append(["host, a node: a checkpoint's copy", "", *(_gib(checkpoint_per_node(c)) for c in plans.values())])
    title = "### Every part of five plans, GiB on the worst rank\n"
    return title + "\n" + _table(["part", "when", *plans], rows)


# ---- the 120B on so many nodes ------------------------------------------------------------------------------------------------------


def _nodes() -> str:
    rows = []
    for nodes, length in product(NODES, LENGTHS):
        found = search(nodes, length)
        rows.append([str(nodes), f"{length:,}", *(_row(found) if found else ["does not fit", *[""] * 10])])
    head = ["nodes", "tokens of a sequence", *ROW]
    title = "### 120B: a trainer on 2, 4, 8 and 16 nodes of 8 H200s, GiB on the worst rank\n"
    return title + "\n" + _table(head, rows)


ROW = [
    "layout", "recompute", "optimizer", "weights", "gradients", "optimizer state", "activations kept", "the rest", "in all",
    "worst moment", "host, a node: optimizers + a checkpoint's copy",
]  # fmt: skip


def _row(found: Found) -> list[str]:
    c, p = found.config, found.config.parallel
    degrees = {"tensor": p.tensor, "context": p.context, "pipeline": p.pipeline, "data": p.data, "expert": p.expert}
    layout = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    states = {"float32": "fp32", "bfloat16": "bf16 moments"}[c.trainer.optimizer_states]
    offload = f", {c.trainer.optimizer_offload:.0%} on the host" if c.trainer.optimizer_offload else ""
    known = [found.part(name) for name in ("weights", "gradients", "optimizer", "activations kept")]
    rest = found.rank.total - sum(known)
    sizes = [
        *map(_gib, known),
        _gib(rest),
        f"**{_gib(found.rank.total)}**",
        found.rank.worst_phase,
        f"{_gib(optimizers_per_node(c))} + {_gib(checkpoint_per_node(c))}",
    ]
    return [layout, c.trainer.recompute, states + offload, *sizes]


def search(nodes: int, length: int, *, shared: bool = False, offload: bool = True) -> Found | None:
    """The plan that fits and costs least by a rough order: nothing on the host, simple layouts, little recomputation, few expert ranks."""
    for config in _plans(nodes, length, shared, offload):
        if not broken_rules(Loaded(config, load().origins)) and fits(config):
            return Found(config, worst_rank(config))
    return None


def _plans(nodes: int, length: int, shared: bool, offload: bool) -> Iterator[Config]:
    base, ranks = _config("120b"), nodes * 8
    base = changed_config(
        base,
        {
            "rollout.max_sequence_tokens": length,
            "trainer.tokens_per_microbatch": max(length, SMALLEST_PACK),
            "sft.sequences_per_step": 256,
            "cluster.gpu_memory_gib": ROOM * base.cluster.gpu_memory_gib,
            "cluster.share_gpus": shared,
            "rollout.gpu_memory_fraction": SHARED_FRACTION if shared else base.rollout.gpu_memory_fraction,
        },
    )
    shares = (0.0, 0.25, 0.5, 0.75, 1.0) if offload else (0.0,)
    for share, pipeline, context, recompute in product(shares, (1, 2, 3, 4), (1, 2, 4), ("none", "selective", "full")):
        data, over = divmod(ranks, pipeline * context)
        if over or not data:
            continue
        for expert in divisors(base.model.num_local_experts):
            if expert < 8 or data * context % expert:
                continue
            yield changed_config(
                base,
                {
                    "parallel.data": data,
                    "parallel.context": context,
                    "parallel.pipeline": pipeline,
                    "parallel.expert": expert,
                    "trainer.recompute": recompute,
                    "trainer.optimizer_offload": share,
                },
            )


def _smallest() -> str:
    rows = []
    for length in LENGTHS:
        for words, shared, offload in (
            ("trainer alone, optimizer on GPUs", False, False),
            ("trainer alone, optimizer on the host allowed", False, True),
            ("engines on the same GPUs (30 % of each), optimizer on GPUs", True, False),
            ("engines on the same GPUs (30 % of each), host allowed", True, True),
        ):
            found = next((f for n in range(1, MOST_NODES + 1) if (f := search(n, length, shared=shared, offload=offload))), None)
            nodes = str(world_size(found.config) // 8) if found else f"more than {MOST_NODES}"
            rows.append([f"{length:,}", words, f"**{nodes}**", *(_row(found) if found else [""] * 11)])
    title = "### 120B: the fewest nodes on which full-parameter training fits\n"
    return title + "\n" + _table(["tokens of a sequence", "what", "nodes", *ROW], rows)


# ---- words --------------------------------------------------------------------------------------------------------------------------


def _config(name: str) -> Config:
    return load([ROOT / "configs" / f"{name}.toml"]).config


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of docs/memory.md.")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/memory.md")
    if not parser.parse_args().write:
        print(tables())
        return
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + tables() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
