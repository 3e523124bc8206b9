"""A receiver of weights is killed in the middle, as processes die: the sender lives, and gives the weights to another one.

On CPUs, and on GPUs where there are any: NCCL's own watchdog must not take the sender with it, nor a dead reader the shared memory.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_gptoss.checkpoint.weight_map import hf_shapes
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.sync.buckets import plan_of
from megatron_gptoss.sync.transfer import Kind, Receipt, Transfer

MODEL = ModelConfig(
    num_hidden_layers=4, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    num_local_experts=8, num_experts_per_tok=2, vocab_size=1024,
)  # fmt: skip
BUCKET = 4 * 2**20
PATIENCE_S = 120  # of the test; what is waited for takes a second or two


def send(device: str, orders: Any, results: Any) -> None:
    from megatron_gptoss.sync import send as module

    torch.manual_seed(0)
    weights = {name: torch.randn(shape, device=device) for name, shape in hf_shapes(MODEL).items()}
    module.export_hf = lambda *_args, **_kwargs: iter(weights.items())  # type: ignore[assignment]
    sender = module.Sender(nn.Linear(1, 1).to(device), MODEL)
    while (order := orders.get()) is not None:
        if isinstance(order, Transfer):
            results.put(sender.send(order, () if order.kind == "broadcast" else (order.number,)))
        else:
            results.put(sender.lend("float32", BUCKET))


def receive(device: str, receipt: Receipt, results: Any, stops: bool) -> None:
    from megatron_gptoss.sync.receive import Receiver

    def load(tensors: Any) -> None:
        for place, _ in enumerate(tensors):
            if stops and place == 20:
                results.put("in the middle")
                time.sleep(1000)

    if device != "cpu":
        torch.cuda.set_device(device)
    digest, _ = Receiver(torch.device(device)).receive(receipt, 0, plan_of(MODEL, "float32", BUCKET), load)
    results.put(digest)


WAYS: list[Any] = [
    ("broadcast", "cpu", "cpu"),
    ("shared", "cpu", "cpu"),
    pytest.param("broadcast", "cuda:0", "cuda:1", marks=pytest.mark.gpu),
    pytest.param("shared", "cuda:0", "cuda:0", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("kind", "here", "there"), WAYS)
def test_the_sender_survives_a_receiver_that_is_killed(kind: Kind, here: str, there: str) -> None:
    if here != "cpu" and torch.cuda.device_count() < len({here, there}):
        pytest.skip("needs CUDA devices")
    context = mp.get_context("spawn")
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))

    def transfer(number: int) -> Transfer:
        return Transfer(kind, number, number, "float32", BUCKET, "127.0.0.1", store.port, PATIENCE_S, str(number), 2)

    orders, sent = context.Queue(), context.Queue()
    sender = context.Process(target=send, args=(here, orders, sent), daemon=True)
    sender.start()
    processes = [sender]

    def receiver(number: int, *, stops: bool) -> tuple[Any, Any]:
        """A process, and a queue of its own: one that is killed may take its queue's lock with it."""
        receipt = Receipt(transfer(number), first_rank=1)
        if kind == "shared":
            orders.put("lend")
            receipt = Receipt(transfer(number), sources=(sent.get(timeout=PATIENCE_S),), slots=(number,))
        received = context.Queue()
        processes.append(context.Process(target=receive, args=(there, receipt, received, stops), daemon=True))
        return processes[-1], received

    try:
        victim, received = receiver(1, stops=True)
        victim.start()
        orders.put(transfer(1))
        assert received.get(timeout=PATIENCE_S) == "in the middle"
        victim.kill()
        victim.join()
        store.set(transfer(1).key, "the engine died")  # as the driver does when Ray tells it
        first = sent.get(timeout=20)
        assert first.problem and sender.is_alive()
        successor, received = receiver(2, stops=False)
        successor.start()
        orders.put(transfer(2))
        second = sent.get(timeout=PATIENCE_S)
        assert second.problem == "" and second.digest == received.get(timeout=PATIENCE_S)
        orders.put(None)
        sender.join(2 * PATIENCE_S)  # at a process's end Gloo may wait for what was on its way, until its own timeout
        assert sender.exitcode == 0
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
