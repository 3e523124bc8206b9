"""Real data for tests: the folder shared/data beside the checkout, which a clone of the repository does not have."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def shared_file(name: str) -> Path:
    """A file of shared/data; skips the test where it is missing."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    return path
