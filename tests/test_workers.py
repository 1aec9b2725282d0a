"""Turns in one process or in several: the same bytes, the same errors; devices that are away or lose what they kept."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import psutil
import pytest
from edge_bench.data import datasets
from edge_bench.data.table import DataConfig
from edge_bench.simulation import workers
from edge_bench.simulation.file import find_bundle
from edge_bench.simulation.simulate import Mishaps, Simulated, run
from edge_bench.simulation.workers import Site, Turn, Workers
from federation import until
from processes import ended

from coord_server import aggregation
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, DivergedError, LostError, MaskfleetError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.standalone import Standalone
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Local, Task
from edge_client.training import open_trainer

pytest.importorskip("sklearn")
METHODS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg", "epochs": 1},
    {"name": "fedmask", "keep": 0.5, "epochs": 1},
    {"name": "coupled", "head": "mask", "theta0": 0.5, "epochs": 1},
)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return find_bundle("digits")


@pytest.fixture(scope="module")
def devices(bundle: Bundle) -> dict[str, DeviceData]:
    return datasets.load(DataConfig(name="digits", devices=5, samples=300), 5, bundle.manifest)


def simulate(
    bundle: Bundle, devices: dict[str, DeviceData], method: dict[str, Any], rounds: int = 3, **options: Any
) -> Simulated:
    address = bundle.sha256
    config = FederationConfig(name="x", bundle=address, method=method, rounds=rounds, cohort=3, seed=5)
    trainer = open_trainer("onnxruntime", bundle)
    return run(config, make_method(method), bundle, trainer, devices, evaluate_every=2, final_epochs=True, **options)


def outcome(result: Simulated) -> tuple[Any, ...]:
    rows = [(row.record.model_dump(exclude={"seconds"}), row.everyone) for row in result.rows]
    return rows, result.final, result.final_after, result.state_sha256, result.personal_sha256


@pytest.mark.parametrize("method", METHODS, ids=lambda table: table["name"])
def test_any_number_of_processes_gives_the_same_bytes(
    bundle: Bundle, devices: dict[str, DeviceData], method: dict[str, Any]
) -> None:
    one, three = (simulate(bundle, devices, method, processes=count) for count in (1, 3))
    assert outcome(one) == outcome(three)
    assert one.personal.keys() == devices.keys()
    for device, model in one.personal.items():
        assert (model.parameters == three.personal[device].parameters).all()


def test_processes_start_in_the_middle_of_a_round_once_the_work_left_pays(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(workers, "cores", lambda: begun.append(1) or 2)
    here = simulate(bundle, devices, METHODS[0], processes=None)
    assert begun
    pools: list[int] = []
    real = workers.ProcessPoolExecutor
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda count, *rest: pools.append(count) or real(count, *rest))
    monkeypatch.setattr(workers, "PAYS", 1e-9)
    assert outcome(simulate(bundle, devices, METHODS[0], processes=None)) == outcome(here)
    assert pools == [2]


def test_without_models_the_result_has_the_scores_and_digests_only(
    bundle: Bundle, devices: dict[str, DeviceData]
) -> None:
    with_, without = (simulate(bundle, devices, METHODS[0], models=models) for models in (True, False))
    assert outcome(with_) == outcome(without)
    assert without.personal == {}
    assert without.devices == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_device_comes_out_as_itself(
    bundle: Bundle, devices: dict[str, DeviceData], processes: int
) -> None:
    with pytest.raises(DivergedError, match=r"device 'device-.': .*smaller learning rate") as raised:
        simulate(bundle, devices, {"name": "fedavg", "lr": 1000.0}, processes=processes)
    assert raised.value.at_start == pickle.loads(pickle.dumps(raised.value)).at_start


def test_a_worker_that_is_killed_ends_the_run_with_a_sentence(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    class Fatal(Standalone):
        def local_round(self, task: Task, kept: Any, received: Any) -> Local:
            os.kill(os.getpid(), signal.SIGKILL)
            return super().local_round(task, kept, received)

    method, course = Fatal(), Course(bundle.model(), 0, 1, 3)
    opener = partial(open_trainer, "onnxruntime", bundle)
    downlink = aggregation.downlink(method, course, 1, method.start(course), None).data
    turns = [Turn(device, {}, "all") for device in devices]
    with (
        Workers(Site(method, course, devices, opener), opener(), 2, 5) as crew,
        pytest.raises(MaskfleetError, match="worker process ended"),
    ):
        list(crew.train(1, turns, {"all": downlink}))


PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from edge_bench.simulation.workers import Site, _begin

site = Site(None, None, {}, lambda: None)
with ProcessPoolExecutor(2, multiprocessing.get_context("fork"), _begin, (site,)) as pool:
    both = [pool.submit(time.sleep, 600) for _ in range(2)]
    print(*pool._processes, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_end_with_their_parent_also_when_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers_ = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers_) == 2
        parent.kill()
    until(lambda: all(map(ended, workers_)), lambda: f"workers that run on: {workers_}")


# --- mishaps


def test_a_device_that_is_away_takes_no_part_and_a_latecomer_does(
    bundle: Bundle, devices: dict[str, DeviceData]
) -> None:
    late, *others = devices
    absent = Mishaps(away={late: {1, 2}, others[0]: {3}, others[1]: {3}})
    result = simulate(bundle, devices, METHODS[1], rounds=4, mishaps=absent)
    for row in result.rows[:2]:
        assert late not in row.record.devices
    assert result.rows[2].record.devices == sorted([late, *others[2:]])


def test_devices_that_are_away_belong_to_the_fleet(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = list[int]()
    monkeypatch.setattr(FedAvg, "sized", lambda self, state, fleet: fleets.append(fleet) or state)
    simulate(bundle, devices, METHODS[0], mishaps=Mishaps(away={min(devices): {1, 2}}))
    assert fleets == [5, 5, 5]


def test_a_device_that_lost_what_it_kept_sits_the_round_out_and_goes_on(
    bundle: Bundle, devices: dict[str, DeviceData]
) -> None:
    everyone = dict(list(devices.items())[:3])
    lost = Mishaps(loses={min(everyone): {3}})
    result = simulate(bundle, everyone, METHODS[2], rounds=4, mishaps=lost)
    assert [len(row.record.devices) for row in result.rows] == [3, 3, 2, 3]
    assert min(everyone) not in result.rows[2].record.devices
    at_the_end = Mishaps(loses={d: {5} for d in everyone})
    again = simulate(bundle, everyone, METHODS[2], rounds=4, mishaps=at_the_end)
    assert again.state_sha256 == simulate(bundle, everyone, METHODS[2], rounds=4).state_sha256
    assert again.final is not None


def test_downlinks_that_are_read_in_vain_travel_and_are_counted(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    """In a round and after the last one; all three devices of these rounds receive the same downlink."""
    everyone, method = dict(list(devices.items())[:3]), {"name": "lattice", "epochs": 1}
    whole, one, all_ = (
        simulate(bundle, everyone, method, rounds=4, mishaps=Mishaps(loses=loses))
        for loses in ({}, {min(everyone): {3}}, {d: {5} for d in everyone})
    )
    in_round, last = whole.rows[2].record.traffic.down, whole.rows[3].record.traffic.last_down
    assert (whole.vain_bytes, one.vain_bytes) == (0, sum(in_round.values()) // 3)
    assert all_.vain_bytes == sum(last.values()) < sum(all_.rows[3].record.traffic.last_down.values())


def test_a_federation_that_too_few_devices_attend_says_where_it_stands(
    bundle: Bundle, devices: dict[str, DeviceData]
) -> None:
    with pytest.raises(ConfigError, match="stands at running, round 2"):
        simulate(bundle, devices, METHODS[0], mishaps=Mishaps(away={d: {2} for d in devices}))


def test_a_method_that_cannot_read_its_own_first_downlink_is_an_error_not_a_loop(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(self: Standalone, *given: Any) -> None:
        raise LostError("no luck")

    monkeypatch.setattr(Standalone, "receive", receive)
    with pytest.raises(MaskfleetError, match="no luck"):
        simulate(bundle, devices, {"name": "standalone"})


def test_a_downlink_is_decoded_once_for_the_devices_of_an_audience_that_kept_the_same(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[int, bool]] = []
    receive = Lattice.receive

    def counted(self: Lattice, a: Assignment, kept: Any, downlink: Payload) -> Any:
        decoded.append((a.round, kept is None))
        return receive(self, a, kept, downlink)

    monkeypatch.setattr(Lattice, "receive", counted)
    simulate(bundle, dict(list(devices.items())[:3]), {"name": "lattice", "epochs": 1}, rounds=2)
    assert decoded == [(1, True), (2, False), (3, False)]
