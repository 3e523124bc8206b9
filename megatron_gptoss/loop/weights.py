"""How a run's trainer gives its weights to its engines: both sides told at once, one transfer at a time, given up together when one fails.

In: a started training world and running engines. Out: `LinkedPolicy`, which the pool can give to all engines or to one alone. The bytes go
from rank to worker and never come here; this is the driver's side, with the store at which the others meet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import ray
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_gptoss.config.placement import Place
from megatron_gptoss.errors import MachineError, TrainerFailed
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights, WeightsRefused
from megatron_gptoss.rollout.pool import Given
from megatron_gptoss.sync.shared import slot_of
from megatron_gptoss.sync.transfer import Kind, Receipt, Sent, SharedBuffers, Superseded, Transfer
from megatron_gptoss.types import PolicyVersion

TRAINER = "the trainer"  # among those who take part in an update
GIVEN_UP = "was given up"  # what the others are told, and say when they are asked
GRACE_S = 10.0  # for those who are alive, to notice that an update was given up
SERVER_TIMEOUT = timedelta(seconds=60)


class World(Protocol):
    """What is needed of a training world. `trainer.start.TrainingWorld` is the real one. Its methods block."""

    changes: int
    places: list[Place]
    timeout_s: float  # of each phase; one that takes longer ends the run

    def lend_buffers(self, dtype: str, bucket_bytes: int) -> list[SharedBuffers]: ...
    def free_caches(self) -> None: ...
    def send_weights(self, transfer: Transfer, slots: Sequence[tuple[int, ...] | None], changes: int) -> list[Sent]: ...


class Receiving(Protocol):
    """What is needed of an engine. `rollout.handle.EngineHandle` is the real one."""

    name: str
    place: Place | None
    num_workers: int

    async def receive_weights(self, receipt: Receipt) -> HeldWeights: ...


@dataclass(frozen=True)
class LinkedPolicy:
    """The weights that the trainer holds now, under their version. Once they have changed they cannot be given any more."""

    link: WeightLink
    version: PolicyVersion
    changes: int

    async def give(self, engines: Sequence[Any], timeout_s: float) -> Given:
        """Raises Superseded."""
        return await self.link.give(self, engines, timeout_s)


@dataclass(frozen=True)
class Borrower:
    """An engine's workers, and the rank that each reads from."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]  # on their boards
    sources: tuple[SharedBuffers, ...]


