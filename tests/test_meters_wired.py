"""Meters apart from this machine against emulated ones: a phone behind adb, a Monsoon on USB, a CSV recording."""

from __future__ import annotations

import os
import re
import struct
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_power import SECONDS, SHAPES, Truth, VirtualClock, pulses, record

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import android, csv_heading, csv_trace, sync
from edge_client.measure.adb import AdbError, connect
from edge_client.measure.energy import joules
from edge_client.measure.meters import Family, choose, families
from edge_client.measure.polling import Polled, poll

# --- a phone


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
    with pytest.raises(ConfigError, match="unit=A: one of uA, mA is due"):
        android.find_battery({"unit": "A"})


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


# --- a Monsoon


@dataclass
class UsbMonitor:
    """The USB side of a power monitor: control transfers of its stored values, bulk packets of samples.

    `truth` is watts at `volts`; currents below the fine range's end are in both ranges, as counts between a zero and a
    reference that drift a little. Samples are 200 us apart on a clock of its own pace.
    """

    truth: Truth
    now: Callable[[], float]
    model: int
    volts: float = 4.2
    rate: float = 1.0001
    drop_at: tuple[int, int] = (-1, 0)
    idVendor: int = 0x2AB9
    idProduct: int = 0x0001
    serial_number: str = "20123"
    sampling: bool = False
    sent: int = 0
    dropped: int = 65530  # wraps soon
    busy: bool = False
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        hv = self.model == 2
        self.fine_most = 64000 if hv else 30000
        self.eeprom = {
            0xC0: 32, 0xC1: 17, 0x42: 20123, 0x45: self.model, 0xC4: 0, 0x43: 50000, 0x44: 50000, 0x0C: 20,
            0x29: 0x003C, 0x10: 2, 0x88: 0xE000, 0x89: 0xC800, 0x1A: 36500, 0x1B: 6400, 0x1C: 14000, 0x1D: 600,
            0x1E: 3100, 0x1F: 250, 0x25: 15, 0x26: 12, 0x27: 0, 0x28: 0, 0x02: 0, 0x11: 0, 0x0D: 0, 0x12: 0, 0x0E: 0,
            0x13: 0,
        }  # fmt: skip
        # Full scales in amperes between zero + offset and reference, in counts.
        self.scales = (6.4, 36500e-6) if hv else (3.1034, 35946e-6)
        self.offsets = (12, 15) if hv else (0, 0)
        self.zeros, self.references = ((900, 1100), (30000, 31000)) if hv else ((600, 650), (16000, 16500))

    def ctrl_transfer(self, kind: int, request: int, value: int, index: int, data: Any = None, timeout: int = 0) -> Any:
        self.calls.append((request, value))
        if kind == 0xC0:
            return array("B", struct.pack("I", self.eeprom[index & 0xFF]))
        if request in (2, 3):
            self.sampling = request == 2
        return None

    def read(self, endpoint: int, size: int, timeout: int) -> array[int]:
        assert self.sampling
        observations = b""
        if self.sent == self.drop_at[0]:
            self.sent += self.drop_at[1]
            self.dropped = (self.dropped + self.drop_at[1]) % 65536
        for _ in range(3):
            observations += self._sample(self.sent)
            self.sent += 1
        packet = struct.pack("HBB", self.dropped, 0, 3) + observations
        return array("B", packet.ljust(64, b"\0"))

    def _sample(self, number: int) -> bytes:
        t = number * 200e-6 * self.rate
        amps = self.truth.power(t) / self.volts
        phase = number % 1000
        kind = 0x10 if phase < 3 else 0x30 if phase < 6 else 0x00
        drift = int(20 * np.sin(t / 7))
        words = []
        for full, zero, reference, offset, most in zip(
            self.scales, self.zeros, self.references, self.offsets, (65535, 65535), strict=True
        ):
            low = zero + drift
            counts = {0x10: low, 0x30: reference + drift}.get(
                kind, low + offset + amps / full * (reference - zero - offset)
            )
            if self.model == 1:
                most = 32767
            words.append(min(round(counts), most))
        scale = 62.5e-6 * (4 if self.model == 2 else 2)
        words += [0, 0, 0, 0, round(self.volts / scale), 0]
        # The firmware sends each word's higher byte first.
        return struct.pack(">8H", *words) + bytes([0, kind])

    def __getattr__(self, name: str) -> Any:
        if name in ("detach_kernel_driver", "set_configuration", "reset"):
            return lambda *a: None
        if name == "get_active_configuration":
            return lambda: {(0, 0): ()}
        raise AttributeError(name)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[[UsbMonitor], None]:
    pytest.importorskip("Monsoon", reason="extra meters is not installed")
    import usb.core
    import usb.util

    def plug(monitor: UsbMonitor) -> None:
        def find(find_all: bool = False, custom_match: Any = None, **ids: int) -> Any:
            return iter([monitor]) if find_all else monitor if custom_match(monitor) else None

        monkeypatch.setattr(usb.core, "find", find)
        monkeypatch.setattr(usb.util, "find_descriptor", lambda *a, **k: None)

    return plug


