"""Stored bytes by their SHA-256: small ones in their row of the database, large ones in the blob store.

A small one costs one sync of the disk, the row's; a large one would make the database grow and be copied twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from coord_server.store.blobs import FolderBlobs
from edge_client.bundle import digest
from edge_client.errors import StorageDamagedError

INLINE = 256 * 1024  # bytes of a content that is stored in its row


@dataclass(frozen=True)
class Content:
    """Bytes by their SHA-256; `data` is None when they are a blob, on the shelf that their row implies."""

    sha256: str
    data: bytes | None


def put(blobs: FolderBlobs, shelf: str, data: bytes) -> Content:
    """Make `data` ready for its row: a large one is a durable blob once this returns. Blocks. Raises StateError."""
    if len(data) <= INLINE:
        return Content(digest(data), data)
    return Content(blobs.put(shelf, data), None)


def read(blobs: FolderBlobs, shelf: str, content: Content) -> bytes:
    """The bytes as they were written. Blocks. Raises StorageDamagedError when they are damaged or missing."""
    if content.data is None:
        return blobs.read(shelf, content.sha256)
    if digest(content.data) != content.sha256:
        raise StorageDamagedError(
            f"{shelf} in the database is damaged: its SHA-256 is not {content.sha256}; check the coordinator's disk "
            "and restore its data folder"
        )
    return content.data
