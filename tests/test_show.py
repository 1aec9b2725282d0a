"""What `federation show` and the tables say of federations, and that watching one ends with it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coord_server import engine
from coord_server.live.status import summary
from coord_server.operator import cli, show, tables
from coord_server.operator.cli import _say
from coord_server.operator.client import Operator
from coord_server.operator.show import Look, bars, overview
from coord_server.operator.tables import lasting
from edge_client.errors import ServerError, UnreachableError
from edge_client.protocol.messages import Failure, Federation, FederationConfig, Report, Round, Scores, Traffic
from edge_client.protocol.operator import Device

NOW = 10_000.0


def federation(phase: Any = "running", **more: Any) -> Federation:
    config = FederationConfig(
        name="fleet", bundle="a" * 64, method={"name": "fedpm"}, rounds=10, cohort=3, min_devices=3,
        **more.pop("config", {}),
    )  # fmt: skip
    given = {"round": 3, "devices": 3, "updates": 1, "expected": 2, "waits_for": ["b", "c"], **more}
    return Federation(id="fleet", config=config, phase=phase, **given)


def device(name: str, seen: float = 0.0, **more: Any) -> Device:
    """A device that made its last request `seen` seconds ago."""
    return Device(device=name, enrolled_at=0, last_seen_at=NOW - seen, updates=2, bytes_up=1, bytes_down=1, **more)


def closed(round_: int, before: float, after: float) -> Round:
    scores = [Scores(mean=m, p10=m - 0.1, worst=m - 0.2, best=1.0) for m in (before, after)]
    return Round(
        round=round_, devices=["a", "b"], traffic=Traffic(up={"mask": 200, "header": 20}, down={"theta": 2000}),
        bits_per_parameter_up=0.5, bits_per_parameter_down=4, loss=1, score_before=scores[0], score_after=scores[1],
        seconds=30,
    )  # fmt: skip


def text(f: Federation, rounds: Sequence[Round] = (), devices: Sequence[Device] = (), width: int = 200) -> str:
    return printed(Look(f, rounds, devices, "https://fleet.example", NOW), width)


def printed(found: Look, width: int = 200) -> str:
    return shown(*overview(found), width=width)


def shown(*tables: Any, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(*tables, sep="\n")
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_a_running_federation_in_a_dozen_lines() -> None:
    failure = Failure(kind="diverged", reason="the loss overflowed")
    found = text(
        federation(deadline_in=90.0, attempt=2),
        [closed(1, 0.5, 0.6), closed(2, 0.6, 0.75)],
        [device("a", 2), device("b", 40), device("c", 5), device("d", 4000), device("e", 1, failure=failure)],
    )
    assert found.splitlines() == [
        "fleet fedpm, running, round 3 of 10, attempt 2",
        "devices 5 enrolled: 3 ready, 1 silent, 1 failed; this round: 1 in, 2 due",
        "missing the round waits for b (seen 40 s ago), c (seen 5 s ago)",
        "missing silent: d",
        "missing failed: e (diverged: the loss overflowed)",
        "time the round closes in 90 s at the latest; about 4 min for 8 rounds of 30 s",
        "score 0.750 mean, 0.650 10th percentile, 0.550 worst after round 2; start 0.500 (+0.250)",
        "▁█ mean over the rounds",
        "bytes 110 up, 1,000 down a device and round (0.5 and 4 bits a parameter)",
    ]


def test_a_device_that_failed_and_has_its_model_since_is_not_missing() -> None:
    failure = Failure(kind="lost", reason="the state folder is of a backup")
    report = Report(score=0.8, test_samples=4, parameters_dense=6, parameters_compact=6)
    found = [device("a", failure=failure, report=report), device("b", failure=failure)]
    ended = text(federation("finished", waits_for=[], expected=0), [closed(1, 0.5, 0.6)], found)
    assert "devices 2 enrolled: 1 failed, 1 done" in ended
    assert "failed: b (lost: the state folder is of a backup)" in ended
    assert "a (lost" not in ended


def test_a_round_that_is_not_run_again_has_no_attempt() -> None:
    assert "attempt" not in text(federation())
    assert "attempt" not in text(federation("paused", attempt=2))


def test_federations_have_a_row_each_and_their_faults_below() -> None:
    running = federation(deadline_in=90.0, attempt=2)
    lost = federation().model_copy(update={"id": "lost", "config": None, "phase": None, "fault": "no method"})
    found = shown(*tables.federations([running, lost])).splitlines()
    assert "fleet fedpm running 3/10 try 2 3 1 in, 2 due 90 s" in found
    assert "fleet fedpm running 3/10 3 1 in, 2 due" in shown(*tables.federations([federation()])).splitlines()
    assert found[-2:] == ["lost", "fault of lost: no method"]


def test_devices_have_a_row_each_with_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.time, "time", lambda: NOW)
    report = Report(score=0.8, test_samples=4, parameters_dense=6, parameters_compact=6)
    failure = Failure(kind="diverged", reason="the loss overflowed")
    each = [
        device("a", 30), device("b", 31), device("c", ready=False), device("d", report=report, ready=False),
        device("e", removed=True, report=report), device("f", failure=failure),
    ]  # fmt: skip
    found = shown(*tables.devices(each, presence=30)).splitlines()
    for row in ("a 2 1 1 30 s ready", "b 2 1 1 31 s silent", "c 2 1 1 0 s enrolled", "d 2 1 1 0.8000 0 s done"):
        assert row in found
    assert "e 2 1 1 0.8000 0 s removed" in found
    assert "f 2 1 1 0 s failed" in found
    assert found[-1] == "f failed (diverged): the loss overflowed"


def test_closed_rounds_have_a_row_each_and_name_who_failed() -> None:
    failed = {"c": Failure(kind="diverged", reason="the loss overflowed")}
    first = closed(1, 0.5, 0.6).model_copy(update={"failed": failed, "skipped": ["d", "e"]})
    found = shown(*tables.rounds([first, closed(2, 0.6, 0.7)])).splitlines()
    assert "1 mask 200 theta 2,000" in found
    assert "1 2 1.0000 0.6000 0.4000 0.500 4.000 30.0 1 2" in found
    assert "2 2 1.0000 0.7000 0.5000 0.500 4.000 30.0" in found
    assert "round 1: d skipped: its update could not be folded" in found
    assert any("round 1: c" in line and "diverged" in line for line in found)


def test_a_federation_below_its_start_says_so() -> None:
    rounds = [closed(1, 0.75, 0.5), closed(2, 0.5, 0.5)]
    assert "warning fedpm ends at 0.500, below the model that round 1 started from (0.750)" in text(
        federation(), rounds
    )
    assert "what most often helps: theta0" in text(federation(), rounds)
    report = Report(score=0.8, test_samples=4, parameters_dense=6, parameters_compact=6)
    ended = text(federation("finished"), rounds, [device("a", report=report)])
    assert "warning" not in ended  # the personal models are better
    assert "score 0.800 mean, 0.800 10th percentile, 0.800 worst of the personal models" in ended
    assert "warning" not in text(federation())


def test_updates_that_the_guard_limited_are_named() -> None:
    rounds = [closed(1, 0.5, 0.6).model_copy(update={"guarded": {"b": "clipped to ..."}}), closed(2, 0.6, 0.7)]
    assert "warning the guard limited an update far beyond the others of the round" in text(federation(), rounds)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            federation("recruiting", devices=2, round=0, waits_for=[]),
            "`maskfleet federation token fleet`, then on each device: "
            "`maskfleet join https://fleet.example --token TOKEN --data FILE.npz`",
        ),
        (federation("recruiting", config={"start": "manual"}), "`maskfleet federation start fleet`"),
        (federation("paused"), "`maskfleet federation resume fleet`"),
        (federation("paused", fault="x"), "mend the fault, then `maskfleet federation resume fleet`"),
        (federation("finished"), "`maskfleet federation export fleet --onnx model.onnx` for the global model"),
        (
            federation("finished", no_global_model="every device trains a model of its own"),
            "the models are on the devices: every device trains a model of its own",
        ),
    ],
)
def test_the_next_thing_to_do_is_a_command(found: Federation, said: str) -> None:
    assert f"next {said}" in text(found, [closed(1, 0.5, 0.6)])
    assert "next" not in text(federation("running"))


def test_no_command_is_broken_where_it_is_printed_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    found = Look(federation("recruiting", devices=0), [], [], "https://fleet.example", NOW)
    _say(found, overview, as_json=False)
    assert "`maskfleet join https://fleet.example --token TOKEN --data FILE.npz`" in capsys.readouterr().out


def test_who_is_missing_has_a_reason() -> None:
    assert "missing 1 more device has to join and ask for work" in text(federation("recruiting", devices=2))
    new = [device(name, ready=False) for name in "abc"]
    some = text(federation("recruiting", devices=1), devices=new[:1])
    assert "missing joined, not asked for work yet: a" in some
    assert "missing 1 more device has to join and ask for work" in some
    every = text(federation("recruiting", devices=0), devices=new)
    assert "missing joined, not asked for work yet: a, b, c" in every
    assert "has to join" not in every
    join = "`maskfleet join https://fleet.example --token TOKEN --data FILE.npz`"
    assert f"next on each further device: {join}" in some
    assert "next" not in every
    gone = [device("a", removed=True)]
    assert f"`, then on each device: {join}" in text(federation("recruiting", devices=0), devices=gone)
    ready = [device(name) for name in "abcde"]
    assert "missing no report yet from a, b, c and 2 more" in text(federation("finished"), [], ready)
    assert "waits for a (seen 0 s ago), b (seen 0 s ago), c (seen 0 s ago) and 7 more" in text(
        federation(expected=10, waits_for=list("abcde")), [], ready
    )


def test_text_of_a_device_neither_moves_the_cursor_nor_makes_lines() -> None:
    evil = Failure(kind="data", reason="x\x1b[2J\n[bold]fake line")
    assert "data: x\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[bold]fake line" in text(
        federation(), [], [device("a", failure=evil)]
    )


def test_bars_rise_with_their_values_and_many_become_means() -> None:
    assert bars([]) == ""
    assert bars([0.5, 0.5]) == "▁▁"
    assert bars([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    many = bars([float(i) for i in range(1000)])
    assert (len(many), many[0], many[-1]) == (32, "▁", "█")
    assert [lasting(s) for s in (-1, 0.274, 4.56, 9.6, 119, 120, 7200, 9000, 200_000)] == [
        "0 s", "0.27 s", "4.6 s", "10 s", "119 s", "2 min", "2 h", "2 h 30 min", "2 days"
    ]  # fmt: skip


def test_a_summary_names_whom_the_round_waits_for() -> None:
    names = [f"d{i:02d}" for i in range(30)]
    state = engine.State(phase="running", stage="collecting", round=1, cohort=tuple(reversed(names)))
    config = federation().config
    assert config is not None
    found = summary(config, state, 30, NOW, None)
    assert (found.expected, found.waits_for) == (30, names[:10])


def test_watching_ends_with_the_federation_and_outlives_a_coordinator_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(show, "REFRESH", 0.0)
    faults = [UnreachableError("down"), *(ServerError(f"answered {s}", s, "not-a-problem") for s in (502, 503, 429))]
    phases = iter(["recruiting", "running", *faults, "finished"])
    seen = list[str]()

    def ask(_: Look | None) -> Look:
        phase = next(phases)
        if isinstance(phase, Exception):
            raise phase
        seen.append(phase)
        return Look(federation(phase), [], [device("a", report=None, ready=False)], "u", NOW)

    console = Console(width=100, file=io.StringIO(), force_terminal=True, record=True)
    show.show_live(ask, console)
    assert seen == ["recruiting", "running", "finished"]
    said = console.export_text()
    assert all(f"no answer: {text}" in said for text in ("down", "answered 502", "answered 503", "answered 429"))
    assert "finished, round 3 of 10" in said


def test_watching_ends_with_a_refusal_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "REFRESH", 0.0)
    answers = iter([Look(federation(), [], [], "u", NOW)])

    def ask(_: Look | None) -> Look:
        for found in answers:
            return found
        raise ServerError("there is no federation 'fleet'", 404, "not-found")

    with pytest.raises(ServerError, match="there is no federation"):
        show.show_live(ask, Console(file=io.StringIO()))


def test_ctrl_c_leaves_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def interrupted(seconds: float) -> None:
        waits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(show.time, "sleep", interrupted)
    show.show_live(lambda _: Look(federation(), [], [], "u", NOW), Console(file=io.StringIO()))
    assert len(waits) == 1


def test_json_is_the_whole_message_and_options_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Operator, "federation", lambda *_: federation())
    environment = {"MASKFLEET_OPERATOR_TOKEN": "t"}
    done = CliRunner().invoke(cli.app, ["show", "fleet", "--json"], env=environment)
    assert Federation.model_validate(json.loads(done.output)) == federation()
    refused = CliRunner().invoke(cli.app, ["show", "fleet", "--json", "--watch"], env=environment)
    assert "exclude each other" in str(refused.exception)


class Asked(Operator):
    """A coordinator that notes what it is asked for."""

    def __init__(self, found: Federation) -> None:
        self.found, self.closed, self.asked = found, [closed(1, 0.5, 0.6)], list[str]()
        self.loaded = True

    def federation(self, id_: str) -> Federation:
        return self.found

    def rounds(self, id_: str, first: int = 1) -> list[Round]:
        if not self.loaded:
            raise ServerError("could not be loaded", 503, "not-loaded")
        self.asked.append(f"rounds from {first}")
        return self.closed[first - 1 :]

    def devices(self, id_: str) -> list[Device]:
        self.asked.append("devices")
        return [device("a")]


def test_watching_asks_for_what_is_new_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show.time, "time", lambda: NOW)
    operator = Asked(federation(deadline_in=9.0))
    operator.closed.append(closed(2, 0.6, 0.7))
    first = show.look(operator, "fleet", "u")
    operator.found = federation(deadline_in=7.0)
    second = show.look(operator, "fleet", "u", first)
    assert (second.federation.deadline_in, second.devices, len(second.rounds)) == (7.0, first.devices, 2)
    operator.found = federation(round=4, updates=2)
    operator.closed.append(closed(3, 0.7, 0.8))
    third = show.look(operator, "fleet", "u", second)
    assert [r.round for r in third.rounds] == [1, 2, 3]
    monkeypatch.setattr(show.time, "time", lambda: NOW + show.STEADY)
    fourth = show.look(operator, "fleet", "u", third)
    assert operator.asked == [
        "rounds from 1", "devices", "rounds from 2", "rounds from 2", "devices", "rounds from 3", "devices"
    ]  # fmt: skip
    operator.found = federation(round=4, created_at=5.0)
    assert [r.round for r in show.look(operator, "fleet", "u", fourth).rounds] == [1, 2, 3]
    assert operator.asked[-2:] == ["rounds from 1", "devices"]


def test_a_round_that_closes_after_the_coordinator_s_answer_is_not_shown_yet() -> None:
    operator = Asked(federation(round=3))
    operator.closed = [closed(n, 0.5, 0.6) for n in (1, 2, 3, 4)]
    assert [r.round for r in show.look(operator, "fleet", "u").rounds] == [1, 2]
    operator.found = federation(round=4, phase="finished")
    assert [r.round for r in show.look(operator, "fleet", "u").rounds] == [1, 2, 3, 4]


def test_a_federation_that_could_not_be_loaded_shows_its_fault() -> None:
    operator = Asked(federation(fault="the method is not installed"))
    operator.loaded = False
    found = show.look(operator, "fleet", "u")
    text = printed(found)
    assert "the method is not installed" in text
    assert "could not be loaded, running in round" in text
    assert "mend the fault, then start the coordinator again; or `maskfleet federation stop fleet`" in text
    assert "enrolled" not in text


def test_a_closed_round_that_is_not_listed_is_named_beside_the_others() -> None:
    operator = Asked(federation(round=5))
    operator.closed = [closed(1, 0.5, 0.6), closed(3, 0.7, 0.8)]
    found = show.look(operator, "fleet", "u")
    text = printed(found)
    assert "the record of round 2, round 4 of fleet is damaged; restore the database" in text
    assert "0.800 mean" in text
    assert "worst after round 3" in text
    operator.found = federation(round=5, fault="the disk is full")
    assert show.look(operator, "fleet", "u", found).federation.fault == "the disk is full"
    operator.found = federation(round=2)
    operator.closed = [closed(1, 0.5, 0.6)]
    assert show.look(operator, "fleet", "u").federation.fault is None
