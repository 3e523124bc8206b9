"""From sbatch to a finished run, on a real Slurm: two nodes train, every disturbance is survived or named, nothing is left behind.

One chain of disturbances in one job, since each start costs the imports of torch, Ray and vLLM. What is compared is exact: the disturbed
run's metrics are those of the undisturbed one, to the last bit.
"""

import json

import pytest

from tests.helpers.runs import timeless, wait_for
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.conftest import LINE, STEPS, TWO

START_S = 400  # from submission to a first step; 25 s on a quiet machine of two cores
BYSTANDER = "raylet-of-somebody-else 1000"

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(1800)]


def test_a_job_trains_on_two_nodes_and_leaves_nothing(cluster, undisturbed):
    end = cluster.await_end(undisturbed, START_S + 20 * STEPS)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "0"), cluster.output(undisturbed)
    assert sorted(cluster.metrics(undisturbed)) == list(range(STEPS + 1))
    places = json.loads((cluster.run(undisturbed) / "logs" / "places.json").read_text())
    assert [(p["who"], p["host"]) for p in places] == [("trainer rank 0", "node1"), ("engine-0", "node2")]
    cluster.await_quiet(undisturbed, ("node1", "node2"))


def test_scancel_ends_a_job_and_nothing_else(cluster):
    nodes = ("node4", "node5")
    for node in nodes:
        cluster.lab("node", node, "bash", "-c", f"exec -a {BYSTANDER.split()[0]} sleep 1000 </dev/null >/dev/null 2>&1 & disown")
    job = cluster.sbatch("train.sbatch", *LINE, "--run.steps=500", options=(*TWO, f"--nodelist={','.join(nodes)}"))
    cluster.await_step(job, 1, START_S)
    for node in nodes:
        lines = cluster.lab("node", node, "ps", "-e", "-o", "ni=,args=").splitlines()
        assert {line.split()[0] for line in lines if "ray::" in line} == {"0"}, "what trains yields to nobody"
    cluster.lab("exec", "scancel", job)
    end = cluster.await_end(job, 60)
    assert end["JobState"] == "CANCELLED", end
    assert "start 2" not in cluster.output(job)
    cluster.await_quiet(job, nodes, expected=(BYSTANDER,))
    for node in nodes:
        assert cluster.processes(node) == [BYSTANDER], "what the job did not start lives on"


def test_a_job_goes_on_after_its_time_limit_a_killed_driver_a_requeue_and_lost_nodes(cluster, undisturbed):
    job = cluster.sbatch(
        "train.sbatch", *LINE, f"--run.steps={STEPS}", options=(*TWO, "--time=60", "--signal=B:USR1@120", "--nodelist=node1,node2")
    )

    # Slurm's smallest limit is a minute, and it looks at limits every half minute; meanwhile the driver stands still.
    cluster.await_step(job, 1, START_S)
    cluster.lab("node", "node1", "kill", "-STOP", driver(cluster, "node1"))
    cluster.time_limit(job, cluster.minutes(job) + 2)
    cluster.await_output(job, "Slurm warns that the time is nearly up", 90)
    cluster.lab("node", "node1", "kill", "-CONT", driver(cluster, "node1"))
    cluster.await_output(job, "asked to stop (SIGUSR1)", 60)
    cluster.await_output(job, "to be started again", 60)
    cluster.time_limit(job, 60)
    cluster.lab("exec", "scontrol", "update", f"JobId={job}", "ReqNodeList=")  # from here on Slurm chooses

    first, _ = await_start(cluster, job, 2)
    cluster.lab("node", first, "kill", "-9", driver(cluster, first))
    cluster.await_output(job, "the driver ended with 137", 60)

    await_start(cluster, job, 3)
    cluster.lab("exec", "scontrol", "requeue", job)

    _, cut = await_start(cluster, job, 4)
    cluster.lab("cut", cut)
    cluster.await_output(job, "start 5", 300)
    assert_named(cluster, job, 4, cut)
    cluster.lab("join", cut)

    first, lost = await_start(cluster, job, 5)
    assert lost != cut
    # Nothing of start 4 is left on the node that was cut off. The run must not end meanwhile: it still has a node to lose.
    cluster.lab("node", first, "kill", "-STOP", driver(cluster, first))
    cluster.await_quiet_node(cut, 120)
    cluster.lab("node", first, "kill", "-CONT", driver(cluster, first))
    cluster.lab("crash", lost)
    cluster.await_output(job, "start 6", 240)
    assert_named(cluster, job, 5, lost)

    end = cluster.await_end(job, START_S)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "5"), cluster.output(job)
    mine, theirs = cluster.metrics(job), cluster.metrics(undisturbed)
    assert sorted(mine) == sorted(theirs)
    for step in mine:
        assert timeless(mine[step]) == timeless(theirs[step]), f"step {step}"
    cluster.lab("boot", lost)
    wait_for(lambda: cluster.lab("exec", "sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == cluster.names, f"{lost} again", poll=1.0)
    for node in cluster.names[:3]:
        cluster.await_quiet_node(node, 30)
    assert not cluster.lab("exec", "squeue", "-h")


def await_start(cluster: Cluster, job: str, start: int) -> list[str]:
    """Until this start of the job has done a step of its own; its nodes."""
    cluster.await_output(job, f"start {start}, on", 180)
    cluster.await_step(job, max(cluster.metrics(job)) + 1, START_S)
    return cluster.output(job).split(f"start {start}, on ")[1].split(";")[0].split()


def assert_named(cluster: Cluster, job: str, start: int, node: str) -> None:
    """What was said between the beginning of a start and the next one names the node, and is not a traceback."""
    said = cluster.output(job).split(f"start {start},")[1].split(f"start {start + 1},")[0].split("logs:")[1]
    assert node in said, f"{node} is not named:\n{said}"
    assert "Traceback" not in said, said


def driver(cluster: Cluster, node: str) -> str:
    """Its process id there."""
    lines = cluster.lab("node", node, "ps", "-e", "-o", "pid=,args=").splitlines()
    return next(line.split()[0] for line in lines if "/gptoss train " in line)
