"""Real processes on loopback: kill -9 at points chosen by progress, bad input, full disks. Slow, so few and large."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from databases import Server
from federation import PATIENCE, Federation, environment, until

from edge_client.bundle import Bundle
from edge_client.commands.exit_codes import ExitCode
from edge_client.errors import ServerError
from edge_client.link.remote import Remote
from edge_client.link.retry import Retry
from edge_client.link.transport import Transport, content_digest
from edge_client.protocol.messages import Receipt
from edge_client.protocol.metrics import METRICS
from edge_client.protocol.payload import Payload, decode, encode

datasets = pytest.importorskip("sklearn.datasets")
pytest.importorskip("fastapi")

BUNDLE = Path(__file__).parent.parent / "benchmarks" / "edge_bench" / "bundles" / "digits"
DEVICES = ("a", "b", "c", "d")
ROUNDS, KILLS = 24, 4  # of each process
LIMIT = PATIENCE
FEDMASK = {"name": "fedmask", "epochs": 3, "batch": 16, "lr": 1.0, "keep": 0.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """scikit-learn's digits dealt to the devices, one .npz each."""
    digits = datasets.load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    folder = tmp_path_factory.mktemp("data")
    paths = {}
    for i, name in enumerate(DEVICES):
        paths[name] = folder / f"{name}.npz"
        np.savez(paths[name], x=x[i::4], y=y[i::4])
    return paths


def config(rounds: int, **settings: Any) -> dict[str, Any]:
    return {
        "name": "digits",
        "method": FEDMASK,
        "rounds": rounds,
        "cohort": len(DEVICES),
        "min_devices": len(DEVICES),
        "min_updates": len(DEVICES),
        "deadline_seconds": 3600.0,
        "seed": 11,
        **settings,
    }


def outcome(fed: Federation) -> dict[str, Any]:
    """All that two runs of the same federation must have in common."""
    devices = fed.ask("GET", f"/v1/federations/{fed.id}/devices")
    return {
        "state": fed.state(),
        "rounds": [{k: v for k, v in r.items() if k != "cost"} for r in fed.rounds()],  # seconds differ
        "updates": {d["device"]: d["updates"] for d in devices},
        "scores": {d["device"]: d["report"]["score"] for d in devices},
        "personal": {name: (fed.folder / name / "personal.onnx").read_bytes() for name in DEVICES},
    }


def join_all(fed: Federation, data: dict[str, Path]) -> None:
    for name in DEVICES:
        fed.join(name, data[name])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> dict[str, Any]:
    """The outcome of an undisturbed run."""
    with Federation(tmp_path_factory.mktemp("calm")) as fed:
        fed.create(Bundle.open(BUNDLE), config(ROUNDS))
        join_all(fed, data)
        assert [fed.devices[name].wait(LIMIT) for name in DEVICES] == [0, 0, 0, 0]
        found = outcome(fed)
    assert found["updates"] == dict.fromkeys(DEVICES, ROUNDS)
    assert [r["devices"] for r in found["rounds"]] == [list(DEVICES)] * ROUNDS
    return found


