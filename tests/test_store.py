"""The store: what was written is there after a crash, a lost half is detected, faults have their kinds."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import buckets
import databases
import pytest
from sqlalchemy import insert, make_url, select
from sqlalchemy.exc import InternalError, OperationalError

from coord_server import auth, store
from coord_server.problems import Refusal
from coord_server.store import SPARE, SPARE_BYTES, open_store
from coord_server.store.blobs import CHUNK, FolderBlobs, Incoming
from coord_server.store.metadata import Metadata
from coord_server.store.tables import Known, Seen, tokens, updates
from coord_server.store.values import INLINE, Content, put, read
from edge_client.bundle import digest
from edge_client.errors import ConfigError, StateError, StorageDamagedError, StorageFullError, StorageUnreachableError
from edge_client.methods import Influence

T = TypeVar("T")
EACH = pytest.mark.usefixtures("each_database")
ROW = ("fed", "{}", "d" * 64, "s0", Content("0" * 64, b"g"), 1.0)


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderBlobs]:
    """The blobs in `tmp_path`, or in the bucket "b"."""
    if request.param == "folder":
        yield FolderBlobs(tmp_path)
        return
    s3 = pytest.importorskip("coord_server.store.s3")
    with buckets.serving(monkeypatch):
        yield s3.S3Blobs(tmp_path, s3.open_bucket("s3://b"))


def overwrite(blobs: Any, shelf: str, sha256: str, data: bytes) -> None:
    """Change the bytes of a blob behind the store's back."""
    if type(blobs) is FolderBlobs:
        (blobs._root / shelf / sha256).write_bytes(data)
    else:
        blobs._bucket.client.put_object(**blobs._object(shelf, sha256), Body=data)


def write_twice_and_commit(incoming: Incoming, data: bytes) -> None:
    incoming.write(data)
    incoming.write(data)
    incoming.commit()


def database(folder: Path) -> Metadata:
    found = Metadata(databases.url_of(folder) or f"sqlite:///{folder / 'x.db'}")
    found.add_bundle("d" * 64, 1.0)
    if found.add_federation(*ROW) == "added":
        found.add_token("t" * 64, "fed", 1, 100.0)
    return found


def halves(folder: Path) -> list[str]:
    """Files of uploads on their way in, of any process."""
    return [p.name for p in (folder / "incoming").rglob("*") if p.is_file() and p.suffix != ".lock"]


def update(device: str = "a", round_: int = 1, at: float = 3.0) -> Any:
    return lambda rows: rows.add_update(round_, device, Content("f" * 64, b"update"), 6, at, Influence(1.5, 2.0, 0.5))


