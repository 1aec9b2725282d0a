"""What a round costs besides training: maskfleet against a bare durable loop of FastAPI and httpx.

    python -m edge_bench.overhead.round_overhead --json benchmarks/results/round_overhead_durable.json

d = 1e6 parameters over loopback, float32 (4 MB each way) and 1-bit masks (125 kB), rounds of 2, 10 and 50 devices. The
server is one process, the devices are threads of two others, and every device keeps its connection. maskfleet runs its
coordinator and its client with a method that sends back what it receives (`idle_plugin`): credentials, leases, digests,
checks, journals, aggregation.

The bare loop moves the same bytes with one GET and one PUT for each device and round, and loses nothing that was
acknowledged: the device writes its update to a file and syncs it, the server writes the update to a file, syncs it and
commits a row to SQLite (WAL, synchronous=FULL) before it answers. The payload of the next round is answered when all
updates of the round are in. It checks and folds nothing.

Both take turns. A round lasts from the latest of its devices' receipts to the latest of the next round's. The first
round is not counted. CPU and memory are the server process's: CPU seconds over the counted rounds, and peak memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
import uvicorn
from fastapi import FastAPI, Request, Response

from edge_bench import provenance
from edge_bench.command_line import check_writable, numbers_of, run_module, write_json
from edge_bench.federation.processes import READY, Process, Start, address, children, coordinator
from edge_bench.overhead.loopback import PATIENCE, Meter, create, plugin
from edge_client.data import DeviceData
from edge_client.device.client import Client
from edge_client.events import Event

KINDS = {"float32": 4, "mask": 1 / 8}  # bytes a parameter
TICK = 0.01  # seconds: the system's clock of a process's CPU time is no finer
WORKERS = 2  # processes that the devices are threads of
MODULE = "edge_bench.overhead.round_overhead"
Figures = dict[str, float]


# --- devices


def in_threads(names: list[str], run: Callable[[str, list[float]], None]) -> None:
    """Run one thread a device; print the times at which each device's updates were acknowledged."""
    times: dict[str, list[float]] = {name: [] for name in names}
    threads = [threading.Thread(target=run, args=item) for item in times.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(list(times.values())))


def devices(url: str, token: str, rounds: str, folder: str, names: str) -> None:
    """maskfleet's own clients."""
    x, y = np.zeros((2, 1), np.float32), np.zeros(2, np.int64)

    def run(name: str, times: list[float]) -> None:
        def note(event: Event) -> None:
            if event.kind == "sent":
                times.append(time.monotonic())

        data = DeviceData(x, y, x[:0], y[:0], x, y)
        Client(url, token, data, device=name, state=Path(folder) / name).run(int(rounds), on_event=note)

    in_threads(names.split(","), run)


def bare_devices(url: str, rounds: str, folder: str, names: str) -> None:
    """GET and PUT the same bytes."""

    def run(name: str, times: list[float]) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:
            for round_ in range(int(rounds)):
                body = http.get(f"/payload/{round_}").raise_for_status().content
                store(Path(folder) / name, body)
                http.put(f"/update/{round_}/{name}", content=body).raise_for_status()
                times.append(time.monotonic())

    in_threads(names.split(","), run)


# --- the bare server


