"""A real device process: a failed round is reported over HTTP and does not end it, SIGTERM does, and soon."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation, until

from edge_client.bundle import Bundle
from edge_client.exit_codes import ExitCode

datasets = pytest.importorskip("sklearn.datasets")
pytest.importorskip("fastapi")

BUNDLE = Path(__file__).parent.parent / "benchmarks" / "edge_bench" / "bundles" / "digits"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some of scikit-learn's digits."""
    digits = datasets.load_digits()
    np.savez(tmp_path / "mine.npz", x=(digits.data[:200] / 16).astype(np.float32), y=digits.target[:200])
    return tmp_path / "mine.npz"


def config(method: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "name": "digits",
        "method": method,
        "rounds": 3,
        "cohort": 1,
        "min_devices": 1,
        "min_updates": 1,
        **settings,
    }


def test_a_round_that_diverges_pauses_the_federation_and_ends_no_device(tmp_path: Path, data: Path) -> None:
    arrays = np.load(data)
    np.savez(tmp_path / "huge.npz", x=arrays["x"] * 1e12, y=arrays["y"])
    with Federation(tmp_path / "fed") as fed:
        fed.create(Bundle.open(BUNDLE), config({"name": "fedavg", "epochs": 2, "lr": 1000.0}, max_attempts=1))
        device = fed.join("a", tmp_path / "huge.npz")
        until(lambda: fed.ask("GET", f"/v1/federations/{fed.id}")["phase"] == "paused", device.text)
        now = fed.ask("GET", f"/v1/federations/{fed.id}")
        assert "a: diverged" in now["fault"]
        (shown,) = fed.ask("GET", f"/v1/federations/{fed.id}/devices")
        assert shown["failure"]["kind"] == "diverged"
        assert "smaller learning rate" in shown["failure"]["reason"]
        assert "round 1 failed on this device" in device.text()
        assert device.poll() is None
        fed.ask("POST", f"/v1/federations/{fed.id}/stop")
        assert device.wait() == ExitCode.STOPPED


def test_a_device_ends_at_once_on_sigterm_and_goes_on_when_started_again(tmp_path: Path, data: Path) -> None:
    with Federation(tmp_path / "fed") as fed:
        fed.create(Bundle.open(BUNDLE), config({"name": "fedavg", "epochs": 1}, min_devices=2))
        device = fed.join("a", data)
        until(lambda: "no work yet" in device.text(), device.text)
        assert device.kill(signal.SIGTERM) == ExitCode.TERMINATED
        assert "nothing is lost" in device.text()
        device.start()
        until(lambda: device.text().count("no work yet") > 1, device.text)
        fed.ask("POST", f"/v1/federations/{fed.id}/start")
        assert device.wait() == ExitCode.DONE
        assert [r["devices"] for r in fed.rounds()] == [["a"]] * 3
        assert (fed.folder / "a" / "personal.onnx").is_file()


def test_the_same_secret_and_seed_give_the_same_bytes_and_another_secret_others(tmp_path: Path, data: Path) -> None:
    method = {"name": "fedpm", "epochs": 1}
    updates = []
    for run, secret in enumerate(("7", "7", "8")):
        with Federation(tmp_path / str(run)) as fed:
            fed.create(Bundle.open(BUNDLE), config(method))
            assert fed.join("a", data, "--secret", secret).wait() == ExitCode.DONE
            updates.append(fed.state())
    assert updates[0] == updates[1] != updates[2]
