"""A coordinator that starts although one of its federations cannot be loaded: it is named, the others run."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from coordination import bearer, credential, pages, refused, served, until
from typer.testing import CliRunner

from coord_server.coordinator import Coordinator
from coord_server.operator import cli as operator_cli
from coord_server.operator.client import Operator
from edge_client.protocol.messages import Federation


def change(folder: Path, statement: str) -> None:
    """Damage what concerns federation "fed"."""
    with closing(sqlite3.connect(folder / "coordinator.db")) as database, database:
        assert database.execute(statement).rowcount > 0


DAMAGE = [
    (
        "update federations set config = replace(config, 'fedavg', 'nosuch') where id = 'fed'",
        "no method 'nosuch'",
        True,
    ),
    ("update federations set config = '{' where id = 'fed'", "FederationConfig", False),
    ("update federations set state = '{x' where id = 'fed'", "State", False),
    ("update federations set state = '[]' where id = 'fed'", "State", False),
]


@pytest.mark.parametrize(("statement", "why", "readable"), DAMAGE)
def test_a_federation_that_cannot_be_loaded_is_named_with_what_to_do_and_the_others_run(
    tmp_path: Path, statement: str, why: str, readable: bool
) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
            bundle = (await fleet.operator("GET", "/v1/federations/fed")).json()["config"]["bundle"]
            shown = (await fleet.operator("GET", "/v1/federations/fed")).json()
            other = {**shown["config"], "name": "other", "min_devices": 1, "cohort": 1}
            assert (await fleet.operator("POST", "/v1/federations", json=other)).status_code == 201
            token = (await fleet.operator("POST", "/v1/federations/other/tokens", json={})).json()["token"]
            join = fleet.join
        change(tmp_path, statement)
        async with served(tmp_path) as fleet:
            fleet.join = join
            second, first = (await fleet.operator("GET", "/v1/federations")).json()
            assert await pages(fleet, "/v1/federations", 1) == [[second], [first]]
            assert (first["id"], first["fault"]) == ("other", None)
            assert second["id"] == "fed"
            assert "federation 'fed' could not be loaded: " in second["fault"]
            assert why in second["fault"]
            assert second["fault"].endswith("then start the coordinator again")
            assert (second["phase"], second["round"]) == (("running", 1) if readable else (None, 0))
            assert (second["config"] is None) is not readable
            assert (await fleet.operator("GET", "/v1/federations/fed")).json() == second
            mine = bearer(credential("a"))
            for answer in (
                await fleet.http.get("/v1/federations/fed/work", headers=mine),
                await fleet.http.get(f"/v1/bundles/{bundle}", headers=mine),
                await fleet.enrol("c"),
                await fleet.operator("POST", "/v1/federations/fed/pause"),
                await fleet.operator("GET", "/v1/federations/fed/rounds"),
            ):
                assert "It can be stopped or deleted" in refused(answer, "not-loaded")
                assert answer.headers["retry-after"] == "60"
            stranger = await fleet.http.get(f"/v1/bundles/{bundle}", headers=bearer(credential("y")))
            assert (stranger.status_code, "fed'" in stranger.text) == (401, False)
            again = await fleet.operator("POST", "/v1/federations", json={**other, "name": "fed"})
            assert (again.status_code, again.json()["type"]) == (409, "/problems/name-taken")
            fleet.join = token
            assert (await fleet.enrol("z")).status_code == 200
            work = await fleet.http.get("/v1/federations/other/work", headers=bearer(credential("z")))
            assert work.json()["status"] == "train"
            assert (await fleet.http.get(f"/v1/bundles/{bundle}", headers=bearer(credential("z")))).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(("statement", "readable"), [(d[0], d[2]) for d in DAMAGE])
def test_a_federation_that_cannot_be_loaded_can_be_stopped_and_deleted(
    tmp_path: Path, statement: str, readable: bool
) -> None:
    """Whatever it was doing. Its bundle is free, too. Where its state is damaged there is nothing to stop."""

    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
            bundle = (await fleet.operator("GET", "/v1/federations/fed")).json()["config"]["bundle"]
        change(tmp_path, statement)
        async with served(tmp_path) as fleet:
            assert refused(await fleet.operator("POST", "/v1/federations/fed/pause"), "not-loaded")
            stopped = await fleet.operator("POST", "/v1/federations/fed/stop")
            if "state = " in statement:
                assert "delete it" in refused(stopped, "wrong-phase")
            else:
                assert stopped.status_code == 200
                assert (stopped.json()["phase"] == "stopped") is readable
                assert "could not be loaded" in stopped.json()["fault"]
                again = await fleet.operator("POST", "/v1/federations/fed/stop")
                assert "cannot be stopped now" in refused(again, "wrong-phase")
        async with served(tmp_path) as fleet:
            assert refused(await fleet.operator("DELETE", f"/v1/bundles/{bundle}"), "bundle-in-use")
            assert (await fleet.operator("DELETE", "/v1/federations/fed")).status_code == 204
            assert (await fleet.operator("GET", "/v1/federations")).json() == []
            assert (await fleet.operator("DELETE", f"/v1/bundles/{bundle}")).status_code == 204

    asyncio.run(main())


def test_another_federation_that_has_the_name_by_now_is_not_stopped_or_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made at another coordinator, since this one has looked."""
    monkeypatch.setattr("coord_server.coordinator.WATCH", 3600.0)

    async def no_look(_: Coordinator) -> None:
        """Nothing has changed yet."""

    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
        change(tmp_path, "update federations set config = replace(config, 'fedavg', 'nosuch')")
        async with served(tmp_path) as fleet:
            change(tmp_path, "update federations set first = first + 9, version = version + 9")
            monkeypatch.setattr(Coordinator, "look", no_look)
            for method, path in (("POST", "/v1/federations/fed/stop"), ("DELETE", "/v1/federations/fed")):
                assert "has just changed" in refused(await fleet.operator(method, path), "wrong-phase")

    asyncio.run(main())


