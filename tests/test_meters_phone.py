"""Meters of a phone behind adb, against a program that answers as adb does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated_power import SECONDS, SHAPES, Truth, VirtualClock, record

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import android
from edge_client.measure.adb import AdbError, connect
from edge_client.measure.energy import joules
from edge_client.measure.polling import Polled, poll


@dataclass
class Phone:
    """A program `adb` that answers from files, which `moved` keeps up to date. Its clock has its own zero and pace."""

    folder: Path
    truth: Truth
    rate: float = 1.0002
    plugged: bool = False
    charging_sign: int = -1

    def __post_init__(self) -> None:
        script = self.folder / "adb"
        script.write_text(
            "#!/bin/sh\n"
            f'cd "{self.folder}"\n'
            'echo "$*" >> calls\n'
            'case "$*" in\n'
            "  devices) cat devices;;\n"
            '  *"iio:device"*) cat energy_value || exit 1;;\n'
            '  *IPowerStats*) if [ -f dump ]; then cat dump; else echo "Can\'t find service" >&2; exit 1; fi;;\n'
            "  *current_now*dumpsys*) cat current battery;;\n"
            '  *current_now*) if [ -f current ]; then cat current; else echo "Unknown"; fi;;\n'
            '  *"dumpsys battery"*) cat battery;;\n'
            '  *) echo "unexpected: $*" >&2; exit 1;;\n'
            "esac\n"
        )
        script.chmod(0o755)
        (self.folder / "devices").write_text("List of devices attached\nPIXEL8\tdevice\n\n")
        self._battery()

    def _battery(self) -> None:
        usb = "true" if self.plugged else "false"
        (self.folder / "battery").write_text(
            f"Current Battery Service state:\n  AC powered: false\n  USB powered: {usb}\n  Wireless powered: false\n"
            "  level: 80\n  voltage: 4000\n  temperature: 281\n"
        )

    def rails(self, t: float) -> None:
        """The two files of ODPM: updated every 50 ms of the phone's time, in microjoules since boot."""
        t = t // 0.05 * 0.05
        at = int((1234.5 + t * self.rate) * 1000)
        spent = [5e6 + share * self.truth.energy(0, t) * 1e6 if t else 5e6 for share in (0.6, 0.3, 0.1, 2.0)]
        names = ("S3M_VDD_CPUCL1", "S4M_VDD_CPUCL0", "S1M_VDD_MIF", "VSYS_PWR_DISP")
        rows = [f"CH{i}(T={at})[{name}], {int(uj)}" for i, (name, uj) in enumerate(zip(names, spent, strict=True))]
        (self.folder / "energy_value").write_text("\n".join([f"t={at}", *rows, ""]))

    def dump(self, t: float) -> None:
        """What dumpsys prints."""
        spent = self.truth.energy(0, t) if t else 0.0
        (self.folder / "dump").write_text(
            "============= PowerStats HAL 2.0 energy meter ==============\n"
            "                           Channel    Cumulative Energy\n"
            f"          [S4M_VDD_CPUCL0]:CPU(LITTLE)   {1e3 * (10 + 0.75 * spent):14.2f} mWs\n"
            f"               [S1M_VDD_MIF]:Memory   {1e3 * (20 + 0.25 * spent):14.2f} mWs\n"
            f"          [VSYS_PWR_DISP]:Display   {1e3 * (30 + 5 * spent):14.2f} mWs\n"
            "========== End of PowerStats HAL 2.0 energy meter ==========\n"
        )

    def current(self, t: float) -> None:
        """The battery's current in microamperes, negative while it is used."""
        (self.folder / "current").write_text(f"{self.charging_sign * round(self.truth.power(t) / 4.0 * 1e6)}\n")


@pytest.fixture
def phone_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Phone]:
    monkeypatch.setenv("ADB", str(tmp_path / "adb"))
    return lambda truth, **more: Phone(tmp_path, truth, **more)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pixels_rails_are_read_on_the_phones_own_clock(phone_of: Callable[..., Phone], shape: str) -> None:
    truth = SHAPES[shape]
    phone = phone_of(truth)
    phone.rails(0.0)
    meter = android.find_odpm({})
    assert isinstance(meter, android.Rails)
    clock = VirtualClock(SECONDS, jitter=0.03, moved=phone.rails)
    meter.now = meter.polled.now = clock.now
    clock.moved(0.0)
    found = poll(meter.read, meter.polled.period, clock.now, clock.wait)
    trace = meter.placed(meter.polled.trace(found))
    energy, due = joules(trace, 2.0, SECONDS - 2), truth.energy(2.0, SECONDS - 2)
    assert energy.joules == pytest.approx(due, rel=0.01)
    assert abs(energy.joules - due) <= 3 * energy.error


