"""What the coordinator stores: metadata in tables, bytes in blobs. Several processes may share one data folder.

DATA/coordinator.db     tables (SQLite), unless a database URL is given
DATA/blobs/             incoming/, bundles/DIGEST/, FEDERATION/{values,updates,downlinks}/ROUND/,
                        FEDERATION/records/DEVICE/ROUND/
DATA/store-id           the marker: the id that the database holds too, so that a wrong or lost half is detected
DATA/operator-token     the operator's token, readable by its owner only
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from coord_server.store.blobs import INCOMING, FolderBlobs, disk
from coord_server.store.metadata import Metadata
from edge_client.errors import StorageDamagedError
from edge_client.files import make_folder, write_whole

DATABASE, BLOBS, MARKER = "coordinator.db", "blobs", "store-id"
ELSEWHERE = "name another folder with --data"


@dataclass(frozen=True)
class Store:
    """Both halves of the storage."""

    folder: Path
    metadata: Metadata
    blobs: FolderBlobs

    def close(self) -> None:
        """Close the database."""
        self.metadata.close()


def open_store(folder: Path, database: str | None = None, init: bool = False) -> Store:
    """Open or create the data folder. Raises StateError when it cannot be used or has lost one half.

    With `init` such a folder starts anew: the other half is renamed, never deleted.
    """
    make_folder(folder, ELSEWHERE)
    try:
        return _open(folder, database)
    except StorageDamagedError as error:
        if not init:
            raise StorageDamagedError(f"{error}, or start anew with --init, which deletes nothing") from None
        if database is not None:
            raise StorageDamagedError(f"{error}; for --init, empty that database or name another one") from None
    _set_aside(folder)
    return _open(folder, None)


def _open(folder: Path, database: str | None) -> Store:
    if database is None:
        _private(folder / DATABASE)
        database = f"sqlite:///{folder.absolute() / DATABASE}"
    metadata = Metadata(database)
    try:
        _match(folder, metadata)
        return Store(folder, metadata, FolderBlobs(folder / BLOBS))
    except BaseException:
        metadata.close()
        raise


def _private(path: Path) -> None:
    """Make the database's file readable by its owner only; SQLite gives the same mode to the files beside it."""
    with disk(f"{path} cannot be used"):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        for file in path.parent.glob(f"{path.name}*"):
            file.chmod(0o600)


def _match(folder: Path, metadata: Metadata) -> None:
    """Check that database and folder belong together; mark both when both are new. Raises StateError."""
    marker, blobs = folder / MARKER, folder / BLOBS
    with metadata.writing() as c:  # a second process that starts now waits here
        stored, marked = metadata.identify(c, None), _read(marker)
        lost = not (blobs / "bundles").is_dir() if metadata.holds_bundles(c) else not blobs.is_dir()
        if stored is not None and stored == marked and not lost:
            return
        names = {p.name for p in blobs.iterdir()} if blobs.is_dir() else set[str]()
        if stored is None and names <= {INCOMING, "lost+found"}:
            fresh = marked or uuid4().hex  # marked: an earlier start was killed before its database was written
            metadata.identify(c, fresh)
            _mark(marker, blobs, fresh)
            return
        if stored is None:
            fault = f"the folder {folder} holds a coordinator's blobs, but its database is new"
        elif marked is None or stored == marked:
            fault = f"the database holds a coordinator's tables, but the folder {folder} has lost its blobs"
        else:
            fault = f"the folder {folder} and the database belong to different coordinators"
    raise StorageDamagedError(f"{fault}; mount or restore what is missing")


def _read(marker: Path) -> str | None:
    with disk(f"{marker} cannot be read"):
        return marker.read_text(errors="replace").strip() if marker.exists() else None


def _mark(marker: Path, blobs: Path, id_: str) -> None:
    """Create the folder of blobs, then the marker."""
    make_folder(blobs, ELSEWHERE)
    write_whole(marker, f"{id_}\n".encode(), elsewhere=ELSEWHERE)


def _set_aside(folder: Path) -> None:
    """Rename what is left of a data folder that lost a half. Raises StateError."""
    number = next(n for n in range(1, 1_000_000) if not any(folder.glob(f"*.lost-{n}")))
    with disk(f"{folder} cannot be used"):
        for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", BLOBS, MARKER):
            if (folder / name).exists():
                (folder / name).rename(folder / f"{name}.lost-{number}")
