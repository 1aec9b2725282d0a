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

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import csv_heading, csv_trace, sync
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