def test_rails_come_from_dumpsys_where_the_files_may_not_be_read(phone_of: Callable[..., Phone]) -> None:
    truth = SHAPES["ramp"]
    phone = phone_of(truth)
    phone.dump(0.0)
    meter = android.find_odpm({})
    assert isinstance(meter, Polled)
    assert "by dumpsys" in meter.what
    clock = VirtualClock(SECONDS, moved=phone.dump)
    meter.now = clock.now
    energy = joules(record(meter, clock), 2, 38)
    assert energy.joules == pytest.approx(truth.energy(2, 38), rel=0.01)
    display = android.find_odpm({"rails": "DISP"})
    assert isinstance(display, Polled)
    clock = VirtualClock(SECONDS, moved=phone.dump)
    display.now = clock.now
    assert joules(record(display, clock), 2, 38).joules == pytest.approx(5 * truth.energy(2, 38), rel=0.01)


@pytest.mark.parametrize("shape", ["constant", "ramp"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_battery_gives_current_times_voltage(phone_of: Callable[..., Phone], shape: str, sign: int) -> None:
    truth = SHAPES[shape]
    phone = phone_of(truth, charging_sign=sign)
    phone.current(0.0)
    meter = android.find_battery({"serial": "PIXEL8"})
    assert isinstance(meter, Polled)
    clock = VirtualClock(SECONDS, moved=phone.current)
    meter.now = clock.now
    assert joules(record(meter, clock), 2, 38).joules == pytest.approx(truth.energy(2, 38), rel=0.01)


def test_a_battery_in_milliamperes_is_seen_and_measured_by_its_unit(
    phone_of: Callable[..., Phone], tmp_path: Path
) -> None:
    phone_of(SHAPES["constant"])
    (tmp_path / "current").write_text("-350\n")
    with pytest.raises(MeterError, match=r"a current of 350, too little in uA .*battery:unit=mA"):
        android.find_battery({})
    for unit, watts in (("mA", 1.4), ("uA", 1.4e-3)):
        meter = android.find_battery({"unit": unit})
        assert isinstance(meter, Polled)
        assert meter.read() == pytest.approx(watts)
    with pytest.raises(ConfigError, match="unit=A: give one of uA, mA"):
        android.find_battery({"unit": "A"})


def test_a_battery_that_is_plugged_in_or_hides_its_current_loses_readings_and_no_recording(
    phone_of: Callable[..., Phone], tmp_path: Path
) -> None:
    phone = phone_of(SHAPES["constant"])
    phone.current(0.0)
    meter = android.find_battery({})
    assert isinstance(meter, Polled)
    assert meter.read() == pytest.approx(4.0)
    phone.plugged = True
    phone._battery()
    with pytest.raises(OSError, match=r"the phone is charged \(USB powered\)"):
        meter.read()
    phone.plugged = False
    phone._battery()
    (tmp_path / "current").write_text("Unknown\n")
    with pytest.raises(OSError, match="does not report its battery's current"):
        meter.read()


def test_a_phone_that_cannot_be_measured_says_why(phone_of: Callable[..., Phone], tmp_path: Path) -> None:
    phone = phone_of(SHAPES["constant"])
    with pytest.raises(MeterError, match="has no power rails"):
        android.find_odpm({})
    with pytest.raises(MeterError, match="does not report its battery's current"):
        android.find_battery({})
    phone.rails(0.0)
    with pytest.raises(MeterError, match="no rail named like XYZ"):
        android.find_odpm({"rails": "XYZ"})
    with pytest.raises(ConfigError, match="not a pattern"):
        android.find_odpm({"rails": "("})
    phone.plugged = True
    phone._battery()
    with pytest.raises(MeterError, match=r"is charged \(USB powered\).*adb tcpip 5555"):
        android.find_battery({})
    with pytest.raises(MeterError, match="adb lists PIXEL8"):
        android.find_battery({"serial": "other"})
    (tmp_path / "devices").write_text("List of devices attached\nPIXEL8\tunauthorized\n")
    with pytest.raises(AdbError, match="confirm this computer on the phone's screen"):
        connect()
    (tmp_path / "devices").write_text("List of devices attached\nA\tdevice\nB\tdevice\n")
    with pytest.raises(AdbError, match="several devices, A, B; choose one with --adb SERIAL"):
        connect()
    (tmp_path / "devices").write_text("List of devices attached\n\n")
    with pytest.raises(AdbError, match="no device; connect the phone"):
        connect()
