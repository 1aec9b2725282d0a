"""A coordinator of a few lines behind httpx.MockTransport, and a trainer in numpy: client tests without processes.

Importing `numpy_trainer` into a test file makes its tests use that trainer, sleep for no time, and write the personal
model without a graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import pytest
from edge_kernels import counter
from numpy_mlp import NumpyMlp, mlp

from edge_client.bundle import Bundle, Manifest, Part, digest
from edge_client.data import DeviceData
from edge_client.device.client import Client
from edge_client.events import Event
from edge_client.files import write_whole
from edge_client.link.remote import Remote
from edge_client.link.retry import Retry
from edge_client.link.transport import Transport, content_digest
from edge_client.methods import make_method
from edge_client.protocol.messages import Failure, Receipt, Report
from edge_client.protocol.metrics import split_metrics
from edge_client.protocol.payload import decode, encode
from edge_client.task import Assignment, Course, Personal, Task

URL = "http://127.0.0.1:1"
PART = bytes(range(256)) * 40
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "epochs": 1, "batch": 8, "lr": 0.1},
    "standalone": {"name": "standalone", "epochs": 1, "batch": 8, "lr": 0.1},
}


def manifest() -> Manifest:
    """Softmax regression, 3 inputs, 2 classes."""
    parts = {name: Part(sha256=digest(PART), size=len(PART)) for name in ("train.onnx", "eval.onnx")}
    return mlp(3, 2).model_copy(update={"name": "tiny", "parts": parts})


def trainer(bundle: Bundle) -> NumpyMlp:
    """One that needs the training graph to be there, not to run."""
    bundle.part("train.onnx")
    return NumpyMlp(bundle.manifest)


def samples() -> DeviceData:
    """40 samples to train on, 10 to test on, none for validation."""
    x = counter.uniform(counter.key("client test"), 150).reshape(50, 3).astype(np.float32) - 0.5
    y = (x[:, 0] > 0).astype(np.int64)
    return DeviceData(x[:40], y[:40], x[:0], y[:0], x[40:], y[40:])


@dataclass
class Coordinator:
    """One federation with one device, in memory. `fault` may answer a request in the coordinator's place."""

    method: str = "fedavg"
    rounds: int = 3
    fault: Callable[[httpx.Request], httpx.Response | None] = lambda _: None
    round: int = 1
    credential: str | None = None
    updates: dict[int, bytes] = field(default_factory=dict)
    failures: list[tuple[int, str | None, Failure]] = field(default_factory=list)
    """Round, lease and message of every failure that was reported."""
    report: bytes | None = None
    eager: bool = False
    """Whether a receipt brings the next work to an upload that waits for it."""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manifest = manifest()
        self.bundle = digest(self.manifest.to_bytes())
        self.made = make_method(METHODS[self.method])
        self.course = Course(Bundle(self.manifest, Path("/nowhere")).model(), 7, self.rounds, 1)
        self.state = self.made.start(self.course)
        self.record: Any = None

    def transport(self) -> httpx.MockTransport:
        """This coordinator as httpx's transport."""
        return httpx.MockTransport(self.handle)

    def downlink(self) -> bytes:
        """The payload of the round under way."""
        return encode(self.made.downlink(self.course, self.round, self.state, self.record))

    def handle(self, request: httpx.Request) -> httpx.Response:
        """The answer to one request."""
        path = request.url.path
        self.requests.append((request.method, path))
        answered = self.fault(request)
        if answered is not None:
            return answered
        if path == "/v1/enrol":
            return self.enrol(json.loads(request.content))
        if request.headers.get("Authorization") != f"Bearer {self.credential}":
            return problem(401, "unauthorized", "unknown credential")
        if path == f"/v1/bundles/{self.bundle}":
            return httpx.Response(200, content=self.manifest.to_bytes())
        if path == f"/v1/bundles/{self.bundle}/parts/train.onnx":
            return httpx.Response(200, content=PART)
        if path == "/v1/federations/f1/work":
            return httpx.Response(200, json=self.work())
        if path.startswith("/v1/federations/f1/payloads/"):
            return httpx.Response(200, content=self.downlink())
        if path.startswith("/v1/federations/f1/rounds/"):
            round_, kind = int(path.split("/")[5]), path.split("/")[6]
            return self.take(round_, request) if kind == "updates" else self.fail(round_, request)
        if path == "/v1/federations/f1/devices/dev/report":
            self.report = request.content
            return httpx.Response(204)
        return problem(404, "not-found", f"no such resource {path}")

    def enrol(self, ask: Mapping[str, str]) -> httpx.Response:
        if ask["token"] != "good":
            return problem(401, "unauthorized", "this join token is not valid; ask the operator for another")
        self.credential = ask["credential"]
        given = {"federation": "f1", "device": ask["device"], "bundle": self.bundle, "rounds": self.rounds}
        return httpx.Response(201, json={**given, "method": METHODS[self.method], "cohort": 1, "seed": 7})

    def work(self) -> dict[str, Any]:
        work = {"downlink": digest(self.downlink()), "downlink_size": len(self.downlink()), "round": self.round}
        if self.round > self.rounds:
            return {"status": "finish", **work}
        return {"status": "train", "lease": f"lease{self.round}", "place": 0, "deadline_in": 60.0, **work}

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
            a = Assignment(self.course, round_, "dev")
            update = self.made.read_update(a, self.state, self.record, split_metrics(decode(body))[0])
            total, self.record = self.made.fold(a, self.state, None, update, self.record)
            self.state, records = self.made.finish(self.course, round_, ["dev"], self.state, total)
            self.record = records.get("dev", self.record)
            self.round += 1
        receipt = Receipt(federation="f1", round=round_, device="dev", sha256=digest(body), size=len(body))
        said = receipt.model_dump(exclude_none=True)
        more = {"work": self.work()} if self.eager and "wait" in request.url.params else {}
        return httpx.Response(201, json={**said, **more})

    def fail(self, round_: int, request: httpx.Request) -> httpx.Response:
        failure = Failure.model_validate_json(request.content)
        self.failures.append((round_, request.headers.get("Maskfleet-Lease"), failure))
        return httpx.Response(204)


