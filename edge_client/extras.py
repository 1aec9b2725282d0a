"""Which extra of maskfleet brings a module that is not installed."""

from __future__ import annotations

import re
from importlib.metadata import requires

from edge_client.errors import ConfigError

OF_PACKAGE = {"coord_server": "server", "edge_export": "author", "edge_bench": "bench", "edge_client": "all", "": "all"}
OF_MODULE = {"sklearn": "bench"}  # imported under another name than it is installed by
COLLECTIONS = ("all", "dev")  # extras that are made of others


def needs(what: str, package: str, error: ImportError) -> ConfigError:
    """The error of `what`, which `package` holds: it names the missing module and the extra that brings it, if any."""
    extra = _extra(package, error.name)
    advice = f"; run: pip install 'maskfleet[{extra}]'" if extra else ""
    return ConfigError(f"{what} needs {error.name or error}, which is not installed{advice}")


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
