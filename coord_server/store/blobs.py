"""Bytes that outlive a crash: a folder of files named by their SHA-256.

A blob lies in a *shelf* (a relative folder such as ``har/updates/3``), so that what belongs together goes together:
a shelf is dropped whole once its round is over, and equal bytes in two shelves never share a file. A durable write
is: temporary file, fsync, rename, fsync of the folder. Where a row of the database will say that a blob is there
(`indexed`), nobody believes its name alone, so it is renamed before both syncs: that is one wait for the disk and
not two. Another backend implements `Blobs` and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol
from uuid import uuid4

from edge_client.errors import StateError
from edge_client.files import make_folder, sync_folder

CHUNK = 1 << 20  # bytes read at a time when a blob is streamed


@dataclass(frozen=True)
class Stored:
    """A blob's address within its shelf, and its size in bytes."""

    sha256: str
    size: int


class Incoming(Protocol):
    """A blob being received. Nothing of it is visible before `commit`; `discard` may be called at any time."""

    def write(self, chunk: bytes) -> None:
        """Append. Raises StateError when the disk takes no more."""
        ...

    def stored(self) -> Stored:
        """Digest and size of what was written so far."""
        ...

    def content(self) -> bytes:
        """Everything written so far."""
        ...

    def commit(self, indexed: bool = False) -> Stored:
        """Make it durable under its digest; `indexed` when a row will say that it is there. Raises StateError."""
        ...

    def discard(self) -> None:
        """Forget it unless it was committed."""
        ...


