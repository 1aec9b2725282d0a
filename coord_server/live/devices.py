"""The devices of one federation: who is enrolled, who is present, what each one sent and received.

The database's rows are the truth. Memory holds what every request needs: credentials it has looked up, when each device
last made a request, and counts that are not written yet. Counts are written for a device with its update or report, and
for all that changed every quarter of `presence_seconds`. No function here costs more with more members, except the
operator's list and the draw of a cohort.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coord_server import auth
from coord_server.aggregation import sum_kinds
from coord_server.live.faults import Faults
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.tables import DOWN, UP, DeviceRow, Head, Member, Seen
from edge_client.errors import StateError, StorageDamagedError, first_fault
from edge_client.protocol.messages import Device, Enrol, Failure, FederationConfig, Report

log = logging.getLogger("maskfleet")

RECENT = 2.0  # seconds for which the devices present at other processes are not read again
_KINDS = TypeAdapter(dict[str, int])


@dataclass
class _Unwritten:
    """What happened to a device and is not in its row yet."""

    at: float
    bytes_down: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    last_down: str | None = None

    def add(self, other: Seen) -> None:
        self.at = max(self.at, other.at)
        self.bytes_down += other.bytes_down
        for name, size in other.messages.items():
            self.messages[name] = self.messages.get(name, 0) + size
        self.last_down = other.last_down or self.last_down


class Devices:
    """Who takes part in federation `id`. Credentials are SHA-256 digests."""

    def __init__(
        self,
        metadata: Metadata,
        id_: str,
        config: FederationConfig,
        head: Head,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        self.id, self.ready_count = id_, head.ready
        self._metadata, self._config, self._faults, self._clock = metadata, config, faults, clock
        self._removals = head.removals
        self._members: dict[str, Member] = {}  # by credential
        self._ready: set[str] = set()
        self._last: dict[str, float] = {}  # when each device made its last request, here or at another process
        self._arrived: set[str] = set()
        self._unwritten: dict[str, _Unwritten] = {}
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queried: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- who is enrolled

    async def enrol(self, request: Enrol, token: str, uses_left: int, expires_at: float, stopped: bool) -> None:
        """Register a device; the same request again changes nothing. Raises Refusal, StateError."""
        now, credential, name = self._clock(), auth.hashed(request.credential), request.device
        valid = now < expires_at and uses_left > 0 and not stopped
        found = await asyncio.to_thread(self._metadata.enrol, self.id, name, credential, token, now, valid)
        if found == "removed":
            raise Refusal("device-removed", f"device {name!r} was removed from {self.id}; choose another name")
        if found == "name-taken":
            raise Refusal("name-taken", f"another device is enrolled as {name!r} in {self.id}; choose another name")
        if found == "credential-taken":
            raise Refusal("name-taken", "this credential is enrolled under another name; make a fresh one")
        if found == "spent":
            if stopped:
                raise Refusal("wrong-phase", f"the federation is stopped; {self.id} enrols no more devices")
            how = "has expired" if now >= expires_at else "has been used up"
            raise Refusal("token-spent", f"this join token {how}; ask the operator for a new one")

    async def device_of(self, credential: str) -> str | None:
        """The device with this credential. Raises Refusal when it was removed, StateError."""
        member = self._members.get(credential)
        if member is None:
            member = await asyncio.to_thread(self._metadata.member, self.id, credential)
            if member is None or not auth.same(member.credential, credential):
                return None
            self._members[credential] = member
            if member.ready and not member.removed:
                self._ready.add(member.device)
        if member.removed:
            raise Refusal("device-removed", f"device {member.device!r} was removed from {self.id} by its operator")
        return member.device

    def removed(self, device: str) -> None:
        """A commit of this process removed a device."""
        self._removals += 1
        self._forget_members()
        self.ready_count -= device in self._ready
        self._ready.discard(device)

    def reloaded(self, head: Head) -> None:
        """Another process has committed."""
        self.ready_count = head.ready
        if head.removals != self._removals:
            self._removals = head.removals
            self._forget_members()
            self._ready.clear()
            self._queried = None

    def _forget_members(self) -> None:
        self._members.clear()

    # --- who is present

    def note(self, device: str) -> None:
        """A device has made a request."""
        now, before = self._clock(), self._last.get(device)
        if before is None or not 0.0 <= now - before <= self._config.presence_seconds:
            self._arrived.add(device)
        self._last[device] = now
        self._change(device).at = now

    async def arrive(self, device: str) -> bool:
        """A device asks for work: from now on it may be drawn. Whether it was not present before. Raises StateError.

        An arrival is written down at once, so that every process can draw the device; devices that arrive together are
        written together.
        """
        if device in self._ready and device not in self._arrived:
            return False
        waiting = self._arrivals.get(device)
        if waiting is None:
            waiting = self._arrivals[device] = asyncio.get_running_loop().create_future()
            if len(self._arrivals) == 1:
                self._spawn(self._write_arrivals())
        await asyncio.shield(waiting)
        return True

    async def _write_arrivals(self) -> None:
        while self._arrivals:
            arrivals = dict(self._arrivals)
            seen = {device: self.take(device) for device in arrivals}
            failure: Exception | None = None
            try:
                self.ready_count = await asyncio.to_thread(self._metadata.save_seen, self.id, seen, sorted(arrivals))
            except Exception as error:
                failure = error
            for device, future in arrivals.items():
                del self._arrivals[device]
                if failure is None:
                    self._ready.add(device)
                    self._arrived.discard(device)
                else:
                    self.give_back(device, seen[device])
                if future.done():
                    continue
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)
                    future.exception()  # the caller may have gone: then nothing else retrieves it

    async def present(self, now: float, fresh: bool = False) -> tuple[str, ...]:
        """The devices that can be drawn at `now`, sorted by name. Raises StateError.

        What other processes saw is read from the database, unless that was done just now and `fresh` is not asked for.
        """
        since = now - self._config.presence_seconds
        if fresh or self._queried is None or not 0.0 <= now - self._queried <= RECENT:
            for device, at in await asyncio.to_thread(self._metadata.present, self.id, since):
                self._ready.add(device)
                self._last[device] = max(at, self._last.get(device, at))
            self._queried = now
        return tuple(sorted(d for d in self._ready if self._last.get(d, since - 1.0) >= since))

    # --- what each one sent and received

    def count(self, device: str, side: str, kind: str, size: int) -> None:
        """A message that is no payload went "up" or "down"; `size` are the bytes of its body."""
        if kind not in {"up": UP, "down": DOWN}[side]:
            raise ValueError(f"there is no message {kind!r} {side}")
        messages, name = self._change(device).messages, f"{side}_{kind}"
        messages[name] = messages.get(name, 0) + size

    def fetched(self, device: str, size: int) -> None:
        """A device has fetched so many bytes of a payload."""
        self.note(device)
        self._change(device).bytes_down += size

    def has_last(self, device: str, sizes: Mapping[str, int]) -> None:
        """A device has fetched the downlink after the last round; `sizes` are its bytes by kind."""
        self._change(device).last_down = json.dumps(sizes, separators=(",", ":"))

    async def has_fetched_last(self, device: str) -> bool:
        """Whether a device has fetched the downlink after the last round. Raises StateError."""
        unwritten = self._unwritten.get(device)
        if unwritten is not None and unwritten.last_down is not None:
            return True
        return bool(await asyncio.to_thread(self._metadata.last_down, self.id, device))

    async def last_downlinks(self) -> dict[str, int]:
        """Bytes by kind of the downlinks after the last round, of every device that has fetched its own, each once."""
        await self.flush()
        texts = await asyncio.to_thread(self._metadata.last_down, self.id)
        return sum_kinds(_KINDS.validate_json(text) for text in texts)

    def take(self, device: str) -> Seen:
        """What is not in a device's row yet, to be written now: memory holds it no longer."""
        u = self._unwritten.pop(device, None) or _Unwritten(self._last.get(device, self._clock()))
        return Seen(u.at, u.bytes_down, u.messages, u.last_down)

    def give_back(self, device: str, seen: Seen) -> None:
        """What `take` returned could not be written."""
        self._change(device).add(seen)

    def _change(self, device: str) -> _Unwritten:
        found = self._unwritten.get(device)
        if found is None:
            found = self._unwritten[device] = _Unwritten(self._last.get(device, 0.0))
            if self._timer is None and not self._closed:
                delay = self._config.presence_seconds / 4
                self._timer = asyncio.get_running_loop().call_later(delay, lambda: self._spawn(self._flush_later()))
        return found

    async def _flush_later(self) -> None:
        self._timer = None
        try:
            with self._faults.watch("presence", "the devices' requests cannot be written down"):
                await self.flush()
        except StateError as error:
            log.error("%s: %s", self.id, error)

    async def flush(self) -> None:
        """Write what happened to devices since their rows were written. Raises StateError."""
        seen = {device: self.take(device) for device in list(self._unwritten)}
        if not seen:
            return
        try:
            await asyncio.to_thread(self._metadata.save_seen, self.id, seen)
        except StateError:
            for device, s in seen.items():
                self.give_back(device, s)
            raise

    async def report(self, device: str, report: Report) -> None:
        """Store a device's report and what happened to it up to now: no update of it will follow. Raises StateError."""
        seen = self.take(device)
        try:
            await asyncio.to_thread(self._metadata.save_report, self.id, device, report.model_dump_json(), seen)
        except StateError:
            self.give_back(device, seen)
            raise

    async def listed(self) -> list[Device]:
        """Every device that ever enrolled, with what happened since its row was written. Raises StateError."""
        rows = await asyncio.to_thread(self._metadata.devices, self.id)
        return [self._shown(row) for row in rows]

    def _shown(self, row: DeviceRow) -> Device:
        u = self._unwritten.get(row.device) or _Unwritten(row.last_seen_at)
        messages = {name: size + u.messages.get(name, 0) for name, size in row.messages.items()}
        sides = {
            side: {kind: messages[f"{side}_{kind}"] for kind in kinds if messages[f"{side}_{kind}"]}
            for side, kinds in (("up", UP), ("down", DOWN))
        }
        try:
            return Device(
                device=row.device,
                enrolled_at=row.enrolled_at,
                last_seen_at=max(row.last_seen_at, u.at),
                updates=row.updates,
                bytes_up=row.bytes_up,
                bytes_down=row.bytes_down + u.bytes_down,
                messages_up=sides["up"],
                messages_down=sides["down"],
                removed=row.removed,
                ready=row.ready and not row.removed,
                report=None if row.report is None else Report.model_validate_json(row.report),
                failure=None if row.failure is None else Failure.model_validate_json(row.failure),
            )
        except ValidationError as error:
            raise StorageDamagedError(
                f"the row of device {row.device!r} is damaged: {first_fault(error, 'row')}; restore the database"
            ) from None

    # --- life

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Write what is not written yet and stop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        try:
            await self.flush()
        except StateError as error:
            log.error("%s: the devices' last requests were not written down: %s", self.id, error)
