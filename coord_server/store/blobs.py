"""Bytes that outlive a crash: a folder of files named by their SHA-256.

A blob lies in a *shelf* (a relative folder such as ``har/updates/3``), so that what belongs together goes together: a
shelf is dropped whole once nothing can ask for it, and equal bytes on two shelves never share a file. A durable write
is: temporary file, fsync, rename, fsync of the folder. Several processes may use one folder: each has a folder of its
own for temporary files, with a lock that the operating system releases when the process ends. Another backend
implements `Blobs` and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol
from uuid import uuid4

from edge_client.errors import StorageDamagedError, StorageFullError, StorageUnreachableError
from edge_client.files import make_folder, sync_folder

CHUNK = 1 << 20  # bytes read at a time when a blob is streamed
INCOMING = "incoming"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Stored:
    """A blob's address within its shelf, and its size in bytes."""

    sha256: str
    size: int


class Incoming(Protocol):
    """A blob being received. Nothing of it is visible before `commit`; `discard` may be called at any time."""

    def write(self, chunk: bytes | bytearray) -> None:
        """Append. Raises StateError when the disk takes no more."""
        ...

    def stored(self) -> Stored:
        """Digest and size of what was written so far."""
        ...

    def content(self) -> bytes:
        """Everything written so far. Raises StateError."""
        ...

    def commit(self) -> Stored:
        """Make it durable under its digest. Raises StateError."""
        ...

    def discard(self) -> None:
        """Drop it, unless it was committed."""
        ...


