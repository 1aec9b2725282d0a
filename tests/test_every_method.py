"""What every method must do, whatever it is: each installed method is found by its entry point and tried here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench.federation.processes import children, coordinator
from edge_bench.simulation.simulate import Simulated
from edge_bench.testing import Ground, digits, methods
from edge_kernels import counter
from every_method import NAMES, VARIANTS, every_method, made
from lossy import Lossy

from coord_server import guard
from coord_server.guard import Limit
from coord_server.operator.client import Operator
from edge_client.bundle import Bundle, digest
from edge_client.compaction.personal import write_personal
from edge_client.device import local
from edge_client.device.client import Client
from edge_client.errors import ConfigError
from edge_client.files import write_whole
from edge_client.flat import from_arrays
from edge_client.global_model import global_model
from edge_client.methods.fedmap import FedMap, Record
from edge_client.protocol import payload
from edge_client.protocol.messages import Report
from edge_client.protocol.operator import TokenRequest
from edge_client.runtimes.onnx import open_onnx
from edge_client.task import Personal, Task
from edge_client.training import open_trainer

pytest.importorskip("sklearn")
PRUNED = {"federated_pruning", "federated_pruning_lamp", "fedmap", "fedmask", "hermes", "hidenseek", "lattice-pruned"}


def kind(name: str) -> str:
    """The name of the method under test, also of a variant."""
    return str(made(name).name)


@cache
def with_batch_norm() -> Ground:
    """The devices of `digits()`, whose network has a batch-norm."""
    pytest.importorskip("torch")
    from exported import exported

    return replace(digits(), bundle=exported("batch-norm mlp").bundle)


GROUNDS = {"digits": digits, "batch-norm": with_batch_norm}


@cache
def first(name: str, ground: str = "digits") -> Simulated:
    """A run in which a different device misses each round."""
    return GROUNDS[ground]().simulate(made(name))


# --- the contract that other packages check too (`edge_bench.testing.check_method`)


@every_method
def test_the_same_seed_gives_the_same_bytes_in_whatever_order_the_devices_are_given(name: str) -> None:
    methods.repeats(made(name), digits(), first(name))


@every_method
def test_a_device_that_joins_at_round_3_takes_part_and_ends_with_a_model(name: str) -> None:
    methods.takes_late_devices(made(name), digits())


@every_method
def test_a_device_that_lost_what_it_kept_does_not_stop_the_others(name: str) -> None:
    methods.survives_lost_state(made(name), digits())


@every_method
def test_a_device_whose_update_the_guard_drops_takes_part_in_the_next_round(name: str) -> None:
    methods.survives_the_guard(made(name), digits())


@pytest.mark.parametrize(
    ("name", "ground", "gone"),
    [
        *product([*NAMES, *VARIANTS], ["digits"], [(1, 2, 4)]),
        *product(["fedmask", "hermes", "lattice", "lattice-pruned"], ["batch-norm"], [(3, 4)]),
    ],
)
def test_a_federation_goes_on_after_rounds_whose_every_update_the_guard_drops(
    name: str, ground: str, gone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices keep what they trained in those rounds, and the server counts nothing of it."""
    there, round_ = GROUNDS[ground](), count(1)

    def limits(*_: Any) -> dict[str, Limit]:
        return dict.fromkeys(there.devices, Limit(1.0, 1.0, True, "left out")) if next(round_) in gone else {}

    monkeypatch.setattr(guard, "limits", limits)
    result = there.simulate(made(name), rounds=6, cohort=3)
    assert [len(row.record.devices) for row in result.rows] == [0 if r in gone else 3 for r in range(1, 7)]
    assert result.vain_bytes == 0
    assert all(np.isfinite(model.parameters).all() for model in result.personal.values())


@every_method
def test_state_records_and_kept_values_survive_the_store(name: str) -> None:
    methods.survives_the_store(made(name), digits())


@every_method
def test_a_round_leaves_what_the_device_kept_and_received_as_they_are(name: str) -> None:
    methods.leaves_its_inputs(made(name), digits())


@every_method
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_malformed_update_is_refused_and_a_damaged_one_raises_nothing_else(name: str, rounds: int) -> None:
    methods.refuses_what_is_malformed(made(name), digits(), rounds)


def test_a_simulation_keeps_what_the_method_leaves_of_a_lost_device_s_record(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any]] = []

    def lost(self: FedMap, record: Record) -> Record | None:
        asked.append((record.round, left := keeps(self, record)))
        return left

    keeps = FedMap.lost
    monkeypatch.setattr(FedMap, "lost", lost)
    methods.survives_lost_state(made("fedmap-dr-c2-c3"), digits())
    assert [(round_, left.round, left.last is not None) for round_, left in asked] == [(1, 0, True), (3, 0, True)]


