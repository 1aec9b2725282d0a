"""A recording of any meter as a CSV file: USB testers, bench supplies, oscilloscopes.

``--meter csv:path=FILE``: start the meter's own recording, then the measurement. It emits a sync pulse at its start and
end, waits for FILE, and finds both pulses in it. The columns are named ``time (s)``, ``power (W)`` or ``voltage (V)``
and ``current (A)``, each with the unit that it has.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import sync
from edge_client.measure.energy import F64, Accuracy, Meter, Trace, added, lost
from edge_client.measure.meters import Family, Options, number

NAME = re.compile(r"((?i:time|power|voltage|current)) *\((\w+)\)")
BASES = {"time": "s", "power": "W", "voltage": "V", "current": "A"}
PREFIXES = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}
WANTED = (("time", "power"), ("time", "voltage", "current"))
NAMES = (
    "name the columns: time (s), power (W), or: time (s), voltage (V), current (A); with m, u or n for a part of a unit"
)
ROWS = 2  # the fewest rows of a recording
LONGEST = 1e6  # seconds that no recording lasts: they are of another unit
LOOK = 0.2  # seconds between two looks at a file
ACCURACY = Accuracy(0.01, 0.005, 0.001)
Columns = list[tuple[int, float]]
"""Of the time and of what makes the power, the place in a row and the scale of its unit."""


def parse(text: str, where: str) -> tuple[F64, F64]:
    """Times in seconds, rising, and watts.

    A last row without numbers is left out, as a recording may break off; so is a row that repeats a time. Raises
    MeterError.
    """
    try:
        columns, rows = _table(text, where)
    except csv.Error as error:
        raise MeterError(
            f"{where} cannot be read as a table: {error}; look for a quotation mark that is not closed"
        ) from None
    scales = np.array([scale for _, scale in columns])
    times, *values = (_figures(rows, [place for place, _ in columns], where) * scales).T
    fresh = _fresh(times, where)
    watts = np.prod(values, axis=0)[fresh]
    try:
        added([("the recording", float(np.median(watts)))], ACCURACY.offset)
    except OSError as error:
        raise MeterError(f"{where}: {error}") from None
    return times[fresh], watts


def _table(text: str, where: str) -> tuple[Columns, list[list[str]]]:
    """The columns, and the rows below their names, by the separator that parts the names. Raises MeterError."""
    for separator in ",;\t":
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=separator) if len(row) > 1)
        if columns := _heading(rows, where):
            return columns, list(rows)
    raise MeterError(f"{where} has no line of column names; {NAMES}")


def _heading(rows: Iterator[list[str]], where: str) -> Columns:
    """The columns, none without names; `rows` are read up to the names."""
    for names in rows:
        found = dict[str, tuple[int, float]]()
        for place, name in enumerate(names):
            match = NAME.fullmatch(name.strip(" #\ufeff"))  # spreadsheets begin a file with a mark of its encoding
            if match is None:
                continue
            quantity, unit = match[1].lower(), match[2]
            if unit[-1] != BASES[quantity] or unit[:-1] not in PREFIXES:
                continue
            if quantity in found:
                raise MeterError(f"{where} has two columns of the {quantity}; rename all but one")
            found[quantity] = place, PREFIXES[unit[:-1]]
        for wanted in WANTED:
            if found.keys() >= set(wanted):
                return [found[quantity] for quantity in wanted]
    return []


def _figures(rows: Sequence[Sequence[str]], places: Sequence[int], where: str) -> F64:
    """The columns `places` as float64[rows, places]; a last row may break off. Raises MeterError."""
    found = []
    for n, row in enumerate(rows):
        try:
            figures = [float(row[place]) for place in places]
            if not np.isfinite(figures).all():
                raise ValueError(row)
            found.append(figures)
        except (ValueError, IndexError):
            if n < len(rows) - 1:
                said = ", ".join(row)
                raise MeterError(
                    f"{where}: row {n + 1} of {len(rows)} lacks a number: {said}; write numbers with a decimal point, "
                    "times too"
                ) from None
    if len(found) < ROWS:
        raise MeterError(f"{where} has {len(found)} rows of numbers; record for longer")
    return np.array(found)


def _fresh(times: F64, where: str) -> NDArray[np.bool_]:
    """The rows with a new time. Raises MeterError when the times are no recording's."""
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        raise MeterError(
            f"{where}: time goes back after row {back[0] + 1}; record each measurement in a file of its own"
        )
    if times[-1] - times[0] > LONGEST:
        raise MeterError(
            f"{where}: the times go from {times[0]:.6g} to {times[-1]:.6g} s, which is no recording; mend the "
            "unit in the column's name, like: time (ms)"
        )
    fresh = np.concatenate([[True], np.diff(times) > 0])
    if 2 * fresh.sum() < len(times):
        raise MeterError(f"{where}: most rows repeat a time; record with finer times")
    return fresh


