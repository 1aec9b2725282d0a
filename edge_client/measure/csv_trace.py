"""A recording of any meter as a CSV file: USB testers, bench supplies, oscilloscopes.

``--meter csv:path=FILE``: start the meter's own recording, then the measurement. It emits a sync pulse at its start and
end, waits for FILE, and finds both pulses in it. Columns are found by their names and units: a time, and a power or a
voltage and a current.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import sync
from edge_client.measure.energy import F64, Accuracy, Meter, Trace, lost
from edge_client.measure.meters import Family, Options, number

TIME = re.compile(r"time|date|elapsed|^t\b|seconds", re.IGNORECASE)
QUANTITIES = {
    "watts": re.compile(r"power|watt|^p\b|\(m?w\)|\[m?w\]", re.IGNORECASE),
    "volts": re.compile(r"volt|vbus|^v\b|^u\b|\(m?v\)|\[m?v\]", re.IGNORECASE),
    "amps": re.compile(r"curr|amp|ibus|^i\b|^a\b|\(m?a\)|\[m?a\]", re.IGNORECASE),
}
MILLI = re.compile(r"(?<![a-z])m[wva](?![a-z])|milli", re.IGNORECASE)
TIMES = (
    (re.compile(r"(?<![a-z])(us|µs|microseconds?)(?![a-z])", re.IGNORECASE), 1e-6),
    (re.compile(r"(?<![a-z])(ms|milliseconds?)(?![a-z])", re.IGNORECASE), 1e-3),
)
ROWS = 2  # the fewest rows of a recording
ACCURACY = Accuracy(0.01, 0.005, 0.001)


def parse(text: str, where: str) -> tuple[F64, F64]:
    """Times in seconds, rising, and watts. Raises MeterError.

    Rows that are no numbers are left out, as testers write a comment or a broken last line; so are repeated times.
    """
    try:
        dialect: type[csv.Dialect] | str = csv.Sniffer().sniff(text[:4096], ",;\t")
    except csv.Error:
        dialect = "excel"
    rows = [row for row in csv.reader(io.StringIO(text), dialect) if len(row) > 1]
    head = next((i for i, row in enumerate(rows) if _columns(row)), None)
    if head is None:
        raise MeterError(
            f"{where} has no line of column names with a time and a power, or a voltage and a current; name the "
            "columns like: time (s), power (W)"
        )
    names = rows[head]
    columns = _columns(names)
    figures: list[list[float]] = []
    for row in rows[head + 1 :]:
        try:
            figures.append([_moment(row[i]) if key == "time" else _decimal(row[i]) for key, i in columns.items()])
        except (ValueError, IndexError):
            continue
    if len(figures) < ROWS:
        raise MeterError(f"{where} has {len(figures)} rows of numbers; record for longer")
    table = dict(zip(columns, np.array(figures).T, strict=True))
    for key, values in table.items():
        name = names[columns[key]]
        if key == "time":
            values *= next((scale for pattern, scale in TIMES if pattern.search(name)), 1.0)
        elif MILLI.search(name):
            values *= 1e-3
    times = table["time"]
    fresh = np.concatenate([[True], np.diff(np.maximum.accumulate(times)) > 0])
    watts = table["watts"] if "watts" in table else table["volts"] * table["amps"]
    return times[fresh], watts[fresh]


def _columns(names: Sequence[str]) -> dict[str, int]:
    """Which column is what; empty when these are no names of a recording."""
    clean = [name.strip().lower() for name in names]
    found: dict[str, int] = {}
    for i, name in enumerate(clean):
        if TIME.search(name):
            found.setdefault("time", i)
            continue
        for key, pattern in QUANTITIES.items():
            if pattern.search(name):
                found.setdefault(key, i)
                break
    if "time" not in found or not ("watts" in found or {"volts", "amps"} <= found.keys()):
        return {}
    return {k: found[k] for k in (("time", "watts") if "watts" in found else ("time", "volts", "amps"))}


def _decimal(text: str) -> float:
    value = float(text.strip().replace(",", "."))
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def _moment(text: str) -> float:
    """Seconds, ``12:03:04.5``, or a date and time."""
    try:
        return _decimal(text)
    except ValueError:
        pass
    text = text.strip()
    parts = text.split(":")
    if len(parts) == 3 and " " not in text and "T" not in text:
        return 3600 * float(parts[0]) + 60 * float(parts[1]) + float(parts[2].replace(",", "."))
    return datetime.fromisoformat(text.replace("/", "-")).timestamp()


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
        """Play the last sync pulse, wait for the file, and align it. Raises MeterError."""
        if self._first is None:
            raise MeterError("the csv meter was not started")
        last = self.emit()
        self.say(f"stop the meter's recording and export it to {self.path}, within {self.wait:.0f} s")
        deadline = time.monotonic() + self.wait
        while not self._there():
            if time.monotonic() > deadline:
                raise MeterError(f"{self.path} was not written within {self.wait:.0f} s; export the recording there")
            time.sleep(0.2)
        try:
            text = self.path.read_text(errors="replace")
        except OSError as error:
            raise MeterError(f"{self.path} cannot be read: {error.strerror}") from None
        return self.trace(text, last)

    def _there(self) -> bool:
        """Whether a file newer than the start is there and no longer grows."""
        try:
            before = self.path.stat()
            if before.st_mtime < self._began - 1:
                return False
            time.sleep(0.2)
            return self.path.stat().st_size == before.st_size > 0
        except OSError:
            return False

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
