"""Energy counters of Intel and AMD processors, as Linux shows them in `/sys/class/powercap`.

A `psys` domain counts the whole platform and is taken alone. Otherwise the packages and their memory are added; cores
and graphics are parts of a package. A counter counts microjoules and starts again at its range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edge_client.errors import MeterError
from edge_client.measure.energy import Accuracy, Meter
from edge_client.measure.meters import Family, Options
from edge_client.measure.polling import Polled

CLASS = "sys/class/powercap"
PERIOD = 0.05  # seconds; the counters move every millisecond
ACCURACY = Accuracy(0.05, 0.0, 61e-6)  # the model behind them is within some per cent; a count is 15 or 61 uJ


@dataclass
class Counter:
    """One domain's counter, unwrapped: `joules` rises for ever if it is read at least once a range."""

    name: str
    file: Path
    span: float
    _last: float | None = field(default=None, init=False)
    _total: float = field(default=0.0, init=False)

    def joules(self) -> float:
        """Joules since the first call. Raises OSError."""
        value = int(self.file.read_text())
        if self._last is not None:
            step = value - self._last
            self._total += step if step >= 0 else step + self.span
        self._last = value
        return self._total / 1e6


def domains(root: Path) -> list[Counter]:
    """The counters that together are the machine's. Raises OSError when one may not be read."""
    found = []
    for folder in sorted((root / CLASS).glob("intel-rapl:*")):
        file = folder / "energy_uj"
        if not file.exists():
            continue
        name = (folder / "name").read_text().strip()
        if name.startswith(("package", "psys", "dram")):
            file.read_text()
            found.append(Counter(name, file, float((folder / "max_energy_range_uj").read_text())))
    platform = [c for c in found if c.name.startswith("psys")]
    return platform or found


def find(options: Options, root: Path = Path("/")) -> Meter:
    """The processor's counters. Raises MeterError."""
    try:
        counters = domains(root)
    except PermissionError as error:
        every = root / CLASS / "intel-rapl:*" / "energy_uj"
        raise MeterError(f"{error.filename} may not be read; run: sudo chmod a+r {every}") from None
    except (OSError, ValueError) as error:
        raise MeterError(f"{root / CLASS} cannot be read: {error}") from None
    if not counters:
        raise MeterError(f"no energy counter in {root / CLASS}: a virtual machine, or a processor without RAPL")
    what = f"processor counters: {', '.join(c.name for c in counters)}"
    return Polled("rapl", what, lambda: sum(c.joules() for c in counters), "J", PERIOD, ACCURACY)


RAPL = Family(find, 35)  # before hwmon, whose sensors may be of any part
