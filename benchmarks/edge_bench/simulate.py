"""A federation in one process: the coordinator's engine and aggregation, the devices' local rounds, no HTTP.

The very objects that run behind the REST API and on a device run here, over the same payload bytes, so a
simulation ends with the same bits as a real federation of the same seed, devices and cohort. A device that never
reports, deadlines and retries belong to the real thing and are not simulated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coord_server import aggregation, engine, events
from coord_server.aggregation import Contribution, Course
from edge_bench.datasets import DataConfig
from edge_client.bundle import MANIFEST, Bundle, digest
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, first_fault
from edge_client.local import accuracy, run_round
from edge_client.methods import Method, Personal, Task, make_method
from edge_client.protocol import payload
from edge_client.protocol.messages import Accuracy, FederationConfig, Round
from edge_client.protocol.payload import Arrays
from edge_client.training import Trainer, open_trainer

BUNDLES = Path(__file__).parent / "bundles"


class SimulationConfig(BaseModel):
    """A simulation's TOML file. Each table `[methods.LABEL]` is one run; its `name` is LABEL when left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bundle: str
    """A bundle's folder, or the name of one that comes with the package ("har", "digits")."""
    data: DataConfig
    methods: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    cohort: Annotated[int, Field(ge=1, le=1_000_000)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    backend: str = "onnxruntime"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Also evaluate every device's personal model after each so many rounds; 0: at the end only."""
    final_epochs: bool = True
    """Also report every device's accuracy after its local epochs from the final downlink."""


@dataclass(frozen=True)
class RoundRow:
    """A round's record as the coordinator writes it, and all devices' accuracy after it when it was asked for."""

    record: Round
    everyone: Accuracy | None = None


@dataclass(frozen=True)
class Simulated:
    """How a federation ended. Digests are SHA-256: of the server's state, and of every device's personal model."""

    rows: tuple[RoundRow, ...]
    final: Accuracy | None
    """Every device's personal model from the final downlink, on its own test samples; None when no device has any."""
    final_after: Accuracy | None
    """The same after local epochs from there."""
    personal: Mapping[str, Personal]
    state_sha256: str
    personal_sha256: str
    seconds: float


def read_config(data: Mapping[str, Any]) -> SimulationConfig:
    """Check a parsed TOML file. Raises ConfigError with the setting and its value."""
    try:
        return SimulationConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"simulation setting {first_fault(error, 'table')}") from None


def find_bundle(name: str) -> Bundle:
    """The bundle that comes with the package under `name`, else the folder `name`. Raises BundleError."""
    packaged = BUNDLES / name
    return Bundle.open(packaged if (packaged / MANIFEST).is_file() else Path(name))


@dataclass
class _Run:
    """The mutable side of one simulation: what a coordinator keeps in its store and devices on their disks."""

    config: FederationConfig
    course: Course
    trainer: Trainer
    devices: Mapping[str, DeviceData]
    state: Arrays
    kept: dict[str, Arrays] = field(default_factory=dict)
    records: dict[str, Arrays] = field(default_factory=dict)
    updates: dict[str, bytes] = field(default_factory=dict)
    downlinks: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: tuple[int, payload.Payload, dict[str, int]] | None = None
    """The last shared downlink and its round: made once, as a coordinator does."""

    def task(self, round_: int, device: str) -> Task:
        return Task(self.course.assignment(round_, device), self.trainer, self.devices[device])

    def downlink(self, round_: int, device: str) -> tuple[payload.Payload, dict[str, int]]:
        if self.shared is not None and self.shared[0] == round_:
            return self.shared[1:]
        data, sizes = aggregation.downlink(self.course, round_, device, self.state, self.records.get(device, {}))
        if self.course.method.shared_downlink:
            self.shared = (round_, payload.decode(data), sizes)
        return payload.decode(data), sizes

    def train(self, round_: int, device: str) -> str:
        """One device's round; returns its update's digest."""
        content, self.downlinks[device] = self.downlink(round_, device)
        task = self.task(round_, device)
        outcome = run_round(self.course.method, task, self.kept.get(device, {}), content)
        self.kept[device], data = outcome.kept, payload.encode(outcome.update)
        aggregation.check_update(self.course, round_, device, self.state, self.records.get(device, {}), data)
        self.updates[device] = data
        return digest(data)

    def aggregate(self, round_: int, devices: tuple[str, ...], seconds: float) -> Round:
        contributions = (
            Contribution(d, self.updates.pop(d), self.records.get(d, {}), self.downlinks.pop(d)) for d in devices
        )
        closed = aggregation.close_round(
            self.course, round_, self.state, contributions, self.records.__setitem__, seconds
        )
        self.state = closed.state
        return closed.record

    def personal(self, round_: int, device: str) -> Personal:
        content, self.downlinks[device] = self.downlink(round_, device)
        return self.course.method.personal(self.task(round_, device), self.kept.get(device, {}), content)

    def everyone(self, models: Mapping[str, Personal]) -> Accuracy | None:
        values = [accuracy(self.trainer, models[d], s.x_test, s.y_test) for d, s in self.devices.items()]
        return aggregation.accuracy(values, [len(s.y_test) for s in self.devices.values()])

    def after_epochs(self, round_: int) -> Accuracy | None:
        models = {}
        for d in self.devices:
            content, _ = self.downlink(round_, d)
            local = self.course.method.local_round(self.task(round_, d), self.kept.get(d, {}), content)
            models[d] = local.trained
        return self.everyone(models)


