"""A bundle's files on disk: all of the new bundle or all of the old one, whenever the export is killed.

A folder is a bundle only with its manifest. So the manifest is taken away first and written last, and a copy of the
old bundle lies beside the folder in between. The folder itself stays, so `-o .` works too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from edge_client.bundle import MANIFEST, WEIGHTS, Bundle, Manifest
from edge_client.errors import ModelError
from edge_client.graphs import check_file

_FILES = frozenset(
    {MANIFEST, WEIGHTS, "train.onnx", "eval.onnx", "model.pt2", "model-eval.pt2", "train.pte", "eval.pte"}
)


def check_free(folder: Path) -> None:
    """Raise ModelError when `folder` holds other files than a bundle's."""
    if folder.exists() and any(p.name not in _FILES for p in folder.iterdir()):
        raise ModelError(f"{folder} holds other files than a bundle's; choose an empty folder")


def write_bundle(manifest: Manifest, parts: dict[str, bytes], folder: Path) -> Bundle:
    """Write the files beside `folder`, check the graphs as a device does, move them in. Raises ModelError, OSError."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for part, data in {**parts, MANIFEST: manifest.to_bytes()}.items():
            (fresh / part).write_bytes(data)
            if part.endswith(".onnx"):
                try:
                    check_file(fresh / part, manifest.input.shape)
                except ValueError as error:
                    raise ModelError(f"devices would refuse {part}: {error}; use other layers or settings") from None
        fresh.chmod(0o755)
        if folder.exists():
            _replace(folder, fresh)
        else:
            os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Bundle.open(folder)


def _replace(folder: Path, fresh: Path) -> None:
    """Give `folder` the files of `fresh` for its own. A kill leaves a copy of its own in `<folder>.old-*` beside it."""
    old = Path(tempfile.mkdtemp(prefix=f"{folder.name}.old-", dir=folder.parent))
    shutil.copytree(folder, old, copy_function=_linked, dirs_exist_ok=True)
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for file in sorted(fresh.iterdir(), key=lambda p: p.name == MANIFEST):
            os.replace(file, folder / file.name)
    except BaseException:
        shutil.copytree(old, folder, dirs_exist_ok=True)
        shutil.rmtree(old)
        raise
    shutil.rmtree(old)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
