"""Joules of a window: integration, counters, clocks, lost samples, idle power, error estimates."""

from __future__ import annotations

import time
from threading import Event

import numpy as np
import pytest
from emulated_power import SHAPES, VirtualClock, constant, pulses, ramp, record
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import MeterError
from edge_client.measure.energy import Accuracy, Trace, above_idle, align, joules, lost
from edge_client.measure.polling import Polled

watts = st.lists(st.floats(0, 1000), min_size=3, max_size=40)


def trace(times: object, values: object, unit: str = "W", period: float = 1.0, **more: object) -> Trace:
    return Trace(np.asarray(times, float), np.asarray(values, float), unit, period, **more)  # type: ignore[arg-type]


# --- integration


@given(watts, st.floats(0, 1), st.floats(0, 1))
def test_power_that_is_straight_between_samples_is_integrated_exactly(power: list[float], a: float, b: float) -> None:
    n = len(power) - 1
    start, end = sorted((a * n, b * n))
    if end - start < 1e-6:
        return
    fine = np.linspace(start, end, 20_001)
    due = np.mean((np.interp(fine, range(n + 1), power)[1:] + np.interp(fine, range(n + 1), power)[:-1]) / 2)
    found = joules(trace(range(n + 1), power), start, end)
    assert found.joules == pytest.approx(due * (end - start), rel=1e-3, abs=1e-6)
    assert found.seconds == end - start


@given(watts, st.floats(0.05, 0.95))
def test_two_windows_add_up_to_the_whole(power: list[float], where: float) -> None:
    n = len(power) - 1
    for unit in ("W", "J"):
        values = np.cumsum(power) if unit == "J" else power
        t = trace(range(n + 1), values, unit)
        whole, first, second = joules(t, 0, n), joules(t, 0, where * n), joules(t, where * n, n)
        assert first.joules + second.joules == pytest.approx(whole.joules, rel=1e-9, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.floats(0.1, 50))
