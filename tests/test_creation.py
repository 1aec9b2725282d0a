"""A bundle or a federation is there whole or not at all, whenever its coordinator dies; no blob stays without a row."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import databases
import pytest
from coordination import LARGE, LIMIT, Fleet, manifest, play, refused, settings, whole
from sqlalchemy import insert

from coord_server import creation
from coord_server.store import Store, database, in_turn, open_store, tables
from coord_server.store.blobs import BUNDLES, FolderBlobs
from coord_server.store.metadata import Metadata
from edge_client.bundle import Model, digest
from edge_client.errors import StorageFullError, StorageUnreachableError

SWEPT = ("fed~", "incoming/")  # where the sweep of the source's own rounds goes on
NEXT = settings(name="next", bundle=digest(manifest(LARGE).to_bytes()), start_from={"federation": "fed"})
FIRST, SECOND = "d" * 64, "e" * 64


class Killed(BaseException):
    """Raised where the coordinator is killed: nothing that it would still do is done."""


def stored(folder: Path, *but: str) -> set[str]:
    """The blobs by their addresses, without those below the folders `but`."""
    blobs = folder / "blobs"
    walked = os.walk(blobs)  # which minds no folder that is dropped meanwhile
    found = {os.path.relpath(f"{folder_}/{name}", blobs) for folder_, _, names in walked for name in names}
    return {address for address in found if not address.startswith(but)}


async def come_true(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@contextmanager
def cut(store: Store, shelf: str) -> Iterator[None]:
    """`changing` of a coordinator that is killed: the note stays, nothing is dropped."""
    with store.blobs.noted(shelf):
        yield


def killed(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, calls: int) -> None:
    """The coordinator is killed at the start of a call of a function, after so many that end."""
    function, left = getattr(kind, name), [calls]

    def counted(*given: Any, **more: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return function(*given, **more)

    monkeypatch.setattr(kind, name, counted)
    monkeypatch.setattr(Store, "changing", cut)


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize(
    ("kind", "name", "calls"),
    [*((FolderBlobs, "put", n) for n in range(4)), (Metadata, "add_federation", 0)],
    ids=["at the manifest", "at the weights", "at the graph", "at the first values", "at the rows"],
)  # fmt: skip
def test_a_creation_whose_coordinator_was_killed_leaves_nothing_and_can_be_repeated(
    kind: type, name: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set[str]()

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        await whole(fleet, "a", "bb")
        before.update(stored(tmp_path, *SWEPT))
        with monkeypatch.context() as m:
            killed(m, kind, name, calls)
            with pytest.raises(Killed):
                await fleet.operator("POST", "/v1/federations", json=NEXT)
        assert len(stored(tmp_path, *SWEPT)) == len(before) + (4 if name == "add_federation" else calls)

    async def again(fleet: Fleet) -> None:
        await come_true(lambda: stored(tmp_path, "fed~") <= before)
        assert len((await fleet.operator("GET", "/v1/bundles")).json()) == 1
        made = await fleet.operator("POST", "/v1/federations", json=NEXT)
        assert made.status_code == 201, made.text
        assert len(stored(tmp_path, *SWEPT) - before) == 4
        shown = await fleet.operator("GET", f"/v1/bundles/{made.json()['config']['bundle']}/summary")
        assert shown.json()["missing"] == []
        assert (await fleet.operator("GET", "/v1/federations/next/state")).status_code == 200

    play(tmp_path, script)
    play(tmp_path, again)


def test_a_creation_for_which_the_disk_has_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FolderBlobs.put

    def full(blobs: FolderBlobs, shelf: str, data: bytes) -> str:
        if shelf.endswith("values/0"):
            raise StorageFullError("no room")
        return put(blobs, shelf, data)

    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        await whole(fleet, "a", "bb")
        before = stored(tmp_path, *SWEPT)
        with monkeypatch.context() as m:
            m.setattr(FolderBlobs, "put", full)
            refused(await fleet.operator("POST", "/v1/federations", json=NEXT), "storage-full")
        assert stored(tmp_path, *SWEPT) <= before
        assert len((await fleet.operator("GET", "/v1/bundles")).json()) == 1

    play(tmp_path, script)


@pytest.mark.usefixtures("each_database")
def test_no_writer_waits_while_blobs_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that dies there holds no lock of the database."""
    put, written = FolderBlobs.put, list[str]()
    monkeypatch.setattr(database, "PATIENCE", 100)
    other = list[Metadata]()

    def slow(blobs: FolderBlobs, shelf: str, data: bytes) -> str:
        other[0].add_bundle(FIRST, 1.0)
        other[0].delete_bundle(FIRST)
        other[0].commit("next", 0, "s", [])
        written.append(shelf)
        return put(blobs, shelf, data)

    async def script(fleet: Fleet) -> None:
        url = databases.url_of(tmp_path) or f"sqlite:///{tmp_path / 'coordinator.db'}"
        other.append(Metadata(url))
        with monkeypatch.context() as m:
            m.setattr(FolderBlobs, "put", slow)
            await fleet.federation("a", "bb", d=LARGE)
        await whole(fleet, "a", "bb")
        monkeypatch.setattr(FolderBlobs, "put", slow)
        assert (await fleet.operator("POST", "/v1/federations", json=NEXT)).status_code == 201
        assert len(written) == 6
        other[0].close()

    play(tmp_path, script)