@pytest.mark.parametrize("model", [2, 1], ids=["HVPM", "LVPM"])
@pytest.mark.parametrize("shape", ["constant", "ramp", "pulses", "fine"])
def test_a_monsoons_packets_become_joules(connected: Callable[[UsbMonitor], None], model: int, shape: str) -> None:
    from edge_client.measure.monsoon import find

    # "fine" stays within the fine range's 36 mA; the ramps and pulses cross from it to the coarse one.
    truth = pulses(0.02, 0.12, 0.5, 0.5, 20) if shape == "fine" else SHAPES[shape]
    clock = VirtualClock(12.0)
    monitor = UsbMonitor(truth, clock.now, model)
    connected(monitor)
    meter = find({})
    assert meter.what == f"main channel of {'HVPM' if model == 2 else 'LVPM'} 20123"
    meter.now = clock.now  # type: ignore[attr-defined]
    meter.device.StartSampling(1250)  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    while monitor.sent * 200e-6 * monitor.rate < 8.0:
        clock.t = (monitor.sent + 3) * 200e-6 * monitor.rate + 0.001 + rng.exponential(0.002)
        meter.take()  # type: ignore[attr-defined]
    trace = meter.stop()
    assert not monitor.sampling
    energy, due = joules(trace, 1.5, 7.0), truth.energy(1.499, 6.999)
    assert energy.joules == pytest.approx(due, rel=0.01)
    assert trace.lost == 0
    assert energy.lost == 0  # a sample that calibrates is none


def test_a_monsoon_whose_stream_begins_late_has_sent_samples_when_start_returns(
    connected: Callable[[UsbMonitor], None],
) -> None:
    from edge_client.measure.monsoon import find

    monitor = UsbMonitor(SHAPES["constant"], time.monotonic, 2)
    connected(monitor)
    meter: Any = find({})
    packets = meter.device.BulkRead

    def slow() -> Any:
        time.sleep(0.1)
        return packets()

    meter.device.BulkRead = slow
    meter.start()
    assert monitor.sent >= 3
    meter._stop.set()
    meter._thread.join()