def test_energy_does_not_depend_on_when_the_clock_began_and_grows_with_the_scale(shift: float, scale: float) -> None:
    times, power = np.arange(20.0), np.abs(np.sin(np.arange(20.0)))
    base = joules(trace(times, power), 2.5, 15.25).joules
    moved = joules(trace(times + shift, scale * power), shift + 2.5, shift + 15.25).joules
    assert moved == pytest.approx(scale * base, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit", ["W", "J"])
def test_each_shape_of_power_is_within_one_per_cent_and_about_the_error_estimate(shape: str, unit: str) -> None:
    truth, rng = SHAPES[shape], np.random.default_rng(3)
    times = np.cumsum(0.02 + 0.005 * rng.random(2400))
    values = [truth.power(t) if unit == "W" else truth.energy(0, t) for t in times]
    found, due = joules(trace(times, values, unit, 0.0225), 1.003, 50.001), truth.energy(1.003, 50.001)
    assert found.joules == pytest.approx(due, rel=0.01)
    assert abs(found.joules - due) <= 4 * found.error + 1e-9
    assert found.error < 0.01 * due


def test_the_error_estimate_covers_the_errors_of_sampling_at_random_moments() -> None:
    """Pulses sampled at a random phase: the error's standard deviation is the estimate, to a factor of two."""
    truth, rng = pulses(1, 9, 1.3, 0.5, 60), np.random.default_rng(5)
    errors, estimates = [], []
    for _ in range(60):
        times = rng.random() * 0.1 + np.arange(0, 50, 0.1 + 0.002 * rng.random())
        found = joules(trace(times, [truth.power(t) for t in times], period=0.1), 5, 45)
        errors.append(found.joules - truth.energy(5, 45))
        estimates.append(found.error)
    assert 0.5 < np.std(errors) / np.mean(estimates) < 2


def test_gain_offset_and_resolution_enter_the_error() -> None:
    flat = {"times": range(11), "values": np.full(11, 2.0)}
    assert joules(trace(**flat), 0, 10).error == 0
    assert joules(trace(**flat, accuracy=Accuracy(gain=0.01)), 0, 10).error == pytest.approx(0.2)
    assert joules(trace(**flat, accuracy=Accuracy(offset=0.1)), 0, 10).error == pytest.approx(1.0)
    stepped = joules(trace(**flat, accuracy=Accuracy(step=0.12)), 0, 10).error
    assert stepped == pytest.approx(0.12 / 12**0.5 * 10**0.5)


def test_a_window_that_was_not_recorded_is_refused_with_what_was() -> None:
    t = trace(range(10), np.ones(10))
    for start, end in ((-5, 5), (5, 15)):
        with pytest.raises(MeterError, match=r"recording covers from .* to .* s of a window"):
            joules(t, start, end)
    with pytest.raises(MeterError, match="no length"):
        joules(t, 5, 5)
    with pytest.raises(MeterError, match="no time at all"):
        joules(trace([], []), 0, 1)
    assert joules(t, 0, 10.5).joules == pytest.approx(10.5)  # up to two periods are taken as they were at the end


def test_a_counter_goes_on_at_its_pace_beyond_its_last_sample() -> None:
    t = trace(range(10), 3.0 * np.arange(10), "J")
    assert joules(t, -1, 10).joules == pytest.approx(33.0)


# --- lost samples


def test_lost_samples_are_counted_and_widen_the_error() -> None:
    truth = pulses(1, 9, 1.3, 0.5, 60)
    times = np.arange(0, 50, 0.1)
    kept = np.delete(times, np.r_[100:110, 200:201, 300:330])
    assert lost(times, 0.1) == 0
    assert lost(kept, 0.1) == 41
    whole = joules(trace(times, [truth.power(t) for t in times], period=0.1), 1, 49)
    thin = joules(trace(kept, [truth.power(t) for t in kept], period=0.1), 1, 49)
    assert (whole.lost, thin.lost) == (0, 41)
    assert thin.error > 2 * whole.error
    assert abs(thin.joules - truth.energy(1, 49)) < 3 * thin.error


# --- idle power


def test_idle_power_is_subtracted_and_an_offset_cancels() -> None:
    values = np.where((np.arange(300) >= 100) & (np.arange(300) < 200), 5.0, 2.0) + 0.5  # half a watt too much
    t = trace(np.arange(300) / 10, values, period=0.1, accuracy=Accuracy(offset=0.5))
    before, busy, after = joules(t, 1, 9), joules(t, 11, 19), joules(t, 21, 29)
    found = above_idle(busy, [before, after])
    assert found.joules == pytest.approx(3.0 * 8)
    assert busy.error == pytest.approx(4.0)
    assert found.error < 0.01
    assert above_idle(busy, []) == busy


def test_idle_power_that_drifts_is_part_of_the_error() -> None:
    steady = [joules(trace(range(10), np.full(10, w)), 0, 9) for w in (2.0, 3.0)]
    assert above_idle(joules(trace(range(10), np.full(10, 7.0)), 0, 9), steady).error == pytest.approx(0.5**0.5 * 9)


# --- clocks


@pytest.mark.parametrize("rate", [1.0, 1.0003, 0.9995])
def test_a_devices_clock_is_found_though_messages_are_late(rate: float) -> None:
    rng = np.random.default_rng(2)
    device = 5000 + np.cumsum(0.05 + 0.01 * rng.random(1500))
    true = 100 + rate * (device - device[0])
    clock = align(device, true + rng.exponential(0.01, 1500))
    assert np.abs(clock(device) - true).max() < 0.002
    assert clock.rate == pytest.approx(rate, abs=2e-5)
    assert clock.error < 0.002


def test_few_messages_give_an_offset_and_none_an_error() -> None:
    assert align(np.array([3.0]), np.array([103.5]))(np.array([4.0])) == pytest.approx(104.5)
    with pytest.raises(MeterError, match="no time at all"):
        align(np.array([]), np.array([]))


# --- a polled meter in its thread


def test_a_meter_in_its_thread_covers_the_time_between_start_and_stop() -> None:
    meter = Polled("test", "nothing", lambda: 2.0, "W", 0.01)
    meter.start()
    begin = time.monotonic()
    time.sleep(0.15)
    end = time.monotonic()
    found = meter.stop()
    assert found.times[-1] >= end
    energy = joules(found, begin, end)
    assert energy.joules == pytest.approx(2.0 * (end - begin))
    assert found.lost + len(found.times) >= 10


def test_a_meter_has_read_once_when_start_returns_however_late_its_thread_is() -> None:
    def read() -> float:
        time.sleep(0.1)
        return 2.0

    meter = Polled("test", "nothing", read, "W", 0.01)
    meter.start()
    begin = time.monotonic()
    assert meter.stop().times[0] <= begin


def test_a_load_that_repeats_in_step_with_the_readings_does_not_deceive_them() -> None:
    """Ten readings a cycle. At even intervals the load's edges would always fall between the same two."""
    for duty in (0.43, 0.47, 0.55):
        truth, clock = pulses(1.0, 9.0, 1.0, duty, 200), VirtualClock(180.0)
        meter = Polled("test", "nothing", lambda truth=truth, clock=clock: truth.power(clock.t), "W", 0.1)  # type: ignore[misc]
        meter.now = clock.now
        assert joules(record(meter, clock), 5, 175).joules == pytest.approx(truth.energy(5, 175), rel=0.02)


def test_readings_that_fail_are_lost_and_a_meter_without_any_is_an_error() -> None:
    calls, third = iter([1.0, OSError(5, "Input/output error")]), Event()

    def read() -> float:
        value = next(calls, None)
        if isinstance(value, OSError):
            raise value
        if value is None:
            third.set()
        return 1.0

    meter = Polled("test", "nothing", read, "W", 0.01)
    meter.start()
    assert third.wait(600)
    assert meter.stop().lost >= 1

    def broken() -> float:
        raise OSError(121, "Remote I/O error")

    meter = Polled("test", "nothing", broken, "W", 0.01)
    meter.start()
    with pytest.raises(MeterError, match="no reading: Remote I/O error"):
        meter.stop()
    with pytest.raises(MeterError, match="not started"):
        meter.stop()


def test_the_shapes_are_what_they_say() -> None:
    assert constant(4, 10).energy(1, 3) == pytest.approx(8)
    assert ramp(0, 10, 10).energy(0, 10) == pytest.approx(50)
    assert pulses(0, 1, 1, 0.25, 8).energy(0.37, 7.37) == pytest.approx(7 * 0.25, rel=1e-6)


def test_a_counter_that_goes_back_gives_no_joules_of_the_window_in_which_it_did() -> None:
    counted = trace(range(9), [0, 1, 2, 3, 0, 1, 2, 3, 4], "J")
    with pytest.raises(MeterError, match="counter goes back"):
        joules(counted, 2, 6)
    assert joules(counted, 5, 8).joules == 3
