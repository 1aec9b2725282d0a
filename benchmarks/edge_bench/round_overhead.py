"""What a round costs besides training: maskfleet against a bare FastAPI + httpx loop that moves the same bytes.

    python -m edge_bench.round_overhead --json benchmarks/results/round_overhead.json

d = 1e6 parameters, 2 devices over loopback, float32 (4 MB each way) and 1-bit masks (125 kB). Server and devices are
processes of their own everywhere. maskfleet runs its real coordinator and client with a method that sends back what it
gets (`idle_plugin`): credentials, leases, digests, checks, journals on both sides, aggregation, a round that opens when
the one before it is folded. Beside it, three loops of FastAPI and httpx that move the same bytes, a GET and a PUT for
each device and round:

plain    the bare loop as it is written first: `httpx.get` and `httpx.put`, which open a connection for each call. The
         server keeps the last body in memory; nobody waits for anybody, nothing is asked, checked, folded or kept.
bare     the same with one kept connection a device: the least that FastAPI and httpx can do. A loop without rounds.
durable  bare with the two things that no federation can do without: each side writes an update to a file and syncs
         it (one sync; not the file's name), and the next payload is answered when both updates are in.

All take turns, so that a busy machine meets all. A round lasts from the later of the two devices' receipts to the later
of their next ones. Bytes are counted at the sockets by a TCP relay in a run of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from edge_bench import provenance
from edge_client.bundle import Init, Input, Layer, Manifest, Tensor
from edge_client.client import Client
from edge_client.data import DeviceData
from edge_client.errors import ConfigError
from edge_client.events import Event
from edge_client.targets import Classification

OPERATOR = "operator-of-the-round-overhead-benchmark"
PATIENCE = 60.0  # seconds until a process that should be up is given up
KINDS = {"float32": 4, "mask": 1 / 8}  # bytes a parameter


# --- processes


def free_port() -> int:
    """A port the operating system has just given and taken back."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def install_plugin(folder: Path) -> None:
    """Entry points of `idle_plugin` in a folder for PYTHONPATH, as an installed third party has them."""
    info = folder / "maskfleet_idle-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maskfleet-idle\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[maskfleet.methods]\nidle = edge_bench.idle_plugin:Idle\n"
        "[maskfleet.trainers]\nidle = edge_bench.idle_plugin:IdleTrainer\n"
    )


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that sees the plugin; killed at the end."""
    path = os.pathsep.join(p for p in (str(folder / "plugin"), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASKFLEET_OPERATOR_TOKEN": OPERATOR}
    running = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def wait_until_up(url: str) -> None:
    """Wait until a server answers anything at all. Raises ConfigError."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise ConfigError(f"no server at {url} after {PATIENCE:.0f} s")


# --- maskfleet


