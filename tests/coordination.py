"""Helpers of the coordinator's tests: a small bundle, updates made by hand, an operator and a device over httpx."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import databases
import httpx
import numpy as np

from coord_server.app import create_app
from coord_server.coordinator import Coordinator
from coord_server.problems import PROBLEMS
from coord_server.store import Store, open_store
from coord_server.store.values import INLINE
from edge_client.bundle import MANIFEST, Init, Input, Layer, Manifest, Part, Tensor, digest
from edge_client.protocol.messages import Problem
from edge_client.protocol.metrics import METRICS
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.targets import Classification

LIMIT = 600.0  # seconds that a condition may take to come true on the slowest and busiest machine
OPERATOR = "o" * 64
D = 12  # parameters of the small bundle
LARGE = 2 * (INLINE // 8 + 100)  # parameters whose values are files, not rows of the database


def manifest(d: int = D) -> Manifest:
    """A seeded model of one linear layer with `d` weights, and one part that nothing reads."""
    weight = Tensor(name="w", shape=(d // 2, 2), offset=0, init=Init(kind="uniform", scale=1.0))
    content = b"graph"
    return Manifest(
        name="small",
        input=Input(shape=(2,)),
        target=Classification(classes=2),
        parameters=(weight,),
        layers=(Layer(name="w", kind="linear", weights=("w",)),),
        seed=3,
        parts={"train.onnx": Part(sha256=digest(content), size=len(content))},
    )


def write_bundle(folder: Path, d: int = D) -> Path:
    """The small bundle as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(manifest(d).to_bytes())
    (folder / "train.onnx").write_bytes(b"graph")
    return folder


def settings(**more: Any) -> dict[str, Any]:
    """A federation's settings, FedAvg over two devices."""
    base = {"name": "fed", "bundle": digest(manifest().to_bytes()), "method": {"name": "fedavg"}, "rounds": 2,
            "cohort": 2, "min_devices": 2, "seed": 7}  # fmt: skip
    return {**base, **more}


def update(values: np.ndarray[Any, Any], samples: int = 10, **more: Any) -> bytes:
    """An update of FedAvg; `more` are metrics."""
    arrays = {"parameters": values.astype(np.float32), "buffers": np.zeros(0, np.float32)}
    return encode(Payload(arrays, said(samples, **more)))


def said(samples: int = 10, **more: Any) -> dict[str, Any]:
    """The metadata of an update's metrics, right or wrong."""
    metrics = {"samples": samples, "loss": 0.5, "score_before": 0.25, "score_after": 0.75, "test_samples": 4}
    return {METRICS: list({**metrics, **more}.values())}


def trained(down: bytes, device: str) -> bytes:
    """What a device sends that moves every parameter by an amount of its own."""
    content = decode(down)
    start = content.arrays["parameters"]
    moved = start + np.float32(0.1) * len(device) + np.arange(len(start), dtype=np.float32)
    return update(moved, len(device))


def content_digest(data: bytes) -> str:
    """The header of RFC 9530."""
    return f"sha-256=:{b64encode(sha256(data).digest()).decode()}:"


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {token}"}


def credential(device: str) -> str:
    """A device's credential, the same each time."""
    return sha256(device.encode()).hexdigest()


