"""Real coordinator processes: one that is ready, and several that are killed while devices work."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import databases
from coordination import OPERATOR
from processes import kept_port

SERVE = [sys.executable, "-c", "from coord_server.serve import serve; import typer; typer.run(serve)"]


@contextmanager
def coordinator(folder: Path, port: int = 0, token: str = OPERATOR) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator that is ready, and its address; killed at the end if it still lives."""
    environment = {**os.environ, "MASKFLEET_OPERATOR_TOKEN": token, "OMP_NUM_THREADS": "1"}
    command = [*SERVE, "--port", str(port), "--data", str(folder), "--log-level", "warning"]
    if (url := databases.url_of(folder)) is not None:
        command += ["--database", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready at (http://\S+)", line)
        assert found, line
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait()


class Deadly:
    """Coordinators on one data folder that are killed when devices have made certain numbers of steps."""

    def __init__(self, folder: Path, processes: int, kills: list[int], dice: random.Random) -> None:
        self._folder, self._kills, self._dice = folder, sorted(kills), dice
        self._ports = [kept_port() for _ in range(processes)]
        self.urls = [f"http://127.0.0.1:{port}" for port, _ in self._ports]
        self._running: list[subprocess.Popen[str] | None] = [None] * processes
        self._steps, self.killed = 0, 0
        self._changed = threading.Condition()

    def step(self) -> None:
        """A device has made a step; at the steps chosen beforehand one coordinator is killed, whatever it is doing."""
        with self._changed:
            self._steps += 1
            alive = [i for i, process in enumerate(self._running) if process is not None]
            if self._kills and self._steps >= self._kills[0] and alive:
                slot = self._dice.choice(alive)
                process = self._running[slot]
                assert process is not None
                process.kill()
                process.wait()
                self._running[slot] = None
                self._kills.pop(0)
                self.killed += 1
                self._changed.notify_all()

    def keep_alive(self, over: Callable[[], bool]) -> None:
        """Start every coordinator that is dead, until `over`."""
        with ExitStack() as processes:
            while not over():
                for slot, (port, _) in enumerate(self._ports):
                    if self._running[slot] is None:
                        started, _ = processes.enter_context(coordinator(self._folder, port))
                        with self._changed:
                            self._running[slot] = started
                with self._changed:
                    self._changed.wait_for(lambda: None in self._running, 0.1)
