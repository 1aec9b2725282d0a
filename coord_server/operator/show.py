"""`maskfleet federation show`: a federation on a dozen lines, once or as it goes on.

What runs, how well, who is missing and why, what it costs, and what the operator can do next.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coord_server import aggregation, guard
from coord_server.operator.client import Operator
from coord_server.operator.tables import lasting, plain, state_of
from edge_client.errors import ConfigError, ServerError, UnreachableError
from edge_client.link.transport import BUSY
from edge_client.methods import below, make_method
from edge_client.protocol.cost import in_words, over_rounds
from edge_client.protocol.messages import Federation, FederationConfig, Round, Scores
from edge_client.protocol.operator import Device

REFRESH = 2.0  # seconds between two looks
STEADY = 15.0  # seconds until the devices are asked for again while nothing else changes
NAMED = 3  # devices, of each kind, that are named; the rest is counted
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.,-~+*#"
WIDTH = 32  # of a line of bars
DIGITS = 12  # of a digest that is shown
ENDED = ("finished", "stopped")


@dataclass(frozen=True)
class Look:
    """A federation as the coordinator answered at `now`, its devices as at `listed`, seconds since the epoch."""

    federation: Federation
    rounds: Sequence[Round]
    devices: Sequence[Device]
    url: str
    now: float
    listed: float = 0.0
    loaded: bool = True

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        f = self.federation
        waits = any(not d.removed and d.ready and d.report is None for d in self.devices)
        return f.phase is None or f.phase == "stopped" or (f.phase == "finished" and not waits)


def look(operator: Operator, id_: str, url: str, before: Look | None = None) -> Look:
    """Ask the coordinator for what is not known from a look `before`. Raises ServerError, UnreachableError."""
    found, now = operator.federation(id_), time.time()
    if before is not None and before.federation.created_at != found.created_at:
        before = None  # another one of the same name
    known = [] if before is None else before.rounds[:-1]  # what devices fetch is still counted for the last one
    try:
        asked = operator.rounds(id_, known[-1].round + 1 if known else 1)
        rounds = [*known, *(r for r in asked if r.round <= found.closed)]  # more may have closed since the answer
        found = found.model_copy(update={"fault": found.fault or _unread(found, rounds)})
        if before is not None and now < before.listed + STEADY and _same(found, before.federation):
            return Look(found, rounds, before.devices, url, now, before.listed)
        return Look(found, rounds, operator.devices(id_), url, now, now)
    except ServerError as error:
        if error.kind != "not-loaded":
            raise
        return Look(found, [], [], url, now, loaded=False)  # its fault has the reason


def _unread(f: Federation, rounds: Sequence[Round]) -> str | None:
    """Which closed rounds the coordinator did not list, None when it listed all."""
    gone = sorted(set(range(1, f.closed + 1)) - {r.round for r in rounds})
    named = _named([f"round {n}" for n in gone])
    return f"the record of {named} of {f.id} is damaged; restore the database" if gone else None


def _same(left: Federation, right: Federation) -> bool:
    """Whether nothing has happened but that time went on."""
    return left.model_copy(update={"deadline_in": right.deadline_in}) == right


def show_live(ask: Callable[[Look | None], Look], console: Console) -> None:
    """Show a federation until it ends, or until Ctrl-C. `ask` is given the look before.

    A coordinator that does not answer, or is busy, or its proxy while it starts again, is asked again.
    """
    found = ask(None)
    try:
        with Live(Group(*overview(found)), console=console, auto_refresh=False) as live:
            while not found.ended:
                time.sleep(REFRESH)
                try:
                    found = ask(found)
                except (UnreachableError, ServerError) as error:
                    if isinstance(error, ServerError) and error.status not in BUSY and error.status < 500:
                        raise  # it will not change
                    live.update(Group(*overview(found), plain(f"no answer: {error}")), refresh=True)
                    continue
                live.update(Group(*overview(found)), refresh=True)
    except KeyboardInterrupt:
        pass  # rich has restored the terminal
    if not console.is_terminal:
        console.print()


def overview(found: Look) -> list[Table]:
    """The dozen lines."""
    f, c = found.federation, found.federation.config
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    lines: list[tuple[str, str]] = [(f.id, _what(found))]
    if c is not None and found.loaded:
        lines += [
            ("devices", _devices(found, c)),
            *_missing(found, c),
            *_time(found, c),
            *_score(found),
            *_bytes(found),
        ]
    lines += [("fault", f.fault or ""), *(("warning", text) for text in warnings(found)), ("next", _next(found))]
    for name, text in lines:
        if text:
            table.add_row(Text(name, "bold"), plain(text))
    return [table]


def _what(found: Look) -> str:
    f = found.federation
    if f.config is None or f.phase is None:
        return "could not be loaded"
    if not found.loaded:
        return f"{f.config.method.get('name')}, could not be loaded, {f.phase} in round {f.round} of {f.config.rounds}"
    tries = f", attempt {f.attempt}" if f.attempt > 1 and f.phase == "running" else ""
    rounds = f", round {f.round} of {f.config.rounds}{tries}" if f.round else f", {f.config.rounds} rounds to come"
    return f"{f.config.method.get('name')}, {f.phase}{rounds}"


def _devices(found: Look, c: FederationConfig) -> str:
    f, there = found.federation, [d for d in found.devices if not d.removed]
    states = [state_of(d, c.presence_seconds, found.now) for d in there]
    counts = [f"{states.count(state)} {state}" for state in ("ready", "silent", "failed", "done") if state in states]
    enrolled = f"{len(there)} enrolled" + (f": {', '.join(counts)}" if counts else "")
    if f.phase != "running":
        return enrolled
    return f"{enrolled}; this round: {f.updates} in, {f.expected} due"


def _named(devices: Sequence[str], in_all: int | None = None) -> str:
    """The first few names, and how many more there are."""
    count = len(devices) if in_all is None else in_all
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return ", ".join(islice(devices, NAMED)) + more


def _joined(found: Look) -> list[str]:
    """The devices that have joined and not asked for work yet."""
    return [d.device for d in found.devices if not d.ready and not d.removed]


def _missing(found: Look, c: FederationConfig) -> list[tuple[str, str]]:
    """Who is missing, with the reason."""
    f, seen = found.federation, {d.device: d.last_seen_at for d in found.devices}
    said = list[str]()
    if f.phase == "recruiting" and f.devices < c.min_devices:
        if joined := _joined(found):
            said.append(f"joined, not asked for work yet: {_named(joined)}")
        if (lacking := c.min_devices - f.devices - len(joined)) > 0:
            said.append(f"{lacking} more {'device has' if lacking == 1 else 'devices have'} to join and ask for work")
    if f.waits_for:
        longest = [f"{d} (seen {lasting(found.now - seen[d])} ago)" if d in seen else d for d in f.waits_for]
        said.append(f"the round waits for {_named(longest, f.expected)}")
    if f.phase in ("running", "paused"):
        states = {d.device: state_of(d, c.presence_seconds, found.now) for d in found.devices}
        silent = [d for d, state in states.items() if state == "silent" and d not in f.waits_for]
        if silent:
            said.append(f"silent: {_named(silent)}")
    failed = [
        f"{d.device} ({d.failure.kind}: {d.failure.reason})"
        for d in found.devices
        if d.failure and not d.report and not d.removed
    ]
    if failed:
        said.append(f"failed: {_named(failed)}")
    if f.phase == "finished" and (
        owing := [d.device for d in found.devices if d.ready and not d.report and not d.removed]
    ):
        said.append(f"no report yet from {_named(owing)}")
    return [("missing", text) for text in said]


def _time(found: Look, c: FederationConfig) -> list[tuple[str, str]]:
    f, seconds = found.federation, [r.seconds for r in found.rounds]
    said = list[str]()
    if f.deadline_in is not None:
        said.append(f"the round closes in {lasting(f.deadline_in)} at the latest")
    if seconds and f.phase in ("running", "paused"):
        each = sum(seconds[-10:]) / len(seconds[-10:])
        left = c.rounds - found.rounds[-1].round
        said.append(f"about {lasting(left * each)} for {left} rounds of {lasting(each)}")
    elif seconds:
        said.append(f"{len(seconds)} rounds took {lasting(sum(seconds))}")
    return [("time", "; ".join(said))]


def _score(found: Look) -> list[tuple[str, str]]:
    """Of the devices' test samples: mean, 10th percentile, worst; over the rounds; against the start."""
    scores = [r.score_after for r in found.rounds if r.score_after is not None]
    starts = [r.score_before for r in found.rounds if r.score_before is not None]
    final = _final(found)
    last = final or (scores[-1] if scores else None)
    if last is None:
        return []
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    course = bars([s.mean for s in scores], BARS if unicode else PLAIN_BARS)
    gained = f"; start {starts[0].mean:.3f} ({last.mean - starts[0].mean:+.3f})" if starts else ""
    of = "of the personal models" if final else f"after round {found.rounds[-1].round}"
    figures = f"{last.mean:.3f} mean, {last.p10:.3f} 10th percentile, {last.worst:.3f} worst {of}{gained}"
    return [("score", figures), ("", f"{course} mean over the rounds" if len(scores) > 1 else "")]


