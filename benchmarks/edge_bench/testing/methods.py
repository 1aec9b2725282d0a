"""What every method must do, whatever it learns: whole runs, values in a store, updates that no device would send.

`check_method` is all of it on small data, some seconds. The simulator runs the very engine and aggregation of the
coordinator, so what passes here ends with the same bytes over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np

from coord_server import aggregation, guard
from edge_bench.data import datasets
from edge_bench.data.table import DataConfig
from edge_bench.simulation.file import find_bundle
from edge_bench.simulation.simulate import Mishaps, Simulated, Simulation, run
from edge_bench.simulation.workers import Site, Trained, Workers
from edge_bench.testing.require import require
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.device import local
from edge_client.errors import PayloadError
from edge_client.methods import Method
from edge_client.protocol import payload
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.metrics import METRICS
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Course
from edge_client.training import open_trainer


@dataclass(frozen=True)
class Ground:
    """Where a method is tried: a bundle, the data of three devices by name, a training engine, a seed."""

    bundle: Bundle
    devices: Mapping[str, DeviceData]
    backend: str = "onnxruntime"
    seed: int = 7

    def federation(self, method: Method, rounds: int, cohort: int, least: int = 3) -> FederationConfig:
        """A federation of this method on this bundle."""
        address = self.bundle.sha256
        table = {"name": method.name, **method.model_dump(mode="json")}
        return FederationConfig(
            name=method.name, bundle=address, method=table, rounds=rounds, cohort=cohort, min_devices=least,
            seed=self.seed, deadline_seconds=600,
        )  # fmt: skip

    def simulate(
        self, method: Method, rounds: int = 3, cohort: int = 2, mishaps: Mishaps | None = None, least: int = 3,
        turned: bool = False,
    ) -> Simulated:  # fmt: skip
        """One federation. Of three devices with a cohort of two, each round misses another; `turned` reverses them."""
        config = self.federation(method, rounds, cohort, least)
        given = dict(reversed([*self.devices.items()])) if turned else self.devices
        return run(config, method, self.bundle, open_trainer(self.backend, self.bundle), given, mishaps=mishaps)


@cache
def digits() -> Ground:
    """The packaged digits network and three devices of about 80 training samples, a tenth of them for validation."""
    bundle = find_bundle("digits")
    config = DataConfig(name="digits", devices=3, samples=300, validation=0.1)
    return Ground(bundle, datasets.load(config, 7, bundle.manifest))


def check_method(method: Method, ground: Ground | None = None) -> None:
    """All that follows, on `ground` or on `digits()`. Give the method few epochs. Raises AssertionError."""
    there = ground or digits()
    repeats(method, there)
    takes_late_devices(method, there)
    survives_lost_state(method, there)
    survives_the_guard(method, there)
    survives_the_store(method, there)
    leaves_its_inputs(method, there)
    for rounds in (0, 1):
        refuses_what_is_malformed(method, there, rounds)


# --- whole runs


def repeats(method: Method, ground: Ground, first: Simulated | None = None) -> None:
    """The same seed gives the same bytes in whatever order the devices are given. `first` is an earlier run's end."""
    one, other = first or ground.simulate(method), ground.simulate(method, turned=True)
    who = method.name
    for a, b in zip(one.rows, other.rows, strict=True):
        changed = [
            key
            for key, value in a.record.model_dump(exclude={"seconds"}).items()
            if b.record.model_dump()[key] != value
        ]
        require(
            not changed,
            f"{who}: round {a.record.round} of two runs of one seed differs in {', '.join(changed)}; {SAME}",
        )
    for what in ("state_sha256", "personal_sha256", "final"):
        require(getattr(one, what) == getattr(other, what), f"{who}: two runs of one seed differ in {what}; {SAME}")
    took_part = {d for row in one.rows for d in row.record.devices}
    require(len(took_part) == len(ground.devices), f"{who}: in 3 rounds only {sorted(took_part)} took part")


SAME = (
    "draw randomness from edge_kernels.counter by the assignment's seed, round and device, and keep nothing in the "
    "method object"
)


def takes_late_devices(method: Method, ground: Ground) -> None:
    """A device that joins at round 3 takes part from then on and ends with a model."""
    late = min(ground.devices)
    result = ground.simulate(method, rounds=4, cohort=3, mishaps=Mishaps(away={late: {1, 2}}), least=2)
    rounds = [row.record.round for row in result.rows if late in row.record.devices]
    require(rounds == [3, 4], f"{method.name}: a device that is there from round 3 on took part in {rounds}")
    finite = bool(np.isfinite(result.personal[late].parameters).all())
    require(finite, f"{method.name}: the model of a device that joined at round 3 is not finite")


