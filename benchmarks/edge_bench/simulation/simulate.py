"""One federation in one process: the coordinator's engine and aggregation, the devices' local rounds, no HTTP.

The objects that run behind the REST API and on a device run here too, over the same payload bytes. So a simulation ends
with the same bits as a real federation of the same seed, fleet, cohorts and device secrets. Devices train in parallel
processes where that pays (`workers`), with the same bits again. Every device is present and reports, but for `Mishaps`;
deadlines and other failures are not simulated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from coord_server import aggregation, engine, events
from coord_server.aggregation import Checked, Contribution, Encoded
from edge_bench.simulation.workers import Evaluated, Evaluation, Lost, Site, Turn, Workers
from edge_client.backends import DEFAULT_BACKEND
from edge_client.bundle import Bundle, digest
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, LostError
from edge_client.methods import Method
from edge_client.protocol.messages import FederationConfig, Round, Scores, Source
from edge_client.protocol.payload import Arrays
from edge_client.task import Assignment, Course, Personal
from edge_client.training import Trainer, open_trainer


@dataclass(frozen=True)
class RoundRow:
    """A round's record as the coordinator writes it, and all devices' scores after it when they were requested."""

    record: Round
    everyone: Scores | None = None


@dataclass(frozen=True)
class Simulated:
    """How a federation ended. Digests are SHA-256: of the server's state, and of every device's personal model."""

    method: Method
    course: Course
    rows: tuple[RoundRow, ...]
    devices: int
    final: Scores | None
    """The model that every device ends with, on its own test samples; None when no device has any."""
    final_after: Scores | None
    """Every device's score after the local epochs of one more round."""
    kept_share: float
    """Mean over the devices of the share of parameters that the personal model's mask keeps."""
    personal: Mapping[str, Personal]
    """Every device's model; empty without `models`."""
    state_sha256: str
    personal_sha256: str
    seconds: float
    sources: Mapping[str, Source] = field(default_factory=dict)
    """By device, which of its models it kept."""
    start: Scores | None = None
    """The bundle's own values on the same samples; `run_all` fills it in, because all methods share it."""
    vain_bytes: int = 0
    """Bytes of downlinks that devices could not decode, because they had lost what those build on."""


@dataclass(frozen=True)
class Mishaps:
    """What goes wrong in a simulation, by device: rounds it is away in, and rounds before which it loses what it kept.

    Round `rounds + 1` is the downlink after the last round. Nothing goes wrong by default.
    """

    away: Mapping[str, AbstractSet[int]] = field(default_factory=dict)
    loses: Mapping[str, AbstractSet[int]] = field(default_factory=dict)

    def present(self, names: Sequence[str], round_: int) -> events.Present:
        """The devices that can be drawn in a round; those that are away belong to the fleet."""
        return events.Present(0.0, tuple(d for d in names if round_ not in self.away.get(d, ())), len(names))


