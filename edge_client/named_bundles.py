"""Bundles by name: those that come with an installed package, and folders.

An entry point of the group `maskfleet.bundles` names a folder of a package as "package:folder"; every folder in it that
holds a manifest is a bundle under its own name. The package is not imported, only those that it lies in.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from edge_client.authored import is_place
from edge_client.bundle import MANIFEST
from edge_client.errors import ConfigError, suggestion
from edge_client.extras import installed, ours


def packaged() -> dict[str, Path]:
    """The folder of every bundle that an installed package brings, by name; of two of one name maskfleet's own."""
    found: dict[str, Path] = {}
    for entry in sorted(installed("maskfleet.bundles").values(), key=ours, reverse=True):
        for package in _folders(entry.module):
            for manifest in sorted(Path(package, entry.attr).glob(f"*/{MANIFEST}")):
                found.setdefault(manifest.parent.name, manifest.parent)
    return found


def _folders(package: str) -> Sequence[str]:
    """Where an installed package lies; nowhere when it, or one that it lies in, cannot be found."""
    try:
        spec = find_spec(package)
    except ImportError:
        return ()
    return (spec and spec.submodule_search_locations) or ()


def bundle_path(name: str, beside: Path = Path()) -> Path:
    """The path that `name` stands for: that of a packaged bundle, else one relative to the folder `beside`.

    Write ``./digits`` for a folder or file with the name of a packaged bundle.
    """
    return packaged().get(name, beside / name)


def bundle_folder(name: str, beside: Path, *others: str) -> Path:
    """The folder of a bundle, by `bundle_path`. Raises ConfigError, which also lists the `others` that are accepted."""
    folder = bundle_path(name, beside)
    if is_place(name):
        raise ConfigError(f"bundle {name!r} is a function; `maskfleet export {name} -o FOLDER` makes a bundle's folder")
    if not (folder / MANIFEST).is_file():
        known = [*packaged(), *others]
        why = f"the folder {folder} holds no {MANIFEST}" if folder.is_dir() else f"there is no folder {folder}"
        raise ConfigError(
            f"bundle {name!r}: {why}; name a bundle's folder, or one of {', '.join(known)}"
            f"{suggestion(Path(name).name, known)}"
        )
    return folder