class Blobs(Protocol):
    """Where blobs are kept."""

    def receive(self, shelf: str) -> Incoming:
        """Begin to receive a blob into `shelf`."""
        ...

    def put(self, shelf: str, data: bytes, durable: bool = True, indexed: bool = False) -> Stored:
        """Store `data`; with `durable` it survives a power cut once this returns. Raises StateError.

        `indexed` when a row will say that it is there. Not durable is what can be made again: after a power cut it is
        there, gone, or torn, which `read` tells.
        """
        ...

    def read(self, shelf: str, sha256: str) -> bytes:
        """All bytes of a blob. Raises StateError when it is not there, or no longer what its address says."""
        ...

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` .. `stop - 1`, a chunk at a time, as they lie there: whoever gets all of them checks them."""
        ...

    def size(self, shelf: str, sha256: str) -> int | None:
        """Size of a blob, None when it is not there."""
        ...

    def shelves(self, under: str) -> list[str]:
        """Names of the shelves directly under a folder."""
        ...

    def keep_only(self, shelf: str, digests: set[str]) -> None:
        """Drop every other blob of `shelf`."""
        ...

    def drop(self, shelf: str) -> None:
        """Drop a shelf and everything in it; nothing happens when there is none."""
        ...


def _full(what: str, error: OSError) -> StateError:
    reason = error.strerror or type(error).__name__
    return StateError(f"{what}: {reason}; free space or repair the disk of the coordinator, then send it again")


class FolderIncoming:
    """A temporary file that becomes a blob. In memory until it outgrows one chunk.

    Whoever gives up may `discard` while a thread still writes: the lock keeps the file open until it is done.
    """

    def __init__(self, store: FolderBlobs, shelf: str) -> None:
        self._store, self._shelf = store, shelf
        self._hash, self._size = hashlib.sha256(), 0
        self._memory: list[bytes] = []
        self._file: int | None = None
        self._path = store.temporary()
        self._lock, self._over = Lock(), False

    def write(self, chunk: bytes) -> None:
        with self._lock:
            if self._over or not chunk:
                return
            self._hash.update(chunk)
            self._size += len(chunk)
            self._memory.append(chunk)
            if self._size > CHUNK:
                self._spill()

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
            for piece in self._memory:
                view = memoryview(piece)
                while view:
                    view = view[os.write(self._file, view) :]
        except OSError as error:
            raise _full("the upload was not stored", error) from None
        self._memory = []

    def stored(self) -> Stored:
        return Stored(self._hash.hexdigest(), self._size)

    def content(self) -> bytes:
        if self._file is None:
            return b"".join(self._memory)
        return self._path.read_bytes()

    def commit(self, indexed: bool = False) -> Stored:
        with self._lock:
            if self._over:
                raise StateError("the upload was given up before it was stored; send it again")
            self._spill()
            done = self.stored()
            try:
                if self._file is not None:
                    self._store.settle(self._file, self._path, self._shelf, done.sha256, indexed)
            except OSError as error:
                raise _full("the upload was not stored", error) from None
            finally:
                self._close()
        return done

    def discard(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._over = True
        self._memory = []
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)


class FolderBlobs:
    """Blobs as files below one folder. Used by one process at a time."""

    def __init__(self, root: Path) -> None:
        """Open, or create, the store in `root`; what a crash left half-written is removed. Raises StateError."""
        self._root, self._temporary, self._naming = root, root / "incoming", Lock()
        self._named: set[Path] = set()  # folders whose names are known to be on disk
        try:
            shutil.rmtree(self._temporary, ignore_errors=True)
            make_folder(root, "name another folder with --data")
            self._temporary.mkdir()
        except OSError as error:
            raise _full(f"{root} cannot be used", error) from None

    def temporary(self) -> Path:
        """A fresh name on the same file system."""
        return self._temporary / uuid4().hex

    def settle(self, file: int, path: Path, shelf: str, sha256: str, indexed: bool) -> None:
        """Move the open file at `path` to its address and make it durable there. Raises OSError."""
        folder = self._root / shelf
        self._ensure(folder)
        target = folder / sha256
        with self._naming:
            early = indexed and not target.exists()  # one that is there may be relied upon already: never tear it
            if early:
                os.replace(path, target)
        os.fsync(file)
        if not early:
            os.replace(path, target)
        sync_folder(folder)

    def _ensure(self, folder: Path) -> None:
        """Make a shelf whose name survives a power cut, also when it is there already: nobody may have synced it."""
        if folder == self._root or (folder in self._named and folder.is_dir()):
            return
        self._ensure(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
        self._named.add(folder)

    def receive(self, shelf: str) -> FolderIncoming:
        return FolderIncoming(self, shelf)

    def put(self, shelf: str, data: bytes, durable: bool = True, indexed: bool = False) -> Stored:
        done = Stored(hashlib.sha256(data).hexdigest(), len(data))
        path = self.temporary()
        try:
            with path.open("xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    self.settle(file.fileno(), path, shelf, done.sha256, indexed)
            if not durable:
                (self._root / shelf).mkdir(parents=True, exist_ok=True)
                os.replace(path, self._root / shelf / done.sha256)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _full(f"{len(data)} bytes for {shelf} were not stored", error) from None
        return done

    def _path(self, shelf: str, sha256: str) -> Path:
        return self._root / shelf / sha256

    def read(self, shelf: str, sha256: str) -> bytes:
        try:
            data = self._path(shelf, sha256).read_bytes()
        except OSError as error:
            raise StateError(
                f"blob {shelf}/{sha256} cannot be read: {error.strerror}; restore the coordinator's data folder"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise StateError(
                f"blob {shelf}/{sha256} is damaged: its SHA-256 is {found}; check the coordinator's disk and restore "
                "its data folder"
            )
        return data

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        with self._path(shelf, sha256).open("rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(CHUNK, stop - start))
                if not chunk:
                    return
                start += len(chunk)
                yield chunk

    def size(self, shelf: str, sha256: str) -> int | None:
        try:
            return self._path(shelf, sha256).stat().st_size
        except OSError:
            return None

    def shelves(self, under: str) -> list[str]:
        folder = self._root / under
        return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def keep_only(self, shelf: str, digests: set[str]) -> None:
        folder = self._root / shelf
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_file() and path.name not in digests:
                path.unlink(missing_ok=True)

    def drop(self, shelf: str) -> None:
        self._named.discard(self._root / shelf)
        shutil.rmtree(self._root / shelf, ignore_errors=True)