def test_a_waiting_writer_outlasts_the_silence_of_a_coordinator_that_lost_its_power() -> None:
    assert database.SILENCE < database.PATIENCE


def test_a_start_beside_a_creation_drops_nothing_and_the_next_one_what_was_cut_short(tmp_path: Path) -> None:
    one, other = open_store(tmp_path / "data"), open_store(tmp_path / "data")
    shelf, fed = f"bundles/{FIRST}", "fed~1"
    with one.changing(shelf), one.changing(fed):
        manifest_, values = one.blobs.put(shelf, b"manifest"), one.blobs.put(f"{fed}/values/0", b"values")
        start = Thread(target=lambda: (open_store(tmp_path / "data").close(), other.sweep()))
        start.start()
        start.join(0.5)
        assert one.blobs.read(shelf, manifest_) == b"manifest"
        assert one.blobs.read(f"{fed}/values/0", values) == b"values"
        one.metadata.add_bundle(FIRST, 1.0)
    start.join()
    assert one.blobs.read(shelf, manifest_) == b"manifest"
    assert one.blobs.shelves("fed~1") == []

    def cut_short() -> None:
        with one.changing(fed):
            one.blobs.put(f"{fed}/values/0", b"values")
            raise StorageFullError("no room")

    with pytest.raises(StorageFullError):
        cut_short()
    assert one.blobs.shelves("fed~1") == []
    for store in (one, other):
        store.close()


def test_a_start_leaves_alone_what_the_database_has_never_heard_of(tmp_path: Path) -> None:
    """Such as the blobs that are newer than a database that was restored by mistake, or a user's folder."""
    store = open_store(tmp_path / "data")
    store.blobs.put(f"bundles/{FIRST}", b"manifest")
    store.blobs.put("fed/values/1", b"values")
    before = stored(tmp_path / "data", "incoming")
    store.sweep()
    assert len(before) == 2
    assert stored(tmp_path / "data", "incoming") == before
    store.close()


def test_the_blobs_of_a_deleted_bundle_that_is_there_again_stay(tmp_path: Path) -> None:
    """Also with a database that is older or newer than the folder: only notes, which lie beside the blobs, count."""
    store = open_store(tmp_path / "data")

    def add() -> None:
        with store.changing(f"bundles/{FIRST}"):
            store.blobs.put(f"bundles/{FIRST}", b"manifest")
            store.metadata.add_bundle(FIRST, 1.0)

    def delete() -> None:
        with store.changing(f"bundles/{FIRST}"):
            assert store.metadata.delete_bundle(FIRST) == []

    add()
    delete()
    assert (store.blobs.shelves("bundles"), store.blobs.notes()) == ([], [f"bundles/{FIRST}"])
    add()
    assert store.blobs.notes() == []
    assert store.metadata.delete_bundle(FIRST) == []  # as an older database has it
    store.sweep()
    assert store.blobs.shelves("bundles") == [FIRST]
    store.close()


def test_what_a_thread_writes_to_a_federation_that_was_just_deleted_goes_with_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    with store.changing("fed~1"):
        store.blobs.put("fed~1/values/0", b"values")
    store.blobs.put("fed~1/updates/3", b"late")
    store.sweep()
    assert (stored(tmp_path / "data"), store.blobs.notes()) == (set(), [])
    store.close()


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("shelf", [f"bundles/{FIRST}", "fed~1"])
def test_blobs_stay_whose_row_is_still_being_committed_when_its_connection_is_lost(tmp_path: Path, shelf: str) -> None:
    one = open_store(tmp_path / "data", databases.url_of(tmp_path))
    other, names = open_store(tmp_path / "data", databases.url_of(tmp_path)), list[bool]()
    asked = Thread(target=lambda: names.append(other.metadata.names(shelf)))
    with one.metadata.database.writing("fed", BUNDLES) as c:  # the server's transaction, whose client is gone
        c.execute(insert(tables.bundles).values(digest=FIRST, added_at=1.0))
        row = {"id": "fed", "config": "{}", "bundle": FIRST, "state": "s", "created_at": 1.0, "values_sha256": FIRST}
        c.execute(insert(tables.federations).values(**row, version=1, first=1))
        asked.start()
        asked.join(0.3)
        assert names == []
    asked.join()
    assert names == [True]
    for store in (one, other):
        store.close()