def test_one_that_was_stopped_without_its_method_stays_so_with_it(tmp_path: Path) -> None:
    """What another coordinator, which has the method, finds too."""

    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
        async with served(tmp_path) as able:
            change(tmp_path, "update federations set config = replace(config, 'fedavg', 'nosuch')")
            async with served(tmp_path) as unable:
                answer = await unable.operator("POST", "/v1/federations/fed/stop")
                assert answer.json()["phase"] == "stopped"
            await until(able, lambda f: f["phase"] == "stopped")
            assert (await able.work("a"))["status"] == "stopped"
            change(tmp_path, "update federations set config = replace(config, 'nosuch', 'fedavg')")
        async with served(tmp_path) as fleet:
            found = (await fleet.operator("GET", "/v1/federations/fed")).json()
            assert (found["phase"], found["fault"]) == ("stopped", None)

    asyncio.run(main())


def test_one_that_cannot_be_loaded_here_is_not_deleted_while_another_coordinator_runs_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as able:
            await able.federation("a", "b")
            change(tmp_path, DAMAGE[0][0])
            async with served(tmp_path) as unable:
                answer = await unable.operator("DELETE", "/v1/federations/fed")
                assert "stop it" in refused(answer, "wrong-phase")
                assert (await able.train("a")).status_code == 201
                assert (await able.train("b")).status_code == 201
                await until(able, lambda f: f["round"] == 2)
                await until(unable, lambda f: f["round"] == 2)

    asyncio.run(main())


def test_a_federation_whose_method_is_back_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
            assert (await fleet.train("a")).status_code == 201
        change(tmp_path, "update federations set config = replace(config, 'fedavg', 'nosuch')")
        async with served(tmp_path) as fleet:
            assert (await fleet.operator("GET", "/v1/federations/fed")).json()["updates"] == 1
        change(tmp_path, "update federations set config = replace(config, 'nosuch', 'fedavg')")
        async with served(tmp_path) as fleet:
            assert (await fleet.train("b")).status_code == 201

    asyncio.run(main())


@pytest.mark.parametrize("column", ["report", "failure"])
def test_a_devices_damaged_row_is_named_and_keeps_no_device_from_its_work(tmp_path: Path, column: str) -> None:
    async def main() -> None:
        async with served(tmp_path) as fleet:
            await fleet.federation("a", "b")
        change(tmp_path, f"update devices set {column} = '{{' where device = 'a'")
        async with served(tmp_path) as fleet:
            listed = await fleet.operator("GET", "/v1/federations/fed/devices")
            assert [d["device"] for d in listed.json()] == ["a", "b"]
            fault = (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"]
            assert "device 'a' is damaged" in fault
            for device in ("a", "b"):
                assert (await fleet.train(device)).status_code == 201

    asyncio.run(main())


def test_a_federation_that_another_coordinator_made_is_served_here(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as first, served(tmp_path) as second:
            second.join = ""
            await first.federation("a")
            second.join = first.join
            assert (await second.enrol("b")).status_code == 200  # the token was made there
            assert (await second.work("b"))["status"] == "train"
            assert (await second.train("a")).status_code == 201  # so was this credential
            assert (await first.train("b")).status_code == 201
            assert (await first.due("a"))["round"] == 2
            assert (await second.due("b"))["round"] == 2

    asyncio.run(main())


def test_the_operators_list_shows_a_federation_that_could_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Federation(id="fed", config=None, phase=None, round=0, devices=0, updates=0, fault="could not be loaded")
    monkeypatch.setattr(Operator, "federations", lambda _: [unread])
    environment = {"COLUMNS": "80", "MASKFLEET_OPERATOR_TOKEN": "o" * 64, "TERM": "dumb"}
    shown = CliRunner().invoke(operator_cli.app, ["list"], env=environment)
    assert shown.exit_code == 0, shown.output
    assert "fed" in shown.output
    assert "could not" in " ".join(shown.output.split())