def test_a_monsoon_that_sends_nothing_says_so(
    connected: Callable[[UsbMonitor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_client.measure import monsoon

    monkeypatch.setattr(monsoon, "PATIENCE", 0.05)
    connected(UsbMonitor(SHAPES["constant"], time.monotonic, 2))
    meter: Any = monsoon.find({})

    def nothing() -> bytes:
        time.sleep(0.01)
        return b""

    meter.device.BulkRead = nothing
    with pytest.raises(MeterError, match="sent no sample"):
        meter.start()


def test_samples_that_a_monsoon_dropped_are_counted_and_leave_the_times_right(
    connected: Callable[[UsbMonitor], None],
) -> None:
    from edge_client.measure.monsoon import find

    truth = SHAPES["ramp"]
    clock = VirtualClock(12.0)
    monitor = UsbMonitor(truth, clock.now, 2, drop_at=(12_000, 1_500))
    connected(monitor)
    meter: Any = find({"serial": "20123"})
    meter.now = clock.now
    meter.device.StartSampling(1250)
    while monitor.sent < 40_000:
        clock.t = (monitor.sent + 3) * 200e-6 * monitor.rate
        meter.take()
    trace = meter.stop()
    assert trace.lost == 1_500
    assert np.diff(trace.times).max() == pytest.approx(1_501 * 200e-6, rel=0.05)
    assert joules(trace, 1.5, 7.0).joules == pytest.approx(truth.energy(1.5, 7.0), rel=0.01)


def test_a_monsoon_without_calibration_or_connection_is_an_error(connected: Callable[[UsbMonitor], None]) -> None:
    from edge_client.measure.monsoon import find

    clock = VirtualClock(1.0)
    monitor = UsbMonitor(SHAPES["ramp"], clock.now, 2, sent=10)
    connected(monitor)
    with pytest.raises(MeterError, match="no power monitor 7 is connected; USB has 20123"):
        find({"serial": "7"})
    meter: Any = find({})
    meter.device.StartSampling(1250)
    meter.take()
    with pytest.raises(MeterError, match="sent no calibration samples"):
        meter.stop()


# --- a CSV recording


@dataclass
class UsbTester:
    """A USB tester with a clock of its own: it records the truth and two sync pulses as a CSV."""

    truth: Truth
    rate: float = 1.003
    offset: float = -4711.0
    samples: float = 50.0
    first: float = 3.0
    last: float = 50.0

    def watts(self, t: float) -> float:
        for begin in (self.first, self.last):
            i = (t - begin) / sync.CHIP
            if 0 <= i < len(sync.BARKER):
                return 2.0 + 4.0 * float(sync.BARKER[int(i)])
        return self.truth.power(t - 9.0) if 9.0 < t < self.last - 1 else 2.0

    def rows(self) -> list[tuple[float, float]]:
        rng = np.random.default_rng(7)
        times = np.arange(0.0, 60.0, 1 / self.samples)
        return [((t / self.rate) + self.offset, self.watts(t) + 0.05 * rng.standard_normal()) for t in times]


HEADS = {
    "time (s),power (W)": lambda t, w: f"{t:.4f},{w:.5f}",
    "Elapsed[ms];Voltage[V];Current[mA]": lambda t, w: f"{t * 1e3:.1f};5.000;{w / 5 * 1e3:.3f}",
    "Timestamp\tVbus (mV)\tIbus (A)": lambda t, w: f"{t:.3f}\t5000\t{w / 5:.6f}",
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_csv_is_aligned_by_its_sync_pulses(tmp_path: Path, head: str, shape: str) -> None:
    tester = UsbTester(SHAPES[shape])
    row = HEADS[head]
    lines = ["# exported by a tester", head, *(row(t, w) for t, w in tester.rows()), "broken,"]
    path = tmp_path / "meter.csv"
    meter = csv_trace.CsvMeter(path, emit=lambda: sync.Pulse(tester.first), say=lambda text: None)
    meter.start()
    trace = meter.trace("\n".join(lines), sync.Pulse(tester.last))
    found, due = joules(trace, 9.5, 48.5), tester.truth.energy(0.5, 39.5)
    assert found.joules == pytest.approx(due, rel=0.01)
    assert trace.skew < 0.05
    true = np.arange(len(trace.times)) / tester.samples
    assert np.abs(trace.times - true).max() < 0.04  # the clock itself, not only the energy


@pytest.mark.parametrize("last", [50.0, 40.0 + 8.0])
def test_pulses_late_in_a_recording_are_found_by_the_time_between_them(last: float) -> None:
    tester = UsbTester(SHAPES["constant"], first=40.0, last=last)
    times, watts = (np.array(v) for v in zip(*tester.rows(), strict=True))
    clock = sync.aligned(times, watts, sync.Pulse(40.0), sync.Pulse(last))
    assert np.abs(clock(times) - np.arange(len(times)) / tester.samples).max() < 0.2
    with pytest.raises(MeterError, match=r"no two that are 30\.0 s apart"):
        sync.aligned(times, watts, sync.Pulse(10.0), sync.Pulse(40.0))


@pytest.mark.parametrize("seed", range(6))
def test_an_earlier_measurement_in_the_same_recording_is_not_taken_for_this_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = np.arange(0, 120, 0.02)

    def recorded(*starts: float) -> Any:
        watts = 2 + 0.05 * rng.standard_normal(len(times))
        for start in starts:
            place = np.floor((times - start) / sync.CHIP).astype(int)
            inside = (place >= 0) & (place < len(sync.BARKER))
            watts[inside] += 4 * sync.BARKER[place[inside]]
        return watts

    first, last = sync.Pulse(1060.0), sync.Pulse(1080.0)
    assert sync.aligned(times, recorded(5.0, 30.0, 60.0, 80.0), first, last).first == pytest.approx(60.0, abs=0.05)
    with pytest.raises(MeterError, match="several pairs of sync pulses 20"):
        sync.aligned(times, recorded(5.0, 25.0, 60.0, 80.0), first, last)


def test_lost_rows_of_a_csv_are_counted() -> None:
    tester = UsbTester(SHAPES["ramp"])
    rows = tester.rows()
    kept = rows[:1000] + rows[1100:]
    text = "\n".join(["time (s),power (W)", *(f"{t},{w}" for t, w in kept)])
    meter = csv_trace.CsvMeter(Path("x.csv"), emit=lambda: sync.Pulse(tester.first), say=lambda text: None)
    meter.start()
    trace = meter.trace(text, sync.Pulse(tester.last))
    assert trace.lost == 100
    assert joules(trace, 9.5, 48.5).joules == pytest.approx(tester.truth.energy(0.5, 39.5), rel=0.01)


def test_a_file_in_doubt_is_mended_while_the_meter_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tester, path, said = UsbTester(SHAPES["constant"]), tmp_path / "meter.csv", list[str]()
    rows = "\n".join(f"{t},{w}" for t, w in tester.rows())
    emitted = iter([sync.Pulse(tester.first), sync.Pulse(tester.last)] * 2)

    def say(text: str) -> None:
        said.append(text)
        if "a unit that is not known" in text:
            path.write_text(f"time (s),power (W)\n{rows}")

    monkeypatch.setattr(csv_trace, "LOOK", 0.01)
    meter = csv_trace.CsvMeter(path, wait=30.0, emit=lambda: next(emitted), say=say)
    meter.start()
    path.write_text(f"time (s),power (hp)\n{rows}")
    assert joules(meter.stop(), 9.5, 48.5).joules == pytest.approx(tester.truth.energy(0.5, 39.5), rel=0.01)
    assert re.search(r"'power \(hp\)' has a unit .*; mend the file within \d+ s", said[-1])
    meter.wait, meter.say = 0.2, said.append
    meter.start()
    path.write_text(f"time (s),power (hp)\n{rows}")
    with pytest.raises(MeterError, match="has a unit that is not known"):
        meter.stop()


def test_the_file_is_waited_for_and_a_stale_one_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tester = UsbTester(SHAPES["constant"])
    path = tmp_path / "meter.csv"
    path.write_text("of yesterday")
    os.utime(path, (time.time() - 86_400,) * 2)
    said: list[str] = []
    emitted = iter([sync.Pulse(tester.first), sync.Pulse(tester.last)] * 2)
    monkeypatch.setattr(csv_trace, "LOOK", 0.01)
    meter = csv_trace.CsvMeter(path, wait=0.2, emit=lambda: next(emitted), say=said.append)
    meter.start()
    with pytest.raises(MeterError, match=r"was not written within 0 s"):
        meter.stop()
    assert "has to record already" in said[0]
    meter.start()
    path.write_text("\n".join(["time (s),power (W)", *(f"{t},{w}" for t, w in tester.rows())]))
    assert joules(meter.stop(), 9.5, 48.5).joules == pytest.approx(tester.truth.energy(0.5, 39.5), rel=0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no line of column names"),
        ("x,y\n1,2\n", "no line of column names with a time and a power, or a time and a voltage and a current"),
        ("time (s),power (W)\n1,2\n", "1 rows of numbers"),
        ("time (s),power (W)\n" + "\n".join(f"{i / 50},2" for i in range(3000)), "no sync pulse"),
        ("time (s),power (W)\n" + "\n".join(f"{i / 50},2" for i in range(100)), "record from before"),
    ],
)
def test_a_csv_that_cannot_be_used_says_why(text: str, why: str) -> None:
    meter = csv_trace.CsvMeter(Path("x.csv"), emit=lambda: sync.Pulse(3.0), say=lambda text: None)
    meter.start()
    with pytest.raises(MeterError, match=why):
        meter.trace(text, sync.Pulse(50.0))


def test_times_are_read_as_seconds_of_a_day_and_as_dates() -> None:
    for rows in (
        ["12:00:00.5,1", "12:00:01.5,3"],
        ["2026-11-22 12:00:00.5,1", "2026-11-22 12:00:01.5,3"],
        ["2026/11/22T12:00:00.500,1", "2026/11/22T12:00:01.500,3"],
    ):
        times, watts = csv_trace.parse("\n".join(["Date,Power", *rows]), "x")
        assert (times[1] - times[0], watts.tolist()) == (pytest.approx(1.0), [1.0, 3.0])


UNITS = {
    "time (s),power (uW)": "0,5000000",
    "Timestamp(ms),Current(µA),Voltage(mV)": "0,1000000,5000",
    "time_us,current_ua,voltage_v": "0,1000000,5",
    "time (s),power (kW)": "0,0.005",
    "time (s),sample,current (A),voltage (V)": "0,77,1,5",
    "time (s),ambient temp,power factor,voltage (V),current (A)": "0,1,0.5,5,1",
    "time (s),power factor,max power (W),power (W)": "0,1,9,5",
    "time (s),max power (W),main voltage (V),main current (A)": "0,9,1,5",
    "Timestamp,Main current - A,Main voltage - V": "0,1,5",
    "Time(s),Voltage(V),Current(A),D+(V),D-(V),Energy(Wh),Capacity(mAh)": "0,5,1,2,3,7,8",
    "t,U,I": "0,5,1",
    "s;W": "0;5",
    "Elapsed [hh:mm:ss],milliwatts": "00:00:00,5000",
    "Date Time,Power": "0,5",
    "Date/Time,Power (W)": "0,5",
    "Elapsed Time,Total Power": "0,5",
    "unix_timestamp,power_w": "0,5",
    "Time Stamp,Active Power": "0,5",
    "Time (UTC),PWR(W)": "0,5",
    "Time (sec.),Power (W.)": "0,5",
    "Current time (s),Current power (W)": "0,5",
    "Timestamp(ms),Main(mA),Main Voltage(V)": "0,1000,5",
    "Time (s),Main Avg Power (mW),Expected Battery Lifetime (hrs)": "0,5000,9",
    "#time,current,voltage,power,charge,energy": "0,1,5,5,2,3",
    "Time (s),Volt avg 1,Curr avg 1,Volt min 1,Curr max 1": "0,5,1,7,7",
    "Time (s),Bus voltage (V),Shunt voltage (mV),Current (mA)": "0,5,3,1000",
    "Time,Sample,Watts": "0,9,5",
}


@pytest.mark.parametrize("head", UNITS)
def test_columns_are_chosen_by_words_and_scaled_by_their_units(head: str) -> None:
    step = {"ms": "1000", "us": "1000000", "hh": "00:00:01"}
    second = next((v for k, v in step.items() if k in head.lower().split(",")[0]), "1")
    row = UNITS[head]
    cut = len(row.replace(";", ",").split(",")[0])
    times, watts = csv_trace.parse("\n".join([head, row, second + row[cut:]]), "x")
    assert (times.tolist(), watts.tolist()) == ([0.0, 1.0], [pytest.approx(5.0)] * 2)


@pytest.mark.parametrize(
    ("head", "seconds"),
    [("time_ns", 1e-9), ("Time (min)", 60.0), ("Minutes", 60.0), ("Time (h)", 3600.0), ("Elapsed Time [Min.]", 60.0)],
)
def test_a_time_may_be_in_nanoseconds_minutes_or_hours(head: str, seconds: float) -> None:
    assert csv_trace.parse(f"{head},Power\n0,5\n2,5", "x")[0].tolist() == [0.0, pytest.approx(2 * seconds)]


def test_the_page_lists_the_words_of_column_names() -> None:
    page = " ".join((Path(__file__).parents[1] / "docs" / "bench.md").read_text().split())
    for key, words in {**csv_heading.WORDS, "any, beside these": csv_heading.PLAIN}.items():
        assert f"| {key} | {' '.join(words.split())} |" in page
    assert f"one of these words: {csv_heading.OTHER}." in page


@pytest.mark.parametrize(
    ("head", "moments"),
    [
        ("Date,Time", ["2026-11-22,23:59:59.5", "2026-11-23,00:00:01"]),
        ("Date,Time", ["11/22/2026,09:59:59.5", "11/22/2026,10:00:01"]),
        ("Time,Date", ["11:59:59.5 AM,5.6.26", "12:00:01 PM,5.6.26"]),
        ("Date Time", ["11/22/2026 12:59:59.5 p.m.", "11/22/2026 1:00:01 p.m."]),
        ("Timestamp", ["2026-11-22 10:00:00.5+01:00", "2026-11-22 10:00:02+01:00"]),
        ("Timestamp", ["2026-11-22T23:59:59.5Z", "2026-11-23T00:00:01Z"]),
    ],
)
def test_a_date_may_have_any_order_within_one_day_and_a_column_of_its_own(head: str, moments: list[str]) -> None:
    times, _ = csv_trace.parse("\n".join([f"{head},Power(W)", *(f"{m},5" for m in moments)]), "x")
    assert times[1] - times[0] == pytest.approx(1.5)


@pytest.mark.parametrize("days", [("22.11.2026", "23.11.2026"), ("11/30/26", "12/1/26")])
def test_days_without_a_known_order_over_midnight_are_refused_with_what_to_write(days: tuple[str, str]) -> None:
    rows = [f"{day} {clock},5" for day, clock in zip(days, ("23:59:59.5", "00:00:01"), strict=True)]
    with pytest.raises(MeterError, match=rf"over midnight, and '{days[0]} .*its month; write dates as 2026-11-23"):
        csv_trace.parse("\n".join(["Date Time,Power(W)", *rows]), "x")


def test_a_recording_of_the_current_alone_takes_the_voltage_as_an_option(tmp_path: Path) -> None:
    chosen = csv_trace.find({"path": str(tmp_path / "ppk2.csv"), "volts": "3.7"})
    assert isinstance(chosen, csv_trace.CsvMeter)
    text = "Timestamp(ms),Current(uA),D0-D7\n0,1000000,0\n1000,2000000,0"
    times, watts = csv_trace.parse(text, "x", chosen.volts)
    assert (times.tolist(), watts.tolist()) == ([0.0, 1.0], [pytest.approx(3.7), pytest.approx(7.4)])
    with pytest.raises(ConfigError, match=r"volts=0: a number above 0 and up to 1000 is due"):
        csv_trace.find({"path": str(tmp_path / "ppk2.csv"), "volts": "0"})


@pytest.mark.parametrize(
    ("mark", "rows"),
    [
        ("a point", ["0,990.0", '1,"1,234.5"', "2,995.0"]),
        ("a comma", ["0;990,0", "1;1.234,5", "2;995,0"]),
        ("a point, elsewhere", ["0.5,990.0", '1.5,"1,234"', "2.5,995.0"]),
    ],
)
def test_thousands_and_fractions_are_told_apart(mark: str, rows: list[str]) -> None:
    head = f"time (s){rows[0].lstrip('0.5')[0]}power (mW)"
    assert csv_trace.parse("\n".join([head, *rows]), "x")[1][1] == pytest.approx(1.2345, abs=6e-4), mark


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["time (s),power (hp)", "0,1", "1,1"], r"'power \(hp\)' has a unit that is not known.* in W, mW or uW"),
        (["time (s),power (MW)", "0,1", "1,1"], "unit that is not known"),
        (["time (s),current (V),voltage (V)", "0,1,1", "1,1,1"], r"'current \(V\)' has a unit"),
        (["time (s),input power (W),output power (W)", "0,1,1", "1,1,1"], "may each be the power; remove all but one"),
        (["time (s),elapsed (s),power (W)", "0,0,1", "1,1,1"], r"\(s\)' and 'elapsed \(s\)' may each be the time"),
        (["time (s),CH1 power (W),CH2 power (W)", "0,1,1", "1,1,1"], "may each be the power"),
        (["Total Power (kVA),time", "1,0", "1,1"], r"'Total Power \(kVA\)' has a unit that is not known"),
        (["Elapsed,USB power", "0,1", "1,1"], "'Elapsed, USB power' only the time is known, and a time and a power"),
        (["Timestamp(ms),Current(uA),D0-D7", "0,1,0", "1,1,0"], "a current alone needs .* option: volts=5"),
        (["time (s),current rms (A),voltage rms (V)", "0,1,1", "1,1,1"], "only the time is known"),
        (["unix_timestamp,power", "1795000000000,5", "1795000000100,5"], "'unix_timestamp' go from .*write their unit"),
        (["time,power", "0,5", "60000000000,5"], "'time' go from 0 to 6e.10 s, .*; write their unit"),
        (["Date,Time,Power", "11/22/2026,23:59:59,5", "11/23/2026,00:00:00,5"], "over midnight, .* what is its month"),
        (["time (s),power (W)", "0,-5", "1,-5"], "the recording reads -5 W, and what a device takes is positive"),
        (["time (s),power factor", "0,1", "1,1"], "only the time is known"),
        (["time (s),power (mW)", '0,"990"', '1,"1,234"', "2,995"], "'1,234' may be a thousand or a fraction"),
        (["time (s),power (W)", "0,1", "1,-", "2,1"], "row 2 of 3 is no numbers: 1, -; remove or mend it"),
        (["time,power (W)", "23:59:59,1", "00:00:00,1", "00:00:01,1"], "time goes back after row 1"),
        (["time,power (W)", *(f"12:00:0{i // 5},1" for i in range(20))], "most rows repeat a time of 'time'"),
    ],
)
def test_a_csv_in_doubt_is_refused(lines: list[str], why: str) -> None:
    with pytest.raises(MeterError, match=why):
        csv_trace.parse("\n".join(lines), "x")


