"""Line plots as SVG, drawn here: axes with units, a tick grid, a title over every round. Colours are the page's.

No style and no script inside, as the Content-Security-Policy demands: classes `s0`, `s1`, ... are a plot's series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 368, 12, 172  # of the area inside the axes
MOST = 120  # rounds drawn; of more, evenly chosen ones


@dataclass(frozen=True)
class Series:
    """One line: its name and a value for every round, None where there is none."""

    name: str
    values: Sequence[float | None]


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers around low < high: about `most` steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= most)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def lines(
    title: str, rounds: Sequence[int], series: Sequence[Series], word: Callable[[float], str], floor: float | None = 0.0
) -> Markup:
    """A plot over rounds; empty when no series has a value. `word` writes a value with its unit.

    The axis begins at `floor`, or near the least value when `floor` is None.
    """
    stride = max(1, math.ceil(len(rounds) / MOST))
    picked = [i for i in range(len(rounds)) if (len(rounds) - 1 - i) % stride == 0]
    known = [v for s in series for i in picked if (v := s.values[i]) is not None]
    if not known:
        return Markup("")
    grid = ticks(*_range(known, floor))
    area = _Area(rounds[picked[0]], max(rounds[picked[-1]], rounds[picked[0]] + 1), grid[0], grid[-1])
    drawn = [f'<g class="grid">{"".join(_across(area.y(v), word(v)) for v in grid)}</g>', _rounds(area)]
    for index, one in enumerate(series):
        points = [(area.x(rounds[i]), area.y(v)) for i in picked if (v := one.values[i]) is not None]
        drawn.append(_line(index, points))
    half = (RIGHT - LEFT) / max(len(picked) - 1, 1) / 2
    for i in picked:
        said = [f"{s.name} {word(v)}" for s in series if (v := s.values[i]) is not None]
        if said:
            tip = escape(f"round {rounds[i]}: {', '.join(said)}")
            place = f'x="{area.x(rounds[i]) - half:.1f}" y="{TOP}" width="{2 * half:.1f}" height="{BOTTOM - TOP}"'
            drawn.append(f'<rect class="tip" {place}><title>{tip}</title></rect>')
    last = [f"{s.name} {word(known[-1])}" for s in series if (known := [v for v in s.values if v is not None])]
    label = escape(f"{title} over {len(rounds)} rounds; last: {', '.join(last)}")
    head = f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return Markup(f"{head}{''.join(drawn)}</svg>")  # every text above is escaped or a number


@dataclass(frozen=True)
class _Area:
    """The rounds and values at the edges of the area inside the axes, and where others lie in the picture."""

    first: int
    last: int
    low: float
    high: float

    def x(self, round_: float) -> float:
        """Where a round lies."""
        return round(LEFT + (RIGHT - LEFT) * (round_ - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        """Where a value lies."""
        return round(BOTTOM - (BOTTOM - TOP) * (value - self.low) / (self.high - self.low), 1)


def _range(known: Sequence[float], floor: float | None) -> tuple[float, float]:
    """The least and the largest value that the axis shows."""
    low, high = min(known) if floor is None else min(floor, *known), max(known)
    if high - low < 1e-3 * max(abs(high), 1.0):  # a level line: some room around it
        return (low - 0.01, high + 0.01) if floor is None else (low, high + 1.0)
    return low, high


def _rounds(area: _Area) -> str:
    """The axis of the rounds."""
    shown = [tick for tick in ticks(area.first, area.last, 6, whole=True) if area.first <= tick <= area.last]
    texts = [f'<text x="{area.x(t)}" y="{BOTTOM + 16}" text-anchor="middle">{t:.0f}</text>' for t in shown]
    name = f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">round</text>'
    return f'<g class="axis">{"".join(texts)}{name}</g>'


def _across(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'


def _line(index: int, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    path = " ".join(f"{x},{y}" for x, y in points)
    end = f'<circle cx="{points[-1][0]}" cy="{points[-1][1]}" r="3"/>'
    return f'<g class="s{index}"><polyline points="{path}"/>{end}</g>'


def bar(parts: Sequence[tuple[str, int]]) -> Markup:
    """A bar of parts, each a class and a count, as wide as their share."""
    total, at, drawn = max(sum(count for _, count in parts), 1), 0.0, []
    for kind, count in parts:
        width = 100.0 * count / total
        drawn.append(f'<rect class="{escape(kind)}" x="{at:.2f}" width="{width:.2f}" height="8"/>')
        at += width
    head = '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
    return Markup(f"{head}{''.join(drawn)}</svg>")
