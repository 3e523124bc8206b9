"""The protocol of weight sync, sender and receivers as threads of this process: what arrives, what happens when somebody does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_gptoss.checkpoint.weight_map import hf_shapes, turned_names
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.sync import send, verify
from megatron_gptoss.sync.buckets import fill, plan_of, views
from megatron_gptoss.sync.plan import ALIGNMENT, plan_sync
from megatron_gptoss.sync.receive import Receiver
from megatron_gptoss.sync.send import Sender
from megatron_gptoss.sync.shared import SharedOutlet
from megatron_gptoss.sync.transfer import Kind, Receipt, Sent, SyncAborted, Transfer

MODEL = ModelConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=10,
    num_local_experts=3, num_experts_per_tok=2, vocab_size=41,
)  # fmt: skip
BUCKET = 20_000  # bytes: several buckets, some tensors larger than one
CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("broadcast", "shared")


def policy(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in hf_shapes(MODEL).items()}


class Scene:
    """A sender, two receivers, and the driver's store."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, *, dtype: str = "float32") -> None:
        self.store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self.kind: Kind = kind
        self.dtype, self.number, self.group = dtype, 0, "1"
        self.weights = policy(1)
        monkeypatch.setattr(send, "export_hf", lambda *_args, **_kwargs: self.exported())
        self.sender = Sender(nn.Linear(1, 1), MODEL)
        self.receivers = [Receiver(CPU) for _ in range(2)]
        self.sources = [self.sender.lend(dtype, BUCKET) if kind == "shared" else None for _ in self.receivers]
        self.received: list[dict[str, Tensor]] = [{} for _ in self.receivers]
        self.plan = plan_of(MODEL, dtype, BUCKET)
        self.threads = ThreadPoolExecutor(4)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def transfer(self, timeout_s: float = 8.0) -> Transfer:
        self.number += 1
        return Transfer(self.kind, self.number, self.number, self.dtype, BUCKET, "127.0.0.1", self.store.port, timeout_s, self.group, 3)

    def send(self, transfer: Transfer, served: tuple[int, ...] = (0, 1)) -> Future[Sent | None]:
        return self.threads.submit(self.sender.send, transfer, served if self.kind == "shared" else ())

    def receive(self, transfer: Transfer, index: int, load: Callable[[int, Iterator[tuple[str, Tensor]]], None] | None = None) -> Future:
        source = self.sources[index]
        receipt = Receipt(transfer, first_rank=1 + index, sources=(source,) if source else (), slots=(index,))
        load = load or self.keep
        return self.threads.submit(self.receivers[index].receive, receipt, 0, self.plan, lambda tensors: load(index, tensors))

    def keep(self, index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.received[index] = {name: tensor.clone() for name, tensor in tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_arrives_again_and_again_and_both_sides_sum_up_the_same(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, digests = Scene(kind, monkeypatch), []
    assert len(scene.plan.buckets) > 4
    for weights in (policy(1), policy(2), policy(2), policy(1)):
        scene.weights, transfer = weights, scene.transfer()
        receiving = [scene.receive(transfer, index) for index in range(2)]
        sent = scene.send(transfer).result(20)
        assert sent is not None and sent.problem == ""
        assert [each.result(20)[0] for each in receiving] == [sent.digest] * 2
        for received in scene.received:
            assert received.keys() == weights.keys() and all(torch.equal(received[name], weights[name]) for name in weights)
        digests.append(sent.digest)
    assert digests[0] == digests[3] != digests[1] == digests[2]


def test_a_bfloat16_engine_is_sent_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("broadcast", monkeypatch, dtype="bfloat16")
    transfer = scene.transfer()
    receiving = [scene.receive(transfer, index) for index in range(2)]
    sent = scene.send(transfer).result(20)
    assert sent is not None and {each.result(20)[0] for each in receiving} == {sent.digest}
    assert all(torch.equal(tensor, scene.weights[name].bfloat16()) for name, tensor in scene.received[0].items())


@pytest.mark.parametrize("kind", KINDS)
def test_who_stops_in_the_middle_hangs_nobody_and_the_others_begin_again(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second receiver reads two tensors and no more; the driver gives the update up; sender and first receiver go on without it."""
    scene, in_the_middle, gone = Scene(kind, monkeypatch), threading.Event(), threading.Event()

    def dies(_index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for _ in range(2):
            next(tensors)
        in_the_middle.set()
        gone.wait(20)
        raise RuntimeError("dead")

    transfer = scene.transfer()
    first, second, sending = scene.receive(transfer, 0), scene.receive(transfer, 1, dies), scene.send(transfer)
    assert in_the_middle.wait(8)  # it would not have begun yet on a busy machine
    time.sleep(0.5)
    assert not sending.done()
    scene.store.set(transfer.key, "engine-1 died")
    sent = sending.result(5)
    assert sent is not None and sent.problem
    # It may have had everything before the other one stopped; else it says why it has not.
    failed = first.exception(5)
    assert failed is None or isinstance(failed, SyncAborted | RuntimeError)
    gone.set()
    assert isinstance(second.exception(5), RuntimeError)

    scene.group, transfer = "2", replace(scene.transfer(), group="2", size=2)
    first = scene.receive(transfer, 0)
    sent = scene.send(transfer, (0,)).result(20)
    assert sent is not None and sent.problem == "" and first.result(20)[0] == sent.digest
    assert all(torch.equal(scene.received[0][name], tensor) for name, tensor in scene.weights.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", ["receiver", "sender"])
def test_nobody_waits_longer_than_the_deadline(kind: Kind, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(kind, monkeypatch)
    transfer, began = scene.transfer(timeout_s=1.0), time.monotonic()
    if missing == "receiver":
        sent = scene.send(transfer).result(10)
        assert sent is not None and "within 1 s" in sent.problem
    else:
        with pytest.raises(SyncAborted, match="within 1 s"):
            scene.receive(transfer, 0).result(10)
    assert time.monotonic() - began < 8


def test_a_receiver_that_fails_has_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, transfer = Scene("shared", monkeypatch), None

    def refuses(_index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        next(tensors)
        raise ValueError("no place for it")

    transfer = scene.transfer()
    receiving, sending = scene.receive(transfer, 0, refuses), scene.send(transfer, (0,))
    with pytest.raises(ValueError, match="no place"):
        receiving.result(10)
    scene.store.set(transfer.key, "engine-0 refused")
    sent = sending.result(10)
    assert sent is not None and sent.problem == "engine-0 refused"


def test_a_rank_that_serves_nobody_walks_through_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        scene, walked = Scene(kind, monkeypatch), []
        monkeypatch.setattr(send, "export_hf", lambda *_a, scene=scene, walked=walked, **_k: _noted(scene.weights, walked))
        assert scene.sender.send(scene.transfer(), () if kind == "shared" else None) is None
        assert walked == list(hf_shapes(MODEL))


def test_weights_that_end_before_the_plan_are_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the buffer held before would go in their place, and both sides would sum up the same."""
    scene = Scene("shared", monkeypatch)
    del scene.weights[list(scene.weights)[-1]]
    transfer = scene.transfer(timeout_s=1.0)
    receiving = scene.receive(transfer, 0)
    with pytest.raises(ValueError, match="shorter"):
        scene.send(transfer, (0,)).result(10)
    assert isinstance(receiving.exception(10), SyncAborted)


def _noted(weights: dict[str, Tensor], walked: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        walked.append(name)
        yield name, tensor


def test_a_board_never_takes_an_older_update_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that drained all of update 1 has drained nothing of update 2."""
    scene = Scene("shared", monkeypatch)
    lender: Any = scene.sender.lender
    from megatron_gptoss.sync.shared import count
    from megatron_gptoss.sync.transfer import Watch

    last, first = scene.plan.buckets[-1], scene.plan.buckets[0]
    lender.board.drain(0, count(1, last))
    outlet = SharedOutlet(lender, 2, (0,), Watch(scene.store, replace(scene.transfer(), timeout_s=0.2)))
    outlet.buffer(first)
    outlet.filled(first)
    with pytest.raises(SyncAborted):
        outlet.finish()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_has_every_tensor_once_in_order_within_its_bucket_and_aligned(dtype: str) -> None:
    shapes = hf_shapes(MODEL)
    plan = plan_sync(shapes, turned_names(MODEL), dtype, BUCKET)
    assert [slot.name for bucket in plan.buckets for slot in bucket.slots] == list(shapes) and plan.num_tensors == len(shapes)
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end and slot.offset % ALIGNMENT == 0 and slot.shape == shapes[slot.name]
            assert slot.num_bytes == prod(slot.shape) * (4 if dtype == "float32" else 2)
            end = slot.offset + slot.num_bytes
        assert end <= bucket.num_bytes <= plan.buffer_bytes and (bucket.num_bytes <= BUCKET or len(bucket.slots) == 1)
    assert any(bucket.has_gaps for bucket in plan.buckets), "no gap: the test's model is too round"


def test_plans_that_do_not_fit_each_other_have_different_keys() -> None:
    shapes, turned = hf_shapes(MODEL), turned_names(MODEL)
    plans = [
        plan_sync(shapes, turned, "float32", BUCKET),
        plan_sync(shapes, turned, "bfloat16", BUCKET),
        plan_sync(shapes, turned, "float32", 2 * BUCKET),
        plan_sync(shapes, (), "float32", BUCKET),
        plan_sync(dict(reversed(shapes.items())), turned, "float32", BUCKET),
        plan_sync(shapes | {"model.norm.weight": (33,)}, turned, "float32", BUCKET),
    ]
    assert len({plan.key for plan in plans}) == len(plans)
    assert plan_sync(shapes, turned, "float32", BUCKET).key == plans[0].key


def test_a_bucket_s_digest_sees_every_word_and_what_lies_between_tensors_is_zero() -> None:
    plan, weights = plan_of(MODEL, "bfloat16", BUCKET), policy(3)

    def summed(change: Callable[[int, Tensor], object]) -> int:
        digests, tensors = verify.BucketDigests(plan, CPU), iter(weights.items())
        for bucket in plan.buckets:
            buffer = torch.full((plan.buffer_bytes,), 7, dtype=torch.uint8)  # what an earlier update left
            fill(plan, bucket, buffer, tensors)
            change(bucket.index, buffer)
            digests.add(bucket, buffer)
        return digests.total()

    plain = summed(lambda _index, _buffer: None)
    assert plain == summed(lambda _index, buffer: None)
    seen = {plain}
    for bucket in plan.buckets:
        for at in (0, bucket.num_bytes // 2, bucket.num_bytes - 1):
            seen.add(summed(lambda index, buffer, b=bucket.index, at=at: buffer[at].bitwise_xor_(1) if index == b else None))
    assert len(seen) == 1 + 3 * len(plan.buckets)


def test_turned_tensors_come_out_as_they_went_in_and_lie_as_the_engine_stores_them() -> None:
    plan, weights = plan_of(MODEL, "float32", BUCKET), policy(4)
    tensors = iter(weights.items())
    for bucket in plan.buckets:
        buffer = torch.zeros(plan.buffer_bytes, dtype=torch.uint8)
        fill(plan, bucket, buffer, tensors)
        for name, tensor in views(plan, bucket, buffer):
            assert torch.equal(tensor, weights[name])
            if name in turned_names(MODEL):
                assert tensor.mT.is_contiguous() and name.rsplit(".", 1)[-1] in ("gate_up_proj", "down_proj")


ROOT = Path(__file__).resolve().parents[2]
SUMS = """
import torch
from megatron_gptoss.sync import verify
from megatron_gptoss.sync.digest_kernel import add_weighted_sum

for words in (1, 4096, 65536 + 4097):
    data = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, generator=torch.Generator().manual_seed(words))
    into = torch.full((1,), 11, dtype=torch.int64)
    add_weighted_sum(data, into)
    assert into.item() == (verify.weighted_sum(data) + 11).item(), words
    print("equal", words)
"""


def test_the_kernel_sums_what_its_twin_sums() -> None:
    """In Triton's interpreter, and so in a process of its own: Triton asks for it when it is imported. tests/gpu has it on a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SUMS], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("equal") == 3, done.stderr[-4000:]
