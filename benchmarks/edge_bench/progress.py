"""How far a long run is: a bar with the time left in a terminal, plain lines in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from coord_server.operator.tables import lasting

PAUSE = 20.0  # seconds between two lines of a long run's log


class Steps:
    """Counts `total` steps. In a log, a step's words are written at most once in `pause` seconds.

    Use it in a `with` block.
    """

    def __init__(self, console: Console, total: int, pause: float = 0.0) -> None:
        self._console, self._total, self._pause = console, total, pause
        self._done, self._started, self._said = 0, time.monotonic(), -pause
        self._bar = Progress(
            BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            console=console, expand=True,
        )  # fmt: skip  # the words are cut where a line is too short, never the time left
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, words: str, count: int = 1) -> None:
        """`count` more steps are done; `words` are the last one's result."""
        self._done += count
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=words)
            return
        now = time.monotonic() - self._started
        if now - self._said >= self._pause or self._done == self._total:
            self._said = now
            left = f"  {lasting(now / self._done * (self._total - self._done))} left" if self._done else ""
            self._console.print(f"{now:7.1f} s  {words}{left}")

    def skip(self, count: int) -> None:
        """`count` steps need not be done: the time left is that of the others."""
        self._total -= count
        self._bar.update(self._task, total=self._total)

    def say(self, words: str) -> None:
        """A line that stays, above the bar."""
        self._console.print(words)
