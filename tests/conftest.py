"""Set before anything imports torch, for every test process and its children; and the fixtures that several rooms share."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For a Ray that a test starts itself; Ray's own 15 starves beside anything else that computes. It reads this very spelling.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest

hypothesis.settings.register_profile("anywhere", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("anywhere")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A training world of this process alone, for the tests of one file. Gives its ParallelShape."""
    import torch

    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.parallel.shape import ParallelShape

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = ParallelShape(world=1)
    meeting = tmp_path_factory.mktemp("groups") / "meet"
    init_groups(shape, rank=0, init_method=f"file://{meeting}", timeout_s=60, seed=0, backend="gloo")
    yield shape
    destroy_groups()
    torch.set_num_threads(threads)
