"""What holds for the whole test session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No example fails because the machine is slow, and every run draws the same ones: whether a test passes depends on the
# code alone. `pytest --hypothesis-profile default` draws others.
settings.register_profile(
    "the same anywhere", settings(), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same anywhere")

# A shell that starts the tests in the background has Ctrl-C ignored in them and in all their children, to whom some
# tests send it; with any handler here a child starts with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that is called inside a test may block signals; its children, and those of later tests, would too."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
