"""The store: what was written is there after a crash, what was not is gone, and a full disk is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from coord_server import auth
from coord_server.store import open_store
from coord_server.store.blobs import CHUNK, FolderBlobs, FolderIncoming
from coord_server.store.metadata import Metadata
from coord_server.store.tables import Acknowledged, ClosedRound, Content, FederationRow, Seen
from edge_client.bundle import digest
from edge_client.errors import StateError

ROW = FederationRow("fed", "{}", "s0", "0" * 64, b"g", 1.0)


def write_twice_and_commit(incoming: FolderIncoming, data: bytes) -> None:
    incoming.write(data)
    incoming.write(data)
    incoming.commit()


def database(folder: Path) -> Metadata:
    found = Metadata(f"sqlite:///{folder / 'x.db'}")
    if not found.all_federations():
        found.add_federation(ROW)
        found.add_token("t" * 64, "fed", 1, 100.0)
    return found


@pytest.mark.parametrize("size", [0, 10, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_a_received_blob_is_what_was_written_under_its_digest(tmp_path: Path, size: int) -> None:
    blobs, data = FolderBlobs(tmp_path), os.urandom(size)
    incoming = blobs.receive("fed/updates/1")
    for low in range(0, size, 700_001):
        incoming.write(data[low : low + 700_001])
    assert incoming.content() == data
    stored = incoming.commit()
    assert (stored.sha256, stored.size) == (digest(data), size)
    assert blobs.read("fed/updates/1", stored.sha256) == data
    assert b"".join(blobs.stream("fed/updates/1", stored.sha256, 3, size)) == data[3:]
    assert os.listdir(tmp_path / "incoming") == []


def test_a_blob_whose_byte_was_flipped_on_disk_is_refused_with_its_address(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    sha256 = blobs.put("fed/state", b"global").sha256
    (tmp_path / "fed" / "state" / sha256).write_bytes(b"glocal")
    with pytest.raises(StateError, match=f"blob fed/state/{sha256} is damaged: its SHA-256 is {digest(b'glocal')}"):
        blobs.read("fed/state", sha256)


def test_the_name_of_every_folder_above_a_durable_blob_is_on_disk_whoever_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    for module in ("edge_client.files", "coord_server.store.blobs"):
        monkeypatch.setattr(f"{module}.sync_folder", synced.append)
    root = tmp_path / "data" / "blobs"
    blobs = FolderBlobs(root)
    assert synced == [tmp_path, tmp_path / "data"]
    blobs.put("fed/downlinks/1", b"can be made again", durable=False)
    assert len(synced) == 2
    blobs.put("fed/downlinks/1", b"cannot")
    shelf = root / "fed" / "downlinks" / "1"
    assert synced[2:] == [root, root / "fed", root / "fed" / "downlinks", shelf]
    blobs.put("fed/downlinks/1", b"nor can this")
    assert synced[6:] == [shelf]
    blobs.drop("fed/downlinks/1")
    blobs.put("fed/downlinks/1", b"a new folder of the old name")
    assert synced[7:] == [root / "fed" / "downlinks", shelf]


def test_a_discarded_or_interrupted_upload_leaves_nothing(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    given_up, cut_off = blobs.receive("s"), blobs.receive("s")
    for incoming in (given_up, cut_off):
        incoming.write(bytes(2 * CHUNK))
    given_up.discard()
    given_up.write(b"a thread that comes late")
    with pytest.raises(StateError, match="given up"):
        given_up.commit()
    assert len(os.listdir(tmp_path / "incoming")) == 1
    FolderBlobs(tmp_path)  # the next start
    assert os.listdir(tmp_path / "incoming") == []
    assert blobs.shelves("") == ["incoming"]


def test_equal_bytes_on_two_shelves_live_and_die_apart(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    for shelf in ("fed/updates/1", "fed/updates/2"):
        blobs.put(shelf, b"same")
    blobs.drop("fed/updates/1")
    assert blobs.read("fed/updates/2", digest(b"same")) == b"same"
    assert blobs.size("fed/updates/1", digest(b"same")) is None
    with pytest.raises(StateError, match="cannot be read"):
        blobs.read("fed/updates/1", digest(b"same"))


def test_a_blob_has_its_name_before_the_sync_only_where_a_row_vouches_for_it_and_none_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, done = FolderBlobs(tmp_path), list[str]()
    blobs.put("s", b"the shelf is there")
    replace, fsync = os.replace, os.fsync

    def noted_fsync(descriptor: int) -> None:
        done.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("name"), replace(a, b))[1])
    monkeypatch.setattr(os, "fsync", noted_fsync)
    careful, quick = ["sync file", "name", "sync folder"], ["name", "sync file", "sync folder"]
    for data, indexed, order in ((b"part", False, careful), (b"update", True, quick), (b"update", True, careful)):
        done.clear()
        stored = blobs.put("s", data, indexed=indexed)
        assert (done, blobs.read("s", stored.sha256)) == (order, data)
    for indexed, order in ((True, quick), (False, careful)):
        incoming = blobs.receive("s")
        incoming.write(os.urandom(2 * CHUNK))
        done.clear()
        stored = incoming.commit(indexed)
        incoming.discard()
        assert (done, blobs.size("s", stored.sha256)) == (order, 2 * CHUNK)


def test_keep_only_drops_the_rest_of_a_shelf(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    old, new = blobs.put("s", b"old"), blobs.put("s", b"new")
    blobs.keep_only("s", {new.sha256})
    assert (blobs.size("s", old.sha256), blobs.size("s", new.sha256)) == (None, 3)


@pytest.mark.parametrize("size", [100, 2 * CHUNK])
def test_a_full_disk_is_said_and_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    blobs = FolderBlobs(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    incoming = blobs.receive("s")
    monkeypatch.setattr(os, "write", full)
    data = bytes(size)
    with pytest.raises(StateError, match="No space left"):
        write_twice_and_commit(incoming, data)
    incoming.discard()
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        blobs.put("s", bytes(size))
    monkeypatch.undo()
    assert os.listdir(tmp_path / "incoming") == []
    assert blobs.put("s", bytes(size)).size == size


def test_an_update_and_the_engines_state_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    data = database(tmp_path)
    assert data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0)
    body = Content("f" * 64, b"update")
    data.acknowledge("fed", [Acknowledged(1, "a", body, 6, 3.0, Seen(3.0, 11))], "s2")
    with pytest.raises(StateError, match="UNIQUE"):
        data.acknowledge("fed", [Acknowledged(1, "a", body, 6, 4.0, Seen(4.0))], "s3")
    data.close()
    again = database(tmp_path)
    assert again.state("fed") == "s2"
    assert again.acknowledged("fed", 1, "a") == ("f" * 64, 6)
    assert again.update_content("fed", 1, "a") == body
    (device,) = again.all_devices("fed")
    assert (device.updates, device.bytes_up, device.bytes_down, device.last_seen_at) == (1, 6, 11, 3.0)


def test_closing_a_round_drops_the_small_contents_and_switches_state_and_records(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0)
    data.acknowledge("fed", [Acknowledged(1, "a", Content("f" * 64, b"update"), 6, 3.0, Seen(3.0))], "s2")
    for n, record in enumerate((b"first", b"second"), 1):
        closed = ClosedRound(n, f'{{"round":{n}}}', Content("e" * 64, None), {"a": Content("d" * 64, record)})
        data.close_round("fed", closed, "s3")
    (row,) = data.all_federations()
    assert (row.state, row.global_state, row.global_content) == ("s3", "e" * 64, None)
    assert data.update_content("fed", 1, "a") == Content("f" * 64, None)
    assert data.record("fed", "a") == Content("d" * 64, b"second")
    assert data.all_rounds("fed") == ['{"round":1}', '{"round":2}']


def test_the_last_update_of_a_round_and_its_closing_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    data = database(tmp_path)
    data.add_token("u" * 64, "fed", 2, 9.0)
    for device in ("a", "b"):
        assert data.enrol("fed", device, device * 64, "u" * 64, 2.0)

    def row(device: str, round_: int = 1) -> Acknowledged:
        return Acknowledged(round_, device, Content("f" * 64, b"update"), 6, 3.0, Seen(3.0))

    data.acknowledge("fed", [row("a")], "s1")
    closed = ClosedRound(1, '{"round":1}', Content("e" * 64, b"total"), {})
    with pytest.raises(StateError, match="UNIQUE"):
        data.acknowledge("fed", [row("a")], "s2", closed)
    assert (data.state("fed"), data.all_rounds("fed")) == ("s1", [])
    data.acknowledge("fed", [row("b")], "s2", closed)
    (federation,) = data.all_federations()
    assert (federation.state, federation.global_content) == ("s2", b"total")
    assert data.all_rounds("fed") == ['{"round":1}']
    for device in ("a", "b"):  # still the same receipt, but the bytes are in the total now
        assert data.acknowledged("fed", 1, device) == ("f" * 64, 6)
        assert data.update_content("fed", 1, device) == Content("f" * 64, None)
    with pytest.raises(StateError, match="UNIQUE"):  # a round is closed once
        data.acknowledge("fed", [row("a", 2)], "s3", closed)


def test_a_token_is_used_up_by_enrolments_that_succeed_only(tmp_path: Path) -> None:
    data = database(tmp_path)
    assert data.enrol("fed", "a", "c" * 64, "t" * 64, 2.0)
    assert data.enrol("fed", "a", "c" * 64, "t" * 64, 2.5)  # told again, although it was in
    assert not data.enrol("fed", "b", "d" * 64, "t" * 64, 2.0)
    assert [d.device for d in data.all_devices("fed")] == ["a"]


def test_a_full_database_is_a_state_error_and_changes_nothing(tmp_path: Path) -> None:
    data = database(tmp_path)
    with data._engine.connect() as c:
        pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
    for connection in [data._engine.raw_connection()]:
        connection.cursor().execute(f"PRAGMA max_page_count={pages}")
        connection.close()
    with pytest.raises(StateError, match="full"):
        data.save_state("fed", "x" * 100_000)
    assert data.state("fed") == "s0"


def test_a_second_coordinator_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = open_store(tmp_path / "data")
    with pytest.raises(StateError, match="another coordinator"):
        open_store(tmp_path / "data")
    first.close()
    open_store(tmp_path / "data").close()


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
