"""What every method must do, whatever it is: each installed method is found by its entry point and tried here.

A method that needs settings of its own on a network as small as this one has them in SETTINGS. VARIANTS are further
methods with settings under which much of their code differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench import datasets
from edge_bench.datasets import DataConfig
from edge_bench.processes import children, coordinator
from edge_bench.simulate import Mishaps, Simulated, _Run, find_bundle, run
from edge_bench.workers import Site, Trained, Workers
from edge_kernels import counter

from coord_server import aggregation
from coord_server.operator.client import Operator
from edge_client import local
from edge_client.bundle import MANIFEST, Bundle, digest
from edge_client.client import Client
from edge_client.compaction.personal import write_personal
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, PayloadError
from edge_client.files import write_whole
from edge_client.flat import from_arrays
from edge_client.global_model import global_model
from edge_client.methods import Method, make_method
from edge_client.protocol import payload
from edge_client.protocol.messages import FederationConfig, Report, TokenRequest
from edge_client.protocol.metrics import METRICS
from edge_client.protocol.payload import Arrays, Payload
from edge_client.runtimes.onnx import open_onnx
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import open_trainer

pytest.importorskip("sklearn")
SEED = 7
NAMES = sorted(e.name for e in entry_points(group="maskfleet.methods"))
SETTINGS: dict[str, dict[str, Any]] = {
    "coupled": {"head": "mask", "theta0": 0.5},
    "fedmap": {"every": 1},
    "fedmask": {"keep": 0.5},
    "lgfedavg": {"num_layers": 1, "global_rounds": 1},
    "stc": {"keep": 0.05},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "lattice-pruned": {"name": "lattice", "prune": 0.5, "prune_after": 1, "personal_epochs": 1},
}
WITHOUT_GLOBAL = {"bnn", "hidenseek", "lgfedavg", "signed", "standalone"}
PRUNED = {"federated_pruning", "federated_pruning_lamp", "fedmap", "fedmask", "hermes", "hidenseek", "lattice-pruned"}
every_method = pytest.mark.parametrize("name", [*NAMES, *VARIANTS])


def table(name: str) -> dict[str, Any]:
    """The configuration of a method under test: one epoch a round where it has epochs."""
    settings = VARIANTS.get(name, {"name": name, **SETTINGS.get(name, {})})
    epochs = {"epochs": 1} if "epochs" in type(make_method(settings)).model_fields else {}
    return {**epochs, **settings}


@cache
def bundle() -> Bundle:
    return find_bundle("digits")


@cache
def devices() -> dict[str, DeviceData]:
    """Three devices of about 80 training samples, a tenth of them for validation."""
    return datasets.load(DataConfig(name="digits", devices=3, samples=300, validation=0.1), SEED, bundle().manifest)


def federation(name: str, rounds: int, cohort: int, least: int = 3) -> FederationConfig:
    address = digest((bundle().folder / MANIFEST).read_bytes())
    return FederationConfig(
        name=name, bundle=address, method=table(name), rounds=rounds, cohort=cohort, min_devices=least, seed=SEED,
        deadline_seconds=600,
    )  # fmt: skip


def simulate(
    name: str, rounds: int = 3, cohort: int = 2, mishaps: Mishaps | None = None, least: int = 3, turned: bool = False
) -> Simulated:
    config, held = federation(name, rounds, cohort, least), devices()
    given = dict(reversed(held.items())) if turned else held
    trainer = open_trainer("onnxruntime", bundle())
    return run(config, make_method(config.method), bundle(), trainer, given, mishaps=mishaps)


@cache
def first(name: str) -> Simulated:
    """A run in which a different device misses each round."""
    return simulate(name)


def same(one: Simulated, other: Simulated) -> bool:
    """Whether two runs ended with the same bytes, after the same rounds."""
    rounds = [[row.record.model_dump(exclude={"seconds"}) for row in r.rows] for r in (one, other)]
    return rounds[0] == rounds[1] and (one.state_sha256, one.personal_sha256, one.final) == (
        other.state_sha256,
        other.personal_sha256,
        other.final,
    )


# --- whole runs


@every_method
def test_the_same_seed_gives_the_same_bytes_in_whatever_order_the_devices_are_given(name: str) -> None:
    assert same(first(name), simulate(name, turned=True))
    assert len({d for row in first(name).rows for d in row.record.devices}) == 3


@every_method
def test_a_device_that_joins_at_round_3_takes_part_and_ends_with_a_model(name: str) -> None:
    late = min(devices())
    result = simulate(name, rounds=4, cohort=3, mishaps=Mishaps(away={late: {1, 2}}), least=2)
    assert [late in row.record.devices for row in result.rows] == [False, False, True, True]
    assert np.isfinite(result.personal[late].parameters).all()


@every_method
def test_a_device_that_lost_what_it_kept_does_not_stop_the_others(name: str) -> None:
    unlucky = min(devices())
    result = simulate(name, rounds=3, cohort=3, mishaps=Mishaps(loses={unlucky: {2, 4}}))
    took_part = [row.record.devices for row in result.rows]
    assert [len(d) for d in took_part] in ([3, 3, 3], [3, 2, 3])
    assert unlucky in took_part[2]
    assert np.isfinite(result.personal[unlucky].parameters).all()


# --- over HTTP


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Operator]]:
    """A coordinator process on loopback: its address, and an operator's client of it."""
    with children() as start:
        _, url, client = coordinator(start, tmp_path_factory.mktemp("coordinator"), {})
        client.upload_bundle(bundle().folder)
        yield url, client
        client.close()