@dataclass
class Simulation:
    """The mutable side of one simulation: what a coordinator keeps in its store and devices on their disks."""

    config: FederationConfig
    method: Method
    course: Course
    workers: Workers
    devices: Mapping[str, DeviceData]
    mishaps: Mishaps
    state: Any
    kept: dict[str, Arrays] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, Checked] = field(default_factory=dict)
    downlinks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By device, the bytes by kind of the downlink that it received last."""
    vain: int = 0
    """Bytes of downlinks that a device could not read."""
    sent: dict[tuple[int, str], Encoded] = field(default_factory=dict)
    """The downlinks of the present state, by round and audience."""

    def turns(self, round_: int, places: Mapping[str, int]) -> tuple[list[Turn], dict[str, bytes]]:
        """What the workers get: the turn of each device in `places`, and the downlinks by audience."""
        turns, contents = [], {}
        for device, place in places.items():
            record = self.records.get(device)
            audience = self.method.audience(self.course, round_, record)
            if (round_, audience) not in self.sent:
                encoded = aggregation.downlink(self.method, self.course, round_, self.state, record)
                self.sent[round_, audience] = encoded
            sent = self.sent[round_, audience]
            self.downlinks[device], contents[audience] = sent.sizes, sent.data
            turns.append(Turn(device, self.kept.get(device, {}), audience, place))
        return turns, contents

    def lose(self, round_: int, devices: Iterable[str]) -> None:
        """Drop the kept arrays of the devices that lose them before this round."""
        for device in devices:
            if round_ in self.mishaps.loses.get(device, ()):
                self.kept.pop(device, None)

    def train(self, round_: int, places: Mapping[str, int]) -> Iterator[tuple[str, Lost | str]]:
        """The round of every device in `places`; yields each with its update's digest, or how it failed."""
        self.lose(round_, places)
        outcomes = self.workers.train(round_, *self.turns(round_, places))
        limit = aggregation.update_limit(self.method, self.course)
        for (device, place), outcome in zip(places.items(), outcomes, strict=True):
            if isinstance(outcome, Lost):
                self.lost(device)
                yield device, outcome
                continue
            if len(outcome.update) > limit:
                raise ConfigError(
                    f"the update of {device!r} in round {round_} has {len(outcome.update)} bytes, but a coordinator "
                    f"accepts at most {limit} of {self.method.name!r}; choose settings that send less, or, in a method "
                    "of your own, a larger `update_limit`"
                )
            self.kept[device], record = outcome.kept, self.records.get(device)
            a = Assignment(self.course, round_, device, place)
            self.updates[device] = aggregation.check_update(self.method, a, self.state, record, outcome.update)
            yield device, digest(outcome.update)

    def lost(self, device: str) -> None:
        """A device could not read its downlink: the next one is as for a new device."""
        self.vain += sum(self.downlinks[device].values())
        if (record := self.records.get(device)) is not None:
            self.records[device] = self.method.lost(record)

    def aggregate(self, round_: int, places: Mapping[str, int], fleet: int, seconds: float) -> Round:
        """Fold the updates of the devices in `places`; the state and the records are those after the round."""
        contributions = (
            Contribution(d, self.updates[d], self.records.get(d), self.downlinks[d], place)
            for d, place in places.items()
        )
        influences = {d: i for d in places if (i := self.updates[d].influence) is not None}
        closed = aggregation.close_round(
            self.method, self.course, round_, self.state, contributions, influences, self.config.guard, fleet
        )
        self.state = closed.state
        self.records |= closed.records
        self.updates.clear()
        self.sent.clear()
        return closed.round.model_copy(update={"seconds": seconds})

    def evaluate(self, round_: int, what: Evaluation) -> dict[str, Evaluated]:
        """Every device's personal model from the downlink of `round_`; a device that lost its values asks again."""
        found = self.asked(round_, self.devices, what)
        lost = [d for d, outcome in found.items() if isinstance(outcome, Lost)]
        for d in lost:
            self.lost(d)
        found |= self.asked(round_, lost, what)
        for d, outcome in found.items():
            if isinstance(outcome, Lost):
                raise LostError(f"{d} cannot read a downlink made for a new device: {outcome.reason}")
        return {d: e for d, e in found.items() if isinstance(e, Evaluated)}

    def asked(self, round_: int, devices: Iterable[str], what: Evaluation) -> dict[str, Evaluated | Lost]:
        """What each device makes of its downlink; after the last round no device has a place."""
        places = dict.fromkeys(devices, 0)
        return dict(zip(places, self.workers.evaluate(round_, *self.turns(round_, places), what), strict=True))

    def look(self, round_: int) -> Scores | None:
        """Every device's score from the downlink of `round_`. The run goes on unchanged."""
        records, vain = dict(self.records), self.vain
        found = self.evaluate(round_, Evaluation())
        self.records, self.vain = records, vain
        return self.scores([e.score for e in found.values()])

    def scores(self, values: Sequence[float]) -> Scores | None:
        return aggregation.scores(values, [len(s.y_test) for s in self.devices.values()])


