"""Files that survive a power cut, and the operating system's refusals as sentences.

A file's bytes are safe once the file is synced, its name once its folder is synced: only both together count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from edge_client.errors import StateError, StorageFullError

RESERVE = 16 << 20  # bytes of a disk that a download leaves free, for the journal
BLOCK = 1 << 20  # bytes hashed at a time
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk(path: Path, elsewhere: str = "choose another folder with --state") -> Iterator[None]:
    """Turn an OSError into a StateError with what to do; `elsewhere` is the last resort."""
    try:
        yield
    except OSError as error:
        fault = f"cannot use {path}: {error.strerror or error}"
        if error.errno in FULL:
            raise StorageFullError(
                f"{fault}; free some space, then run the same command again: nothing is lost"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"give this user write access, or {elsewhere}"
        else:
            advice = elsewhere
        raise StateError(f"{fault}; {advice}") from None


def _write(path: Path, chunks: tuple[bytes | memoryview, ...], mode: int) -> None:
    with open(path, "wb", opener=lambda p, flags: os.open(p, flags, mode)) as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(path: Path, elsewhere: str = "choose another folder with --state") -> None:
    """Make a private folder, and the missing ones above it, safe from a power cut. Raises StateError."""
    with disk(path, elsewhere):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)


def write_whole(
    path: Path, *chunks: bytes | memoryview, mode: int = 0o600, elsewhere: str = "choose another folder with --state"
) -> None:
    """Replace the content of `path`: a reader, or the next start after a power cut, sees the old or the new one whole.

    A link stays; what it names is replaced. Raises StateError (disk full, not writable, no ordinary file); the old
    content then stays.
    """
    with disk(path, elsewhere):
        path = Path(os.path.realpath(path))
        if path.exists() and not path.is_file():  # a folder, a pipe or a device, which a file would replace
            raise FileExistsError(errno.EEXIST, "it is no ordinary file")
        temporary = path.parent / f"{path.name}.new"  # with_name refuses "." and "/"
        try:
            _write(temporary, chunks, mode)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


# --- downloads


def check_room(path: Path, size: int) -> None:
    """Raise StorageFullError unless the disk of `path` takes `size` bytes more and keeps a reserve."""
    with disk(path):
        free = shutil.disk_usage(path.parent).free
    if free < size + RESERVE:
        raise StorageFullError(
            f"{path} needs {size} bytes and {RESERVE} have to stay free, but its disk has only {free}; "
            "free some space, then run the same command again: nothing is lost"
        )


def append(path: Path, at: int, chunks: Iterable[bytes]) -> None:
    """Write `chunks` to `path` from byte `at` on. Raises StateError."""
    with disk(path):
        file = open(path, "r+b" if at else "wb")  # noqa: SIM115
    with file:
        file.seek(at)
        for chunk in chunks:  # a broken link raises here, which is not the disk's fault
            with disk(path):
                file.write(chunk)
                file.flush()


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hex, read block by block."""
    found = sha256()
    with disk(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def replace(source: Path, target: Path) -> None:
    """Give the synced bytes of `source` the name `target`, safe from a power cut. Raises StateError."""
    with disk(target):
        with source.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(source, target)
        sync_folder(target.parent)
