"""One cluster for all tests of this folder, and the jobs that need no attention: submitted at once, looked at later.

node1-3: the undisturbed run, then the disturbed one. node4, 5: the job that is cancelled. node6, 7: wrong settings, one after the other.
node8: runs that get nowhere.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.runs import CONFIGS, ROOT
from tests.slurm.cluster import Cluster

LINE = (
    *CONFIGS, str(ROOT / "configs" / "deterministic.toml"), "--run.save_every=1", "--run.eval_every=0", "--run.final_eval_prompts=2",
    "--rl.sequences_per_step=16", "--rollout.group_size=4", "--rl.drop_uniform_groups=false", "--parity.enabled=false",
)  # fmt: skip
STEPS = 14  # five starts do at least one each, and go on for some while they are being disturbed
TWO = ("--nodes=2",)

# What is set, and what is said. /tmp/ray is the folder that each node has for itself; "here" in it is on node6 alone.
WRONG_SETTINGS = {
    "mount": ({"GPTOSS_MOUNTS": "/tmp/ray/here"}, "FAIL node7: /tmp/ray/here (GPTOSS_MOUNTS) is not there"),
    "package": ({"GPTOSS_VENV": "/tmp/ray/here"}, "FAIL node7: no gptoss on this node (GPTOSS_VENV = /tmp/ray/here"),
    "interface": ({"GPTOSS_INTERFACE": "ib7"}, "FAIL node7: no address on the interface ib7 (GPTOSS_INTERFACE). There are: eth0"),
    "loopback": ({"GPTOSS_INTERFACE": "lo"}, "its name stands for 127.0.0.1, where no other node finds it. Set GPTOSS_INTERFACE"),
    "port": ({"GPTOSS_PORT": 24680}, "FAIL node6: port 24680 is in use. Set GPTOSS_PORT"),
    "container": ({"GPTOSS_CONTAINER": "docker"}, "GPTOSS_CONTAINER = docker"),
    "image": ({"GPTOSS_CONTAINER": "pyxis"}, "GPTOSS_IMAGE says no image"),
}
TOO_MANY_RANKS = (
    "--cluster.device=cuda", "--cluster.gpus_per_node=3", "--parallel.data=3", "--rl.sequences_per_step=24", "--rollout.group_size=4",
)  # fmt: skip
SAVES_AND_CRASHES = 'mkdir -p "$run/checkpoints/step-000001"; touch "$run/checkpoints/step-000001/COMPLETE"; echo boom; exit 7'


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster(nodes=8, gpus=2)
    yield made
    made.down()


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> str:
    """The job that nothing happens to, on two nodes."""
    return cluster.sbatch("train.sbatch", *LINE, f"--run.steps={STEPS}", options=(*TWO, "--nodelist=node1,node2"))


def check_three(cluster: Cluster) -> str:
    """launch/check.sbatch on node6, 7 and 8; on node7 the environment is not what it is elsewhere."""
    for node in ("node6", "node7", "node8"):
        environment = Path(sys.executable).parent.parent if node != "node7" else cluster.stand_in("exit 0")
        cluster.local(node).joinpath("venv").symlink_to(environment)
    nodes = ("--nodes=3", "--nodelist=node6,node7,node8")
    return cluster.sbatch("check.sbatch", *CONFIGS, "--json", options=nodes, site=cluster.site(GPTOSS_VENV="/tmp/ray/venv"))


@pytest.fixture(scope="session", autouse=True)
def unattended(cluster: Cluster, undisturbed: str) -> dict[str, str]:
    """Numbers of the jobs by name. All but "gpus" are over without a real Ray."""
    cluster.local("node6").joinpath("here").symlink_to(cluster.stand_in("exit 0"))
    listener = "import socket, time; s = socket.socket(); s.bind(('', 24680)); s.listen(); time.sleep(1800)"
    cluster.lab("node", "node6", "bash", "-c", f'python3 -c "{listener}" </dev/null >/dev/null 2>&1 & disown')
    time.sleep(1.0)
    there = (*TWO, "--nodelist=node6,node7")
    jobs = {}
    for name, (settings, _) in WRONG_SETTINGS.items():
        jobs[name] = cluster.sbatch("train.sbatch", *LINE, options=there, site=cluster.site(**settings))
    # A Ray of its own, so it waits for the one of the undisturbed job to end.
    later = (*there, "--gpus-per-node=2", f"--dependency=afterany:{undisturbed}")
    jobs["gpus"] = cluster.sbatch("train.sbatch", *LINE, *TOO_MANY_RANKS, options=later)
    alone = ("--nodes=1", "--nodelist=node8")
    crashes = cluster.site(GPTOSS_VENV=cluster.stand_in(SAVES_AND_CRASHES), GPTOSS_MAX_CRASHES=2)
    jobs["crashes"] = cluster.sbatch("train.sbatch", *LINE, options=alone, site=crashes)
    deaf = cluster.site(GPTOSS_VENV=cluster.stand_in("trap '' USR1; sleep 300"), GPTOSS_MAX_CRASHES=2, GPTOSS_SAVE_S=2)
    jobs["check"] = check_three(cluster)
    jobs["short"] = cluster.sbatch("train.sbatch", *LINE, options=(*alone, "--time=1", "--signal=B:USR1@60"), site=deaf)
    return jobs