class Fleet:
    """Requests of an operator and of devices to one coordinator, each returning the response."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.join = ""

    async def operator(
        self, method: str, path: str, more: dict[str, str] | None = None, **given: Any
    ) -> httpx.Response:
        """The operator's request; `more` are headers."""
        return await self.http.request(method, path, headers={**bearer(OPERATOR), **(more or {})}, **given)

    async def bundle(self, d: int = D) -> str:
        content = manifest(d).to_bytes()
        await self.operator("POST", "/v1/bundles", content=content)
        await self.operator("PUT", f"/v1/bundles/{digest(content)}/parts/train.onnx", content=b"graph")
        return digest(content)

    async def federation(self, *devices: str, d: int = D, **more: Any) -> None:
        """A federation "fed" of the small bundle with these devices, all of them ready for work."""
        config = settings(bundle=await self.bundle(d), **more)
        created = await self.operator("POST", "/v1/federations", json=config)
        assert created.status_code == 201, created.text
        self.join = (await self.operator("POST", "/v1/federations/fed/tokens", json={})).json()["token"]
        for device in devices:
            assert (await self.enrol(device)).status_code == 200
            await self.work(device)

    async def enrol(self, device: str, secret: str | None = None) -> httpx.Response:
        body = {"token": self.join, "device": device, "credential": secret or credential(device)}
        return await self.http.post("/v1/enrol", json=body)

    async def work(self, device: str, wait: float = 0.0) -> dict[str, Any]:
        path = f"/v1/federations/fed/work?wait={wait}"
        answer = await self.http.get(path, headers=bearer(credential(device)), timeout=2 * LIMIT)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def fetch(self, device: str, work: dict[str, Any]) -> bytes:
        path = f"/v1/federations/fed/payloads/{work['downlink']}"
        answer = await self.http.get(path, headers=bearer(credential(device)))
        assert answer.status_code == 200, answer.text
        assert digest(answer.content) == work["downlink"]
        return answer.content

    async def upload(
        self,
        device: str,
        round_: int,
        lease: str,
        body: Any,
        headers: dict[str, str] | None = None,
        wait: float | None = None,
    ) -> httpx.Response:
        path = f"/v1/federations/fed/rounds/{round_}/updates/{device}{'' if wait is None else f'?wait={wait:.3f}'}"
        shown = {"Maskfleet-Lease": lease, **bearer(credential(device))}
        if isinstance(body, bytes):
            shown["Content-Digest"] = content_digest(body)
        return await self.http.put(path, content=body, headers={**shown, **(headers or {})})

    async def fail(self, device: str, work: dict[str, Any], kind: str, reason: str = "odd") -> httpx.Response:
        """Report that `device` cannot do its round."""
        path = f"/v1/federations/fed/rounds/{work['round']}/failures/{device}"
        shown = {"Maskfleet-Lease": str(work.get("lease", "")), **bearer(credential(device))}
        return await self.http.put(path, json={"kind": kind, "reason": reason}, headers=shown)

    async def due(self, device: str) -> dict[str, Any]:
        """What a device has to do, once there is something: an answer is not held back for as long as LIMIT."""
        end = time.monotonic() + LIMIT
        while (work := await self.work(device, LIMIT))["status"] == "wait":
            assert time.monotonic() < end, work
        return work

    async def train(self, device: str) -> httpx.Response:
        """One whole turn of a device that has work, or soon will have."""
        work = await self.due(device)
        assert work["status"] == "train", work
        return await self.upload(device, work["round"], work["lease"], trained(await self.fetch(device, work), device))


def open_folder(folder: Path) -> Store:
    """The store of a test's folder, which may be new or empty."""
    return open_store(folder, databases.url_of(folder), init=folder.is_dir() and not any(folder.iterdir()))


@asynccontextmanager
async def served(folder: Path, clock: Callable[[], float] = time.time, patience: float = 60.0) -> AsyncIterator[Fleet]:
    """A coordinator on `folder`, called without a socket; the same folder again is a restart."""
    store = open_folder(folder)
    coordinator = Coordinator(store, OPERATOR, clock)
    await coordinator.start()
    transport = httpx.ASGITransport(create_app(coordinator, body_patience=patience), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
        yield Fleet(http)
    await coordinator.close()
    store.close()


def play(folder: Path, script: Callable[[Fleet], Awaitable[Any]]) -> Any:
    """Run `script` against a coordinator on `folder`."""

    async def main() -> Any:
        async with served(folder) as fleet:
            return await script(fleet)

    return asyncio.run(main())


def refused(answer: httpx.Response, kind: str) -> str:
    """The sentence of a problem of this kind."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem, status = Problem.model_validate_json(answer.content), PROBLEMS[kind].status
    assert (problem.type, problem.status, answer.status_code) == (f"/problems/{kind}", status, status)
    assert "Traceback" not in answer.text
    return problem.detail


async def until(fleet: Fleet, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The federation once `done` holds of it."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found: dict[str, Any] = (await fleet.operator("GET", "/v1/federations/fed")).json()
        if done(found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


async def whole(fleet: Fleet, *devices: str, rounds: int = 2) -> bytes:
    """Train the rounds that are left with these devices; the final state."""
    for _ in range(rounds):
        for device in devices:
            assert (await fleet.train(device)).status_code == 201
    assert (await fleet.due(devices[0]))["status"] == "finish"
    return (await fleet.operator("GET", "/v1/federations/fed/state")).content


def unfinished(folder: Path) -> list[Path]:
    """Files of bodies that were not stored."""
    return [p for p in (folder / "blobs" / "incoming").iterdir() if p.is_file() and p.stat().st_size]


def flipped(data: bytes) -> bytes:
    """The same with one bit changed."""
    return data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]


async def pages(fleet: Fleet, path: str, limit: int) -> list[list[Any]]:
    """Every page of a list, by its links."""
    found, url = [], f"{path}{'&' if '?' in path else '?'}limit={limit}"
    while url:
        answer = await fleet.operator("GET", url)
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        following = answer.links.get("next", {}).get("url")
        before, url = url, "" if following is None else str(answer.url.join(following))
        assert url != before, "this page is the next one"
    return found
