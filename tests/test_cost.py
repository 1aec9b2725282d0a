"""What a round costs a device: measured, sent beside the update, kept by the coordinator, shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client_rig import Coordinator, device, numpy_trainer
from coordination import D, Fleet, play, update
from dashboard_pages import PAGE, log_in, said
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coord_server.operator.show import Look, overview
from edge_client.device.journal import Journal, Pending
from edge_client.errors import MeterError, PayloadError
from edge_client.measure.energy import Accuracy, Trace, joules
from edge_client.measure.round_cost import RoundCost
from edge_client.protocol.cost import COST_HEADER, Cost, from_header, in_words, means, over_rounds, to_header
from edge_client.protocol.messages import Federation, FederationConfig, Round

pytestmark = pytest.mark.usefixtures(numpy_trainer.__name__)
__all__ = ["numpy_trainer"]
figure = st.none() | st.floats(0, 1e6)
joules_ = st.none() | st.floats(-1e6, 1e6)


@given(figure, joules_, figure, st.none() | st.floats(-40, 120))
def test_a_header_has_few_bytes_a_figure_and_three_digits(s: Any, j: Any, m: Any, c: Any) -> None:
    cost = Cost(seconds=s, joules=j, megabytes=m, celsius=c)
    text = to_header(cost)
    assert len(text) <= 4 * 10
    if not text:
        assert cost == Cost()
        return
    found = from_header(text)
    for name, value in cost.model_dump().items():
        again = getattr(found, name)
        assert (again is None) == (value is None)
        assert value is None or again == pytest.approx(value, rel=6e-3)


def test_a_header_of_a_usual_round_is_short() -> None:
    text = to_header(Cost(seconds=12.3456, joules=45.06, megabytes=183.2, celsius=51.0))
    assert text == "12.3,45.1,183,51"
    assert to_header(Cost(seconds=12.3, celsius=51)) == "12.3,,,51"
    assert to_header(Cost()) == ""


def test_a_device_with_a_battery_adds_what_is_left_of_it() -> None:
    assert to_header(Cost(seconds=12.3, celsius=51, battery=87)) == "12.3,,,51,87"
    assert from_header("12.3,,,51,87") == Cost(seconds=12.3, celsius=51, battery=87)
    assert means([from_header("1,,,,50")]).keys() == {"seconds"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1,2,3",
        "1,2,3,4,5,6",
        "1,2,3,4,101",
        "a,,,",
        "-1,,,",
        "nan,,,",
        "inf,,,",
        ",,,999",
        "1" * 99,
        "1_0,,,",
        "\u0663,,,",
        " 1,,,",
    ],
)
def test_a_header_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PayloadError, match=COST_HEADER):
        from_header(text)


def test_means_count_only_the_devices_that_gave_a_figure() -> None:
    found = means([Cost(seconds=1, joules=10), Cost(seconds=3), Cost(seconds=5, celsius=40)])
    assert {k: (v.mean, v.most, v.devices) for k, v in found.items()} == {
        "seconds": (3, 5, 3), "joules": (10, 10, 1), "celsius": (40, 40, 1),
    }  # fmt: skip
    both = over_rounds([found, means([Cost(seconds=7)])])
    assert (both["seconds"].mean, both["seconds"].most, both["seconds"].devices) == (4, 7, 4)
    assert in_words({"seconds": 3.0, "joules": 10.0}) == "3 s, 10 J"


# --- measured on the device


class Flat:
    """A meter of 2 W at rest and 5 W at work, whose samples follow the real clock's times."""

    name = what = "flat"

    def __init__(self, fail: bool = False) -> None:
        self.fail, self.watts = fail, [2.0, 5.0, 5.0]

    def start(self) -> None:
        if self.fail:
            raise MeterError("the wire fell off")

    def stop(self) -> Trace:
        level = self.watts.pop(0)
        return Trace(np.array([-1e9, 1e9]), np.array([level, level]), "W", 1e9, Accuracy())


def test_a_round_costs_seconds_joules_above_idle_memory_and_perhaps_a_temperature() -> None:
    cost = RoundCost(Flat(), rest=lambda seconds: None)
    result, found = cost.of(lambda: float(np.ones(4_000_000).sum()))
    assert result == 4_000_000
    assert found.seconds is not None
    assert found.seconds > 0
    assert found.joules == pytest.approx(3.0 * found.seconds, rel=1e-6)
    assert found.megabytes is not None
    assert found.megabytes > 32
    _, again = cost.of(lambda: None)
    assert again.joules == pytest.approx(3.0 * (again.seconds or 0), rel=1e-6)


def test_the_power_at_rest_is_taken_anew_after_its_time() -> None:
    meter = Flat()
    meter.watts = [2.0, 5.0, 3.0, 5.0]
    cost = RoundCost(meter, rest=lambda seconds: None, lasts=0.0)
    for above in (3.0, 2.0):
        _, found = cost.of(lambda: None)
        assert found.joules == pytest.approx(above * (found.seconds or 0), rel=1e-6)


def test_the_peak_of_a_round_is_not_that_of_the_round_before() -> None:
    cost = RoundCost(None)
    _, large = cost.of(lambda: np.ones(25_000_000).sum())
    _, small = cost.of(lambda: None)
    assert large.megabytes is not None
    assert small.megabytes is not None
    assert large.megabytes - small.megabytes > 100


