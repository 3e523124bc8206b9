"""SinkAttention inside the model: which layers are windowed, what is visible there, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tiny_model import TINY, our_model, strong_tensors

WINDOW, QUERY = TINY.sliding_window, 15


def attend(model, layer: int, key_distance: int | None, *, packed: bool):
    """Core attention's output for token QUERY of 20, with the key and value `key_distance` back changed (None: nothing changed)."""
    from megatron_gptoss.model.gpt_oss import packed_params

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(20, 1, n, TINY.head_dim, generator=generator) for n in (4, 2, 2))
    if key_distance is not None:
        k[QUERY - key_distance] += 1
        v[QUERY - key_distance] += 1
    core = model.decoder.layers[layer].self_attention.core_attention
    with torch.no_grad():
        if packed:
            cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
            return core(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=packed_params(cu_seqlens, 20))[QUERY]
        return core(q, k, v)[QUERY, 0]


@pytest.mark.parametrize("packed", [True, False])
def test_even_layers_see_the_window_and_odd_layers_everything(one_rank, packed):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    for layer, distance, visible in [(0, WINDOW, False), (0, WINDOW - 1, True), (1, WINDOW, True), (1, -1, False)]:
        same = torch.equal(attend(model, layer, distance, packed=packed), attend(model, layer, None, packed=packed))
        assert same != visible, (layer, distance)


def test_the_window_fault_shows_one_key_more(one_rank):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)), fault="window")
    assert not torch.equal(attend(model, 0, WINDOW, packed=True), attend(model, 0, None, packed=True))
    assert torch.equal(attend(model, 0, WINDOW + 1, packed=True), attend(model, 0, None, packed=True))


def test_context_parallel_is_refused_clearly(one_rank):
    from megatron_gptoss.attention.module import SinkAttention
    from megatron_gptoss.model.build import megatron_config

    config = megatron_config(TINY, one_rank, dtype=torch.float32)
    two = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match="context parallel size is 2"):
        SinkAttention(config, 1, pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=two))
