"""Bytes that outlive a crash: a folder of files named by their SHA-256.

A blob lies in a *shelf* (a relative folder such as ``har/updates/3``), so that what belongs together goes together: a
shelf is dropped whole once nothing can ask for it, and equal bytes on two shelves never share a file. A write is:
temporary file, fsync, rename, fsync of the folder. A *note* names a shelf whose row in the database comes or goes.
Several processes may use one folder: temporary files and notes are locked while a process needs them, and the operating
system releases a lock when its process ends. `s3` keeps the shelves in a bucket instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

from edge_client.errors import StorageDamagedError, StorageFullError, StorageUnreachableError
from edge_client.files import FULL, make_folder, sync_folder

CHUNK = 1 << 20  # bytes read at a time when a blob is streamed
INCOMING, BUNDLES = "incoming", "bundles"
DROPPED = ".dropped"  # ends the name of a shelf in INCOMING that waits for its removal
NOTE = ".note"  # ends the name of a note in INCOMING


class NoteHeldError(StorageUnreachableError):
    """Another request, here or at another coordinator, changes this shelf."""


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


def bundle_shelf(digest: str) -> str:
    """Where a bundle's manifest and parts lie."""
    return f"{BUNDLES}/{digest}"


def federation_shelf(id_: str, first: int) -> str:
    """Where a federation's blobs lie; `first` is the version it began with.

    So a process that does not know yet of a deletion touches no blob of the next federation of that name.
    """
    return f"{id_}~{first}"


def owner(shelf: str) -> tuple[str, int]:
    """The id and the first version of the federation whose blobs lie there."""
    id_, _, first = shelf.partition("~")
    return id_, int(first) if first.isdecimal() else 0