def test_killed_again_and_again_a_run_ends_as_an_undisturbed_one(
    tmp_path: Path, data: dict[str, Path], calm: dict[str, Any], each_database: Server | None
) -> None:
    chance = random.Random(5)
    victims = ["coordinator", *DEVICES, *(["database"] if each_database is not None else [])] * KILLS
    chance.shuffle(victims)
    hit = 0
    with Federation(tmp_path / "killed") as fed:
        fed.create(Bundle.open(BUNDLE), config(ROUNDS))
        join_all(fed, data)
        for i, victim in enumerate(victims):
            # By progress, so that the machine's speed changes nothing: after a number of updates of rounds 1 to 16. The
            # others leave room for a run that goes on while this process has to wait.
            reached(fed, 1 + 16 * i // len(victims), chance.randrange(len(DEVICES)))
            if victim == "database":
                assert each_database is not None
                hit += fed.ask("GET", f"/v1/federations/{fed.id}")["phase"] == "running"
                each_database.crash()
                each_database.start()
                continue
            process = fed.coordinator if victim == "coordinator" else fed.devices[victim]
            if process.poll() is None:
                hit += process.kill() == -signal.SIGKILL
            process.start()
            fed.wait_until_up()
        assert [fed.devices[name].wait(LIMIT) for name in DEVICES] == [0, 0, 0, 0], fed.devices["a"].text()
        killed = outcome(fed)
        said = "".join(p.text() for p in (fed.coordinator, *fed.devices.values()))
    assert hit == len(victims), "the run was over before it had been killed often enough"
    assert killed == calm
    assert "Traceback" not in said


def reached(fed: Federation, round_: int, updates: int) -> None:
    """Return once round `round_` has this many updates, or is over."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        now = fed.ask("GET", f"/v1/federations/{fed.id}")
        if now["round"] > round_ or now["phase"] == "finished" or (now["round"], now["updates"]) >= (round_, updates):
            return
        time.sleep(0.005)
    raise AssertionError((now, fed.devices["a"].text()[-500:]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A coordinator whose federation waits for four devices."""
    with Federation(tmp_path_factory.mktemp("site")) as fed:
        fed.create(Bundle.open(BUNDLE), config(2))
        yield fed


def ends(fed: Federation, name: str, path: Path, *options: str) -> tuple[int, str]:
    """A device process's exit code and all it said; never a traceback."""
    process = fed.join(name, path, *options)
    code, text = process.wait(), process.text()
    assert "Traceback" not in text, text
    return code, text


def test_bad_data_and_a_bad_token_end_with_their_code_and_a_sentence(
    site: Federation, data: dict[str, Path], tmp_path: Path
) -> None:
    good = np.load(data["a"])
    x, y = good["x"], good["y"]
    cases = {
        "shape": ({"x": x[:, :63], "y": y}, "shape (63,), the model of digits takes (64,)"),
        "label": ({"x": x, "y": y + 1}, "outside 0..9"),
    }
    for name, (arrays, sentence) in cases.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        code, text = ends(site, "a", path, "--once")
        assert code == ExitCode.DATA, text
        assert sentence in text
    torn = tmp_path / "torn.npz"
    torn.write_bytes(data["a"].read_bytes()[:1000])
    code, text = ends(site, "a", torn, "--once")
    assert code == ExitCode.DATA, text
    assert "not a readable .npz" in text
    token, site.token = site.token, "wrong"
    code, text = ends(site, "stranger", data["a"])
    site.token = token
    assert code == ExitCode.REFUSED
    assert "join token is unknown" in text


def test_a_full_disk_on_the_device_has_its_own_code_and_the_device_goes_on_once_there_is_room(
    site: Federation, data: dict[str, Path]
) -> None:
    """RLIMIT_FSIZE refuses a larger file as a full disk would: here the model does not fit."""
    state = site.folder / "full"
    command = [
        sys.executable,
        "-m",
        "edge_client.cli",
        "join",
        site.url,
        "--token",
        site.token,
        "--align",
        "none",
        "--once",
    ]
    command += ["--data", str(data["b"]), "--device", "b", "--state", str(state)]

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    full = subprocess.run(
        command, capture_output=True, text=True, env=environment(), preexec_fn=small, timeout=LIMIT, check=False
    )
    assert full.returncode == ExitCode.STATE, full.stderr
    assert "free some space" in full.stderr
    assert "Traceback" not in full.stderr
    again = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT, check=False)
    assert again.returncode == ExitCode.DONE, again.stderr


def test_a_second_client_on_a_folder_is_refused_and_a_signal_ends_the_first_with_a_sentence(
    site: Federation, data: dict[str, Path]
) -> None:
    first = site.join("c", data["c"])
    until(lambda: "no work yet: waiting for 4 devices" in first.text(), first.text)
    process = site.join("c", data["c"])
    assert process.wait() == ExitCode.STATE
    assert "another maskfleet client" in process.text()
    assert first.kill(signal.SIGTERM) == ExitCode.TERMINATED
    assert "the same command resumes" in first.text()
    before = first.text().count("no work yet")  # both write into one file
    again = site.join("c", data["c"])
    until(lambda: again.text().count("no work yet") > before, again.text)
    assert again.kill(signal.SIGINT) == ExitCode.INTERRUPTED


