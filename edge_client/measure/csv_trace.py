"""A recording of any meter as a CSV file: USB testers, bench supplies, oscilloscopes.

``--meter csv:path=FILE``: start the meter's own recording, then the measurement. It emits a sync pulse at its start and
end, waits for FILE, and finds both pulses in it. Columns are found by their names: `edge_client.measure.csv_heading`.
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
from numpy.typing import NDArray

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import sync
from edge_client.measure.csv_heading import heading
from edge_client.measure.energy import F64, Accuracy, Meter, Trace, added, lost
from edge_client.measure.meters import Family, Options, number

THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
CLOCK = re.compile(r"(\d+):(\d+):(\d+(?:\.\d*)?)(?: ?([AaPp])\.?[Mm]\.?)?")
FRACTION = re.compile(r"\.\d+")
DAY_FIRST = re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}\b.*:.*")  # or month first
WANTED = (("time", "power"), ("time", "voltage", "current"))
CURRENT = (("time", "current"),)  # with the supply's voltage as an option
ROWS = 2  # the fewest rows of a recording
LONGEST, YEAR_5000 = 1e6, 1e11  # seconds that no recording lasts, and since 1970: they are of another unit
VOLTS_MOST = 1000.0
LOOK = 0.2  # seconds between two looks at a file
ACCURACY = Accuracy(0.01, 0.005, 0.001)


def parse(text: str, where: str, volts: float | None = None) -> tuple[F64, F64]:
    """Times in seconds, rising, and watts; of a recording of the current alone with the supply's `volts`.

    A last row without numbers is left out, as a recording may break off; so is a row that repeats a time. Raises
    MeterError.
    """
    try:
        dialect: type[csv.Dialect] | str = csv.Sniffer().sniff(text[:4096], ",;\t")
    except csv.Error:
        dialect = "excel"
    rows = [row for row in csv.reader(io.StringIO(text), dialect) if len(row) > 1]
    head = heading(rows, WANTED if volts is None else CURRENT, where)
    rows = rows[head.at + 1 :]
    time_at, *chosen = head.columns.values()
    scales = np.array(list(head.scales.values()))
    moments = _without_day([_moment_of(row, time_at, head.date) for row in rows])
    if odd := next(filter(DAY_FIRST.fullmatch, moments), ""):
        raise MeterError(
            f"{where}: the recording lasts over midnight, and {odd!r} does not say what is its month; write dates as "
            "2026-11-23, or record within one day"
        )
    mark = _mark([row[i] for row in rows for i in (time_at, *chosen) if i < len(row)], where)
    times, *values = np.array(_figures(rows, moments, chosen, mark, where)).T * scales[:, None]
    fresh = _fresh(times, head.names[time_at].strip(), where)
    watts = np.prod(values, axis=0)[fresh] * (1.0 if volts is None else volts)
    try:
        added([("the recording", float(np.median(watts)))], ACCURACY.offset)
    except OSError as error:
        raise MeterError(f"{where}: {error}") from None
    return times[fresh], watts


def _figures(
    rows: Sequence[Sequence[str]], moments: Sequence[str], chosen: Sequence[int], mark: str, where: str
) -> list[list[float]]:
    """The numbers of each row: its time, and its columns `chosen`. Raises MeterError; a last row may break off."""
    found = []
    for n, row in enumerate(rows):
        try:
            found.append([_moment(moments[n], mark), *(_decimal(row[i], mark) for i in chosen)])
        except (ValueError, IndexError):
            if n < len(rows) - 1:
                said = ", ".join(row)
                raise MeterError(
                    f"{where}: row {n + 1} of {len(rows)} is no numbers: {said}; remove or mend it"
                ) from None
    if len(found) < ROWS:
        raise MeterError(f"{where} has {len(found)} rows of numbers; record for longer")
    return found


def _fresh(times: F64, name: str, where: str) -> NDArray[np.bool_]:
    """The rows with a new time. Raises MeterError when the times, in column `name`, are no recording's."""
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        raise MeterError(f"{where}: time goes back after row {back[0] + 1}; record with dates, or not over midnight")
    if times[-1] - times[0] > LONGEST or times[-1] > YEAR_5000:
        raise MeterError(
            f"{where}: the times of {name!r} go from {times[0]:.6g} to {times[-1]:.6g} s, which is no recording; write "
            "their unit behind the name, like: time (ms)"
        )
    fresh = np.concatenate([[True], np.diff(times) > 0])
    if 2 * fresh.sum() < len(times):
        raise MeterError(f"{where}: most rows repeat a time of {name!r}; record with finer times")
    return fresh