class Clock:
    """Time that passes only when it is used."""

    now = 5.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_sync_pulse_keeps_its_times_whatever_its_bits_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spans = Clock(), list[tuple[float, float]]()
    monkeypatch.setattr(sync, "time", clock)

    def busy(seconds: float) -> None:
        begin = clock.now
        clock.sleep(seconds + 0.003)  # each bit takes longer than it should
        spans.append((begin, clock.now))

    pulse = sync.emit(busy, chip=0.03)
    assert pulse.start == 5.0
    assert len(spans) == int(sync.BARKER.sum())
    for (begin, end), bit in zip(spans, np.flatnonzero(sync.BARKER), strict=True):
        assert begin - pulse.start == pytest.approx(bit * 0.03, abs=0.0031)
        assert end - pulse.start == pytest.approx((bit + 1) * 0.03 + 0.003)


def test_load_lasts_as_long_as_it_should() -> None:
    begin = time.monotonic()
    sync.load(0.03, threads=2)
    assert time.monotonic() - begin >= 0.03


# --- choosing


def test_auto_takes_the_first_that_is_there_and_says_why_not_the_others() -> None:
    def absent(options: Any) -> Any:
        raise MeterError("not wired; run: wire it")

    here = Polled("b", "the board", lambda: 1.0, "W", 0.1)
    known = {
        "a": Family(absent, 1),
        "b": Family(lambda options: here, 2, options=("bus",)),
        "c": Family(lambda options: here, 3),
        "far": Family(lambda options: here, 0, "apart"),
        "phone": Family(lambda options: here, 0, "android"),
    }
    found = choose("auto", known=known)
    assert found.meter is here
    assert found.lines == [
        "meter b: the board",
        "  not a: not wired; run: wire it",
        "  not c: b comes first; ask for it with --meter c",
        "  not far: measures another device; ask for it with --meter far",
        "  not phone: measures a phone (--adb), not this machine",
    ]
    assert choose("auto", "android", known).others["c"] == "measures this machine, not a phone (--adb)"
    assert choose("none", known=known).meter is None
    assert choose("far", known=known).meter is here
    with pytest.raises(MeterError, match="wire it"):
        choose("a", known=known)
    with pytest.raises(ConfigError, match=r"no meter 'bb'; choose auto, none or one of .*did you mean 'b'"):
        choose("bb", known=known)
    with pytest.raises(ConfigError, match=r"meter b does not know 'x=1'; its options: bus=\.\.\."):
        choose("b:x=1", known=known)


