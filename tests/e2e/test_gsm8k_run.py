"""GSM8K with the real Harmony encoding through the whole path. A tiny random policy scores near 0; run and archive must be right."""

import json

from tests.helpers.runs import ROOT, metrics, must
from tests.helpers.shared_data import shared_file


def test_one_step(tmp_path):
    path = shared_file("gsm8k_train.jsonl")
    configs = [str(ROOT / "configs" / name) for name in ("tiny.toml", "gsm8k.toml")]
    must(
        "train", *configs, f"--task.path={path}", "--run.id=g", "--run.steps=1", "--rl.sequences_per_step=8", "--run.final_eval_prompts=2",
        "--rl.drop_uniform_groups=false", cwd=tmp_path,
    )  # fmt: skip
    run = tmp_path / "runs" / "gsm8k-g"
    row = metrics(run)[1]
    assert row["policy/ratio_max_abs_dev"] == 0.0
    assert row["mismatch/logp_abs_max"] < 1e-4
    questions = {json.loads(line)["question"] for line in path.read_text().splitlines()}
    archive = [json.loads(line) for line in (run / "rollouts" / "step-1.jsonl").read_text().splitlines()]
    assert len(archive) == 8
    for rollout in archive:
        assert rollout["prompt"] in questions
        assert rollout["text"].startswith("<|start|>system<|message|>You are ChatGPT")
        assert rollout["text"].count("<|start|>assistant") >= 1
        assert max(rollout["token_ids"]) < 201_088
        assert rollout["reward"] in (0.0, 1.0)
