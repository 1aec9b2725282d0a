"""What the coordinator stores: metadata in tables, bytes in blobs. Several processes may share one data folder.

DATA/coordinator.db     tables (SQLite), unless a database URL is given
DATA/blobs/             incoming/ (what is written or removed just now; a start empties it), bundles/DIGEST/,
                        FEDERATION~FIRST/{values,updates,downlinks}/ROUND/,
                        FEDERATION~FIRST/records/DEVICE/ROUND/; FIRST tells federations of one name apart;
                        with a bucket (`s3`) all but incoming/ is there
DATA/store-id           the marker: the id that the database holds too, so that a wrong or lost half is detected;
                        "new ID" until the database holds it, so that a first start can be killed at any time;
                        "ID in a bucket" where the blobs are
DATA/operator-token     the operator's token, readable by its owner only
DATA/lock               held while a process opens the folder
DATA/spare              room that a deletion takes on a full disk: it frees more, and writes first
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from sqlalchemy import URL

from coord_server.auth import OPERATOR_FILE
from coord_server.store.blobs import BUNDLES, INCOMING, FolderBlobs, NoteHeldError, disk
from coord_server.store.metadata import Metadata
from edge_client.errors import ConfigError, MaskfleetError, StateError, StorageDamagedError
from edge_client.files import make_folder, sync_folder, write_whole

if TYPE_CHECKING:
    from coord_server.store.s3 import Bucket

log = logging.getLogger("maskfleet")
T = TypeVar("T")

DATABASE, BLOBS, MARKER, LOCK, SPARE = "coordinator.db", "blobs", "store-id", "lock", "spare"
SPARE_BYTES = 4 << 20
NEW = "new "  # before the id in the marker of a first start
AWAY = " in a bucket"  # after the id, where the blobs are
FOREIGN = "lost+found"  # the file system's own folder
LEFT = "blobs of %s may be left, the next start tries again: %s"
PATIENCE, AGAIN = 30.0, 0.05  # seconds to wait for a note that another request holds; between two looks
ELSEWHERE, MEND = "name another folder with --data", "mount or restore what is missing"


async def in_turn(change: Callable[[], T]) -> T:
    """`change` in a thread, once no other request changes its shelf; waiting takes no thread. Raises StateError."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await asyncio.to_thread(change)
        except NoteHeldError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(AGAIN)


@dataclass(frozen=True)
class Store:
    """Both halves of the storage."""

    folder: Path
    metadata: Metadata
    blobs: FolderBlobs

    def close(self) -> None:
        """Close the database."""
        self.metadata.close()

    @contextmanager
    def changing(self, shelf: str, started: bool = False, deletes: bool = False) -> Iterator[None]:
        """While the row of a shelf comes or goes, of one process at a time: `in_turn` waits for the others. Blocks.

        What `deletes` may use the spare room. Its end takes the room again, but not if it never had its note: one that
        waits would take what another one has freed.

        A shelf without a row at the end is dropped, after a kill by the next start. A thread may still write there: so
        the note of a shelf that went stays until the next start, which has `started`. Raises NoteHeldError, StateError.
        """
        if deletes:
            with suppress(OSError):  # without it a deletion may still find room
                (self.folder / SPARE).unlink()  # before the note, which takes room too
        with self.blobs.noted(shelf) as note:
            try:
                yield
            finally:
                try:
                    here = self.metadata.names(shelf)
                    if not here:
                        self.blobs.drop(shelf)
                    if here or started:
                        note.unlink()
                except (MaskfleetError, OSError) as error:
                    log.warning(LEFT, shelf, error)
                if deletes:
                    self._spare()

    def _spare(self) -> None:
        """Take the spare room. Where the disk has less, none is taken: a part of it may be too small to delete."""
        spare = self.folder / SPARE
        with suppress(OSError):
            if spare.is_file() and spare.stat().st_size == SPARE_BYTES:
                return
            try:
                spare.write_bytes(os.urandom(SPARE_BYTES))  # which no file system compresses
            except OSError:
                spare.unlink()

    def sweep(self) -> None:
        """Drop what is left of creations and deletions that were killed. Blocks; a failure is logged."""
        for shelf in self.blobs.notes():
            try:
                with self.changing(shelf, started=True):
                    pass
            except NoteHeldError:  # whose holder drops what is left
                continue
            except MaskfleetError as error:
                log.warning(LEFT, shelf, error)
        self._spare()  # last: the sweep may have freed what it takes


def open_store(folder: Path, database: str | None = None, init: bool = False, blobs: str | None = None) -> Store:
    """Open the data folder, or create one that does not exist. Raises StateError when it cannot be used.

    A folder that is empty or has lost one half is refused: its disk may not be mounted. With `init` it starts anew; the
    other half is renamed, never deleted; not with `database` or a bucket of `blobs`, which may hold other data.
    """
    bucket = None if blobs is None else _bucket(blobs)
    if not folder.exists():
        _create(folder)
    if not folder.is_dir():
        raise StateError(f"{folder} is a file, not a folder; {ELSEWHERE}")
    with disk(f"{folder} cannot be used"):
        empty = {p.name for p in folder.iterdir()} <= {FOREIGN, OPERATOR_FILE, LOCK, SPARE}
    if empty and not init:
        advice = "if its disk is not mounted, mount it; --init starts anew in it"
        raise StorageDamagedError(f"the folder {folder} is empty; {advice}")
    try:
        return _open(folder, database, bucket)
    except StorageDamagedError as error:
        if database is not None:
            raise StorageDamagedError(f"{error}, or start anew with an empty database and another --data") from None
        if bucket is not None:
            raise StorageDamagedError(f"{error}, or start anew with another --blobs and another --data") from None
        if not init:
            raise StorageDamagedError(f"{error}, or start anew with --init, which deletes nothing") from None
    _set_aside(folder)
    return _open(folder, None, None)


