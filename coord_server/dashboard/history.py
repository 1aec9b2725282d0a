"""The closed rounds of a federation, read once: what the plots, the cost table and the list of faults are drawn from.

A closed round does not change, except that the last one's traffic grows by what devices fetch after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from coord_server.live.federation import LiveFederation
from edge_client.protocol.messages import MeanCost, Round, Scores


@dataclass(frozen=True)
class Trouble:
    """An update or a device that a round went on without, or an update that was changed before it counted."""

    round: int
    device: str
    kind: str
    why: str


@dataclass(frozen=True)
class Closed:
    """One closed round. `up` and `down` are payload bytes of one device, in the mean."""

    round: int
    devices: int
    before: Scores | None
    after: Scores | None
    loss: float | None
    up: float
    down: float
    seconds: float
    cost: Mapping[str, MeanCost]
    troubles: Sequence[Trouble]


def closed(record: str) -> Closed:
    """A round's record, JSON, as far as it is shown."""
    r = Round.model_validate_json(record)
    devices = max(len(r.devices), 1)
    t = r.traffic
    up = sum(t.up.values()) + sum(t.one_time_up.values())
    down = sum(t.down.values()) + sum(t.one_time_down.values())
    return Closed(
        r.round, len(r.devices), r.score_before, r.score_after, r.loss, up / devices, down / devices, r.seconds,
        r.cost, tuple(_troubles(r)),
    )  # fmt: skip


def _troubles(r: Round) -> Iterator[Trouble]:
    for device, failure in r.failed.items():
        yield Trouble(r.round, device, failure.kind, failure.reason)
    for device, why in r.guarded.items():
        yield Trouble(r.round, device, "guarded", f"its update {why}")
    for device in r.skipped:
        yield Trouble(r.round, device, "skipped", "its update could not be folded and is left out")


@dataclass
class _Known:
    """The rounds up to `last`, but those whose records cannot be read."""

    rounds: list[Closed] = field(default_factory=list)
    last: int = 0


class Histories:
    """The closed rounds of every federation whose page was asked for."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[LiveFederation, _Known] = WeakKeyDictionary()
        self._reading = asyncio.Lock()

    async def of(self, live: LiveFederation) -> Sequence[Closed]:
        """All closed rounds whose records can be read, in order. Raises StateError."""
        async with self._reading:
            known = self._known.setdefault(live, _Known())
            if known.last < live.summary().closed:
                records = await live.rounds(first=known.last + 1)
                read = [text for text in records.values() if text is not None]
                known.rounds += await asyncio.to_thread(lambda: [closed(text) for text in read])
                known.last = max(records, default=known.last)
            return known.rounds
