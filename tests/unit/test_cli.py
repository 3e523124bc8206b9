"""Laws of the command line: a mistake costs half a second, not the imports of torch and ray; it is one message with exit code 2; what is
right gets as far as the loop; bugs keep their traceback."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gptoss.checkpoint.progress import MARKER
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.load import load
from megatron_gptoss.obs.run_dir import RunDir, write_atomic

ROOT = Path(__file__).parents[2]
TINY, DEMO = ROOT / "configs" / "tiny.toml", ROOT / "configs" / "demo.toml"

# Refuses what must not be imported before all checks have passed, and ends the process in a way no other failure does.
GUARDED = """
import importlib.abc, sys
class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray", "vllm", "megatron", "transformers"):
            sys.stdout.write("REACHED " + name); sys.stdout.flush()
            import os; os._exit(77)
sys.meta_path.insert(0, Guard())
sys.argv = ["gptoss", *sys.argv[1:]]
from megatron_gptoss.cli import main
main()
"""


def gptoss(*arguments: str | Path, cwd: Path, code: str = GUARDED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with one of everything that a user could point at wrongly."""
    (tmp_path / "broken.toml").write_text("[rl]\nlr = \n")
    (tmp_path / "typo.toml").write_text("[rl]\nclip_hihg = 0.3\n")
    (tmp_path / "type.toml").write_text('[rl]\nlr = "fast"\n')
    (tmp_path / "rule.toml").write_text("[rollout]\ngroup_size = 7\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\nnot JSON\n')
    question = '{{"question": "How much is {0}?", "answer": "#### {0}"}}\n'
    (tmp_path / "one.jsonl").write_text(question.format(1))
    (tmp_path / "good.jsonl").write_text("".join(question.format(n) for n in range(100)))
    for name, model, more in (("hf", None, {}), ("wide", {"hidden_size": 256}, {}), ("mxfp4", {}, {"quant_method": "mxfp4"})):
        (tmp_path / name).mkdir()
        if model is not None:
            write_hf_config(load([TINY]).config.model.model_copy(update=model), tmp_path / name)
        if more:
            file = tmp_path / name / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": more}))
    (tmp_path / "wide" / MARKER).write_text("")
    (tmp_path / "mxfp4" / "model.safetensors").write_text("")
    RunDir.create(tmp_path / "runs" / "run-taken", load([TINY]).config)
    other = RunDir.create(tmp_path / "runs" / "run-sft", load([TINY]).config)
    write_atomic(other.manifest_file, '{"command": "sft"}')
    with socket.socket() as taken:
        taken.bind(("", 0))
        (tmp_path / "port.toml").write_text(f"[cluster]\nfirst_port = {taken.getsockname()[1]}\nnum_ports = 1\n")
        yield tmp_path


GSM8K = ["--task.name=gsm8k", "--task.path=good.jsonl"]
BAD = [
    (["train"], "ConfigError: gptoss train needs a configuration"),
    (["train", "none.toml"], "ConfigError: configuration file none.toml does not exist"),
    (["train", "broken.toml"], "ConfigError: broken.toml:2 is not valid TOML"),
    (["train", TINY, "typo.toml"], "ConfigError: unknown key 'rl.clip_hihg' (typo.toml:2). Nearest: rl.clip_high"),
    (["sft", TINY, "type.toml"], 'ConfigError: rl.lr = "fast" (type.toml:2) cannot be used'),
    (["eval", TINY, "rule.toml"], "ConfigError: rollout.group_size = 7 (rule.toml:2) does not divide rl.sequences_per_step = 64"),
    (["train", TINY, "--rl.clip_hihg=1"], "ConfigError: unknown key 'rl.clip_hihg' (flag --rl.clip_hihg)"),
    (["train", TINY, "--resum", "x"], "ConfigError: unknown key 'resum'"),
    (["train", TINY, "--run.id=taken"], "ConfigError: run directory runs/run-taken exists already"),
    (["train", TINY, "--resume", "runs/run-none"], 'ConfigError: run.resume = "runs/run-none" (flag --resume) does not exist.'),
    (["train", "--resume", "runs/run-taken"], "CheckpointError: run.resume"),
    (["train", "--resume", "runs/run-sft"], "ConfigError: run.resume"),
    (["train", TINY, "--init", "hf"], 'ConfigError: run.init = "hf" (flag --init): hf is neither'),
    (["train", TINY, "--task.name=arithmetik"], "ConfigError: task.name = 'arithmetik'"),
    (["train", TINY, "--task.name=gsm8k"], "ConfigError: task.path is empty"),
    (["train", TINY, "--task.name=gsm8k", "--task.path=none.jsonl"], "DataError: task.path = none.jsonl is not a file."),
    (["train", TINY, "--task.name=gsm8k", "--task.path=empty.jsonl"], "DataError: task.path = empty.jsonl is empty."),
    (["train", TINY, "--task.name=gsm8k", "--task.path=bad.jsonl"], "DataError: bad.jsonl:2"),
    (["train", TINY, "--cluster.device=cuda", "--parallel.data=32"], "MachineError: parallel.data = 32 trainer ranks"),
    (["train", TINY, "port.toml"], "MachineError: all ports from "),
    (["train", TINY, "--init", "wide"], 'CheckpointError: run.init = "wide" (flag --init) holds another architecture'),
    (["train", TINY, "--init", "mxfp4"], 'CheckpointError: run.init = "mxfp4" (flag --init): mxfp4/config.json has quantization_config'),
    (["sft", TINY, *GSM8K], "ConfigError: task.name = gsm8k has no demonstrations"),
    (["eval", TINY, "--run.final_eval_prompts=8"], "ConfigError: run.final_eval_prompts = 8 (flag --run.final_eval_prompts) is for gptoss"),
    (
        ["eval", TINY, "--eval.k=1,8"],
        'ConfigError: eval.k = "1,8" (flag --eval.k) asks for pass@8, and eval.samples_per_prompt = 4 (default)',
    ),
    (["train", TINY, *GSM8K], "ConfigError: prompt gsm8k/"),
    (["train", TINY, "--task.name=gsm8k", "--task.path=one.jsonl"], "DataError: task.path = one.jsonl has too few problems"),
    (["plan", TINY, "--explain", "rl.clip"], "ConfigError: unknown key 'rl.clip' (flag --explain)"),
    (["plan", TINY, "rule.toml"], "ConfigError: rollout.group_size = 7"),
]


@pytest.mark.parametrize(("arguments", "start"), BAD)
def test_a_mistake_is_one_message_with_exit_code_2_before_any_heavy_import(place, arguments, start):
    done = gptoss(*arguments, cwd=place)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith(start)
    assert done.stderr.count("Error: ") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["sft", "train", "eval"])
