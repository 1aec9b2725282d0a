"""Two reports side by side: which rows both have, their ratio, and whether it is more than two starts may differ by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, isfinite
from pathlib import Path
from typing import Any

from edge_client.bench.measure import FORMAT
from edge_client.errors import DataError

PARTS: Mapping[str, type] = {"model": str, "input": dict, "machine": dict, "warnings": list, "variants": dict,
                            "settings": dict}  # fmt: skip
SAME = ("board", "processor", "architecture", "cores", "usable_cores", "frequency_mhz", "memory_mb", "virtual",
        "governor", "kernel", "engines")  # fmt: skip
NEAR = 1.05  # two starts of one model on one machine differ by up to this: where memory lies, what else runs
SURE = 2.0  # standard deviations of the joules' difference


@dataclass(frozen=True)
class Pair:
    """A row of both reports. `ratio` is the first's median over the second's: above 1 the second is faster."""

    variant: str
    engine: str
    threads: int
    first: float
    second: float
    ratio: float
    verdict: str
    joules: str
    memory: str


def read(path: Path) -> dict[str, Any]:
    """A report from its file, or from the folder that holds it. Raises DataError."""
    path = path / "report.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; name a report.json, or the folder that holds it"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is no report of `maskfleet bench`: {error}; name its report.json") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or "rows" not in found:
        raise DataError(f"{path} is no report of `maskfleet bench` of format {FORMAT}; measure anew")
    try:
        for row in found["rows"]:
            _key(row)
            figures = [row["wall_ms"]["p50"], *(row["wall_ms"]["p50_interval"] or [1.0, 1.0])]
            if len(figures) != 3 or not all(isfinite(v) and v > 0 for v in figures):
                raise ValueError(f"times of {figures} ms")
        for name, kind in PARTS.items():
            if not isinstance(found[name], kind):
                raise TypeError(f"{name} is {found[name]!r}")
        for about in found["variants"].values():
            about["bytes"], about["macs"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is a damaged report ({type(error).__name__}: {error}); measure anew") from None
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
        verdict = _verdict(a, b) if _alike(first, second, row["variant"]) else "another model"
        doubt = SURE * hypot(row.get("joules_error", 0.0), other.get("joules_error", 0.0))
        joules = _less(row.get("joules"), other.get("joules"), doubt)
        memory = _less(row.get("model_mb"), other.get("model_mb"))
        found.append(Pair(*_key(row), a["p50"], b["p50"], a["p50"] / b["p50"], verdict, joules, memory))
    return found


def _verdict(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Whether the second times are shorter, in a word: medians that are near, or whose intervals overlap, are equal."""
    one, two = a["p50_interval"], b["p50_interval"]
    if one is None or two is None:
        return "too few runs"
    if _near(a["p50"], b["p50"]) or (one[0] <= two[1] and two[0] <= one[1]):
        return "no difference"
    return "faster" if a["p50"] > b["p50"] else "slower"


def _less(a: float | None, b: float | None, doubt: float = 0.0) -> str:
    """How many times less the second is; "-" where one is missing, or below the noise of the power at rest."""
    if a is None or b is None or min(a, b) <= 0:
        return "-"
    if _near(a, b) or abs(a - b) <= doubt:
        return "no difference"
    return f"{a / b:.2f}x less" if a > b else f"{b / a:.2f}x more"


def _near(a: float, b: float) -> bool:
    return max(a, b) <= NEAR * min(a, b)


def _alike(first: Mapping[str, Any], second: Mapping[str, Any], variant: str) -> bool:
    a, b = (report["variants"].get(variant, {}) for report in (first, second))
    return all(a.get(name) == b.get(name) for name in ("bytes", "macs"))


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["variant"], row["engine"], row["threads"]


def _size(about: Mapping[str, Any]) -> str:
    return f"{about['bytes']} bytes" + ("" if about["macs"] is None else f", {about['macs']} multiply-adds")


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [f"{k} {a.get(k)} and {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def cautions(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What weakens the comparison, one sentence each."""
    said = []
    if first["model"] != second["model"]:
        said.append(f"the models differ: {first['model']} and {second['model']}")
    if first["input"] != second["input"]:
        said.append(f"the inputs differ: {first['input']} and {second['input']}")
    for name in sorted(first["variants"].keys() & second["variants"].keys()):
        a, b = first["variants"][name], second["variants"][name]
        if (a["bytes"], a["macs"]) != (b["bytes"], b["macs"]):
            said.append(f"{name} is not the same model in both: {_size(a)} and {_size(b)}")
    if first["settings"] != second["settings"]:
        said.append("the settings differ: " + ", ".join(_differ(first["settings"], second["settings"])))
    for name in SAME:
        a, b = first["machine"].get(name), second["machine"].get(name)
        if a != b:
            said.append(f"{name}: {a} and {b}")
    both = [text for text in first["warnings"] if text in second["warnings"]]
    said += [f"both: {text}" for text in both]
    for which, report in (("first", first), ("second", second)):
        said += [f"the {which}: {text}" for text in report["warnings"] if text not in both]
    return said
