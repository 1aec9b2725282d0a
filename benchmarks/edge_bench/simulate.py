"""A federation in one process: the coordinator's engine and aggregation, the devices' local rounds, no HTTP.

The objects that run behind the REST API and on a device run here too, over the same payload bytes. So a simulation ends
with the same bits as a real federation of the same seed, devices, cohorts and device secrets. Every device is present
and reports; deadlines, failures and retries are not simulated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from edge_kernels import counter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coord_server import aggregation, engine, events
from coord_server.aggregation import Checked, Contribution
from edge_bench.datasets import DataConfig
from edge_client import local
from edge_client.bundle import MANIFEST, Bundle, digest
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError, first_fault
from edge_client.methods import Method, make_method
from edge_client.protocol import payload
from edge_client.protocol.messages import FederationConfig, Round, Scores
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Course, Personal, Task
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
    guard: Literal["clip", "drop", "none"] = "clip"
    """What happens to an update whose norm or weight is far beyond the round's others, as in a federation."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Also evaluate every device's personal model after each so many rounds; 0: at the end only."""
    final_epochs: bool = True
    """Also report every device's score after its local epochs from the final downlink."""


@dataclass(frozen=True)
class RoundRow:
    """A round's record as the coordinator writes it, and all devices' scores after it when they were requested."""

    record: Round
    everyone: Scores | None = None


@dataclass(frozen=True)
class Simulated:
    """How a federation ended. Digests are SHA-256: of the server's state, and of every device's personal model."""

    rows: tuple[RoundRow, ...]
    final: Scores | None
    """Every device's personal model from the final downlink, on its own test samples; None when no device has any."""
    final_after: Scores | None
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


@dataclass(frozen=True)
class _Sent:
    """A downlink as a device decodes it, and its bytes by kind."""

    content: Payload
    sizes: dict[str, int]


@dataclass
class _Run:
    """The mutable side of one simulation: what a coordinator keeps in its store and devices on their disks."""

    config: FederationConfig
    method: Method
    course: Course
    trainer: Trainer
    devices: Mapping[str, DeviceData]
    state: Any
    kept: dict[str, Arrays] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, Checked] = field(default_factory=dict)
    downlinks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By device, the bytes by kind of the downlink that it received last."""
    sent: dict[tuple[int, str], _Sent] = field(default_factory=dict)
    """By round and audience, for the state as it is."""

    def task(self, round_: int, device: str, place: int = 0) -> Task:
        secret = counter.key(self.config.seed, "secret", device)
        return Task(Assignment(self.course, round_, device, place), self.trainer, self.devices[device], secret)

    def downlink(self, round_: int, device: str) -> Payload:
        record = self.records.get(device)
        audience = round_, self.method.audience(self.course, round_, record)
        if audience not in self.sent:
            encoded = aggregation.downlink(self.method, self.course, round_, self.state, record)
            self.sent[audience] = _Sent(payload.decode(encoded.data), encoded.sizes)
        self.downlinks[device] = self.sent[audience].sizes
        return self.sent[audience].content

    def train(self, round_: int, device: str, place: int) -> str:
        """One device's round; returns its update's digest."""
        task, content = self.task(round_, device, place), self.downlink(round_, device)
        outcome = local.run_round(self.method, task, self.kept.get(device, {}), content)
        self.kept[device], data = outcome.kept, payload.encode(outcome.update)
        record = self.records.get(device)
        self.updates[device] = aggregation.check_update(self.method, task.assignment, self.state, record, data)
        return digest(data)

    def aggregate(self, round_: int, places: Mapping[str, int], seconds: float) -> Round:
        """Fold the updates of the devices in `places`; the state and the records are those after the round."""
        devices = tuple(places)
        contributions = (
            Contribution(d, self.updates[d], self.records.get(d), self.downlinks[d], place)
            for d, place in places.items()
        )
        influences = {d: i for d in devices if (i := self.updates[d].influence) is not None}
        closed = aggregation.close_round(
            self.method, self.course, round_, self.state, contributions, influences, self.config.guard
        )
        self.state = closed.state
        self.records |= closed.records
        self.updates.clear()
        self.sent.clear()
        return closed.round.model_copy(update={"seconds": seconds})

    def personal(self, round_: int, device: str) -> Personal:
        content = self.downlink(round_, device)
        return local.personal(self.method, self.task(round_, device), self.kept.get(device, {}), content)

    def everyone(self, models: Mapping[str, Personal]) -> Scores | None:
        values = [self.task(1, d).score(models[d]) for d in self.devices]
        return aggregation.scores(values, [len(s.y_test) for s in self.devices.values()])

    def after_epochs(self, round_: int) -> Scores | None:
        models = {}
        for d in self.devices:
            task, content = self.task(round_, d), self.downlink(round_, d)
            kept, received = local.understand(self.method, task.assignment, self.kept.get(d, {}), content)
            models[d] = self.method.local_round(task, kept, received).trained
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
    """Run one federation to its end. `devices` maps names to data; `progress` is called after every round.

    Raises ConfigError when the federation cannot run as configured.
    """
    started = time.perf_counter()
    course = Course(bundle.model(), config.seed, config.rounds, config.cohort)
    names = tuple(sorted(devices))
    sim = _Run(config, method, course, trainer, {d: devices[d] for d in names}, method.start(course))
    status, todo = engine.State(), deque[events.Decision]()

    def happen(event: events.Event) -> None:
        nonlocal status
        status, decisions = engine.apply(config, status, event)
        todo.extend(decisions)

    happen(events.Present(0.0, names))
    rows: list[RoundRow] = []
    opened = time.perf_counter()
    while todo:
        decision = todo.popleft()
        if isinstance(decision, events.Draw):
            happen(events.Present(0.0, names))
        elif isinstance(decision, events.OpenRound):
            opened = time.perf_counter()
            for device in decision.cohort:
                sha = sim.train(decision.round, device, engine.place(config, status, device))
                lease = engine.lease(config, decision.round, device)
                happen(events.Updated(0.0, decision.round, device, lease, sha))
        elif isinstance(decision, events.Aggregate):
            places = {d: engine.place(config, status, d) for d in decision.devices}
            record = sim.aggregate(decision.round, places, time.perf_counter() - opened)
            everyone = None
            if evaluate_every and decision.round % evaluate_every == 0:
                everyone = sim.everyone({d: sim.personal(decision.round + 1, d) for d in names})
            rows.append(RoundRow(record, everyone))
            progress(rows[-1])
            happen(events.Aggregated(0.0, decision.round, decision.attempt))
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
    failed: Callable[[str, MaskfleetError], None] | None = None,
) -> dict[str, Simulated]:
    """Run every method of a simulation on the same devices, cohorts and seed; results by label.

    With `failed`, an error of one method is given to it and the other methods still run; without, it is raised.
    """
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
            guard=config.guard,
        )
        shown, often = partial(progress, label), config.evaluate_every
        try:
            results[label] = run(federation, method, bundle, trainer, devices, often, config.final_epochs, shown)
        except MaskfleetError as error:
            if failed is None:
                raise
            failed(label, error)
    return results
