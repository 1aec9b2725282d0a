"""What the benchmarks of the coordinator's overhead share: federations of `idle_plugin`, and a meter of a process.

Nothing here trains. The plugin is installed for these processes only.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from coord_server.operator.client import Operator
from edge_client.bundle import MANIFEST, Init, Input, Layer, Manifest, Tensor
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.operator import TokenRequest
from edge_client.targets import Classification

PATIENCE = 300.0  # seconds a server may take to start, or a request to be answered
SAMPLING = 0.01  # seconds between two readings of a process's CPU time
ENTRY_POINTS = """[maskfleet.methods]
idle = edge_bench.overhead.idle_plugin:Idle
[maskfleet.trainers]
idle = edge_bench.overhead.idle_plugin:IdleTrainer
"""


def plugin(folder: Path) -> dict[str, str]:
    """Write the entry points of `idle_plugin` to `folder`; returns the environment of processes that have them."""
    info = folder / "plugin" / "maskfleet_idle-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maskfleet-idle\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = str(folder / "plugin"), os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


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