def test_what_is_right_reaches_the_loop(place, command):
    done = gptoss(command, TINY, DEMO, "--rl.clip_high", "0.3", cwd=place)
    assert done.returncode == 77 and done.stdout.startswith("REACHED "), done


def test_plan_needs_no_gpu_and_no_torch_and_starts_nothing(place):
    before = sorted(place.rglob("*"))
    done = gptoss("plan", ROOT / "configs" / "120b.toml", cwd=place)
    assert done.returncode == 0 and "116.83 billion parameters" in done.stdout, done
    assert "two buckets of weights to be received 7.9 GiB" in done.stdout
    assert sorted(place.rglob("*")) == before


def test_plan_refuses_an_engine_that_does_not_fit_after_it_has_said_what_it_is(place):
    done = gptoss("plan", ROOT / "configs" / "120b.toml", "--rollout.tensor_parallel=1", cwd=place)
    assert done.returncode == 2 and "memory of an engine" in done.stdout, done
    assert done.stderr.startswith("ConfigError: an engine needs 218.2 GiB")


def test_explain_names_value_and_origin(place):
    done = gptoss("plan", TINY, "--rl.lr", "0.5", "--explain", "rl.lr", cwd=place)
    assert done.stdout.startswith("rl.lr = 0.5 (flag --rl.lr)\n")


def test_a_resumed_run_without_files_uses_its_own_configuration(place):
    config = load([TINY]).config
    RunDir.create(place / "runs" / "run-own", config)
    done = gptoss("plan", "--resume", "runs/run-own", "--explain", "model.hidden_size", cwd=place)
    assert done.stdout.startswith("model.hidden_size = 128 (runs/run-own/config.toml:")


def test_help_tells_a_newcomer_how_flags_work(place):
    top, train = gptoss("--help", cwd=place), gptoss("train", "--help", cwd=place)
    assert top.returncode == train.returncode == 0
    assert all(verb in top.stdout for verb in ("plan", "check", "sft", "train", "eval"))
    assert all(words in train.stdout for words in ("--rl.clip_high=0.28", "--explain", "--resume", "--init"))


def test_a_verb_that_does_not_exist_is_a_usage_error(place):
    done = gptoss("trian", TINY, cwd=place)
    assert done.returncode == 2 and "train" in done.stderr and "Traceback" not in done.stderr


def fake_loop(body: str) -> str:
    """The command line with a training loop that only does `body`."""
    lines = [
        "import sys, types",
        "loop = types.ModuleType('megatron_gptoss.loop.train')",
        f"def run_training(loaded, plan):\n    {body}",
        "loop.run_training = run_training",
        "sys.modules['megatron_gptoss.loop.train'] = loop",
        "sys.argv = ['gptoss', *sys.argv[1:]]",
        "from megatron_gptoss.cli import main",
        "main()",
    ]
    return "\n".join(lines)


def test_ctrl_c_is_one_line_and_130(place):
    done = gptoss("train", TINY, cwd=place, code=fake_loop("raise KeyboardInterrupt"))
    assert done.returncode == 130 and done.stderr.startswith("interrupted") and done.stderr.count("\n") == 1


def test_a_run_that_failed_is_one_message_and_1(place):
    done = gptoss("train", TINY, cwd=place, code=fake_loop("from megatron_gptoss.errors import ParityError; raise ParityError('gap 0.3')"))
    assert (done.returncode, done.stderr) == (1, "ParityError: gap 0.3\n")


def test_a_bug_keeps_its_traceback(place):
    done = gptoss("train", TINY, cwd=place, code=fake_loop("1 / 0"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_a_reader_that_goes_away_is_no_error(place):
    line = f"{sys.executable} -m megatron_gptoss.cli plan {TINY} --explain rl | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=place, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
