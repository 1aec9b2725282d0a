"""A real federation on loopback for tests: a coordinator process, device processes, an operator's HTTP client.

Every process can be killed and started again on the same folder and port.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import databases
import httpx
from processes import kept_port

from edge_client.bundle import MANIFEST, Bundle, digest

OPERATOR = "operator-token-of-the-tests-0123456789"
PATIENCE = 600.0  # seconds until a wait is a failure, on the slowest machine


def until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    """Return once `condition` holds; fail with what `said` returns after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.01)


def environment() -> dict[str, str]:
    """This process's environment, one thread a process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASKFLEET_OPERATOR_TOKEN": OPERATOR}


@dataclass
class Process:
    """A command that can be killed and started again; its output is appended to `log`."""

    command: list[str]
    log: Path
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command."""
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment())

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        assert self.running is not None
        return self.running.poll()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """End it and return its exit code."""
        assert self.running is not None
        self.running.send_signal(how)
        return self.running.wait(PATIENCE)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for its end and return its exit code."""
        assert self.running is not None
        try:
            return self.running.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} still runs after {timeout} s:\n{self.text()}") from None

    def text(self) -> str:
        """All its output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class Federation:
    """One coordinator in `folder` with one federation, and its devices. Use as a context manager."""

    folder: Path
    id: str = ""
    token: str = ""
    devices: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        port, self._port = kept_port()  # the same whenever the coordinator is started again
        self.url = f"http://127.0.0.1:{port}"
        data = self.folder / "coordinator"
        place = ["--host", "127.0.0.1", "--port", str(port), "--data", str(data)]
        if (database := databases.url_of(data)) is not None:
            place += ["--database", database]
        command = [sys.executable, "-m", "edge_client.cli", "serve", *place]
        self.coordinator = Process(command, self.folder / "coordinator.log")
        self.operator = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {OPERATOR}"}, timeout=PATIENCE, trust_env=False
        )

    def __enter__(self) -> Federation:
        self.coordinator.start()
        self.wait_until_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.operator.close()
        for process in (*self.devices.values(), self.coordinator):
            if process.running is not None and process.poll() is None:
                process.kill()
        self._port.close()

    def wait_until_up(self) -> None:
        """Wait until the coordinator answers."""
        until(self._answers, self.coordinator.text)

    def _answers(self) -> bool:
        assert self.coordinator.poll() is None, f"the coordinator ended:\n{self.coordinator.text()}"
        try:
            self.operator.get("/v1/health")
        except httpx.TransportError:
            return False
        return True

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """The operator's request; its JSON answer."""
        response = self.operator.request(method, path, **options)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def create(self, bundle: Bundle, config: Mapping[str, Any]) -> None:
        """Upload `bundle`, create a federation of it and get a join token."""
        raw = (bundle.folder / MANIFEST).read_bytes()
        receipt = self.ask("POST", "/v1/bundles", content=raw, headers={"Content-Type": "application/json"})
        for name in receipt["missing"]:
            path = f"/v1/bundles/{receipt['digest']}/parts/{name}"
            self.ask("PUT", path, content=(bundle.folder / name).read_bytes())
        federation = self.ask("POST", "/v1/federations", json={"bundle": digest(raw), **config})
        self.id = federation["id"]
        self.token = self.ask("POST", f"/v1/federations/{self.id}/tokens", json={})["token"]

    def join(self, name: str, data: Path, *options: str) -> Process:
        """Start a device process."""
        command = [sys.executable, "-m", "edge_client.cli", "join", self.url, "--token", self.token, "--align", "none"]
        command += ["--data", str(data), "--device", name, "--state", str(self.folder / name), *options]
        process = self.devices[name] = Process(command, self.folder / f"{name}.log")
        process.start()
        return process

    def state(self) -> bytes:
        """The global state as the coordinator exports it."""
        response = self.operator.get(f"/v1/federations/{self.id}/state")
        assert response.is_success, response.text
        return response.content

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds' records, without what depends on the time of day."""
        answer = self.ask("GET", f"/v1/federations/{self.id}/rounds")
        return [{k: v for k, v in r.items() if k != "seconds"} for r in answer]