def test_a_meter_that_measures_another_device_than_the_models_is_refused() -> None:
    meter = Polled("m", "m", lambda: 1.0, "W", 0.1)
    known = {
        "board": Family(lambda options: meter, 1),
        "phone": Family(lambda options: meter, 2, "android"),
        "supply": Family(lambda options: meter, 3, "apart"),
        "file": Family(lambda options: meter, 4, "apart", exported=True),
    }
    with pytest.raises(ConfigError, match=r"meter phone measures a phone .*and the model runs on this machine"):
        choose("phone", known=known)
    with pytest.raises(ConfigError, match="meter board measures this machine, and the model runs on a phone"):
        choose("board", "android", known)
    assert choose("phone", "android", known).meter is choose("supply", "android", known).meter is meter
    with pytest.raises(ConfigError, match="exported by hand"):
        choose("file", known=known)
    assert choose("file", known=known, exported=True).meter is meter


def test_auto_goes_on_after_a_family_that_breaks_in_its_own_way() -> None:
    def broken(options: Any) -> Any:
        raise ZeroDivisionError("no volts")

    meter = Polled("m", "m", lambda: 1.0, "W", 0.1)
    found = choose("auto", known={"a": Family(broken, 1), "m": Family(lambda options: meter, 2)})
    assert found.meter is meter
    assert found.others["a"] == "fails: ZeroDivisionError: no volts"