@pytest.mark.parametrize("size", [0, 10, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_a_received_blob_is_what_was_written_under_its_digest(blobs: FolderBlobs, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    incoming = blobs.receive("fed/updates/1")
    for low in range(0, size, 700_001):
        incoming.write(data[low : low + 700_001])
    assert incoming.content() == data
    sha256 = incoming.commit()
    assert (sha256, blobs.size("fed/updates/1", sha256)) == (digest(data), size)
    assert blobs.read("fed/updates/1", sha256) == data
    assert b"".join(blobs.stream("fed/updates/1", sha256, 3, max(size, 3))) == data[3:]
    assert halves(tmp_path) == []


def test_a_blob_whose_byte_was_flipped_is_refused_with_its_address(blobs: FolderBlobs) -> None:
    sha256 = blobs.put("fed/state", b"global")
    assert blobs.holds("fed/state", sha256)
    overwrite(blobs, "fed/state", sha256, b"glocal")
    assert not blobs.holds("fed/state", sha256)
    with pytest.raises(
        StorageDamagedError, match=f"blob fed/state/{sha256} is damaged: its SHA-256 is {digest(b'glocal')}"
    ):
        blobs.read("fed/state", sha256)


def test_the_name_of_every_folder_above_a_durable_blob_is_on_disk_however_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    for module in ("edge_client.files", "coord_server.store.blobs"):
        monkeypatch.setattr(f"{module}.sync_folder", synced.append)
    root = tmp_path / "data" / "blobs"
    blobs = FolderBlobs(root)
    assert synced == [tmp_path, tmp_path / "data"]
    blobs.put("fed/downlinks/1", b"cannot")
    shelf = root / "fed" / "downlinks" / "1"
    assert synced[2:] == [root, root / "fed", root / "fed" / "downlinks", shelf]
    blobs.put("fed/downlinks/1", b"nor can this")
    assert synced[6:] == [shelf]
    blobs.drop("fed/downlinks/1")
    blobs.put("fed/downlinks/1", b"a new folder of the old name")
    assert synced[7:] == [root / "fed" / "downlinks", shelf]


def test_a_discarded_upload_leaves_nothing(blobs: FolderBlobs, tmp_path: Path) -> None:
    given_up = blobs.receive("s")
    given_up.write(bytes(2 * CHUNK))
    given_up.discard()
    given_up.write(b"a thread that comes late")
    with pytest.raises(StateError, match="dropped"):
        given_up.commit()
    assert halves(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["incoming"]


def _half_an_upload(root: Path, ready: Any, leave: Any) -> None:
    incoming = FolderBlobs(root).receive("s")
    incoming.write(bytes(10))
    ready.set()
    leave.wait(600)
    os._exit(9)


def test_a_start_removes_half_uploads_of_processes_that_are_gone_and_no_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    other = context.Process(target=_half_an_upload, args=(tmp_path, ready, leave))
    other.start()
    assert ready.wait(600)
    mine = FolderBlobs(tmp_path)
    incoming = mine.receive("s")
    incoming.write(b"mine")
    assert len(halves(tmp_path)) == 2
    leave.set()
    other.join(600)
    assert len(halves(tmp_path)) == 2
    FolderBlobs(tmp_path)
    assert len(halves(tmp_path)) == 1
    assert mine.read("s", incoming.commit()) == b"mine"
    assert list((tmp_path / "incoming").iterdir()) == []


def test_equal_bytes_on_two_shelves_live_and_die_apart(blobs: FolderBlobs) -> None:
    for shelf in ("fed/updates/1", "fed/updates/2"):
        blobs.put(shelf, b"same")
    assert blobs.shelves("fed/updates") == ["1", "2"]
    blobs.drop("fed/updates/1")
    assert (blobs.shelves("fed/updates"), blobs.shelves("fed/values")) == (["2"], [])
    assert blobs.read("fed/updates/2", digest(b"same")) == b"same"
    assert blobs.size("fed/updates/1", digest(b"same")) is None
    with pytest.raises(StorageDamagedError, match="is missing"):
        blobs.read("fed/updates/1", digest(b"same"))


def test_a_durable_blob_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, done = FolderBlobs(tmp_path), list[str]()
    blobs.put("s", b"the shelf is there")
    replace, fsync = os.replace, os.fsync

    def noted_fsync(descriptor: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("name"), replace(a, b))[1])
    monkeypatch.setattr(os, "fsync", noted_fsync)
    blobs.put("s", b"update")
    incoming = blobs.receive("s")
    incoming.write(os.urandom(2 * CHUNK))
    incoming.commit()
    assert done == ["sync file", "name", "sync folder"] * 2


@pytest.mark.parametrize("size", [100, 2 * CHUNK])
def test_a_full_disk_is_a_fault_of_its_kind_and_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    blobs = FolderBlobs(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    incoming = blobs.receive("s")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFullError, match="No space left"):
        write_twice_and_commit(incoming, bytes(size))
    incoming.discard()
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match="No space left"):
        blobs.put("s", bytes(size))
    monkeypatch.undo()
    assert halves(tmp_path) == []
    assert blobs.size("s", blobs.put("s", bytes(size))) == size


def test_a_disk_that_fails_in_another_way_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageUnreachableError, match="Input/output error"):
        blobs.put("s", b"x")


@pytest.mark.parametrize("size", [1, INLINE, INLINE + 1])
def test_a_content_is_in_its_row_or_a_blob_and_damage_to_either_is_detected(blobs: FolderBlobs, size: int) -> None:
    data = os.urandom(size)
    content = put(blobs, "s", data)
    assert (content.data is None) == (size > INLINE)
    assert read(blobs, "s", content) == data
    if content.data is None:
        overwrite(blobs, "s", content.sha256, data[:-1] + bytes([data[-1] ^ 1]))
    else:
        content = Content(content.sha256, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StorageDamagedError, match="damaged"):
        read(blobs, "s", content)


@EACH
def test_an_update_and_the_engines_state_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    data = database(tmp_path)
    assert data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0, valid=True) == "new"
    data.save_seen("fed", {"a": Seen(2.5, 11, {"down_work": 5})})
    assert data.commit("fed", 0, "s2", [update()])
    with pytest.raises(StorageDamagedError, match=r"(?i)unique"):
        data.commit("fed", 1, "s3", [update(at=4.0)])
    data.close()
    again = database(tmp_path)
    head = again.head("fed")
    assert (head.state, head.version) == ("s2", 1)
    assert again.acknowledged("fed", 1, "a") == ("f" * 64, 6)
    assert again.influences("fed", 1) == {"a": Influence(1.5, 2.0, 0.5)}
    assert again.update_content("fed", 1, "a") == Content("f" * 64, b"update")
    (device,) = again.devices("fed")
    assert (device.updates, device.bytes_up, device.bytes_down, device.last_seen_at) == (1, 6, 11, 3.0)
    assert device.down_work == 5