@every_method
def test_a_simulation_ends_with_the_same_bytes_as_devices_over_http(
    name: str, operator: tuple[str, Operator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[str, Personal] = {}

    def conclude(bundle: Bundle, task: Task, personal: Personal, path: Path, *_: Any) -> Report:
        """The end of a device without compaction and measurement, which need seconds."""
        ended[task.assignment.device] = personal
        write_whole(path, b"a model")
        figures = {"parameters_dense": 1, "parameters_compact": 1, "test_samples": len(task.data.y_test)}
        return Report(score=task.score(personal), **figures)

    monkeypatch.setattr("edge_client.conclude.conclude", conclude)
    url, client = operator
    id_ = client.create(federation(name, rounds=3, cohort=2)).id
    token = client.token(id_, TokenRequest(uses=3)).token

    def take_part(device: str) -> str:
        secret, state = counter.key(SEED, "secret", device), tmp_path / device
        return Client(url, token, devices()[device], device=device, state=state, secret=secret, poll=5.0).run().ended

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(take_part, devices())) == ["finished"] * 3
    expected = first(name)
    assert {d.device: d.report.source for d in client.devices(id_) if d.report} == expected.sources
    assert digest(client.state(id_)) == expected.state_sha256
    for device, model in expected.personal.items():
        assert (ended[device].parameters == model.parameters).all()
        assert (ended[device].buffers == model.buffers).all()
    for real, row in zip(client.rounds(id_), expected.rows, strict=True):
        assert real.model_dump(exclude={"seconds", "cost"}) == row.record.model_dump(exclude={"seconds", "cost"})


# --- models to run


@every_method
def test_each_model_that_a_device_may_end_with_becomes_a_file(name: str, tmp_path: Path) -> None:
    there, device = middle(name, 2), min(devices())
    turns, downlinks = there.sim.turns(3, {device: 0})
    task = there.sim.workers._bench.task(3, turns[0])
    content, how = payload.decode(downlinks[turns[0].audience]), there.method
    sizes = {}
    for source in ("global", "local"):
        chosen = local.personal(how, task, turns[0].kept, content, source)
        assert chosen.source == source
        sizes[source] = write_personal(bundle(), chosen.personal, tmp_path / f"{source}.onnx").parameters_compact
    assert sizes["local"] <= 1.1 * sizes["global"] or name not in PRUNED
    best = local.personal(how, task, turns[0].kept, content, "best")
    last = from_arrays(Personal, {k[len(local.TRAINED) :]: a for k, a in turns[0].kept.items() if "/" in k})
    held = [local.personal(how, task, turns[0].kept, content, source).personal for source in ("global", "local")]
    assert task.score(best.personal, "validation") == max(task.score(m, "validation") for m in (*held, last))


@every_method
def test_the_global_model_of_a_state_runs_as_a_file_or_the_method_says_why_there_is_none(
    name: str, tmp_path: Path
) -> None:
    there = middle(name, 2)
    there.through_bytes()
    course, state = there.sim.course, there.sim.state
    if name in WITHOUT_GLOBAL:
        with pytest.raises(ConfigError, match=r"no global model to export: .*(own|layer)"):
            global_model(there.method, course, state, 2)
        return
    model = global_model(there.method, course, state, 2)
    write_personal(bundle(), model, tmp_path / "global.onnx")
    x = np.random.default_rng(0).standard_normal((16, *bundle().manifest.input.shape), np.float32)
    (found,) = open_onnx(tmp_path / "global.onnx").run(None, {"x": x})
    np.testing.assert_allclose(
        found, open_trainer("onnxruntime", bundle()).logits(model.parameters, model.buffers, x), rtol=1e-3, atol=1e-4
    )
    if name in ("fedavg", "fedprox", "perfedavg"):
        assert np.array_equal(model.parameters, state.parameters)


# --- values and bytes in the middle of a federation


@dataclass
class Middle:
    """A federation after `rounds` rounds of all devices."""

    sim: _Run
    rounds: int

    @property
    def method(self) -> Method:
        return self.sim.method

    def assignment(self, device: str) -> Assignment:
        return Assignment(self.sim.course, self.rounds + 1, device, sorted(devices()).index(device))

    def update(self, device: str) -> bytes:
        """What a device would send in the next round."""
        turns, downlinks = self.sim.turns(self.rounds + 1, {device: self.assignment(device).place})
        (trained,) = self.sim.workers.train(self.rounds + 1, turns, downlinks)
        assert isinstance(trained, Trained)
        return trained.update

    def check(self, device: str, data: bytes) -> None:
        record = self.sim.records.get(device)
        aggregation.check_update(self.method, self.assignment(device), self.sim.state, record, data)

    def go_on(self) -> None:
        """One more round of all devices."""
        self.rounds += 1
        places = {d: i for i, d in enumerate(sorted(devices()))}
        list(self.sim.train(self.rounds, places))
        self.sim.aggregate(self.rounds, places, 0.0)

    def through_bytes(self) -> None:
        """Store and read everything back, as a coordinator and its devices do when they start again."""
        sim, kinds = self.sim, type(self.method)
        sim.state = aggregation.unpack(kinds.state_type, aggregation.pack(sim.state))
        if kinds.record_type is not None:
            sim.records = {
                d: aggregation.unpack(kinds.record_type, aggregation.pack(r)) for d, r in sim.records.items()
            }
        sim.kept = {d: dict(payload.decode(payload.encode(Payload(a))).arrays) for d, a in sim.kept.items()}
        sim.sent.clear()


def middle(name: str, rounds: int) -> Middle:
    config = federation(name, rounds=6, cohort=3)
    method, course = make_method(config.method), Course(bundle().model(), SEED, 6, 3)
    opener = partial(open_trainer, "onnxruntime", bundle())
    workers = Workers(Site(method, course, devices(), opener, config.personalise), opener(), 1, 0)
    there = Middle(_Run(config, method, course, workers, devices(), Mishaps(), method.start(course)), 0)
    for _ in range(rounds):
        there.go_on()
    return there


@every_method
def test_state_records_and_kept_values_survive_the_store(name: str) -> None:
    ends = []
    for stored in (False, True):
        there = middle(name, 1)
        for _ in range(2):
            if stored:
                there.through_bytes()
            there.go_on()
        kept = {d: {k: a.tobytes() for k, a in held.items()} for d, held in there.sim.kept.items()}
        records = {d: aggregation.pack(r) for d, r in there.sim.records.items()}
        ends.append((aggregation.pack(there.sim.state), records, kept))
    assert ends[0] == ends[1]


def mutations(content: Payload) -> Iterator[tuple[str, Payload]]:
    """Updates that no device of this method would send, by what is wrong with them."""
    arrays, meta = dict(content.arrays), content.meta

    def put(name: str, array: np.ndarray[Any, Any]) -> Payload:
        return Payload({**arrays, name: array}, meta)

    yield "an array too many", put("surplus", np.zeros(3, np.float32))
    for name, a in arrays.items():
        yield f"without {name}", Payload({k: v for k, v in arrays.items() if k != name}, meta)
        yield f"{name} of another type", put(name, a.astype(np.int64 if a.dtype.kind == "f" else np.float16))
        yield f"{name} with one axis more", put(name, a[None])
        yield f"{name} too long", put(name, np.concatenate([a.ravel(), np.zeros(1000, a.dtype)]))
        if a.size and a.dtype.kind == "f":
            yield f"{name} too short", put(name, a.ravel()[:-1])
            yield f"{name} without values", put(name, a.ravel()[:0])
            for wrong in (np.nan, np.inf):
                spoilt = a.copy()
                spoilt.flat[0] = wrong
                yield f"{name} with {wrong}", put(name, spoilt)


def noise(content: Payload) -> Iterator[Payload]:
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


def refused(there: Middle, device: str, data: bytes) -> bool:
    """Whether an update is refused by a PayloadError; any other exception fails the test."""
    try:
        there.check(device, data)
    except PayloadError:
        return True
    return False


@every_method
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_malformed_update_is_refused_and_a_damaged_one_raises_nothing_else(name: str, rounds: int) -> None:
    there, device = middle(name, rounds), min(devices())
    good = there.update(device)
    there.check(device, good)
    content = payload.decode(good)
    for what, bad in mutations(content):
        assert refused(there, device, payload.encode(bad)), f"accepted an update: {what}"
    for bad in noise(content):
        refused(there, device, payload.encode(bad))
    assert all(refused(there, device, good[:size]) for size in (0, 8, len(good) // 2, len(good) - 1))
