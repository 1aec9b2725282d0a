"""A bundle or a federation is there whole or not at all, whenever its coordinator dies; no blob stays without a row."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import databases
import pytest
from coordination import LARGE, LIMIT, Fleet, manifest, play, refused, settings, whole

from coord_server.store import Store, database, open_store
from coord_server.store.blobs import FolderBlobs
from coord_server.store.metadata import Metadata
from coord_server.store.values import Content
from edge_client.bundle import digest
from edge_client.errors import StorageFullError, StorageUnreachableError

SWEPT = ("fed/", "incoming/")  # where the sweep of the source's own rounds goes on
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


def killed(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, calls: int) -> None:
    """The coordinator is killed at the start of a call of a function, after so many that end."""
    function, left = getattr(kind, name), [calls]

    def counted(*given: Any, **more: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return function(*given, **more)

    monkeypatch.setattr(kind, name, counted)
    monkeypatch.setattr(Store, "sweep", lambda store: None)


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
        await come_true(lambda: stored(tmp_path, "fed/") <= before)
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


def test_a_sweep_beside_a_creation_drops_nothing_and_the_next_one_what_was_cut_short(tmp_path: Path) -> None:
    one, other = open_store(tmp_path / "data"), open_store(tmp_path / "data")
    shelf = f"bundles/{FIRST}"
    with one.creating():
        one.metadata.expect_bundle(FIRST)
        assert one.metadata.expect_federation("fed") == 0
        manifest_, values = one.blobs.put(shelf, b"manifest"), one.blobs.put("fed/values/0", b"values")
        other.sweep()
        assert one.blobs.read(shelf, manifest_) == b"manifest"
        assert one.blobs.read("fed/values/0", values) == b"values"
        one.metadata.add_bundle(FIRST, 1.0)
    other.sweep()
    assert one.blobs.read(shelf, manifest_) == b"manifest"
    assert one.blobs.shelves("fed") == []

    def cut_short() -> None:
        with one.creating():
            assert one.metadata.expect_federation("fed") == 1
            one.blobs.put("fed~1/values/0", b"values")
            raise StorageFullError("no room")

    with pytest.raises(StorageFullError):
        cut_short()
    assert one.blobs.shelves("fed~1") == []
    for store in (one, other):
        store.close()


def test_a_sweep_leaves_alone_what_the_database_has_never_heard_of(tmp_path: Path) -> None:
    """Such as the blobs that are newer than a database that was restored by mistake, or a user's folder."""
    store = open_store(tmp_path / "data")
    store.blobs.put(f"bundles/{FIRST}", b"manifest")
    store.blobs.put("fed/values/1", b"values")
    before = stored(tmp_path / "data", "incoming")
    store.sweep()
    assert len(before) == 2
    assert stored(tmp_path / "data", "incoming") == before
    store.close()


def test_of_two_creations_of_one_name_the_later_one_counts(tmp_path: Path) -> None:
    """A federation begins above every version that its name ever had."""
    store = open_store(tmp_path / "data")
    store.metadata.add_bundle(FIRST, 1.0)
    older, newer = store.metadata.expect_federation("fed"), store.metadata.expect_federation("fed")
    row = ("fed", "{}", FIRST, "s0", Content("0" * 64, b"g"), 1.0)
    assert store.metadata.add_federation(*row, older or 0) == "taken"
    assert store.metadata.add_federation(*row, newer or 0) == "added"
    assert (older, store.metadata.head("fed").first, store.metadata.expect_federation("fed")) == (0, 1, None)
    store.close()


def test_what_is_deleted_beside_a_creation_is_dropped_when_the_creation_ends(tmp_path: Path) -> None:
    one, other = open_store(tmp_path / "data"), open_store(tmp_path / "data")
    with one.creating():
        one.metadata.add_bundle(FIRST, 1.0)
        one.blobs.put(f"bundles/{FIRST}", b"manifest")
    with one.creating():
        assert other.metadata.delete_bundle(FIRST) == []
        other.sweep()
        assert other.blobs.shelves("bundles") == [FIRST]
    assert other.blobs.shelves("bundles") == []
    for store in (one, other):
        store.close()