def test_changes_of_one_bundle_take_turns_and_none_waits_in_a_thread(tmp_path: Path) -> None:
    """More of them than there are threads, and all but one stand in line."""
    stores = [open_store(tmp_path / "data") for _ in range(3)]
    here, most = [0], [0]

    def change(store: Store) -> None:
        with store.changing(f"bundles/{FIRST}"):
            here[0] += 1
            most[0] = max(most[0], here[0])
            time.sleep(0.02)
            store.metadata.add_bundle(FIRST, 1.0)
            here[0] -= 1

    async def script() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        with stores[2].changing(f"bundles/{FIRST}"):
            stores[2].metadata.add_bundle(FIRST, 1.0)
            waiting = asyncio.gather(*(in_turn(partial(change, store)) for store in stores[:2] * 3))
            await asyncio.sleep(0.2)
            assert most == [0]
            await asyncio.wait_for(asyncio.to_thread(int), LIMIT)
        await waiting

    asyncio.run(script())
    assert most == [1]
    assert stores[0].blobs.notes() == []
    for store in stores:
        store.close()


def test_a_shelf_that_another_process_keeps_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator that stands still keeps no other one from answering, or from ending while it starts."""
    one, other = open_store(tmp_path / "data"), open_store(tmp_path / "data")

    def change() -> None:
        with other.changing("fed~1"):
            pass

    with one.changing("fed~1"):
        other.sweep()
        assert caplog.messages == []  # the other one drops what is left
        monkeypatch.setattr("coord_server.store.PATIENCE", 0.1)
        said = "another request is changing 'fed'; send this one again soon"
        with pytest.raises(StorageUnreachableError, match=said):
            asyncio.run(in_turn(change))
        assert other.blobs.notes() == ["fed~1"]
    change()
    one.close()
    other.close()


def test_a_deletion_that_waits_takes_none_of_the_room_that_another_one_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, spare = open_store(tmp_path / "data"), open_store(tmp_path / "data"), tmp_path / "data" / "spare"
    one.sweep()
    assert spare.exists()

    def delete() -> None:
        with other.changing("fed~1", deletes=True):
            pass

    with one.changing("fed~1", deletes=True):
        monkeypatch.setattr("coord_server.store.PATIENCE", 0.1)
        with pytest.raises(StorageUnreachableError, match="another request"):
            asyncio.run(in_turn(delete))
        assert not spare.exists()
    assert spare.exists()
    one.close()
    other.close()


def test_what_left_its_place_before_a_kill_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    with monkeypatch.context() as patched, store.changing(f"bundles/{FIRST}"):
        patched.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        store.blobs.put(f"bundles/{FIRST}", b"manifest")
        store.blobs.drop(f"bundles/{FIRST}")
    assert len(stored(tmp_path / "data")) == 2  # and its note
    store.close()
    foreign = tmp_path / "data" / "blobs" / "incoming" / "backup"
    foreign.mkdir()
    (foreign / "mine").touch()
    store = open_store(tmp_path / "data")
    store.sweep()
    store.close()
    assert stored(tmp_path / "data") == {"incoming/backup/mine"}


def test_a_deletion_whose_blobs_cannot_be_dropped_is_a_deletion_and_the_next_start_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = os.rename

    def stuck(source: Path, target: Path) -> None:
        if source.parent.name == "bundles":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    async def script(fleet: Fleet) -> None:
        bundle = await fleet.bundle()
        with monkeypatch.context() as m:
            m.setattr("os.rename", stuck)
            assert (await fleet.operator("DELETE", f"/v1/bundles/{bundle}")).status_code == 204
        assert (await fleet.operator("GET", f"/v1/bundles/{bundle}")).status_code == 404
        assert f"blobs of bundles/{bundle} may be left, the next start tries again" in caplog.text
        assert stored(tmp_path, "incoming/")

    play(tmp_path, script)
    play(tmp_path, lambda fleet: come_true(lambda: stored(tmp_path) == set()))


def test_a_creation_whose_bundle_is_deleted_meanwhile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = creation.load_model

    async def script(fleet: Fleet) -> None:
        bundle = await fleet.bundle()
        http, loop = fleet.operator("DELETE", f"/v1/bundles/{bundle}"), asyncio.get_running_loop()

        def late(store: Store, digest: str) -> Model:
            asyncio.run_coroutine_threadsafe(http, loop).result(LIMIT)
            return load(store, digest)

        monkeypatch.setattr(creation, "load_model", late)
        answer = await fleet.operator("POST", "/v1/federations", json=settings(bundle=bundle))
        assert refused(answer, "not-found") == f"bundle {bundle} was deleted meanwhile; POST its manifest again"

    play(tmp_path, script)
