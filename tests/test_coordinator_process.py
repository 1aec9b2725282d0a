"""A real coordinator process: how it starts and stops, what it costs, and kill -9 while devices upload."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from coordination import OPERATOR, bearer, content_digest, credential, served, settings, trained, write_bundle
from typer.testing import CliRunner

from coord_server import operator_cli
from coord_server.operator_client import Operator
from coord_server.store.tables import INLINE
from edge_client.errors import ServerError, UnreachableError
from edge_client.protocol.messages import Accuracy, Device, Federation, FederationConfig, Round, TokenRequest, Traffic

SERVE = [sys.executable, "-c", "from coord_server.cli import serve; import typer; typer.run(serve)"]
IDLE_LIMIT = 120e6  # bytes


@contextmanager
def coordinator(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator that is ready, and its address; killed at the end if it still lives."""
    environment = {**os.environ, "MASKFLEET_OPERATOR_TOKEN": OPERATOR, "OMP_NUM_THREADS": "1"}
    command = [*SERVE, "--port", str(port), "--data", str(folder), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready at (http://\S+)", line)
        assert found, line
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait()


def test_the_coordinator_never_imports_torch_or_onnx() -> None:
    code = (
        "import sys; import coord_server.cli, coord_server.operator_cli; from edge_client.methods import make_method;"
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
        httpx.post(f"{url}/v1/enrol", json=body, trust_env=False).raise_for_status()
        answers: list[Any] = []

        def wait() -> None:
            path = f"{url}/v1/federations/fed/work?wait=50"
            answers.append(httpx.get(path, headers=bearer(credential("a")), timeout=60, trust_env=False).json())

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        waiting.join(20)
        assert answers[0]["status"] == "wait"


def test_the_operators_tables_are_readable_in_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(
        id="har-by-person", config=FederationConfig.model_validate(settings(name="har-by-person", rounds=1000)),
        phase="recruiting", round=120, devices=1000, updates=90, expected=10, attempt=12, deadline_in=3600.0,
    )  # fmt: skip
    half = Accuracy(mean=0.5, worst=0.25, p10=0.25, best=1.0)
    weights = {"parameters": 123_456_789}
    traffic = Traffic(up={**weights, "header": 1000}, down=weights, last_down={"parameters": 987_654_321})
    record = Round(
        round=120, devices=["a"] * 100, traffic=traffic, bits_per_parameter_up=32.004, bits_per_parameter_down=32.004,
        loss=12.3456, accuracy_before=half, accuracy_after=half, seconds=3599.9,
    )  # fmt: skip
    monkeypatch.setattr(Operator, "federations", lambda _: [federation])
    unknown = {"round": 121, "loss": None, "accuracy_before": None, "accuracy_after": None}
    monkeypatch.setattr(Operator, "rounds", lambda *_: [record, record.model_copy(update=unknown)])
    new = Device(device="pi-in-the-kitchen-4c0ffe", enrolled_at=0.0, last_seen_at=0.0, updates=0, bytes_up=0,
                 bytes_down=0, ready=False)  # fmt: skip
    sizes: dict[str, Any] = {"updates": 1000, "bytes_up": 123_456_789, "bytes_down": 987_654_321, "ready": True}
    messages = {"bundle": 123_456_789, "work": 123_456_789}
    old = new.model_copy(update={**sizes, "messages_up": messages, "messages_down": messages, "removed": True})
    monkeypatch.setattr(Operator, "devices", lambda *_: [new, old])
    environment = {"COLUMNS": "80", "MASKFLEET_OPERATOR_TOKEN": OPERATOR, "TERM": "dumb"}
    for command, words in {
        "list": ["method", "recruiting", "120/1000", "devices", "updates", "ends", "fault"],
        "devices har": ["accuracy", "messages", "state", "not ready", "removed"],
        "rounds har": ["accuracy", "bits/par", "32.004", "seconds", "3599.9", "skipped", "123,456,789", "987,654,321"],
    }.items():
        shown = CliRunner().invoke(operator_cli.app, command.split(), env=environment)
        assert shown.exit_code == 0, shown.output
        assert "…" not in shown.output
        assert all(word in shown.output for word in words), shown.output
        assert max(len(line) for line in shown.output.splitlines()) <= 80
    (silent,) = (line for line in shown.output.splitlines() if line.split()[:2] == ["121", "100"])
    assert silent.split()[2:5] == ["-", "-", "-"]  # loss, accuracy, worst


def test_the_operators_client_says_what_is_wrong(tmp_path: Path) -> None:
    with coordinator(tmp_path / "data") as (process, url):
        with Operator(url, "wrong") as stranger, pytest.raises(ServerError, match="operator's token") as caught:
            stranger.federations()
        assert (caught.value.status, caught.value.kind) == (401, "unauthorized")
        with Operator(url, OPERATOR) as operator:
            assert operator.health().federations == 0
            process.kill()
            process.wait()
            with pytest.raises(UnreachableError, match="is the coordinator running"):
                operator.health()


def _again(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Send until something answers: the coordinator may be dead just now."""
    for _ in range(2400):  # a coordinator starts slowly on a busy machine
        try:
            answer = send()
            if answer.status_code < 500:
                return answer
        except httpx.RequestError:
            pass
        time.sleep(0.05)
    raise AssertionError("the coordinator never came back")


def _device(name: str, url: str, receipts: list[tuple[int, str, str]]) -> None:
    """Take part to the end; every acknowledgement is noted."""
    mine = bearer(credential(name))
    with httpx.Client(base_url=url, timeout=10, trust_env=False) as http:
        while True:
            work = _again(lambda: http.get("/v1/federations/fed/work?wait=5", headers=mine)).json()
            if work["status"] == "finish":
                return
            if work["status"] != "train":
                continue
            down = _again(lambda w=work: http.get(f"/v1/federations/fed/payloads/{w['downlink']}", headers=mine))
            if down.status_code != 200:
                continue
            body = trained(down.content, name)
            shown = {**mine, "Maskfleet-Lease": work["lease"], "Content-Digest": content_digest(body)}
            path = f"/v1/federations/fed/rounds/{work['round']}/updates/{name}"
            answer = _again(lambda p=path, b=body, h=shown: http.put(p, content=b, headers=h))
            while answer.status_code == 503:  # killed before the closed round was journalled: it is folded again first
                answer = _again(lambda p=path, b=body, h=shown: http.put(p, content=b, headers=h))
            assert answer.status_code in (200, 201), answer.text
            receipts.append((work["round"], name, answer.json()["sha256"]))


@pytest.mark.parametrize("d", [64, 2 * (INLINE // 8 + 100)], ids=["in the database", "in the folder"])
def test_killed_again_and_again_the_federation_ends_as_if_undisturbed(tmp_path: Path, d: int) -> None:
    devices, rounds, kills = ("a", "bb", "ccc"), 8, 4
    dice = random.Random(d)
    data, receipts = tmp_path / "data", list[tuple[int, str, str]]()
    config = {"rounds": rounds, "cohort": 3, "min_devices": 3, "min_updates": 3}
    with coordinator(data) as (_, url):
        port = int(url.rpartition(":")[2])
        with Operator(url, OPERATOR) as operator:
            bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle", d))
            operator.create(FederationConfig.model_validate(settings(bundle=bundle, **config)))
            join = operator.token("fed", TokenRequest()).token
        for name in devices:
            body = {"token": join, "device": name, "credential": credential(name)}
            httpx.post(f"{url}/v1/enrol", json=body, trust_env=False).raise_for_status()
        threads = [threading.Thread(target=_device, args=(n, url, receipts), daemon=True) for n in devices]
        for thread in threads:
            thread.start()
        time.sleep(dice.uniform(0.02, 0.3))
    assert all(thread.is_alive() for thread in threads)
    for _ in range(kills - 1):
        with coordinator(data, port):
            time.sleep(dice.uniform(0.02, 0.3))
    with coordinator(data, port), Operator(url, OPERATOR) as operator:
        for thread in threads:
            thread.join(60)
        assert operator.federation("fed").phase == "finished"
        state, records, shown = operator.state("fed"), operator.rounds("fed"), operator.devices("fed")
    assert [(r.round, r.devices) for r in records] == [(n, list(devices)) for n in range(1, rounds + 1)]
    assert {d.device: d.updates for d in shown} == dict.fromkeys(devices, rounds)
    assert len(set(receipts)) == len({(r, n) for r, n, _ in receipts})  # one body a device and round

    async def undisturbed() -> bytes:
        async with served(tmp_path / "other") as fleet:
            await fleet.federation(*devices, d=d, **config)
            for _ in range(rounds):
                for name in devices:
                    assert (await fleet.train(name)).status_code == 201
            assert (await fleet.work("a", 10))["status"] == "finish"
            return (await fleet.operator("GET", "/v1/federations/fed/state")).content

    assert state == asyncio.run(undisturbed())