def test_no_mark_of_what_may_be_swept_covers_a_federation_that_is_there(tmp_path: Path) -> None:
    """A coordinator of an older version drops the blobs of every federation that a mark covers."""
    store = open_store(tmp_path / "data")
    store.metadata.add_bundle(FIRST, 1.0)
    for version in (0, 3):
        first = store.metadata.expect_federation("fed")
        assert first == version
        row = ("fed", "{}", FIRST, "s0", Content("0" * 64, b"g"), 1.0)
        assert store.metadata.add_federation(*row, first) == "added"
        assert store.metadata.deleted()["fed"] == first - 1
        assert store.metadata.commit("fed", first, "s1", [])
        assert store.metadata.delete_federation("fed", first + 1)
    store.close()


def test_a_sweep_removes_files_without_the_lock_so_a_slow_disk_keeps_no_creation_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remove, met = open_store(tmp_path / "data"), FolderBlobs.remove, list[Path]()
    store.metadata.expect_bundle(FIRST)
    store.blobs.put(f"bundles/{FIRST}", b"manifest")

    def slow(blobs: FolderBlobs, aside: Path) -> None:
        with os.fdopen(os.open(tmp_path / "data" / "sweep", os.O_RDWR)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as a creation takes it
        assert store.blobs.shelves("bundles") == []
        remove(blobs, aside)
        met.append(aside)

    monkeypatch.setattr(FolderBlobs, "remove", slow)
    store.sweep()
    assert [aside.exists() for aside in met] == [False]
    store.close()


def test_what_a_sweep_set_aside_before_it_was_killed_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "data")
    store.metadata.expect_bundle(FIRST)
    store.blobs.put(f"bundles/{FIRST}", b"manifest")
    with monkeypatch.context() as patched:
        patched.setattr(FolderBlobs, "remove", lambda blobs, aside: None)
        store.sweep()
    assert len(stored(tmp_path / "data")) == 1
    store.close()
    foreign = tmp_path / "data" / "blobs" / "incoming" / "backup"
    foreign.mkdir()
    (foreign / "mine").touch()
    open_store(tmp_path / "data").close()
    assert stored(tmp_path / "data") == {"incoming/backup/mine"}


def test_a_deletion_beside_another_sweep_is_swept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sweep may have asked what is gone before this deletion; this one waits for its end."""
    one, other = open_store(tmp_path / "data"), open_store(tmp_path / "data")
    for bundle in (FIRST, SECOND):
        with one.creating():
            one.metadata.add_bundle(bundle, 1.0)
            one.blobs.put(f"bundles/{bundle}", b"manifest")
    set_aside, sweeps = FolderBlobs.set_aside, list[Thread]()

    def late(blobs: FolderBlobs, shelf: str) -> Path:
        if not sweeps:
            assert other.metadata.delete_bundle(SECOND) == []
            sweeps.append(Thread(target=other.sweep))
            sweeps[0].start()
            sweeps[0].join(0.5)  # it has given up, or waits
        return set_aside(blobs, shelf)

    monkeypatch.setattr(FolderBlobs, "set_aside", late)
    assert one.metadata.delete_bundle(FIRST) == []
    one.sweep()
    sweeps[0].join()
    assert one.blobs.shelves("bundles") == []
    for store in (one, other):
        store.close()


def test_a_shelf_that_cannot_be_moved_keeps_no_sweep_from_the_others_and_the_log_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, rename = open_store(tmp_path / "data"), os.rename
    for bundle in (FIRST, SECOND):
        store.metadata.expect_bundle(bundle)
        store.blobs.put(f"bundles/{bundle}", b"manifest")

    def stuck(source: Path, target: Path) -> None:
        if source.name == FIRST:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.rename", stuck)
        store.sweep()
        assert [os.path.dirname(address) for address in stored(tmp_path / "data")] == [f"bundles/{FIRST}"]
    assert f"the blobs of bundles/{FIRST} were not dropped, a later sweep tries again: Permission denied" in caplog.text
    store.sweep()
    assert stored(tmp_path / "data") == set()
    store.close()


def test_a_deletion_whose_sweep_fails_is_a_deletion_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(metadata: Metadata) -> dict[str, int]:
        raise StorageUnreachableError("the database is away")

    async def script(fleet: Fleet) -> None:
        bundle = await fleet.bundle()
        with monkeypatch.context() as m:
            m.setattr(Metadata, "deleted", broken)
            assert (await fleet.operator("DELETE", f"/v1/bundles/{bundle}")).status_code == 204
        assert (await fleet.operator("GET", f"/v1/bundles/{bundle}")).status_code == 404
        assert "blobs that no row names were not swept, a later sweep tries again" in caplog.text

    play(tmp_path, script)
