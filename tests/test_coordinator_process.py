"""Real coordinator processes: how they start and stop, what they cost, and kill -9 while devices upload."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from coordination import (
    LARGE,
    LIMIT,
    OPERATOR,
    Fleet,
    bearer,
    content_digest,
    credential,
    refused,
    served,
    settings,
    trained,
    until,
    whole,
    write_bundle,
)
from coordinator_process import Deadly, coordinator
from typer.testing import CliRunner

from coord_server.operator import cli as operator_cli
from coord_server.operator.client import Operator
from edge_client.bundle import digest
from edge_client.errors import ServerError, UnreachableError
from edge_client.protocol.messages import Failure, Federation, FederationConfig, Round, Scores, Traffic
from edge_client.protocol.operator import Device, TokenRequest

IDLE_LIMIT = 120e6  # bytes


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_coordinator_never_imports_torch_or_onnx() -> None:
    code = (
        "import sys; import coord_server.serve, coord_server.operator.cli; from edge_client.methods import make_method;"
        "make_method({'name': 'fedavg'});"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'onnx', 'onnxruntime', 'executorch'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_idle_coordinator_is_small_and_ends_cleanly_although_a_device_waits(tmp_path: Path) -> None:
    with coordinator(tmp_path / "data") as (process, url), Operator(url, OPERATOR) as operator:
        assert psutil.Process(process.pid).memory_info().rss < IDLE_LIMIT
        bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle"))
        operator.create(FederationConfig.model_validate(settings(bundle=bundle)))
        join = operator.token("fed", TokenRequest()).token
        body = {"token": join, "device": "a", "credential": credential("a")}
        httpx.post(f"{url}/v1/enrol", json=body, timeout=LIMIT, trust_env=False).raise_for_status()
        answers: list[Any] = []

        def wait() -> None:
            path = f"{url}/v1/federations/fed/work?wait=50"
            answers.append(httpx.get(path, headers=bearer(credential("a")), timeout=2 * LIMIT, trust_env=False).json())

        waiting = threading.Thread(target=wait)
        waiting.start()
        _until(lambda: operator.devices("fed")[0].ready)  # its request is under way
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        waiting.join(LIMIT)
        assert answers[0]["status"] == "wait"


def test_a_second_signal_ends_the_coordinator_as_cleanly_although_a_request_is_under_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with (
        coordinator(tmp_path / "data") as (process, url),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), LIMIT) as slow,
    ):
        slow.sendall(head)
        assert slow.recv(100).startswith(b"HTTP/1.1 100")  # its body is awaited
        process.send_signal(signal.SIGINT)  # waits for the request
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("damage", ["other bytes", "bytes of another kind"])
def test_a_damaged_record_names_its_device_and_what_to_do_and_the_others_can_go_on(tmp_path: Path, damage: str) -> None:
    async def script(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT, trust_env=False) as http:
            fleet = Fleet(http)
            await fleet.federation("a", "bb", method={"name": "feddr"}, min_updates=1)
            for device in ("a", "bb"):
                assert (await fleet.train(device)).status_code == 201
            assert (await fleet.due("bb"))["round"] == 2
            content = b"junk" if damage == "bytes of another kind" else None
            with closing(sqlite3.connect(tmp_path / "data" / "coordinator.db")) as database, database:
                if content is not None:
                    database.execute("UPDATE records SET sha256 = ? WHERE device = 'a'", (digest(content),))
                database.execute("UPDATE records SET content = ? WHERE device = 'a'", (content or b"x",))
            answer = await http.get("/v1/federations/fed/work", headers=bearer(credential("a")))
            said = refused(answer, "storage-damaged")
            assert "the record of device 'a' in fed cannot be read: " in said
            assert said.endswith("data folder, or remove the device so that the others go on")
            fault = (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"]
            assert "the record of device 'a' in fed cannot be read: " in fault
            assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/a")).status_code == 204
            assert (await fleet.train("bb")).status_code == 201
            await until(fleet, lambda f: f["phase"] == "finished" and f["fault"] is None)

    with coordinator(tmp_path / "data") as (_, url):
        asyncio.run(script(url))


def test_a_device_with_a_damaged_record_can_be_removed_while_its_update_waits_to_be_folded(tmp_path: Path) -> None:
    async def before(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT, trust_env=False) as http:
            fleet = Fleet(http)
            await fleet.federation("a", "bb", method={"name": "feddr"}, min_updates=1)
            for device in ("a", "bb", "a"):
                assert (await fleet.train(device)).status_code == 201

    async def after(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT, trust_env=False) as http:
            fleet = Fleet(http)
            assert (await fleet.train("bb")).status_code == 201
            why = "round 2 cannot be aggregated: the record of device 'a' in fed cannot be read: "
            await until(fleet, lambda f: why in (f["fault"] or ""))
            assert (await fleet.operator("DELETE", "/v1/federations/fed/devices/a")).status_code == 204
            await until(fleet, lambda f: f["phase"] == "finished" and f["fault"] is None)
            last = (await fleet.operator("GET", "/v1/federations/fed/rounds")).json()[-1]
            assert (last["round"], last["devices"], last["skipped"]) == (2, ["bb"], ["a"])

    with coordinator(tmp_path / "data") as (_, url):
        asyncio.run(before(url))
    with closing(sqlite3.connect(tmp_path / "data" / "coordinator.db")) as database, database:
        database.execute("UPDATE records SET content = ? WHERE device = 'a'", (b"x",))
    with coordinator(tmp_path / "data") as (_, url):  # a new process has not even encoded the downlink
        asyncio.run(after(url))


def test_the_operators_tables_are_readable_in_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(
        id="har-by-person", config=FederationConfig.model_validate(settings(name="har-by-person", rounds=1000)),
        phase="paused", round=121, devices=1000, updates=90, expected=10, attempt=12, deadline_in=3600.0,
        fault="round 120 failed 3 times: 1 of 2 updates; pi-07: out-of-memory [bold]",
    )  # fmt: skip
    half = Scores(mean=0.5, worst=0.25, p10=0.25, best=1.0)
    weights = {"parameters": 123_456_789}
    traffic = Traffic(up={**weights, "header": 1000}, down=weights, last_down={"parameters": 987_654_321})
    failure = Failure(kind="out-of-memory", reason="training needs 310 MB, 96 MB are free; \x1b[2Jlower `batch` " * 3)
    record = Round(
        round=120, devices=["a"] * 100, traffic=traffic, bits_per_parameter_up=32.004, bits_per_parameter_down=32.004,
        loss=12.3456, score_before=half, score_after=half, seconds=3599.9, failed={"pi-07": failure},
        guarded={"pi-03": "clipped: norm 41.2, median 2.1"}, skipped=["pi-in-the-kitchen-4c0ffe"],
    )  # fmt: skip
    monkeypatch.setattr(Operator, "federations", lambda _: [federation])
    monkeypatch.setattr(Operator, "federation", lambda *_: federation)
    unknown = {"round": 121, "loss": None, "score_before": None, "score_after": None, "failed": {}}
    monkeypatch.setattr(Operator, "rounds", lambda *_: [record, record.model_copy(update=unknown)])
    new = Device(device="pi-in-the-kitchen-4c0ffe", enrolled_at=0.0, last_seen_at=0.0, updates=0, bytes_up=0,
                 bytes_down=0, ready=False)  # fmt: skip
    sizes: dict[str, Any] = {"updates": 1000, "bytes_up": 123_456_789, "bytes_down": 987_654_321, "ready": True}
    messages = {"bundle": 123_456_789, "work": 123_456_789}
    old = new.model_copy(update={**sizes, "messages_up": messages, "messages_down": messages, "removed": True})
    ill = new.model_copy(update={"device": "pi-07", "ready": True, "failure": failure})
    monkeypatch.setattr(Operator, "devices", lambda *_: [new, old, ill])
    environment = {"COLUMNS": "80", "MASKFLEET_OPERATOR_TOKEN": OPERATOR, "TERM": "dumb"}
    shown = {}
    for command, words in {
        "list": ["method", "paused", "121/1000", "devices", "updates", "ends", "fault", "[bold]"],
        "show har": ["har-by-person fedavg, paused, round 121 of 1000", "fault", "out-of-memory [bold]", "0.500 mean",
                     "failed: pi-07 (out-of-memory", "mend the fault, then `maskfleet federation resume"],
        "show har --config": ["max_attempts", "fedavg", "personalise best"],
        "devices har": ["score", "messages", "state", "enrolled", "removed", "failed", "last seen",
                        "pi-07 failed (out-of-memory)"],
        "rounds har": ["score", "bits/par", "32.004", "seconds", "3599.9", "skipped", "123,456,789", "987,654,321",
                       "round 120: pi-07 failed (out-of-memory)", "round 120: pi-03 clipped: norm 41.2"],
    }.items():  # fmt: skip
        result = CliRunner().invoke(operator_cli.app, command.split(), env=environment)
        assert result.exit_code == 0, result.output
        assert "…" not in result.output
        assert "\x1b" not in result.output
        assert all(word in " ".join(result.output.split()) for word in words), result.output
        assert max(len(line) for line in result.output.splitlines()) <= 80
        shown[command] = result.output
    names = {"list": "har-by-person", "devices har": new.device, "rounds har": new.device}
    assert all(name in shown[command].split() for command, name in names.items())  # unbroken, so it can be copied
    digest = settings()["bundle"]
    assert digest[:12] in shown["show har --config"].split()
    assert len(shown["show har"].splitlines()) <= 24  # of eighty columns; the failure's reason takes half
    (silent,) = (line for line in shown["rounds har"].splitlines() if line.split()[:2] == ["121", "100"])
    assert silent.split()[2:5] == ["-", "-", "-"]  # loss, score, worst


def test_the_operators_client_says_what_is_wrong(tmp_path: Path) -> None:
    with coordinator(tmp_path / "data") as (process, url):
        with Operator(url, "wrong") as stranger, pytest.raises(ServerError, match="operator's token") as caught:
            stranger.federations()
        assert (caught.value.status, caught.value.kind) == (401, "unauthorized")
        with Operator(url, OPERATOR) as operator:
            assert operator.health().federations == 0
            process.kill()
            process.wait()
            with pytest.raises(UnreachableError, match="is the coordinator running there"):
                operator.health()


def _again(sites: list[httpx.Client], dice: random.Random, send: Callable[[httpx.Client], httpx.Response]) -> Any:
    """Send to a coordinator that is chosen anew each time, until one answers: they may be dead just now."""
    end = time.monotonic() + 4 * LIMIT  # a coordinator starts slowly on a busy machine
    while time.monotonic() < end:
        try:
            answer = send(dice.choice(sites))
            if answer.status_code < 500:
                return answer
        except httpx.RequestError:
            pass
        time.sleep(0.02)
    raise AssertionError("no coordinator came back")


def _device(name: str, site: Deadly, dice: random.Random, receipts: list[tuple[int, str, str]]) -> None:
    """Take part to the end; every acknowledgement is noted, every step counted."""
    mine, fed = bearer(credential(name)), "/v1/federations/fed"
    with ExitStack() as opened:
        sites = [opened.enter_context(httpx.Client(base_url=u, timeout=LIMIT, trust_env=False)) for u in site.urls]
        while True:
            work = _again(sites, dice, lambda c: c.get(f"{fed}/work?wait=2", headers=mine)).json()
            if work["status"] == "finish":
                return
            if work["status"] != "train":
                continue
            site.step()
            down = _again(sites, dice, lambda c, w=work: c.get(f"{fed}/payloads/{w['downlink']}", headers=mine))
            if down.status_code != 200:
                continue
            site.step()
            body = trained(down.content, name)
            shown = {**mine, "Maskfleet-Lease": work["lease"], "Content-Digest": content_digest(body)}
            shown["Content-Length"] = str(len(body))
            path = f"{fed}/rounds/{work['round']}/updates/{name}"

            def halves(b: bytes = body) -> Iterator[bytes]:
                yield b[: len(b) // 2]
                site.step()
                yield b[len(b) // 2 :]

            answer = _again(sites, dice, lambda c, p=path, h=shown, f=halves: c.put(p, content=f(), headers=h))
            assert answer.status_code in (200, 201), answer.text
            receipts.append((work["round"], name, answer.json()["sha256"]))
            site.step()


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "two processes"])
@pytest.mark.parametrize("d", [64, LARGE], ids=["in the database", "in the folder"])
def test_killed_again_and_again_the_federation_ends_as_if_undisturbed(tmp_path: Path, d: int, processes: int) -> None:
    """Every request of a device goes to a coordinator that is chosen anew."""
    devices, rounds, kills = ("a", "bb", "ccc"), 8, 5
    least = rounds * len(devices) * 4  # steps of an undisturbed run: the kills come before its end at any speed
    dice = random.Random(d + processes)
    site = Deadly(tmp_path / "data", processes, dice.sample(range(1, least - 10), kills), dice)
    receipts = list[tuple[int, str, str]]()
    config = {"rounds": rounds, "cohort": 3, "min_devices": 3, "min_updates": 3, "deadline_seconds": 3600.0}
    finished = threading.Event()
    keeper = threading.Thread(target=site.keep_alive, args=(finished.is_set,), daemon=True)
    keeper.start()
    try:
        with Operator(site.urls[0], OPERATOR) as operator:
            _up(site.urls)
            bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle", d))
            operator.create(FederationConfig.model_validate(settings(bundle=bundle, **config)))
            join = operator.token("fed", TokenRequest()).token
        for i, name in enumerate(devices):
            body, url = {"token": join, "device": name, "credential": credential(name)}, site.urls[i % processes]
            httpx.post(f"{url}/v1/enrol", json=body, timeout=LIMIT, trust_env=False).raise_for_status()
        threads = [
            threading.Thread(target=_device, args=(n, site, random.Random(f"{d}{n}"), receipts), daemon=True)
            for n in devices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(8 * LIMIT)
            assert not thread.is_alive()
        assert site.killed == kills
        _up(site.urls)
        states = set[bytes]()
        for url in site.urls:  # every coordinator shows the same
            with Operator(url, OPERATOR) as operator:
                assert operator.federation("fed").phase == "finished"
                rows = [(r.round, r.devices) for r in operator.rounds("fed")]
                assert rows == [(n, list(devices)) for n in range(1, rounds + 1)]
                assert {d.device: d.updates for d in operator.devices("fed")} == dict.fromkeys(devices, rounds)
                states.add(operator.state("fed"))
    finally:
        finished.set()
        keeper.join(2 * LIMIT)
    assert len(set(receipts)) == len({(r, n) for r, n, _ in receipts})  # one body a device and round

    async def undisturbed() -> bytes:
        async with served(tmp_path / "other") as fleet:
            await fleet.federation(*devices, d=d, **config)
            return await whole(fleet, *devices, rounds=rounds)

    assert states == {asyncio.run(undisturbed())}


def _up(urls: list[str]) -> None:
    """Return once every coordinator answers."""

    def answer() -> bool:
        try:
            return all(httpx.get(f"{u}/v1/health", timeout=LIMIT, trust_env=False).status_code == 200 for u in urls)
        except httpx.RequestError:
            return False

    _until(answer)
