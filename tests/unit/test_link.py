"""The driver's side of weight sync: real senders and receivers as threads, driven by a WeightLink; engines that die, freeze or refuse."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_gptoss.config.placement import Place
from megatron_gptoss.errors import MachineError, TrainerFailed
from megatron_gptoss.loop import weights as link_module
from megatron_gptoss.loop.weights import WeightLink, ranks_beside
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights, WeightsRefused
from megatron_gptoss.sync import send
from megatron_gptoss.sync.receive import Receiver
from megatron_gptoss.sync.send import Sender
from megatron_gptoss.sync.transfer import Kind, Receipt, Sent, SharedBuffers, Superseded, SyncAborted, Transfer
from tests.unit.test_sync import BUCKET, CPU, KINDS, MODEL, plan_of, policy


class World:
    """A training world of one rank."""

    def __init__(self) -> None:
        self.sender, self.changes = Sender(nn.Linear(1, 1), MODEL), 0
        self.places = [Place("trainer rank 0", "here", 1, ())]
        self.timeout_s = 600.0
        self.sends = 0
        self.busy_s = 0.0  # with a pass that was begun before
        self.rests = threading.Event()  # it has come back from a sending

    def lend_buffers(self, dtype: str, bucket_bytes: int) -> list[SharedBuffers]:
        return [self.sender.lend(dtype, bucket_bytes)]

    def free_caches(self) -> None: ...

    def send_weights(self, transfer: Transfer, slots: Sequence[tuple[int, ...] | None], changes: int) -> list[Sent]:
        if changes != self.changes:
            raise Superseded("gone")
        self.sends += 1
        time.sleep(self.busy_s)
        try:
            sent = self.sender.send(transfer, slots[0])
        finally:
            self.rests.set()
        return [sent] if sent is not None else []


class Engine:
    """One or two workers, in threads."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name, self.num_workers, self.place = name, num_workers, Place(name, "here", 2, ())
        self.receivers = [Receiver(CPU) for _ in range(num_workers)]
        self.received: list[dict[str, Tensor]] = [{} for _ in range(num_workers)]
        self.dies = self.freezes = self.refuses = False
        self.turns_s = 0.0  # until its running turns have ended
        self.at_the_end: Callable[[Transfer], None] = lambda _transfer: None  # when all is loaded and not confirmed
        self.over = threading.Event()

    async def receive_weights(self, receipt: Receipt) -> HeldWeights:
        await asyncio.sleep(self.turns_s)
        plan = plan_of(MODEL, receipt.transfer.dtype, BUCKET)
        calls = [
            asyncio.to_thread(receiver.receive, receipt, worker, plan, lambda tensors, w=worker: self.load(w, tensors))
            for worker, receiver in enumerate(self.receivers)
        ]
        try:
            digests = {digest for digest, _ in await asyncio.gather(*calls)}
            await asyncio.to_thread(self.at_the_end, receipt.transfer)
        except Exception as error:
            raise (EngineDied("killed") if self.dies else WeightsRefused(str(error))) from None
        return HeldWeights(receipt.transfer.version, plan.num_tensors, digests.pop())

    def load(self, worker: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self.refuses or self.dies or self.freezes:
            next(tensors)
            if self.freezes:
                self.over.wait(20)
            raise RuntimeError("no place for it" if self.refuses else "killed")
        self.received[worker] = {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(send, "export_hf", lambda *_args, **_kwargs: iter(policy(1).items()))
    monkeypatch.setattr(link_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(link_module, "GRACE_S", 1.0)
    return World()


def new_link(world: World, kind: Kind) -> WeightLink:
    return WeightLink(world, kind, dtype="float32", bucket_bytes=BUCKET)


def holds(engine: Engine) -> bool:
    return all(torch.equal(received[name], tensor) for received in engine.received for name, tensor in policy(1).items())


@pytest.mark.parametrize("kind", KINDS)
def test_all_engines_and_one_alone_are_given_the_same(kind: Kind, world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b", 2)]
        given = [await link.policy(n).give(part, 8.0) for n, part in enumerate((engines, engines, engines[1:], engines))]
        assert len({each.digest for each in given}) == 1
        assert all(answer.digest == each.digest for each in given for answer in each.answers if isinstance(answer, HeldWeights))
        assert [len(each.answers) for each in given] == [2, 2, 1, 2] and all(holds(engine) for engine in engines)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["dies", "freezes"])
def test_an_engine_that_dies_or_freezes_in_the_middle_costs_the_others_nothing(kind: Kind, fault: str, world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b"), Engine("c")]
        await link.policy(0).give(engines, 8.0)
        setattr(engines[1], fault, True)
        given = await link.policy(1).give(engines, 8.0 if fault == "dies" else 4.0)
        assert [type(answer) for answer in given.answers] == [HeldWeights, EngineDied, HeldWeights]
        assert [answer.digest for answer in (given.answers[0], given.answers[2])] == [given.digest] * 2  # type: ignore[union-attr]
        assert holds(engines[0]) and holds(engines[2])
        # Its successor is given the policy alone, and then all of them together.
        new = Engine("b2")
        alone = await link.policy(1).give([new], 8.0)
        assert alone.answers[0].digest == given.digest and holds(new)  # type: ignore[union-attr]
        together = await link.policy(2).give([engines[0], new, engines[2]], 8.0)
        assert [answer.digest for answer in together.answers] == [given.digest] * 3  # type: ignore[union-attr]
        engines[1].over.set()

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_is_told_and_not_tried_again(kind: Kind, world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b")]
        engines[1].refuses = True
        began = time.monotonic()
        given = await link.policy(0).give(engines, 8.0)
        assert isinstance(given.answers[1], WeightsRefused) and "no place" in str(given.answers[1]) and given.blamed == "b"
        if kind == "shared":  # a broadcast of so little may have arrived at the other one before
            assert "given up: b: WeightsRefused: no place" in str(given.answers[0]), "it says whose fault it was"
        assert world.sends == 1 and time.monotonic() - began < 7

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_in_the_middle_of_a_long_pass_costs_no_engine(kind: Kind, world: World) -> None:
    """Its deadline counts from the moment when the trainer comes to the update."""

    async def story() -> None:
        link, engine = new_link(world, kind), Engine("a")
        world.busy_s = 5.5
        given = await link.policy(0).give([engine], 4.0)
        assert isinstance(given.answers[0], HeldWeights) and holds(engine)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_waits_for_its_turns_lives_when_another_dies_meanwhile(kind: Kind, world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b"), Engine("c")]

        async def is_dead(_receipt: Receipt) -> HeldWeights:
            raise EngineDied("killed")

        engines[0].turns_s, engines[1].receive_weights = 2.5, is_dead  # more than GRACE_S
        given = await link.policy(0).give(engines, 8.0)
        assert [type(answer) for answer in given.answers] == [HeldWeights, EngineDied, HeldWeights]
        assert holds(engines[0]) and holds(engines[2])

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_after_everything_was_sent_costs_the_others_nothing(kind: Kind, world: World) -> None:
    """The trainer has done its part, and an engine that still loads hears that the update was given up."""

    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b")]

        def dies(_transfer: Transfer) -> None:
            assert world.rests.wait(8)
            engines[1].dies = True
            raise RuntimeError("killed")

        def hears_of_it(transfer: Transfer) -> None:
            if transfer.number == 1:
                while not link.store.check([transfer.key]):
                    time.sleep(0.01)
                raise SyncAborted(link.store.get(transfer.key).decode())

        engines[0].at_the_end, engines[1].at_the_end = hears_of_it, dies
        given = await link.policy(0).give(engines, 8.0)
        assert [type(answer) for answer in given.answers] == [HeldWeights, EngineDied]
        assert given.answers[0].digest == given.digest and holds(engines[0])  # type: ignore[union-attr]

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_failed_after_all_had_confirmed_is_named(kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        link, engine, send_weights = new_link(world, kind), Engine("a"), world.send_weights

        def fails_late(transfer: Transfer, slots: Sequence[tuple[int, ...] | None], changes: int) -> list[Sent]:
            send_weights(transfer, slots, changes)
            return [Sent(0, "trainer rank 0: out of memory in the digest")]

        monkeypatch.setattr(world, "send_weights", fails_late)
        with pytest.raises(TrainerFailed, match="did not send version 3 as a whole: trainer rank 0: out of memory in the digest"):
            await link.policy(3).give([engine], 8.0)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_fails_first_is_named_and_no_engine_that_waits_for_it(
    kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        link, engines = new_link(world, kind), [Engine("a"), Engine("b")]

        def fails(transfer: Transfer, _slots: Sequence[tuple[int, ...] | None], _changes: int) -> list[Sent]:
            link.store.set(transfer.begun, "1")
            time.sleep(0.5)
            return [Sent(0, "trainer rank 0: out of memory while gathering")]

        monkeypatch.setattr(world, "send_weights", fails)
        with pytest.raises(TrainerFailed, match="did not send version 3 as a whole: trainer rank 0: out of memory while gathering"):
            await link.policy(3).give(engines, 8.0)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_of_an_engine_s_own_is_no_fault_of_the_trainer_whoever_speaks_first(
    kind: Kind, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        link, engine = new_link(world, kind), Engine("a")

        def lost(transfer: Transfer, _slots: Sequence[tuple[int, ...] | None], _changes: int) -> list[Sent]:
            link.store.set(transfer.begun, "1")
            return [Sent(0, "connection closed by peer")]

        async def refuses(_receipt: Receipt) -> HeldWeights:
            await asyncio.sleep(0.5)
            raise WeightsRefused("no place for it")

        monkeypatch.setattr(world, "send_weights", lost)
        engine.receive_weights = refuses  # type: ignore[method-assign]
        given = await link.policy(0).give([engine], 8.0)
        assert str(given.answers[0]) == "no place for it"

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_when_the_driver_is_interrupted_the_trainer_is_let_go(kind: Kind, world: World) -> None:
    async def story() -> None:
        link, engine = new_link(world, kind), Engine("a")
        engine.freezes = True
        giving = asyncio.create_task(link.policy(0).give([engine], 300.0))
        await asyncio.sleep(0.5)
        assert world.sends == 1 and not world.rests.is_set()
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        assert giving.cancelled() and await asyncio.to_thread(world.rests.wait, 8)
        engine.over.set()

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_engine_is_given_up_before_the_trainer_s_own_deadline(kind: Kind, world: World) -> None:
    async def story() -> None:
        link, engine = new_link(world, kind), Engine("a")
        engine.freezes, world.timeout_s = True, 4.5  # and three times GRACE_S less
        given = await link.policy(0).give([engine], 600.0)
        assert isinstance(given.answers[0], EngineDied) and "longer than 1.5 s" in str(given.answers[0])
        engine.over.set()

    asyncio.run(story())


def test_weights_that_have_changed_since_are_not_sent(world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, "broadcast"), [Engine("a")]
        old = link.policy(0)
        world.changes += 1
        with pytest.raises(Superseded):
            await old.give(engines, 8.0)
        assert world.sends == 0
        assert isinstance((await link.policy(1).give(engines, 8.0)).answers[0], HeldWeights)

        class Late(World):  # the change comes between the look and the sending
            def free_caches(self) -> None:
                self.changes += 1

        late = Late()
        link = WeightLink(late, "broadcast", dtype="float32", bucket_bytes=BUCKET, shares_gpus=True)
        with pytest.raises(Superseded):
            await link.policy(0).give(engines, 8.0)

    asyncio.run(story())


def test_two_engines_that_come_up_at_once_are_served_one_after_the_other(world: World) -> None:
    async def story() -> None:
        link, engines = new_link(world, "broadcast"), [Engine("a"), Engine("b")]
        policy_0 = link.policy(0)
        given = await asyncio.gather(*(policy_0.give([engine], 8.0) for engine in engines))
        assert len({each.digest for each in given}) == 1 and all(holds(engine) for engine in engines) and world.sends == 2

    asyncio.run(story())


def test_a_worker_reads_from_the_rank_on_its_gpu() -> None:
    ranks = [Place(f"rank {n}", "h", n, (f"uuid-{n}",)) for n in range(4)]
    engine: Any = Engine("e", 2)
    engine.place = Place("e", "h", 9, ("uuid-3", "uuid-2"))
    assert ranks_beside(engine, ranks) == (3, 2)
    engine.place = Place("e", "h", 9, ("uuid-3", "uuid-7"))
    with pytest.raises(MachineError, match="uuid-7"):
        ranks_beside(engine, ranks)
    engine.place = Place("e", "other", 9, ())
    with pytest.raises(MachineError, match="other"):
        ranks_beside(engine, [Place("rank 0", "h", 0, ())])
