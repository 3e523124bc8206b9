"""At the published window and YaRN parameters, log-probs and gradients equal Hugging Face's at lengths around the window (129, 300), behind
YaRN's original context (4,097) and far behind it (16,384); and YaRN's table bends where it should.

Models are small but for what depends on the length: head size, window, RoPE.
"""

import math

import pytest
import torch

from megatron_gptoss.checkpoint.weight_map import export_hf
from megatron_gptoss.config.schema import ModelConfig
from tests.helpers.tiny_model import hugging_face_model, our_model, packed_batch, strong_tensors

PUBLISHED = ModelConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    num_local_experts=4, num_experts_per_tok=2, vocab_size=48, sliding_window=128,
)  # fmt: skip
# One head: our reference backend holds a few matrices of length x length for each.
ONE_HEAD = PUBLISHED.model_copy(update={"num_attention_heads": 1})
# Log-probs are between -8 and -4, where neighbouring float32 values are 4.8e-7 apart; 3e-6 was seen at every length. A window that is one
# key too wide or plain RoPE shows as 1e-2 and more (test_a_broken_model_is_seen_at_this_length).
TOLERANCE = 2e-5
# A router's logits differ by rounding too, about 1e-6 here. Where two experts are closer than that, the models may choose differently and
# both are right; the weights' seeds are such that none are.
LEAST_GAP = 2e-5


def hugging_face(model: ModelConfig, seed: int, folder):
    """(weights, transformers' model, list that its routers append each token's gap to: between the last expert chosen and the next one)."""
    tensors = dict(strong_tensors(model, seed))
    hf = hugging_face_model(model, tensors, folder)
    gaps: list[torch.Tensor] = []

    def watch(_module, _inputs, output):
        best = output[0].topk(model.num_experts_per_tok + 1, dim=-1).values
        gaps.append(best[..., -2] - best[..., -1])

    for layer in hf.model.layers:
        layer.mlp.router.register_forward_hook(watch)
    return tensors, hf, gaps


def logp_in_pieces(hf, tokens_1T: torch.Tensor, piece: int) -> torch.Tensor:
    """[T, V]. Eager attention over everything at once would hold several T x T matrices; with a cache it holds piece x T."""
    from transformers import DynamicCache

    cache = DynamicCache(config=hf.config)
    with torch.no_grad():
        logits = [hf(part, past_key_values=cache, use_cache=True).logits[0] for part in tokens_1T.split(piece, dim=1)]
    return torch.cat(logits).log_softmax(-1)


def our_logp(model, batch) -> torch.Tensor:
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = batch
    packed = packed_params(cu_seqlens, tokens.shape[1])
    return model(input_ids=tokens, position_ids=positions, packed_seq_params=packed)[0].log_softmax(-1)


def summed_loss(logp_TV: torch.Tensor, tokens_1T: torch.Tensor) -> torch.Tensor:
    return -logp_TV[:-1].gather(1, tokens_1T[0, 1:, None]).sum()


@pytest.mark.parametrize("length", [129, 300, 4097])
def test_log_probs_and_every_gradient_equal_hugging_face(one_rank, tmp_path, length):
    tensors, hf, gaps = hugging_face(PUBLISHED, 1, tmp_path)
    batch = packed_batch([length], PUBLISHED.vocab_size, seed=length)
    theirs_TV = hf(batch[0]).logits[0].log_softmax(-1)
    assert torch.cat(gaps).min() > LEAST_GAP
    model = our_model(PUBLISHED, one_rank, tensors)
    ours_TV = our_logp(model, batch)
    torch.testing.assert_close(ours_TV, theirs_TV, atol=TOLERANCE, rtol=0)

    summed_loss(theirs_TV, batch[0]).backward()
    summed_loss(ours_TV, batch[0]).backward()
    ours = dict(export_hf(model, PUBLISHED, value=lambda p: p.grad))
    for name, parameter in hf.named_parameters():
        deviation = (ours[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert deviation < TOLERANCE, f"{name}: {deviation:.1e} of its largest entry"


def test_log_probs_equal_hugging_face_at_16384_tokens(one_rank, tmp_path):
    tensors, hf, gaps = hugging_face(ONE_HEAD, 5, tmp_path)
    batch = packed_batch([16384], ONE_HEAD.vocab_size, seed=16384)
    theirs_TV = logp_in_pieces(hf, batch[0], 1024)
    assert torch.cat(gaps).min() > LEAST_GAP
    with torch.no_grad():
        ours_TV = our_logp(our_model(ONE_HEAD, one_rank, tensors), batch)
    torch.testing.assert_close(ours_TV, theirs_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("fault", ["window", "yarn"])
@pytest.mark.parametrize("length", [129, 4097])
def test_a_broken_model_is_seen_at_this_length(one_rank, tmp_path, length, fault):
    tensors, hf, _ = hugging_face(PUBLISHED, 1, tmp_path)
    batch = packed_batch([length], PUBLISHED.vocab_size, seed=length)
    with torch.no_grad():
        deviation = our_logp(our_model(PUBLISHED, one_rank, tensors, fault=fault), batch) - logp_in_pieces(hf, batch[0], 1024)
    assert deviation.abs().max() > 1e-2
    if fault == "window":  # the first query that sees one key too many is the 129th
        assert deviation[:128].abs().max() < TOLERANCE


def test_yarns_table_bends_between_its_two_corrections(one_rank, tmp_path):
    """The published parameters: theta 150,000, factor 32, original context 4,096, beta 32 and 1, heads of 64. Frequencies that turn more
    than 32 times in 4,096 tokens stay, those that turn less than once are slowed 32 times, and from channel low = 8.0928 to high = 17.398
    (not rounded) the share of the slowed one rises linearly."""
    tensors, hf, _ = hugging_face(PUBLISHED, 1, tmp_path)
    rotary = our_model(PUBLISHED, one_rank, tensors).rotary_pos_emb
    angles, factor = rotary(16384)
    ours = angles[1, 0, 0, :32].double()  # the angles of position 1 are the frequencies
    assert factor == pytest.approx(0.1 * math.log(32) + 1)
    assert factor == hf.model.rotary_emb.attention_scaling
    # A frequency that is off by one bit is off by 16,384 times as much at the last token, 1e-3 of a turn.
    torch.testing.assert_close(ours, hf.model.rotary_emb.inv_freq.double(), atol=0, rtol=2**-23)

    channel = torch.arange(32, dtype=torch.float64)
    plain = 150000.0 ** (-2 * channel / 64)
    slowed = (plain - ours) / (plain - plain / 32)
    low, high = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150000)) for turns in (32, 1))
    assert (low, high) == (pytest.approx(8.0928, abs=5e-5), pytest.approx(17.398, abs=5e-4))
    torch.testing.assert_close(slowed, ((channel - low) / (high - low)).clamp(0, 1), atol=1e-6, rtol=0)
    rising = slowed[9:18].diff()  # and the same from the table alone: where its straight line meets 0 and 1
    slope = (slowed[17] - slowed[9]) / 8
    torch.testing.assert_close(rising, slope.expand(8), atol=1e-6, rtol=0)
    assert 9 - slowed[9] / slope == pytest.approx(8.0928, abs=1e-4)
    assert 17 + (1 - slowed[17]) / slope == pytest.approx(17.398, abs=5e-4)
