"""The benchmarks of the coordinator's overhead, at a size that shows only that they run and what they report."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from edge_bench.__main__ import HERE, modules
from edge_bench.overhead import light_devices, round_overhead

from edge_client.bundle import views
from edge_client.errors import ConfigError

pytest.importorskip("fastapi")
CONFIG = Path(__file__).parents[1] / "benchmarks/configs/masks_mnist.toml"


@pytest.mark.parametrize("kind", list(round_overhead.KINDS))
def test_a_round_is_compared_with_the_durable_loop_in_seconds_cpu_and_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_overhead, "KINDS", {kind: round_overhead.KINDS[kind]})
    (row,) = round_overhead.measure(d=1000, cohorts=[3], updates=12, repeats=1)
    assert (row["kind"], row["cohort"], row["rounds"]) == (kind, 3, 4)
    for figure in ("seconds", "cpu", "memory"):
        pair = row[figure]
        assert pair["maskfleet"] > 0
        assert pair["ratio"] == pytest.approx(pair["maskfleet"] / pair["bare"])
    assert min(row["memory"]["maskfleet"], row["memory"]["bare"]) > 2**20


def test_devices_enrol_in_steps_and_those_that_poll_send_updates() -> None:
    rows = light_devices.measure([(5, 5), (9, 5), (9, 9)], updates=20)
    assert [(row["enrolled"], row["polling"]) for row in rows] == [(5, 5), (9, 5), (9, 9)]
    for row in rows:
        assert row["updates"] >= 20
        assert row["messages_per_second"] > 2 * row["updates_per_second"]  # a downlink and an update, and polls
        assert row["devices_that_stopped"] == 0


WRITES = re.compile(r"^ +(json_file|out): Annotated\[Path", re.MULTILINE)


def writers() -> list[str]:
    """The modules that can be started and write their figures to a file."""
    sources = {name.split()[-1]: None for name, _ in modules()}
    files = {name: HERE.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in sources}
    found = [name for name, file in files.items() if file.is_file() and WRITES.search(file.read_text("utf-8"))]
    return sorted([*found, "edge_bench.timing.codecs"])  # that is `maskfleet codec bench`


def test_the_benchmarks_that_write_a_file_are_found() -> None:
    known = {"overhead.dashboard", "overhead.light_devices", "overhead.round_overhead",
             "timing.codecs", "timing.executorch_step", "exporting.operators", "timing.lattice_speed",
             "timing.speed", "timing.step_time"}  # fmt: skip
    assert {f"edge_bench.{name}" for name in known} <= set(writers())


@pytest.mark.parametrize("name", writers())
def test_a_benchmark_that_could_not_write_its_figures_does_not_begin(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("edge_export")
    module = importlib.import_module(name)
    begin = module.bench if name.endswith(".codecs") else module.main
    takes, nowhere = inspect.signature(begin).parameters, tmp_path / "none" / "x.json"
    given = {"config": CONFIG} | {option: nowhere for option in ("json_file", "out") if option in takes}
    with pytest.raises(ConfigError, match="there is no folder"):
        begin(**{option: value for option, value in given.items() if option in takes})


def test_the_plain_loop_that_speed_is_compared_with_does_the_same_work(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("edge_export")
    from edge_bench.timing import speed
    from edge_bench.timing.speed_case import Case, export
    from torch.nn.utils import vector_to_parameters

    # One batch an epoch: both shuffle in an order of their own.
    case = Case("digits-mlp", (64,), 10, devices=4, cohort=2, samples=16, epochs=3, batch=16, rounds=3)
    bundle, net = export(case, tmp_path / "bundle"), case.network()
    vector_to_parameters(speed.plain_loop(case)[1], net.parameters())
    _, ended = speed.simulator(case, bundle, 1, models=True)
    (model, *_) = ended.personal.values()
    ours = views(bundle.manifest.parameters, model.parameters)
    assert ours.keys() == dict(net.named_parameters()).keys()
    for key, theirs in net.named_parameters():
        assert np.abs(ours[key] - theirs.detach().numpy()).max() < 1e-5


def test_lattice_is_measured_with_compiled_loops_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    from edge_bench.timing import lattice_speed

    monkeypatch.setattr(lattice_speed, "ROUNDS", 2)
    monkeypatch.setattr(lattice_speed, "DEVICES", 2)
    monkeypatch.setattr(lattice_speed, "TURNS", 1)
    lattice_speed.main(json_file=tmp_path / "lattice.json")
    figures = json.loads((tmp_path / "lattice.json").read_text())["figures"]
    assert figures.keys() == {"with numba", "numpy alone"}
    assert all(value > 0 for found in figures.values() for value in found.values())
