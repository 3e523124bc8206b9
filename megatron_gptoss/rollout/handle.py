"""The driver's end of one rollout engine: start its actor, ask it, end it with all its processes.

In: `EngineSettings`, and what pool.py and weights.py ask. Out: what the actor (engine.py) answers, or EngineDied; Ray's errors end here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_gptoss.config.placement import Place
from megatron_gptoss.rollout.engine import Engine, EngineDied, EngineProcess, HeldWeights, WeightsRefused
from megatron_gptoss.rollout.turns import TurnCourier
from megatron_gptoss.rollout.vllm_settings import EngineSettings, engine_environment
from megatron_gptoss.sync.transfer import Receipt
from megatron_gptoss.types import PolicyVersion, TurnRequest, TurnResult

# Calls an actor accepts at once, so that no probe ever waits behind others. Turns are none (turns.py).
MAX_CALLS_AT_ONCE = 256


class EngineHandle:
    """The driver's end of one engine. Errors of Ray come out as EngineDied; ValueError and WeightsRefused pass as they are."""

    def __init__(self, actor: Any, name: str, settings: EngineSettings) -> None:
        self.actor = actor
        self.name = name
        self.log_path = settings.log_path
        self.num_workers = settings.tensor_parallel
        self.pid: int | None = None
        self.place: Place | None = None  # known when it has started
        self._processes: list[psutil.Process] = []  # those of this host; a process of another host is Ray's to kill
        self._courier = TurnCourier(
            begin=lambda turns: self._answer("begin_turns", actor.begin_turns.remote(turns)),
            outcomes=lambda: self._answer("ended_turns", actor.ended_turns.remote()),
        )

    async def start(self) -> None:
        self._note(await self._call("process"))  # first, so that an engine that hangs in its start can be killed by pid
        self._note(await self._call("start"))

    async def generate(self, request: TurnRequest) -> TurnResult:
        return await self._courier.ask(request)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def update_weights(self, version: PolicyVersion, buckets: Any) -> HeldWeights:
        """`buckets`: a list of buckets (sync/wire.py), or a Ray reference to one, which the actor reads by itself."""
        return await self._call("update_weights", version, buckets)

    async def receive_weights(self, receipt: Receipt) -> HeldWeights:
        """Weights come from where the receipt says."""
        return await self._call("receive_weights", receipt)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def expert_values(self) -> list[dict[str, list[tuple[float, float]]]]:
        return await self._call("expert_values")

    async def peak_memory(self) -> list[tuple[int, int]]:
        return await self._call("peak_memory")

    async def version(self) -> PolicyVersion:
        return await self._call("version")

    async def probe(self) -> None:
        await self._call("probe")

    async def stop(self) -> None:
        await self._call("stop")

    def kill(self) -> list[int]:
        """SIGKILL the actor and all its children; returns the pids of those on this host once they are gone."""
        for process in list(self._processes):
            with contextlib.suppress(psutil.Error):
                self._processes += process.children(recursive=True)
        ray.kill(self.actor, no_restart=True)
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks the start time, so a reused pid is safe
        psutil.wait_procs(self._processes, timeout=5)
        return [process.pid for process in self._processes]

    async def _call(self, method: str, *args: Any) -> Any:
        self._courier.send()  # a turn must not come after what was asked later: an abort, an update
        return await self._answer(method, getattr(self.actor, method).remote(*args))

    async def _answer(self, method: str, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineDied | WeightsRefused | ValueError):
                raise cause from None
            raise EngineDied(f"{self.name}.{method} failed: {cause!r}") from None
        except RayError as error:
            raise EngineDied(f"{self.name} is gone: {type(error).__name__}: {str(error).splitlines()[0]}") from None

    def _note(self, process: EngineProcess) -> None:
        self.pid, self.place = process.pid, Place(self.name, process.host, process.pid, process.gpus)
        if process.host == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                self._processes = [psutil.Process(pid) for pid in (process.pid, *process.children)]


def start_engine(settings: EngineSettings, name: str, node_id: str | None = None) -> EngineHandle:
    """Ask Ray for one engine actor, on this node when one is named, and return at once; `await handle.start()` waits until it can serve."""
    actor = (
        ray.remote(Engine)
        .options(
            num_gpus=0 if settings.visible_gpus else settings.num_gpus,
            num_cpus=settings.num_cpus,
            max_concurrency=MAX_CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False) if node_id else "DEFAULT",
            max_restarts=0,  # a restarted actor would hold no weights; the pool restarts and republishes
            runtime_env={"env_vars": engine_environment(settings)},
        )
        .remote(settings)
    )
    return EngineHandle(actor, name, settings)