def store(path: Path, body: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def bare_server(size: str, cohort: str, folder: str) -> None:
    """Serve until killed."""
    app = FastAPI()
    payload = np.random.default_rng(0).bytes(int(size))
    database = sqlite3.connect(Path(folder) / "updates.sqlite", check_same_thread=False, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE updates (round INTEGER, device TEXT, size INTEGER, PRIMARY KEY (round, device))")
    one_at_a_time = threading.Lock()
    received: dict[int, int] = {}
    over = asyncio.Condition()

    def keep(round_: int, device: str, body: bytes) -> None:
        store(Path(folder) / device, body)
        with one_at_a_time:
            database.execute("INSERT INTO updates VALUES (?, ?, ?)", (round_, device, len(body)))

    @app.get("/payload/{round_}")
    async def get(round_: int) -> Response:
        async with over:
            await over.wait_for(lambda: round_ == 0 or received.get(round_ - 1) == int(cohort))
        return Response(payload, media_type="application/octet-stream")

    @app.put("/update/{round_}/{device}")
    async def put(round_: int, device: str, request: Request) -> dict[str, int]:
        body = await request.body()
        await asyncio.to_thread(keep, round_, device, body)
        async with over:
            received[round_] = received.get(round_, 0) + 1
            over.notify_all()
        return {"size": len(body)}

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        print(f"{READY}http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run([listening])


ROLES: dict[str, Callable[..., None]] = {"devices": devices, "bare-devices": bare_devices, "bare-server": bare_server}
"""What a process of this benchmark does, with the arguments of its command line."""


# --- one run of either


def ran(start: Start, folder: Path, extra: Mapping[str, str], server: Process, cohort: int, *role: str) -> Figures:
    """Run `cohort` devices in `WORKERS` processes and measure: seconds and server CPU of a round, server memory."""
    names, workers = [f"d{i:02d}" for i in range(cohort)], []
    meter = Meter(server.popen.pid)
    for i in range(min(WORKERS, cohort)):
        arguments = ["--as", *role, str(folder), ",".join(names[i::WORKERS])]
        workers.append(start("devices", arguments, folder / f"devices-{i}.log", extra, MODULE))
    for worker in workers:
        worker.popen.wait()
        worker.check()
    meter.stop()
    times = [row for worker in workers for row in json.loads(worker.said().splitlines()[-1])]
    over = [max(round_) for round_ in zip(*times, strict=True)]
    durations = [b - a for a, b in pairwise(over)]
    cpu = max(meter.seconds(over[0], over[-1]), TICK) / len(durations)
    return {"seconds": statistics.median(durations), "cpu": cpu, "memory": meter.peak()}


def run_maskfleet(folder: Path, kind: str, d: int, cohort: int, rounds: int) -> Figures:
    """A federation; its devices leave one round before the end, so no model is written."""
    environment = plugin(folder)
    with children() as start:
        server, url, operator = coordinator(start, folder, environment)
        with operator:
            token = create(operator, folder, kind, d, cohort, rounds=rounds + 1, guard="none")
        return ran(start, folder, environment, server, cohort, "devices", url, token, str(rounds))


def run_bare(folder: Path, size: int, cohort: int, rounds: int) -> Figures:
    """The bare loop."""
    with children() as start:
        arguments = ["--as", "bare-server", str(size), str(cohort), str(folder)]
        server = start("the bare server", arguments, folder / "server.log", {}, MODULE)
        return ran(start, folder, {}, server, cohort, "bare-devices", address(server), str(rounds))


# --- all of it


def measure(d: int, cohorts: list[int], updates: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each kind and cohort: medians over the repeats, and maskfleet's over the bare loop's."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for kind, width in KINDS.items():
            for cohort in cohorts:
                rounds = max(4, updates // cohort) + 1
                ours, bare = [], []
                for _ in range(repeats):
                    fresh = [Path(tempfile.mkdtemp(dir=name)) for _ in range(2)]
                    ours.append(run_maskfleet(fresh[0], kind, d, cohort, rounds))
                    bare.append(run_bare(fresh[1], int(d * width), cohort, rounds))
                row: dict[str, Any] = {"kind": kind, "cohort": cohort, "rounds": rounds - 1}
                for figure in ours[0]:
                    mine, theirs = (statistics.median(run[figure] for run in runs) for runs in (ours, bare))
                    row[figure] = {"maskfleet": mine, "bare": theirs, "ratio": mine / theirs}
                rows.append(row)
                ratios = ", ".join(f"{figure} {row[figure]['ratio']:.2f}x" for figure in ours[0])
                print(f"{kind}, {cohort} devices: {row['seconds']['maskfleet']:.3f} s a round; {ratios}", flush=True)
    return rows


def main(
    parameters: Annotated[int, typer.Option(min=2, help="d of the model.")] = 1_000_000,
    cohorts: Annotated[str, typer.Option(help="Devices of a round, comma-separated.")] = "2,10,50",
    updates: Annotated[int, typer.Option(min=1, help="About so many updates a run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """What a round costs besides training: maskfleet against a bare durable loop of FastAPI and httpx."""
    check_writable(json_file)
    origin = provenance.origin()
    rows = measure(parameters, numbers_of(cohorts, "--cohorts", int), updates, repeats)
    units = {"seconds": "of a round, median", "cpu": "seconds of the server, a round", "memory": "peak bytes, server"}
    write_json(json_file, {**origin, "parameters": parameters, "units": units, "results": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:  # how the benchmark starts its own processes
        ROLES[sys.argv[2]](*sys.argv[3:])
    else:
        run_module(main)
