"""Damaged rows and blobs: each is named, everything else is shown, and what can be mended is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from coordination import Fleet, manifest, pages, play, refused, settings, whole
from dashboard_pages import HTML, PAGE, log_in, said
from httpx import Response

from coord_server.operator import manage
from edge_client.bundle import digest
from edge_client.protocol.operator import BundleSummary


async def beside_the_rest(fault: str, fleet: Fleet) -> Response:
    """The federation's page; there and on the first page the fault is said, and all that is not damaged."""
    await log_in(fleet)
    for page, other in (("/", "other"), (PAGE, "after local training")):
        shown = await fleet.http.get(page, headers=HTML)
        assert shown.status_code == 200
        assert fault in said(shown)
        assert other in said(shown)
    return shown


def test_a_damaged_manifest_is_named_and_the_other_bundles_are_listed(tmp_path: Path) -> None:
    content = manifest(14).to_bytes()
    bad = digest(content)
    file = tmp_path / "blobs" / "bundles" / bad / bad

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        good = await fleet.bundle()
        assert await fleet.bundle(14) == bad
        file.write_bytes(content[:-1] + b"!")  # of the same size
        first, second = (await fleet.operator("GET", "/v1/bundles")).json()
        assert (first["digest"], first["fault"], first["parameters"]) == (good, None, 12)
        assert (second["digest"], second["federations"], second["parameters"]) == (bad, [], 0)
        assert second["fault"].startswith(f"the manifest of bundle {bad} cannot be read (blob bundles/")
        assert (await fleet.operator("GET", f"/v1/bundles/{bad}/summary")).json() == second
        shown = manage._bundles([BundleSummary.model_validate(b) for b in (first, second)])
        assert f"fault of {bad[:12]}: the manifest" in str(shown[1])
        config = settings(name="next", bundle=bad)
        answer = await fleet.operator("POST", "/v1/federations", json=config)
        assert f"{bad} cannot be read" in refused(answer, "storage-damaged")
        assert (await fleet.operator("POST", "/v1/bundles", content=content)).status_code == 201  # written again
        assert (await fleet.operator("POST", "/v1/federations", json=config)).status_code == 201
        file.unlink()

    async def restarted(fleet: Fleet) -> None:
        assert [f["id"] for f in (await fleet.operator("GET", "/v1/federations")).json()] == ["fed", "next"]
        faults = [b["fault"] is None for b in (await fleet.operator("GET", "/v1/bundles")).json()]
        assert faults == [True, False]
        await log_in(fleet)
        for page in ("/", PAGE, "/federations/next"):
            assert (await fleet.http.get(page, headers=HTML)).status_code == 200
        await fleet.operator("DELETE", "/v1/federations/next")
        assert (await fleet.operator("DELETE", f"/v1/bundles/{bad}")).status_code == 204
        assert len((await fleet.operator("GET", "/v1/bundles")).json()) == 1

    play(tmp_path, script)
    play(tmp_path, restarted)


@pytest.mark.parametrize("held", [b"grapf", b"grap", b"graphs", None], ids=["damaged", "cut", "longer", "gone"])
def test_a_damaged_part_is_missing_when_its_bundle_is_posted_again_and_the_next_upload_mends_it(
    held: bytes | None, tmp_path: Path
) -> None:
    content = manifest().to_bytes()
    part = tmp_path / "blobs" / "bundles" / digest(content) / digest(b"graph")
    path = f"/v1/bundles/{digest(content)}/parts/train.onnx"

    async def script(fleet: Fleet) -> None:
        await fleet.bundle()
        wrong = await fleet.operator("PUT", path, content=b"other")
        assert "part 'train.onnx' has SHA-256" in refused(wrong, "bad-bundle")
        if held is None:
            part.unlink()
        else:
            part.write_bytes(held)
        assert (await fleet.operator("POST", "/v1/bundles", content=content)).json()["missing"] == ["train.onnx"]
        assert (await fleet.operator("PUT", path, content=b"graph")).json()["missing"] == []
        assert (await fleet.operator("POST", "/v1/bundles", content=content)).json()["missing"] == []
        assert (await fleet.operator("GET", path)).content == b"graph"

    play(tmp_path, script)