class Incoming:
    """A blob being received. Nothing of it is visible before `commit`.

    `discard` may be called at any time, even while a thread still writes: hence the lock.
    """

    def __init__(self, blobs: FolderBlobs, shelf: str) -> None:
        self._blobs, self._shelf = blobs, shelf
        self._hash, self._path = hashlib.sha256(), blobs.temporary()
        self._file: int | None = None
        self._lock, self._over = Lock(), False

    @property
    def sha256(self) -> str:
        """Of what was written so far."""
        return self._hash.hexdigest()

    def write(self, chunk: bytes | bytearray) -> None:
        """Append. Raises StateError when the disk takes no more."""
        with self._lock:
            if not self._over:
                self._write(chunk)

    def _write(self, chunk: bytes | bytearray) -> None:
        self._hash.update(chunk)
        with disk("the upload was not stored"):
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._file, view) :]

    def content(self) -> bytes:
        """Everything written so far. Raises StateError."""
        with disk("the upload cannot be read back"):
            return b"" if self._file is None else self._path.read_bytes()

    def commit(self) -> str:
        """Make it durable under its SHA-256, which is returned. Raises StateError."""
        with self._lock:
            if self._over:
                raise StorageUnreachableError("the upload was dropped before it was stored; send it again")
            try:
                self._write(b"")
                assert self._file is not None
                with disk("the upload was not stored"):
                    self._blobs.settle(self._file, self._path, self._shelf, self.sha256)
            finally:
                self._close()
        return self.sha256

    def discard(self) -> None:
        """Drop it, unless it was committed."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._over = True
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


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
            for path in (root / INCOMING).iterdir():
                if path.suffix == DROPPED:
                    shutil.rmtree(path, ignore_errors=True)
                elif path.suffix != NOTE and path.is_file():
                    _sweep(path)

    def temporary(self) -> Path:
        """A fresh name on the same file system."""
        return self._root / INCOMING / uuid4().hex

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

    def receive(self, shelf: str) -> Incoming:
        """Begin to receive a blob into `shelf`."""
        return Incoming(self, shelf)

    def put(self, shelf: str, data: bytes) -> str:
        """Store `data`; its SHA-256. It survives a power cut once this returns. Raises StateError."""
        incoming = self.receive(shelf)
        try:
            incoming.write(data)
            return incoming.commit()
        finally:
            incoming.discard()

    def read(self, shelf: str, sha256: str) -> bytes:
        """All bytes of a blob. Raises StateError when it is missing, or differs from its address."""
        name = f"blob {shelf}/{sha256}"
        try:
            data = (self._root / shelf / sha256).read_bytes()
        except FileNotFoundError:
            raise StorageDamagedError(f"{name} is missing; restore the coordinator's data folder") from None
        except OSError as error:
            raise StorageUnreachableError(
                f"{name} cannot be read: {error.strerror}; check the coordinator's disk"
            ) from None
        return intact(name, data, sha256, "check the coordinator's disk and restore its data folder")

    def stream(self, shelf: str, sha256: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` .. `stop - 1`, a chunk at a time, unchecked: the receiver of all of them has the digest."""
        return stream(self._root / shelf / sha256, start, stop)

    def size(self, shelf: str, sha256: str) -> int | None:
        """Size of a blob, None when it is not there."""
        try:
            return (self._root / shelf / sha256).stat().st_size
        except OSError:
            return None

    def holds(self, shelf: str, sha256: str) -> bool:
        """Whether a blob is there and undamaged; it is read a chunk at a time."""
        found, size = hashlib.sha256(), self.size(shelf, sha256)
        try:
            for chunk in self.stream(shelf, sha256, 0, size or 0):
                found.update(chunk)
        except OSError:  # a sector that cannot be read, or deleted meanwhile
            return False
        return found.hexdigest() == sha256

    def shelves(self, under: str) -> list[str]:
        """Names of the shelves directly under a folder."""
        folder = self._root / under
        return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def drop(self, shelf: str) -> None:
        """Drop a shelf and everything on it; nothing happens when there is none. Raises OSError.

        What cannot be removed once it has left its place is left to the next start.
        """
        self._named.discard(self._root / shelf)
        aside = self.temporary().with_suffix(DROPPED)
        try:
            os.rename(self._root / shelf, aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    # --- notes

    @contextmanager
    def noted(self, shelf: str) -> Iterator[Path]:
        """Hold the note of a shelf, the path given, while its row comes or goes. Raises NoteHeldError, StateError.

        The note is on disk before anything else happens, and stays until it is removed.
        """
        path = self._root / INCOMING / f"{shelf.replace('/', '+')}{NOTE}"
        with disk(f"{path.parent} cannot be used"):
            file = _held(path)
        if file is None:
            raise NoteHeldError(
                f"another request is changing {shelf.partition('~')[0]!r}; send this one again soon, "
                "or end a coordinator that stands still"
            )
        try:
            with disk(f"{path.parent} cannot be used"):
                sync_folder(path.parent)
            yield path
        finally:
            os.close(file)

    def notes(self) -> list[str]:
        """The shelves that have a note."""
        found = (self._root / INCOMING).glob(f"*{NOTE}")
        return sorted(path.name.removesuffix(NOTE).replace("+", "/") for path in found)


def intact(name: str, data: bytes, sha256: str, mend: str) -> bytes:
    """The bytes of a blob. Raises StorageDamagedError, with how to mend it, when they differ from its address."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise StorageDamagedError(f"{name} is damaged: its SHA-256 is {found}; {mend}")
    return data


def _held(path: Path) -> int | None:
    """The file at `path`, made if need be, locked until it is closed; None: another one has it. Raises OSError."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    with suppress(BlockingIOError, FileNotFoundError):  # another one has it, or had it and removed it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)
    return None


def stream(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Bytes `start` .. `stop - 1` of a file, a chunk at a time."""
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(min(CHUNK, stop - start)):
            start += len(chunk)
            yield chunk


def _sweep(path: Path) -> None:
    """Remove a temporary file unless a process writes it. Raises OSError.

    A file that is met between its creation and its lock is removed too; then its update is refused and sent again.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # its process has just finished it
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(file)