def _final(found: Look) -> Scores | None:
    reports = [d.report for d in found.devices if d.report is not None]
    return aggregation.scores([r.score for r in reports], [r.test_samples for r in reports])


def bars(values: Sequence[float], levels: str = BARS) -> str:
    """One character a value from the least to the most; of many values, means of equal stretches."""
    if len(values) > WIDTH:
        ends = [round(i * len(values) / WIDTH) for i in range(WIDTH + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((v - low) * scale)] for v in values)


def _bytes(found: Look) -> list[tuple[str, str]]:
    """Payloads of a device and round, as means over all rounds, and what else a round costs a device."""
    updates = sum(len(r.devices) for r in found.rounds)
    if not updates:
        return []
    up = sum(sum(r.traffic.up.values()) for r in found.rounds) / updates
    down = sum(sum(r.traffic.down.values()) for r in found.rounds) / updates
    n = len(found.rounds)
    bits_up, bits_down = (
        sum(r.bits_per_parameter_up for r in found.rounds) / n,
        sum(r.bits_per_parameter_down for r in found.rounds) / n,
    )
    bits = f"{bits_up:.3g} and {bits_down:.3g} bits a parameter"
    said = [("bytes", f"{up:,.0f} up, {down:,.0f} down a device and round ({bits})")]
    figures = over_rounds([r.cost for r in found.rounds])
    if figures:
        said.append(("cost", f"{in_words({name: f.mean for name, f in figures.items()})} a device and round"))
    return said


