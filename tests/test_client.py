"""The device's side: the journal survives any instant, requests are repeated as they should be, a run ends right.

The coordinator here is a few lines behind httpx.MockTransport; real processes are in test_faults.py.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import httpx
import numpy as np
import pytest
import typer
from edge_kernels import counter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_client import client as client_module
from edge_client.bundle import F32, MANIFEST, Bundle, Init, Input, Layer, Manifest, Part, Tensor, digest
from edge_client.cli import join
from edge_client.client import Client
from edge_client.data import DataFile, DeviceData, read
from edge_client.errors import (
    BundleError,
    ConfigError,
    DataError,
    MaskfleetError,
    PayloadError,
    ServerError,
    StateError,
    UnreachableError,
)
from edge_client.events import Event
from edge_client.exit_codes import MEANING, ExitCode, exit_code
from edge_client.files import write_whole
from edge_client.journal import Journal, Pending
from edge_client.local import accuracy
from edge_client.methods import Assignment, Personal, Task, make_method
from edge_client.protocol.messages import Enrolled, Receipt, Report, Wait
from edge_client.protocol.payload import decode, encode
from edge_client.remote_bundle import open_remote
from edge_client.training import Gradient
from edge_client.transport import Transport, content_digest
from edge_client.targets import Classification

URL = "http://127.0.0.1:1"
PART = bytes(range(256)) * 40
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "epochs": 1, "batch": 8, "lr": 0.1},
    "standalone": {"name": "standalone", "epochs": 1, "batch": 8, "lr": 0.1},
}


def manifest() -> Manifest:
    """Softmax regression, 3 inputs, 2 classes."""
    uniform, zero = Init(kind="uniform", scale=0.5), Init(kind="constant", scale=0.0)
    return Manifest(
        name="tiny",
        input=Input(shape=(3,)),
        target=Classification(classes=2),
        parameters=(
            Tensor(name="w", shape=(2, 3), offset=0, init=uniform),
            Tensor(name="b", shape=(2,), offset=6, init=zero),
        ),
        layers=(Layer(name="out", kind="linear", weights=("w",), biases=("b",)),),
        seed=1,
        parts={name: Part(sha256=digest(PART), size=len(PART)) for name in ("train.onnx", "eval.onnx")},
    )


class Softmax:
    """The gradient of softmax regression in numpy: a trainer that needs no graph."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.manifest = bundle.manifest
        bundle.part("train.onnx")

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        out: F32 = (x @ parameters[:6].reshape(2, 3).T + parameters[6:]).astype(np.float32)
        return out

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        z = self.logits(parameters, buffers, x).astype(np.float64)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        loss = float(-np.log(p[np.arange(len(y)), y]).mean())
        p[np.arange(len(y)), y] -= 1.0
        flat = np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)]) / len(y)
        return Gradient(loss, flat.astype(np.float32), buffers)


def samples() -> DeviceData:
    x = counter.uniform(counter.key("client test"), 150).reshape(50, 3).astype(np.float32) - 0.5
    y = (x[:, 0] > 0).astype(np.int64)
    return DeviceData(x[:40], y[:40], x[40:], y[40:])