@EACH
def test_a_commit_over_another_version_writes_nothing(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0, valid=True)
    assert data.commit("fed", 0, "s1", [])
    assert not data.commit("fed", 0, "other", [update()])
    assert (data.head("fed").state, data.acknowledged("fed", 1, "a")) == ("s1", None)


@EACH
def test_closing_a_round_drops_the_small_contents_and_switches_values_and_records(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0, valid=True)
    data.commit("fed", 0, "s1", [update()])
    for n, record in enumerate((b"first", b"second"), 1):
        closed = (n, f'{{"round":{n}}}', Content("e" * 64, None), {"a": Content("d" * 64, record)})
        assert data.commit("fed", n, f"s{n}", [lambda rows, closed=closed: rows.close_round(*closed)])  # type: ignore[misc]
    assert data.values("fed") == (2, Content("e" * 64, None))
    assert data.update_content("fed", 1, "a") == Content("f" * 64, None)
    assert data.acknowledged("fed", 1, "a") == ("f" * 64, 6)  # still the same receipt
    assert data.record("fed", "a") == (2, Content("d" * 64, b"second"))
    assert data.rounds("fed") == {1: '{"round":1}', 2: '{"round":2}'}
    again = (2, "{}", Content("e" * 64, None), {"a": None})
    with pytest.raises(StorageDamagedError, match=r"(?i)unique"):  # a round is closed once
        data.commit("fed", 3, "s9", [lambda rows: rows.close_round(*again)])
    dropped = (3, "{}", Content("e" * 64, None), {"a": None})
    assert data.commit("fed", 3, "s3", [lambda rows: rows.close_round(*dropped)])
    assert data.record("fed", "a") is None


@EACH
def test_of_the_updates_of_closed_rounds_each_device_s_last_one_stays_however_many_rounds_there_are(
    tmp_path: Path,
) -> None:
    data = database(tmp_path)
    cohorts = (("a", "b"), ("a", "c"), ("a", "b"), ("c",))
    for n, cohort in enumerate(cohorts, 1):
        row = (n, "{}", Content("e" * 64, None), {})
        rows = [*(update(device, n) for device in cohort), lambda rows, row=row: rows.close_round(*row)]  # type: ignore[misc]
        assert data.commit("fed", n - 1, "s", rows)
    with data.database.writing("fed") as c:
        left = c.execute(select(updates.c.device, updates.c.round)).all()
    assert sorted(map(tuple, left)) == [("a", 3), ("b", 3), ("c", 4)]
    assert data.acknowledged("fed", 3, "b") == ("f" * 64, 6)
    assert data.acknowledged("fed", 2, "c") is None


@EACH
def test_a_failure_is_kept_until_an_update_and_a_record_is_replaced_or_dropped(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0, valid=True)
    row = (1, "{}", Content("e" * 64, b"v"), {"a": Content("d" * 64, b"r")})
    data.commit("fed", 0, "s1", [lambda rows: rows.close_round(*row)])
    data.commit("fed", 1, "s1", [lambda rows: rows.add_failure("a", "{}")])
    assert (data.devices("fed")[0].failure, data.record("fed", "a")) == ("{}", (1, Content("d" * 64, b"r")))
    left = Content("f" * 64, b"left")
    data.commit("fed", 2, "s1", [lambda rows: rows.leave_record("a", 1, left)])
    assert data.record("fed", "a") == (1, left)
    late = [lambda rows, what=what: rows.leave_record("a", 0, what) for what in (left, None)]  # type: ignore[misc]
    assert data.commit("fed", 3, "s1", late)
    assert data.record("fed", "a") == (1, left)  # of a later round: it stays
    data.commit("fed", 4, "s1", [lambda rows: rows.leave_record("a", 1, None)])
    assert data.record("fed", "a") is None
    data.commit("fed", 5, "s1", [update(round_=2)])
    assert data.devices("fed")[0].failure is None