def warnings(found: Look) -> list[str]:
    """Sentences when the guard limited updates, and when the federation scores below where it started.

    It started with what the cohort of round 1 received. It ends with the personal models that devices reported; before
    that, with what the cohort of the last closed round received.
    """
    scores = [s.mean for s in (r.score_before for r in found.rounds) if s is not None]
    limited = guard.said(sum(len(r.guarded) for r in found.rounds))
    said = [] if limited is None else [limited]
    if found.federation.config is None or not scores:
        return said
    final = _final(found)
    end = scores[-1] if final is None else final.mean
    try:
        method = make_method(found.federation.config.method)
    except ConfigError:
        return said  # its package is not installed here
    sentence = below(method.name, end, scores[0], "the model that round 1 started from", method.hints())
    return said if sentence is None else [*said, sentence]


def _next(found: Look) -> str:
    """What the operator can do now."""
    f, c, command = found.federation, found.federation.config, "maskfleet federation"
    if c is None or f.phase is None or not found.loaded:
        stops = f"`{command} stop {f.id}` or " if f.phase in ("recruiting", "running", "paused") else ""
        return f"mend the fault, then start the coordinator again; or {stops}`{command} delete {f.id}`"
    if f.phase == "recruiting":
        if f.devices < c.min_devices:
            if f.devices + len(_joined(found)) >= c.min_devices:
                return ""  # each of them asks for work by itself
            there = any(not d.removed for d in found.devices)  # and so is a token
            first = "on each further device" if there else f"`{command} token {f.id}`, then on each device"
            return f"{first}: `maskfleet join {shlex.quote(found.url)} --token TOKEN --data FILE.npz`"
        return f"`{command} start {f.id}`" if c.start == "manual" else ""
    if f.phase == "paused":
        return f"mend the fault, then `{command} resume {f.id}`" if f.fault else f"`{command} resume {f.id}`"
    if f.phase not in ENDED or not found.rounds:
        return ""
    if f.no_global_model is not None:
        return f"the models are on the devices: {f.no_global_model}"
    return f"`{command} export {f.id} --onnx model.onnx` for the global model"


def settings_table(found: Federation) -> list[Table]:
    """Every setting and its value."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    settings = {} if found.config is None else found.config.model_dump(mode="json")
    if "bundle" in settings:
        settings["bundle"] = settings["bundle"][:DIGITS]
    for name, setting in settings.items():
        if setting is not None:
            table.add_row(name, plain(setting if isinstance(setting, str) else json.dumps(setting)))
    return [table]