def _bucket(url: str) -> Bucket:
    """The bucket of `--blobs`. Raises ConfigError."""
    try:
        from coord_server.store.s3 import open_bucket
    except ImportError as error:
        raise ConfigError(f"--blobs {url}: {error}; pip install 'maskfleet[s3]'") from None
    return open_bucket(url)


def _create(folder: Path) -> None:
    """Create a data folder that is never empty, so that no process mistakes it for one that was emptied."""
    new = folder.with_name(f"{folder.name}.first-start")  # a start that is killed leaves it to the next one
    try:
        make_folder(new, ELSEWHERE)
        with _alone(new), disk(f"{folder} cannot be made"):
            if not folder.exists():
                _mark_new(new, uuid4().hex)
                new.rename(folder)
                sync_folder(folder.parent)
    except StateError:
        if not folder.exists():
            raise
    shutil.rmtree(new, ignore_errors=True)  # it is there when another process was first


def _open(folder: Path, database: str | None, bucket: Bucket | None) -> Store:
    with _alone(folder):
        if database is None:
            _private(folder / DATABASE)
        file = URL.create("sqlite", database=str(folder.absolute() / DATABASE))  # text would end the name at a ?
        metadata = Metadata(file if database is None else database)
        try:
            _match(folder, metadata, bucket)
            blobs = FolderBlobs(folder / BLOBS) if bucket is None else bucket.blobs(folder / BLOBS)
            return Store(folder, metadata, blobs)
        except BaseException:
            metadata.close()
            raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Processes that start together open the folder one after another: SQLite creates a database for one at a time.

    A process that is killed loses the lock at once. Raises StateError.
    """
    with disk(f"{folder} cannot be used"):
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _private(path: Path) -> None:
    """Make the database's file readable by its owner only; SQLite gives the same mode to the files beside it."""
    with disk(f"{path} cannot be used"):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        for file in path.parent.glob(f"{path.name}*"):
            file.chmod(0o600)


def _match(folder: Path, metadata: Metadata, bucket: Bucket | None) -> None:
    """Check that database, folder and bucket belong together; mark them when they are new. Raises StateError."""
    blobs = folder / BLOBS
    with metadata.database.writing("store") as c:  # a second process that starts now waits here
        stored, (marked, new, away) = metadata.identify(c, None), _read(folder / MARKER)
        if marked is not None and not new and away != (bucket is not None):
            raise ConfigError(
                f"the folder {folder} has its blobs in a bucket; name it with --blobs"
                if away
                else f"the folder {folder} holds its blobs itself; leave --blobs out, or name another --data"
            )
        there = blobs / BUNDLES if bucket is None and metadata.holds_bundles(c) else blobs
        lost = not there.is_dir()
        names = {p.name for p in blobs.iterdir()} if blobs.is_dir() else set[str]()
        if stored is None and (new or marked is None) and names <= {INCOMING, FOREIGN}:
            if marked is None:
                marked, new = uuid4().hex, True
                _mark_new(folder, marked)
            metadata.identify(c, marked)
        elif stored is None:
            raise StorageDamagedError(
                f"the folder {folder} holds a coordinator's data, but its database is new; {MEND}"
            )
        elif lost or marked is None or (new and stored != marked):
            fault = f"the database holds a coordinator's tables, but the folder {folder} has lost its blobs"
            raise StorageDamagedError(f"{fault}; {MEND}")
        elif stored != marked:
            fault = f"the folder {folder} and the database belong to different coordinators"
            raise StorageDamagedError(f"{fault}; {MEND}")
    if bucket is not None:
        assert marked is not None
        bucket.claim(marked, new)
    if new:
        place = "" if bucket is None else AWAY
        write_whole(folder / MARKER, f"{marked}{place}\n".encode(), elsewhere=ELSEWHERE)


def _read(marker: Path) -> tuple[str | None, bool, bool]:
    """The id in the marker, None without one; whether the database need not hold it yet; whether a bucket has blobs."""
    with disk(f"{marker} cannot be read"):
        text = marker.read_text(errors="replace").strip() if marker.exists() else ""
    return text.removeprefix(NEW).removesuffix(AWAY) or None, text.startswith(NEW), text.endswith(AWAY)


def _mark_new(folder: Path, id_: str) -> None:
    """Create the folder of blobs, then the marker of a first start."""
    make_folder(folder / BLOBS, ELSEWHERE)
    write_whole(folder / MARKER, f"{NEW}{id_}\n".encode(), elsewhere=ELSEWHERE)


def _set_aside(folder: Path) -> None:
    """Rename what is left of a data folder that lost a half. Raises StateError."""
    number = next(n for n in range(1, 1_000_000) if not any(folder.glob(f"*.lost-{n}")))
    with disk(f"{folder} cannot be used"):
        for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", BLOBS, MARKER):
            if (folder / name).exists():
                (folder / name).rename(folder / f"{name}.lost-{number}")