@EACH
def test_a_token_is_used_up_by_enrolments_that_succeed_only(tmp_path: Path) -> None:
    data = database(tmp_path)

    def enrol(device: str, credential: str, valid: bool = True) -> str:
        return data.enrol("fed", device, credential * 64, "t" * 64, 2.0, valid)

    assert enrol("a", "c", valid=False) == "spent"
    assert enrol("a", "c") == "new"
    assert enrol("a", "c", valid=False) == "again"
    assert enrol("a", "d") == "name-taken"
    assert enrol("b", "c") == "credential-taken"
    assert enrol("b", "d") == "spent"
    data.commit("fed", 0, "s", [lambda rows: rows.remove_device("a")])
    assert enrol("a", "c") == "removed"
    assert [d.device for d in data.devices("fed")] == ["a"]


@EACH
def test_ready_devices_are_counted_once_and_listed_while_they_are_present(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.add_token("u" * 64, "fed", 9, 100.0)
    for name in "abc":
        data.enrol("fed", name, name * 64, "u" * 64, 2.0, valid=True)
    for n, (name, at) in enumerate([("a", 10.0), ("b", 20.0), ("a", 10.0)]):
        data.commit("fed", n, "s", [lambda rows, name=name, at=at: rows.arrive(name, at)])  # type: ignore[misc]
    data.save_seen("fed", {"a": Seen(9.0), "c": Seen(30.0)})
    assert (data.head("fed").ready, data.known()) == (2, {"fed": Known(3, 0)})
    assert data.present("fed", 10.0) == {"a": 10.0, "b": 20.0}
    assert data.present("fed", 10.5) == {"b": 20.0}
    gone = list[int]()
    for n in range(3, 5):  # removed once, however often it is said
        data.commit("fed", n, "s", [lambda rows: gone.append(rows.remove_device("b"))])
    assert gone == [1, 0]
    assert (data.head("fed").ready, data.present("fed", 0.0)) == (1, {"a": 10.0})
    data.commit("fed", 5, "s", [lambda rows: rows.arrive("b", 40.0)])
    assert data.head("fed").ready == 1


def test_a_full_database_is_a_fault_of_its_kind_and_changes_nothing(tmp_path: Path) -> None:
    data = database(tmp_path)
    with data.database.engine.connect() as c:
        pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
    for connection in [data.database.engine.raw_connection()]:
        connection.cursor().execute(f"PRAGMA max_page_count={pages}")
        connection.close()
    with pytest.raises(StorageFullError, match="full"):
        data.commit("fed", 0, "x" * 100_000, [])
    assert data.head("fed").state == "s0"


def test_spare_room_that_the_disk_had_in_part_is_taken_once_it_has_all(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    spare, limits = store.folder / SPARE, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SPARE_BYTES // 2, limits[1]))  # as a disk that fills up half-way
    try:
        store.sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not spare.exists()
    for left in (None, b"half of it, as after a kill"):
        if left is not None:
            spare.write_bytes(left)
        store.sweep()
        assert spare.stat().st_size == SPARE_BYTES
    store.close()


def test_a_database_that_is_no_database_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database at all, but longer than a header" * 100)
    with pytest.raises(StorageDamagedError, match="not a database"):
        Metadata(f"sqlite:///{tmp_path / 'x.db'}")


@EACH
def test_a_database_with_tables_of_another_version_or_program_is_refused_at_once(tmp_path: Path) -> None:
    data = database(tmp_path)
    with data.database.writing("store") as c:
        c.exec_driver_sql("ALTER TABLE devices DROP COLUMN agent")
    data.close()
    with pytest.raises(StorageUnreachableError, match=r"cannot be used: .*agent"):
        database(tmp_path)


# --- several writers


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls return, all begun together, each in a thread of its own."""
    together = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        together.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, calls))


@EACH
def test_a_writer_that_waits_too_long_for_another_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord_server.store.database.PATIENCE", 10)
    data, other = database(tmp_path), database(tmp_path)
    with other.database.writing("fed"), pytest.raises(StorageUnreachableError, match="lock"):
        data.commit("fed", 0, "x", [])
    assert data.commit("fed", 0, "s1", [])


@EACH
def test_updates_and_presence_of_the_same_devices_are_written_at_once(tmp_path: Path) -> None:
    """Each writes many rows in an order of its own."""
    data, names, dice = database(tmp_path), [f"d{i:02}" for i in range(40)], random.Random(1)
    data.add_token("u" * 64, "fed", 40, 100.0)
    for name in names:
        data.enrol("fed", name, digest(name.encode()), "u" * 64, 2.0, valid=True)

    def commits() -> None:
        for n in range(20):
            assert data.commit("fed", n, "s", [update(name, n) for name in dice.sample(names, 40)])

    def presence() -> None:
        for _ in range(20):
            data.save_seen("fed", {name: Seen(1.0, 5) for name in dice.sample(names, 40)})

    at_once(commits, presence, presence)
    assert {(d.updates, d.bytes_down) for d in data.devices("fed")} == {(20, 200)}
    data.close()


@EACH
def test_of_those_who_enrol_at_once_each_gets_its_own_answer(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.add_token("u" * 64, "fed", 3, 100.0)

    def enrol(device: str, credential: str, token: str) -> Callable[[], str]:
        return lambda: data.enrol("fed", device, credential * 64, token * 64, 2.0, True)

    assert sorted(at_once(*[enrol("a", "a", "t")] * 6)) == ["again"] * 5 + ["new"]
    assert sorted(at_once(*[enrol(f"b{i}", "b", "u") for i in range(6)])) == ["credential-taken"] * 5 + ["new"]
    assert sorted(at_once(*[enrol(f"c{i}", str(i), "u") for i in range(6)])) == ["new"] * 2 + ["spent"] * 4
    data.close()


@EACH
def test_what_is_made_at_once_is_made_once(tmp_path: Path) -> None:
    url = databases.url_of(tmp_path)

    def made() -> Metadata:  # SQLite makes a database for one at a time; `open_store` sees to that
        return Metadata(url) if url else open_store(tmp_path / "data").metadata

    for one in at_once(*[made] * 4):
        one.close()
    data, bundle = made(), "d" * 64
    at_once(*[lambda: data.add_bundle(bundle, 1.0)] * 6)
    assert sorted(at_once(*[lambda: data.add_federation(*ROW)] * 6)) == ["added"] + ["taken"] * 5
    data.close()


@EACH
def test_nothing_is_left_of_a_federation_that_is_deleted_while_devices_enrol(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.add_token("u" * 64, "fed", 1000, 100.0)
    enrolled = threading.Event()

    def enrol(first: int) -> Callable[[], None]:
        def loop() -> None:
            for i in itertools.count(first, 5):
                if data.enrol("fed", f"d{i}", digest(b"%d" % i), "u" * 64, 2.0, valid=True) == "spent":
                    return
                enrolled.set()

        return loop

    def tokens() -> None:
        with suppress(Refusal):
            for i in itertools.count():
                data.add_token(digest(b"%d" % i), "fed", 1, 100.0)

    def delete() -> None:
        enrolled.wait(600)
        assert data.delete_federation("fed", 0)

    at_once(delete, tokens, *(enrol(i) for i in range(5)))
    assert (data.devices("fed"), data.tokens("fed", "", 10), data.known()) == ([], [], {})
    data.close()


@EACH
def test_a_bundle_is_not_deleted_while_a_federation_of_it_is_made(tmp_path: Path) -> None:
    data = database(tmp_path)
    for n in range(20):
        bundle = digest(b"%d" % n)
        data.add_bundle(bundle, 1.0)
        row = (f"f{n}", "{}", bundle, "s0", Content("0" * 64, b"g"), 1.0)
        used, made = at_once(lambda b=bundle: data.delete_bundle(b), lambda r=row: data.add_federation(*r))  # type: ignore[misc,arg-type]
        assert (used, made) in (([], "no-bundle"), ([f"f{n}"], "added"))
    data.close()


# --- PostgreSQL alone


@pytest.fixture
def fresh(postgresql: databases.Server) -> Iterator[str]:
    """The URL of a database without tables."""
    with postgresql.database() as url:
        yield url


def test_a_transaction_of_a_coordinator_that_fell_silent_ends_and_another_writes(
    fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other = Metadata(fresh), Metadata(fresh)
    monkeypatch.setattr("coord_server.store.database.SILENCE", 50)
    writing = silent.database.writing("viewers")
    writing.__enter__()
    other.add_viewer("v", 1.0)
    with pytest.raises(StorageUnreachableError, match="idle-in-transaction"):
        writing.__exit__(None, None, None)
    silent.add_viewer("w", 1.0)
    assert set(other.viewers()) == {"v", "w"}
    for metadata in (silent, other):
        metadata.close()


def test_a_writer_to_one_federation_does_not_wait_for_a_writer_to_another_or_to_something_else(
    fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Metadata(fresh), Metadata(fresh)
    monkeypatch.setattr("coord_server.store.database.PATIENCE", 10)
    with one.database.writing("fed"):
        other.add_viewer("v", 1.0)
        assert not other.commit("other", 0, "s", [])
        with pytest.raises(StorageUnreachableError, match="lock timeout"):
            other.commit("fed", 0, "s", [])
    for metadata in (one, other):
        metadata.close()


def test_writers_follow_one_another_whatever_isolation_the_server_gives_by_default(fresh: str) -> None:
    url = make_url(fresh).update_query_dict({"options": "-c default_transaction_isolation=serializable"})
    data = Metadata(url)
    for n in range(10):
        at_once(*[partial(data.add_bundle, digest(b"%d" % n), 1.0)] * 6)
    assert len(data.bundles(None, 100)) == 10
    data.close()


def test_pages_of_join_tokens_end_where_a_language_sorts_two_letters_as_one(postgresql: databases.Server) -> None:
    ids = ["0" * 15 + last for last in "1acdf"]
    with postgresql.database("TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'da'") as url:
        data = Metadata(url)
        with data.database.writing("fed") as c:
            rows = [{"token": id_ + 48 * "a", "federation": "fed", "uses_left": 1, "expires_at": 9.0} for id_ in ids]
            c.execute(insert(tokens), rows)
        after, found = "", list[str]()
        while (page := data.tokens("fed", after, 2)) and len(found) < 10:
            found += [row.token[:16] for row in page]
            after = found[-1]
        assert sorted(found) == ids
        data.close()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_every_letter_is_refused(postgresql: databases.Server, encoding: str) -> None:
    with (
        postgresql.database(f"TEMPLATE template0 LOCALE_PROVIDER libc LOCALE 'C' ENCODING '{encoding}'") as url,
        pytest.raises(ConfigError, match=f"encoding of this database is {encoding}.*ENCODING 'UTF8'"),
    ):
        Metadata(url)


# --- the data folder


def test_two_coordinators_share_a_data_folder(tmp_path: Path) -> None:
    first, second = open_store(tmp_path / "data"), open_store(tmp_path / "data")
    first.metadata.add_bundle("d" * 64, 1.0)
    assert second.metadata.added_at("d" * 64)
    first.blobs.put("s", b"x")
    assert second.blobs.read("s", digest(b"x")) == b"x"
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["what?", "what?x=1", "a%20b", "a#b", "Büro raum"])
def test_the_database_is_in_the_data_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    open_store(tmp_path / name).close()
    assert (tmp_path / name / store.DATABASE).stat().st_size > 0
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_driver_that_lacks_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg without libpq: its error has no name."""

    def lacking(*_: object, **__: object) -> None:
        raise ImportError("no pq wrapper available.\nAttempts made:\n- couldn't import psycopg 'c' implementation")

    monkeypatch.setattr("coord_server.store.database.create_engine", lacking)
    with pytest.raises(
        ConfigError, match=r"^--database: no pq wrapper available; run: pip install 'psycopg\[binary\]'$"
    ):
        open_store(tmp_path / "data", "postgresql+psycopg://h/x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bogus", "Could not parse"),
        ("foo://host", "dialects:foo"),
        ("mysql+pymysql://h/x", "mysql.pymysql is neither SQLite nor PostgreSQL through psycopg"),
        ("postgresql+asyncpg://h/x", "postgresql.asyncpg is an asynchronous driver"),
        ("postgresql+pg8000://h/x", "postgresql.pg8000 is neither .*postgresql.psycopg:"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_a_url_that_opens_no_database_is_wrong_usage(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--database: .*{said}"):
        open_store(tmp_path / "data", url)
    open_store(tmp_path / "data").close()


def test_a_database_that_does_not_answer_is_one_sentence_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libpq = 'connection to "full.example.org" failed: Connection refused\n\tIs the server running on that host?'
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    monkeypatch.setattr("sqlalchemy.Engine.connect", Mock(side_effect=OperationalError("", {}, Exception(libpq))))
    with pytest.raises(StorageUnreachableError) as caught:
        open_store(tmp_path / "data", url)
    assert str(caught.value) == (
        'the coordinator\'s database cannot be used: connection to "full.example.org" failed: Connection refused '
        "Is the server running on that host?; mend this or correct --database, then try again"
    )


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", StorageFullError),
        ("XX001", StorageDamagedError),
        ("XX002", StorageDamagedError),
        ("XX000", StorageUnreachableError),
        ("57P01", StorageUnreachableError),
    ],
)
def test_an_error_of_postgresql_has_the_kind_of_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, kind: type[StateError]
) -> None:
    said = Exception("a sentence")
    said.sqlstate, said.diag = state, Mock(message_primary="a sentence")  # type: ignore[attr-defined]
    data = database(tmp_path)
    monkeypatch.setattr("sqlalchemy.Engine.connect", Mock(side_effect=InternalError("", {}, said)))
    with pytest.raises(kind, match="a sentence"):
        data.known()


OPEN = "import sys; from pathlib import Path; from coord_server.store import open_store; open_store(Path(sys.argv[1]))"


def test_coordinators_that_start_together_on_a_new_folder_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "data")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in started:
        assert process.communicate(timeout=600)[1] == ""
        assert process.returncode == 0