@dataclass
class Coordinator:
    """One federation with one device, in memory. `fault` may answer a request in the coordinator's place."""

    method: str = "fedavg"
    rounds: int = 3
    fault: Callable[[httpx.Request], httpx.Response | None] = lambda _: None
    round: int = 1
    credential: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    updates: dict[int, bytes] = field(default_factory=dict)
    report: bytes | None = None
    eager: bool = False
    """Whether a receipt brings the next work to an upload that waits for it."""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manifest = manifest()
        self.bundle = digest(self.manifest.to_bytes())
        self.made = make_method(METHODS[self.method])
        self.model = Bundle(self.manifest, Path("/nowhere")).model()
        self.state = self.made.start(self.model, 7)

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def assignment(self) -> Assignment:
        return Assignment(self.model, 7, self.rounds, self.round, "dev")

    def downlink(self) -> bytes:
        return encode(self.made.downlink(self.assignment(), self.state, {}))

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append((request.method, path))
        answered = self.fault(request)
        if answered is not None:
            return answered
        if path == "/v1/enrol":
            ask = json.loads(request.content)
            if ask["token"] != "good":
                return problem(401, "bad-token", "this join token is not valid; ask the operator for another")
            self.credential = ask["credential"]
            given = {"federation": "f1", "device": ask["device"], "bundle": self.bundle, "rounds": self.rounds}
            return httpx.Response(201, json={**given, "method": METHODS[self.method], "seed": 7, "backend": None})
        if request.headers.get("Authorization") != f"Bearer {self.credential}":
            return problem(401, "bad-credential", "unknown credential")
        if path == f"/v1/bundles/{self.bundle}":
            return httpx.Response(200, content=self.manifest.to_bytes())
        if path == f"/v1/bundles/{self.bundle}/parts/train.onnx":
            return httpx.Response(200, content=PART)
        if path == "/v1/federations/f1/work":
            return httpx.Response(200, json=self.work())
        if path.startswith("/v1/federations/f1/payloads/"):
            return httpx.Response(200, content=self.downlink())
        if path.startswith("/v1/federations/f1/rounds/"):
            return self.take(int(path.split("/")[5]), request)
        if path == "/v1/federations/f1/devices/dev/report":
            self.report = request.content
            return httpx.Response(204)
        return problem(404, "not-found", f"no such resource {path}")

    def work(self) -> dict[str, Any]:
        work = {"downlink": digest(self.downlink()), "downlink_size": len(self.downlink()), "round": self.round}
        if self.round > self.rounds:
            return {"status": "finish", **work}
        return {"status": "train", "lease": f"lease{self.round}", "deadline_in": 60.0, **work}

    def take(self, round_: int, request: httpx.Request) -> httpx.Response:
        body = request.content
        assert request.headers["Content-Digest"] == content_digest(body)
        assert request.headers["Maskfleet-Lease"] == f"lease{round_}"
        known = self.updates.get(round_)
        if known is None and round_ != self.round:
            return problem(409, "wrong-round", f"the federation is at round {self.round}")
        if known is not None and known != body:
            return problem(409, "conflicting-update", "another body came before")
        if known is None:
            self.updates[round_] = body
            a = self.assignment()
            update = self.made.read_update(a, self.state, {}, decode(body))
            total, _ = self.made.fold(a, self.state, {}, update, {})
            self.state = self.made.finish(self.model, round_, self.state, total)
            self.round += 1
        receipt = Receipt(federation="f1", round=round_, device="dev", sha256=digest(body), size=len(body))
        said = receipt.model_dump(exclude_none=True)
        more = {"work": self.work()} if self.eager and "wait" in request.url.params else {}
        return httpx.Response(201, json={**said, **more})


def problem(status: int, kind: str, detail: str, headers: dict[str, str] | None = None) -> httpx.Response:
    body = {"type": f"https://maskfleet.dev/problems/{kind}", "title": kind, "status": status, "detail": detail}
    return httpx.Response(status, json=body, headers=headers)


def read_trained(update: bytes) -> F32:
    out: F32 = np.asarray(decode(update).arrays["parameters"])
    return out


def conclude(bundle: Bundle, task: Task, personal: Personal, path: Path, threads: int) -> Report:
    """Stands for compaction and measurement: the graph of this model was never exported."""
    write_whole(path, personal.parameters.tobytes())
    right = accuracy(task.trainer, personal, task.data.x_test, task.data.y_test)
    return Report(accuracy=right, test_samples=len(task.data.y_test), parameters_dense=8, parameters_compact=8)


@pytest.fixture(autouse=True)
def _numpy_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "open_trainer", lambda backend, bundle, threads: Softmax(bundle, threads))
    monkeypatch.setattr("edge_client.transport.time.sleep", lambda _: None)

    monkeypatch.setattr("edge_client.conclude.conclude", conclude)


def device(folder: Path, coordinator: Coordinator, **options: Any) -> Client:
    options = {"device": "dev", "state": folder, "transport": coordinator.transport(), "patience": 5.0, **options}
    return Client(URL, options.pop("token", "good"), options.pop("data", samples()), **options)


# --- the whole run


def test_a_device_trains_every_round_and_reports_its_personal_model(tmp_path: Path) -> None:
    coordinator, said = Coordinator(), list[Event]()
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.ended, result.rounds, sorted(coordinator.updates)) == ("finished", 3, [1, 2, 3])
    assert coordinator.report is not None
    assert Report.model_validate_json(coordinator.report) == result.report
    assert (tmp_path / "personal.onnx").read_bytes() == coordinator.state["parameters"].tobytes()
    assert [e.round for e in said if e.kind == "sent"] == [1, 2, 3]
    labels = [decode(coordinator.updates[r]).meta for r in (1, 2, 3)]
    assert [(m["method"], m["round"], m["device"]) for m in labels] == [("fedavg", r, "dev") for r in (1, 2, 3)]
    assert all(float(f"{m['loss']:.6g}") == m["loss"] for m in labels)
    assert not list(tmp_path.glob("pending-*"))
    # A second run of the same command asks the coordinator nothing.
    before = len(coordinator.requests)
    assert device(tmp_path, coordinator).run().ended == "finished"
    assert len(coordinator.requests) == before


def test_what_was_read_of_a_file_is_not_kept_beside_what_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = samples().x, samples().y
    np.savez(tmp_path / "mine.npz", x=np.tile(x.astype(np.float64), (4, 1)), y=np.tile(y, 4))
    given: list[ReferenceType[DataFile]] = []

    def noted(path: Path) -> DataFile:
        file = read(path)
        given.append(ref(file))
        return file

    monkeypatch.setattr(client_module, "read", noted)
    coordinator, kept = Coordinator(), list[bool]()
    coordinator.fault = lambda r: kept.append(given[0]() is not None) if r.url.path.endswith("/work") else None
    assert device(tmp_path / "state", coordinator, data=tmp_path / "mine.npz").run().ended == "finished"
    assert kept
    assert not any(kept)


