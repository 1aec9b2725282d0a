"""Delete, change, list in pages: what the operator does beside starting and stopping."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from coordination import (
    LARGE,
    LIMIT,
    OPERATOR,
    Fleet,
    bearer,
    content_digest,
    credential,
    pages,
    play,
    refused,
    served,
    settings,
    trained,
    until,
    whole,
    write_bundle,
)
from coordinator_process import coordinator

from coord_server.http import operator
from coord_server.live.federation import LiveFederation
from coord_server.operator.client import Operator
from coord_server.store import SPARE_BYTES, blobs
from coord_server.store.blobs import FolderBlobs
from coord_server.store.database import Database
from coord_server.store.rows import Rows
from edge_client.bundle import digest
from edge_client.errors import ConfigError, StorageFullError
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import Change, FederationConfig

FED = "/v1/federations/fed"


def shelves(folder: Path) -> set[str]:
    """The folders of federations in the blob store."""
    return {p.name for p in (folder / "blobs").iterdir()} - {"bundles", "incoming"}


async def soon(done: Callable[[], Any], limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


# --- delete


def test_a_bundle_of_many_federations_is_kept_and_some_are_named(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        bundle = await fleet.bundle()
        for i in range(8):
            await fleet.operator("POST", "/v1/federations", json=settings(name=f"f{i}"))
        said = refused(await fleet.operator("DELETE", f"/v1/bundles/{bundle}"), "bundle-in-use")
        assert said == f"bundle {bundle} is used by f0, f1, f2, f3, f4 and 3 more; delete these federations first"

    play(tmp_path, script)


def test_a_federation_that_runs_is_not_deleted_and_one_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        for action, phase in (("pause", "paused"), ("resume", "running")):
            await fleet.operator("POST", f"{FED}/{action}")
            assert f"{phase} in round 1; stop it" in refused(await fleet.operator("DELETE", FED), "wrong-phase")
        await whole(fleet, "a", "bb")
        bundle = settings(bundle=await fleet.bundle(LARGE))["bundle"]
        assert "fed" in refused(await fleet.operator("DELETE", f"/v1/bundles/{bundle}"), "bundle-in-use")
        assert len(shelves(tmp_path)) == 1
        assert (await fleet.operator("DELETE", FED)).status_code == 204
        assert shelves(tmp_path) == set()
        refused(await fleet.operator("DELETE", FED), "not-found")
        refused(await fleet.http.get(f"{FED}/work", headers=bearer(credential("a"))), "unauthorized")
        refused(await fleet.enrol("ccc"), "unauthorized")
        assert (await fleet.operator("DELETE", f"/v1/bundles/{bundle}")).status_code == 204
        refused(await fleet.operator("DELETE", f"/v1/bundles/{bundle}"), "not-found")
        assert not list((tmp_path / "blobs" / "bundles").iterdir())

    play(tmp_path, script)


@pytest.mark.parametrize("name", ["bundles", "incoming", "store"])
def test_a_federation_with_the_name_of_a_folder_of_the_coordinator_goes_alone(tmp_path: Path, name: str) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation(d=LARGE)
        kept = sorted((tmp_path / "blobs").glob("*/**/*"))
        again = settings(bundle=await fleet.bundle(LARGE), name=name)
        assert (await fleet.operator("POST", "/v1/federations", json=again)).status_code == 201
        assert len(shelves(tmp_path)) == 2
        assert (await fleet.operator("DELETE", f"/v1/federations/{name}")).status_code == 204
        assert [p for p in sorted((tmp_path / "blobs").glob("*/**/*")) if p.suffix != ".note"] == kept

    play(tmp_path, script)


@pytest.mark.parametrize("end", ["stop", "delete"])
def test_an_update_that_arrives_while_its_federation_ends_is_refused_and_leaves_nothing(
    tmp_path: Path, end: str
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        work, begun, over = await fleet.due("a"), asyncio.Event(), asyncio.Event()
        body = trained(await fleet.fetch("a", work), "a")

        async def slow() -> AsyncIterator[bytes]:
            yield body[:9]
            begun.set()
            await over.wait()
            yield body[9:]

        said = {"Content-Digest": content_digest(body)}
        sent = asyncio.create_task(fleet.upload("a", work["round"], work["lease"], slow(), said))
        await begun.wait()
        assert (await fleet.operator("POST", f"{FED}/stop")).status_code == 200
        if end == "delete":
            assert (await fleet.operator("DELETE", FED)).status_code == 204
        over.set()
        if end == "delete":
            assert "federation 'fed' was deleted" in refused(await sent, "not-found")
            assert shelves(tmp_path) == set()
        else:
            assert "the federation is stopped" in refused(await sent, "wrong-phase")
            assert not list((tmp_path / "blobs").glob("fed~*/updates/*/*"))

    play(tmp_path, script)


def test_of_many_deletions_at_once_one_deletes_and_none_keeps_the_others_waiting_for_a_thread(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", min_devices=9)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        answers = await asyncio.gather(*(fleet.operator("DELETE", FED) for _ in range(9)))
        assert sorted(a.status_code for a in answers) == [204, *[404] * 8]

    async def main() -> None:
        async with served(tmp_path) as fleet:
            await asyncio.wait_for(script(fleet), LIMIT)

    asyncio.run(main())


def test_the_answer_to_a_creation_and_the_log_have_what_the_method_warns_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        said = "method fedmap: every = 4, but rounds = 4: nothing is pruned; raise rounds above every"
        for rounds, warned in ((4, True), (9, False)):
            config = settings(name=f"of{rounds}", rounds=rounds, method={"name": "fedmap", "every": 4})
            made = await fleet.operator("POST", "/v1/federations", json=config)
            assert made.status_code == 201, made.text
            assert made.json()["caution"] == (said if warned else None)
            assert (await fleet.operator("GET", f"/v1/federations/of{rounds}")).json()["caution"] is None
        assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [f"of4: {said}"]

    play(tmp_path, script)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "at another coordinator"])
def test_a_name_can_be_used_again_and_the_new_federation_is_a_new_one(tmp_path: Path, elsewhere: bool) -> None:
    """Also when another coordinator deleted and created it between two looks of this one."""

    async def script() -> None:
        async with served(tmp_path) as first, served(tmp_path) as second:
            await first.federation("a", "bb", d=LARGE)
            before = await whole(first, "a", "bb")
            await until(second, lambda f: f["phase"] == "finished")
            at = second if elsewhere else first
            assert (await at.operator("DELETE", FED)).status_code == 204
            await at.federation(d=LARGE, rounds=2)
            first.join = second.join = at.join
            for fleet, device in ((first, "a"), (second, "bb")):
                assert (await fleet.enrol(device)).status_code == 200
                await fleet.work(device)
            assert await whole(second, "a", "bb") == before
            for fleet in (first, second):
                await until(fleet, lambda f: f["phase"] == "finished")
                made = await fleet.operator("POST", f"{FED}/exports", json={"kind": "onnx"})
                assert (made.status_code, made.json()["round"]) == (202, 2), made.text  # from its own large values
            assert len(shelves(tmp_path)) == 1

    asyncio.run(script())


def test_another_coordinator_forgets_a_deleted_federation(tmp_path: Path) -> None:
    async def script() -> None:
        async with served(tmp_path) as first, served(tmp_path) as second:
            await first.federation("a", min_devices=9)
            while (await second.operator("GET", FED)).status_code != 200:
                await asyncio.sleep(0.02)
            assert (await first.operator("DELETE", FED)).status_code == 204
            while (await second.operator("GET", FED)).status_code != 404:
                await asyncio.sleep(0.02)
            refused(await second.operator("POST", f"{FED}/tokens", json={}), "not-found")

    asyncio.run(asyncio.wait_for(script(), LIMIT))


def test_a_federation_that_another_coordinator_made_anew_while_this_one_deletes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, made = LiveFederation.delete, list[LiveFederation]()

    async def script() -> None:
        async with served(tmp_path) as first, served(tmp_path) as second:
            here = first.http._transport.app.state.coordinator  # type: ignore[attr-defined]

            async def and_again(live: LiveFederation) -> None:
                await delete(live)
                while (await second.operator("GET", FED)).status_code != 404:
                    await asyncio.sleep(0.02)
                await second.federation()
                await here.look()
                made.append(here.federation("fed"))

            await first.federation("a", min_devices=9)
            while (await second.operator("GET", FED)).status_code != 200:
                await asyncio.sleep(0.02)
            monkeypatch.setattr(LiveFederation, "delete", and_again)
            assert (await first.operator("DELETE", FED)).status_code == 204
            assert here.federation("fed") is made[0]

    asyncio.run(asyncio.wait_for(script(), LIMIT))


@pytest.mark.parametrize("when", ["before the commit", "after the commit", "in the middle of the sweep"])
def test_a_coordinator_killed_while_it_deletes_has_deleted_all_or_nothing_and_the_restart_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise RuntimeError

    delete = Rows.delete_federation

    def late(rows: Rows) -> None:
        delete(rows)
        raise RuntimeError

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        await fleet.train("a")
        await fleet.operator("POST", f"{FED}/stop")
        with monkeypatch.context() as m:
            if when == "before the commit":
                m.setattr(Rows, "delete_federation", late)
            elif when == "after the commit":
                m.setattr(FolderBlobs, "drop", dies)
            else:
                m.setattr("shutil.rmtree", dies)
            refused(await fleet.operator("DELETE", FED), "internal-error")  # as if killed there: nothing else happens

    async def again(fleet: Fleet) -> None:
        gone = when != "before the commit"
        assert (await fleet.operator("GET", FED)).status_code == (404 if gone else 200)
        if gone:
            await soon(lambda: shelves(tmp_path) == set())
            await fleet.federation("a", d=LARGE)
            assert (await fleet.operator("GET", FED)).status_code == 200
        else:
            assert (await fleet.operator("DELETE", FED)).status_code == 204

    play(tmp_path, script)
    play(tmp_path, again)
    play(tmp_path, lambda fleet: soon(lambda: len(shelves(tmp_path)) == (when != "before the commit")))


def test_a_kill_at_any_moment_of_a_deletion_leaves_a_folder_that_starts_and_is_clean(tmp_path: Path) -> None:
    """Real processes: created, stopped, deleted; killed at a moment that moves through the deletion."""
    folder = tmp_path / "data"
    for delay in (0.0, 0.002, 0.006):
        with coordinator(folder) as (process, url), Operator(url, OPERATOR) as operator:
            bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle", LARGE))
            with httpx.Client(base_url=url, headers=bearer(OPERATOR), timeout=LIMIT, trust_env=False) as http:
                if http.get(FED).status_code == 404:
                    operator.create(FederationConfig.model_validate(settings(bundle=bundle)))
                deleting = subprocess.Popen(
                    [sys.executable, "-c", "import httpx, sys; httpx.delete(sys.argv[1], headers={'Authorization':"
                     "'Bearer ' + sys.argv[2]}, timeout=60, trust_env=False)", url + FED, OPERATOR],
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                end = time.monotonic() + LIMIT
                while http.get(FED).status_code == 200 and time.monotonic() < end and delay:
                    pass
                time.sleep(delay)
                os.kill(process.pid, signal.SIGKILL)
                deleting.wait()
    with coordinator(folder) as (_, url), Operator(url, OPERATOR) as operator:
        if operator.federations():
            operator.delete("fed")
        assert operator.federations() == []
        end = time.monotonic() + LIMIT
        while shelves(folder):
            assert time.monotonic() < end
            time.sleep(0.02)


# --- change


def test_a_change_that_was_answered_survives_a_kill(tmp_path: Path) -> None:
    for kills in range(2):
        with coordinator(tmp_path / "data") as (process, url), Operator(url, OPERATOR) as operator:
            if not kills:
                bundle = operator.upload_bundle(write_bundle(tmp_path / "bundle"))
                operator.create(FederationConfig.model_validate(settings(bundle=bundle)))
                operator.change("fed", Change(rounds=7, deadline_seconds=9.5))
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                continue
            config = operator.federation("fed").config
            assert config is not None
            assert (config.rounds, config.deadline_seconds, config.cohort) == (7, 9.5, 2)


def test_a_running_federation_takes_a_new_deadline_number_of_rounds_and_cohort(tmp_path: Path) -> None:
    async def script() -> None:
        async with served(tmp_path) as fleet, served(tmp_path) as other:
            await fleet.federation("a", "bb", rounds=2)
            work = await fleet.work("a")
            assert (work["rounds"], work["deadline_in"] < 3601) == (2, True)
            answer = await fleet.operator("PATCH", FED, json={"rounds": 3, "deadline_seconds": 7200.0, "cohort": 1})
            assert answer.status_code == 200, answer.text
            shown = answer.json()
            assert (shown["config"]["rounds"], shown["config"]["cohort"], shown["deadline_in"] > 3601) == (3, 1, True)
            work = await fleet.work("a")
            assert (work["rounds"], work["deadline_in"] > 3601) == (2, True)
            for device in ("a", "bb"):
                assert (await fleet.train(device)).status_code == 201
            for _ in (2, 3):
                found = [await at.work(d) for at, d in ((fleet, "a"), (other, "bb"))]
                while [w["status"] for w in found].count("train") != 1:
                    found = [await at.work(d) for at, d in ((fleet, "a"), (other, "bb"))]
                    await asyncio.sleep(0.02)
                ((chosen, work),) = [(d, w) for d, w in zip("ab", found, strict=True) if w["status"] == "train"]
                assert work["rounds"] == 3
                await other.train(chosen if chosen == "a" else "bb")
            assert (await other.due("a"))["status"] == "finish"
            assert [r["round"] for r in (await fleet.operator("GET", f"{FED}/rounds")).json()] == [1, 2, 3]
            assert "finished" in refused(await fleet.operator("PATCH", FED, json={"rounds": 9}), "wrong-phase")

    asyncio.run(asyncio.wait_for(script(), 2 * LIMIT))


def test_a_change_made_of_settings_that_another_operator_has_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    async def script() -> None:
        async with served(tmp_path) as fleet, served(tmp_path) as other:
            await fleet.federation("a", "bb", rounds=2)
            seen = (await fleet.operator("GET", FED)).headers["etag"]
            assert (await fleet.train("a")).status_code == 201
            assert (await other.operator("GET", FED)).headers["etag"] == seen  # a round goes on: nothing to overwrite
            mine, theirs = ({"If-Match": seen}, {"If-Match": f'"0", W/{seen}'})
            changes = [fleet.operator("PATCH", FED, mine, json={"rounds": 5}),
                       other.operator("PATCH", FED, theirs, json={"deadline_seconds": 7200.0})]  # fmt: skip
            first, second = sorted(await asyncio.gather(*changes), key=lambda answer: answer.status_code)
            assert first.status_code == 200, first.text
            assert "the settings changed since they were read: " in refused(second, "changed-meanwhile")
            now = (await other.operator("GET", FED)).headers["etag"]
            assert (first.headers["etag"], now != seen) == (now, True)
            assert (await other.operator("GET", FED)).json()["config"] == first.json()["config"]
            for match in ({"If-Match": now}, {"If-Match": '*, "0"'}, {}):
                assert (await fleet.operator("PATCH", FED, match, json={"min_updates": 2})).status_code == 200
            for change in ({"min_updates": 1}, {}):
                refused(await fleet.operator("PATCH", FED, {"If-Match": now}, json=change), "changed-meanwhile")
            assert (await fleet.operator("GET", FED)).json()["config"]["min_updates"] == 2

    asyncio.run(asyncio.wait_for(script(), 2 * LIMIT))


def test_what_cannot_change_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", rounds=5)
        for name in ("method", "bundle", "seed", "name"):
            detail = refused(await fleet.operator("PATCH", FED, json={name: settings()[name]}), "bad-message")
            assert f": {name} is fixed at the creation" in detail
            assert "Value error" not in detail
        assert "no such setting" in refused(await fleet.operator("PATCH", FED, json={"colour": 1}), "bad-message")
        for change in ({"rounds": 1}, {"cohort": 9}, {"min_devices": 1}, {"min_updates": 3}):
            refused(await fleet.operator("PATCH", FED, json=change), "cannot-change")
        assert (await fleet.operator("PATCH", FED, json={})).status_code == 200
        assert (await fleet.operator("GET", FED)).json()["config"]["rounds"] == 5

    play(tmp_path, script)


def test_fewer_devices_start_a_federation_that_waited_and_the_change_survives_a_restart(tmp_path: Path) -> None:
    async def recruits(fleet: Fleet) -> None:
        await fleet.federation("a", min_devices=3, rounds=9)
        assert (await fleet.operator("GET", FED)).json()["phase"] == "recruiting"
        assert (await fleet.operator("PATCH", FED, json={"min_devices": 1, "rounds": 2})).json()["phase"] == "running"

    async def restarted(fleet: Fleet) -> None:
        found = (await fleet.operator("GET", FED)).json()
        assert (found["phase"], found["config"]["rounds"], found["config"]["min_devices"]) == ("running", 2, 1)
        await whole(fleet, "a")

    play(tmp_path, recruits)
    play(tmp_path, restarted)


def test_a_number_of_rounds_that_the_method_cannot_use_is_refused(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        method = {"name": "fedavg"}
        await fleet.federation(min_devices=3, rounds=9, method=method)

        def start(_: FedAvg, course: Any) -> Any:
            raise ConfigError(f"{course.rounds} rounds are too few")

        with pytest.MonkeyPatch.context() as m:
            m.setattr(FedAvg, "start", start)
            said = refused(await fleet.operator("PATCH", FED, json={"rounds": 2}), "bad-config")
            assert "2 rounds are too few; the method's settings are fixed, only the rounds can change" in said

    play(tmp_path, script)


# --- lists


@pytest.mark.usefixtures("each_database")
def test_every_list_comes_in_pages_that_hold_each_item_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", "ccc", "dddd", rounds=5, cohort=4, min_devices=4)
        for _ in range(5):
            for device in ("a", "bb", "ccc", "dddd"):
                assert (await fleet.train(device)).status_code == 201
        await fleet.due("a")
        for name in ("gamma", "alpha", "beta"):
            made = await fleet.operator("POST", "/v1/federations", json=settings(name=name, method={"name": "stc"}))
            assert made.status_code == 201
        for _ in range(4):
            await fleet.operator("POST", f"{FED}/tokens", json={})
            await fleet.operator("POST", "/v1/viewers", json={})
        for d in (14, 16, 18):
            await fleet.bundle(d)
        for path, key, most in (
            ("/v1/federations", "id", 4),
            (f"{FED}/devices", "device", 4),
            (f"{FED}/rounds", "round", 5),
            (f"{FED}/tokens", "id", 5),
            ("/v1/viewers", "id", 4),
            ("/v1/bundles", "digest", 4),
        ):
            (whole_list,) = await pages(fleet, path, 1000)
            assert len(whole_list) == most, path
            for limit in (1, 2, 3, most):
                cut = await pages(fleet, path, limit)
                assert [item for page in cut for item in page] == whole_list, path
                assert [len(page) for page in cut[:-1]] == [limit] * (len(cut) - 1)
                assert len(cut) == -(-most // limit), path
            assert len({item[key] for item in whole_list}) == most
        assert [f["id"] for f in (await fleet.operator("GET", "/v1/federations")).json()][1:] == [
            "gamma",
            "alpha",
            "beta",
        ]
        for query, ids in (
            ("phase=finished", ["fed"]), ("method=stc", ["gamma", "alpha", "beta"]), ("prefix=al", ["alpha"]),
            ("phase=recruiting&prefix=b&limit=1", ["beta"]), ("phase=paused", []),
        ):  # fmt: skip
            assert [f["id"] for f in (await fleet.operator("GET", f"/v1/federations?{query}")).json()] == ids
        odd = refused(await fleet.operator("GET", "/v1/federations?method=fedmusk"), "bad-message")
        assert "query.method = 'fedmusk': there is no such method; choose one of bnn, coupled, " in odd
        assert odd.endswith("; did you mean 'fedmask'?")
        assert (await fleet.operator("GET", "/v1/federations?method=fedmask")).json() == []
        monkeypatch.setattr(operator, "installed_methods", dict)  # federations outlive the package of their method
        assert len((await fleet.operator("GET", "/v1/federations?method=stc")).json()) == 3
        assert [r["round"] for p in await pages(fleet, f"{FED}/rounds?from=2&to=4", 2) for r in p] == [2, 3, 4]
        await fleet.operator("DELETE", f"{FED}/devices/bb")
        assert (await fleet.enrol("new")).status_code == 200
        states = {s: [d["device"] for p in await pages(fleet, f"{FED}/devices?state={s}", 2) for d in p]
                  for s in ("ready", "removed", "new", "failed")}  # fmt: skip
        assert states == {"ready": ["a", "ccc", "dddd"], "removed": ["bb"], "new": ["new"], "failed": []}
        assert (await fleet.operator("GET", f"{FED}/devices?state=new")).json()[0]["state"] == "new"

    play(tmp_path, script)


def test_addresses_in_answers_hold_below_the_path_of_a_proxy(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.bundle()
        outside = httpx.URL("https://example.org/fleet/v1/federations?prefix=a&limit=1")
        for name in ("a", "ab"):
            made = await fleet.operator("POST", "/v1/federations", json=settings(name=name))
            assert str(outside.join(made.headers["Location"])) == f"https://example.org/fleet/v1/federations/{name}"
        listed = await fleet.operator("GET", "/v1/federations?prefix=a&limit=1")
        following = outside.join(listed.links["next"]["url"])
        assert following.path == outside.path
        assert dict(following.params) == {"prefix": "a", "limit": "1", "cursor": following.params["cursor"]}

    play(tmp_path, script)


@pytest.mark.parametrize("query", ["cursor=x", "cursor=WyJhIl0", "cursor=WzFd", "limit=0", "limit=1001", "cursor=%F0"])
def test_a_cursor_that_is_not_of_the_list_is_refused(tmp_path: Path, query: str) -> None:
    async def script(fleet: Fleet) -> None:
        refused(await fleet.operator("GET", f"/v1/federations?{query}"), "bad-message")

    play(tmp_path, script)


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize(
    ("path", "place"),
    [
        (f"{FED}/rounds", "[2147483648]"),
        (f"{FED}/rounds", "[9223372036854775807]"),
        (f"{FED}/rounds", f"[1{'0' * 100}]"),
        (f"{FED}/devices", '["\\ud800"]'),
        (f"{FED}/tokens", '["\\u0000"]'),
        ("/v1/bundles", '[NaN,"a"]'),
        ("/v1/viewers", '["\\ud800"]'),
    ],
)
def test_a_cursor_that_no_database_takes_is_refused(tmp_path: Path, path: str, place: str) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a")
        cursor = urlsafe_b64encode(place.encode()).decode()
        refused(await fleet.operator("GET", f"{path}?cursor={cursor}"), "bad-message")

    play(tmp_path, script)


def test_join_tokens_are_listed_without_the_secret_and_a_revoked_one_admits_nobody(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", min_devices=9)
        listed = await fleet.operator("GET", f"{FED}/tokens")
        ((token),) = listed.json()
        assert (token["uses_left"], fleet.join in listed.text) == (999, False)
        assert token["id"] == digest(fleet.join.encode())[:16]
        assert (await fleet.operator("DELETE", f"{FED}/tokens/{token['id']}")).status_code == 204
        refused(await fleet.operator("DELETE", f"{FED}/tokens/{token['id']}"), "not-found")
        refused(await fleet.enrol("bb"), "unauthorized")
        assert (await fleet.work("a"))["status"] == "wait"

    play(tmp_path, script)


def test_a_stopped_federation_gives_no_join_token_and_a_finished_one_does(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        await whole(fleet, "a", "bb")
        assert (await fleet.operator("POST", f"{FED}/tokens", json={})).status_code == 201
        await fleet.operator("DELETE", FED)
        await fleet.federation()
        await fleet.operator("POST", f"{FED}/stop")
        said = refused(await fleet.operator("POST", f"{FED}/tokens", json={}), "wrong-phase")
        assert said == "fed is stopped and enrols no more devices; create another federation"

    play(tmp_path, script)


def test_a_bundle_is_shown_in_figures_and_a_method_with_its_schema(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation(min_devices=9)
        address = settings()["bundle"]
        found = (await fleet.operator("GET", f"/v1/bundles/{address}/summary")).json()
        assert (found["name"], found["parameters"], found["federations"], found["missing"]) == (
            "small",
            12,
            ["fed"],
            [],
        )
        assert (await fleet.operator("GET", "/v1/bundles")).json() == [found]
        refused(await fleet.operator("GET", f"/v1/bundles/{'0' * 64}/summary"), "not-found")
        (fedavg,) = [m for m in (await fleet.operator("GET", "/v1/methods")).json() if m["name"] == "fedavg"]
        assert fedavg == (await fleet.operator("GET", "/v1/methods/fedavg")).json()
        assert fedavg["description"].startswith("Federated averaging")
        assert fedavg["settings"]["properties"].keys() == fedavg["defaults"].keys() >= {"epochs", "lr"}
        refused(await fleet.operator("GET", "/v1/methods/fedmusk"), "not-found")

    play(tmp_path, script)


def test_a_deletion_finds_room_on_a_full_disk_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare, connected, held = tmp_path / "spare", Database._connected, blobs._held

    def full(database: Database, *written: str) -> Any:
        if written and spare.exists():
            raise StorageFullError("the disk is full")
        return connected(database, *written)

    def no_note(path: Path) -> int | None:
        if spare.exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        return held(path)

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", start="manual")
        bundle, end = await fleet.bundle(), time.monotonic() + LIMIT
        while not spare.exists():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        monkeypatch.setattr(Database, "_connected", full)
        monkeypatch.setattr(blobs, "_held", no_note)
        refused(await fleet.operator("POST", "/v1/federations/fed/tokens", json={}), "storage-full")
        for path in ("/v1/federations/fed", f"/v1/bundles/{bundle}"):
            assert (await fleet.operator("DELETE", path)).status_code == 204
            assert spare.stat().st_size == SPARE_BYTES

    play(tmp_path, script)