def used(folder: Path) -> None:
    store = open_store(folder)
    store.metadata.add_bundle("d" * 64, 1.0)
    store.metadata.add_federation(*ROW)
    store.blobs.put("bundles/" + "d" * 64, b"m")
    store.close()


def empty(path: Path) -> None:
    for p in sorted(path.rglob("*"), reverse=True):
        p.rmdir() if p.is_dir() else p.unlink()


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (["coordinator.db"], "holds a coordinator's data, but its database is new"),
        (["blobs"], "has lost its blobs"),
        (["store-id"], "has lost its blobs"),
        (["store-id", "blobs"], "has lost its blobs"),
    ],
)
def test_a_folder_that_lost_a_half_is_refused_until_init_starts_anew_and_deletes_nothing(
    tmp_path: Path, lost: list[str], words: str
) -> None:
    folder = tmp_path / "data"
    used(folder)
    for name in lost:
        (folder / name).rename(tmp_path / f"lost {name}")
    for _ in range(2):  # the refusal itself leaves nothing that the next start would take for a folder of its own
        with pytest.raises(StorageDamagedError, match=rf"{words}.*--init"):
            open_store(folder)
    before = {p.name for p in folder.rglob("*") if p.is_file() and p.suffix not in (".lock", ".db")}
    store = open_store(folder, init=True)
    assert store.metadata.known() == {}
    assert not store.metadata.added_at("d" * 64)
    store.close()
    after = {p.name for p in folder.rglob("*") if p.is_file()}
    assert {name for name in before if len(name) == 64} <= after
    assert any(p.name.endswith(".lost-1") for p in folder.iterdir())
    open_store(folder).close()
    open_store(folder, init=True).close()  # of a sound folder it is an ordinary start


