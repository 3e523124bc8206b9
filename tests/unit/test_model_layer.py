"""What model/layer.py is there for: Megatron's own parts still refuse or get wrong what they do. A failure here is good news."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tiny_model import TINY


def config(one_rank, **changes):
    from megatron_gptoss.model.build import megatron_config

    made = megatron_config(TINY, one_rank, dtype=torch.float32)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_bug_4_megatrons_norm_refuses_sequence_parallelism(one_rank):
    """Workaround: Norm."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_gptoss.model.layer import Norm

    divided = config(one_rank, sequence_parallel=True)
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(divided, TINY.hidden_size)
    assert Norm(divided, TINY.hidden_size, eps=1e-5).weight.sequence_parallel is True

    x = torch.randn(3, TINY.hidden_size)
    theirs = WrappedTorchNorm(config(one_rank), TINY.hidden_size, eps=1e-5)
    assert torch.equal(Norm(config(one_rank), TINY.hidden_size, eps=1e-5)(x), theirs(x)), "the same numbers where both work"


def test_bug_5_megatron_rotates_a_contiguous_shard_as_if_it_were_zigzag(one_rank):
    """Workaround: RotatedSelfAttention. The second half of a stream of two sequences, as rank 1 of 2 context-parallel ranks holds it."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd, apply_rotary_pos_emb

    positions = torch.cat([torch.arange(4), torch.arange(12)])
    angles = torch.outer(positions.float(), torch.linspace(0.1, 1.0, 32)).repeat(1, 2)[:, None, None]
    q_THD = torch.randn(16, 2, 64)
    half = slice(8, 16)
    right = _apply_rotary_pos_emb_bshd(q_THD[:, None], angles)[half].squeeze(1)
    rank = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    cu_seqlens = torch.tensor([0, 4, 16], dtype=torch.int32)
    theirs = apply_rotary_pos_emb(q_THD[half], angles, config(one_rank), cu_seqlens=cu_seqlens, cp_group=rank)  # pyright: ignore[reportArgumentType]
    assert (theirs - right).abs().max() > 0.1