@dataclass
class CsvMeter:
    """A meter that is recorded elsewhere. `emit` plays a sync pulse; `wait` is how long the file may take to come."""

    path: Path
    wait: float = 600.0
    emit: Callable[[], sync.Pulse] = sync.emit
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    name: str = "csv"
    _first: sync.Pulse | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)

    @property
    def what(self) -> str:
        """What it measures."""
        return f"recording {self.path}, aligned by sync pulses"

    def start(self) -> None:
        """Play the first sync pulse."""
        self.say(f"a sync pulse of {len(sync.BARKER) * sync.CHIP:.0f} s begins: the meter has to record already")
        self._began = time.time()
        self._first = self.emit()

    def stop(self) -> Trace:
        """Play the last sync pulse, wait for the file, align it. A file in doubt may be mended. Raises MeterError."""
        if self._first is None:
            raise MeterError("the csv meter was not started")
        last = self.emit()
        self.say(f"stop the meter's recording and export it to {self.path}, within {self.wait:.0f} s")
        deadline, tried = time.monotonic() + self.wait, 0
        fault = MeterError(f"{self.path} was not written within {self.wait:.0f} s; export the recording there")
        while True:
            written = self._written()
            if written not in (0, tried):
                try:
                    return self.trace(self.path.read_text("utf-8", errors="replace"), last)
                except OSError as error:
                    fault = MeterError(f"{self.path} cannot be read: {error.strerror}")
                except MeterError as error:
                    fault = error
                tried = written
                self.say(f"{fault}; mend the file within {max(deadline - time.monotonic(), 0):.0f} s")
            if time.monotonic() > deadline:
                raise fault
            time.sleep(LOOK)

    def _written(self) -> int:
        """When the file was written last, in ns; 0 while it is older than the start, empty, or still grows."""
        try:
            before = self.path.stat()
            if before.st_mtime < self._began - 1:
                return 0
            time.sleep(LOOK)
            same = self.path.stat().st_size == before.st_size > 0
            return before.st_mtime_ns if same else 0
        except OSError:
            return 0

    def trace(self, text: str, last: sync.Pulse) -> Trace:
        """The file's content on this machine's clock. Raises MeterError."""
        assert self._first is not None
        times, watts = parse(text, str(self.path))
        clock = sync.aligned(times, watts, self._first, last)
        period = float(np.median(np.diff(times))) * clock.rate
        found = clock(times)
        return Trace(found, watts, "W", period, ACCURACY, lost(found, period), skew=clock.error)


def find(options: Options) -> Meter:
    """The recording that will be at `path`. Raises ConfigError without one, MeterError when it cannot be there."""
    if "path" not in options:
        raise ConfigError("meter csv needs a file: --meter csv:path=FILE")
    path = Path(options["path"])
    if not path.absolute().parent.is_dir():
        raise MeterError(f"{path.absolute().parent} is no folder; name a file in an existing one")
    threads = os.cpu_count() or 1
    return CsvMeter(path, number(options, "wait", 600.0), lambda: sync.emit(lambda s: sync.load(s, threads)))


CSV = Family(find, 90, "apart", ("path", "wait"), exported=True)
