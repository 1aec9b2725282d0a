"""What the coordinator writes down: metadata in tables, bytes in blobs. One data folder, one process.

DATA/coordinator.db     tables (SQLite), unless a database URL is given
DATA/blobs/             bundles/DIGEST/, FEDERATION/{state,records/DEVICE,updates/ROUND,downlinks/ROUND}/
DATA/operator-token     the operator's token, readable by its owner only
DATA/lock               held by the coordinator that runs
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from coord_server.store.blobs import Blobs, FolderBlobs
from coord_server.store.metadata import Metadata
from edge_client.errors import StateError
from edge_client.files import make_folder


@dataclass(frozen=True)
class Store:
    """Both halves, and the lock that keeps a second coordinator away."""

    folder: Path
    metadata: Metadata
    blobs: Blobs
    lock: int

    def close(self) -> None:
        """Close the database and release the lock."""
        self.metadata.close()
        os.close(self.lock)


def open_store(folder: Path, database: str | None = None) -> Store:
    """Open or create the data folder. Raises StateError when it cannot be used or another coordinator uses it."""
    make_folder(folder, "name another folder with --data")
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StateError(f"{folder} cannot be used: {error.strerror}; name a folder that can be written") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StateError(f"another coordinator is using {folder}; stop it or name another folder") from None
    try:
        metadata = Metadata(database or f"sqlite:///{folder.absolute() / 'coordinator.db'}")
        return Store(folder, metadata, FolderBlobs(folder / "blobs"), lock)
    except BaseException:
        os.close(lock)
        raise
