"""Blobs in a bucket: the folder's contract is in test_store.py, here is what only a bucket does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import buckets
import pytest
from coordination import LARGE, Fleet, whole
from coordination import play as play_in_folder

from coord_server import serve, store
from coord_server.store import open_store
from coord_server.store.blobs import federation_shelf
from edge_client.bundle import digest
from edge_client.errors import ConfigError, StorageDamagedError, StorageUnreachableError

pytest.importorskip("boto3")
URL = "s3://fleet/blobs"
FED = "/v1/federations/fed"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[buckets.Server]:
    with buckets.serving(monkeypatch) as server:
        yield server


def play(folder: Path, script: object) -> object:
    """As `coordination.play`, with the blobs in the bucket."""
    with pytest.MonkeyPatch.context() as patched:
        opened = store.open_store
        patched.setattr("coordination.open_folder", lambda data: opened(data, blobs=URL))
        return play_in_folder(folder, script)  # type: ignore[arg-type]


def test_a_federation_in_a_bucket_ends_as_one_in_a_folder_across_a_restart_and_leaves_nothing(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    join = [""]

    async def first(fleet: Fleet) -> None:
        await fleet.federation("a", "bb", d=LARGE)
        join[0] = fleet.join
        for device in ("a", "bb", "a"):
            assert (await fleet.train(device)).status_code == 201

    async def second(fleet: Fleet) -> bytes:
        fleet.join = join[0]
        assert (await fleet.train("bb")).status_code == 201
        return await whole(fleet, "a", rounds=0)

    async def calm(fleet: Fleet) -> bytes:
        await fleet.federation("a", "bb", d=LARGE)
        return await whole(fleet, "a", "bb")

    async def delete(fleet: Fleet) -> None:
        assert (await fleet.operator("DELETE", FED)).status_code == 204
        address = (await fleet.operator("GET", "/v1/bundles")).json()[0]["digest"]
        assert (await fleet.operator("DELETE", f"/v1/bundles/{address}")).status_code == 204

    play(tmp_path / "data", first)
    kinds = {key.split("/")[2] for key in bucket.found("fleet") if "~" in key}
    assert kinds == {"values", "updates"}
    assert [p.name for p in (tmp_path / "data" / "blobs").iterdir()] == ["incoming"]
    assert play(tmp_path / "data", second) == play_in_folder(tmp_path / "folder", calm)
    play(tmp_path / "data", delete)
    assert list(bucket.found("fleet")) == ["blobs/store-id"]


def test_a_shelf_goes_without_those_whose_names_begin_alike(tmp_path: Path, bucket: buckets.Server) -> None:
    blobs = open_store(tmp_path / "data", blobs=URL).blobs
    for n in range(5):
        blobs.put("fed~1/updates/1", bytes([n]))
    kept = [blobs.put(shelf, b"x") for shelf in ("fed~1/updates/12", "fed~12/updates/1")]
    assert blobs.shelves("fed~1/updates") == ["1", "12"]
    blobs.drop("fed~1/updates/1")
    blobs.drop("fed~1/updates/1")
    assert blobs.shelves("fed~1/updates") == ["12"]
    assert blobs.read("fed~12/updates/1", kept[1]) == b"x"
    assert len(bucket.found("fleet")) == 3


def test_what_a_refusal_or_a_kill_leaves_of_a_deletion_goes_with_the_next_start(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    opened = open_store(tmp_path / "data", blobs=URL)
    for n in range(5):
        opened.blobs.put("fed~1/values/0", bytes([n]))
    with opened.changing("fed~1"):
        bucket.fault = "refuses"
    assert len(bucket.found("fleet")) == 6
    bucket.fault = ""
    opened.close()
    opened = open_store(tmp_path / "data", blobs=URL)
    opened.sweep()
    assert (list(bucket.found("fleet")), opened.blobs.notes()) == (["blobs/store-id"], [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refuses", r"the bucket refuses \(403|AccessDenied\)"),
        ("is silent", r"no usable answer from the bucket \(ConnectionClosedError\); check"),
    ],
)
def test_a_bucket_that_refuses_or_is_silent_is_a_fault_of_its_kind_and_nothing_is_acknowledged(
    tmp_path: Path, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    blobs = open_store(tmp_path / "data", blobs=URL).blobs
    address = blobs.put("s", b"stored")
    bucket.fault = fault
    for call in (
        lambda: blobs.put("s", b"x"), lambda: blobs.read("s", address), lambda: blobs.size("s", address),
        lambda: blobs.shelves("s"), lambda: blobs.drop("s"), lambda: blobs.holds("s", address),
        lambda: open_store(tmp_path / "data", blobs=URL),
    ):  # fmt: skip
        with pytest.raises(StorageUnreachableError, match=said):
            call()
    assert list(bucket.found("fleet")) == ["blobs/store-id", f"blobs/s/{address}"]
    assert list((tmp_path / "data" / "blobs" / "incoming").iterdir()) == []


def test_an_answer_that_is_cut_short_is_never_taken_for_a_blob(tmp_path: Path, bucket: buckets.Server) -> None:
    blobs = open_store(tmp_path / "data", blobs=URL).blobs
    address = blobs.put("s", bytes(1000))
    bucket.fault = "cuts"
    with pytest.raises(StorageUnreachableError):
        blobs.read("s", address)
    with pytest.raises(StorageUnreachableError):
        list(blobs.stream("s", address, 0, 1000))


def test_a_download_that_is_cut_short_is_one_line_of_the_log() -> None:
    error = RuntimeError("response already started")
    error.__cause__ = StorageUnreachableError("blob s/1: no usable answer")
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception", (), (RuntimeError, error, None))
    assert serve.cut_short(record)
    assert (record.getMessage(), record.exc_info) == ("a download was cut short: blob s/1: no usable answer", None)


def test_a_file_that_decayed_before_it_reached_the_bucket_is_not_stored(tmp_path: Path, bucket: buckets.Server) -> None:
    blobs = open_store(tmp_path / "data", blobs=URL).blobs
    incoming = blobs.receive("s")
    incoming.write(b"as received")
    for path in (tmp_path / "data" / "blobs" / "incoming").iterdir():
        path.write_bytes(b"as decayed!")
    with pytest.raises(StorageUnreachableError, match="BadDigest"):
        incoming.commit()
    assert blobs.size("s", digest(b"as received")) is None


def test_a_bucket_of_another_coordinator_or_one_that_was_emptied_is_refused(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    open_store(tmp_path / "one", blobs=URL).close()
    open_store(tmp_path / "one", blobs=URL).close()
    with pytest.raises(StorageDamagedError, match="does not hold the blobs of this coordinator; name the bucket"):
        open_store(tmp_path / "two", blobs=URL)
    bucket.objects.clear()
    with pytest.raises(StorageDamagedError, match="s3://fleet/blobs/ does not hold the blobs of this coordinator"):
        open_store(tmp_path / "one", init=True, blobs=URL)


def test_a_place_that_another_coordinator_claims_at_the_same_time_is_refused(
    tmp_path: Path, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = buckets.Handler.fail

    def claimed_meanwhile(handler: buckets.Handler, status: int, code: str) -> None:
        bucket.objects.setdefault("fleet/blobs/store-id", b"another one's")
        fail(handler, status, code)

    monkeypatch.setattr(buckets.Handler, "fail", claimed_meanwhile)
    with pytest.raises(StorageDamagedError, match="does not hold the blobs of this coordinator; name the bucket"):
        open_store(tmp_path / "data", blobs=URL)
    assert bucket.found("fleet") == {"blobs/store-id": b"another one's"}


def test_a_coordinator_whose_prefix_is_a_federation_of_another_one_loses_nothing_with_it(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    outer, inner = open_store(tmp_path / "outer", blobs=URL), open_store(tmp_path / "inner", blobs=f"{URL}/fed")
    address = inner.blobs.put("s", b"kept")
    for first in (0, 1):
        with outer.changing(federation_shelf("fed", first)):
            pass
    assert inner.blobs.read("s", address) == b"kept"


def test_a_round_asks_for_no_list_of_each_device(tmp_path: Path, bucket: buckets.Server) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", "bb")
        bucket.listings.clear()
        await whole(fleet, "a", "bb")

    play(tmp_path / "data", script)
    assert {prefix.split("/", 2)[2] for prefix in bucket.listings} == {"updates/", "downlinks/", "values/", "records/"}


def test_a_data_folder_keeps_the_place_of_its_blobs_from_its_first_start_on(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    for name, began, later, said in (
        ("one", URL, None, "has its blobs in a bucket; name it with --blobs"),
        ("two", None, "s3://fleet/two", "holds its blobs itself; leave --blobs out"),
    ):
        opened = open_store(tmp_path / name, blobs=began)
        for init in (False, True):
            with pytest.raises(ConfigError, match=said):
                open_store(tmp_path / name, init=init, blobs=later)
        open_store(tmp_path / name, blobs=began).close()
        opened.close()


def test_a_first_start_that_its_bucket_refused_may_begin_in_another_place(
    tmp_path: Path, bucket: buckets.Server
) -> None:
    open_store(tmp_path / "one", blobs=URL).close()
    for later in ("s3://fleet/two", None):
        folder = tmp_path / str(later is None)
        with pytest.raises(StorageDamagedError, match="name the bucket"):
            open_store(folder, blobs=URL)
        open_store(folder, blobs=later).close()
        open_store(folder, blobs=later).close()


def test_the_log_has_no_lines_of_boto3_and_so_no_session_token(
    tmp_path: Path, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
    caplog.set_level(logging.DEBUG)
    open_store(tmp_path / "data", blobs=URL).blobs.put("s", b"x")
    assert "session-token" not in caplog.text
    assert [r.message for r in caplog.records if r.name.startswith("botocore")] == []


@pytest.mark.parametrize("url", ["fleet", "s3://", "s3:///prefix", "https://fleet/blobs"])
def test_what_names_no_bucket_is_wrong_usage(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="names no bucket; give one like s3://"):
        open_store(tmp_path / "data", blobs=url)


def test_a_missing_boto3_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coord_server.store.s3", None)
    with pytest.raises(ConfigError, match=r"pip install 'maskfleet\[s3\]'"):
        open_store(tmp_path / "data", blobs=URL)
