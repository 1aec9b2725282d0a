"""The devices of one federation: who is enrolled, who is present, what each one sent and received.

The database's rows are the truth. Memory holds what every request needs: credentials it has looked up, when each device
last made a request, and counts that are not written yet. These are written together, for all devices that changed,
every quarter of `presence_seconds`, at most FLUSH seconds apart, and with a report; a kill loses no more of them. No
function here costs more with more members, except the operator's list and the draw of a cohort.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from coord_server import auth, metrics
from coord_server.aggregation import sum_kinds
from coord_server.events import Present
from coord_server.live.status import Faults
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.tables import DOWN, UP, Head, Seen
from edge_client.errors import PayloadError, StateError, StorageDamagedError, first_fault
from edge_client.protocol.cost import from_header
from edge_client.protocol.messages import Enrol, Failure, FederationConfig, Report
from edge_client.protocol.operator import Device, DeviceState

log = logging.getLogger("maskfleet")

RECENT = 2.0  # seconds between reads of the devices that are present at other processes
FLUSH = 10.0  # seconds between writes, at most
_T = TypeVar("_T")
_KINDS = TypeAdapter(dict[str, int])
_AGENT = re.compile(r"([\w.+-]+/[\w.+-]+)(?: \(([\w.+-]+)\))?")  # as `maskfleet/1.2.0 (onnxruntime)`


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
        self._members: dict[str, tuple[str, bool]] = {}  # by credential: the device, and whether it was removed
        self._ready: set[str] = set()
        self._last: dict[str, float] = {}  # when each device made its last request, here or at another process
        self._polls: dict[str, asyncio.Event] = {}  # of each device whose long poll is open here
        self._unwritten: dict[str, Seen] = {}
        self._writing = asyncio.Lock()  # held by the one write under way
        self._queried: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False

    # --- who is enrolled

    async def enrol(self, request: Enrol, token: str, expires_at: float, stopped: bool) -> None:
        """Register a device; the same request again changes nothing. Raises Refusal, StateError."""
        now, credential, name = self._clock(), auth.hashed(request.credential), request.device
        valid = now < expires_at and not stopped
        found = await asyncio.to_thread(self._metadata.enrol, self.id, name, credential, token, now, valid)
        if found == "removed":
            raise Refusal("device-removed", f"device {name!r} was removed from {self.id}; choose another name")
        if found == "name-taken":
            raise Refusal(
                "name-taken",
                f"another device is enrolled as {name!r} in {self.id}; choose another name, or use the state folder "
                "that it enrolled with",
            )
        if found == "credential-taken":
            raise Refusal("name-taken", "this credential is enrolled under another name; make a fresh one")
        if found == "spent":
            if stopped:
                raise Refusal("wrong-phase", f"the federation is stopped; {self.id} enrols no more devices")
            how = "has expired" if now >= expires_at else "has been used up"
            raise Refusal("token-spent", f"this join token {how}; ask the operator for a new one")
        if found == "new":
            log.info("%s: %s joined", self.id, name,
                     extra={"federation": self.id, "device": name, "limited": "joined"})  # fmt: skip

    async def device_of(self, credential: str) -> str | None:
        """The device with this credential. Raises Refusal when it was removed, StateError."""
        if credential not in self._members:
            member = await asyncio.to_thread(self._metadata.member, self.id, credential)
            if member is None:
                return None
            self._members[credential] = member.device, member.removed
            if member.ready:
                self._ready.add(member.device)
        device, removed = self._members[credential]
        if removed:
            raise Refusal(
                "device-removed",
                f"device {device!r} was removed from {self.id} by its operator; join anew under another name",
            )
        return device

    def removed(self, device: str, was_ready: int) -> None:
        """A commit of this process removed a device."""
        self.ready_count -= was_ready
        self._ready.discard(device)
        self._members.clear()

    def reloaded(self, head: Head) -> None:
        """Another process has committed: devices may have arrived or been removed there."""
        self.ready_count, self._queried = head.ready, None
        self._ready.clear()
        self._members.clear()

    # --- who is present

    def note(self, device: str) -> None:
        """A device has made a request."""
        self._last[device] = self._change(device).at = self._clock()

    def introduces(self, device: str, agent: str) -> None:
        """Store a device's User-Agent."""
        self._change(device).agent = agent

    def arrives(self, device: str) -> bool:
        """Whether this request makes the device present: it is new or was silent too long.

        The caller then commits an arrival.
        """
        silent = self._clock() - self._last.get(device, 0.0)
        return device not in self._ready or silent > self._config.presence_seconds

    def arrived(self, device: str, new: int) -> None:
        """The arrival of a device is committed; `new` is 1 when it is the device's first."""
        self.ready_count += new
        self._ready.add(device)

    async def present(self, now: float) -> Present:
        """The devices that can be drawn at `now`, and the size of the fleet. Raises StateError.

        What other processes saw is read from the database, unless that was done just now.
        """
        since = now - self._config.presence_seconds
        if self._queried is None or not 0.0 <= now - self._queried <= RECENT:
            for device, at in (await asyncio.to_thread(self._metadata.present, self.id, since)).items():
                self._ready.add(device)
                self._last[device] = max(at, self._last.get(device, at))
            self._queried = now
        found = sorted(d for d in self._ready if d in self._polls or self._last.get(d, since - 1.0) >= since)
        return Present(now, tuple(found), self.ready_count)

    def present_now(self) -> int:
        """How many devices are present, as far as this process has seen or read it."""
        since = self._clock() - self._config.presence_seconds
        return sum(d in self._polls or self._last.get(d, since - 1.0) >= since for d in self._ready)

    @contextmanager
    def polling(self, device: str) -> Iterator[asyncio.Event]:
        """A device's long poll is open: the device is present, and `wake` sets the event. A newer poll replaces it."""
        event = self._polls[device] = asyncio.Event()
        try:
            yield event
        finally:
            if self._polls.get(device) is event:
                del self._polls[device]
                self.note(device)

    def wake(self, devices: Iterable[str] | None = None) -> None:
        """Let the long polls of `devices` look again, None: every one."""
        for device in self._polls if devices is None else self._polls.keys() & set(devices):
            self._polls[device].set()

    # --- what each one sent and received

    def count(self, device: str, side: str, kind: str, size: int) -> None:
        """A message that is no payload went "up" or "down"; `size` are the bytes of its body."""
        if kind not in {"up": UP, "down": DOWN}[side]:
            raise ValueError(f"there is no message {kind!r} {side}")
        metrics.BYTES.labels(side, kind).inc(size)
        messages, name = self._change(device).messages, f"{side}_{kind}"
        messages[name] = messages.get(name, 0) + size

    def fetched(self, device: str, size: int) -> None:
        """A device has fetched `size` bytes of a payload."""
        self.note(device)
        metrics.BYTES.labels("down", "downlink").inc(size)
        self._change(device).bytes_down += size

    def has_last(self, device: str, sizes: Mapping[str, int]) -> None:
        """A device has fetched the downlink after the last round; `sizes` are its bytes by kind."""
        self._change(device).last_down = json.dumps(sizes, separators=(",", ":"))

    async def last_downlinks(self) -> dict[str, int]:
        """Bytes by kind of the downlinks after the last round, of every device that has fetched its own, each once.

        One that cannot be read is left out and named by the federation's fault. Raises StateError.
        """
        await self.flush()
        texts = await asyncio.to_thread(self._metadata.last_down, self.id)
        return sum_kinds(self._readable(d, "last_down", _KINDS.validate_json, t) or {} for d, t in texts.items())

    def _readable(self, device: str, what: str, read: Callable[[Any], _T], found: Any) -> _T | None:
        """What is `read` of `what` of a device; None, and a fault of the federation, where that is damaged."""
        try:
            made = read(found)
        except (ValidationError, PayloadError, TypeError) as error:  # TypeError: text where a number should be
            self._faults.set(f"{what} of {device}", str(damaged(device, error)))
            return None
        self._faults.clear(f"{what} of {device}")
        return made

    def _change(self, device: str) -> Seen:
        if self._timer is None and not self._closed:
            delay = min(self._config.presence_seconds / 4, FLUSH)
            self._timer = asyncio.get_running_loop().call_later(delay, self._start_flush)
        return self._unwritten.setdefault(device, Seen(self._last.get(device, 0.0)))

    def _start_flush(self) -> None:
        self._timer, self._flushing = None, asyncio.create_task(self._flush_logged())

    async def _flush_logged(self) -> None:
        try:
            with self._faults.watch("presence", "the devices' requests cannot be written down"):
                await self.flush()
        except StateError as error:
            log.error("%s: %s", self.id, error)

    async def flush(self) -> None:
        """Write what happened to devices since their rows were written. Raises StateError.

        One write at a time: all that happens during it is written together by the next.
        """
        async with self._writing:
            seen, self._unwritten = self._unwritten, {}
            if not seen:
                return
            try:
                await asyncio.to_thread(self._metadata.save_seen, self.id, seen)
            except StateError:
                for device, s in seen.items():
                    self._change(device).add(s)
                raise
        for device in (d for d, s in seen.items() if s.report):
            self._faults.clear(f"report of {device}")  # of one that could not be written at first

    async def report(self, device: str, report: Report) -> None:
        """Store a device's report, with all that is not written yet: it asks for nothing again. Raises StateError."""
        self._change(device).report = report.model_dump_json()
        with self._faults.watch(f"report of {device}", f"the report of {device!r} could not be written down"):
            await self.flush()

    async def listed(self, state: DeviceState | None = None, after: str = "", limit: int | None = None) -> list[Device]:
        """Every device that ever enrolled, or those in a state, by name beyond `after`. Raises StateError.

        Each with what happened since its row was written. One whose row cannot be read has no figures, and the
        federation's fault names it.
        """
        rows = await asyncio.to_thread(self._metadata.devices, self.id, state, after, limit)
        return [self._readable(row.device, "row", self._shown, row) or _unreadable(row) for row in rows]

    def _shown(self, row: Any) -> Device:
        u = self._unwritten.get(row.device) or Seen(row.last_seen_at)

        def messages(side: str, kinds: tuple[str, ...]) -> dict[str, int]:
            names = {kind: f"{side}_{kind}" for kind in kinds}
            found = {kind: getattr(row, name) + u.messages.get(name, 0) for kind, name in names.items()}
            return {kind: size for kind, size in found.items() if size}

        return Device(
            device=row.device,
            enrolled_at=row.enrolled_at,
            last_seen_at=max(row.last_seen_at, u.at),
            updates=row.updates,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down + u.bytes_down,
            messages_up=messages("up", UP),
            messages_down=messages("down", DOWN),
            removed=row.removed,
            state=_state(row),
            ready=row.ready,
            report=None if row.report is None else Report.model_validate_json(row.report),
            failure=None if row.failure is None else Failure.model_validate_json(row.failure),
            cost={} if row.cost is None else from_header(row.cost).model_dump(exclude_none=True),
            **_said(u.agent or row.agent or ""),
        )

    async def close(self) -> None:
        """Write what is not written yet and stop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._flushing is not None:
            await asyncio.wait([self._flushing])
        await self._flush_logged()


def not_enrolled(federation: str, device: str) -> Refusal:
    """What to raise when a federation has no device of this name."""
    why = f"no device {device!r} is enrolled in {federation}, or it was removed"
    return Refusal("not-found", f"{why}; `maskfleet federation devices {federation}` or GET .../devices has all")


def damaged(device: str, error: ValidationError | PayloadError | TypeError) -> StorageDamagedError:
    """What to raise when the row of a device cannot be read."""
    why = first_fault(error, "row") if isinstance(error, ValidationError) else str(error)
    return StorageDamagedError(f"the row of device {device!r} is damaged: {why}; restore the database")


def _unreadable(row: Any) -> Device:
    """A device of whose row only this much is trusted."""
    return Device(device=row.device, enrolled_at=0.0, last_seen_at=0.0, updates=0, bytes_up=0, bytes_down=0,
                  removed=row.removed, state=_state(row), ready=row.ready)  # fmt: skip


def _state(row: Any) -> DeviceState:
    if row.removed:
        return "removed"
    return "new" if not row.ready else "ready" if row.failure is None else "failed"


def _said(agent: str) -> dict[str, str]:
    """Client, version and training engine in a device's User-Agent; nothing when it is of another form."""
    found = _AGENT.fullmatch(agent)
    return {} if found is None else {"client": found[1], "engine": found[2] or ""}
