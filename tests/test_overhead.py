"""The benchmarks of the coordinator's overhead, at a size that shows only that they run and what they report."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from edge_bench.overhead import light_devices, round_overhead

from edge_client.errors import ConfigError

pytest.importorskip("fastapi")


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


@pytest.mark.parametrize(
    "name",
    [
        "overhead.dashboard",
        "overhead.light_devices",
        "overhead.round_overhead",
        "timing.codecs",
        "timing.executorch_step",
        "timing.lattice_speed",
        "timing.speed",
        "timing.step_time",
    ],
)
def test_a_benchmark_that_could_not_write_its_figures_does_not_begin(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("edge_export")
    module = importlib.import_module(f"edge_bench.{name}")
    with pytest.raises(ConfigError, match="there is no folder"):
        (module.bench if name == "timing.codecs" else module.main)(json_file=tmp_path / "none" / "x.json")


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
