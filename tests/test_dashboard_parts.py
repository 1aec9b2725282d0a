"""What a page is made of: states of devices, parts of a list, plots, figures in words."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from coordination import settings
from hypothesis import given
from hypothesis import strategies as st

from coord_server import engine
from coord_server.dashboard import devices, plots, words
from coord_server.live.status import progress
from edge_client.protocol.messages import Failure, FederationConfig, Report
from edge_client.protocol.operator import Device

NOW = 1000.0
CONFIG = FederationConfig(**settings())
REPORT = Report(score=0.9, test_samples=5, parameters_dense=100, parameters_compact=40)


def device(name: str, **more: object) -> Device:
    base = {"device": name, "enrolled_at": 0.0, "last_seen_at": NOW, "updates": 1, "bytes_up": 2, "bytes_down": 3}
    return Device.model_validate({**base, **more})


def collecting(**more: object) -> engine.State:
    base = {"phase": "running", "stage": "collecting", "round": 4, "opened": NOW - 50.0, "attempt": 2,
            "cohort": ("b", "c", "d"), "asked": {"a": 0, "b": 1, "c": 2, "d": 3}}  # fmt: skip
    return engine.State(**{**base, **more})  # type: ignore[arg-type]


def test_the_round_under_way_is_told_by_device() -> None:
    fault = Failure(kind="data", reason="no samples")
    found = progress(collecting(received={"b": "0"}, excused=("c",), failed={"c": fault}), NOW)
    assert (found.seconds, found.stage) == (50.0, "collecting")
    assert (found.reported, found.training, found.overdue) == (("b",), ("d",), ("a",))
    assert found.failed == {"c": fault}


def test_a_device_that_failed_and_was_asked_again_trains() -> None:
    found = progress(collecting(failed={"d": Failure(kind="data", reason="x")}), NOW)
    assert "d" in found.training
    assert not found.failed


def test_nothing_is_under_way_before_the_first_round_and_after_the_last() -> None:
    before, after = progress(engine.State(), NOW), progress(engine.State(phase="finished", round=7), NOW)
    assert (before.seconds, before.training, after.seconds, after.training) == (None, (), None, ())


def test_a_device_is_late_after_an_attempt_or_after_thrice_the_usual_time() -> None:
    under_way = progress(collecting(), NOW)
    assert devices.states(under_way, None) == {"a": "late", "b": "training", "c": "training", "d": "training"}
    assert devices.states(under_way, 17.0)["b"] == "training"
    assert devices.states(under_way, 16.0)["b"] == "late"


@pytest.mark.parametrize(
    ("given", "asked", "state"),
    [
        ({}, None, "ready"),
        ({"last_seen_at": NOW - 301}, None, "silent"),
        ({"last_seen_at": NOW - 301}, "training", "training"),
        ({"ready": False}, None, "enrolled"),
        ({"report": REPORT}, None, "done"),
        ({"removed": True, "report": REPORT}, "reported", "removed"),
    ],
)
def test_a_device_has_one_state(given: dict[str, object], asked: str | None, state: str) -> None:
    under_way = progress(engine.State(), NOW)
    (row,) = devices.rows([device("a", **given)], CONFIG, under_way, {} if asked is None else {"a": asked})
    assert row.state == state


def test_those_in_trouble_come_first() -> None:
    under_way = progress(engine.State(), NOW)
    asked = {"a": "reported", "b": "training", "y": "late", "z": "failed"}
    found = devices.rows([device(n) for n in "abcyz"], CONFIG, under_way, asked)
    assert [row.device.device for row in found] == ["z", "y", "b", "a", "c"]
    assert devices.counts(found) == {"failed": 1, "late": 1, "training": 1, "reported": 1, "ready": 1}


def test_a_row_tells_cost_power_and_why_it_failed() -> None:
    under_way = progress(engine.State(), NOW)
    cost = {"seconds": 20.0, "joules": 45.0, "celsius": 51.0, "battery": 80.4}
    failed = device(
        "a",
        cost=cost,
        engine="onnxruntime",
        failure=Failure(kind="data", reason="no samples"),
        report=REPORT,
        last_seen_at=NOW + 5,
    )
    (row,) = devices.rows([failed], CONFIG, under_way, {})
    assert row.device == failed
    assert (row.cost, row.watts, row.seen) == ("20 s, 45 J, 51 °C", f"2.25{words.SPACE}W", 0.0)
    assert row.note == "data: no samples"


@given(st.integers(0, 300), st.integers(1, 20))
def test_the_parts_of_a_list_hold_every_row_once(many: int, beyond: int) -> None:
    under_way = progress(engine.State(), NOW)
    rows = devices.rows([device(f"d{i:03}") for i in range(many)], CONFIG, under_way, {})
    first = devices.part(rows, "", "", 1)
    every = [r for page in range(1, first.pages + 1) for r in devices.part(rows, "", "", page).rows]
    assert every == rows
    assert devices.part(rows, "", "", first.pages + beyond).page == first.pages
    assert devices.part(rows, "failed", "", 1).total == 0


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9), st.integers(2, 8))
def test_ticks_are_round_numbers_around_the_range(low: float, span: float, most: int) -> None:
    found = plots.ticks(low, low + span, most)
    room = 1e-6 * span
    assert found[0] <= low + room
    assert found[-1] >= low + span - room
    assert 2 <= len(found) <= most + 3
    step = found[1] - found[0]
    digit = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digit - d) for d in (1, 2, 5, 10)) < 1e-4


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400).filter(lambda v: any(x is not None for x in v))
)
def test_every_point_of_a_plot_lies_inside_its_axes(values: list[float | None]) -> None:
    drawn = plots.lines("t", range(1, len(values) + 1), [plots.Series("s", values)], words.score)
    if not drawn:  # the only values are at rounds that are not drawn
        assert len(values) > plots.MOST
        return
    (line,) = ElementTree.fromstring(str(drawn)).iter("polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert 1 <= len(points) <= plots.MOST
    assert all(plots.LEFT <= x <= plots.RIGHT and plots.TOP - 0.1 <= y <= plots.BOTTOM + 0.1 for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_a_plot_shows_higher_values_higher_and_names_the_last() -> None:
    drawn = plots.lines("Score", [1, 2, 3], [plots.Series("<mean>", [0.25, None, 0.75])], words.score)
    (first, last) = re.findall(r"([\d.]+),([\d.]+)", re.search(r'points="([^"]+)"', drawn).group(1))  # type: ignore[union-attr]
    assert float(first[0]) == plots.LEFT
    assert float(last[0]) == plots.RIGHT
    assert float(first[1]) > float(last[1])
    assert 'aria-label="Score over 3 rounds; last: &lt;mean&gt; 0.750"' in drawn
    assert "<title>round 1: &lt;mean&gt; 0.250</title>" in drawn
    assert plots.lines("Score", [1, 2], [plots.Series("mean", [None, None])], words.score) == ""


def test_a_bar_is_as_wide_as_its_parts() -> None:
    widths = [float(w) for w in re.findall(r'width="([\d.]+)"', plots.bar([("reported", 1), ("late", 3)]))]
    assert widths == [25.0, 75.0]


@pytest.mark.parametrize(
    ("written", "due"),
    [
        (words.size(0), "0 B"),
        (words.size(999), "999 B"),
        (words.size(1500), "1.5 kB"),
        (words.size(2e6), "2 MB"),
        (words.size(None), words.NOTHING),
        (words.duration(0.25), "0.25 s"),
        (words.duration(0.0), "0 s"),
        (words.duration(9.96), "10 s"),
        (words.duration(3.04), "3 s"),
        (words.duration(59.7), "1 min"),
        (words.duration(200), "3 min 20 s"),
        (words.duration(3600), "1 h"),
        (words.duration(86400 * 3 + 3600 * 4 + 59), "3 d 4 h"),
        (words.brief(80), "80 s"),
        (words.brief(0.05), "0.05 s"),
        (words.brief(200), "3.33 min"),
        (words.brief(9000), "2.5 h"),
        (words.ago(3), "now"),
        (words.ago(47), "45 s ago"),
        (words.ago(61), "1 min ago"),
        (words.ago(200000), "2 d ago"),
        (words.number(12345), "12,345"),
        (words.number(7), "7"),
        (words.number(0.256), "0.26"),
        (words.number(97.0), "97.0"),
        (words.score(None), words.NOTHING),
        (str(words.coded("a `b<c>` <d>")), "a <code>b&lt;c&gt;</code> &lt;d&gt;"),
    ],
)
def test_figures_in_words(written: str, due: str) -> None:
    assert written.replace(words.SPACE, " ") == due
