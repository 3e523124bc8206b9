"""Checkpoints are interchangeable with Megatron's GPTModel: the same parameter names, the same sharded entries, the same bits."""

import pytest
import torch

from tests.helpers.tiny_model import TINY, our_model, strong_tensors


def megatron_gpt_model(config, vocab_size):
    """GPTModel over Megatron's local spec and its own attention; only the experts are ours, for bugs 1 and 2 of model/experts.py."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_gptoss.model.experts import moe_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.mlp = moe_spec()
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=vocab_size, max_sequence_length=64,
        share_embeddings_and_output_weights=False, position_embedding_type="yarn", rotary_base=config.rotary_base,
    )  # fmt: skip


@pytest.fixture(scope="module")
def both(one_rank):
    from megatron_gptoss.model.build import megatron_config

    ours = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    theirs = megatron_gpt_model(megatron_config(TINY, one_rank, dtype=torch.float32), TINY.vocab_size)
    return ours, theirs


def metadata():
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def sharded_entries(state):
    """(key, global shape, offset in it) of every tensor and object of a sharded state dict, factories unfolded."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    found = set()

    def walk(x):
        if isinstance(x, dict):
            for value in x.values():
                walk(value)
        elif isinstance(x, (list, tuple)):
            for value in x:
                walk(value)
        elif isinstance(x, ShardedTensorFactory):
            walk(x.build())
        elif isinstance(x, (ShardedTensor, ShardedObject)):
            found.add((x.key, x.global_shape, x.global_offset))
        else:
            raise TypeError(f"{type(x).__name__} in a model's sharded state")

    walk(state)
    return found


def test_parameter_names_and_shapes_equal_gpt_model(both):
    ours, theirs = ({name: tuple(p.shape) for name, p in model.named_parameters()} for model in both)
    assert list(ours.items()) == list(theirs.items())


def test_sharded_entries_equal_gpt_model(both):
    ours, theirs = (sharded_entries(model.sharded_state_dict(metadata=metadata())) for model in both)
    assert ours == theirs
    assert ("decoder.layers.self_attention.core_attention.softmax_offset", (2, 4), (1, 0)) in ours


def test_checkpoint_of_gpt_model_loads_bit_equal_and_computes_the_same(both, tmp_path, monkeypatch):
    from megatron.core import dist_checkpointing
    from megatron.core.transformer import utils

    from megatron_gptoss.model import cpu

    if not torch.cuda.is_available():  # Megatron's own attention makes its masks on "cuda"; only this test needs them
        host = cpu._TorchOnHost()
        host.ones = cpu._on_host(torch.ones)
        monkeypatch.setattr(utils, "torch", host)

    ours, theirs = both
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    dist_checkpointing.save({"model": theirs.sharded_state_dict(metadata=metadata())}, str(tmp_path))
    state = dist_checkpointing.load({"model": ours.sharded_state_dict(metadata=metadata())}, str(tmp_path))
    ours.load_state_dict(state["model"])
    theirs_named = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert torch.equal(p, theirs_named[name]), name

    tokens = torch.randint(0, TINY.vocab_size, (2, 20), generator=generator)
    positions = torch.arange(20).expand(2, 20)
    mask = torch.ones(20, 20, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, positions), theirs(tokens, positions, mask), atol=1e-4, rtol=1e-4)
