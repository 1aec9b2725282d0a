"""The Monsoon power monitor against an emulated one on USB."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from emulated_power import SHAPES, Truth, VirtualClock, pulses

from edge_client.errors import MeterError
from edge_client.measure.energy import joules


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
