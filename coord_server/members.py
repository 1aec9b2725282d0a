"""The devices of a live federation: enrolling, leaving, reporting, being listed.

Who is in, as every request needs it, is in `roster`; what a device is to do, in `polls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coord_server import auth, engine, events
from coord_server.journal import Journal
from coord_server.refusals import Refusal
from coord_server.roster import Roster
from coord_server.store import Store
from coord_server.store.tables import Seen
from coord_server.values import Downlink, Values
from edge_client.protocol.messages import Device, Enrol, Enrolled, Report


class Members:
    """Who takes part in one federation. Coroutines may be called concurrently."""

    def __init__(
        self, store: Store, journal: Journal, values: Values, roster: Roster, clock: Callable[[], float]
    ) -> None:
        self.id = journal.id
        self._metadata, self._journal, self._values = store.metadata, journal, values
        self._roster, self._clock = roster, clock

    async def enrol(self, request: Enrol, token: str, uses_left: int, expires_at: float) -> Enrolled:
        """Register a device; the same request again gets the same answer. Raises Refusal, StateError.

        It takes part from the moment it first asks for work. `token` and `credential` are compared and stored as
        digests.
        """
        credential = auth.hashed(request.credential)

        async def join() -> None:
            name = request.device
            if self._roster.knows(name, credential):
                return
            now = self._clock()
            if now >= expires_at:
                raise Refusal("token-spent", "this join token has expired; ask the operator for a new one")
            spent = Refusal("token-spent", "this join token has been used up; ask the operator for a new one")
            if uses_left <= 0:
                raise spent

            if self._journal.state.phase == "stopped":
                raise Refusal("wrong-phase", f"the federation is stopped; nobody can enrol in {self.id} any more")
            if not await asyncio.to_thread(self._metadata.enrol, self.id, name, credential, token, now):
                raise spent
            self._roster.add(name, credential)

        await self._journal.uninterrupted(join)
        c = self._journal.config
        return Enrolled(
            federation=self.id, device=request.device, bundle=c.bundle, method=c.method, rounds=c.rounds, seed=c.seed,
            backend=c.backend,
        )  # fmt: skip

    def device_of(self, credential: str) -> str | None:
        """The device with this credential digest. Raises Refusal when it was removed."""
        return self._roster.device_of(credential)

    def note(self, device: str, bytes_down: int = 0) -> None:
        """Remember that a device called and how many payload bytes it fetched; written with its next update."""
        self._roster.note(device, self._clock(), bytes_down)

    def fetched(self, device: str, down: Downlink, size: int, to_the_end: bool) -> None:
        """Account for an answer that carried `size` bytes of a downlink, its last byte among them or not."""
        self.note(device, size)
        if down.round > self._journal.config.rounds and to_the_end:
            self._roster.has_last(device, down.sizes)

    def last_downlinks(self) -> dict[str, int]:
        """Bytes by kind of the downlinks after the last round, of every device that has fetched its own, each once."""
        return self._roster.last()

    def count(self, device: str, side: str, kind: str, size: int) -> None:
        """Account for a message that is no payload, "up" or "down"; written with the device's next update."""
        self._roster.count(device, side, kind, size)

    async def remove(self, device: str) -> None:
        """Take a device out for good. Raises Refusal."""

        async def leave() -> None:
            if not self._roster.has(device):
                raise Refusal("not-found", f"no device {device!r} is enrolled in {self.id}")
            state = self._journal.state
            if device not in state.devices:  # it never asked for work: the engine does not know it
                await self._journal.flush()
                await asyncio.to_thread(self._metadata.remove_device, self.id, device, engine.dump(state))
                self._roster.remove(device)
                return
            await self._journal.step(
                events.Removed(self._clock(), device),
                lambda state: self._metadata.remove_device(self.id, device, state),
                lambda: self._roster.remove(device),
            )

        await self._journal.uninterrupted(leave)

    async def report(self, device: str, report: Report) -> None:
        """Keep a device's last word, and what it fetched up to now: no update of its will come to write that with.

        Raises StateError.
        """
        state, rounds = self._journal.state, self._journal.config.rounds
        if state.phase == "finished" and not self._roster.has_fetched_last(device):
            # It reports on the last downlink, so it has fetched it: a coordinator that died since knew of it.
            down = await self._values.downlink(rounds + 1, device)
            self.fetched(device, down, down.size, to_the_end=True)

        async def keep() -> None:
            seen, text = self._roster.seen().get(device, Seen(self._clock())), report.model_dump_json()
            await asyncio.to_thread(self._metadata.save_report, self.id, device, text, seen)
            self._roster.written(device, seen)

        await self._journal.uninterrupted(keep)

    async def listed(self) -> list[Device]:
        """Every device that ever enrolled, with what happened since its row was written."""
        rows = await asyncio.to_thread(self._metadata.all_devices, self.id)
        ready = set(self._journal.state.devices)
        return [self._roster.shown(row, row.device in ready) for row in rows]
