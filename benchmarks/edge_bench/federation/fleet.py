"""Real federations on this machine: one coordinator process, one process a device, plain HTTP on loopback.

The processes are `maskfleet serve` and `maskfleet join`, as a user would start them by hand, each with its own log.
This module starts them and watches them through the operator's REST API.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from coord_server import aggregation
from edge_bench.data.datasets import write
from edge_bench.federation.processes import Process, ProcessError, Start, children, coordinator
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.protocol.messages import FederationConfig, Report, Round, Scores
from edge_client.protocol.operator import Device, TokenRequest

GOODBYE = 180.0  # seconds the devices may take, after the last round, to write and measure their models
POLL = 0.25  # seconds between two looks at a federation


@dataclass(frozen=True)
class Ended:
    """A finished federation: its rounds, its devices with their reports, the server's state as bytes."""

    rounds: list[Round]
    devices: list[Device]
    state: bytes
    models: Mapping[str, Path]
    """Each device's `personal.onnx`."""

    @property
    def reports(self) -> list[Report]:
        """The devices' reports on their personal models."""
        return [d.report for d in self.devices if d.report is not None]

    def scores(self) -> Scores | None:
        """Over devices, each on its own test samples; None when none has any."""
        return aggregation.scores([r.score for r in self.reports], [r.test_samples for r in self.reports])


class Fleet:
    """A running coordinator in `folder` and the devices' data files; runs one federation after another."""

    def __init__(self, start: Start, folder: Path, bundle: Bundle, devices: Mapping[str, DeviceData]) -> None:
        self._start, self.folder, self.devices = start, folder, devices
        self.files = write(devices, folder / "data")
        self.coordinator, self.url, self.operator = coordinator(start, folder, {})
        self.bundle = self.operator.upload_bundle(bundle.folder)

    def run(
        self,
        config: FederationConfig,
        progress: Callable[[list[Round]], None] = lambda closed: None,
        secrets_of: Mapping[str, int] | None = None,
        python_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> Ended:
        """One federation of all devices, from enrolment to every device's personal model. Raises ProcessError.

        It waits for all devices, and ten minutes for a round, whatever `config` says of `min_devices` and the deadline.
        `secrets_of` gives each device its secret, so that a run can be repeated; None lets each device draw its own.
        `python_of` gives a device the command of another Python than this process's.
        """
        config = config.model_copy(update={"min_devices": len(self.files), "deadline_seconds": 600.0})
        name, id_ = config.name, self.operator.create(config).id
        token = self.operator.token(id_, TokenRequest(uses=len(self.files))).token
        joined, models = [], {}
        for device, file in self.files.items():
            place = self.folder / name / device
            models[device] = place / "personal.onnx"
            arguments = ["join", self.url, "--device", device, "--data", str(file), "--state", str(place)]
            arguments += ["--meter", "none"]  # the devices share this machine
            if secrets_of is not None:
                arguments += ["--secret", str(secrets_of[device])]
            log = self.folder / name / f"{device}.log"
            secret = {"MASKFLEET_TOKEN": token}
            joined.append(self._start(f"{name}, {device}", arguments, log, secret, python=python_of.get(device, ())))
        self._watch(id_, joined, progress)
        return Ended(self.operator.rounds(id_), self.operator.devices(id_), self.operator.state(id_), models)

    def _watch(self, id_: str, joined: list[Process], progress: Callable[[list[Round]], None]) -> None:
        seen = -1
        leaving: float | None = None
        while leaving is None or any(p.popen.poll() is None for p in joined):
            for p in (self.coordinator, *joined):
                p.check()
            federation = self.operator.federation(id_)
            if federation.closed > seen:
                done = self.operator.rounds(id_)
                seen = len(done)  # another round may have closed since the request before
                progress(done)
            if federation.phase == "finished" and leaving is None:
                leaving = time.monotonic() + GOODBYE
            if federation.phase == "stopped" or federation.fault:
                raise ProcessError(f"the federation {id_} {federation.phase}: {federation.fault or 'it was stopped'}")
            if leaving is not None and time.monotonic() > leaving:
                raise ProcessError(
                    f"devices still run {GOODBYE:.0f} s after the last round of {id_}; see {self.folder}"
                )
            time.sleep(POLL)
        for p in joined:
            p.check()


@contextmanager
def fleet(folder: Path, bundle: Bundle, devices: Mapping[str, DeviceData]) -> Iterator[Fleet]:
    """A coordinator on loopback and the data files of `devices`; every process is gone when the block ends."""
    with ExitStack() as stack:
        running = Fleet(stack.enter_context(children()), folder, bundle, devices)
        stack.callback(running.operator.close)
        yield running
