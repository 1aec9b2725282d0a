"""Two reports side by side: which rows both have, their ratio, and whether it is more than chance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.bench.measure import FORMAT
from edge_client.errors import DataError

SAME = ("processor", "architecture", "governor", "kernel", "engines")


@dataclass(frozen=True)
class Pair:
    """A row of both reports. `ratio` is the first's median over the second's: above 1 the second is faster."""

    variant: str
    engine: str
    threads: int
    first: float
    second: float
    ratio: float
    sure: bool
    """Whether the two medians' intervals do not overlap."""
    joules: float | None
    """The first's joules over the second's."""
    memory: float | None

    @property
    def verdict(self) -> str:
        """In a word."""
        return "no difference" if not self.sure else "faster" if self.ratio > 1 else "slower"


def read(path: Path) -> dict[str, Any]:
    """A report from its file. Raises DataError."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is no report of `maskfleet bench`: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or "rows" not in found:
        raise DataError(f"{path} is no report of `maskfleet bench` of format {FORMAT}")
    return found


def pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Pair]:
    """The rows that both reports have, in the first's order."""
    others = {_key(row): row for row in second["rows"]}
    found = []
    for row in first["rows"]:
        other = others.get(_key(row))
        if other is None:
            continue
        a, b = row["wall_ms"], other["wall_ms"]
        apart = a["p50_interval"][0] > b["p50_interval"][1] or b["p50_interval"][0] > a["p50_interval"][1]
        found.append(
            Pair(*_key(row), a["p50"], b["p50"], a["p50"] / b["p50"], apart, _ratio(row, other, "joules"),
                 _ratio(row, other, "model_mb"))
        )  # fmt: skip
    return found


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["variant"], row["engine"], row["threads"]


def _ratio(a: Mapping[str, Any], b: Mapping[str, Any], name: str) -> float | None:
    return a[name] / b[name] if a.get(name) and b.get(name) else None


def cautions(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What differs beside the models, one sentence each."""
    said = []
    if first["model"] != second["model"]:
        said.append(f"the models differ: {first['model']} and {second['model']}")
    if first["input"] != second["input"]:
        said.append(f"the inputs differ: {first['input']} and {second['input']}")
    for name in SAME:
        a, b = first["machine"].get(name), second["machine"].get(name)
        if a != b:
            said.append(f"{name}: {a} and {b}")
    for which, report in (("first", first), ("second", second)):
        said += [f"the {which}: {text}" for text in report["warnings"]]
    return said
