"""Energy of an Android phone, read through adb: the power rails of Pixel phones (ODPM), or the battery's current.

Rails are counters of microjoules with the time of their last update, on the phone's clock since boot; the files show
both, `dumpsys` the counters alone. By default the rails of processor, graphics, accelerator and memory are added. The
battery gives what the whole phone takes, while it does not charge.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edge_client.errors import ConfigError, MeterError
from edge_client.measure.adb import Adb, AdbError, connect
from edge_client.measure.energy import Accuracy, Meter, Trace, align, lost
from edge_client.measure.meters import Family, Options
from edge_client.measure.polling import Now, Polled

RAILS = r"CPU|G3D|GPU|TPU|MIF|MEM|DDR|VDD2|VDDQ|INT|SLC"
FILES = "cat /sys/bus/iio/devices/iio:device*/energy_value"
DUMP = "dumpsys android.hardware.power.stats.IPowerStats/default"
ROW = re.compile(r"CH(\d+)\(T=(\d+)\)\[([^\]]+)\],\s*(\d+)")
DUMPED = re.compile(r"\[([^\]]+)\]\S*\s+([\d.]+) mWs")
PLUGS = ("AC powered", "USB powered", "Wireless powered", "Dock powered")
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
PERIOD = 0.5  # seconds: a command through adb takes a tenth
RAIL_ACCURACY = Accuracy(0.02, 0.0, 1e-6)
DUMP_ACCURACY = Accuracy(0.02, 0.0, 0.1)  # dumpsys prints counters through float32
BATTERY_ACCURACY = Accuracy(0.05, 0.02, 0.004)
AMPS = {"uA": 1e-6, "mA": 1e-3}
LEAST = 10_000.0  # a phone that is awake takes more than 10 mA, and less than 10 A


def parse_rails(text: str, wanted: re.Pattern[str]) -> tuple[float, float]:
    """The phone's seconds since boot, and joules of the wanted rails, from the files. Raises OSError without any."""
    rows = [row for row in ROW.findall(text) if wanted.search(row[2])]
    if not rows:
        raise OSError(f"no rail named like {wanted.pattern} in what the phone printed")
    return float(np.mean([float(row[1]) for row in rows])) / 1e3, sum(float(row[3]) for row in rows) / 1e6


def parse_dump(text: str, wanted: re.Pattern[str]) -> float:
    """Joules of the wanted rails from dumpsys. Raises OSError without any."""
    rows = [float(value) for name, value in DUMPED.findall(text) if wanted.search(name)]
    if not rows:
        raise OSError(f"no rail named like {wanted.pattern} in what the phone printed")
    return sum(rows) / 1e3


def _reading(adb: Adb, command: str) -> str:
    """What a command prints. Raises OSError when it fails: one reading is lost, not the recording."""
    try:
        return adb.shell(command)
    except AdbError as error:
        raise OSError(str(error)) from None


@dataclass
class Rails:
    """ODPM's files: polled like any meter, but a sample counts at the phone's time, aligned to this machine's."""

    adb: Adb
    wanted: re.Pattern[str]
    now: Now = time.monotonic
    name: str = "odpm"
    phone: list[float] = field(default_factory=list, init=False)
    host: list[float] = field(default_factory=list, init=False)
    polled: Polled = field(init=False)

    def __post_init__(self) -> None:
        self.polled = Polled(self.name, self.what, self.read, "J", PERIOD, RAIL_ACCURACY, now=self.now)

    @property
    def what(self) -> str:
        """What it measures."""
        return f"power rails of phone {self.adb.serial} named like {self.wanted.pattern}"

    def read(self) -> float:
        """Joules now; the phone's time is remembered. Raises OSError."""
        at, joules = parse_rails(_reading(self.adb, FILES), self.wanted)
        self.phone.append(at)
        self.host.append(self.now())
        return joules

    def start(self) -> None:
        """Begin to read."""
        self.phone, self.host = [], []
        self.polled.start()

    def stop(self) -> Trace:
        """The recording on this machine's clock. Raises MeterError."""
        return self.placed(self.polled.stop())

    def placed(self, trace: Trace) -> Trace:
        """A recording with host times at the phone's own times: a counter that did not move is no new sample."""
        n = len(trace.times)
        phone = np.array(self.phone[-n:])
        clock = align(phone, np.array(self.host[-n:]))
        fresh = np.concatenate([[True], np.diff(phone) > 0])
        times = clock(phone[fresh])
        missing = max(trace.lost, lost(times, trace.period))
        return Trace(times, trace.values[fresh], "J", trace.period, trace.accuracy, missing, skew=clock.error)


