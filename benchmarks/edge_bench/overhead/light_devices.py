"""Messages per second and the coordinator's CPU time per update, with few and with many enrolled devices.

    python -m edge_bench.overhead.light_devices --json benchmarks/results/light_devices.json

One coordinator, one federation, rounds of 50 devices, a model of 1,000 bits (`idle_plugin`). The devices are coroutines
of the benchmark's process. Each has its own address and one kept connection, and no journal. They enrol in steps while
the federation is idle. Then some of them poll for work, and cohorts are drawn from these; the others stay away. Each
setting runs until a number of updates is in. Messages are requests answered (work, downlink, update); CPU seconds are
the coordinator's.

The first settings keep 200 devices polling while 200, 2,000 and 10,000 are enrolled: the cost of a member. The last
ones have 1,000 and 2,000 devices polling at once: the cost of a waiting device.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from coord_server.operator.client import Operator
from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.federation.processes import children, coordinator
from edge_bench.overhead.loopback import PATIENCE, Meter, create, plugin
from edge_client.errors import ConfigError
from edge_client.link.transport import content_digest
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.metrics import with_metrics
from edge_client.protocol.payload import MEDIA_TYPE, decode, encode

KIND, D, COHORT = "mask", 1000, 50
SETTINGS = "200:200,2000:200,10000:200,10000:1000,10000:2000"
HOLD = 30.0  # seconds a request for work may be held
LOOK = 0.2  # seconds between two looks at how many updates are in
AT_ONCE = 64  # enrolments under way together
BUSY = (429, 503)  # statuses that ask for another try


# --- devices


class Gone(Exception):
    """The coordinator closed the connection."""


@dataclass
class Device:
    """One device and its connection, from an address of its own."""

    host: str
    port: int
    name: str
    address: str
    credential: str
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def ask(self, verb: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        """One request on the kept connection, which is opened anew when the coordinator has closed it."""
        kept = self.writer is not None
        try:
            return await self._ask(verb, path, body, headers)
        except (Gone, OSError):
            self.close()
            if not kept:
                raise
            return await self._ask(verb, path, body, headers)

    async def _ask(self, verb: str, path: str, body: bytes, headers: str) -> tuple[int, bytes]:
        if self.reader is None or self.writer is None:
            here = (self.address, 0)
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, local_addr=here)
        head = f"{verb} {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.credential}\r\n"
        self.writer.write(f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            content = await self.reader.readexactly(int(fields.get("content-length", 0)))
        except (asyncio.IncompleteReadError, OSError):
            raise Gone(f"{self.name}: the coordinator closed the connection") from None
        if fields.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), content

    def close(self) -> None:
        """Close the connection."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


class Pollers:
    """Every device, and what they have done."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.host, self.port, self.token = host, port, token
        self.devices: list[Device] = []
        self.polling: list[asyncio.Task[None]] = []
        self.messages = self.updates = self.busy = self.stopped = 0

    async def message(self, device: Device, verb: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
        """A device's request, counted, and repeated while the coordinator is busy. Raises ConfigError when refused."""
        status, content = await device.ask(verb, path, body, headers)
        self.messages += 1
        while status in BUSY:
            self.busy += 1
            await asyncio.sleep(1.0)
            status, content = await device.ask(verb, path, body, headers)
        if status >= 300:
            raise ConfigError(f"{device.name}: {verb} {path} was answered {status}: {content.decode(errors='replace')}")
        return content

    async def enrol(self, count: int) -> None:
        """Enrol devices until there are `count`; they close their connections."""
        room = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> Device:
            async with room:
                name = f"d{index:05d}"
                address = f"127.1.{index // 250}.{index % 250 + 1}"  # all of 127.0.0.0/8 is this machine
                device = Device(self.host, self.port, name, address, sha256(name.encode()).hexdigest())
                body = {"token": self.token, "device": name, "credential": device.credential}
                as_json = "Content-Type: application/json\r\n"
                await self.message(device, "POST", "/v1/enrol", json.dumps(body).encode(), as_json)
                device.close()
                return device

        self.devices += await asyncio.gather(*(one(i) for i in range(len(self.devices), count)))

    async def poll(self, count: int) -> None:
        """Bring the number of polling devices to `count`; return once each has asked for work."""
        for task in self.polling[count:]:
            task.cancel()
        del self.polling[count:]
        arrived = [asyncio.Event() for _ in range(len(self.polling), count)]
        for device, event in zip(self.devices[len(self.polling) : count], arrived, strict=True):
            self.polling.append(asyncio.create_task(self._take_part(device, event)))
        for event in arrived:
            await event.wait()

    async def _take_part(self, device: Device, arrived: asyncio.Event) -> None:
        where, work = f"/v1/federations/{KIND}", None
        try:
            await asyncio.sleep(random.uniform(0.0, 1.0))  # not all at once
            await self.message(device, "GET", f"{where}/work")
            arrived.set()
            while True:
                if work is None or work["status"] == "wait":
                    work = json.loads(await self.message(device, "GET", f"{where}/work?wait={HOLD}"))
                if work["status"] == "train":
                    work = await self._round(device, where, work)
                elif work["status"] != "wait":
                    return
        except (ConfigError, OSError, Gone) as error:
            self.stopped += 1
            print(f"{device.name} stopped: {error}", file=sys.stderr, flush=True)
        finally:
            arrived.set()
            device.close()

    async def _round(self, device: Device, where: str, work: dict[str, Any]) -> dict[str, Any] | None:
        content = decode(await self.message(device, "GET", f"{where}/payloads/{work['downlink']}"))
        update = encode(with_metrics(content, DeviceMetrics(samples=1, loss=0.0)))
        headers = (
            f"Maskfleet-Lease: {work['lease']}\r\nContent-Type: {MEDIA_TYPE}\r\n"
            f"Content-Digest: {content_digest(update)}\r\n"
        )
        path = f"{where}/rounds/{work['round']}/updates/{device.name}"
        receipt = json.loads(await self.message(device, "PUT", path, update, headers))
        self.updates += 1
        found: dict[str, Any] | None = receipt.get("work")
        return found


