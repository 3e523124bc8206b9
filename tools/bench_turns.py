"""What does a turn cost on its way between driver and engine, apart from its sampling?

    .venv/bin/python tools/bench_turns.py --turns 3000 --in-flight 256 --tokens 150

An actor of Ray answers each turn after 20 to 100 ms and computes nothing. Turns go in a call each, and as they do in runs, by
rollout/turns.py. Out: processor time of both sides a turn, which other work on the machine changes little, and turns a second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import ray
import typer

from megatron_gptoss.rollout.turns import Outcome, TurnCourier, TurnDesk
from megatron_gptoss.types import TurnRequest, TurnResult

NEW_TOKENS = 30


class IdleEngine:
    """Answers late, like a policy; costs nothing, unlike one."""

    def __init__(self) -> None:
        self.desk = TurnDesk(self.generate)

    async def generate(self, request: TurnRequest) -> Outcome:
        await asyncio.sleep(random.uniform(0.02, 0.1))
        return TurnResult(tuple(range(NEW_TOKENS)), (-0.5,) * NEW_TOKENS, "stop", 1)

    async def begin_turns(self, turns: list) -> None:
        self.desk.begin(turns)

    async def ended_turns(self) -> list:
        return await self.desk.outcomes()

    async def cpu_s(self) -> float:
        return time.process_time()


async def ask_all(ask: Callable[[TurnRequest], Awaitable[Any]], turns: int, in_flight: int, tokens: int) -> None:
    places = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        async with places:
            await ask(TurnRequest(f"turn-{number}", f"conversation-{number}", tuple(range(tokens)), NEW_TOKENS, (1, 2), 1.0))

    await asyncio.gather(*(one(number) for number in range(turns)))


def main(
    turns: Annotated[int, typer.Option(help="of each kind and round")] = 3000,
    in_flight: Annotated[int, typer.Option(help="at once")] = 256,
    tokens: Annotated[int, typer.Option(help="a turn sends, its conversation so far")] = 150,
    rounds: int = 2,
) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    engine: Any = ray.remote(IdleEngine).options(max_concurrency=in_flight + 64).remote()
    courier = TurnCourier(lambda turns: engine.begin_turns.remote(turns), lambda: engine.ended_turns.remote())
    kinds: dict[str, Callable[[TurnRequest], Awaitable[Any]]] = {
        "a call each": lambda request: engine.generate.remote(request),
        "shared calls": courier.ask,
    }

    def engine_cpu_s() -> float:
        return float(ray.get(engine.cpu_s.remote()))  # pyright: ignore[reportArgumentType]

    engine_cpu_s()  # it is up
    print(f"{'':14}{'driver':>12}{'engine':>12}{'turns/s':>12}   (milliseconds of processor time a turn)")
    for name, ask in list(kinds.items()) * rounds:
        began, mine, its = time.perf_counter(), time.process_time(), engine_cpu_s()
        asyncio.run(ask_all(ask, turns, in_flight, tokens))
        seconds, driver_s, engine_s = time.perf_counter() - began, time.process_time() - mine, engine_cpu_s() - its
        print(f"{name:14}{driver_s / turns * 1e3:12.3f}{engine_s / turns * 1e3:12.3f}{turns / seconds:12.0f}")
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