def battery_watts(adb: Adb, unit: str | None = None) -> Callable[[], float]:
    """A reading of the battery's power, positive whatever sign the maker gives the current of a phone in use.

    `unit` is that of the current: Android defines uA, and some makers give mA. Raises MeterError when the phone hides
    the current, is being charged, or seems to give mA without that being said.
    """
    if plug := _plug(adb.shell("dumpsys battery")):
        raise MeterError(
            f"phone {adb.serial} is charged ({plug}), so its battery's current is not what it takes; run: "
            "adb tcpip 5555, adb connect PHONE:5555, and unplug it"
        )
    commands = ("cmd battery get -f current_now", "cat /sys/class/power_supply/battery/current_now")
    for command in commands:
        try:
            now = abs(float(adb.shell(command)))
            break
        except (AdbError, ValueError):
            continue
    else:
        raise MeterError(f"phone {adb.serial} does not report its battery's current (Android 15 and newer do)")
    if unit is None and now < LEAST:
        raise MeterError(
            f"phone {adb.serial} reports a current of {now:g}, too little in uA for a phone that is awake; if it is in "
            "mA, use --meter battery:unit=mA, else battery:unit=uA"
        )
    scale = AMPS[unit or "uA"]

    def watts() -> float:
        first, _, rest = _reading(adb, f"{command}; dumpsys battery").partition("\n")
        volts = re.search(r"^\s*voltage: (\d+)", rest, re.MULTILINE)
        if volts is None or not NUMBER.fullmatch(first.strip()):
            raise OSError("the phone does not report its battery's current and voltage")
        if plug := _plug(rest):
            raise OSError(f"the phone is charged ({plug})")
        return abs(float(first)) * scale * float(volts[1]) / 1e3

    return watts


def _plug(battery: str) -> str | None:
    """What charges the phone, of what `dumpsys battery` printed."""
    return next((plug for plug in PLUGS if f"{plug}: true" in battery), None)


def find_odpm(options: Options) -> Meter:
    """The phone's power rails. Raises MeterError."""
    wanted = _pattern(options)
    adb = _phone(options)
    try:
        parse_rails(adb.shell(FILES), wanted)
        return Rails(adb, wanted)
    except OSError as error:
        raise MeterError(f"{error}; choose others by rails=PATTERN") from None
    except AdbError:
        pass  # the files are for the shell user on some builds only
    try:
        parse_dump(adb.shell(DUMP), wanted)
    except (AdbError, OSError) as error:
        raise MeterError(f"phone {adb.serial} has no power rails (Pixel 6 and newer have): {error}") from None

    what = f"power rails of phone {adb.serial} named like {wanted.pattern}, by dumpsys"
    return Polled("odpm", what, lambda: parse_dump(_reading(adb, DUMP), wanted), "J", PERIOD, DUMP_ACCURACY)


def find_battery(options: Options) -> Meter:
    """The phone's battery. Raises MeterError."""
    unit = options.get("unit")
    if unit not in (None, *AMPS):
        raise ConfigError(f"unit={unit}: give one of {', '.join(AMPS)}")
    adb = _phone(options)
    try:
        watts = battery_watts(adb, unit)
    except AdbError as error:
        raise MeterError(str(error)) from None
    return Polled("battery", f"battery of phone {adb.serial}", watts, "W", PERIOD, BATTERY_ACCURACY)


def _phone(options: Options) -> Adb:
    try:
        return connect(options.get("serial"))
    except AdbError as error:
        raise MeterError(str(error)) from None


def _pattern(options: Options) -> re.Pattern[str]:
    try:
        return re.compile(options.get("rails", RAILS))
    except re.error as error:
        raise ConfigError(f"rails={options['rails']}: not a pattern ({error})") from None


ODPM = Family(find_odpm, 10, "android", ("serial", "rails"))
BATTERY = Family(find_battery, 20, "android", ("serial", "unit"))