# --- the measurement


async def _wait_for(fleet: Pollers, updates: int) -> None:
    """Return once so many updates were acknowledged. Raises ConfigError when that takes too long."""
    end = time.monotonic() + PATIENCE
    while fleet.updates < updates:
        if time.monotonic() > end:
            raise ConfigError(f"{fleet.updates} of {updates} updates arrived within {PATIENCE:.0f} s")
        await asyncio.sleep(LOOK)


async def _all(
    url: str, operator: Operator, meter: Meter, token: str, settings: Sequence[tuple[int, int]], updates: int
) -> list[dict[str, Any]]:
    """One row for each setting, which the federation runs one after another."""
    rows: list[dict[str, Any]] = []
    host, port = url.removeprefix("http://").split(":")
    fleet = Pollers(host, int(port), token)
    for enrolled, polling in settings:
        await fleet.enrol(enrolled)
        await fleet.poll(polling)
        await asyncio.to_thread(operator.operate, KIND, "resume" if rows else "start")
        await _wait_for(fleet, fleet.updates + 1)
        begin, done, messages, busy = time.monotonic(), fleet.updates, fleet.messages, fleet.busy
        await _wait_for(fleet, done + updates)
        elapsed, arrived = time.monotonic() - begin, fleet.updates - done
        messages, busy = fleet.messages - messages, fleet.busy - busy
        await asyncio.to_thread(operator.operate, KIND, "pause")
        cpu = meter.seconds(begin, begin + elapsed)
        rows.append(
            {
                "enrolled": enrolled,
                "polling": polling,
                "seconds": elapsed,
                "updates": arrived,
                "messages_per_second": messages / elapsed,
                "updates_per_second": arrived / elapsed,
                "cpu_ms_per_update": 1000 * cpu / arrived,
                "cpu_share": cpu / elapsed,
                "memory": meter.peak(),
                "answers_too_busy": busy,
                "devices_that_stopped": fleet.stopped,
            }
        )
        print(_said(rows[-1], rows[0]), flush=True)
    await fleet.poll(0)
    return rows


def measure(settings: Sequence[tuple[int, int]], updates: int) -> list[dict[str, Any]]:
    """One row for each setting: enrolled and polling devices, in rising order of the enrolled."""
    with tempfile.TemporaryDirectory() as name, children() as start:
        folder = Path(name)
        server, url, operator = coordinator(start, folder, plugin(folder))
        endless = {"rounds": 1_000_000, "start": "manual", "min_updates": 1, "deadline_seconds": 10.0}
        with operator:
            token = create(operator, folder, KIND, D, COHORT, **endless)
            return asyncio.run(_all(url, operator, Meter(server.popen.pid), token, settings, updates))


def _said(row: dict[str, Any], first: dict[str, Any]) -> str:
    ratio = row["cpu_ms_per_update"] / first["cpu_ms_per_update"]
    return (
        f"{row['enrolled']:6,} enrolled, {row['polling']:5,} polling: {row['messages_per_second']:6.0f} messages/s, "
        f"{row['updates_per_second']:5.0f} updates/s, {row['cpu_ms_per_update']:.2f} ms of CPU an update "
        f"({ratio:.2f}x the first), peak {row['memory'] / 2**20:.0f} MiB"
    )


def main(
    settings: Annotated[str, typer.Option(help="enrolled:polling, comma-separated, in rising order.")] = SETTINGS,
    updates: Annotated[int, typer.Option(min=1, help="Of each setting.")] = 1000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Messages per second and the coordinator's CPU time per update, with few and with many enrolled devices."""
    pairs = [(int(a), int(b)) for a, b in (pair.split(":") for pair in settings.split(","))]
    check_writable(json_file)
    origin = provenance.origin()
    rows = measure(pairs, updates)
    write_json(json_file, {**origin, "cohort": COHORT, "parameters": D, "results": rows})


if __name__ == "__main__":
    run_module(main)