def test_work_that_a_receipt_brings_is_not_asked_for(tmp_path: Path) -> None:
    asking, eager = Coordinator(), Coordinator(eager=True)
    assert device(tmp_path / "asking", asking).run().rounds == 3
    assert device(tmp_path / "eager", eager).run().rounds == 3
    assert eager.updates == asking.updates
    assert eager.report == asking.report
    work = ("GET", "/v1/federations/f1/work")
    assert (asking.requests.count(work), eager.requests.count(work)) == (4, 1)
    # Who leaves after a round waits for nothing with its upload, and asks when it is back.
    leaving, waits = Coordinator(eager=True), list[bool]()
    leaving.fault = lambda r: (
        waits.append("wait" in r.url.params) if r.method == "PUT" and "rounds" in r.url.path else None
    )
    for _ in range(2):
        assert device(tmp_path / "leaving", leaving).run(rounds=1).rounds == 1
    assert device(tmp_path / "leaving", leaving).run(once=True).rounds == 1
    assert (waits, leaving.requests.count(work)) == ([False] * 3, 3)


def test_a_model_that_was_not_compacted_is_told_by_an_event_a_message_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dense(*given: Any) -> Report:
        return conclude(*given).model_copy(update={"uncompacted": "logits differ by 1"})

    monkeypatch.setattr("edge_client.conclude.conclude", dense)
    said = list[Event]()
    result = device(tmp_path, Coordinator(rounds=1)).run(on_event=said.append)
    assert [e.text for e in said if "logits differ by 1" in e.text]
    monkeypatch.setattr(Client, "run", lambda *_: result)
    monkeypatch.setattr("edge_client.cli.signal.signal", lambda *_: None)
    with pytest.raises(typer.Exit) as ended:
        join(URL, "good", tmp_path / "mine.npz")
    assert ended.value.exit_code == ExitCode.COMPACTION
    assert "not compacted: logits differ by 1" in capsys.readouterr().err


def test_rounds_and_once_stop_early_and_the_next_run_goes_on(tmp_path: Path) -> None:
    whole = Coordinator()
    device(tmp_path / "whole", whole).run()
    parts = Coordinator()
    assert device(tmp_path / "parts", parts).run(once=True).rounds == 1
    assert device(tmp_path / "parts", parts).run(rounds=2).ended == "paused"
    assert device(tmp_path / "parts", parts).run().ended == "finished"
    assert parts.updates == whole.updates


def test_once_without_work_returns_and_waits_for_nothing(tmp_path: Path) -> None:
    wait = Wait(reason="2 more devices have to join", poll_after=30.0).model_dump_json()
    coordinator = Coordinator()
    coordinator.fault = lambda r: httpx.Response(200, content=wait) if r.url.path.endswith("/work") else None
    said = list[Event]()
    result = device(tmp_path, coordinator).run(once=True, on_event=said.append)
    assert (result.rounds, result.ended) == (0, "paused")
    assert any("2 more devices" in e.text for e in said)


def test_a_wait_says_for_what_and_how_long(tmp_path: Path) -> None:
    waits = [Wait(reason=f"{n} more devices have to join", poll_after=30.0).model_dump_json() for n in (1, 2)]
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        httpx.Response(200, content=waits.pop()) if r.url.path.endswith("/work") and waits else None
    )
    said = list[Event]()
    device(tmp_path, coordinator).run(on_event=said.append)
    assert [(e.text, e.seconds) for e in said if e.kind == "wait"] == [
        ("no work yet: 2 more devices have to join; asking again for up to 25 s", 25.0),
        ("no work yet: 1 more devices have to join; asking again in 30 s, for up to 25 s", 55.0),
    ]


# --- killed


class _Killed(BaseException):
    """Stands for SIGKILL: no handler of the client sees it as an error."""


class _Disk:
    """A folder on a disk that writes only what it is told to: names by a sync of the folder, bytes by one of the file.

    A file that is written over has its new bytes under whatever name it had at the folder's last sync. Stands for the
    worst power cut. Nothing of the machine's own disk is synced, which would take long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bytes: dict[int, bytes] = {}
        self._files: dict[str, int] = {}
        self._open: list[int] = []  # so that no number of a file is given to another one

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self.folder:
            files = [p for p in self.folder.iterdir() if p.is_file()]
            self._files = {p.name: p.stat().st_ino for p in files}
        elif path.is_file():
            self._bytes[path.stat().st_ino] = path.read_bytes()
            self._open.append(os.open(path, os.O_RDONLY))

    def cut(self) -> None:
        """Lose what was not synced."""
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_file():
                path.unlink()
        for name, number in self._files.items():
            (self.folder / name).write_bytes(self._bytes.get(number, b""))
        self.close()

    def close(self) -> None:
        """The files' numbers may be used again."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize(("method", "rounds"), [("fedavg", 2), ("standalone", 5)])
