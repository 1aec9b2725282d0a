"""Score against bytes: what a device has sent and received after each round, and how good its model is then.

The curve of a method as numbers, as plain characters for a terminal, and as a PNG. What a record holds is in `records`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.bench import plots
from edge_client.protocol.messages import Round, Scores, Traffic

MARKS = "ox+*#@%&"
STEP = 0.1  # of score between two lines of the scale
LEAST = -1.0  # lower scores are drawn at the bottom: R^2 has no lower bound


@dataclass(frozen=True)
class Point:
    """After `round` rounds and the downlink they led to, a device has moved `bytes` of payloads, both ways.

    `score` is the devices' mean then.
    """

    round: int
    bytes: float
    score: float


def curve(rounds: Sequence[Round], devices: int, final: float | None) -> list[Point]:
    """The curve of a federation of `devices`.

    `final` is the score of the personal models after the last round. The score after round r is what the cohort of
    round r + 1 measured on its downlink, before it trained; a round without such a measurement has no point.
    """
    after = [mean(r.score_before) for r in rounds[1:]] + [final]
    down = [moved(r.traffic, "down") for r in rounds] + [moved(rounds[-1].traffic, "last")]
    points, total = [], down[0]
    for i, (r, score) in enumerate(zip(rounds, after, strict=True)):
        total += moved(r.traffic, "up") + down[i + 1]
        if score is not None:
            points.append(Point(r.round, total / devices, score))
    return points


def moved(traffic: Traffic, side: str) -> int:
    """Payload bytes of a round one way, with what is sent once; "last": of the downlinks after it."""
    parts = {
        "up": (traffic.up, traffic.one_time_up),
        "down": (traffic.down, traffic.one_time_down),
        "last": (traffic.last_down,),
    }
    return sum(sum(kinds.values()) for kinds in parts[side])


def mean(scores: Scores | None) -> float | None:
    """The mean over the devices, None when no device measured it."""
    return None if scores is None else scores.mean


def shown(figure: float | None, form: str) -> str:
    """A figure by a format specification; "-" when there is none."""
    return "-" if figure is None else format(figure, form)


def amount(count: float) -> str:
    """Bytes with three digits and a unit of thousands."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def sketch(curves: Mapping[str, Sequence[Point]], width: int = 78, height: int = 14) -> str:
    """The curves in plain characters, one mark a method: score upward, the logarithm of the bytes to the right."""
    points = [p for c in curves.values() for p in c]
    logs = [math.log10(max(p.bytes, 1.0)) for p in points]
    low, wide = min(logs), max(max(logs) - min(logs), 0.1)
    bottom = math.floor(max(min(p.score for p in points), LEAST) / STEP) * STEP
    top = max(math.ceil(max(p.score for p in points) / STEP) * STEP, bottom + STEP)
    columns = width - 7
    cells = [[" "] * columns for _ in range(height)]
    marks = [MARKS[i % len(MARKS)] for i in range(len(curves))]
    for mark, c in zip(marks, curves.values(), strict=True):
        for p in c:
            x = round((math.log10(max(p.bytes, 1.0)) - low) / wide * (columns - 1))
            y = round((max(p.score, bottom) - bottom) / (top - bottom) * (height - 1))
            cells[height - 1 - y][x] = mark
    scale = {0: f"{top:4.1f}", height - 1: f"{bottom:4.1f}"}
    lines = [f"{scale.get(i, '    ')} |{''.join(row)}".rstrip() for i, row in enumerate(cells)]
    least, most = amount(10**low), amount(10 ** (low + wide))
    legend = "   ".join(f"{mark} {label}" for mark, label in zip(marks, curves, strict=True))
    return "\n".join(
        [*lines, " " * 5 + "+" + "-" * columns, f"{'':6}{least}{most:>{columns - len(least)}}", f"{'':6}{legend}"]
    )


def draw(curves: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """The curves as a PNG. Raises StateError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (label, c) in enumerate(curves.items()):
        x, y = [max(p.bytes, 1.0) for p in c], [p.score for p in c]
        axes.plot(x, y, label=label, marker="os^Dv<>p"[i % 8], markersize=4, linewidth=1.0)
    axes.set(xscale="log", xlabel="payload bytes of one device, up and down, so far", ylabel="mean score", title=title)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    plots.save(figure, path)