class Blobs(Protocol):
    """Where blobs are kept."""

    def receive(self, shelf: str) -> Incoming:
        """Begin to receive a blob into `shelf`."""
        ...

    def put(self, shelf: str, data: bytes, durable: bool = True) -> Stored:
        """Store `data`; with `durable` it survives a power cut once this returns. Raises StateError.

        What can be made again need not be durable: after a power cut it is there, gone, or damaged, which `read` finds.
        """
        ...

    def read(self, shelf: str, sha256: str) -> bytes:
        """All bytes of a blob. Raises StateError when it is not there, or no longer what its address says."""
        ...

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` .. `stop - 1`, a chunk at a time, unchecked: the receiver of all of them has the digest."""
        ...

    def size(self, shelf: str, sha256: str) -> int | None:
        """Size of a blob, None when it is not there."""
        ...

    def shelves(self, under: str) -> list[str]:
        """Names of the shelves directly under a folder."""
        ...

    def drop(self, shelf: str) -> None:
        """Drop a shelf and everything on it; nothing happens when there is none."""
        ...


@contextmanager
def disk(what: str) -> Iterator[None]:
    """Turn the operating system's refusal into the StateError of its kind."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in FULL:
            raise StorageFullError(f"{what}: {reason}; free space on the coordinator's disk") from None
        raise StorageUnreachableError(f"{what}: {reason}; repair the coordinator's disk") from None


class FolderIncoming:
    """A temporary file that becomes a blob. The lock lets `discard` be called while a thread still writes."""

    def __init__(self, blobs: FolderBlobs, shelf: str) -> None:
        self._blobs, self._shelf = blobs, shelf
        self._hash, self._size = hashlib.sha256(), 0
        self._file: int | None = None
        self._path = blobs.temporary()
        self._lock, self._over = Lock(), False

    def write(self, chunk: bytes | bytearray) -> None:
        with self._lock:
            if not self._over:
                self._write(chunk)

    def _write(self, chunk: bytes | bytearray) -> None:
        self._hash.update(chunk)
        self._size += len(chunk)
        with disk("the upload was not stored"):
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._file, view) :]

    def stored(self) -> Stored:
        return Stored(self._hash.hexdigest(), self._size)

    def content(self) -> bytes:
        with disk("the upload cannot be read back"):
            return b"" if self._file is None else self._path.read_bytes()

    def commit(self) -> Stored:
        with self._lock:
            if self._over:
                raise StorageUnreachableError("the upload was dropped before it was stored; send it again")
            try:
                self._write(b"")
                assert self._file is not None
                with disk("the upload was not stored"):
                    self._blobs.settle(self._file, self._path, self._shelf, self.stored().sha256)
            finally:
                self._close()
        return self.stored()

    def discard(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)


class FolderBlobs:
    """Blobs as files below one folder, which several processes may share."""

    def __init__(self, root: Path) -> None:
        """Open, or create, the store in `root`, and remove what dead processes left half-written. Raises StateError."""
        self._root = root
        self._named: set[Path] = set()  # folders whose names are known to be on disk
        with disk(f"{root} cannot be used"):
            make_folder(root, "name another folder with --data")
            os.chmod(root, 0o700)
            (root / INCOMING).mkdir(mode=0o700, exist_ok=True)
            self._claim = _Claim(root / INCOMING / f"{os.getpid()}-{uuid4().hex[:12]}")
            for folder in {p.with_suffix("") for p in (root / INCOMING).iterdir()}:
                _sweep(folder)

    def close(self) -> None:
        """Remove the folder of temporary files."""
        self._claim.release()

    def temporary(self) -> Path:
        """A fresh name on the same file system."""
        return self._claim.folder / uuid4().hex

    def settle(self, file: int, path: Path, shelf: str, sha256: str) -> None:
        """Move the open file at `path` to its address and make it durable there. Raises OSError."""
        folder = self._root / shelf
        os.fsync(file)
        self._ensure(folder)
        os.replace(path, folder / sha256)
        sync_folder(folder)

    def _ensure(self, folder: Path) -> None:
        """Make a shelf whose name survives a power cut. One that exists may never have been synced."""
        if folder == self._root or (folder in self._named and folder.is_dir()):
            return
        self._ensure(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)
        self._named.add(folder)

    def receive(self, shelf: str) -> FolderIncoming:
        return FolderIncoming(self, shelf)

    def put(self, shelf: str, data: bytes, durable: bool = True) -> Stored:
        done = Stored(hashlib.sha256(data).hexdigest(), len(data))
        path = self.temporary()
        with disk(f"{len(data)} bytes for {shelf} were not stored"):
            try:
                with open(path, "xb", opener=_private) as file:
                    file.write(data)
                    if durable:
                        file.flush()
                        self.settle(file.fileno(), path, shelf, done.sha256)
                if not durable:
                    _folders(self._root / shelf)
                    os.replace(path, self._root / shelf / done.sha256)
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return done

    def read(self, shelf: str, sha256: str) -> bytes:
        try:
            data = (self._root / shelf / sha256).read_bytes()
        except FileNotFoundError:
            raise StorageDamagedError(
                f"blob {shelf}/{sha256} is missing; restore the coordinator's data folder"
            ) from None
        except OSError as error:
            raise StorageUnreachableError(f"blob {shelf}/{sha256} cannot be read: {error.strerror}") from None
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise StorageDamagedError(
                f"blob {shelf}/{sha256} is damaged: its SHA-256 is {found}; check the coordinator's disk and restore "
                "its data folder"
            )
        return data

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        with (self._root / shelf / sha256).open("rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(CHUNK, stop - start))
                if not chunk:
                    return
                start += len(chunk)
                yield chunk

    def size(self, shelf: str, sha256: str) -> int | None:
        try:
            return (self._root / shelf / sha256).stat().st_size
        except OSError:
            return None

    def shelves(self, under: str) -> list[str]:
        folder = self._root / under
        return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def drop(self, shelf: str) -> None:
        self._named.discard(self._root / shelf)
        shutil.rmtree(self._root / shelf, ignore_errors=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _folders(path: Path) -> None:
    """Make `path` and the folders above it that are missing, all private."""
    for folder in reversed([p for p in (path, *path.parents) if not p.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)


# --- folders of temporary files


class _Claim:
    """A folder that belongs to this process while it holds the lock on ``FOLDER.lock``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, _lock(folder)
        folder.mkdir(mode=0o700)

    def release(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.with_suffix(".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """An open lock file of `folder` that this process holds, None when another one holds it. Raises OSError."""
    path = folder.with_suffix(".lock")
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return None
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:  # else a sweep removed the file before it was locked
                return file
        os.close(file)


def _sweep(folder: Path) -> None:
    """Remove a folder of temporary files whose process is gone. Raises OSError."""
    lock = _lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink(missing_ok=True)
        os.close(lock)