def test_stopped_at_any_file_operation_or_request_a_device_ends_with_the_same_bytes(
    method: str, rounds: int, power_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every instant between two disk or network operations of a run is tried in turn; round 4 writes over round 1.

    The coordinator goes on at once, so a device that comes back is always asked for a later round.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
    calm = Coordinator(method, rounds=rounds)
    device(tmp_path / "calm", calm).run()
    real, steps = os.replace, Counter[str]()

    def step(at: int) -> None:
        steps["all"] += 1
        if steps["all"] == at:
            raise _Killed

    tried = 0
    for at in range(1, 200):
        steps.clear()
        coordinator, folder = Coordinator(method, rounds=rounds), tmp_path / str(at)
        folder.mkdir()
        disk = _Disk(folder)

        def fsync(descriptor: int, at: int = at, disk: _Disk = disk) -> None:
            step(at)
            disk.fsync(descriptor)
            step(at)

        def replace(a: Any, b: Any, at: int = at) -> None:
            step(at)  # before the rename: the temporary file is there
            real(a, b)
            step(at)

        class Link(httpx.MockTransport):
            def handle_request(self, request: httpx.Request, at: int = at) -> httpx.Response:
                step(at)
                response = super().handle_request(request)
                step(at)  # the coordinator has acted, the device never hears of it
                return response

        monkeypatch.setattr(os, "replace", replace)
        if power_cut:
            monkeypatch.setattr(os, "fsync", fsync)
        options = {"transport": Link(coordinator.handle)}
        try:
            device(folder, coordinator, **options).run()
        except _Killed:
            tried += 1
            if power_cut:
                disk.cut()
            device(folder, coordinator, **options).run()
        disk.close()
        monkeypatch.setattr(os, "replace", real)
        assert coordinator.updates == calm.updates, f"killed at step {at}"
        assert (folder / "personal.onnx").read_bytes() == (tmp_path / "calm" / "personal.onnx").read_bytes()
        if steps["all"] < at:
            break
    assert tried > 30


def test_an_update_journalled_but_never_sent_is_sent_again_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator()

    def dead(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PUT":
            raise _Killed
        return None

    coordinator.fault = dead
    with pytest.raises(_Killed):
        device(tmp_path, coordinator).run()
    coordinator.fault = lambda _: None
    monkeypatch.setattr(client_module, "run_round", None)  # training again would fail
    assert device(tmp_path, coordinator).run(rounds=1).rounds == 1
    assert list(coordinator.updates) == [1]


def test_a_round_that_went_on_without_the_device_is_dropped_with_what_it_kept(tmp_path: Path) -> None:
    coordinator, lost = Coordinator("standalone"), [True]

    def late(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PUT" and "rounds/2/" in request.url.path and lost:
            lost.clear()
            coordinator.round = 3
            return problem(409, "wrong-round", "the federation is at round 3")
        return None

    coordinator.fault = late
    said = list[Event]()
    result = device(tmp_path, coordinator).run(on_event=said.append)
    assert (result.rounds, sorted(coordinator.updates)) == (2, [1, 3])
    assert [e.round for e in said if e.kind == "dropped"] == [2]
    assert sorted(p.name for p in tmp_path.glob("kept-*")) == ["kept-0000001", "kept-0000003"]


# --- requests


class _Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 0.01

    def clock(self) -> float:
        return self.now


def link(handler: Callable[[httpx.Request], httpx.Response], time: _Time, patience: float = 100.0) -> Transport:
    return Transport(URL, patience=patience, transport=httpx.MockTransport(handler), sleep=time.sleep, clock=time.clock)


def test_connection_errors_and_5xx_are_repeated_with_growing_random_waits_until_patience_ends() -> None:
    time, calls = _Time(), Counter[str]()

    def handler(request: httpx.Request) -> httpx.Response:
        calls["n"] += 1
        if calls["n"] % 2:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(502)

    with pytest.raises(UnreachableError, match="100 s") as caught:
        link(handler, time).ask("GET", "/x", Receipt, "asking")
    assert exit_code(caught.value) == ExitCode.UNREACHABLE
    assert 100 <= time.now < 105
    assert all(s <= 0.5 * 2**i for i, s in enumerate(time.slept))
    assert len(set(time.slept)) == len(time.slept)


@pytest.mark.parametrize("busy", [False, True], ids=["no answer", "told when to come back"])
def test_devices_that_failed_together_do_not_come_back_together(busy: bool) -> None:
    waits = []
    wait = Wait(reason="r", poll_after=1.0)
    for _ in range(40):
        time, answers = _Time(), [503]

        def handler(_: httpx.Request, answers: list[int] = answers) -> httpx.Response:
            if answers:
                return problem(answers.pop(), "busy", "busy", {"Retry-After": "70"} if busy else {})
            return httpx.Response(200, content=wait.model_dump_json())

        link(handler, time).ask("GET", "/x", Wait, "asking")
        waits += time.slept
    assert len(set(waits)) == 40
    assert max(waits) - min(waits) > 0.25  # all of them within half a second


def test_retry_after_is_honoured_and_does_not_use_up_patience() -> None:
    time, answers = _Time(), [503, 429, 429]
    wait = Wait(reason="r", poll_after=1.0)

    def handler(_: httpx.Request) -> httpx.Response:
        if answers:
            return problem(answers.pop(), "busy", "busy", {"Retry-After": "70"})
        return httpx.Response(200, content=wait.model_dump_json())

    assert link(handler, time, patience=5.0).ask("GET", "/x", Wait, "asking") == wait
    assert len(time.slept) == 3
    assert all(70 <= s <= 70.5 for s in time.slept)


@pytest.mark.parametrize(
    ("status", "again", "said"),
    [
        (507, "10", f"asking: {URL} is busy (it answered 507 Insufficient Storage: /data is full); asking again in "),
        (429, None, f"asking: {URL} is busy (it answered 429 Too Many Requests: /data is full); asking again in "),
        (500, None, f"asking: no usable answer from {URL} (it answered 500 Internal Server Error: /data is full); "),
    ],
)
def test_a_wait_says_what_the_coordinator_said_is_in_the_way(status: int, again: str | None, said: str) -> None:
    wait, events = Wait(reason="r", poll_after=1.0), list[Event]()
    answers = [
        httpx.Response(200, content=wait.model_dump_json()),
        problem(status, "any", "/data is full", {} if again is None else {"Retry-After": again}),
    ]
    transport, time = httpx.MockTransport(lambda _: answers.pop()), _Time()
    asking = Transport(URL, on_event=events.append, transport=transport, sleep=time.sleep, clock=time.clock)
    assert asking.ask("GET", "/x", Wait, "asking") == wait
    assert [e.text[: len(said)] for e in events] == [said]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_a_refusal_is_final_and_carries_the_problem(status: int) -> None:
    time = _Time()
    with pytest.raises(ServerError, match="say what to do") as caught:
        link(lambda _: problem(status, "some-kind", "say what to do"), time).ask("GET", "/x", Wait, "asking")
    assert (caught.value.status, caught.value.kind, time.slept) == (status, "some-kind", [])


def test_a_login_page_or_a_redirect_is_told_from_a_coordinator() -> None:
    with pytest.raises(UnreachableError, match="not a coordinator's"):
        link(lambda _: httpx.Response(200, text="<html>log in"), _Time(), 1.0).ask("GET", "/x", Wait, "asking")
    with pytest.raises(ServerError, match="is it a maskfleet coordinator"):
        link(lambda _: httpx.Response(404, text="<html>"), _Time()).ask("GET", "/x", Wait, "asking")
    moved = httpx.Response(301, headers={"Location": "https://other.example"})
    with pytest.raises(ServerError, match=r"https://other\.example"):
        link(lambda _: moved, _Time()).ask("GET", "/x", Wait, "asking")


@pytest.mark.parametrize("url", ["ftp://x", "fleet.example.org", "", "http://"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address"):
        Transport(url)


# --- bytes


def test_a_download_that_is_damaged_once_is_fetched_again_and_damaged_for_good_is_an_error() -> None:
    good, bad = b"x" * 1000, b"x" * 999 + b"y"
    answers = [bad, good]
    time = _Time()
    one = link(lambda _: httpx.Response(200, content=answers.pop(0)), time)
    assert one.fetch("/p", digest(good), len(good), "fetching") == good
    with pytest.raises(PayloadError, match="SHA-256"):
        link(lambda _: httpx.Response(200, content=bad), time).fetch("/p", digest(good), len(good), "fetching")


def test_a_download_longer_than_announced_is_not_read_to_its_end() -> None:
    given = Counter[str]()

    def endless() -> Iterator[bytes]:
        while True:
            given["chunks"] += 1
            yield bytes(1000)

    transport = link(lambda _: httpx.Response(200, content=endless()), _Time())
    with pytest.raises(PayloadError):
        transport.fetch("/p", digest(b""), 2500, "fetching")
    assert given["chunks"] == 9  # three each time


def test_a_bundle_part_resumes_where_the_link_broke(tmp_path: Path) -> None:
    ranges: list[str | None] = []

    def broken(content: bytes) -> Iterator[bytes]:
        yield content[:3000]
        raise httpx.ReadError("link lost")

    def handler(request: httpx.Request) -> httpx.Response:
        asked = request.headers.get("Range")
        ranges.append(asked)
        start = int(asked[6:-1]) if asked else 0
        rest = PART[start:]
        return httpx.Response(206 if asked else 200, content=rest if len(rest) <= 4240 else broken(rest))

    part = Part(sha256=digest(PART), size=len(PART))
    link(handler, _Time()).fetch_file("/p", part, tmp_path / "train.onnx", "fetching")
    assert (tmp_path / "train.onnx").read_bytes() == PART
    assert ranges == [None, "bytes=3000-", "bytes=6000-"]
    assert [p.name for p in tmp_path.iterdir()] == ["train.onnx"]


def test_a_part_with_a_path_in_its_name_is_refused(tmp_path: Path) -> None:
    evil = manifest().model_copy(update={"parts": {"../evil": Part(sha256=digest(b""), size=0)}}).to_bytes()
    with pytest.raises(BundleError, match=r"parts\.\.\./evil"):
        open_remote(link(lambda _: httpx.Response(200, content=evil), _Time()), digest(evil), tmp_path)


def test_only_the_parts_that_the_backend_asks_for_are_fetched_and_only_once(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run(rounds=1)
    device(tmp_path, coordinator).run(rounds=1)
    fetched = [path for _, path in coordinator.requests if "/bundles/" in path]
    assert len(fetched) == 2  # the manifest and train.onnx
    cached = tmp_path / "bundles" / coordinator.bundle / "train.onnx"
    cached.write_bytes(PART[:-1] + b"?")  # decayed on disk
    device(tmp_path, coordinator).run(rounds=1)
    assert cached.read_bytes() == PART
    assert (cached.parent / MANIFEST).read_bytes() == coordinator.manifest.to_bytes()


# --- bad input


def test_a_wrong_token_a_wrong_method_and_wrong_data_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="ask the operator") as refused:
        device(tmp_path / "a", Coordinator(), token="bad").run()
    assert exit_code(refused.value) == ExitCode.REFUSED
    d = samples()
    bad = DeviceData(d.x, d.y + 1, d.x_test, d.y_test)
    with pytest.raises(MaskfleetError, match=r"label 2 .* outside 0\.\.1") as wrong:
        device(tmp_path / "b", Coordinator(), data=bad).run()
    assert exit_code(wrong.value) == ExitCode.DATA


def _arrays(**changed: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    """A device's file, some of its arrays changed or left out."""
    x, y = np.zeros((4, 3), np.float32), np.arange(4) % 2
    return {k: v for k, v in {"x": x, "y": y, **changed}.items() if v is not None}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "there is no data file"),
        (_arrays(y=None), r"lacks \['y'\]"),
        (_arrays(y=np.zeros(3, np.int64)), r"samples of shape \(4, 3\) but labels of shape \(3,\)"),
        (_arrays(x=np.zeros((1, 3)), y=np.zeros(1, np.int64)), "holds 1 samples"),
        (_arrays(x_test=np.zeros((1, 3))), "has x_test but no y_test"),
        (_arrays(x_test=np.zeros((1, 3)), y_test=np.zeros(2, np.int64)), r"\(test\): .* give one label a sample"),
        (_arrays(group=np.zeros(5)), r"`group` has shape \(5,\)"),
    ],
)
def test_data_that_fits_no_model_is_refused_before_a_token_is_used_up(
    tmp_path: Path, arrays: dict[str, NDArray[Any]] | None, said: str
) -> None:
    coordinator, path = Coordinator(), tmp_path / "mine.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(DataError, match=said):
        device(tmp_path / "state", coordinator, data=path).run()
    assert coordinator.requests == []


def test_a_finished_device_needs_its_data_no_more(tmp_path: Path) -> None:
    coordinator = Coordinator()
    device(tmp_path, coordinator).run()
    assert device(tmp_path, coordinator, data=tmp_path / "gone.npz").run().ended == "finished"


@pytest.mark.parametrize("name", ["a b", "", "-pi", "pi/7", "x" * 65, "pi\n"])
def test_a_name_that_no_coordinator_takes_is_refused_before_anything_is_written_or_sent(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"is no name for a device; give one of 1 to 64 letters") as refused:
        device(tmp_path / "state", Coordinator(), device=name)
    assert repr(name) in str(refused.value)
    assert exit_code(refused.value) == ExitCode.CONFIG
    assert not (tmp_path / "state").exists()


def test_a_folder_with_the_name_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(json.dumps({"device": "a b", "credential": "0" * 64, "token": "0" * 64}))
    with pytest.raises(StateError, match=r"device = 'a b'.* and join again"):
        device(tmp_path, Coordinator(), device="ab").run()


def test_a_backend_that_is_not_installed_is_refused_before_a_token_is_used_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no training backend 'abacus'; choose one of .*'onnxruntime'") as refused:
        device(tmp_path, Coordinator(), backend="abacus")
    assert exit_code(refused.value) == ExitCode.CONFIG


def test_a_device_whose_backend_cannot_run_the_model_never_asks_for_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> F32:
        raise RuntimeError("Fail: no node")

    asked: list[tuple[str, str]] = []
    with pytest.raises(ConfigError, match=r"backend 'torch' needs \['model\.pt2'\] of bundle 'tiny'") as refused:
        device(tmp_path / "part", first := Coordinator(), backend="torch").run()
    assert exit_code(refused.value) == ExitCode.CONFIG
    asked += first.requests
    for half in ("gradient", "logits"):
        with monkeypatch.context() as m:
            m.setattr(Softmax, half, broken)
            with pytest.raises(BundleError, match=r"cannot run model 'tiny' \(RuntimeError: Fail: no node\)"):
                device(tmp_path / half, second := Coordinator()).run()
            asked += second.requests
    assert ("POST", "/v1/enrol") in asked
    assert not [path for _, path in asked if path.endswith("/work")]


def test_a_setting_of_another_version_ends_the_run_with_what_to_install(tmp_path: Path) -> None:
    coordinator = Coordinator()
    method = {**METHODS["fedavg"], "warmup": 3}
    enrolled = Enrolled(federation="f1", device="dev", bundle=coordinator.bundle, rounds=1, seed=7, method=method)

    def newer(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v1/enrol":
            coordinator.credential = json.loads(request.content)["credential"]
            return httpx.Response(200, content=enrolled.model_dump_json())
        return None

    coordinator.fault = newer
    with pytest.raises(ConfigError, match=r"'fedavg', setting warmup = 3: .* that its coordinator has: install"):
        device(tmp_path, coordinator).run()


def test_an_update_that_the_coordinator_calls_invalid_ends_the_run_and_is_not_sent_for_ever(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.fault = lambda r: (
        problem(422, "bad-payload", "array 'parameters' holds NaN") if "/rounds/" in r.url.path else None
    )
    with pytest.raises(ServerError, match="NaN"):
        device(tmp_path, coordinator).run()
    assert not list(tmp_path.glob("pending-*"))


def test_a_training_that_diverges_is_a_sentence_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = Gradient(1e9, np.zeros(8, np.float32), np.zeros(0, np.float32))
    monkeypatch.setattr(Softmax, "gradient", lambda *_: huge)
    coordinator = Coordinator()
    with pytest.raises(ConfigError, match=r"loss = 1000000000\.0: .* lower the learning rate"):
        device(tmp_path, coordinator).run()
    assert not coordinator.updates


def test_a_damaged_upload_is_sent_again(tmp_path: Path) -> None:
    coordinator, damaged = Coordinator(), [True]

    def flip(request: httpx.Request) -> httpx.Response | None:
        if "/rounds/" in request.url.path and damaged:
            damaged.clear()
            return problem(422, "bad-digest", "the body does not match its Content-Digest")
        return None

    coordinator.fault = flip
    assert device(tmp_path, coordinator).run().rounds == 3


# --- journal


def test_two_clients_on_one_state_folder_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(StateError, match="another maskfleet client"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_the_device_name_and_credential_are_made_once_and_are_private(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        first = journal.identity("token", None)
    with Journal(tmp_path) as journal:
        assert journal.identity("token", None) == first
    assert "token" not in (tmp_path / "device.json").read_text().replace('"token"', "")
    assert (tmp_path / "device.json").stat().st_mode & 0o077 == 0
    Enrolled(federation="f", device=first.device, bundle="0" * 64, method={}, rounds=1, seed=0)


def test_a_state_folder_of_another_enrolment_is_refused_with_its_name(tmp_path: Path) -> None:
    enrolled = Enrolled(federation="f1", device="dev", bundle="0" * 64, method={}, rounds=1, seed=0)
    with Journal(tmp_path) as journal:
        mine = journal.identity("token", "dev")
        # Before it has enrolled, a device may still change its mind.
        assert journal.identity("newer", "dev2").credential == mine.credential
        journal.store_identity(journal.identity("token", "dev").model_copy(update={"enrolled": enrolled}))
        with pytest.raises(ConfigError, match="'f1'"):
            journal.identity("other", None)
        with pytest.raises(ConfigError, match="'dev'"):
            journal.identity("token", "dev3")


@given(cut=st.integers(0, 400), flip=st.integers(0, 399), byte=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_decayed_pending_update_is_trained_again_never_sent(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, byte: int
) -> None:
    with Journal(tmp_path_factory.mktemp("state")) as journal:
        update = Pending(1, "lease", "0" * 64, bytes(200))
        journal.trained({"a": np.ones(3, np.float32)}, update)
        assert journal.pending() == update
        path = journal.folder / "pending-0000001"
        data = bytearray(path.read_bytes())
        data[flip % len(data)] ^= byte
        path.write_bytes(bytes(data))
        found = journal.pending()
        assert found is None or found.update == update.update
        path.write_bytes(bytes(data)[: cut % len(data)])
        assert journal.pending() is None


def test_what_is_kept_counts_only_once_its_update_is_acknowledged(tmp_path: Path) -> None:
    def update(round_: int) -> Pending:
        return Pending(round_, "lease", "0" * 64, b"update")

    with Journal(tmp_path) as journal:
        journal.trained({"a": np.array([1])}, update(1))
        assert journal.kept(before=2) == {}
        journal.acknowledge(1)
        assert journal.kept(before=2)["a"].tolist() == [1]
        journal.trained({"a": np.array([2])}, update(2))
        journal.drop_pending()
        journal.trained({"a": np.array([3])}, update(3))
        journal.acknowledge(3)
        assert journal.kept(before=3)["a"].tolist() == [1]
        assert journal.kept(before=9)["a"].tolist() == [3]
        assert journal.pending() is None


def test_the_file_of_a_round_that_nobody_needs_is_written_over_and_never_taken_for_a_new_one(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for r in range(1, 6):  # each shorter than the one before
            update = bytes([r]) * (100 - r)
            journal.trained({"a": np.array([r])}, Pending(r, "lease", "0" * 64, update))
            found = journal.pending()
            assert found is not None
            assert (found.round, found.update) == (r, update)
            journal.acknowledge(r)
        assert journal.kept(before=5)["a"].tolist() == [4]
        names = ["kept-0000004", "kept-0000005", "lock", "spare"]
        assert sorted(p.name for p in tmp_path.iterdir()) == names
        (tmp_path / "spare").rename(tmp_path / "pending-0000006")  # the power went before a byte was written over
        assert journal.pending() is None


def test_a_file_written_over_up_to_any_byte_is_never_taken_for_the_new_round(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        images = {}
        for r in (1, 4):  # headers and bodies of one size, so that every offset mixes two rounds' fields
            journal.trained({"a": np.array([r])}, Pending(r, "lease", "0" * 64, bytes([r]) * 50))
            images[r] = (tmp_path / f"pending-{r:07d}").read_bytes()
        pending = tmp_path / "pending-0000004"
        assert len(images[1]) == len(images[4])
        for cut in range(len(images[4])):
            torn = images[4][:cut] + images[1][cut:]
            pending.write_bytes(torn)
            assert torn == images[4] or journal.pending() is None, cut
        journal.trained({"a": np.array([4])}, Pending(4, "lease", "0" * 64, b"four"))
        (tmp_path / "pending-0000005").write_bytes(images[4])  # the next round's torn file hides no whole one
        found = journal.pending()
        assert found is not None
        assert (found.round, found.update) == (4, b"four")


def test_a_damaged_file_of_what_was_kept_is_passed_over_like_one_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Journal(tmp_path) as journal:
        for r in (1, 2):
            journal.trained({"a": np.array([r])}, Pending(r, "lease", "0" * 64, b"update"))
            journal.acknowledge(r)
        (tmp_path / "kept-\u00b2").touch()  # a digit to Python, no number of a round
        assert journal.kept(before=3)["a"].tolist() == [2]
        for r in (2, 1):
            path = tmp_path / f"kept-{r:07d}"
            whole = path.read_bytes()
            path.write_bytes(whole.replace(b"\x02" if r == 2 else b"\x01", b"\x07"))
            if r == 2:
                assert journal.kept(before=3)["a"].tolist() == [1]
                assert "kept-0000002 is damaged" in caplog.text
        with pytest.raises(StateError, match="nothing kept"):
            journal.kept(before=3)


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path) as journal:
        journal.trained({"a": np.array([1])}, Pending(1, "lease", "0" * 64, b"small"))
        journal.acknowledge(1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            with pytest.raises(StateError, match="free some space") as full:
                journal.trained({}, Pending(2, "lease", "0" * 64, bytes(100_000)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert exit_code(full.value) == ExitCode.STATE
        pending = journal.pending()
        assert pending is None  # trained again: from the same values to the same bytes
        assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == ["kept-0000001"]
        assert journal.kept(before=2)["a"].tolist() == [1]


def test_a_full_disk_while_a_model_downloads_is_a_sentence(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    part = Part(sha256=digest(PART), size=len(PART))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(StateError, match="free some space"):
            link(lambda _: httpx.Response(200, content=PART), _Time()).fetch_file("/p", part, tmp_path / "p", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_page_of_exit_codes_lists_exactly_the_codes_there_are() -> None:
    page = (Path(__file__).parent.parent / "docs" / "exit-codes.md").read_text()
    rows = {
        int(line.split("|")[1]): line.split("|")[2].strip()
        for line in page.splitlines()
        if line[:3].strip("| ").isdigit()
    }
    assert rows == {int(code): text for code, text in MEANING.items()}


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (httpx.Response(200, content=b" " * (1 << 20)), "longer than 262144 bytes"),
        (httpx.Response(500, content=b"x" * (1 << 20)), "longer than 262144 bytes"),
        (httpx.Response(404, content=b"[" * 200_000), "no explanation"),
        (httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=gzip.compress(b"{}")), "compressed"),
    ],
)
def test_an_answer_that_is_no_message_is_not_read_to_its_end(answer: httpx.Response, word: str) -> None:
    with pytest.raises((UnreachableError, ServerError), match=word):
        link(lambda _: answer, _Time()).ask("GET", "/x", Receipt, "asking")