def problem(status: int, kind: str, detail: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """A coordinator's problem."""
    body = {"type": f"https://maskfleet.dev/problems/{kind}", "title": kind, "status": status, "detail": detail}
    return httpx.Response(status, json=body, headers=headers)


def conclude(
    bundle: Bundle,
    task: Task,
    personal: Personal,
    path: Path,
    threads: int,
    align: str = "none",
    facts: Mapping[str, str | int] = MappingProxyType({}),
) -> Report:
    """Stands for compaction and measurement: the graph of this model was never exported."""
    write_whole(path, personal.parameters.tobytes())
    return Report(
        score=task.score(personal), test_samples=len(task.data.y_test), parameters_dense=8, parameters_compact=8
    )


@pytest.fixture(autouse=True)
def numpy_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """See the module."""
    monkeypatch.setattr("edge_client.device.session.open_trainer", lambda backend, bundle, threads: trainer(bundle))
    monkeypatch.setattr("edge_client.link.retry.time.sleep", lambda _: None)
    monkeypatch.setattr("edge_client.link.remote_bundle.check_graph", lambda path, name, sample: None)
    monkeypatch.setattr("edge_client.device.conclude.conclude", conclude)


def device(folder: Path, coordinator: Coordinator, **options: Any) -> Client:
    """A client of `coordinator` with its state in `folder`."""
    options = {"device": "dev", "state": folder, "transport": coordinator.transport(), "patience": 5.0, **options}
    options.setdefault("meter", "none")
    return Client(URL, options.pop("token", "good"), options.pop("data", samples()), **options)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 0.01

    def clock(self) -> float:
        return self.now


def remote(
    handler: Callable[[httpx.Request], httpx.Response],
    time: Time | None = None,
    patience: float = 100.0,
    on_event: Callable[[Event], None] = lambda _: None,
) -> Remote:
    """A coordinator that answers every request by `handler`."""
    time = time or Time()
    retry = Retry(URL, patience, on_event, sleep=time.sleep, clock=time.clock)
    return Remote(Transport(URL, httpx.MockTransport(handler)), retry)
