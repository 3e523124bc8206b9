"""Runs that several files of tests start from."""

from pathlib import Path

import pytest

from tests.helpers.runs import CONFIGS, must


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Path:
    """A short warm start: not enough to be good, enough to speak Harmony now and then."""
    folder = tmp_path_factory.mktemp("warm")
    must("sft", *CONFIGS, "--run.name=warm", "--run.id=0", "--sft.steps=60", "--sft.min_copy_probability=0.0", cwd=folder)
    return folder / "runs" / "warm-0"
