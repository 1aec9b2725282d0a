"""Entry points: which are installed, what one names, and which extra of maskfleet brings a module that is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, requires
from inspect import isabstract
from typing import Any

from edge_client.errors import ConfigError

OF_PACKAGE = {"coord_server": "server", "edge_export": "author", "edge_bench": "bench", "edge_client": "all", "": "all"}
OF_MODULE = {"sklearn": "bench"}  # imported under another name than it is installed by
COLLECTIONS = ("all", "dev")  # extras that are made of others


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, in the order of names; none is loaded.

    One of maskfleet itself is never replaced by another package's of its name.
    """
    return {e.name: e for e in sorted(entry_points(group=group), key=lambda e: (e.name, ours(e)))}


def ours(entry: EntryPoint) -> bool:
    """Whether maskfleet itself brings what the entry point names."""
    return entry.module.partition(".")[0] in OF_PACKAGE


def load(entry: EntryPoint, what: str, fits: Callable[[Any], bool], kind: str) -> Any:
    """What `entry`, of any package, names. `what` names it in an error; it `fits` when it is a `kind`.

    Raises ConfigError when it does not load, or does not fit.
    """
    package = entry.module.partition(".")[0]
    try:
        found = entry.load()
    except Exception as error:  # code of another package may fail in any way
        if isinstance(error, ImportError) and package in OF_PACKAGE and not _own(error):
            raise needs(what, package, error) from None
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} cannot be loaded ({why}); install its package anew") from error
    if not fits(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        lacks = f" (it has no {missing})" if missing else ""
        raise ConfigError(f"{what} has the entry point {entry.value!r}, which names no {kind}{lacks}; mend it")
    return found


def subclass_of(base: type) -> Callable[[Any], bool]:
    """A test of objects: whether one is a subclass of `base` that can have instances."""
    return lambda found: isinstance(found, type) and issubclass(found, base) and not isabstract(found)


def needs(what: str, package: str, error: ImportError) -> ConfigError:
    """The error of `what`, which `package` holds: it names the missing module and the extra that brings it, if any."""
    extra = _extra(package, error.name)
    advice = f"; run: pip install 'maskfleet[{extra}]'" if extra else ""
    return ConfigError(f"{what} needs {error.name or error}, which is not installed{advice}")


def _own(error: ImportError) -> bool:
    """Whether the missing module would be one of maskfleet's: then its name is wrong, and no extra brings it."""
    return error.name is not None and error.name.partition(".")[0] in OF_PACKAGE


def _extra(package: str, missing: str | None) -> str | None:
    """The extra that installs module `missing`; if none names it, the one that `package` needs."""
    module = (missing or "").partition(".")[0].lower()
    if module in OF_MODULE:
        return OF_MODULE[module]
    for line in requires("maskfleet") or []:
        found = re.match(r"([\w.-]+).*;.*extra == ['\"](\w+)", line)
        if found and found[1].lower() == module and found[2] not in COLLECTIONS:
            return found[2]
    return OF_PACKAGE.get(package)
