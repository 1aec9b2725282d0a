"""A device of a real federation goes on after its stored state was set back, and after it was lost before the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from federation import Federation

from edge_client.bundle import Bundle

datasets = pytest.importorskip("sklearn.datasets")
pytest.importorskip("fastapi")

BUNDLE = Path(__file__).parent.parent / "benchmarks" / "edge_bench" / "bundles" / "digits"
DEVICES = ("a", "b", "c")


def test_a_coupled_device_recovers_from_an_old_state_and_from_a_lost_one_at_the_end(tmp_path: Path) -> None:
    digits = datasets.load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    for i, name in enumerate(DEVICES):
        np.savez(tmp_path / f"{name}.npz", x=x[i::12], y=y[i::12])
    config = {
        "name": "digits",
        "method": {"name": "coupled"},
        "rounds": 6,
        **dict.fromkeys(("cohort", "min_devices", "min_updates"), len(DEVICES)),
    }
    with Federation(tmp_path / "fed") as fed:
        fed.create(Bundle.open(BUNDLE), config)
        folder, backup = fed.folder / "a", tmp_path / "backup"

        def take_part(*options: str) -> None:
            process = fed.join("a", tmp_path / "a.npz", *options)
            assert process.wait() == 0, process.text()

        for name in DEVICES[1:]:
            fed.join(name, tmp_path / f"{name}.npz")
        take_part("--rounds", "2")
        shutil.copytree(folder, backup)
        take_part("--rounds", "1")
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        take_part("--rounds", "1")
        assert "round 4 failed on this device (lost)" in fed.devices["a"].text()
        take_part("--rounds", "2")
        for kept in folder.glob("kept-*"):
            kept.unlink()
        take_part()
        assert [fed.devices[name].wait() for name in DEVICES[1:]] == [0, 0]
        rounds = fed.rounds()
    assert [r["devices"] for r in rounds] == [list(DEVICES)] * 6
    assert all((fed.folder / name / "personal.onnx").is_file() for name in DEVICES)
