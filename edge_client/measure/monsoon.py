"""Monsoon's HVPM and LVPM power monitors over USB, through their maker's package `Monsoon` (extra `meters`).

The package talks to the monitor; from it come the stored calibration and raw packets. A packet has up to three samples
of the two ranges of each channel, and the number of samples that were dropped. Now and then a sample is one of zero
current or of the reference instead; they calibrate what follows. Samples are 200 us apart on the monitor's clock, so
the number of a sample is its time; the arrival of packets ties that clock to this machine's.

The monitor's output is left as it is: the monitor powers the device, so its voltage is set before.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import MeterError
from edge_client.measure.energy import Accuracy, Meter, Trace, align
from edge_client.measure.meters import Family, Options
from edge_client.measure.polling import Now

SAMPLE = 200e-6  # seconds
CALIBRATE_EVERY = 1250  # milliseconds
PATIENCE = 5.0  # seconds for the first packet
WRAP = 1 << 16  # the count of dropped samples
MEASUREMENT, ZERO, REFERENCE = 0x00, 0x10, 0x30
OBSERVATIONS, WIDTH = 3, 10  # of a packet; a sample's words
COARSE, FINE, VOLTAGE, KIND = 0, 1, 6, 8  # words of a sample: main channel
SMOOTH = 5  # calibration samples that are averaged
ACCURACY = Accuracy(0.01, 5e-5, 4e-6)


@dataclass
class Packets:
    """What came from the monitor: samples int64[n, WIDTH], the number of each, and when packets arrived."""

    samples: list[list[int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    dropped: int = 0
    _next: int = 0
    _last_dropped: int | None = None

    def add(self, packet: list[int], at: float) -> None:
        """One unpacked packet: dropped, flags, count, then the samples."""
        if self._last_dropped is not None:
            missing = (packet[0] - self._last_dropped) % WRAP
            self.dropped += missing
            self._next += missing
        self._last_dropped = packet[0]
        for i in range(min(packet[2], OBSERVATIONS)):
            begin = 3 + i * WIDTH
            self.samples.append(packet[begin : begin + WIDTH])
            self.numbers.append(self._next)
            self._next += 1
        if packet[2]:
            self.arrivals.append((self._next - 1, at))


@dataclass
class Scale:
    """The monitor's stored calibration of a channel: full scales in amperes, offsets of zero in counts."""

    coarse: float
    coarse_zero: float
    fine: float
    fine_zero: float
    fine_most: int
    volts: float


