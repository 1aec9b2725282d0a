"""Servers and devices as processes of this machine, for the benchmarks of the coordinator's overhead.

Nothing here trains: federations run the method and the trainer of `idle_plugin`, installed for these processes only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from coord_server.auth import OPERATOR_ENV
from coord_server.operator.client import Operator
from edge_client.bundle import MANIFEST, Init, Input, Layer, Manifest, Tensor
from edge_client.errors import ConfigError
from edge_client.protocol.messages import FederationConfig, TokenRequest
from edge_client.targets import Classification

OPERATOR = "operator-of-the-overhead-benchmarks"
PATIENCE = 60.0  # seconds a process may take to start, or a request to be answered
SAMPLING = 0.01  # seconds between two readings of a process's CPU time
ENTRY_POINTS = """[maskfleet.methods]
idle = edge_bench.idle_plugin:Idle
[maskfleet.trainers]
idle = edge_bench.idle_plugin:IdleTrainer
"""


def install_plugin(folder: Path) -> None:
    """Write the entry points of `idle_plugin` where `process` adds them to PYTHONPATH."""
    info = folder / "plugin" / "maskfleet_idle-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maskfleet-idle\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has the plugin; killed at the end of the block."""
    path = os.pathsep.join(p for p in (str(folder / "plugin"), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", OPERATOR_ENV: OPERATOR}
    running = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_up(url: str, server: subprocess.Popen[str]) -> None:
    """Wait until a server answers anything at all. Raises ConfigError, at once when its process has ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise ConfigError(f"no server at {url} within {PATIENCE:.0f} s, or it has ended; see what it printed")


def answer_of(running: subprocess.Popen[str]) -> Any:
    """The JSON that a process prints when it ends. Raises ConfigError when it fails."""
    said = running.communicate(timeout=600)[0]
    if running.returncode:
        raise ConfigError(f"a benchmark process ended with code {running.returncode}; see what it printed")
    return json.loads(said)


class Meter:
    """The CPU time of a process, read every `SAMPLING` seconds by a thread, and its peak memory."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._times: list[float] = []
        self._used: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLING):
            try:
                used = self._process.cpu_times()
            except psutil.Error:
                return
            self._times.append(time.monotonic())
            self._used.append(used.user + used.system)

    def stop(self) -> None:
        """Read no more."""
        self._over.set()
        self._thread.join()

    def seconds(self, begin: float, end: float) -> float:
        """CPU seconds used between two readings of `time.monotonic`, in this process or any other."""
        low, high = np.interp([begin, end], self._times, self._used)
        return float(high - low)

    def peak(self) -> int:
        """The most bytes of memory the process has held."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# --- a coordinator


def bundle(folder: Path, d: int) -> Path:
    """Write a bundle of one linear layer of `d` weights and no graph."""
    row = Tensor(name="w", shape=(2, d // 2), offset=0, init=Init(kind="constant", scale=0.0))
    layer, target = Layer(name="w", kind="linear", weights=("w",)), Classification(classes=2)
    described = Manifest(
        name="idle", input=Input(shape=(1,)), target=target, parameters=(row,), layers=(layer,), seed=0
    )
    place = folder / f"bundle-{d}"
    place.mkdir(exist_ok=True)
    (place / MANIFEST).write_bytes(described.to_bytes())
    return place


def create(operator: Operator, folder: Path, kind: str, d: int, cohort: int, **config: Any) -> str:
    """Create the federation `kind` of the idle method; returns a join token."""
    federation = {
        "name": kind,
        "bundle": operator.upload_bundle(bundle(folder, d)),
        "method": {"name": "idle", "kind": kind},
        "cohort": cohort,
        "min_devices": cohort,
        "min_updates": cohort,
        "backend": "idle",
    }
    operator.create(FederationConfig.model_validate(federation | config))
    return operator.token(kind, TokenRequest(uses=1_000_000)).token


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[str, Operator, Meter]]:
    """A coordinator process with a data folder of its own within `folder`: its URL, its operator, its meter."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    place = ["--port", str(port), "--data", str(folder / f"coordinator-{port}"), "--log-level", "warning"]
    with process(folder, "-m", "edge_client.cli", "serve", *place) as server, Operator(url, OPERATOR) as operator:
        wait_until_up(f"{url}/v1/health", server)
        yield url, operator, Meter(server.pid)