def manifest(d: int) -> Manifest:
    """One linear layer of `d` weights and no graph: nothing here trains."""
    row = Tensor(name="w", shape=(2, d // 2), offset=0, init=Init(kind="constant", scale=0.0))
    layer = Layer(name="w", kind="linear", weights=("w",))
    return Manifest(name="idle", input=Input(shape=(1,)), target=Classification(classes=2), parameters=(row,), layers=(layer,), seed=0)


@contextmanager
def federation(folder: Path, kind: str, d: int, rounds: int) -> Iterator[tuple[str, str]]:
    """A coordinator process with one federation of two devices: its address and a join token."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    place = ["--port", str(port), "--data", str(folder / f"coordinator-{port}"), "--log-level", "warning"]
    with process(folder, "-m", "edge_client.cli", "serve", *place):
        wait_until_up(f"{url}/v1/health")
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {OPERATOR}"}, trust_env=False, timeout=PATIENCE
        ) as operator:
            bundle = operator.post("/v1/bundles", content=manifest(d).to_bytes()).raise_for_status().json()["digest"]
            config = {
                "name": kind,
                "bundle": bundle,
                "method": {"name": "idle", "kind": kind},
                "rounds": rounds + 1,  # the devices leave before the end: there is no model to finish
                "cohort": 2,
                "min_devices": 2,
                "min_updates": 2,
                "backend": "idle",
            }
            operator.post("/v1/federations", json=config).raise_for_status()
            answer = operator.post(f"/v1/federations/{kind}/tokens", json={}).raise_for_status()
            yield url, answer.json()["token"]


def device(url: str, token: str, name: str, folder: str, rounds: int) -> None:
    """One maskfleet device; prints when each of its updates was acknowledged."""
    x, y = np.zeros((2, 1), np.float32), np.zeros(2, np.int64)
    times: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "sent":
            times.append(time.monotonic())

    Client(url, token, DeviceData(x, y, x, y), device=name, state=Path(folder) / name).run(rounds, on_event=note)
    print(json.dumps(times))


def times_of(running: list[subprocess.Popen[str]]) -> list[list[float]]:
    """What both devices printed. Raises ConfigError when one failed."""
    said = [p.communicate(timeout=600)[0] for p in running]
    if any(p.returncode for p in running):
        raise ConfigError(f"a device ended with code {[p.returncode for p in running]}; see what it printed")
    return [json.loads(text) for text in said]


def seconds_per_round(times: list[list[float]], skip: int) -> list[float]:
    """Duration of each round after the first `skip`: from the round before it being over to it being over."""
    over = [max(pair) for pair in zip(*times, strict=True)]
    return [b - a for a, b in zip(over[skip:], over[skip + 1 :], strict=False)]


def run_maskfleet(folder: Path, kind: str, d: int, rounds: int) -> list[float]:
    """Seconds of each round of a federation over HTTP."""
    with federation(folder, kind, d, rounds) as (url, token):
        state = tempfile.mkdtemp(dir=folder)
        me = ["-m", "edge_bench.round_overhead", "--as", "device", url, token]
        with process(folder, *me, "a", state, str(rounds)) as a, process(folder, *me, "b", state, str(rounds)) as b:
            return seconds_per_round(times_of([a, b]), skip=1)


# --- the yardstick


def store(folder: str, name: str, body: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with (Path(folder) / name).open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def bare_server(port: int, size: int, folder: str) -> None:
    """GET a payload, PUT a body: FastAPI on uvicorn and nothing else; in `folder` unless that is empty."""
    app = FastAPI()
    payload = np.random.default_rng(0).bytes(size)
    last: dict[str, bytes] = {}
    puts: dict[str, int] = {}
    over = asyncio.Condition()

    @app.get("/payload/{round_}")
    async def get(round_: int) -> Response:
        if folder:  # round r begins when both devices have sent round r - 1
            async with over:
                await over.wait_for(lambda: round_ == 0 or min(puts.get(d, 0) for d in "ab") >= round_)
        return Response(payload, media_type="application/octet-stream")

    @app.put("/update/{device}")
    async def put(device: str, request: Request) -> dict[str, int]:
        last[device] = await request.body()
        if folder:
            await asyncio.to_thread(store, folder, f"server-{device}", last[device])
            async with over:
                puts[device] = puts.get(device, 0) + 1
                over.notify_all()
        return {"size": len(last[device])}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def bare_device(url: str, name: str, rounds: int, folder: str) -> None:
    """GET and PUT the same bytes, `rounds` times; prints when each PUT was answered."""
    times: list[float] = []
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:
        for round_ in range(rounds):
            body = http.get(f"/payload/{round_}").content
            if folder:
                store(folder, f"device-{name}", body)
            http.put(f"/update/{name}", content=body).raise_for_status()
            times.append(time.monotonic())
    print(json.dumps(times))


def plain_device(url: str, name: str, rounds: int) -> None:
    """The bare loop with httpx's module functions: each call opens a connection of its own."""
    times: list[float] = []
    for round_ in range(rounds):
        body = httpx.get(f"{url}/payload/{round_}", timeout=PATIENCE).content
        httpx.put(f"{url}/update/{name}", content=body, timeout=PATIENCE).raise_for_status()
        times.append(time.monotonic())
    print(json.dumps(times))


def run_plain(folder: Path, size: int, rounds: int) -> list[float]:
    """Seconds of each round of the bare loop without kept connections."""
    port = free_port()
    url, me = f"http://127.0.0.1:{port}", ["-m", "edge_bench.round_overhead", "--as"]
    with process(folder, *me, "bare-server", str(port), str(size), ""):
        wait_until_up(url)
        one = [*me, "plain-device", url]
        with process(folder, *one, "a", str(rounds)) as a, process(folder, *one, "b", str(rounds)) as b:
            return seconds_per_round(times_of([a, b]), skip=1)


def run_bare(folder: Path, size: int, rounds: int, durable: bool) -> list[float]:
    """Seconds of each round of the bare loop."""
    port, disk = free_port(), tempfile.mkdtemp(dir=folder) if durable else ""
    url, me = f"http://127.0.0.1:{port}", ["-m", "edge_bench.round_overhead", "--as"]
    with process(folder, *me, "bare-server", str(port), str(size), disk):
        wait_until_up(url)
        one = [*me, "bare-device", url]
        with process(folder, *one, "a", str(rounds), disk) as a, process(folder, *one, "b", str(rounds), disk) as b:
            return seconds_per_round(times_of([a, b]), skip=1)


# --- bytes


class Relay:
    """A TCP relay that counts every byte a device's sockets carry, both directions, headers and all."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._port))
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    self.bytes += len(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()


def count_bytes(folder: Path, kind: str, d: int, rounds: int) -> dict[str, float]:
    """Bytes on the wire of one device over a whole run, enrolment and manifest included, against its payloads."""
    with federation(folder, kind, d, rounds) as (url, token):
        relay = Relay(int(url.rpartition(":")[2]))
        state = tempfile.mkdtemp(dir=folder)
        me = ["-m", "edge_bench.round_overhead", "--as", "device"]
        through = f"http://127.0.0.1:{relay.port}"
        one, two = [through, token, "a", state, str(rounds)], [url, token, "b", state, str(rounds)]
        with process(folder, *me, *one) as a, process(folder, *me, *two) as b:
            times_of([a, b])
        relay.close()
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        done = httpx.get(f"{url}/v1/federations/{kind}/rounds", headers=headers, trust_env=False).json()
    # A round's traffic is of both devices, whose payloads have the same size.
    payloads = sum(sum(r["traffic"]["up"].values()) + sum(r["traffic"]["down"].values()) for r in done) / 2
    return {"wire_bytes_per_round": relay.bytes / rounds, "payload_bytes_per_round": payloads / len(done)}


# --- all of it


def measure(d: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Both kinds: medians of seconds per round over all repeats, their ratio, and bytes."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install_plugin(folder / "plugin")
        for kind, width in KINDS.items():
            size, ours, bare, durable = int(d * width), list[float](), list[float](), list[float]()
            plain, ratios = list[float](), list[float]()
            for _ in range(repeats):
                here = run_maskfleet(folder, kind, d, rounds)
                there = run_bare(folder, size, rounds, durable=False)
                durable += run_bare(folder, size, rounds, durable=True)
                plain += run_plain(folder, size, rounds)
                ratios.append(statistics.median(here) / statistics.median(there))
                ours += here
                bare += there
            counted = count_bytes(folder, kind, d, rounds)
            result[kind] = {
                "seconds_per_round": statistics.median(ours),
                "bare_seconds_per_round": statistics.median(bare),
                "durable_seconds_per_round": statistics.median(durable),
                "plain_seconds_per_round": statistics.median(plain),
                "ratio": statistics.median(ours) / statistics.median(bare),
                "ratio_to_durable": statistics.median(ours) / statistics.median(durable),
                "ratio_to_plain": statistics.median(ours) / statistics.median(plain),
                "ratio_of_each_repeat": ratios,
                **counted,
                "wire_over_payload": counted["wire_bytes_per_round"] / counted["payload_bytes_per_round"],
            }
    return result


def main() -> None:
    """Parse the command line; `--as ROLE` is how the benchmark starts its own processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=1_000_000, help="d (default 1000000)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a run (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--as", dest="role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, *rest = arguments.role
        if role == "device":
            device(rest[0], rest[1], rest[2], rest[3], int(rest[4]))
        elif role == "bare-server":
            bare_server(int(rest[0]), int(rest[1]), rest[2])
        elif role == "plain-device":
            plain_device(rest[0], rest[1], int(rest[2]))
        elif role == "bare-device":
            bare_device(rest[0], rest[1], int(rest[2]), rest[3])
        return
    command = f"python -m edge_bench.round_overhead --parameters {arguments.parameters} --rounds {arguments.rounds}"
    origin = provenance.origin(f"{command} --repeats {arguments.repeats}")
    figures = measure(arguments.parameters, arguments.rounds, arguments.repeats)
    record = {**origin, "parameters": arguments.parameters, "devices": 2, "results": figures}
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
