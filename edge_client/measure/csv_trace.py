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
from edge_client.measure.energy import F64, Accuracy, Meter, Trace, added, lost
from edge_client.measure.meters import Family, Options, number

WORDS = {
    "time": "time timestamp datetime date elapsed t",
    "power": "power p",
    "voltage": "voltage vbus u",
    "current": "current ibus i",
}
"""Words of a column's name that say what it holds."""
BASES = {
    "time": "s sec second seconds",
    "power": "w watt watts",
    "voltage": "v volt volts",
    "current": "a amp amps ampere amperes",
}
PREFIXES = {"": 1.0, "m": 1e-3, "milli": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "micro": 1e-6, "k": 1e3, "kilo": 1e3}
UNITS = {p + base: (key, n) for key, bases in BASES.items() for base in bases.split() for p, n in PREFIXES.items()}
"""What a unit measures, and how much of the base unit it is."""
OTHER = frozenset({"factor", "max", "min", "peak", "limit", "set", "apparent", "reactive"})  # no readings
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
ROWS = 2  # the fewest rows of a recording
ACCURACY = Accuracy(0.01, 0.005, 0.001)


def parse(text: str, where: str) -> tuple[F64, F64]:
    """Times in seconds, rising, and watts. Raises MeterError.

    A last row without numbers is left out, as a recording may break off; so is a row that repeats a time.
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
    columns, names, rows = _columns(rows[head]), rows[head], rows[head + 1 :]
    scales = [_scale(names, key, places, where) for key, places in columns.items()]
    chosen = [at for at, *_ in columns.values()]
    mark = _mark([row[i] for row in rows for i in chosen if i < len(row)], where)
    figures: list[list[float]] = []
    for n, row in enumerate(rows, 1):
        try:
            figures.append([_moment(row[chosen[0]], mark), *(_decimal(row[i], mark) for i in chosen[1:])])
        except (ValueError, IndexError):
            if n < len(rows):
                said = ", ".join(row)
                raise MeterError(f"{where}: row {n} of {len(rows)} is no numbers: {said}; remove or mend it") from None
    if len(figures) < ROWS:
        raise MeterError(f"{where} has {len(figures)} rows of numbers; record for longer")
    times, *values = np.array(figures).T * np.array(scales)[:, None]
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        raise MeterError(f"{where}: time goes back after row {back[0] + 1}; record with dates, or not over midnight")
    fresh = np.concatenate([[True], np.diff(times) > 0])
    if 2 * fresh.sum() < len(times):
        raise MeterError(f"{where}: most rows repeat a time of {names[chosen[0]].strip()!r}; record with finer times")
    watts = np.prod(values, axis=0)[fresh]
    try:
        added([("the recording", float(np.median(watts)))], ACCURACY.offset)
    except OSError as error:
        raise MeterError(f"{where}: {error}") from None
    return times[fresh], watts


def _columns(names: Sequence[str]) -> dict[str, list[int]]:
    """The columns that may be the time, and those that may be the power, or voltage and current; empty without them.

    A name that is the quantity's alone comes before one with more words and a unit, and that before a unit alone.
    """
    ranks: dict[str, dict[int, int]] = {}
    for i, name in enumerate(names):
        key, rank, _ = _meaning(name)
        ranks.setdefault(key, {})[i] = rank
    best = {key: min(found.values()) for key, found in ranks.items()}
    pair = max(best.get("voltage", 9), best.get("current", 9))
    wanted = ("time", "power") if best.get("power", 9) <= pair else ("time", "voltage", "current")
    if not set(wanted) <= ranks.keys():
        return {}
    return {key: [i for i, rank in ranks[key].items() if rank == best[key]] for key in wanted}


def _scale(names: Sequence[str], key: str, places: Sequence[int], where: str) -> float:
    """How much of the base unit a number of this column is. Raises MeterError when column or unit is in doubt."""
    said = " and ".join(repr(names[i].strip()) for i in places)
    if len(places) > 1:
        raise MeterError(f"{where}: {said} may each be the {key}; remove all but one")
    scale = _meaning(names[places[0]])[2]
    if not scale:
        unit = BASES[key].split()[0]
        raise MeterError(f"{where}: {said} has a unit that is not known; give the {key} in {unit}, m{unit} or u{unit}")
    return scale


def _meaning(name: str) -> tuple[str, int, float]:
    """What a column holds ("" for anything else), how surely (0 the most), its unit's scale (0: not known, 1: none)."""
    bracket = re.search(r"[(\[]([^)\]]*)[)\]]", name)
    unit = bracket[1].strip() if bracket else ""
    words = re.findall(r"[^\W\d_]+", name.replace(bracket[0], " ") if bracket else name)
    if not bracket and words and words[-1].lower() in UNITS:
        unit = words.pop()
    words = [word.lower() for word in words]
    # A capital M is no milli.
    measured, scale = UNITS.get(unit.lower(), ("", 0.0)) if not re.match(r"M[A-Za-z]$", unit) else ("", 0.0)
    if OTHER & set(words):
        return "", 0, 0.0
    if not words:
        return measured, 2, scale
    key = next((k for k, known in WORDS.items() if set(words) & set(known.split())), "")
    if len(words) == 1 and key:
        bare = not unit or (key == "time" and ":" in unit)  # hh:mm:ss
        return key, 0, 1.0 if bare else scale if measured == key else 0.0
    return (key, 1, scale) if key and measured == key else ("", 0, 0.0)


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
    """A number, ``12:03:04.5`` in seconds, or a date and time."""
    if ":" not in text:
        return _decimal(text, mark)
    text = text.strip().replace(",", ".")
    parts = text.split(":")
    if len(parts) == 3 and " " not in text and "T" not in text:
        return 3600 * float(parts[0]) + 60 * float(parts[1]) + float(parts[2])
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
