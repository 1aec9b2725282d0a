"""Tables of federations, devices and rounds, for narrow terminals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from edge_client.protocol.cost import UNITS
from edge_client.protocol.messages import Failure, Federation, Phase, Round
from edge_client.protocol.operator import Device

STATES = ("removed", "enrolled", "failed", "done", "silent", "ready")  # in the dashboard's words
WHOLE: dict[str, tuple[str, ...]] = {  # columns of unbroken words
    "phase": get_args(Phase),
    "state": STATES,
    "method": ("standalone",),
}
NAMES = {"id": 24, "device": 30}  # columns to copy from: a name of so many characters stays in one line
UNKNOWN = "-"  # a round's loss or score when no device reported one


def plain(text: str) -> Text:
    """Text of a device or coordinator without markup and control characters."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _failure(who: str, failure: Failure) -> Text:
    return plain(f"{who} failed ({failure.kind}): {failure.reason}")


def table_of(*heads: str) -> Table:
    """A table for narrow terminals: text that does not fit continues in the next line, and nothing is cut off.

    A column of NAMES gives up no width to the others; its values come from `_name`.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for head in heads:
        words = (*head.split(), *WHOLE.get(head, ()))
        table.add_column(
            head,
            overflow="fold",
            no_wrap=head in WHOLE or head in NAMES,
            min_width=max((len(word) for word in words), default=0),
        )
    return table


def _name(head: str, name: str) -> str:
    """A name in lines of its column's width: one line for all but very long names."""
    most = NAMES[head]
    return "\n".join(name[at : at + most] for at in range(0, len(name), most))


def _row(f: Federation) -> tuple[str, ...]:
    if f.config is None or f.phase is None:
        return ("",) * 6
    method = str(f.config.method.get("name"))
    rounds = f"{f.round}/{f.config.rounds}" + (f" try {f.attempt}" if f.attempt > 1 else "")
    waits = f"{f.updates} in, {f.expected} due"
    ends = "" if f.deadline_in is None else f"{f.deadline_in:.0f} s"
    return method, f.phase, rounds, str(f.devices), waits, ends


def federations(found: Sequence[Federation]) -> list[Table | Text]:
    table = table_of("id", "method", "phase", "round", "devices", "updates", "ends in")
    for f in found:
        table.add_row(_name("id", f.id), *_row(f))
    return [table, *(plain(f"fault of {f.id}: {f.fault}") for f in found if f.fault)]


def state_of(d: Device, presence: float, now: float) -> str:
    """A device's state in a word of STATES; `presence` as in the federation's settings."""
    if d.removed:
        return "removed"
    if d.report is not None:
        return "done"
    if not d.ready:
        return "enrolled"
    if d.failure is not None:
        return "failed"
    return "ready" if now - d.last_seen_at <= presence else "silent"


def lasting(seconds: float) -> str:
    """A duration in one unit or two: 0.27 s, 40 s, 12 min, 3 h 20 min, 2 days."""
    whole = max(0, round(seconds))
    if whole < 10:
        return f"{max(0.0, seconds):.2g} s"
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172800:
        hours, rest = divmod(whole // 60, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{whole // 86400} days"


def devices(found: Sequence[Device], presence: float) -> list[Table | Text]:
    now = time.time()
    table = table_of("device", "updates", "up", "down", "score", "last seen", "state")
    note = Text(
        "\nup, down: bytes of payloads since enrolment (--json: bundle and messages too)\n"
        f"enrolled: has not asked for work; silent: no request for {lasting(presence)}, so no round asks it"
    )
    for d in found:
        score = "" if d.report is None else f"{d.report.score:.4f}"
        table.add_row(
            _name("device", d.device),
            *(f"{n:,}" for n in (d.updates, d.bytes_up, d.bytes_down)),
            score,
            lasting(now - d.last_seen_at),
            state_of(d, presence, now),
        )
    return [table, note, *(_failure(d.device, d.failure) for d in found if d.failure is not None)]


def rounds(found: Sequence[Round]) -> list[Table | Text]:
    table = table_of(
        "round", "devices", "loss", "score", "worst", "bits/par up", "bits/par down", "seconds", "failed", "skipped"
    )
    for r in found:
        loss = UNKNOWN if r.loss is None else f"{r.loss:.4f}"
        after = r.score_after
        scores = (UNKNOWN, UNKNOWN) if after is None else (f"{after.mean:.4f}", f"{after.worst:.4f}")
        bits = (f"{r.bits_per_parameter_up:.3f}", f"{r.bits_per_parameter_down:.3f}")
        figures = (loss, *scores, *bits, f"{r.seconds:.1f}", str(len(r.failed) or ""))
        table.add_row(str(r.round), str(len(r.devices)), *figures, str(len(r.skipped) or ""))
    kinds = table_of("round", "bytes up", "bytes down", "once up", "once down", "last down")
    for r in found:
        t = r.traffic
        sides = (t.up, t.down, t.one_time_up, t.one_time_down, t.last_down)
        kinds.add_row(str(r.round), *(_by_kind(side) for side in sides))
    costs = table_of("round", *(f"{name} {unit}" for name, unit in UNITS.items()), "joules most", "devices")
    for r in found:
        most = r.cost.get("joules")
        means = (f"{r.cost[name].mean:.4g}" if name in r.cost else "" for name in UNITS)
        given = max((c.devices for c in r.cost.values()), default=0)
        costs.add_row(str(r.round), *means, "" if most is None else f"{most.most:.4g}", str(given or ""))
    spent: list[Table | Text] = [costs, Text()] if any(r.cost for r in found) else []
    notes = list[Text]()
    for r in found:
        notes += [_failure(f"round {r.round}: {device}", failure) for device, failure in r.failed.items()]
        notes += [plain(f"round {r.round}: {device} {reason}") for device, reason in r.guarded.items()]
        notes += [plain(f"round {r.round}: {device} skipped: its update could not be folded") for device in r.skipped]
    return [table, Text(), kinds, Text(), *spent, *notes]


def _by_kind(sizes: dict[str, int]) -> str:
    """Payload bytes of all devices together, one line for each kind."""
    return "\n".join(f"{kind} {size:,}" for kind, size in sizes.items())