def run(
    config: FederationConfig,
    method: Method,
    bundle: Bundle,
    trainer: Trainer,
    devices: Mapping[str, DeviceData],
    evaluate_every: int = 0,
    final_epochs: bool = False,
    progress: Callable[[RoundRow], None] = lambda row: None,
) -> Simulated:
    """Run one federation to its end. `devices` maps names to data; `progress` hears of every finished round.

    Raises ConfigError when the federation could not run as configured.
    """
    started = time.perf_counter()
    course = Course(method, bundle.model(), config.seed, config.rounds)
    names = sorted(devices)
    sim = _Run(config, course, trainer, {d: devices[d] for d in names}, method.start(course.model, config.seed))
    status, todo = engine.State(), deque[events.Decision]()

    def happen(event: events.Event) -> None:
        nonlocal status
        status, decisions = engine.apply(config, status, event)
        todo.extend(decisions)

    for name in names:
        happen(events.Ready(0.0, name))
    rows: list[RoundRow] = []
    opened = time.perf_counter()
    while todo:
        decision = todo.popleft()
        if isinstance(decision, events.OpenRound):
            opened = time.perf_counter()
            for device in decision.cohort:
                sha = sim.train(decision.round, device)
                lease = engine.lease(config, decision.round, device)
                happen(events.Updated(0.0, decision.round, device, lease, sha))
        elif isinstance(decision, events.Aggregate):
            record = sim.aggregate(decision.round, decision.devices, time.perf_counter() - opened)
            everyone = None
            if evaluate_every and decision.round % evaluate_every == 0:
                everyone = sim.everyone({d: sim.personal(decision.round + 1, d) for d in names})
            rows.append(RoundRow(record, everyone))
            progress(rows[-1])
            happen(events.Aggregated(0.0, decision.round))
        elif isinstance(decision, events.Refuse):
            raise ConfigError(f"the engine refused: {decision.detail}")
    if status.phase != "finished":
        raise ConfigError(
            f"the federation stands at {status.phase}, round {status.round}: {len(names)} devices, "
            f"min_devices {config.min_devices}, min_updates {config.min_updates}"
        )
    models = {d: sim.personal(config.rounds + 1, d) for d in names}
    rows[-1] = _with_last(rows[-1], [sim.downlinks[d] for d in names])
    return Simulated(
        rows=tuple(rows),
        final=sim.everyone(models),
        final_after=sim.after_epochs(config.rounds + 1) if final_epochs else None,
        personal=models,
        state_sha256=digest(aggregation.pack(sim.state)),
        personal_sha256=personal_digest(models),
        seconds=time.perf_counter() - started,
    )


def _with_last(row: RoundRow, downlinks: Sequence[Mapping[str, int]]) -> RoundRow:
    """The last round's row with the downlinks after it, by kind, as a coordinator's record has them."""
    traffic = row.record.traffic.model_copy(update={"last_down": aggregation.sum_kinds(downlinks)})
    return replace(row, record=row.record.model_copy(update={"traffic": traffic}))


def personal_digest(models: Mapping[str, Personal]) -> str:
    """SHA-256 over every personal model's parameters and statistics, in the order of the devices' names."""
    vectors = [np.concatenate([models[d].parameters, models[d].buffers]) for d in sorted(models)]
    return digest(b"".join(v.tobytes() for v in vectors))


def run_all(
    config: SimulationConfig,
    bundle: Bundle,
    devices: Mapping[str, DeviceData],
    progress: Callable[[str, RoundRow], None] = lambda label, row: None,
) -> dict[str, Simulated]:
    """Run every method of a simulation on the same devices, cohorts and seed; results by label."""
    methods = {label: make_method({"name": label, **table}) for label, table in config.methods.items()}
    trainer = open_trainer(config.backend, bundle, config.threads)
    address = digest((bundle.folder / MANIFEST).read_bytes())
    results = {}
    for label, method in methods.items():
        federation = FederationConfig(
            name="simulation",
            bundle=address,
            method={"name": method.name, **method.model_dump(mode="json")},
            rounds=config.rounds,
            cohort=config.cohort,
            min_devices=len(devices),
            seed=config.seed,
            backend=config.backend,
        )
        results[label] = run(
            federation,
            method,
            bundle,
            trainer,
            devices,
            config.evaluate_every,
            config.final_epochs,
            partial(progress, label),
        )
    return results
