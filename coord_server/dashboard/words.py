"""Figures in words, for people: sizes, times, scores. Templates use them as filters."""

from __future__ import annotations

import re
from collections.abc import Callable

from markupsafe import Markup, escape

SIZES = ("B", "kB", "MB", "GB", "TB")
SPACE = "\N{NO-BREAK SPACE}"
NOTHING = "\N{EN DASH}"
Word = Callable[[float], str]
_CODE = re.compile(r"``?([^`]+)``?")


def number(value: float) -> str:
    """Three digits or all before the point, thousands with commas; whole numbers as they are."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def size(octets: float | None) -> str:
    """Bytes: 442 B, 1.5 kB."""
    if octets is None:
        return NOTHING
    value, unit = float(octets), SIZES[0]
    for unit in SIZES:
        if abs(value) < 1000 or unit == SIZES[-1]:
            break
        value /= 1000
    figure = f"{value:.0f}" if unit == "B" or value >= 100 else f"{value:.1f}".removesuffix(".0")
    return f"{figure}{SPACE}{unit}"


def duration(seconds: float | None) -> str:
    """The two largest units: 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.{2 if seconds < 1 else 1}f}".removesuffix(".0").removesuffix(".00") + f"{SPACE}s"
    left, found = round(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or found:
            found.append(f"{count}{SPACE}{unit}")
    return " ".join(part for part in found[:2] if not part.startswith("0"))


def brief(seconds: float) -> str:
    """A time in one unit, for an axis."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g}{SPACE}{unit}"
    return f"{seconds:.3g}{SPACE}s"


def ago(seconds: float | None) -> str:
    """How long ago, coarse enough to stand still on a page for a while."""
    if seconds is None:
        return "never"
    if seconds < 60:
        return "now" if seconds < 15 else f"{int(seconds // 15) * 15}{SPACE}s ago"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{SPACE}{unit} ago"
    return ""


def score(value: float | None) -> str:
    """A score to three digits after the point."""
    return NOTHING if value is None else f"{value:.3f}"


def coded(text: str) -> Markup:
    """Text in which `this` is code; everything else is escaped."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def joules(value: float) -> str:
    """An energy."""
    return f"{number(value)}{SPACE}J"
