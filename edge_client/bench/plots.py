"""A report's picture (extra `bench`): latency of each row with its intervals, memory, and joules if there are any."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.files import disk

if TYPE_CHECKING:  # matplotlib is large, and not everywhere
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture as a PNG. Raises StateError when it cannot be written."""
    from matplotlib.figure import Figure

    rows = report["rows"]
    names = [f"{r['variant']}\n{r['threads']} thr" for r in rows]
    order = list(report["variants"])
    colours = [COLOURS[order.index(r["variant"]) % len(COLOURS)] for r in rows]
    panels: list[tuple[str, list[float], list[list[float]] | None]] = [
        ("latency, median, ms", [r["wall_ms"]["p50"] for r in rows], _around(rows)),
    ]
    if all(r.get("model_mb") is not None for r in rows):
        panels.append(("memory of the model, MB", [r["model_mb"] for r in rows], None))
    if all(r.get("joules") is not None for r in rows):
        errors = [[1e3 * r["joules_error"] for r in rows]] * 2
        panels.append(("energy of an inference, mJ", [1e3 * r["joules"] for r in rows], errors))
    figure = Figure(figsize=(max(4.0, 0.9 * len(rows)) * len(panels), 3.6), layout="constrained")
    for axes, (title, values, spread) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.bar(range(len(rows)), values, yerr=spread, color=colours, capsize=3)
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for i, row in enumerate(rows):
        axes = figure.axes[0]
        axes.plot([i, i], [row["wall_ms"]["p90"], row["wall_ms"]["p99"]], color="#777777", marker="_", linewidth=1)
    # A far p99, as of a busy machine, would leave nothing of the bars: it is cut off there.
    median, far = (max(r["wall_ms"][p] for r in rows) for p in ("p50", "p99"))
    figure.axes[0].set_ylim(0, max(1.1 * median, min(1.05 * far, 3 * median)))
    figure.suptitle(f"{report['model']} on {report['machine']['processor']}; grey: p90 to p99", fontsize=10)
    save(figure, path)


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Write a figure as a PNG. Raises StateError when it cannot be written."""
    with disk(path, "choose another place"):
        figure.savefig(path, dpi=dpi, format="png", metadata={"Software": None})


def _around(rows: list[Mapping[str, Any]]) -> list[list[float]]:
    """How far the intervals reach below and above the medians."""
    walls = [(r["wall_ms"]["p50"], r["wall_ms"]["p50_interval"] or [r["wall_ms"]["p50"]] * 2) for r in rows]
    return [[max(p50 - low, 0.0) for p50, (low, _) in walls], [max(high - p50, 0.0) for p50, (_, high) in walls]]
