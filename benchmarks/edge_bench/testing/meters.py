"""What every energy meter must do: a recording that covers the time between start and stop, again and again."""

from __future__ import annotations

import time

import numpy as np

from edge_bench.testing.require import require
from edge_client.errors import MeterError
from edge_client.measure.energy import Meter, joules


def check_meter(meter: Meter, seconds: float = 1.0) -> None:
    """Two recordings of so many seconds. Raises AssertionError; MeterError when the meter is not there."""
    who = f"meter {meter.name!r}"
    require(bool(meter.name and meter.what), f"{who}: `name` and `what` say in words what it measures")
    try:
        meter.stop()
    except MeterError:
        pass
    except Exception as error:
        raise AssertionError(f"{who}: stop before start raised {type(error).__name__}; raise MeterError") from error
    for turn in ("first", "second"):
        meter.start()
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        trace = meter.stop()
        t, v, what = trace.times, trace.values, f"{who}: in the {turn} recording"
        require(
            len(t) >= 2 and t.shape == v.shape, f"{what} there are {t.shape} times and {v.shape} values; two or more"
        )
        require(bool((np.diff(t) > 0).all()), f"{what} the times do not rise")
        require(bool(np.isfinite(t).all() and np.isfinite(v).all()), f"{what} a time or value is not finite")
        require(trace.unit in ("W", "J"), f"{what} the unit is {trace.unit!r}; W or J")
        require(trace.period > 0, f"{what} the period is {trace.period}; seconds between two samples")
        if trace.unit == "J":
            require(bool((np.diff(v) >= 0).all()), f"{what} the counter falls; unwrap it")
        try:
            found = joules(trace, begin, end)
        except MeterError as error:
            raise AssertionError(f"{what} the window is not covered: {error}; times are of time.monotonic") from error
        require(found.joules >= 0, f"{what} the energy is {found.joules:.3g} J")
