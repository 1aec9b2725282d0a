"""Tables of a terminal: without a frame, as wide as their cells, nothing folded."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def plain_table(title: str | None = None, gap: int = 1) -> Table:
    """A table without a frame; `gap` spaces between columns."""
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        show_edge=False,
        pad_edge=False,
    )


def unfolded(make: Callable[[int], Table], console: Console) -> Table:
    """The table of `make(gap)`, as wide as its cells: with a gap of 1, or of 0 where the console is too narrow."""
    for gap in (1, 0):
        table = make(gap)
        table.width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        if table.width <= console.width:
            break
    return table
