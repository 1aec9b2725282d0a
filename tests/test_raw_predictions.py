"""From an own model and own data to a personal model that takes raw samples and gives their classes' names."""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edge_bench.simulation.split import split
from federation import PATIENCE, Federation, environment

from edge_client.bundle import Bundle
from edge_client.commands.exit_codes import ExitCode

pytest.importorskip("torch")
pytest.importorskip("fastapi")

NAMES = ("sit", "walk", "run")
MODEL = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
"""
RUN = """
bundle = "model.py:build"
rounds = 3
cohort = 2
[data]
name = "npz"
path = "raw.npz"
devices = 2
standardise = true
[export]
class_names = ["sit", "walk", "run"]
[methods.fedavg]
"""
FLEET = """
name = "fleet"
bundle = "bundle"
rounds = 3
cohort = 2
min_devices = 2
[method]
name = "fedavg"
lr = 0.1
epochs = 10
"""


def command(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "edge_client.cli", *arguments], cwd=folder, env=environment(), capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_personal_model_of_the_documented_path_names_the_classes_of_raw_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device has a file of the split, the other its raw samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASKFLEET_BUNDLES", str(tmp_path / "cache"))
    for name, text in (("model.py", MODEL), ("simulate.toml", RUN), ("federation.toml", FLEET)):
        Path(name).write_text(text)
    y = np.arange(240) % 3
    x = np.random.default_rng(0).normal(np.array([5e3, 2e-3]), np.array([30.0, 1e-5]), (240, 2))
    x += np.array([[-500.0, 0.0], [0.0, 2e-4], [500.0, 0.0]])[y]
    np.savez("raw.npz", x=x[:200], y=y[:200])
    np.savez("new.npz", x=x[200:], y=y[200:])
    np.savez("device.npz", x=x[100:200], y=y[100:200])

    split(Path("simulate.toml"), Path("devices"))
    export = capsys.readouterr().out.splitlines()[-1]
    command(tmp_path, *shlex.split(export)[1:])
    assert Bundle.open(Path("bundle")).manifest.class_names == NAMES
    with Federation(tmp_path / "fed") as fed:
        fed.id = command(tmp_path, "federation", "create", "federation.toml", "--url", fed.url).strip()
        fed.token = command(tmp_path, "federation", "token", fed.id, "--url", fed.url).strip()
        devices = [fed.join("split", tmp_path / "devices/device-0.npz"), fed.join("raw", tmp_path / "device.npz")]
        for device in devices:
            assert device.wait() == ExitCode.DONE, device.text()
        for name in ("split", "raw"):
            model = fed.folder / name / "personal.onnx"
            said = command(tmp_path, "predict", str(model), "new.npz", "--out", "said.csv")
            assert float(said.partition("score ")[2].split()[0]) > 0.9
            rows = list(csv.DictReader(Path("said.csv").read_text().splitlines()))
            assert np.mean([row["name"] == NAMES[c] for row, c in zip(rows, y[200:].tolist(), strict=True)]) > 0.9