class WeightLink:
    """`shares_gpus`: engines wake on the trainer's GPUs, which then must not be full of what it keeps for later."""

    def __init__(
        self, world: World, kind: Kind, *, dtype: str, bucket_bytes: int, ports: range = range(0, 1), shares_gpus: bool = False
    ) -> None:
        self.kind: Kind = kind
        self.world, self.dtype, self.bucket_bytes, self.shares_gpus = world, dtype, bucket_bytes, shares_gpus
        self.store = _open_store(ports)
        self.host = ray.util.get_node_ip_address()
        self.number = 0  # of the last update
        self.members: tuple[str, ...] = ()  # of the group that both sides keep
        self.group = 0
        self.borrowers: dict[str, Borrower] = {}  # by engine
        self.digest = 0  # of the last update
        self.timings: dict[str, float] = {}  # of the last update, the parts of the slowest engine and of the lead
        self._one_at_a_time = asyncio.Lock()

    def policy(self, version: PolicyVersion) -> LinkedPolicy:
        return LinkedPolicy(self, version, self.world.changes)

    async def give(self, policy: LinkedPolicy, engines: Sequence[Receiving], timeout_s: float) -> Given:
        """Those that die are left out, and the others are given the policy again, in a group of their own."""
        answers: dict[str, HeldWeights | Exception] = {}
        living = list(engines)
        timeout_s = min(timeout_s, max(self.world.timeout_s - 3 * GRACE_S, GRACE_S))  # a frozen engine must not cost the trainer
        async with self._one_at_a_time:
            while True:
                sent, found, blamed = await self._transfer(policy, living, timeout_s)
                answers |= found
                died = {name for name, answer in found.items() if isinstance(answer, EngineDied)}
                living = [engine for engine in living if engine.name not in died]
                # A refusal beside a death may come of it, also when the trainer had sent everything: who means it refuses again.
                broken = any(each.problem for each in sent) or any(isinstance(found[engine.name], Exception) for engine in living)
                if not (broken and died and living):
                    break
        problem = next((each.problem for each in sent if each.problem), "")
        # A trainer that loses its connection may say so before the engine that closed it says why.
        only_told = blamed == TRAINER and all(GIVEN_UP in str(answers[engine.name]) for engine in living)
        if problem and living and (only_told or all(isinstance(answers[engine.name], HeldWeights) for engine in living)):
            raise TrainerFailed(f"the trainer did not send version {policy.version} as a whole: {problem}")
        digests = {each.digest for each in sent if not each.problem}
        if len(digests) > 1:
            raise TrainerFailed(f"trainer ranks gathered different weights for version {policy.version}: digests {sorted(digests)}")
        self.digest = next(iter(digests), 0)
        return Given(self.digest, [answers[engine.name] for engine in engines], blamed)

    async def _transfer(
        self, policy: LinkedPolicy, engines: Sequence[Receiving], timeout_s: float
    ) -> tuple[list[Sent], dict[str, HeldWeights | Exception], str]:
        """What the ranks say, what the engines say, and whose problem came first."""
        began = time.perf_counter()
        if self.world.changes != policy.changes:
            raise Superseded(f"version {policy.version} is gone: the trainer has changed its weights since")
        await self._get_ready(engines)
        transfer = self._next_transfer(policy.version, engines, timeout_s)
        sending = asyncio.create_task(
            asyncio.to_thread(self.world.send_weights, transfer, self._slots(engines), policy.changes), name=TRAINER
        )
        receiving: dict[asyncio.Task[HeldWeights], str] = {}
        try:
            await self._until_begun(transfer, sending)
            for engine, receipt in zip(engines, self._receipts(transfer, engines), strict=True):
                receiving[asyncio.create_task(engine.receive_weights(receipt), name=engine.name)] = engine.name
            blamed = await self._until_done(transfer, {sending, *receiving}, timeout_s)
        except BaseException:
            self._give_up(transfer, "nobody waits for it any more")
            raise
        finally:
            for task in receiving:
                task.cancel()  # those that are late
        found = {name: _answer(task, timeout_s) for task, name in receiving.items()}
        sent = await sending  # has a deadline of its own
        self.timings = self._parts(sent, found) | {"all": time.perf_counter() - began}
        for key in (transfer.key, transfer.begun):
            self.store.delete_key(key)
        return sent, found, blamed

    async def _until_begun(self, transfer: Transfer, sending: asyncio.Task[list[Sent]]) -> None:
        """Until the trainer has come to it. Where rollouts run ahead it may be in the middle of a long pass, which is no fault of an engine
        that waits. Raises what keeps the trainer from it; no engine has been asked then."""
        pause = 2e-4
        while not sending.done() and not self.store.check([transfer.begun]):
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, 0.02)
        if sending.done():
            sending.result()

    async def _until_done(self, transfer: Transfer, pending: set[asyncio.Task[Any]], timeout_s: float) -> str:
        """The first problem gives the update up for all, and whose it is, is returned. Those who live notice at once, or when their turns
        have ended, for which they have the time that they had before."""
        deadline, given_up, blamed = time.monotonic() + timeout_s, False, ""
        while pending and (not given_up or time.monotonic() < deadline):
            done, pending = await asyncio.wait(pending, timeout=max(deadline - time.monotonic(), 0.0), return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if _problem(task)), None)
            if not given_up and (failed or not done):
                given_up, deadline = True, max(deadline, time.monotonic() + GRACE_S)
                blamed = failed.get_name() if failed else ""
                self._give_up(transfer, _problem(failed) if failed else "it took too long")
        return blamed

    def _give_up(self, transfer: Transfer, why: str) -> None:
        self.store.set(transfer.key, f"update {transfer.number} {GIVEN_UP}: {why}")
        self.members = ()

    async def _get_ready(self, engines: Sequence[Receiving]) -> None:
        if self.kind == "shared":
            for engine in engines:
                if engine.name not in self.borrowers:
                    await self._lend(engine)
        if self.shares_gpus:
            await asyncio.to_thread(self.world.free_caches)

    async def _lend(self, engine: Receiving) -> None:
        """Handles that no other engine has, and a slot on each board; those of engines that are gone are not used again."""
        lent = await asyncio.to_thread(self.world.lend_buffers, self.dtype, self.bucket_bytes)
        ranks = ranks_beside(engine, self.world.places)
        slots = tuple(slot_of(len(self.borrowers), worker) for worker in range(engine.num_workers))
        self.borrowers[engine.name] = Borrower(ranks, slots, tuple(lent[rank] for rank in ranks))

    def _next_transfer(self, version: PolicyVersion, engines: Sequence[Receiving], timeout_s: float) -> Transfer:
        self.number += 1
        members = tuple(engine.name for engine in engines)
        if members != self.members:
            self.members, self.group = members, self.group + 1
        return Transfer(
            kind=self.kind,
            version=version,
            number=self.number,
            dtype=self.dtype,
            bucket_bytes=self.bucket_bytes,
            host=self.host,
            port=self.store.port,
            timeout_s=timeout_s + GRACE_S,
            group=str(self.group),
            size=1 + sum(engine.num_workers for engine in engines),
        )

    def _slots(self, engines: Sequence[Receiving]) -> list[tuple[int, ...] | None]:
        ranks = range(len(self.world.places))
        if self.kind == "broadcast":
            return [() if rank == 0 else None for rank in ranks]
        served = [self.borrowers[engine.name] for engine in engines]
        return [tuple(slot for b in served for r, slot in zip(b.ranks, b.slots, strict=True) if r == rank) for rank in ranks]

    def _receipts(self, transfer: Transfer, engines: Sequence[Receiving]) -> list[Receipt]:
        if self.kind == "shared":
            served = [self.borrowers[engine.name] for engine in engines]
            return [Receipt(transfer, sources=b.sources, slots=b.slots) for b in served]
        first, receipts = 1, []
        for engine in engines:
            receipts.append(Receipt(transfer, first_rank=first))
            first += engine.num_workers
        return receipts

    @staticmethod
    def _parts(sent: Sequence[Sent], found: dict[str, HeldWeights | Exception]) -> dict[str, float]:
        held = [answer for answer in found.values() if isinstance(answer, HeldWeights)]
        slowest = max(held, key=lambda answer: sum(answer.seconds.values()), default=None)
        return {
            **{f"trainer: {part}": seconds for part, seconds in (sent[0].seconds if sent else {}).items()},
            **{f"engine: {part}": seconds for part, seconds in (slowest.seconds if slowest else {}).items()},
        }