def survives_lost_state(method: Method, ground: Ground) -> None:
    """A device that lost what it kept sits out a round at most, and stops no other."""
    unlucky, who = min(ground.devices), method.name
    result = ground.simulate(method, cohort=3, mishaps=Mishaps(loses={unlucky: {2, 4}}))
    took_part = [row.record.devices for row in result.rows]
    counts = [len(d) for d in took_part]
    advice = "raise LostError in `receive` when what the device kept does not fit the downlink"
    require(counts in ([3, 3, 3], [3, 2, 3]), f"{who}: three devices, one lost its state: {counts} took part; {advice}")
    require(unlucky in took_part[2], f"{who}: the device that lost its state does not take part in the round after")
    finite = bool(np.isfinite(result.personal[unlucky].parameters).all())
    require(finite, f"{who}: the model of a device that lost its state is not finite")


def survives_the_guard(method: Method, ground: Ground) -> None:
    """A device whose update the guard dropped takes part in the next round, with no downlink in vain."""
    unlucky, who = min(ground.devices), method.name
    drops = [{}, {}, {unlucky: guard.Limit(1.0, 1.0, drop=True, reason="dropped for a test")}, {}]
    with patch.object(guard, "limits", side_effect=drops):
        result = ground.simulate(method, rounds=4, cohort=3)
    counts = [len(row.record.devices) for row in result.rows]
    advice = "give the record of what the device kept in `dropped`"
    require(counts == [3, 3, 2, 3], f"{who}: three devices, one update dropped: {counts} took part; {advice}")
    require(result.vain_bytes == 0, f"{who}: {result.vain_bytes:.0f} bytes went down in vain; {advice}")


# --- values and bytes in the middle of a federation


@dataclass
class Middle:
    """A federation after `rounds` rounds of all devices."""

    sim: Simulation
    rounds: int
    names: list[str]

    def assignment(self, device: str) -> Assignment:
        return Assignment(self.sim.course, self.rounds + 1, device, self.names.index(device))

    def update(self, device: str) -> bytes:
        """What a device would send in the next round."""
        turns, downlinks = self.sim.turns(self.rounds + 1, {device: self.assignment(device).place})
        (trained,) = self.sim.workers.train(self.rounds + 1, turns, downlinks)
        if not isinstance(trained, Trained):
            raise AssertionError(f"{self.sim.method.name}: {device} cannot do round {self.rounds + 1}: {trained}")
        return trained.update

    def refused(self, device: str, data: bytes, what: str) -> bool:
        """Whether an update is refused by a PayloadError; any other exception fails the check."""
        sim = self.sim
        try:
            aggregation.check_update(sim.method, self.assignment(device), sim.state, sim.records.get(device), data)
        except PayloadError:
            return True
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"{sim.method.name}: an update {what} raised {words}; check it in `read_update` and raise PayloadError"
            ) from error
        return False

    def go_on(self) -> None:
        """One more round of all devices."""
        self.rounds += 1
        places = {d: i for i, d in enumerate(self.names)}
        list(self.sim.train(self.rounds, places))
        self.sim.aggregate(self.rounds, places, len(places) + 1, 0.0)

    def through_bytes(self) -> None:
        """Store and read everything back, as a coordinator and its devices do when they start again."""
        sim, kinds = self.sim, type(self.sim.method)
        sim.state = aggregation.unpack(kinds.state_type, aggregation.pack(sim.state))
        if kinds.record_type is not None:
            sim.records = {
                d: aggregation.unpack(kinds.record_type, aggregation.pack(r)) for d, r in sim.records.items()
            }
        sim.kept = {d: dict(payload.decode(payload.encode(Payload(a))).arrays) for d, a in sim.kept.items()}
        sim.sent.clear()


def middle(method: Method, ground: Ground, rounds: int) -> Middle:
    config, course = ground.federation(method, 6, 3), Course(ground.bundle.model(), ground.seed, 6, 3)
    opener = partial(open_trainer, ground.backend, ground.bundle)
    workers = Workers(Site(method, course, ground.devices, opener, config.personalise), opener(), 1, 0)
    sim = Simulation(config, method, course, workers, ground.devices, Mishaps(), method.start(course))
    there = Middle(sim, 0, sorted(ground.devices))
    for _ in range(rounds):
        there.go_on()
    return there


def survives_the_store(method: Method, ground: Ground) -> None:
    """State, records and kept values go on the same after they were bytes."""
    ends = []
    for stored in (False, True):
        there = middle(method, ground, 1)
        for _ in range(2):
            if stored:
                there.through_bytes()
            there.go_on()
        kept = {d: {k: a.tobytes() for k, a in held.items()} for d, held in there.sim.kept.items()}
        records = {d: aggregation.pack(r) for d, r in there.sim.records.items()}
        ends.append({"state": aggregation.pack(there.sim.state), "record": records, "kept value": kept})
    for what in ends[0]:
        require(
            ends[0][what] == ends[1][what],
            f"{method.name}: the {what} after two rounds is another when everything was stored and read in between; "
            "put all that the next round needs into the dataclasses of state_type, record_type and kept_type",
        )