def test_training_goes_on_without_a_meter_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    cost = RoundCost(Flat(fail=True), rest=lambda seconds: None)
    assert cost.of(lambda: 7)[1].joules is None
    assert "the wire fell off" in caplog.text
    with pytest.raises(ZeroDivisionError):
        cost.of(lambda: 1 // 0)


@pytest.mark.parametrize("celsius", [-273.2, 65261.8, float("nan")])
def test_a_broken_sensor_costs_its_figure_and_not_the_round(monkeypatch: pytest.MonkeyPatch, celsius: float) -> None:
    monkeypatch.setattr("edge_client.measure.machine.temperature", lambda: celsius)
    result, found = RoundCost(None).of(lambda: 7)
    assert (result, found.celsius) == (7, None)
    assert found.seconds is not None
    assert found.megabytes is not None


def test_a_round_below_rest_counts_as_it_was_measured() -> None:
    """Cut at zero, the mean of many short rounds would be above the truth."""
    meter = Flat()
    meter.watts = [2.0, 1.5]
    _, found = RoundCost(meter, rest=lambda seconds: None).of(lambda: sum(range(1000)))
    assert found.joules == pytest.approx(-0.5 * (found.seconds or 0), rel=1e-6)
    assert from_header("1,-0.5,,").joules == -0.5


def test_a_meter_of_another_package_that_breaks_in_its_own_way_ends_no_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Flat):
        def stop(self) -> Trace:
            raise KeyError("volts")

    assert RoundCost(Broken(), rest=lambda seconds: None).of(lambda: 7)[0] == 7
    cost = RoundCost(Broken(), rest=lambda seconds: None, idle=[joules(Flat().stop(), 0, 1)])
    assert cost.of(lambda: 7)[0] == 7
    assert cost.meter is None
    assert "volts" in caplog.text


# --- beside the update


def test_the_cost_is_sent_beside_the_update_and_leaves_its_bytes_alone(tmp_path: Path) -> None:
    """Two devices with the same assignments send the same updates, whatever the rounds cost them."""
    seen: dict[str, list[str]] = {"a": [], "b": []}
    updates = {}
    for name in seen:
        said = seen[name]

        def note(request: httpx.Request, said: list[str] = said) -> httpx.Response | None:
            if request.method == "PUT" and "/updates/" in request.url.path:
                said.append(request.headers.get(COST_HEADER, ""))
            return None

        coordinator = Coordinator(rounds=2, fault=note)
        device(tmp_path / name, coordinator, secret=1).run()
        updates[name] = coordinator.updates
        assert len(said) == 2
        assert all(from_header(text).seconds is not None for text in said)
    assert updates["a"] == updates["b"]


def test_an_update_that_waits_in_the_journal_keeps_its_cost(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.trained({}, Pending(1, "lease", "0" * 64, b"update", "12.3,,183,51"))
    with Journal(tmp_path) as journal:
        pending = journal.pending()
        assert pending is not None
        assert pending.cost == "12.3,,183,51"


def test_the_coordinator_keeps_each_rounds_means_over_a_restart_and_show_and_the_page_have_them(tmp_path: Path) -> None:
    async def two_rounds(fleet: Fleet) -> None:
        await fleet.federation("a", "b")
        for round_ in (1, 2):
            for name, header in (("a", f"{round_},10,,"), ("b", f"{2 + round_},,200,50")):
                work = await fleet.due(name)
                answer = await fleet.upload(name, round_, work["lease"], update(np.ones(D)), {COST_HEADER: header})
                assert answer.status_code == 201, answer.text
        assert (await fleet.due("a"))["status"] == "finish"

    async def look(fleet: Fleet) -> list[Any]:
        return list((await fleet.operator("GET", "/v1/federations/fed/rounds")).json())

    async def page(fleet: Fleet) -> str:
        await log_in(fleet)
        return said(await fleet.http.get(PAGE))

    play(tmp_path, two_rounds)
    text = play(tmp_path, page)
    assert " Energy, J 10.0 10.0 10.0 1 " in text
    found = [Round.model_validate(r) for r in play(tmp_path, look)]
    assert [{k: (c.mean, c.most, c.devices) for k, c in r.cost.items()} for r in found] == [
        {"seconds": (m, m + 1, 2), "joules": (10, 10, 1), "megabytes": (200, 200, 1), "celsius": (50, 50, 1)}
        for m in (2, 3)
    ]
    config = FederationConfig(name="f", bundle="a" * 64, method={"name": "fedavg"}, rounds=2, cohort=2)
    federation = Federation(id="f", config=config, phase="finished", round=2, devices=2, updates=0)
    for rounds, due in ((found, 1), ([r.model_copy(update={"cost": {}}) for r in found], 0)):
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(*overview(Look(federation, rounds, [], "http://x", 0.0)))
        text = console.export_text()
        assert " ".join(text.split()).count("cost 2.5 s, 10 J, 200 MB, 50 °C a device and round") == due


def test_a_cost_out_of_range_is_a_bad_message_and_the_update_may_be_sent_again(tmp_path: Path) -> None:
    async def script(fleet: Fleet) -> None:
        await fleet.federation("a", rounds=1, cohort=1, min_devices=1)
        work = await fleet.due("a")
        bad = await fleet.upload("a", 1, work["lease"], update(np.ones(D)), {COST_HEADER: "1,2,3,9999"})
        assert (bad.status_code, bad.json()["type"].rpartition("/")[2]) == (422, "bad-message")
        assert (await fleet.upload("a", 1, work["lease"], update(np.ones(D)))).status_code == 201

    play(tmp_path, script)
