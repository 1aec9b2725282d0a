"""What holds for the whole test session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

# A shell that starts the tests in the background has Ctrl-C ignored in them and in all their children, to whom some
# tests send it; with any handler here a child starts with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that is called inside a test may block signals; its children, and those of later tests, would too."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
