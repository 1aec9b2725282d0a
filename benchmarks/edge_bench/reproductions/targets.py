"""What the results were to reach, one entry of `targets.toml` each, beside what the committed results say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_client import toml
from edge_client.errors import ConfigError, first_fault

FILE = Path(__file__).parents[3] / "benchmarks" / "results" / "targets.toml"
HEAD = ("what", "row", "due", "is", "met")


class Target(BaseModel):
    """A bound on a figure of a row, or on its distance from another row of the same task."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    what: str
    row: Annotated[str, Field(pattern=r"^[^/]+/[^/]+/[^/]+$")]
    """NAME/TASK/LABEL of a reproduction."""
    figure: str = "score_mean"
    """Of the row's summary. Scores and shares are in per cent here."""
    low: float | None = None
    high: float | None = None
    of: str = "fedavg"
    """The label that the row is compared with."""
    behind: float | None = None
    """Points that the row's score may be below that of `of`."""
    times: float | None = None
    """How many times fewer bytes than `of` travel at least."""


def read(path: Path | None = None) -> tuple[Target, ...]:
    """The entries of the file. Raises ConfigError."""
    try:
        return tuple(Target(**table) for table in toml.read(path or FILE)["target"])
    except ValidationError as error:
        raise ConfigError(f"{path or FILE}: {first_fault(error)}") from None


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A markdown table of every target; a row that was not run is "not run"."""
    lines = [HEAD, ("---",) * len(HEAD), *(_line(target, results) for target in read())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _line(t: Target, results: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, task, label = t.row.split("/")
    rows = results.get(name, {}).get("summary", {})
    if (row := rows.get(f"{task}/{label}")) is None:
        return t.what, f"`{t.row}`", "", "not run", "no"
    due, found, met = zip(*_parts(t, row, rows.get(f"{task}/{t.of}")), strict=True)
    return t.what, f"`{t.row}`", ", ".join(due), ", ".join(found), "yes" if all(met) else "**no**"


def _parts(t: Target, row: Mapping[str, Any], other: Mapping[str, Any] | None) -> Iterator[tuple[str, str, bool]]:
    """For each bound what is due, what is found, and whether that is enough, to the digit that is printed."""
    mean = row[t.figure]["mean"]
    value = float(f"{mean:.3g}") if t.figure.startswith("bits") else round(100 * mean, 1)
    if t.low is not None or t.high is not None:
        bounds = [] if t.low is None else [f"at least {t.low:g}"]
        bounds += [] if t.high is None else [f"at most {t.high:g}"]
        fits = (t.low is None or value >= t.low) and (t.high is None or value <= t.high)
        yield ", ".join(bounds), f"{value:g}", fits
    if t.behind is not None and other is not None:
        gap = round(100 * (mean - other[t.figure]["mean"]), 1)
        found = f"{value:g}, {abs(gap):g} {'behind' if gap < 0 else 'ahead'}"
        yield f"at most {t.behind:g} behind `{t.of}`", found, -gap <= t.behind
    if t.times is not None and other is not None:
        times = other["bytes_of_all_devices"]["mean"] / row["bytes_of_all_devices"]["mean"]
        yield f"{t.times:,g} times fewer bytes", f"{times:,.0f}" if times >= 10 else f"{times:.2f}", times >= t.times