def test_every_meter_of_this_project_is_an_entry_point_and_says_when_it_is_absent() -> None:
    found, faults = families()
    assert not faults
    assert set(found) >= {"jetson", "ina3221", "ina219", "hwmon", "rapl", "monsoon", "odpm", "battery", "csv"}
    chosen = choose("auto")
    assert set(chosen.others) | {chosen.meter.name if chosen.meter else ""} >= set(found)
    # What is not there says what was looked for or what to run.
    told = {"jetson": "INA3221", "ina3221": "i2c|smbus2|INA3221", "ina219": "i2c|smbus2|INA219", "rapl": "powercap",
            "hwmon": "hwmon|power|battery"}  # fmt: skip
    for name, why in chosen.others.items():
        assert re.search(f"{told.get(name, 'another device|measures a phone')}|comes first", why), (name, why)


def test_another_package_adds_a_meter_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_supply.py").write_text(
        "from edge_client.measure.meters import Family, number\n"
        "from edge_client.measure.polling import Polled\n"
        "def find(options):\n"
        "    watts = number(options, 'watts', 1.5)\n"
        "    return Polled('supply', 'a bench supply', lambda: watts, 'W', 0.01)\n"
        "SUPPLY = Family(find, 1, options=('watts',))\n"
    )
    made = tmp_path / "acme-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[maskfleet.meters]\nsupply = acme_supply:SUPPLY\nodd = acme_supply:find\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MeterError, match="'odd' is function, not a Family"):
        choose("odd")
    found = choose("auto")
    assert found.why == "meter supply: a bench supply"
    assert "is function, not a Family" in found.others["odd"]
    (made / "entry_points.txt").write_text("[maskfleet.meters]\nsupply = acme_supply:SUPPLY\n")
    found = choose("auto")
    assert found.why == "meter supply: a bench supply"
    meter = choose("supply:watts=4").meter
    assert meter is not None
    meter.start()
    begin = time.monotonic()
    time.sleep(0.05)
    end = time.monotonic()
    assert joules(meter.stop(), begin, end).watts == pytest.approx(4.0)