def _moment_of(row: Sequence[str], at: int, date: int | None) -> str:
    """A row's time of day, with the date beside it; "" where the row breaks off before."""
    text = row[at].strip() if at < len(row) else ""
    dated = date is not None and date != at and date < len(row) and ":" in text
    return f"{row[date].strip()} {text}" if dated and date is not None else text


def _without_day(moments: list[str]) -> list[str]:
    """Times of one day without its date, whatever order its day and month have."""
    parts = [m.partition(" ") for m in moments]
    days = {day for day, _, rest in parts if ":" not in day and CLOCK.fullmatch(rest.replace(",", "."))}
    if len(days) != 1:
        return moments
    return [rest if day in days else m for m, (day, _, rest) in zip(moments, parts, strict=True)]


def _mark(texts: Sequence[str], where: str) -> str:
    """The decimal mark of all these numbers. Raises MeterError when a comma may be either."""
    commas = [text.strip() for text in texts if "," in text]
    if any("." in text for text in texts):
        return "," if any(text.rfind(",") > text.rfind(".") >= 0 for text in commas) else "."
    if commas and all(THOUSANDS.fullmatch(text) for text in commas):
        raise MeterError(f"{where}: {commas[0]!r} may be a thousand or a fraction; export with a decimal point")
    return "," if commas else "."


def _decimal(text: str, mark: str) -> float:
    if mark == ",":
        text = text.translate({ord(","): ".", ord("."): ","})
    whole, point, rest = text.strip().partition(".")
    value = float((whole.replace(",", "") if THOUSANDS.fullmatch(whole) else whole) + point + rest)
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def _moment(text: str, mark: str) -> float:
    """A number, ``12:03:04.5`` or ``1:03:04 PM`` in seconds, or a date and time."""
    if ":" not in text:
        return _decimal(text, mark)
    text = text.replace(",", ".")  # a fraction's
    clock = CLOCK.fullmatch(text)
    if clock is None:
        # Python 3.10 reads fractions of 3 or 6 digits, and no Z.
        whole = FRACTION.sub(lambda found: found[0][:7].ljust(7, "0"), text)
        return datetime.fromisoformat(whole.replace("/", "-").replace("Z", "+00:00")).timestamp()
    hours, minutes, seconds = map(float, clock.groups()[:3])
    if clock[4]:
        hours = hours % 12 + (12 if clock[4] in "Pp" else 0)
    return 3600 * hours + 60 * minutes + seconds


@dataclass
class CsvMeter:
    """A meter that is recorded elsewhere. `emit` plays a sync pulse; `wait` is how long the file may take to come.

    `volts` is what a supply gives whose current alone is recorded.
    """

    path: Path
    wait: float = 600.0
    volts: float | None = None
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
                    return self.trace(self.path.read_text(errors="replace"), last)
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
        times, watts = parse(text, str(self.path), self.volts)
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
    volts = number(options, "volts", 0.0, most=VOLTS_MOST) if "volts" in options else None
    return CsvMeter(path, number(options, "wait", 600.0), volts, lambda: sync.emit(lambda s: sync.load(s, threads)))


CSV = Family(find, 90, "apart", ("path", "wait", "volts"), exported=True)
