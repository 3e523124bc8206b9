"""The plain reference model computes what Hugging Face's does; the Megatron model broken on purpose computes what the reference does when
broken in the same way; and each fault is a fault."""

import pytest
import torch

from megatron_gptoss.model import reference
from megatron_gptoss.types import MicroBatch
from tests.helpers.tiny_model import TINY, hugging_face_model, our_model, strong_tensors

LENGTHS = [40, 23, 9]  # the window is 8
TEMPERATURE = 0.7
FAULTS = [fault for known in reference.FAULTS.values() for fault in known]


@pytest.fixture(scope="module")
def weights():
    return {name: 0.5 * x if "norm" not in name else x for name, x in strong_tensors(TINY, seed=1)}


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, TINY.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def test_log_probs_equal_hugging_face(weights, sequences, tmp_path):
    hf = hugging_face_model(TINY, weights, tmp_path)
    for ids in sequences:
        with torch.no_grad():
            logits = hf(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        found = reference.log_probs(weights, TINY, ids, temperature=TEMPERATURE)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_sequences_together_are_sequences_alone_whatever_the_heads_chunk(weights, sequences, monkeypatch):
    monkeypatch.setattr(reference, "HEAD_TOKENS", 5)
    together = reference.log_probs_of(weights, TINY, [*sequences, [7]], temperature=TEMPERATURE)
    monkeypatch.undo()
    for ids, found in zip(sequences, together, strict=False):
        torch.testing.assert_close(found, reference.log_probs(weights, TINY, ids, temperature=TEMPERATURE), atol=1e-5, rtol=1e-5)
    assert len(together) == len(sequences) + 1 and together[-1].numel() == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_moves_log_probs_beyond_the_window(weights, sequences, fault):
    right, wrong = (reference.log_probs(weights, TINY, sequences[0], temperature=TEMPERATURE, fault=f) for f in ("none", fault))
    assert (right - wrong).abs().max() > 5e-4, "two implementations in float32 differ by 2e-5"
    if fault == "window":
        assert torch.equal(right[: TINY.sliding_window - 1], wrong[: TINY.sliding_window - 1]), "the window is not full yet"


def trainer_log_probs(model, sequences, temperature):
    """Log-probs of a GptOssModel for sequences packed together."""
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens = torch.tensor([t for ids in sequences for t in ids])
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    cu = torch.tensor([0, *torch.tensor([len(ids) for ids in sequences]).cumsum(0).tolist()], dtype=torch.int32)
    with torch.no_grad():
        logits = model(input_ids=tokens[None], position_ids=positions[None], packed_seq_params=packed_params(cu, max(map(len, sequences))))
    parts = (logits[0] / temperature).log_softmax(-1).split([len(ids) for ids in sequences])
    return [part[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0] for part, ids in zip(parts, sequences, strict=True)]


def test_the_broken_megatron_model_is_the_broken_reference_and_mends_to_the_bit(one_rank, weights, sequences):
    from megatron_gptoss.model.faults import MODEL_FAULTS, broken

    model = our_model(TINY, one_rank, weights)
    before = trainer_log_probs(model, sequences, TEMPERATURE)
    for fault in ("none", *MODEL_FAULTS):
        with broken(model, fault):
            found = trainer_log_probs(model, sequences, TEMPERATURE)
        for ids, logp in zip(sequences, found, strict=True):
            expected = reference.log_probs(weights, TINY, ids, temperature=TEMPERATURE, fault=fault)
            torch.testing.assert_close(logp, expected, atol=5e-5, rtol=1e-5, msg=lambda text, f=fault: f"{f}: {text}")
        after = trainer_log_probs(model, sequences, TEMPERATURE)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), fault


def test_faults_of_the_head_in_the_trainer(one_rank, weights, sequences):
    from megatron_gptoss.config.schema import RlConfig, TrainerConfig
    from megatron_gptoss.model.faults import HEAD_FAULTS
    from megatron_gptoss.trainer.step import Trainer

    ids = sequences[1]
    n = len(ids)
    batch = MicroBatch(
        names=("a",), tokens_T=torch.tensor(ids), positions_T=torch.arange(n), cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        max_seqlen=n, predict_N=torch.arange(n - 1), target_N=torch.tensor(ids)[1:], sample_N=torch.zeros(n - 1, dtype=torch.int64),
        advantage_N=torch.zeros(n - 1), engine_logp_N=torch.zeros(n - 1),
    )  # fmt: skip
    for fault in ("none", *HEAD_FAULTS):
        trainer = Trainer(TINY, TrainerConfig(), one_rank, RlConfig(), total_updates=1, fault=fault)
        trainer.load_hf(weights.items())
        found = trainer.score([batch], temperature=TEMPERATURE)[0].logp_N
        expected = reference.log_probs(weights, TINY, ids, temperature=TEMPERATURE, fault=fault)
        torch.testing.assert_close(found[1:], expected[1:], atol=5e-5, rtol=1e-5)


def test_an_unknown_fault_is_refused(weights, one_rank):
    from megatron_gptoss.model.build import build_model

    with pytest.raises(ValueError, match="unknown fault 'windows'"):
        reference.log_probs(weights, TINY, [1, 2, 3], fault="windows")
    with pytest.raises(ValueError, match="unknown fault 'windows'"):
        build_model(TINY, one_rank, fault="windows")
