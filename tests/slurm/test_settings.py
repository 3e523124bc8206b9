"""A wrong setting is one clear message, and a run that gets nowhere is not started for ever.

Most jobs here have a stand-in for Ray and for the driver: what is tested is what the scripts make of them. conftest.py submits them.
"""

import json
import sys

import pytest

from tests.helpers.runs import CONFIGS, ROOT
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.conftest import LINE, WRONG_SETTINGS

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(900)]


def launch(cluster: Cluster, site: object) -> str:
    line = [sys.executable, "-m", "megatron_gptoss.cli", "launch", *CONFIGS, "--nodes=2"]
    return cluster.lab("exec", *line, check=False, GPTOSS_SITE=str(site), GPTOSS_HOME=str(ROOT))


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_wrong_setting_is_one_clear_message_and_no_second_start(cluster, unattended, name):
    job = unattended[name]
    end, said = cluster.await_end(job, 300), cluster.output(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "2:0", "0"), said
    words = WRONG_SETTINGS[name][1]
    assert words in said and "Traceback" not in said, said
    if name in ("mount", "package"):
        assert "FAIL node6" not in said, f"a node that has it is not blamed: {said}"
    if name == "port":
        assert "FAIL node7" not in said, said


def test_nodes_are_checked_together_and_one_that_is_unfit_is_named(cluster, unattended):
    """node7 has no numpy, torch or anything else: another Python. The links are those between the nodes that are left."""
    job = unattended["check"]
    end, said = cluster.await_end(job, 600), cluster.output(job)
    assert (end["JobState"], end["ExitCode"]) == ("FAILED", "2:0"), said
    # srun says that the step has failed, in lines of its own, after the table or wherever it has got to by then.
    table = "".join(line for line in said[said.index("{") :].splitlines(keepends=True) if not line.startswith(("srun: ", "slurmstepd: ")))
    try:
        found, _ = json.JSONDecoder().raw_decode(table)
    except json.JSONDecodeError:
        pytest.fail(said)
    assert found["bad_nodes"] == ["node7"], said
    ways = [(link["from"], link["to"]) for link in found["nodes"][0]["links"]["between"]]
    assert sorted(ways) == [("node6", "node8"), ("node8", "node6")], said
    assert "did not end" in found["nodes"][1]["checks"][0]["found"]


def test_an_unknown_partition_is_one_message_with_those_there_are(cluster):
    said = launch(cluster, cluster.site(SBATCH_PARTITION="nowhere"))
    assert "MachineError: Slurm refused the job" in said and "partition" in said and "Partitions here: main (gpu:2)." in said, said


def test_more_gpus_than_a_node_has_are_refused_before_the_queue(cluster):
    said = launch(cluster, cluster.site(SBATCH_GPUS_PER_NODE=4))
    assert "MachineError: Slurm refused the job: Batch job submission failed: Requested node configuration is not available" in said, said
    assert "main (gpu:2)" in said


def test_fewer_gpus_than_the_plan_puts_on_a_node_are_named_with_the_node(cluster, unattended):
    """Submitted past `gptoss launch`, which compares them beforehand. Real Ray and driver."""
    job = unattended["gpus"]
    end, said = cluster.await_end(job, 300), cluster.output(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "2:0", "0"), said
    assert "node6 has 2 of 3" in said and "Traceback" not in said, said


def test_a_run_that_crashes_again_and_again_is_given_up(cluster, unattended):
    """Two starts in a row from one checkpoint are too many here; the first start saved one, so it does not count."""
    job = unattended["crashes"]
    end, said = cluster.await_end(job, 120), cluster.output(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "1:0", "2"), said
    assert said.count("the driver ended with 7") == 3
    assert "2 starts in a row have saved nothing new (newest checkpoint: " in said and "step-000001): given up" in said, said


def test_a_new_job_may_go_on_with_a_run_that_was_given_up(cluster, unattended):
    """A person who has found the fault: the starts of the old job do not count against the new one."""
    old = unattended["crashes"]
    cluster.await_end(old, 120)
    site = cluster.site(GPTOSS_VENV=cluster.stand_in("exit 0"), GPTOSS_MAX_CRASHES=2, GPTOSS_RUN_ID=old)
    job = cluster.sbatch("train.sbatch", *LINE, options=("--nodes=1",), site=site)
    assert cluster.await_end(job, 60)["JobState"] == "COMPLETED", cluster.output(job)


def test_a_time_limit_that_leaves_no_time_to_save_is_given_up(cluster, unattended):
    job = unattended["short"]
    end, said = cluster.await_end(job, 240), cluster.output(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "1:0", "1"), said
    assert said.count("no new checkpoint within 2 s") == 2
    assert "2 starts in a row have saved nothing new (newest checkpoint: none): given up" in said, said
    cluster.await_quiet(job, ("node7", "node8"))