def test_an_emptied_folder_of_blobs_is_detected(tmp_path: Path) -> None:
    used(tmp_path / "data")
    empty(tmp_path / "data" / "blobs")
    with pytest.raises(StorageDamagedError, match="has lost its blobs"):
        open_store(tmp_path / "data")


@pytest.mark.parametrize("init", [False, True])
def test_a_folder_keeps_the_database_that_it_began_with_and_its_refusal_advises_no_init(
    tmp_path: Path, init: bool
) -> None:
    used(tmp_path / "data")
    with pytest.raises(StorageDamagedError, match="start anew with an empty database and another --data") as refused:
        open_store(tmp_path / "data", f"sqlite:///{tmp_path / 'elsewhere.db'}", init=init)
    assert "--init" not in str(refused.value)


def test_a_database_elsewhere_whose_folder_is_empty_or_anothers_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    open_store(tmp_path / "data", url).close()
    open_store(tmp_path / "data", url).close()
    with pytest.raises(StorageDamagedError, match="lost its blobs"):
        open_store(tmp_path / "new", url)
    with pytest.raises(StorageDamagedError, match="an empty database and another --data"):
        open_store(tmp_path / "new", url, init=True)
    open_store(tmp_path / "third").close()
    with pytest.raises(StorageDamagedError, match="different coordinators"):
        open_store(tmp_path / "third", url)


