"""Downlinks by audience: a failed one is made anew for the same record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coord_server.aggregation import Encoded
from coord_server.live import downlinks
from coord_server.live.downlinks import Downlinks
from coord_server.live.status import MethodError
from coord_server.store.blobs import FolderBlobs

RECORDS = {"a": 7, "b": 7, "c": None}


def made(
    failures: list[Exception], monkeypatch: pytest.MonkeyPatch, blobs: FolderBlobs | None = None
) -> tuple[Downlinks, list[Any]]:
    """Downlinks whose first encodings raise `failures`, and the records that they are made for."""
    asked: list[Any] = []

    def downlink(method: Any, course: Any, round_: int, state: Any, record: Any) -> Encoded:
        asked.append(record)
        if failures:
            raise failures.pop(0)
        return Encoded(repr(record).encode(), {"all": 1})

    async def current() -> Any:
        return SimpleNamespace(round=1, course=None, state=None)

    monkeypatch.setattr(downlinks.aggregation, "downlink", downlink)
    method = SimpleNamespace(name="m", audience=lambda course, round_, record: f"from-{record}")
    held = SimpleNamespace(
        current=current, record=lambda device, round_: RECORDS[device], method=method, shelf=lambda kind, round_: "s"
    )
    return Downlinks(blobs or SimpleNamespace(), held), asked  # type: ignore[arg-type]


def test_a_downlink_that_failed_is_made_again_for_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    there, asked = made([OSError("disk full")], monkeypatch)

    async def script() -> None:
        with pytest.raises(MethodError, match="disk full"):
            await there.get(2, "a")
        assert (await there.get(2, "a")).data == b"7"
        assert (await there.get(2, "b")).data == b"7"
        assert (await there.get(2, "c")).data == b"None"

    asyncio.run(script())
    assert asked == [7, 7, None]  # once for an audience, and once more after the failure


def test_the_devices_of_an_audience_that_ask_at_once_share_one_downlink(monkeypatch: pytest.MonkeyPatch) -> None:
    there, asked = made([], monkeypatch)

    async def script() -> None:
        found = await asyncio.gather(*(there.get(2, device) for device in "abab"))
        assert {f.data for f in found} == {b"7"}

    asyncio.run(script())
    assert asked == [7]


@pytest.mark.parametrize("left", [None, b"", b"77"], ids=["gone", "cut", "longer"])
def test_a_downlink_that_is_lost_in_the_blob_store_is_made_again(
    left: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlinks, "IN_MEMORY", 0)
    blobs = FolderBlobs(tmp_path)
    there, asked = made([], monkeypatch, blobs)

    async def script() -> None:
        first = await there.get(2, "a")
        assert (first.data, blobs.read("s", first.sha256)) == (None, b"7")
        assert await there.get(2, "b") is first
        if left is None:
            (tmp_path / "s" / first.sha256).unlink()
        else:
            (tmp_path / "s" / first.sha256).write_bytes(left)
        assert await there.get(2, "a") == first
        assert blobs.read("s", first.sha256) == b"7"

    asyncio.run(script())
    assert asked == [7, 7]
