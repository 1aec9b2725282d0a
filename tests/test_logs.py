"""Logs of both processes: one line a record whatever it holds, a flood is counted, training says how far it is."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_rig import manifest, samples
from numpy_mlp import NumpyMlp

from edge_client import events, logs
from edge_client.bundle import Bundle
from edge_client.events import Event, Log, Watch
from edge_client.task import Assignment, Course, Progress, Task

log = logging.getLogger("maskfleet")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give the root logger its handlers back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], _ = handlers, root.setLevel(level)


def lines(form: Any, write: Any) -> list[str]:
    stream = io.StringIO()
    logs.set_up(form, "info", stream)
    write()
    return stream.getvalue().splitlines()


def test_a_record_is_one_line_of_text_whatever_it_holds() -> None:
    (line,) = lines("text", lambda: log.warning("refused: %s", "x\n2026-01-01 fake \x1b[2J"))
    stamp, level, text = line.split(maxsplit=2)
    assert (len(stamp), level) == (len("2026-01-01T00:00:00Z"), "warning")
    assert text == "refused: x\N{REPLACEMENT CHARACTER}2026-01-01 fake \N{REPLACEMENT CHARACTER}[2J"
    (long,) = lines("text", lambda: log.info("y" * 50_000))
    assert len(long) < 2100


def test_json_has_the_fields_and_stays_one_line() -> None:
    def write() -> None:
        log.info("%s joined\n", "pi-07", extra={"device": "pi-07", "limited": "joined"})
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")

    joined, failed = map(json.loads, lines("json", write))
    assert (joined["event"], joined["level"], joined["device"]) == ("pi-07 joined\n", "info", "pi-07")
    assert "limited" not in joined
    assert "ValueError: broken" in failed["exception"]


def test_a_line_is_the_one_that_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1795338820.25)
    monkeypatch.setattr("time.time_ns", lambda: 1795338820_250000000)  # Python 3.13

    def write() -> None:
        log.info("activity: é joined", extra={"path": Path("/a")})
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            log.exception("it failed")

    text = lines("text", write)
    assert text[0] == "2026-11-22T09:13:40Z info    activity: é joined"
    assert text[1] == "2026-11-22T09:13:40Z error   it failed"
    assert text[-1] == "ValueError: \N{REPLACEMENT CHARACTER}[2J"
    joined, _ = map(json.loads, lines("json", write))
    assert joined == {
        "event": "activity: é joined", "level": "info", "path": "/a", "timestamp": "2026-11-22T09:13:40.250000Z"
    }  # fmt: skip


def test_requests_on_which_the_coordinator_fails_flood_no_log() -> None:
    def write() -> None:
        for _ in range(100):
            try:
                raise ValueError("broken")
            except ValueError:
                logging.getLogger("uvicorn.error").exception("Exception in ASGI application")

    assert len(lines("json", write)) == logs.MOST


def test_a_flood_is_counted_and_other_records_still_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(logs, "Limit", lambda make=logs.Limit: make(lambda: now[0]))

    def write() -> None:
        for i in range(1000):
            log.info("refused %d", i, extra={"limited": "refused"})
        log.info("round 1 ended")
        log.info("joined", extra={"limited": "joined"})
        now[0] = 61.0
        log.info("refused again", extra={"limited": "refused"})
        now[0] = 130.0
        log.info("refused once", extra={"limited": "refused"})

    said = [line.split(maxsplit=2)[2] for line in lines("text", write)]
    assert said[:20] == [f"refused {i}" for i in range(20)]
    assert said[20:] == [
        "round 1 ended", "joined", "refused again (980 records like it were left out)", "refused once"
    ]  # fmt: skip
    now[0] = 0.0
    assert [json.loads(line).get("left_out") for line in lines("json", write)][20:] == [None, None, 980, None]


def steps(seconds: float, epochs: int = 4, each: int = 5) -> tuple[list[Event], Any]:
    """The events of a training whose steps take so many seconds, and the clock."""
    said, clock = list[Event](), SimpleNamespace(now=100.0)
    watch = Watch(3, said.append, lambda: clock.now)
    for step in range(1, epochs * each + 1):
        clock.now += seconds
        watch(Progress("train", (step - 1) // each + 1, epochs, step, epochs * each, 1.0 / step))
    return said, clock


def test_long_training_says_its_epoch_its_loss_and_the_time_left() -> None:
    said, _ = steps(10.0)
    assert len(said) == 20
    assert said[9].text == "round 3: epoch 2 of 4, loss 0.1000, 100 s left"
    assert (said[9].seconds, said[9].round, said[9].kind) == (100.0, 3, "progress")
    assert [e.text for e in steps(0.001)[0]] == []  # a short round is over before anyone could read it
    assert [e.progress.step for e in steps(0.0625)[0] if e.progress] == [4, 8, 12, 16, 20]


def test_a_log_has_a_line_an_epoch_and_not_more_than_one_in_a_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, due in ((10.0, ["1", "2", "3", "4"]), (0.5, ["2", "4"])):
        said, log, clock = steps(seconds)[0], Log(), [1000.0]
        monkeypatch.setattr(events.time, "monotonic", lambda clock=clock: clock[0])
        log(Event("training", "round 3: training"))
        for event in said:
            clock[0] += seconds
            log(event)
        shown = [line.split("epoch ")[1][0] for line in capsys.readouterr().out.splitlines()[1:]]
        assert shown == due


def test_a_log_of_events_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(as_json=True)
    log(Event("failed", "round 1 failed\n\x1b[2J", 1))
    monkeypatch.setattr(events, "EPOCHS_APART", 0.0)
    log(steps(10.0)[0][0])
    failed, trained = map(json.loads, capsys.readouterr().out.splitlines())
    assert (failed["event"], failed["level"], failed["kind"], failed["round"]) == (
        "round 1 failed\n\x1b[2J", "warning", "failed", 1
    )  # fmt: skip
    assert (trained["epoch"], trained["epochs"], trained["loss"]) == (1, 4, 1.0)


def test_a_terminal_shows_the_training_in_its_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    terminal = events.Terminal()
    try:
        (event, *_) = steps(10.0)[0]
        terminal(event)
        out = io.StringIO()
        Console(file=out, width=120).print(terminal._status.renderable)
        assert "round 3: epoch 1 of 4, loss 1.0000" in out.getvalue()
    finally:
        terminal.close()


def test_a_task_tells_its_steps() -> None:
    trainer = object.__new__(NumpyMlp)
    trainer.manifest = manifest()
    model = Bundle(trainer.manifest, Path("/nowhere")).model()
    said = list[Progress]()
    task = Task(Assignment(Course(model, 7, 1, 1), 1, "dev"), trainer, samples(), 0, said.append)  # type: ignore[arg-type]
    losses = [(b.epoch, len(b), task.gradient(model.parameters, model.buffers, b).loss) for b in task.batches(2, 16)]
    assert [(p.step, p.steps, p.epoch, p.epochs) for p in said] == [(i, 6, 1 + i // 4, 2) for i in range(1, 7)]
    last = [(n, loss) for epoch, n, loss in losses if epoch == 1]
    assert said[-1].loss == pytest.approx(sum(n * loss for n, loss in last) / sum(n for n, _ in last))