# --- over HTTP


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Operator]]:
    """A coordinator process on loopback: its address, and an operator's client of it."""
    with children() as start:
        _, url, client = coordinator(start, tmp_path_factory.mktemp("coordinator"), {})
        yield url, client
        client.close()


@pytest.mark.parametrize(
    ("name", "ground"),
    [*product([*NAMES, *VARIANTS], ["digits"]), *product([*NAMES, "lattice-pruned"], ["batch-norm"])],
)
def test_a_simulation_ends_with_the_same_bytes_as_devices_over_http_that_loses_answers(
    name: str, ground: str, operator: tuple[str, Operator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = GROUNDS[ground]()
    ended: dict[str, Personal] = {}

    def conclude(bundle: Bundle, task: Task, personal: Personal, path: Path, *_: Any) -> Report:
        """The end of a device without compaction and measurement, which need seconds."""
        ended[task.assignment.device] = personal
        write_whole(path, b"a model")
        figures = {"parameters_dense": 1, "parameters_compact": 1, "test_samples": len(task.data.y_test)}
        return Report(score=task.score(personal), **figures)

    monkeypatch.setattr("edge_client.device.conclude.conclude", conclude)
    monkeypatch.setattr("edge_client.link.retry.backoff", lambda failures: 0.0)
    url, client = operator
    client.upload_bundle(there.bundle.folder)
    config = there.federation(made(name), rounds=3, cohort=2)
    id_ = client.create(config.model_copy(update={"name": f"{name}-on-{ground}"})).id
    token = client.token(id_, TokenRequest(uses=3)).token

    def take_part(device: str) -> str:
        secret, state, proxy = counter.key(there.seed, "secret", device), tmp_path / device, Lossy()
        ended = Client(url, token, there.devices[device], device=device, state=state, secret=secret, poll=5.0,
                       transport=proxy).run().ended  # fmt: skip
        updates = [asked for asked in proxy.asked if "/updates/" in asked]
        assert len(updates) == 2 * len(set(updates))  # each was carried out twice
        return ended

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(take_part, there.devices)) == ["finished"] * 3
    expected = first(name, ground)
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
    there, device = methods.middle(made(name), digits(), 2), min(digits().devices)
    turns, downlinks = there.sim.turns(3, {device: 0})
    task = there.sim.workers.task(3, turns[0])
    content, how = payload.decode(downlinks[turns[0].audience]), there.sim.method
    sizes = {}
    for source in ("global", "local"):
        chosen = local.choose_model(how, task, turns[0].kept, content, source)
        assert chosen.source == source
        sizes[source] = write_personal(digits().bundle, chosen.personal, tmp_path / f"{source}.onnx").parameters_compact
    assert sizes["local"] <= 1.1 * sizes["global"] or not PRUNED & {name, kind(name)}
    best = local.choose_model(how, task, turns[0].kept, content, "best")
    last = from_arrays(Personal, {k[len(local.TRAINED) :]: a for k, a in turns[0].kept.items() if "/" in k})
    held = [local.choose_model(how, task, turns[0].kept, content, source).personal for source in ("global", "local")]
    assert task.score(best.personal, "validation") == max(task.score(m, "validation") for m in (*held, last))


@every_method
def test_the_global_model_of_a_state_runs_as_a_file_or_the_method_says_why_there_is_none(
    name: str, tmp_path: Path
) -> None:
    there = methods.middle(made(name), digits(), 2)
    there.through_bytes()
    course, state = there.sim.course, there.sim.state
    if there.sim.method.stays(course) is not None:
        with pytest.raises(ConfigError, match=r"no global model: .*(own|layer)"):
            global_model(there.sim.method, course, state, 2)
        return
    model = global_model(there.sim.method, course, state, 2)
    write_personal(digits().bundle, model, tmp_path / "global.onnx")
    x = np.random.default_rng(0).standard_normal((16, *digits().bundle.manifest.input.shape), np.float32)
    (found,) = open_onnx(tmp_path / "global.onnx").run(None, {"x": x})
    np.testing.assert_allclose(
        found,
        open_trainer("onnxruntime", digits().bundle).logits(model.parameters, model.buffers, x),
        rtol=1e-3,
        atol=1e-4,
    )
    if name in ("fedavg", "fedprox", "perfedavg"):
        assert np.array_equal(model.parameters, state.parameters)
