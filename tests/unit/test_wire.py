"""A microbatch that comes from the driver is the one that was sent, and the rank's own to write to."""

import pickle
from dataclasses import fields

import numpy as np
import torch

from megatron_gptoss.model.replay import Routes
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.trainer import wire
from megatron_gptoss.types import MicroBatch, Sample, TokenRoutes


def sent(record):
    """As Ray does: arrays out of band, in memory that may only be read; a record inside a record by its own serializer."""
    kind, values = wire.to_arrays(record)
    values = {name: sent(value) if isinstance(value, wire.RECORDS) else value for name, value in values.items()}
    buffers: list[pickle.PickleBuffer] = []
    assert not any(isinstance(value, torch.Tensor) for value in values.values())
    data = pickle.dumps((kind, values), protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]  # bytes cannot be written to
    kind, values = pickle.loads(data, buffers=shared)
    assert not any(value.flags.writeable for value in values.values() if isinstance(value, np.ndarray))
    return wire.from_arrays((kind, values))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, wire.RECORDS):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def test_what_arrives_is_what_was_sent_and_may_be_written_to():
    routes = TokenRoutes(bytes(range(1, 17)), num_layers=2, top_k=2, num_experts=20)
    one = Sample("a", (5, 6, 7, 8), (False, True, True, True), (0.0, -1.0, -0.5, -0.25), 1.5, routes=routes)
    two = Sample("b", (9, 9), (False, True), (0.0, -2.0), -1.0)
    valued = Sample("c", (1, 2), (False, True), (0.0, -2.0), 0.0, values=(0.0, 0.5), value_targets=(0.0, 0.75))
    for batch in (make_microbatch([one, two]), make_microbatch([valued])):
        arrived = sent(batch)
        assert isinstance(arrived, MicroBatch) and same(arrived, batch)
        arrived.tokens_T[0] = 0
        assert not same(arrived, batch)
    arrived = sent(make_microbatch([one, two])).routes
    assert isinstance(arrived, Routes) and arrived.num_tokens == 6
    arrived.experts_LTK.zero_()
