"""Where the coordinators of a test keep their tables: SQLite in the data folder, or a PostgreSQL server.

A test with the fixture `each_database` runs once on each. The server is the one that the environment names, or else one
that is started here in a temporary folder; where there is neither, the test is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

GIVEN = "MASKFLEET_TEST_DATABASE"
LIMIT = 600.0  # seconds that a server may take to start on the slowest machine


def url_of(folder: Path) -> str | None:
    """The --database of a coordinator on this data folder; None: SQLite. `each_database` replaces this function."""
    return None


def psycopg() -> Any:
    """PostgreSQL's driver; skips the test without it."""
    return pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")


@dataclass
class Server:
    """A PostgreSQL server. `url` is that of a database from which others are made; `command` starts an own server."""

    url: str
    command: list[str] = field(default_factory=list)
    user: dict[str, Any] = field(default_factory=dict)
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the own server; return once it takes connections."""
        self.running = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self.user)
        end = time.monotonic() + LIMIT
        while not self._answers():
            assert self.running.poll() is None, f"it has ended: {self.command}"
            assert time.monotonic() < end
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg().OperationalError:
            return False
        return True

    def crash(self) -> None:
        """End the own server as a power cut would: every connection breaks, and the next start recovers."""
        if self.running is None:
            pytest.skip(f"the server of {GIVEN} is not the tests' own to kill")
        self.running.send_signal(signal.SIGQUIT)
        self.running.wait(LIMIT)

    def execute(self, statement: str) -> None:
        """Run a statement that is a transaction of its own."""
        with psycopg().connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(statement)

    @contextmanager
    def database(self, more: str = "") -> Iterator[str]:
        """The URL of a fresh database, made with `more` options; it is dropped at the end."""
        name = f"maskfleet_{uuid4().hex}"
        self.execute(f"CREATE DATABASE {name} {more}")
        try:
            yield urlsplit(self.url)._replace(path=f"/{name}").geturl()
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def server() -> Iterator[Server]:
    """A PostgreSQL server for the whole session; skips the test where there is none."""
    psycopg()
    if GIVEN in os.environ:
        yield Server(os.environ[GIVEN])
        return
    places = os.pathsep.join([os.environ.get("PATH", ""), *glob("/usr/lib/postgresql/*/bin")])  # Debian's
    initdb, postgres = (shutil.which(name, path=places) for name in ("initdb", "postgres"))
    if initdb is None or postgres is None:
        pytest.skip(f"there is no PostgreSQL server: install one, or set {GIVEN} to the URL of one")
    said = subprocess.run([initdb, "--version"], check=True, capture_output=True, text=True).stdout
    if int(re.findall(r"\d+", said)[0]) < 15:
        pytest.skip(f"{said.strip()} knows no collations of ICU; the tests need 15 or newer")
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are too long for a socket, and the user's own
        user: dict[str, Any] = {}
        if os.geteuid() == 0:  # as root it does not run
            user = {"user": "nobody"}
            shutil.chown(folder, "nobody")
        data = f"{folder}/data"
        order = ["--encoding", "UTF8", "--locale-provider", "icu", "--icu-locale", "en"]  # words, as users' servers do
        made = [initdb, "-D", data, "--username", "postgres", "--auth", "trust", "--no-sync", *order]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, **user)
        command = [postgres, "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        found = Server(f"postgresql+psycopg://postgres@/postgres?host={folder}", command, user)
        try:
            found.start()
            yield found
        finally:
            found.crash()
