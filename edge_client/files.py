"""Files that survive a power cut, and what the operating system's refusals mean to a person. What they hold: elsewhere.

A file's bytes are safe once the file is synced, its name once its folder is: only both together count.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_client.errors import StateError


@contextmanager
def disk(path: Path, elsewhere: str = "choose another folder with --state") -> Iterator[None]:
    """Turn the operating system's refusal into a StateError that says what to do, `elsewhere` at the last."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space, then run the same command again: nothing is lost"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"give this user write access, or {elsewhere}"
        else:
            advice = elsewhere
        raise StateError(f"cannot use {path}: {error.strerror or error}; {advice}") from None


def _write(path: Path, chunks: tuple[bytes | memoryview, ...], mode: int, over: bool = False) -> None:
    with open(path, "r+b" if over else "wb", opener=lambda p, flags: os.open(p, flags, mode)) as file:
        for chunk in chunks:
            file.write(chunk)
        file.truncate()
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
    """Make a private folder, and those above it that are missing, safe from a power cut. Raises StateError."""
    with disk(path, elsewhere):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)


def write_whole(
    path: Path, *chunks: bytes | memoryview, mode: int = 0o600, elsewhere: str = "choose another folder with --state"
) -> None:
    """Replace `path` by `chunks` so that a reader, or the next start after a power cut, sees all or nothing.

    Once this returns it is all. Raises StateError (disk full, not writable); the old content then stays.
    """
    temporary = path.with_name(path.name + ".new")
    with disk(path, elsewhere):
        try:
            _write(temporary, chunks, mode)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def write_new(path: Path, *chunks: bytes | memoryview, spare: Path | None = None) -> None:
    """Write `chunks` under their final name at once, for a file that tells by itself whether it is whole.

    Once this returns the file and its name are safe; until then a power cut may leave a torn one, or one with the
    content of `spare`: a file nobody needs any more, which is written over when it is there, because a disk takes in
    bytes where some were before in a fraction of the time. Raises StateError (disk full, not writable); then there is
    no file.
    """
    with disk(path):
        try:
            over = spare is not None and spare.is_file()
            if spare is not None and over:
                os.replace(spare, path)
            _write(path, chunks, 0o600, over)
            sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
