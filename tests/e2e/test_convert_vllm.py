"""What we export is loaded by transformers and by vLLM, each with its own loader, and both compute the source's log-probs; the Megatron
side is loaded by our model as a run loads it.

Every weight is asymmetric, every expert different, experts' matrices square in one model as in the published ones: a transpose, an exchange
of halves or of experts that both directions of the table make alike would go unseen by bits, and shows here.
vLLM reads the BF16 export only: MXFP4 on a CPU was not tried with it. transformers reads both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_gptoss.checkpoint.convert import convert
from megatron_gptoss.checkpoint.forward import log_probs
from megatron_gptoss.checkpoint.hf_files import write_hf_folder
from megatron_gptoss.checkpoint.sources import open_source
from megatron_gptoss.rollout.vllm_settings import EngineSettings, engine_environment
from tests.helpers.checkpoints import openai_folder, random_mxfp4, tensors_of, write_source
from tests.helpers.runs import CONFIGS, gptoss, must
from tests.helpers.tiny_model import SQUARE, TINY, hugging_face_model

SAME = 1e-5  # nats; two float32 implementations differ by 2e-6 to 4e-6
TOKENS = [(37 * place + 5) % TINY.vocab_size for place in range(60)]  # several windows of 8

# vLLM's offline engine with the settings of a rollout engine, but with the folder's own weights. Prints log-probs of the given tokens.
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from megatron_gptoss.checkpoint.hf_files import write_hf_folder
from megatron_gptoss.checkpoint.sources import open_source
from megatron_gptoss.rollout.vllm_settings import EngineSettings, engine_arguments

if __name__ == "__main__":
    job = json.load(sys.stdin)
    llm = LLM(**engine_arguments(EngineSettings(**job["settings"])) | {"load_format": "auto"})
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=1.0)
    for result in llm.generate([{"prompt_token_ids": job["tokens"]}], asked, use_tqdm=False):
        rows = zip(job["tokens"][1:], result.prompt_logprobs[1:])
        print("LOGP " + json.dumps([row[token].logprob for token, row in rows]), flush=True)
"""


def vllm_log_probs(folder: Path, log: Path) -> torch.Tensor:
    values = {"model_dir": str(folder), "dtype": "float32", "max_model_len": 128, "max_running": 4, "log_path": str(log)}
    script = folder.parent / "offline.py"
    script.write_text(VLLM)
    environment = os.environ | engine_environment(EngineSettings(**values)) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    job = json.dumps({"settings": values, "tokens": TOKENS})
    done = subprocess.run([sys.executable, str(script)], input=job, capture_output=True, text=True, env=environment, timeout=400)
    line = next((line for line in done.stdout.splitlines() if line.startswith("LOGP ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.tensor(json.loads(line.removeprefix("LOGP ")))


@torch.no_grad()
def reference(model, tensors: dict[str, torch.Tensor], folder: Path) -> torch.Tensor:
    """Hugging Face's model with these tensors, put into it by name: no loader, no table."""
    folder.mkdir()
    logits = hugging_face_model(model, {name: t.float() for name, t in tensors.items()}, folder)(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def converted(request, tmp_path_factory):
    """(kind of the source, folder): `source`, `mg` (Megatron), `hf` (numbers, by way of Megatron), `q` (blocks, by way of Megatron)."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bf16":
        write_source(folder / "source", SQUARE)
    else:
        random_mxfp4(folder / "source", SQUARE)
    convert(folder / "source", folder / "mg", "megatron")
    convert(folder / "mg", folder / "hf", "hf")
    convert(folder / "mg", folder / "q", "hf-mxfp4")
    return request.param, folder


@torch.no_grad()
def dequantised_by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    return dict(model.named_parameters())


def test_transformers_megatron_and_vllm_compute_the_source(converted):
    kind, folder = converted
    tensors = tensors_of(folder / "source") if kind == "bf16" else dequantised_by_transformers(folder / "source")
    expected = reference(SQUARE, tensors, folder / "reference")
    assert float(expected.std()) > 1, "a model that says nothing would hide mistakes"
    assert gap(log_probs(folder / "hf", TOKENS), expected) < SAME, "transformers, numbers"
    assert gap(log_probs(folder / "mg", TOKENS), expected) < SAME, "Megatron"
    if kind == "mxfp4":
        assert gap(log_probs(folder / "q", TOKENS), expected) < SAME, "transformers, blocks"
    assert gap(vllm_log_probs(folder / "hf", folder / "vllm.log"), expected) < SAME, "vLLM, numbers"


def test_openai_s_folder_computes_what_the_published_one_does(tmp_path):
    random_mxfp4(tmp_path / "q")
    openai_folder(tmp_path / "original", tmp_path / "q")
    convert(tmp_path / "original", tmp_path / "hf", "hf")
    assert gap(log_probs(tmp_path / "hf", TOKENS), log_probs(tmp_path / "q", TOKENS)) == 0


def test_the_command_line_converts_a_run_compares_it_and_computes_both(warm, tmp_path):
    """A run directory as the source, in float32, saved by training; the result serves as --init of a run; a wrong result is refused."""
    (tmp_path / "ids.txt").write_text("[" + ", ".join(map(str, range(20, 120))) + "]")
    said = must("convert", str(warm), "hf", "--to", "hf", "--verify", "--tokens", "ids.txt", cwd=tmp_path)
    assert re.search(r"sinks +2 of 2 equal", said) and re.search(r"router biases +2 of 2 equal", said)
    found = re.search(r"log-probs of 100 tokens: largest difference (\S+), mean", said)
    assert found and float(found[1]) < SAME
    assert all(row["equal"] for row in json.loads((tmp_path / "hf.verify.json").read_text())["tensors"])

    must("convert", "hf", "mg", "--to", "megatron", cwd=tmp_path)
    assert "mg" in must("plan", *CONFIGS, "--init", "mg", cwd=tmp_path)

    other = tmp_path / "other"
    write_hf_folder(other, open_source(tmp_path / "hf").model, ((n, t + 0.01) for n, t in tensors_of(tmp_path / "hf").items()))
    refused = gptoss("convert", "hf", "other", "--to", "hf", "--verify", cwd=tmp_path)
    assert refused.returncode == 2 and "CheckpointError: the result is not the source: 0 tensors missing, 0 unexpected" in refused.stderr
