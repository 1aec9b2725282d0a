"""The devices of a federation as rows of a page: one state each, sorted so that those in trouble come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coord_server.dashboard import words
from coord_server.live.status import Progress
from edge_client.protocol.cost import in_words
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.operator import Device

STATES = {
    "failed": "it reported that it cannot do this round",
    "unusable": "its update of this round cannot be used",
    "late": "asked long ago, and its update is not in",
    "training": "asked, its update is not in yet",
    "reported": "its update of this round is in",
    "silent": "no request for a while: it cannot be drawn",
    "ready": "present, not asked in this round",
    "enrolled": "it has not asked for work yet",
    "done": "it has reported its own model",
    "removed": "removed by the operator",
}
"""In the order of the list, with what they mean."""
LATE = 3.0  # times the median of the closed rounds after which a device that still trains is called late
PAGE = 50  # rows of one page


@dataclass(frozen=True)
class Row:
    """One device: what is known of it, and what follows from that. It was last `seen` so many seconds ago."""

    device: Device
    state: str
    seen: float
    cost: str
    """Of its last update, in words."""
    watts: str
    note: str
    """Why it failed, or why its model is not compacted."""


def states(progress: Progress, usual: float | None) -> dict[str, str]:
    """The state of every device the round has asked; `usual` are the seconds of a round so far, None before any."""
    late = usual is not None and (progress.seconds or 0.0) > LATE * usual
    return {
        **dict.fromkeys(progress.overdue, "late"),
        **dict.fromkeys(progress.training, "late" if late else "training"),
        **dict.fromkeys(progress.reported, "reported"),
        **dict.fromkeys(progress.failed, "failed"),
        **dict.fromkeys(progress.unusable, "unusable"),
    }


def rows(
    devices: Sequence[Device],
    config: FederationConfig,
    progress: Progress,
    asked: Mapping[str, str],
) -> list[Row]:
    """A row for every device, those in trouble first, then by name. `asked` is what `states` returns."""
    order = {state: at for at, state in enumerate(STATES)}
    found = [_row(d, config, progress.now, asked.get(d.device)) for d in devices]
    return sorted(found, key=lambda row: (order[row.state], row.device.device))


def _row(d: Device, config: FederationConfig, now: float, asked: str | None) -> Row:
    seen = max(now - d.last_seen_at, 0.0)
    state = asked or ("ready" if seen <= config.presence_seconds else "silent")
    if d.removed:
        state = "removed"
    elif d.report is not None:
        state = "done"
    elif not d.ready:
        state = "enrolled"
    watts = ""
    if "joules" in d.cost and d.cost.get("seconds"):
        watts = f"{d.cost['joules'] / d.cost['seconds']:.2f}{words.SPACE}W"
    note = "" if d.failure is None else f"{d.failure.kind}: {d.failure.reason}"
    if not note and d.report is not None and d.report.uncompacted:
        note = f"not compacted: {d.report.uncompacted}"
    return Row(d, state, seen, in_words(d.cost), watts, note)


def counts(found: Sequence[Row]) -> dict[str, int]:
    """How many devices are in each state that any device is in."""
    count = Counter(row.state for row in found)
    return {state: count[state] for state in STATES if count[state]}


@dataclass(frozen=True)
class Part:
    """A page of a list: the rows on it, its number from 1, the number of pages, and how many rows there are in all."""

    rows: Sequence[Row]
    page: int
    pages: int
    total: int


def part(found: Sequence[Row], state: str, name: str, page: int) -> Part:
    """The rows of one page among those in `state` ("": any) whose name contains `name`."""
    chosen = [r for r in found if state in ("", r.state) and name.lower() in r.device.device.lower()]
    pages = max(-(-len(chosen) // PAGE), 1)
    page = min(max(page, 1), pages)
    return Part(chosen[(page - 1) * PAGE : page * PAGE], page, pages, len(chosen))
