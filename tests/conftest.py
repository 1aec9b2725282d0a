"""What holds for the whole test session."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import databases
import pytest
from hypothesis import HealthCheck, settings

# No example fails because the machine is slow, and every run draws the same ones: whether a test passes depends on the
# code alone. `pytest --hypothesis-profile default` draws others.
settings.register_profile(
    "the same anywhere", settings(), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same anywhere")

# What a user's shell has set for programs: tokens, proxies, how wide and colourful output is.
for name in list(os.environ):
    ours = name in {databases.GIVEN, "MASKFLEET_BUNDLES"}
    if name.upper().endswith(("_PROXY", "_COLOR")) or (name.startswith("MASKFLEET_") and not ours):
        del os.environ[name]
os.environ["COLUMNS"] = "80"

# A shell that starts the tests in the background has Ctrl-C ignored in them and in all their children, to whom some
# tests send it; with any handler here a child starts with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest, the longest first: a process that begins one of them last keeps the others waiting.
LONGEST = (
    "test_faults.py",
    "test_simulate.py",
    "test_export_operators.py",
    "test_overhead.py",
    "test_fuzz.py",
    "test_demo.py",
    "test_narrow.py",
    "test_coordinator_process.py",
    "test_two_coordinators.py",
    "test_client_killed.py",
    "test_device_process.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-xdist from sorting files by their number of tests: those with few are the long ones."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(tryfirst=True)  # before fixtures, of which some make modules
def pytest_runtest_setup() -> None:
    """PyTorch draws the same numbers in a test, whatever ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that is called inside a test may block signals; its children, and those of later tests, would too."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture
def no_network_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lattice's steps on networks of a few parameters are those of its `quantum`, as figures by hand have them."""
    monkeypatch.setattr("edge_client.methods.lattice.settings.SMALL", 1)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[databases.Server]:
    """A PostgreSQL server."""
    with databases.server() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def each_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[databases.Server | None]:
    """The test runs twice: its coordinators keep their tables in SQLite, then on this server, where each data folder
    has a fresh database."""
    if request.param == "sqlite":
        yield None
        return
    server: databases.Server = request.getfixturevalue("postgresql")
    with ExitStack() as made:
        urls = dict[Path, str]()

        def url_of(folder: Path) -> str:
            if folder not in urls:
                urls[folder] = made.enter_context(server.database())
            return urls[folder]

        monkeypatch.setattr(databases, "url_of", url_of)
        yield server
