"""What happened to one federation, version by version, for those who watch.

What a commit changed follows from the engine's states before and after it, so a process also shows what others have
committed. Commits that it reads together appear together, under the last of their versions. Memory holds the latest
versions only: each reader has a place in them and no queue of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from coord_server.state import State
from edge_client.protocol.changes import (
    AnyChange,
    DeviceFailed,
    Faulted,
    Joined,
    PhaseChanged,
    RoundClosed,
    RoundOpened,
    SettingsChanged,
    UpdateRefused,
    UpdateTaken,
)

KEPT = 512  # happenings that can be asked for again


@dataclass(frozen=True)
class Happened:
    """Something that happened: the version that committed it, None for what is not committed (a refused update)."""

    version: int | None
    change: AnyChange


class Feed:
    """The latest happenings of one federation; readers wait for the next one."""

    def __init__(self, version: int, ready: int) -> None:
        self.version, self.closed = version, False
        self._ready = ready
        self._known = version  # all that happened after this version is held
        self._held: deque[tuple[int, Happened]] = deque()  # numbered from the first
        self._next = 0
        self._woken = asyncio.Event()

    # --- what happens

    def committed(self, version: int, before: State, after: State, ready: int) -> None:
        """Memory holds a new version, with so many devices ready."""
        found = changes(before, after)
        if ready != self._ready:
            found = [Joined(devices=ready), *found]
        self.version, self._ready = version, ready
        for change in found:
            self._add(Happened(version, change))

    def refused(self, change: UpdateRefused) -> None:
        """An update was refused here."""
        self._add(Happened(None, change))

    def close(self) -> None:
        """Nothing more happens here: the coordinator goes down, or the federation was deleted."""
        self.closed = True
        self._wake()

    def _add(self, happened: Happened) -> None:
        self._held.append((self._next, happened))
        self._next += 1
        if len(self._held) > KEPT:
            _, oldest = self._held.popleft()
            self._known = self._known if oldest.version is None else oldest.version
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    # --- readers

    def place(self, version: int | None) -> int | None:
        """Where a reader that has seen `version` goes on; None when what happened since is not held any more."""
        if version is None or not self._known <= version <= self.version:
            return None
        return next((n for n, h in self._held if h.version is not None and h.version > version), self._next)

    @property
    def end(self) -> int:
        """The place of what happens next."""
        return self._next

    def since(self, place: int) -> list[Happened] | None:
        """What happened from a place on; None when the reader was too slow, and some of it is not held any more."""
        if self._held and place < self._held[0][0]:
            return None
        return [h for n, h in self._held if n >= place]

    def refusals(self) -> list[UpdateRefused]:
        """The refused updates among what is held, the latest last."""
        return [h.change for _, h in self._held if isinstance(h.change, UpdateRefused)]

    async def wait(self, seconds: float) -> None:
        """Return when something happens, at the latest after so many seconds."""
        woken = self._woken
        try:
            await asyncio.wait_for(woken.wait(), seconds)
        except asyncio.TimeoutError:
            return


def changes(before: State, after: State) -> list[AnyChange]:
    """What led from one state to a later one, as far as both show it; in the order in which it happens."""
    found: list[AnyChange] = []
    same = before.round == after.round
    if (after.changed, after.next_rounds) != (before.changed, before.next_rounds):
        new = dict(after.changed) | ({} if after.next_rounds is None else {"rounds": after.next_rounds})
        old = dict(before.changed) | ({} if before.next_rounds is None else {"rounds": before.next_rounds})
        settings = {name: value for name, value in new.items() if old.get(name) != value}
        if settings:
            found.append(SettingsChanged(settings=settings))
    if same and after.round:
        news = sorted(set(after.received) - set(before.received))
        found += [UpdateTaken(round=after.round, device=device) for device in news]
        found += [
            DeviceFailed(round=after.round, device=device, failure=failure)
            for device, failure in after.failed.items()
            if before.failed.get(device) != failure
        ]
    over = after.round if after.phase == "finished" and before.phase != "finished" else after.round - 1
    found += [RoundClosed(round=r) for r in range(max(before.round, 1), over + 1)]
    if after.phase != before.phase:
        found.append(PhaseChanged(phase=after.phase, round=after.round))
    opens = (after.round, after.attempt) != (before.round, before.attempt) and after.stage != "idle"
    if opens and after.attempt and after.deadline is not None:
        found.append(
            RoundOpened(round=after.round, attempt=after.attempt, cohort=list(after.cohort), deadline=after.deadline)
        )
    if after.fault != before.fault:
        found.append(Faulted(fault=after.fault))
    return found
