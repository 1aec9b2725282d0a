"""A bundle's files on disk: all of the new bundle or all of the old one, whenever the export is killed.

A folder is a bundle only with its manifest. So the manifest is taken away first and written last, and a copy of the
old bundle lies in a folder of its own within in between. An existing folder stays and nothing is written outside it: it
may be a mount point, or have a parent that is not writable. Exports into one folder take turns: the last one stays.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.bundle import MANIFEST, WARNINGS, WEIGHTS, Bundle, Manifest
from edge_client.errors import ModelError
from edge_client.graph.check import check_file

_FILES = frozenset(
    {MANIFEST, WARNINGS, WEIGHTS, "train.onnx", "eval.onnx", "model.pt2", "model-eval.pt2", "train.pte", "eval.pte"}
)
_OLD, _NEW = ".maskfleet-old-", ".maskfleet-new-"  # folders within an existing one; a killed export leaves them


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other export writes to `folder`, which may be missing, or to one beside it. The file system may lack locks."""
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_EX)
        yield
    finally:
        os.close(parent)


def check_free(folder: Path) -> None:
    """Raise ModelError when `folder` holds other files than a bundle's."""
    if not folder.exists():
        return
    with _alone(folder.resolve()):
        if any(not (p.name in _FILES or _left(p)) for p in folder.iterdir()):
            raise ModelError(f"{folder} holds other files than a bundle's; choose an empty folder")


def _left(path: Path) -> bool:
    """Whether a killed export left this folder: it has its name, and nothing but a bundle's files within."""
    named = path.name.startswith((_OLD, _NEW)) and path.is_dir()
    return named and all(p.name in _FILES for p in path.iterdir())


def write_bundle(manifest: Manifest, parts: dict[str, bytes], folder: Path) -> Bundle:
    """Write the files apart, check the graphs as a device does, move them in. Raises ModelError, OSError."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        return _written(manifest, parts, folder)


def _written(manifest: Manifest, parts: dict[str, bytes], folder: Path) -> Bundle:
    there = folder.exists()
    place = folder if there else folder.parent
    fresh = Path(tempfile.mkdtemp(prefix=_NEW if there else f".{folder.name}-", dir=place))
    try:
        for part, data in {**parts, MANIFEST: manifest.to_bytes()}.items():
            (fresh / part).write_bytes(data)
            if part.endswith(".onnx"):
                try:
                    check_file(fresh / part, manifest.input.shape)
                except ValueError as error:
                    raise ModelError(f"devices would refuse {part}: {error}; use other layers or settings") from None
        fresh.chmod(0o755)
        if there:
            _replace(folder, fresh)
        else:
            os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Bundle.open(folder)


def _replace(folder: Path, fresh: Path) -> None:
    """Give `folder` the files of `fresh` for its own. A kill leaves a copy of its own in `.maskfleet-old-*` within."""
    old = Path(tempfile.mkdtemp(prefix=_OLD, dir=folder))
    try:
        for name in sorted(_FILES, key=lambda n: n == MANIFEST):
            if (folder / name).exists():
                _link(folder / name, old / name)
    except BaseException:
        shutil.rmtree(old, ignore_errors=True)
        raise
    try:
        _exchange(folder, fresh, os.replace)
    except BaseException:
        _exchange(folder, old, _link)  # no move: a kill here leaves the copy whole
        shutil.rmtree(old)
        raise
    for path in filter(_left, [*folder.iterdir()]):  # of killed exports too
        shutil.rmtree(path, ignore_errors=True)


def _exchange(folder: Path, source: Path, move: Callable[[Path, Path], None]) -> None:
    """Remove a bundle's files from `folder`, the manifest first, and move those of `source` in, the manifest last."""
    for name in sorted(_FILES, key=lambda n: n != MANIFEST):
        (folder / name).unlink(missing_ok=True)
    for file in sorted(source.iterdir(), key=lambda p: p.name == MANIFEST):
        move(file, folder / file.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