@pytest.mark.parametrize(
    ("name", "survived"),
    [("_alone", 0), ("_mark_new", 0), ("write_whole", 0), ("sync_folder", 0), ("_open", 0), ("_private", 0),
     ("FolderBlobs", 0), ("write_whole", 1)],
)  # fmt: skip
def test_a_first_start_that_was_killed_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, survived: int
) -> None:
    calls, function = list[int](), getattr(store, name)

    def killed(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) > survived:
            raise KeyboardInterrupt
        return function(*given, **more)  # the marker of the new folder; the next call is after the database's id

    with monkeypatch.context() as m:
        m.setattr(store, name, killed)
        with pytest.raises(KeyboardInterrupt):
            open_store(tmp_path / "data")
    for _ in range(2):
        open_store(tmp_path / "data").close()
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_an_empty_folder_is_refused_because_its_disk_may_not_be_mounted(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "lost+found").mkdir(parents=True)
    for locks in ([], ["lock"]):  # a coordinator that goes on below the missing disk takes its locks there
        for name in locks:
            (folder / name).touch()
        with pytest.raises(StorageDamagedError, match="is empty; if its disk is not mounted, mount it; --init starts"):
            open_store(folder)
        assert {p.name for p in folder.iterdir()} == {"lost+found", *locks}
    open_store(folder, init=True).close()
    open_store(folder).close()