def leaves_its_inputs(method: Method, ground: Ground) -> None:
    """A device's functions leave what it kept and received as they are: used again, these give the same update."""
    there, device = middle(method, ground, 2), min(ground.devices)
    ((turn,), downlinks) = there.sim.turns(3, {device: there.assignment(device).place})
    task, content = there.sim.workers.task(3, turn), payload.decode(downlinks[turn.audience])
    kept, received = local.read_downlink(method, task.assignment, turn.kept, content)
    method.personal(task, kept, received)
    one, other = (payload.encode(method.local_round(task, kept, received).update) for _ in range(2))
    require(
        one == other,
        f"{method.name}: a second `local_round` from the same values gives another update; copy arrays of `kept` and "
        "`received` before you change them, since a simulator gives them to several devices",
    )


def refuses_what_is_malformed(method: Method, ground: Ground, rounds: int = 0) -> None:
    """After `rounds` rounds a malformed update is refused, and a damaged one raises PayloadError or means something."""
    there, device, who = middle(method, ground, rounds), min(ground.devices), method.name
    good = there.update(device)
    require(not there.refused(device, good, "as the device sends it"), f"{who}: its own update is refused")
    content, (_, downlinks) = payload.decode(good), there.sim.turns(rounds + 1, {device: there.names.index(device)})
    others = {"buffers", "surplus"}.union(*(payload.decode(data).arrays for data in downlinks.values()))
    for what, bad in _mutations(content, others):
        require(
            there.refused(device, payload.encode(bad), what),
            f"{who}: accepted an update {what}; check names, dtypes, shapes and finite values in `read_update` "
            "(edge_client.protocol.payload has functions for it)",
        )
    for bad in _noise(content):
        there.refused(device, payload.encode(bad), "with damaged bytes or metadata")
    for size in (0, 8, len(good) // 2, len(good) - 1):
        what = f"cut to {size} of {len(good)} bytes"
        require(there.refused(device, good[:size], what), f"{who}: accepted an update {what}")


def _mutations(content: Payload, others: set[str]) -> Iterator[tuple[str, Payload]]:
    """Updates that no device of this method would send, by what is wrong with them; `others` are names of arrays."""
    arrays, meta = dict(content.arrays), content.meta

    def put(name: str, array: np.ndarray[Any, Any]) -> Payload:
        return Payload({**arrays, name: array}, meta)

    for name in sorted(others - arrays.keys()):
        yield f"with an array too many, {name!r}", put(name, np.zeros((1, 3), np.float16))
    for name, a in arrays.items():
        yield f"without {name}", Payload({k: v for k, v in arrays.items() if k != name}, meta)
        yield f"with {name} of another type", put(name, a.astype(np.int64 if a.dtype.kind == "f" else np.float16))
        yield f"with {name} of one axis more", put(name, a[None])
        yield f"with {name} too long", put(name, np.concatenate([a.ravel(), np.zeros(1000, a.dtype)]))
        if a.size and a.dtype.kind == "f":
            yield f"with {name} too short", put(name, a.ravel()[:-1])
            yield f"with {name} without values", put(name, a.ravel()[:0])
            for wrong in (np.nan, np.inf):
                spoilt = a.copy()
                spoilt.flat[0] = wrong
                yield f"with {wrong} in {name}", put(name, spoilt)


def _noise(content: Payload) -> Iterator[Payload]:
    """Updates whose bytes or metadata are damaged: some still mean something."""
    rng = np.random.default_rng(0)
    arrays: Arrays = dict(content.arrays)
    for name, a in arrays.items():
        for _ in range(10 if a.size else 0):
            spoilt = np.frombuffer(a.tobytes(), np.uint8).copy()
            spoilt[rng.integers(spoilt.size)] ^= 1 << rng.integers(8)
            yield Payload({**arrays, name: spoilt.view(a.dtype).reshape(a.shape)}, content.meta)
        for size in {0, 1, a.size // 2, max(a.size - 1, 0)}:
            yield Payload({**arrays, name: a.ravel()[:size]}, content.meta)
    for key in content.meta.keys() - {METRICS}:
        yield Payload(arrays, {k: v for k, v in content.meta.items() if k != key})
        for wrong in ("x", -1, 0, 2**53 - 1, 0.5, [1, 2]):
            yield Payload(arrays, {**content.meta, key: wrong})