def test_damaged_foreign_and_repeated_uploads_are_problems_and_the_round_goes_on(
    tmp_path: Path, data: dict[str, Path]
) -> None:
    """One device speaks HTTP by hand, in a federation of two with a real one."""
    fedavg = {"name": "fedavg", "epochs": 1}
    with Federation(tmp_path / "hand") as fed:
        fed.create(Bundle.open(BUNDLE), config(1, method=fedavg, cohort=2, min_devices=2, min_updates=2))
        real = fed.join("real", data["a"])
        http = httpx.Client(base_url=fed.url, timeout=LIMIT, trust_env=False)
        enrol = {"token": fed.token, "device": "hand", "credential": "ab" * 32}
        assert http.post("/v1/enrol", json=enrol).is_success
        http.headers["Authorization"] = f"Bearer {'ab' * 32}"
        base = f"/v1/federations/{fed.id}"
        while (work := http.get(f"{base}/work?wait=30").json())["status"] == "wait":
            assert real.poll() is None, real.text()
        assert work["status"] == "train", work
        downlink = decode(http.get(f"{base}/payloads/{work['downlink']}").content)
        metrics = {METRICS: [5, 1.0, 0.2, 0.4, 5]}
        good = encode(Payload(downlink.arrays, metrics))

        def put(
            body: bytes, round_: int = 1, lease: str = work["lease"], device: str = "hand", of: bytes | None = None
        ) -> Any:
            headers = {"Maskfleet-Lease": lease, "Content-Digest": content_digest(body if of is None else of)}
            return http.put(f"{base}/rounds/{round_}/updates/{device}", content=body, headers=headers)

        nan = {k: np.full_like(v, np.nan) for k, v in downlink.arrays.items()}
        flipped = good[:5000] + bytes([good[5000] ^ 64]) + good[5001:]
        refused = {
            "bit-flipped": (put(flipped, of=good), 422, "bad-digest"),
            "truncated": (put(good[:-100]), 422, "bad-payload"),
            "rubbish": (put(b"rubbish"), 422, "bad-payload"),
            "NaN": (put(encode(Payload(nan, metrics))), 422, "bad-payload"),
            "shape": (put(encode(Payload({"parameters": np.zeros(3, np.float32)}, metrics))), 422, "bad-payload"),
            "oversized": (put(good + bytes(100_000)), 413, "too-large"),
            "foreign round": (put(good, round_=2), 409, "wrong-round"),
            "foreign lease": (put(good, lease="0" * 16), 409, "wrong-lease"),
            "foreign device": (put(good, device="real"), 403, "forbidden"),
        }
        for what, (response, status, kind) in refused.items():
            assert response.status_code == status, (what, response.text)
            assert response.headers["Content-Type"] == "application/problem+json", what
            assert response.json()["type"].endswith(f"/{kind}"), (what, response.text)
            assert len(response.json()["detail"]) > 20, what
        first, second = put(good), put(good)
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json() == second.json()
        assert real.wait() == ExitCode.DONE, real.text()
        assert put(good).status_code == 200  # its answer was lost, the round is long over: still the same receipt
        assert [r["devices"] for r in fed.rounds()] == [["hand", "real"]]


def test_an_answer_sent_before_the_megabytes_of_the_request_are_read_reaches_the_device(tmp_path: Path) -> None:
    """The coordinator answers a refused or a repeated update while its body is still on its way."""
    with Federation(tmp_path / "big") as fed:
        transport = Transport(fed.url)
        transport.credential = "0" * 64
        remote = Remote(transport, Retry(fed.url, LIMIT, lambda _: None))
        path = "/v1/federations/none/rounds/1/updates/x"
        for _ in range(5):
            with pytest.raises(ServerError, match="no federation 'none' with this credential"):
                remote.put(path, bytes(16 << 20), {"Maskfleet-Lease": "0"}, Receipt, "sending")
        transport.close()