def run(
    config: FederationConfig,
    method: Method,
    bundle: Bundle,
    trainer: Trainer,
    devices: Mapping[str, DeviceData],
    evaluate_every: int = 0,
    final_epochs: bool = False,
    progress: Callable[[RoundRow], None] = lambda row: None,
    *,
    processes: int | None = 1,
    models: bool = True,
    mishaps: Mishaps | None = None,
) -> Simulated:
    """Run one federation to its end. `devices` maps names to data; `progress` is called after every round.

    `processes` as in SimulationConfig. Without `models` the result has no `personal` models, which would take 4 bytes a
    parameter for every device. Raises ConfigError when the federation cannot run as configured.
    """
    started = time.perf_counter()
    course = Course(bundle.model(), config.seed, config.rounds, config.cohort)
    names = tuple(sorted(devices))
    parts, mishaps = {d: devices[d] for d in names}, mishaps or Mishaps()
    opener = partial(open_trainer, config.backend or DEFAULT_BACKEND, bundle)
    looks = len(names) * ((config.rounds // evaluate_every if evaluate_every else 0) + 1 + final_epochs)
    expected = config.rounds * min(config.cohort, len(names)) + looks
    with Workers(Site(method, course, parts, opener, config.personalise), trainer, processes, expected) as workers:
        sim = Simulation(config, method, course, workers, parts, mishaps, method.start(course))
        rows = _rounds(sim, names, evaluate_every, progress)
        sim.lose(config.rounds + 1, names)
        what = Evaluation(final_epochs, models, config.personalise)
        last = sim.evaluate(config.rounds + 1, what)
    rows[-1] = _with_last(rows[-1], [sim.downlinks[d] for d in names])
    after = [e.after for e in last.values() if e.after is not None]
    return Simulated(
        method=method,
        course=sim.course,
        rows=tuple(rows),
        devices=len(names),
        final=sim.scores([e.score for e in last.values()]),
        final_after=sim.scores(after) if final_epochs else None,
        kept_share=fmean(e.kept for e in last.values()),
        personal={d: e.personal for d, e in last.items() if e.personal is not None},
        state_sha256=digest(aggregation.pack(sim.state)),
        personal_sha256=digest("".join(e.sha256 for e in last.values()).encode()),
        seconds=time.perf_counter() - started,
        sources={d: e.source for d, e in last.items()},
        vain_bytes=sim.vain,
    )


def _rounds(
    sim: Simulation, names: tuple[str, ...], evaluate_every: int, progress: Callable[[RoundRow], None]
) -> list[RoundRow]:
    """Drive the engine until the federation is finished."""
    config, status, todo = sim.config, engine.State(), deque[events.Decision]()

    def happen(event: events.Event) -> None:
        nonlocal status
        status, decisions = engine.apply(config, status, event)
        todo.extend(decisions)

    happen(sim.mishaps.present(names, 1))
    rows: list[RoundRow] = []
    opened = time.perf_counter()
    while todo:
        decision = todo.popleft()
        if isinstance(decision, events.Draw):
            happen(sim.mishaps.present(names, decision.round))
        elif isinstance(decision, events.OpenRound):
            opened, round_ = time.perf_counter(), decision.round
            places = {d: status.asked[d] for d in decision.cohort}
            for device, outcome in sim.train(round_, places):
                lease = engine.lease(config, status, device)
                if isinstance(outcome, Lost):
                    happen(events.Failed(0.0, round_, device, lease, "lost", outcome.reason))
                else:
                    happen(events.Updated(0.0, round_, device, lease, outcome))
        elif isinstance(decision, events.Aggregate):
            places = {d: status.asked[d] for d in decision.devices}
            record = sim.aggregate(decision.round, places, status.fleet, time.perf_counter() - opened)
            everyone = None
            if evaluate_every and decision.round % evaluate_every == 0:
                everyone = sim.look(decision.round + 1)
            rows.append(RoundRow(record, everyone))
            progress(rows[-1])
            happen(events.Aggregated(0.0, decision.round, decision.attempt))
        elif isinstance(decision, events.Refuse):
            raise ConfigError(f"the engine refused: {decision.detail}")
    if status.phase != "finished":
        raise ConfigError(
            f"the federation stands at {status.phase}, round {status.round}: {len(names)} devices, "
            f"min_devices {config.min_devices}, min_updates {config.min_updates}"
            + (f"; {status.fault}" if status.fault else "")
        )
    return rows


def _with_last(row: RoundRow, downlinks: Sequence[Mapping[str, int]]) -> RoundRow:
    """The last round's row with the downlinks after it, by kind, as a coordinator's record has them."""
    traffic = row.record.traffic.model_copy(update={"last_down": aggregation.sum_kinds(downlinks)})
    return replace(row, record=row.record.model_copy(update={"traffic": traffic}))
