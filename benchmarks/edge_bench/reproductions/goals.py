"""What the results were to reach, one entry of `benchmarks/results/goals.toml` each, beside the committed figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_client import toml
from edge_client.errors import ConfigError, first_fault

HEAD = ("what", "row", "goal", "measured", "met")


class Goal(BaseModel):
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
    """Points that the row's figure may be below that of `of`."""
    times: float | None = None
    """How many times fewer bytes than `of` travel at least; 1: any fewer."""


def read(path: Path) -> tuple[Goal, ...]:
    """The entries of a file. Raises ConfigError."""
    try:
        return tuple(Goal(**table) for table in toml.read(path)["goal"])
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error)}") from None


def table(goals: Iterable[Goal], results: Mapping[str, Mapping[str, Any]]) -> str:
    """A markdown table of the goals; what their rows lack is "not run"."""
    lines = [HEAD, ("---",) * len(HEAD), *(_line(goal, results) for goal in goals)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _line(goal: Goal, results: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, task, label = goal.row.split("/")
    rows = results.get(name, {}).get("summary", {})
    row, other = rows.get(f"{task}/{label}", {}), rows.get(f"{task}/{goal.of}", {})
    due, found, met = zip(*_parts(goal, row, other), strict=True)
    return goal.what, f"`{goal.row}`", ", ".join(due), ", ".join(found), "yes" if all(met) else "**no**"


def _parts(goal: Goal, row: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """For each bound what is due, what is found, and whether that is enough, to the digit that is printed."""
    mean, base = (found.get(goal.figure, {}).get("mean") for found in (row, other))
    bits = goal.figure.startswith("bits")
    value = None if mean is None else float(f"{mean:.3g}") if bits else round(100 * mean, 1)
    if goal.low is not None or goal.high is not None:
        bounds = [] if goal.low is None else [f"at least {goal.low:g}"]
        bounds += [] if goal.high is None else [f"at most {goal.high:g}"]
        fits = value is not None and (goal.low is None or value >= goal.low)
        fits &= value is not None and (goal.high is None or value <= goal.high)
        yield ", ".join(bounds), "not run" if value is None else f"{value:g}", fits
    if goal.behind is not None:
        gap = None if mean is None or base is None else round(100 * (mean - base), 1)
        said = "not run" if gap is None else f"{value:g}, {abs(gap):g} {'behind' if gap < 0 else 'ahead'}"
        yield f"at most {goal.behind:g} behind `{goal.of}`", said, gap is not None and -gap <= goal.behind
    if goal.times is not None:
        own, whole = (found.get("bytes_of_all_devices", {}).get("mean") for found in (row, other))
        times = whole / own if own and whole else None
        due = f"fewer bytes than `{goal.of}`" if goal.times == 1 else f"{goal.times:,g} times fewer bytes"
        said = "not run" if times is None else f"{times:,.0f} times" if times >= 10 else f"{times:.2f} times"
        yield due, said, times is not None and (times > 1 if goal.times == 1 else times >= goal.times)
