"""A Ray that does not come up in its own fixed time gets a second try, and a message after that; other failures are not repeated."""

from __future__ import annotations

import pytest

from megatron_gptoss.errors import MachineError
from megatron_gptoss.loop.ray_start import twice

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed to startup")


class Ray:
    """Fails as often as it is told, and counts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.calls = list(failures), 0

    def __call__(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)


def test_the_second_try_is_enough() -> None:
    ray = Ray(SLOW)
    twice(ray)
    assert ray.calls == 2


def test_two_failures_end_in_one_message_about_the_machine() -> None:
    ray = Ray(SLOW, SLOW)
    with pytest.raises(MachineError, match=r"did not come up within 30 s, twice.*load was .* on \d+ CPUs"):
        twice(ray)
    assert ray.calls == 2


def test_another_failure_is_raised_as_it_is_and_not_repeated() -> None:
    ray = Ray(ConnectionError("nobody there"))
    with pytest.raises(ConnectionError, match="nobody there"):
        twice(ray)
    assert ray.calls == 1
