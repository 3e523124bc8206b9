"""The model computes what Hugging Face's GPT-OSS computes: logits and every gradient, packed or not, and nothing less will do."""

import pytest
import torch

from megatron_gptoss.checkpoint.weight_map import export_hf
from tests.helpers.tiny_model import TINY, hugging_face_model, our_model, packed_batch, strong_tensors

LENGTHS = [19, 23, 10]  # all longer than the window of 8


def next_token_loss(logits_TV: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_TV[:-1].float(), tokens_T[1:], reduction="sum")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Weights, a pack, Hugging Face's logits for it (each sequence alone) and the gradients of the summed loss."""
    tensors = dict(strong_tensors(TINY, seed=1))
    hf = hugging_face_model(TINY, tensors, tmp_path_factory.mktemp("hf"))
    tokens, positions, cu_seqlens = packed_batch(LENGTHS, TINY.vocab_size, seed=2)
    logits, loss = [], torch.zeros(())
    for one in tokens.split(LENGTHS, dim=1):
        logits.append(hf(one).logits[0])
        loss = loss + next_token_loss(logits[-1], one[0])
    loss.backward()
    gradients = {name: p.grad for name, p in hf.named_parameters()}
    return tensors, (tokens, positions, cu_seqlens), torch.cat(logits).detach(), gradients


def run_packed(model, batch):
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = batch
    return model(input_ids=tokens, position_ids=positions, packed_seq_params=packed_params(cu_seqlens, max(LENGTHS)))[0]


def test_logits_and_every_gradient_equal_hugging_face(one_rank, reference):
    tensors, batch, logits_TV, gradients = reference
    model = our_model(TINY, one_rank, tensors)
    ours_TV = run_packed(model, batch)
    torch.testing.assert_close(ours_TV, logits_TV, atol=1e-4, rtol=1e-4)

    parts = zip(ours_TV.split(LENGTHS), batch[0][0].split(LENGTHS), strict=True)
    sum(next_token_loss(logits, tokens) for logits, tokens in parts).backward()
    ours = dict(export_hf(model, TINY, value=lambda p: p.grad))
    assert ours.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert expected.abs().max() > 1e-3, f"{name} is not exercised by this batch"
        torch.testing.assert_close(ours[name], expected, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_batched_rows_equal_packed_sequences(one_rank, reference):
    tensors, (tokens, *_), logits_TV, _ = reference
    model = our_model(TINY, one_rank, tensors)
    rows = torch.stack([tokens[0, :10], tokens[0, 19:29]])  # the first ten tokens of two of the sequences
    positions = torch.arange(10).expand(2, 10)
    logits = model(input_ids=rows, position_ids=positions)
    torch.testing.assert_close(logits, torch.stack([logits_TV[:10], logits_TV[19:29]]), atol=1e-4, rtol=1e-4)


def test_a_sequence_does_not_see_its_neighbours_in_the_pack(one_rank, reference):
    tensors, (tokens, positions, cu_seqlens), logits_TV, _ = reference
    model = our_model(TINY, one_rank, tensors)
    changed = tokens.clone()
    changed[0, :19] = (changed[0, :19] + 7) % TINY.vocab_size
    other = run_packed(model, (changed, positions, cu_seqlens))
    torch.testing.assert_close(other[19:], logits_TV[19:], atol=1e-4, rtol=1e-4)
    assert (other[:19] - logits_TV[:19]).abs().max() > 1


@pytest.mark.parametrize("fault", ["no-sinks", "window", "yarn"])
def test_a_broken_model_is_seen(one_rank, reference, fault):
    tensors, batch, logits_TV, _ = reference
    broken = our_model(TINY, one_rank, tensors, fault=fault)
    assert (run_packed(broken, batch) - logits_TV).abs().max() > 1e-2


def test_head_receives_the_final_hidden_states_and_the_output_matrix(one_rank, reference):
    from megatron_gptoss.model.gpt_oss import packed_params

    tensors, (tokens, positions, cu_seqlens), logits_TV, _ = reference
    model = our_model(TINY, one_rank, tensors)

    def head(hidden_TC, weight_VC):
        return hidden_TC @ weight_VC.t()

    packed = packed_params(cu_seqlens, max(LENGTHS))
    logits = model(input_ids=tokens, position_ids=positions, packed_seq_params=packed, head=head)
    torch.testing.assert_close(logits, logits_TV, atol=1e-4, rtol=1e-4)


def test_recomputing_activations_changes_no_gradient(one_rank, reference):
    tensors, batch, _, _ = reference
    gradients = []
    for granularity in (None, "full"):
        model = our_model(TINY, one_rank, tensors)
        model.config.recompute_granularity = granularity
        model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
        run_packed(model, batch).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name]), name


def test_bfloat16_is_bfloat16_everywhere_and_errs_like_bfloat16(one_rank, reference):
    from megatron_gptoss.checkpoint.weight_map import load_hf
    from megatron_gptoss.model.build import build_model

    # Scaled down, so that no expert is chosen by a hair: another expert is not a rounding error.
    tensors, batch, _, _ = reference
    calm = {name: tensor if "router" in name else 0.3 * tensor for name, tensor in tensors.items()}
    model = build_model(TINY, one_rank, dtype=torch.bfloat16)
    load_hf(model, TINY, calm.items())
    assert {tensor.dtype for _, tensor in export_hf(model, TINY)} == {torch.bfloat16}
    with torch.no_grad():
        rough, exact = run_packed(model, batch).float(), run_packed(our_model(TINY, one_rank, calm), batch)
    relative = (rough - exact).norm() / exact.norm()
    # 2^-9 is bfloat16's rounding; each of two layers adds about ten rounded steps
    assert 2**-9 < relative < 20 * 2**-9
