"""From sbatch to a finished run, on a real Slurm: two nodes train, every disturbance is survived or named, nothing is left behind.

One chain of disturbances in one job, since each start costs the imports of torch, Ray and vLLM. What is compared is exact: the disturbed
run's metrics are those of the undisturbed one, to the last bit.
"""

import json
import sys
import time

import pytest

from tests.helpers.runs import CONFIGS, ROOT, timeless, wait_for
from tests.slurm.cluster import Cluster, why_not

START_S = 400  # from submission to a first step; 25 s on a quiet machine of two cores
LINE = [
    *CONFIGS, str(ROOT / "configs" / "deterministic.toml"), "--run.save_every=1", "--run.eval_every=0", "--run.final_eval_prompts=2",
    "--rl.sequences_per_step=16", "--rollout.group_size=4", "--rl.drop_uniform_groups=false", "--parity.enabled=false",
]  # fmt: skip
STEPS = 9
BYSTANDER = "raylet-of-somebody-else 1000"

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(nodes=3)
    yield made
    made.down()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The job that nothing happens to, on two nodes."""
    job = cluster.sbatch("train.sbatch", *LINE, f"--run.steps={STEPS}", options=("--nodes=2",))
    return job, cluster.await_end(job, START_S + 20 * STEPS)


def test_a_job_trains_on_two_nodes_and_leaves_nothing(cluster, undisturbed):
    job, end = undisturbed
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "0"), cluster.output(job)
    assert sorted(cluster.metrics(job)) == list(range(STEPS + 1))
    places = json.loads((cluster.run(job) / "logs" / "places.json").read_text())
    assert [(p["who"], p["host"]) for p in places] == [("trainer rank 0", "node1"), ("engine-0", "node2")]
    cluster.await_quiet(job)


def test_a_job_goes_on_after_a_warning_a_killed_driver_a_requeue_and_a_lost_node(cluster, undisturbed):
    job = cluster.sbatch("train.sbatch", *LINE, f"--run.steps={STEPS}", options=("--nodes=2",))

    cluster.await_step(job, 1, START_S)
    cluster.lab("exec", "scancel", "--batch", "--signal=USR1", job)  # what Slurm sends before the time limit
    cluster.await_output(job, "asked to stop (SIGUSR1)", 60)
    cluster.await_output(job, "start 2", 90)

    cluster.await_step(job, 3, START_S)
    driver = next(line for line in ps(cluster, "node1") if "gptoss train" in line)
    cluster.lab("node", "node1", "kill", "-9", driver.split()[0])
    cluster.await_output(job, "the driver ended with 137", 60)
    cluster.await_output(job, "start 3", 90)

    cluster.await_step(job, 5, START_S)
    cluster.lab("exec", "scontrol", "requeue", job)
    cluster.await_output(job, "start 4", 120)

    cluster.await_step(job, 7, START_S)
    cluster.lab("crash", "node2")
    cluster.await_output(job, "start 5", 180)  # on node1 and node3
    meanwhile = cluster.output(job).split("start 4")[1].split("start 5")[0].split("logs:")[1]
    assert "node2" in meanwhile, "the lost node is named"
    assert "Traceback" not in meanwhile, meanwhile

    end = cluster.await_end(job, START_S)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "4"), cluster.output(job)
    mine, theirs = cluster.metrics(job), cluster.metrics(undisturbed[0])
    assert sorted(mine) == sorted(theirs)
    for step in mine:
        assert timeless(mine[step]) == timeless(theirs[step]), f"step {step}"
    cluster.lab("boot", "node2")
    wait_for(lambda: cluster.lab("exec", "sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == cluster.names, "node2 again", poll=1.0)


def test_scancel_ends_a_job_and_nothing_else(cluster):
    for node in cluster.names[:2]:
        cluster.lab("node", node, "bash", "-c", f"exec -a {BYSTANDER.split()[0]} sleep 1000 </dev/null >/dev/null 2>&1 & disown")
    job = cluster.sbatch("train.sbatch", *LINE, "--run.steps=500", options=("--nodes=2",))
    cluster.await_step(job, 1, START_S)
    cluster.lab("exec", "scancel", job)
    end = cluster.await_end(job, 60)
    assert end["JobState"] == "CANCELLED", end
    assert "start 2" not in cluster.output(job)
    cluster.await_quiet(job, expected=(BYSTANDER,))
    for node in cluster.names[:2]:
        assert cluster.processes(node) == [BYSTANDER], "what the job did not start lives on"


def ps(cluster: Cluster, node: str) -> list[str]:
    return cluster.lab("node", node, "ps", "-e", "-o", "pid=,args=").splitlines()


@pytest.mark.parametrize(
    ("site", "options", "words"),
    [
        ({"GPTOSS_MOUNTS": "/data/nowhere"}, (), "FAIL node1: /data/nowhere (GPTOSS_MOUNTS) is not there"),
        ({"GPTOSS_VENV": "/opt/none"}, (), "FAIL node2: no gptoss on this node (GPTOSS_VENV = /opt/none"),
        ({"GPTOSS_INTERFACE": "ib7"}, (), "no address on the interface ib7 (GPTOSS_INTERFACE)"),
        ({"GPTOSS_CONTAINER": "docker"}, (), "GPTOSS_CONTAINER = docker"),
    ],
    ids=["mount", "package", "interface", "container"],
)
def test_a_wrong_setting_is_one_clear_message_and_no_second_start(cluster, site, options, words):
    job = cluster.sbatch("train.sbatch", *LINE, options=("--nodes=2", *options), site=cluster.site(**site))
    end = cluster.await_end(job, 60)
    assert (end["JobState"], end["ExitCode"]) == ("FAILED", "2:0"), cluster.output(job)
    assert words in cluster.output(job)
    assert end["Restarts"] == "0"


def test_an_unknown_partition_is_one_message_with_those_there_are(cluster):
    site = str(cluster.site(SBATCH_PARTITION="nowhere"))
    line = [sys.executable, "-m", "megatron_gptoss.cli", "launch", *CONFIGS, "--nodes=2"]
    said = cluster.lab("exec", *line, check=False, GPTOSS_SITE=site, GPTOSS_HOME=str(ROOT))
    assert "MachineError: Slurm refused the job" in said and "partition" in said and "Partitions here: main." in said, said


def test_a_port_in_use_is_named_with_its_node(cluster):
    listener = "import socket, time; s = socket.socket(); s.bind(('', 24680)); s.listen(); time.sleep(60)"
    cluster.lab("node", "node1", "bash", "-c", f'python3 -c "{listener}" </dev/null >/dev/null 2>&1 & disown')
    time.sleep(1.0)
    job = cluster.sbatch("train.sbatch", *LINE, options=("--nodes=2",), site=cluster.site(GPTOSS_PORT=24680))
    end = cluster.await_end(job, 60)
    assert (end["JobState"], end["ExitCode"]) == ("FAILED", "2:0")
    assert "FAIL node1: port 24680 is in use. Set GPTOSS_PORT" in cluster.output(job)
