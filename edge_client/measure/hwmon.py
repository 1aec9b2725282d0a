"""Power sensors that Linux shows as files: `/sys/class/hwmon`, and the rails of a Jetson.

A sensor has rails. A rail is `powerN_input` (microwatts), or `currN_input` (mA) times `inN_input` (mV), by number or by
equal labels. A rail whose label is the whole board's is taken alone, as are the inputs of a power supply: the others
are parts of it. Older Jetson systems show their INA3221 as `in_powerN_input` (milliwatts) in
`/sys/bus/i2c/drivers/ina3221x`. A `powerN_average` is no rail: it is of the last second or more, and a block of load
has three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import MeterError
from edge_client.measure.energy import Accuracy, Meter, added
from edge_client.measure.meters import Family, Options
from edge_client.measure.polling import Polled

CLASS = "sys/class/hwmon"
JETSON_NEW, JETSON_OLD = "sys/bus/i2c/drivers/ina3221", "sys/bus/i2c/drivers/ina3221x"
WHOLE = re.compile(r"VDD_IN|POM_5V_IN|total|system|PSYS|SOCKET|board", re.IGNORECASE)
BY_NAME = {
    re.compile(r"^(BAT|battery|ucsi|AC)", re.IGNORECASE): "a battery or charger",
    re.compile(r"^(amdgpu|radeon|nouveau|nvidia|xe|i915)", re.IGNORECASE): "a graphics card",
}
"""Sensors that are taken only when they are asked for."""
INA3221_CHANNELS = 3  # above them its driver shows shunt voltages and sums
PERIOD = 0.02
ACCURACY = Accuracy(0.02, 0.01, 0.001)


@dataclass(frozen=True)
class Rail:
    """One rail: its label, and the files whose product times `scale` is its watts."""

    label: str
    files: tuple[Path, ...]
    scale: float

    def watts(self) -> float:
        """Power now. Raises OSError when a file cannot be read."""
        value = self.scale
        for file in self.files:
            value *= _number(file)
        return value


def _number(file: Path) -> float:
    try:
        return float(file.read_text())
    except ValueError:
        raise OSError(f"{file} holds no number") from None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def rails(folder: Path) -> list[Rail]:
    """The rails of one hwmon or iio folder, of the first kind that it has."""
    return _of_iio(folder) or _of_powers(folder) or _of_currents(folder)


def _of_iio(folder: Path) -> list[Rail]:
    """Older Jetsons: rail_name_0 and so on."""
    files = {_index(f): f for f in sorted(folder.glob("in_power*_input"))}
    return [Rail(_text(folder / f"rail_name_{n}") or f"rail {n}", (file,), 1e-3) for n, file in files.items()]


def _of_powers(folder: Path) -> list[Rail]:
    files = {_index(f): f for f in sorted(folder.glob("power*_input"))}
    return [Rail(_text(folder / f"power{n}_label") or f"power{n}", (file,), 1e-6) for n, file in files.items()]


def _of_currents(folder: Path) -> list[Rail]:
    """Each current with the voltage of its label, else of its number."""
    volts = {_index(f): f for f in sorted(folder.glob("in*_input"))}
    labelled = {label: n for n in volts if (label := _text(folder / f"in{n}_label"))}
    made = []
    for file in sorted(folder.glob("curr*_input")):
        n = _index(file)
        if _text(folder / "name") == "ina3221" and int(n) > INA3221_CHANNELS:
            continue
        label = _text(folder / f"curr{n}_label")
        pair = labelled.get(label, n)
        if pair in volts:
            label = label or _text(folder / f"in{pair}_label") or f"curr{n}"
            made.append(Rail(label, (file, volts[pair]), 1e-6))
    return made


def _index(file: Path) -> str:
    return "".join(re.findall(r"\d+", file.name))


def _counted(every: list[Rail]) -> list[Rail]:
    """The rails that are added: that of the whole where there is one, or every input of a power supply."""
    whole = [rail for rail in every if WHOLE.search(rail.label)]
    inputs = [rail for rail in every if re.match("pin", rail.label, re.IGNORECASE)]
    return whole[:1] or inputs or every


def _usable(every: list[Rail]) -> str:
    """Why the rails cannot be read now; empty when they can."""
    for rail in every:
        try:
            rail.watts()
        except PermissionError as error:
            return f"{error.filename} may not be read; run: sudo chmod a+r {error.filename}"
        except OSError as error:
            return f"rail {rail.label} cannot be read: {error.strerror or error}"
    return ""


def _meter(name: str, where: str, every: list[Rail]) -> Meter:
    def watts() -> float:
        return added([(f"rail {rail.label}", rail.watts()) for rail in every], ACCURACY.offset)

    what = f"{where}, {', '.join(rail.label for rail in every)}"
    return Polled(name, what, watts, "W", PERIOD, ACCURACY)


def find_hwmon(options: Options, root: Path = Path("/")) -> Meter:
    """The sensor that option `name` names, else the first with a power but a battery or graphics card."""
    asked, said = options.get("name"), []
    folders = {folder: _text(folder / "name") or folder.name for folder in sorted((root / CLASS).glob("hwmon*"))}
    for folder, name in folders.items():
        if asked not in (None, name, folder.name):
            continue
        place = folder if list(folder.glob("*_input")) or not (folder / "device").is_dir() else folder / "device"
        every = _counted(rails(place))
        kind = next((kind for names, kind in BY_NAME.items() if asked is None and names.match(name)), None)
        if kind is not None:
            why = f"{name} is {kind}: ask for it with --meter hwmon:name={name}"
        else:
            average = " but an average over some time" if list(place.glob("power*_average")) else ""
            why = _usable(every) if every else f"{name} has no power{average}"
        if not why:
            return _meter("hwmon", f"{folder.name} ({name})", every)
        said.append(why)
    if asked is not None and not said:
        names = ", ".join(folders.values()) or "none"
        said.append(f"there is no sensor {asked!r} in {root / CLASS}; there are: {names}")
    raise MeterError("; ".join(said) or f"there is no sensor in {root / CLASS}")


def find_jetson(options: Options, root: Path = Path("/")) -> Meter:
    """A Jetson's INA3221: the input of the board where it is labelled, else the sum of the rails."""
    folders = [
        *sorted((root / JETSON_NEW).glob("*/hwmon/hwmon*")),
        *sorted((root / JETSON_OLD).glob("*/iio:device*")),
    ]
    every = _counted([rail for folder in folders for rail in rails(folder)])
    if not every:
        raise MeterError(f"no INA3221 rails in {root / JETSON_NEW} or {root / JETSON_OLD}: this is not a Jetson")
    why = _usable(every)
    if why:
        raise MeterError(why)
    return _meter("jetson", "INA3221 of the board", every)


JETSON = Family(find_jetson, 10)
HWMON = Family(find_hwmon, 40, options=("name",))
