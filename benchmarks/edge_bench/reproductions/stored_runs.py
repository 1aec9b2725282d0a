"""The runs that a reproduction has on the disk: those of its `result.json` and of its cell files, read back.

Nothing here runs a cell or writes a file: `reproduce` and `result_file` do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError

Run = dict[str, Any]

RESULT, CELLS = "result.json", "cells"
OF_RUN = {"task": str, "label": str, "seed": int, "validation": bool, "settings": dict}
"""What every finished run has; the other figures differ by method."""
OF_RESULT = {"runs": dict, "summary": dict, "settings": dict, "paper": dict, "tried": list, "machine": dict}


def fitting(found: Any, fields: Mapping[str, type]) -> Run:
    """What a file has, if it is an object with these fields. Raises ValueError with the fault."""
    if not isinstance(found, dict):
        raise ValueError(f"there is a {type(found).__name__} in place of an object")
    wrong = [name for name, kind in fields.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is absent or of another kind")
    return found


def stored(folder: Path) -> Run | None:
    """The content of a folder's `result.json`, None without one. Raises ConfigError when it is damaged."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        found = fitting(json.loads(path.read_bytes()), OF_RESULT)
        for run in finished(found):
            fitting(run, OF_RUN | {"cell": str})
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged: {error}; restore it, or delete it: then only cells without a file in "
            f"{folder / CELLS} run again"
        ) from None
    return found


def finished(result: Run) -> list[Run]:
    """Every run of a result, those on the validation part too."""
    return [*result["runs"].values(), *result.get("tried_runs", {}).values()]


def cell_files(folder: Path, warn: Callable[[str], None]) -> Iterator[tuple[str, Run]]:
    """Digest and run of each whole cell file; `warn` is given a sentence on each damaged one."""
    for path in sorted((folder / CELLS).glob("*.json")):
        try:
            yield path.stem, fitting(json.loads(path.read_bytes()), OF_RUN)
        except ValueError as error:
            warn(f"{path} is damaged: {error}; its cell runs again unless {RESULT} has it")


def known(folder: Path, warn: Callable[[str], None] = lambda sentence: None) -> dict[str, Run]:
    """The finished cells of an output folder by digest: those of its cell files and those of its result.

    A damaged cell file counts as absent, and `warn` is given a sentence on it. Raises ConfigError when the result is
    damaged.
    """
    result = stored(folder) or {"runs": {}}
    return {run["cell"]: run for run in finished(result)} | dict(cell_files(folder, warn))