FAULT = "the record of round 2 of fed is damaged: "


def test_a_damaged_round_is_named_and_everything_else_is_shown(tmp_path: Path) -> None:
    """On both pages and in the lists of the API, also where the page of a list ends with it."""

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=4)
        await fleet.operator("POST", "/v1/federations", json=settings(name="other", bundle=await fleet.bundle()))
        for _ in range(3):
            for device in ("a", "bb"):
                await fleet.train(device)
            await fleet.due("a")
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            database.execute("update rounds set record = '{\"x\":1}' where round = 2")
        shown = await beside_the_rest(FAULT, fleet)
        numbers = [[r["round"] for r in part] for part in await pages(fleet, "/v1/federations/fed/rounds", 1)]
        assert numbers == [[1], [], [3]]
        again = await fleet.http.get(PAGE, headers=HTML)
        assert again.text.count("<tr") == shown.text.count("<tr") > 0  # no round is read twice
        assert FAULT in (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"]
        one = await fleet.operator("GET", "/v1/federations/fed/rounds/2")
        assert "round 2 of fed" in refused(one, "storage-damaged")
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds/3")).json()["round"] == 3
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            database.execute("update rounds set record = replace(record, ':3,', ':2,') where round = 3")
        assert (await fleet.operator("GET", "/v1/federations/fed/rounds")).json()[1:] == []
        fault = (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"]
        assert "round 2 of fed is damaged (so are those of round 3): " in fault

    play(tmp_path, script)


ROW = "the row of device 'a' is damaged: "


@pytest.mark.parametrize(
    "damage", ["report = '{'", "failure = '[]'", "cost = 'x'", "updates = 'many'", "last_seen_at = 'never'"]
)
def test_a_damaged_row_of_a_device_is_named_and_everything_else_is_shown(damage: str, tmp_path: Path) -> None:
    """On both pages and in the list of the API, whose pages keep their length; restored, the fault is gone."""

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=4)
        for device in ("a", "bb"):
            await fleet.train(device)
        await fleet.due("a")
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            rows = database.execute("select rowid, * from devices where device = 'a'").fetchall()
            database.execute(f"update devices set {damage} where device = 'a'")
        await log_in(fleet)
        shown = await fleet.http.get(PAGE, headers=HTML)
        assert shown.status_code == 200
        assert ROW in said(shown)
        assert "after local training" in said(shown)
        assert said(shown).count("bb") > 0
        assert ROW in said(await fleet.http.get("/", headers=HTML))
        (first,), (second,) = await pages(fleet, "/v1/federations/fed/devices", 1)
        assert (first["device"], first["updates"], first["report"], first["cost"]) == ("a", 0, None, {})
        assert (second["device"], second["updates"]) == ("bb", 1)
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"].startswith(ROW)
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            database.execute("delete from devices where device = 'a'")
            database.execute(f"insert into devices values ({','.join('?' * (len(rows[0]) - 1))})", rows[0][1:])
        assert ROW not in said(await fleet.http.get(PAGE, headers=HTML))
        assert (await fleet.operator("GET", "/v1/federations/fed")).json()["fault"] is None

    play(tmp_path, script)


def test_an_export_of_a_device_whose_row_is_damaged_is_refused_and_others_are_made(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            database.execute("update devices set report = '{' where device = 'a'")
        for device, status in (("a", 500), ("bb", 202)):
            asked = {"kind": "onnx", "device": device}
            answer = await fleet.operator("POST", "/v1/federations/fed/exports", json=asked)
            assert answer.status_code == status, answer.text
            assert (ROW in answer.text) == (device == "a")

    play(tmp_path, script)


def test_a_damaged_last_downlink_is_named_and_everything_else_is_shown(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await fleet.operator("POST", "/v1/federations", json=settings(name="other", bundle=await fleet.bundle()))
        await whole(fleet, "a", "bb")
        with sqlite3.connect(tmp_path / "coordinator.db") as database:
            database.execute("update devices set last_down = '{' where device = 'a'")
        await beside_the_rest(ROW, fleet)

    play(tmp_path, script)
