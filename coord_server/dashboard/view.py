"""One federation, gathered for its page: what runs, who is missing and why, how well it does, what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from markupsafe import Markup

from coord_server import aggregation, engine, events
from coord_server.coordinator import Coordinator
from coord_server.dashboard import devices, plots, words
from coord_server.dashboard.history import Closed, Histories, Trouble
from coord_server.http import watch
from coord_server.live.federation import LiveFederation
from coord_server.live.status import Progress
from edge_client.protocol.cost import UNITS, over_rounds
from edge_client.protocol.messages import Federation, MeanCost, Phase, Scores

Action = Literal["start", "pause", "resume", "stop"]
ACTIONS: dict[Action, type[events.Event]] = {
    "start": events.Started, "pause": events.Paused, "resume": events.Resumed, "stop": events.Stopped,
}  # fmt: skip
KINDS = [str(kind.model_fields["kind"].default) for kind in watch.KINDS]  # of a federation's events
NAMED = 24  # devices of one state that the round's card names
TROUBLES = 20  # faults of closed rounds that are shown
ROUNDS = 20  # rounds in the table
REFRESH: dict[Phase | None, int] = {"running": 2, "recruiting": 3, "paused": 5}  # seconds; others: QUIET
QUIET = 15  # also for pages with a stream of events, which announces changes
WORKING = 2  # while a model is being made, which no event announces
EACH = 400  # devices that add a second: reading 2,000 rows takes 70 ms of a core


@dataclass(frozen=True)
class Group:
    """Devices of the round that are in one state; `named` are the first of them with the reason, if there is one."""

    state: str
    count: int
    named: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Plot:
    """A drawn plot with its heading, what its lines are, and the latest figure of each."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Page:
    """All that the page of one federation shows."""

    found: Federation
    progress: Progress
    groups: Sequence[Group]
    bar: Markup
    devices: devices.Part
    states: dict[str, int]
    plots: Sequence[Plot]
    rounds: Sequence[Closed]
    cost: dict[str, tuple[MeanCost, MeanCost]]
    """By figure: of the last closed round, and over all rounds."""
    final: Scores | None
    """Of the personal models that devices have reported."""
    troubles: Sequence[Trouble]


def allowed(phase: Phase | None) -> list[Action]:
    """The operator's commands that a federation in this phase takes."""
    return [] if phase is None else [name for name, event in ACTIONS.items() if event in engine.ACCEPTED[phase]]


def refresh(phase: Phase | None, devices: int = 0, working: bool = False) -> int:
    """Seconds until a page about a federation in this phase is worth asking for again; more with many devices.

    `working`: a model of it is being made.
    """
    return max(WORKING if working else REFRESH.get(phase, QUIET), devices // EACH)


async def summaries(served: Coordinator, histories: Histories) -> list[tuple[Federation, Closed | None]]:
    """Every federation with its last closed round, the newest first. Raises StateError."""
    read = {live.id: await histories.of(live) for live in served.federations()}
    return [(f, rounds[-1] if (rounds := read.get(f.id)) else None) for f in reversed(served.summaries())]


async def federation(live: LiveFederation, histories: Histories, state: str, name: str, page: int) -> Page:
    """The page of a federation with one page of its devices: those in `state` whose name contains `name`.

    Raises Refusal, StateError.
    """
    rounds, listed = await histories.of(live), await live.devices.listed()
    found, progress = await live.shown(), live.progress()
    usual = median(r.seconds for r in rounds) if rounds else None
    asked = devices.states(progress, usual) if found.phase in ("running", "paused") else {}
    rows = devices.rows(listed, found.config or live.config, progress, asked)
    groups = _groups(asked, progress)
    reports = [d.report for d in listed if d.report is not None]
    every = over_rounds([dict(r.cost) for r in rounds])
    spent = dict(rounds[-1].cost) if rounds else {}
    return Page(
        found=found,
        progress=progress,
        groups=groups,
        bar=plots.bar([(g.state, g.count) for g in groups]),
        devices=devices.part(rows, state, name, page),
        states=devices.counts(rows),
        plots=_plots(rounds),
        rounds=rounds[: -ROUNDS - 1 : -1],
        cost={name: (spent[name], every[name]) for name in UNITS if name in spent},
        final=aggregation.scores([r.score for r in reports], [r.test_samples for r in reports]),
        troubles=_last([*(t for r in rounds[-100:] for t in r.troubles), *_refused(live)]),
    )


def _refused(live: LiveFederation) -> Iterator[Trouble]:
    for u in live.feed.refusals():
        yield Trouble(u.round, u.device, u.problem, f"update refused: {u.detail}")


def _last(troubles: Sequence[Trouble]) -> list[Trouble]:
    return list(reversed(troubles[-TROUBLES:]))


def _groups(asked: dict[str, str], progress: Progress) -> list[Group]:
    """The round's devices by state: what is done first, as in the bar."""
    found = []
    for state in ("reported", "training", "late", "failed", "unusable"):
        names = sorted(device for device, is_ in asked.items() if is_ == state)
        if names:
            reasons = {d: f"{f.kind}: {f.reason}" for d, f in progress.failed.items()}
            found.append(Group(state, len(names), [(d, reasons.get(d, "")) for d in names[:NAMED]]))
    return found


def _plots(rounds: Sequence[Closed]) -> list[Plot]:
    at = [r.round for r in rounds]
    after = [r.after for r in rounds]
    seconds = [r.cost["seconds"].mean if "seconds" in r.cost else None for r in rounds]
    joules = [r.cost["joules"].mean if "joules" in r.cost else None for r in rounds]
    told: list[tuple[str, str, list[plots.Series], words.Word, float | None]] = [
        ("Score", "after local training, test samples", [
            plots.Series("mean", [None if s is None else s.mean for s in after]),
            plots.Series("p10", [None if s is None else s.p10 for s in after]),
            plots.Series("worst", [None if s is None else s.worst for s in after]),
        ], words.score, None),
        ("Bytes", "payload of one device and round, mean", [
            plots.Series("up", [r.up for r in rounds]), plots.Series("down", [r.down for r in rounds]),
        ], words.size, 0.0),
        ("Time", "of a round", [
            plots.Series("round", [r.seconds for r in rounds]), plots.Series("on a device, mean", seconds),
        ], words.brief, 0.0),
        ("Energy", "of one device and round, mean", [plots.Series("energy", joules)], words.joules, 0.0),
    ]  # fmt: skip
    found = []
    for title, note, series, word, floor in told:
        svg = plots.lines(f"{title} {note}", at, series, word, floor)
        legend = [(s.name, word(known[-1])) for s in series if (known := [v for v in s.values if v is not None])]
        if svg:
            found.append(Plot(title, note, svg, legend))
    return found
