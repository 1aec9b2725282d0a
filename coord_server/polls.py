"""What each device is to do: asked by long polls, which are held back while that is nothing, and what it may fetch.

How a state is put into words is in `outlook`; what a downlink is made of, in `values`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coord_server import engine, events, outlook
from coord_server.journal import Journal
from coord_server.refusals import Refusal
from coord_server.roster import Roster
from coord_server.values import Downlink, Values
from edge_client.protocol.messages import Finish, Stopped, Train, Wait, Work

POLL_AFTER = 5.0  # seconds a device that does not long-poll is asked to stay away
POLL_AGAIN = 1.0  # the same for one that has just waited in a long poll


class Polls:
    """The questions of one federation's devices. Coroutines may be called concurrently."""

    def __init__(self, journal: Journal, values: Values, roster: Roster, clock: Callable[[], float]) -> None:
        self._journal, self._values, self._roster, self._clock = journal, values, roster, clock
        self._changed = asyncio.Event()
        self._closing = False

    def wake(self, closing: bool = False) -> None:
        """Let every long poll look again; with `closing` they all answer."""
        self._closing = self._closing or closing
        self._changed.set()
        self._changed = asyncio.Event()

    async def work(self, device: str, wait: float) -> Work:
        """What `device` is to do, held back up to `wait` seconds while that is nothing. Raises Refusal, StateError.

        The first question makes it one of those that take part.
        """
        if device not in self._journal.state.devices and self._journal.state.phase != "stopped":
            await self._journal.uninterrupted(lambda: self._admit(device))
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            changed = self._changed
            due = await self._due(device, waited=wait > 0)
            left = until - loop.time()
            if not isinstance(due, Wait) or left <= 0 or self._closing:
                return due
            try:
                await asyncio.wait_for(changed.wait(), left)
            except asyncio.TimeoutError:
                return await self._due(device, waited=True)

    async def _admit(self, device: str) -> None:
        """Let a device that has asked for work take part. The lock is held."""
        if self._roster.has(device) and self._journal.state.phase != "stopped":  # neither may hold any more by now
            await self._journal.step(events.Ready(self._clock(), device), self._journal.save)

    async def _due(self, device: str, waited: bool) -> Work:
        s, config = self._journal.state, self._journal.config
        if s.phase == "stopped":
            return Stopped(reason=f"the operator stopped {config.name} in round {s.round}")
        if s.phase == "finished":
            last = config.rounds + 1
            down = await self._values.downlink(last, device)
            return Finish(round=last, downlink=down.sha256, downlink_size=down.size)
        asked = s.phase == "running" and s.stage == "collecting" and device in s.cohort and device not in s.received
        left = engine.left(config, s, self._clock())
        if asked and left is not None:
            down = await self._values.downlink(s.round, device)
            return Train(
                round=s.round,
                lease=engine.lease(config, s.round, device),
                downlink=down.sha256,
                downlink_size=down.size,
                deadline_in=left,
            )
        reason = outlook.reason(config, s, device, self._closing)
        return Wait(reason=reason, poll_after=POLL_AGAIN if waited else POLL_AFTER)

    async def payload(self, device: str, sha256: str) -> Downlink:
        """The downlink with this digest, when it is one that `device` has to fetch now. Raises Refusal."""
        s, config = self._journal.state, self._journal.config
        if s.phase != "recruiting":
            down = await self._values.downlink(config.rounds + 1 if s.phase == "finished" else s.round, device)
            if down.sha256 == sha256:
                return down
        raise Refusal(
            "not-found", f"payload {sha256} is not due in round {s.round} of {config.name}; ask for work again"
        )
