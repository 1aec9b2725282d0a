"""Child processes of the demo and of the overhead benchmarks: started with a log each, and always ended."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from coord_server.auth import OPERATOR_ENV
from coord_server.operator.client import Operator
from edge_client.errors import MaskfleetError

READY = "ready at "
STARTUP = 300.0  # seconds the coordinator may take to listen
GRACE = 5.0  # seconds between asking a process to end and ending it


class ProcessError(MaskfleetError):
    """A child process ended before its time; the text ends with the last lines of its log."""


@dataclass(frozen=True)
class Process:
    """A child and its log."""

    what: str
    popen: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """Raise ProcessError when it has failed."""
        if self.popen.poll() not in (None, 0):
            tail = "\n  ".join(self.said().splitlines()[-8:])
            raise ProcessError(f"{self.what} ended with code {self.popen.returncode}:\n  {tail}")


def _end(processes: list[Process]) -> None:
    """Terminate every process with its own children, and kill those that still run after `GRACE`."""
    for p in processes:
        if p.popen.poll() is None:
            os.killpg(p.popen.pid, signal.SIGTERM)  # each leads a session; a device checks graphs in a child
    deadline = time.monotonic() + GRACE
    for p in processes:
        try:
            p.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(p.popen.pid, signal.SIGKILL)
            p.popen.wait()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends, so that each process that starts is also recorded."""
    caught: list[int] = []
    handled = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: caught.append(number)) for s in handled}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    for number in caught:
        signal.raise_signal(number)


class Start:
    """Starts processes and remembers them in `started`."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    def __call__(
        self,
        what: str,
        arguments: list[str],
        log: Path,
        extra: Mapping[str, str],
        module: str = "edge_client.cli",
        python: Sequence[str] = (),
    ) -> Process:
        """Start ``python -m MODULE ARGUMENTS``, ``maskfleet ARGUMENTS`` by default, with a log and `extra` environment.

        `python` is the command of another interpreter; this process's own when it is empty.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out, _interrupts_later():
            popen = subprocess.Popen(
                [*(python or (sys.executable,)), "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, **extra},
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others in order
            )
            self.started.append(Process(what, popen, log))
        return self.started[-1]


@contextmanager
def children() -> Iterator[Start]:
    """Give a `Start` whose processes all end with the block. SIGTERM ends the block as Ctrl-C does."""
    start, before = Start(), signal.getsignal(signal.SIGTERM)

    def terminate(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield start
    finally:
        _end(start.started)
        signal.signal(signal.SIGTERM, before)


def address(server: Process) -> str:
    """The URL that a server prints once it listens. Raises ProcessError."""
    deadline = time.monotonic() + STARTUP
    while READY not in server.said():
        server.check()
        if time.monotonic() > deadline:
            raise ProcessError(f"{server.what} did not listen within {STARTUP:.0f} s; see {server.log}")
        time.sleep(0.05)
    return server.said().partition(READY)[2].split()[0]


def coordinator(start: Start, folder: Path, extra: Mapping[str, str]) -> tuple[Process, str, Operator]:
    """A coordinator that listens on a free port, with its data in `folder`; its URL and its operator."""
    token = secrets.token_hex(32)
    arguments = ["serve", "--port", "0", "--data", str(folder / "coordinator"), "--log-level", "warning"]
    server = start("the coordinator", arguments, folder / "coordinator.log", {OPERATOR_ENV: token, **extra})
    url = address(server)
    return server, url, Operator(url, token)
