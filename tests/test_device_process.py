"""A real device process: a failed round is reported over HTTP and does not end it, SIGTERM does, and soon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import PATIENCE, Federation, environment, until

from edge_client import Client
from edge_client.bundle import Bundle
from edge_client.commands.exit_codes import ExitCode
from edge_client.device import client
from edge_client.protocol.payload import Payload

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


def test_a_round_does_not_wait_for_a_device_whose_update_is_too_large(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sent = client.encode, list[int]()

    def encoded(update: Payload) -> bytes:
        """Of the first round alone, a megabyte too much."""
        sent.append(1)
        return whole(update) + bytes(2**20 if len(sent) == 1 else 0)

    monkeypatch.setattr(client, "encode", encoded)
    with Federation(tmp_path / "fed") as fed:
        two = config({"name": "fedavg", "epochs": 1}, cohort=2, min_devices=2, rounds=2, deadline_seconds=3600.0)
        fed.create(Bundle.open(BUNDLE), two)
        other = fed.join("b", data)
        result = Client(fed.url, fed.token, data, device="a", state=tmp_path / "a", align="none").run()
        assert (result.ended, result.rounds) == ("finished", 1)
        assert other.wait() == ExitCode.DONE
        first, second = fed.rounds()
        assert (first["devices"], second["devices"]) == (["b"], ["a", "b"])
        assert "an update of this method has at most" in first["failed"]["a"]["reason"]


def test_a_device_ends_at_once_on_sigterm_and_goes_on_when_started_again(tmp_path: Path, data: Path) -> None:
    with Federation(tmp_path / "fed") as fed:
        fed.create(Bundle.open(BUNDLE), config({"name": "fedavg", "epochs": 1}, min_devices=2))
        device = fed.join("a", data)
        until(lambda: "no work yet" in device.text(), device.text)
        assert device.kill(signal.SIGTERM) == ExitCode.TERMINATED
        assert "nothing is lost" in device.text()
        before = device.text().count("no work yet")
        device.start()
        until(lambda: device.text().count("no work yet") > before, device.text)
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


def test_nothing_is_kept_in_the_home_folder_for_the_makers_of_the_engine(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"):  # what moves ONNX Runtime's reports or prevents them
        monkeypatch.delenv(name, raising=False)
    with Federation(tmp_path / "fed") as fed:
        fed.create(Bundle.open(BUNDLE), config({"name": "fedavg", "epochs": 1}))
        assert fed.join("a", data).wait() == ExitCode.DONE
    assert not list(home.rglob("*"))


def test_from_a_packaged_bundle_to_predictions_with_what_every_file_and_log_says(tmp_path: Path, data: Path) -> None:
    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "edge_client.cli", *arguments], env=environment(), capture_output=True, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    with Federation(tmp_path / "fed") as fed:
        file = tmp_path / "fleet.toml"
        file.write_text(
            'name = "fleet"\nbundle = "digits"\nrounds = 2\ncohort = 1\nlicence = "for tests"\n'
            '[method]\nname = "fedmask"\nepochs = 1\n'
        )
        at = ("--url", fed.url)
        fed.id = command("federation", "create", str(file), *at).strip()
        fed.token = command("federation", "token", fed.id, *at).strip()
        device = fed.join("a", data, "--out", str(tmp_path / "models"), "--log-format", "json")
        assert device.wait() == ExitCode.DONE, device.text()
        said = [json.loads(line) for line in device.text().splitlines() if line.startswith("{")]
        assert [e["round"] for e in said if e["kind"] == "sent"] == [1, 2]
        (kept,) = [e["event"] for e in said if e["event"].startswith("keeping the ")]
        source = kept.split()[2]

        model = tmp_path / "models" / "personal.onnx"
        entries = json.loads(command("predict", str(model), str(data), "--json"))
        facts = {"federation": "fleet", "device": "a", "method": "fedmask", "rounds": "2", "licence": "for tests"}
        assert {name: entries["model"][name] for name in facts} == facts
        assert entries["model"]["source"] == source
        (shown,) = fed.ask("GET", "/v1/federations/fleet/devices")
        assert shown["report"]["source"] == source
        assert entries["samples"] == 200
        assert entries["score"] > 0.1

        whole = tmp_path / "global.onnx"
        assert "the global model after round 2 of 2" in command(
            "federation", "export", "fleet", "--onnx", str(whole), *at
        )
        assert "score" in command("predict", str(whole), str(data))
        overview = " ".join(command("federation", "show", "fleet", *at).split())
        assert "fleet fedmask, finished, round 2 of 2" in overview
        assert "of the personal models" in overview
        assert "next `maskfleet federation export fleet" in overview
        assert "finished" in command("federation", "show", "fleet", "--watch", *at)

        assert fed.operator.get("/v1/no%1bwhere").status_code == 404
        until(lambda: "refused" in fed.coordinator.text(), fed.coordinator.text)
        log = fed.coordinator.text()
        for words in (
            "fleet: a joined",
            "fleet: round 1 ended: 1 devices",
            "fleet: a ends with its",
            "refused, not-found",
        ):
            assert words in log, log
        assert "\x1b" not in log