def test_a_marker_without_its_database_is_refused_also_when_nothing_was_stored(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    open_store(folder).close()
    for path in folder.glob("coordinator.db*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(StorageDamagedError, match="its database is new"):
            open_store(folder)


def test_a_database_without_the_marker_s_id_is_refused_also_when_nothing_was_stored(tmp_path: Path) -> None:
    for name in ("one", "other"):
        open_store(tmp_path / name).close()
    (tmp_path / "other" / "coordinator.db").replace(tmp_path / "one" / "coordinator.db")
    with pytest.raises(StorageDamagedError, match="different coordinators"):
        open_store(tmp_path / "one")
    opened = Metadata(f"sqlite:///{tmp_path / 'one' / 'coordinator.db'}")
    with opened.database.writing("store") as c:
        c.exec_driver_sql("DELETE FROM store")
    opened.close()
    with pytest.raises(StorageDamagedError, match="its database is new"):
        open_store(tmp_path / "one")


def test_every_file_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "data")
        store.metadata.add_federation(*ROW)
        store.blobs.put("fed/values/0", b"x")
        store.blobs.put("fed/downlinks/1", b"y")
        incoming = store.blobs.receive("s")
        incoming.write(b"z")
        auth.operator_token(tmp_path / "data")
        found = [*(tmp_path / "data").rglob("*"), tmp_path / "data"]
        assert {"coordinator.db", "coordinator.db-wal", "coordinator.db-shm", "store-id"} <= {p.name for p in found}
        for path in found:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        incoming.discard()
        store.close()
        (tmp_path / "data" / "coordinator.db").chmod(0o644)
        open_store(tmp_path / "data").close()
        assert (tmp_path / "data" / "coordinator.db").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_the_operators_token_is_made_once_and_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(auth.OPERATOR_ENV, raising=False)
    token, path = auth.operator_token(tmp_path)
    assert auth.operator_token(tmp_path) == (token, path)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("")  # a power cut in an old version
    token, _ = auth.operator_token(tmp_path)
    assert path.read_text() == token + "\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [path.name]
    monkeypatch.setenv(auth.OPERATOR_ENV, "given")
    assert auth.operator_token(tmp_path) == ("given", None)
