"""CSV recordings of power, against an emulated USB tester."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_power import SHAPES, Truth

from edge_client.errors import MeterError
from edge_client.measure import csv_trace, sync
from edge_client.measure.energy import joules


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
    "time (ms);voltage (V);current (mA)": lambda t, w: f"{t * 1e3:.1f};5.000;{w / 5 * 1e3:.3f}",
    "time (s)\tvoltage (mV)\tcurrent (A)": lambda t, w: f"{t:.3f}\t5000\t{w / 5:.6f}",
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
        if "no line of column names" in text:
            path.write_text(f"time (s),power (W)\n{rows}")

    monkeypatch.setattr(csv_trace, "LOOK", 0.01)
    meter = csv_trace.CsvMeter(path, wait=30.0, emit=lambda: next(emitted), say=say)
    meter.start()
    path.write_text(f"time (s),power (hp)\n{rows}")
    assert joules(meter.stop(), 9.5, 48.5).joules == pytest.approx(tester.truth.energy(0.5, 39.5), rel=0.01)
    assert re.search(r"name the columns: time \(s\), power \(W\).*; mend the file within \d+ s", said[-1])
    meter.wait, meter.say = 0.2, said.append
    meter.start()
    path.write_text(f"time (s),power (hp)\n{rows}")
    with pytest.raises(MeterError, match="no line of column names"):
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
        ("x,y\n1,2\n", r"no line of column names; name the columns: time \(s\), power \(W\), or: time \(s\), voltage"),
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


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("time (s),power (uW)", "2,5000000"),
        ("time (ms),current (µA),voltage (mV)", "2000,1000000,5000"),
        ("sample,time (ns),power factor,power (mW)", "1,2000000000,0.5,5000"),
        ("#time (s);voltage (V);current (A);power (W)", "2;7;7;5"),
        ("Time (s),Power (W)", "2,5"),
        ("time (s),current (\u03bcA),voltage (V)", "2,1000000,5"),
    ],
)
def test_columns_are_known_by_their_names_and_scaled_by_their_units(head: str, row: str) -> None:
    cells = [cell.replace("2", "0") if cell.startswith("2") else cell for cell in re.split("[,;]", row)]
    first = (";" if ";" in row else ",").join(cells)
    times, watts = csv_trace.parse("\n".join(["exported by a tester", head, first, row]), "x")
    assert (times.tolist(), watts.tolist()) == ([0.0, 2.0], [pytest.approx(5.0)] * 2)


def test_a_file_that_a_spreadsheet_saved_as_utf_8_is_read() -> None:
    assert csv_trace.parse("\ufefftime (s),power (W)\n0,5\n2,5", "x")[1].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['tester,"5', "time (s),power (W)", *(f"{i / 50},2" for i in range(20_000))], "x cannot be read as a table"),
        (["time (s),power (hp)", "0,1", "1,1"], "no line of column names; name the columns"),
        (["time (s),power (MW)", "0,1", "1,1"], "no line of column names"),
        (["time (s),current (V),voltage (V)", "0,1,1", "1,1,1"], "no line of column names"),
        (["time (s),current (A)", "0,1", "1,1"], "no line of column names"),
        (["time (s),power (W),power (mW)", "0,1,1", "1,1,1"], "two columns of the power; rename all but one"),
        (["time (s),power (W)", "1795000000000,5", "1796000000100,5"], "which is no recording; mend the unit"),
        (["time (s),power (W)", "0,-5", "1,-5"], "the recording reads -5 W, and what a device takes is positive"),
        (["time (s);power (W)", "0;1,5", "1;1,5"], "row 1 of 2 lacks a number: 0, 1,5; write numbers with a decimal"),
        (["time (s),power (W)", "0,1", "1,nan", "2,1"], "row 2 of 3 lacks a number: 1, nan"),
        (["time (s),power (W)", "10:00:00,1", "10:00:01,1"], "row 1 of 2 lacks a number"),
        (["time (s),power (W)", "1,1", "0,1", "2,1"], "time goes back after row 1"),
        (["time (s),power (W)", *(f"{i // 5},1" for i in range(20))], "most rows repeat a time"),
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