def ranks_beside(engine: Receiving, places: Sequence[Place]) -> tuple[int, ...]:
    """For each worker the trainer rank on its GPU; without GPUs the ranks of its host take turns. Raises MachineError."""
    place = engine.place
    assert place is not None, "an engine says its place when it starts"
    if not place.gpus:
        near = [rank for rank, other in enumerate(places) if other.host == place.host]
        if not near:
            raise MachineError(f"{engine.name} runs on {place.host}, where there is no trainer rank whose memory it could share")
        return tuple(near[worker % len(near)] for worker in range(engine.num_workers))
    by_gpu = {gpu: rank for rank, other in enumerate(places) for gpu in other.gpus}
    if missing := [gpu for gpu in place.gpus if gpu not in by_gpu]:
        raise MachineError(f"{engine.name} computes on {', '.join(missing)} of {place.host}, where there is no trainer rank to share with")
    return tuple(by_gpu[gpu] for gpu in place.gpus)


def _problem(task: asyncio.Task[Any]) -> str:
    """Who did not do its part, and why; "" when it did."""
    if task.cancelled():
        return f"{task.get_name()} was cancelled"
    if (error := task.exception()) is not None:
        return f"{task.get_name()}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    result = task.result()
    why = next((each.problem for each in result if each.problem), "") if isinstance(result, list) else ""
    return f"{task.get_name()}: {why}" if why else ""


def _answer(task: asyncio.Task[HeldWeights], timeout_s: float) -> HeldWeights | Exception:
    if not task.done() or task.cancelled():
        return EngineDied(f"a weight update took longer than {timeout_s:g} s")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, EngineDied | WeightsRefused | ValueError):
        return error
    raise error


def _open_store(ports: range) -> TCPStore:
    """On the first free port of `ports`; range(0, 1): on any. Raises MachineError."""
    for port in ports:
        try:
            return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=SERVER_TIMEOUT)
        except RuntimeError:
            continue
    raise MachineError(
        f"all ports from {ports[0]} to {ports[-1]} are taken on the driver's node. Set cluster.first_port to another range or "
        "cluster.num_ports to a larger one."
    )