def watts(samples: NDArray[np.int64], scale: Scale) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Which samples are measurements, and their watts. Raises MeterError before the first calibration.

    A measurement counts by the means of the last `SMOOTH` zero and reference samples before it; those before the first
    calibration count by the first.
    """
    kind = samples[:, KIND] & 0x30
    at = np.flatnonzero(kind == MEASUREMENT)
    zeros, references = np.flatnonzero(kind == ZERO), np.flatnonzero(kind == REFERENCE)
    if not len(zeros) or not len(references):
        raise MeterError(
            "the power monitor sent no calibration samples; measure for two seconds at least, or switch it off and on"
        )

    def calibration(places: NDArray[np.intp], word: int) -> NDArray[np.float64]:
        values = samples[places, word].astype(np.float64)
        total = np.concatenate([[0.0], np.cumsum(values)])
        last = np.maximum(np.searchsorted(places, at), 1)  # how many came before each measurement
        first = np.maximum(last - SMOOTH, 0)
        mean: NDArray[np.float64] = (total[last] - total[first]) / (last - first)
        return mean

    def amps(word: int, full: float, offset: float) -> NDArray[np.float64]:
        zero = calibration(zeros, word) + offset
        reach = calibration(references, word) - zero
        return np.where(reach != 0, (samples[at, word] - zero) * full / np.where(reach == 0, 1, reach), 0.0)

    fine = amps(FINE, scale.fine, scale.fine_zero)
    coarse = amps(COARSE, scale.coarse, scale.coarse_zero)
    current = np.where(samples[at, FINE] < scale.fine_most, fine, coarse)
    return at, current * samples[at, VOLTAGE] * scale.volts


@dataclass
class Monsoon:
    """A connected monitor of the package: `device` is its HVPM.Monsoon or LVPM.Monsoon."""

    device: Any
    kind: str
    serial: str
    now: Now = time.monotonic
    name: str = "monsoon"
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _first: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _packets: Packets = field(default_factory=Packets, init=False)
    _fault: Exception | None = field(default=None, init=False)

    @property
    def what(self) -> str:
        """What it measures."""
        return f"main channel of {self.kind} {self.serial}"

    def start(self) -> None:
        """Begin to sample; returns when samples come. Raises MeterError."""
        self._stop.clear()
        self._first.clear()
        self._packets, self._fault = Packets(), None
        try:
            self.device.StartSampling(CALIBRATE_EVERY)
        except Exception as error:  # of pyusb, numpy or the package
            raise MeterError(f"{self.kind} {self.serial} does not start: {error}; unplug it and try again") from None
        self._thread = threading.Thread(target=self._read, name="monsoon", daemon=True)
        self._thread.start()
        if not self._first.wait(PATIENCE) or self._fault is not None:
            self.stop()
            raise MeterError(f"{self.kind} {self.serial} sends no sample; is it on, and its output enabled?")

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                self.take()
        except Exception as error:  # see start
            self._fault = error
            self._first.set()

    def take(self) -> None:
        """Read what the monitor has."""
        data = self.device.BulkRead()
        at = self.now()
        for begin in range(0, len(data), 64):
            packet = data[begin : begin + 64]
            if len(packet) >= 4:
                self._packets.add(self.device.swizzlePacket(packet), at)
        if self._packets.samples:
            self._first.set()

    def stop(self) -> Trace:
        """End the sampling; what came. Raises MeterError."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            self.device.stopSampling()
        except Exception as error:  # see start
            self._fault = self._fault or error
        if self._fault is not None:
            raise MeterError(f"{self.kind} {self.serial} failed: {self._fault}; check the cable") from self._fault
        return self.trace()

    def trace(self) -> Trace:
        """The samples so far as a recording. Raises MeterError."""
        got = self._packets
        if not got.samples:
            raise MeterError(f"{self.kind} {self.serial} sent no sample; is it on, and its output enabled?")
        status = self.device.statusPacket
        scale = Scale(  # stored in milliamperes and, for the fine range, microamperes
            status.mainCoarseScale * 1e-3, status.mainCoarseZeroOffset,
            status.mainFineScale * 1e-6, status.mainFineZeroOffset,
            self.device.fineThreshold, self.device.ADCRatio * self.device.mainvoltageScale,
        )  # fmt: skip
        at, power = watts(np.array(got.samples, np.int64), scale)
        numbers, arrived = np.array([n for n, _ in got.arrivals], np.float64), np.array([t for _, t in got.arrivals])
        clock = align(numbers * SAMPLE, arrived)
        every = np.array(got.numbers, np.float64)
        # A calibration sample measures nothing; it is no lost one.
        power = np.interp(every, every[at], power)
        times = clock(every * SAMPLE)
        return Trace(times, power, "W", SAMPLE, ACCURACY, got.dropped, skew=clock.error)


def find(options: Options) -> Meter:
    """The monitor `serial`, else the first. Raises MeterError."""
    try:
        import usb.core
        from Monsoon import HVPM, LVPM, Operations
    except ImportError as error:
        raise MeterError(f"{error.name} is not installed; run: pip install 'maskfleet[meters]'") from None
    asked = options.get("serial")
    try:
        device = HVPM.Monsoon()
        serials = device.enumerateDevices()
        if not serials or (asked is not None and asked not in serials):
            which = "" if asked is None else f" {asked}"
            there = f"USB has {', '.join(serials)}" if serials else "connect one and switch it on"
            raise MeterError(f"no power monitor{which} is connected; {there}")
        device.setup_usb(asked)
        kind = "HVPM"
        if device.Protocol.getValue(Operations.OpCodes.HardwareModel, 2) == Operations.HardwareModel.LVPM:
            device, kind = LVPM.Monsoon(), "LVPM"
            device.setup_usb(asked)
    except usb.core.NoBackendError:
        raise MeterError("libusb is not installed; run: sudo apt install libusb-1.0-0") from None
    except usb.core.USBError as error:
        if error.errno == 13:
            rule = 'SUBSYSTEM=="usb", ATTR{idVendor}=="2ab9", MODE="0666"'
            raise MeterError(
                f"the power monitor may not be used; run: echo '{rule}' | sudo tee /etc/udev/rules.d/99-monsoon.rules "
                "&& sudo udevadm control --reload && sudo udevadm trigger"
            ) from None
        raise MeterError(f"the power monitor does not answer: {error}; unplug it and try again") from None
    return Monsoon(device, kind, asked or serials[0])


MONSOON = Family(find, 5, "apart", ("serial",))
