"""One live federation, as the routes use it: its life, the operator's commands, polls, and what there is to see.

commits        the only writer; the engine's state, the timer
uploads        updates on their way in: HTTP calls this room itself
rounds         the fold of a round, and the sweep after it
method_state   the method's global state and records
downlinks      what devices fetch, by audience
feed           what happened, for those who watch
devices        who is enrolled, who is present, what each one sent and received: HTTP calls this room itself
tokens         join tokens: HTTP calls this room itself
records        closed rounds, as people read them
status         its state in words, and what keeps it from going on

These rooms know no HTTP; blocking work runs in threads. Public coroutines may be called concurrently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from coord_server import engine, events, metrics, warm
from coord_server.live.commits import Commits, Followers
from coord_server.live.devices import Devices, not_enrolled
from coord_server.live.downlinks import Downlink, Downlinks
from coord_server.live.feed import Feed
from coord_server.live.method_state import MethodState, StaleError
from coord_server.live.records import Records
from coord_server.live.rounds import Rounds
from coord_server.live.status import Faults, Progress, progress, reason, summary
from coord_server.live.tokens import JoinTokens
from coord_server.live.uploads import Uploads
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.rows import Rows
from coord_server.store.tables import Head
from edge_client.errors import ConfigError, StateError, StorageUnreachableError
from edge_client.global_model import global_model
from edge_client.methods import make_method
from edge_client.protocol.changes import UpdateRefused
from edge_client.protocol.messages import (
    MAX_ROUNDS,
    Change,
    Enrol,
    Enrolled,
    Failure,
    Federation,
    FederationConfig,
    Finish,
    Report,
    Round,
    Stopped,
    Train,
    Wait,
    Work,
)

log = logging.getLogger("maskfleet")

POLL_AFTER = 5.0  # seconds until a device that does not long-poll should ask again
POLL_AGAIN = 1.0  # the same for one that has just waited in a long poll
LOOKS = 5  # times that memory is brought up to date while another process commits


class LiveFederation:
    """A federation of a running coordinator."""

    def __init__(
        self, store: Store, id_: str, config: FederationConfig, head: Head, clock: Callable[[], float]
    ) -> None:
        """Raises ConfigError when the method cannot be loaded, pydantic's ValidationError for a damaged state."""
        self.id, self.first, self.created_at = id_, head.first, head.created_at
        self._store, self._clock, self._faults = store, clock, Faults()
        self.tokens = JoinTokens(store.metadata, id_, clock)
        self.devices = Devices(store.metadata, id_, config, head, self._faults, clock)
        self.feed = Feed(head.version, head.ready)
        followers = Followers(self.devices.present, self._committed, self._carry_out, self._reloaded)
        self._commits = Commits(store.metadata, id_, config, head, followers, self._faults, clock)
        self._method_state = MethodState(store, self._commits, make_method(config.method), head)
        self._downlinks = Downlinks(store.blobs, self._method_state)
        self._rounds = Rounds(store, self._commits, self._method_state, self._downlinks)
        self._records = Records(store.metadata, id_, self._faults)
        self.uploads = Uploads(store, self._commits, self._method_state, self._rounds)
        self._closing = False

    @property
    def config(self) -> FederationConfig:
        """The settings in force."""
        return self._commits.config

    # --- life

    def begin(self) -> None:
        """Carry out the decisions that are still pending in the stored state."""
        self._rounds.begin()
        self._commits.begin()

    async def close(self) -> None:
        """Stop timers and tasks and write down which devices made requests. What is not committed is done again."""
        self.answer_polls()
        await self._commits.close()
        await self._rounds.close()
        await self.devices.close()

    def answer_polls(self) -> None:
        """Answer every long poll now and end streams: the coordinator is about to go down."""
        self._closing = True
        self.feed.close()
        self.devices.wake()

    # --- what follows from a commit

    def _committed(self, before: engine.State) -> None:
        now = self._commits.state
        if now.round != before.round or now.phase in ("finished", "stopped"):
            self._faults.clear("updates")
        if now.phase != before.phase:
            self.devices.wake()
        elif now.stage == "collecting" and (now.round, now.attempt) != (before.round, before.attempt):
            self.devices.wake(engine.missing(now))
        self.feed.committed(self._commits.version, before, now, self.devices.ready_count)

    def _carry_out(self, decisions: Sequence[events.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, events.Aggregate):
                self._rounds.fold(decision)
            elif isinstance(decision, events.OpenRound):
                log.info("%s: round %d, attempt %d, asks %d devices", self.id, decision.round, decision.attempt,
                         len(decision.cohort))  # fmt: skip
            elif isinstance(decision, events.GiveUp):
                log.error("%s: paused: %s", self.id, decision.fault)
            elif isinstance(decision, events.Finish):
                log.info("%s: finished after round %d", self.id, decision.round)

    def _reloaded(self, head: Head) -> None:
        self.devices.reloaded(head)
        self._rounds.reloaded(head)
        self._downlinks.forget_all()

    async def refresh(self) -> None:
        """Bring memory up to date. Raises Refusal, StateError."""
        await self._commits.refresh()

    async def look(self, version: int) -> None:
        """Reload when the database has another version than memory. Raises Refusal, StateError."""
        self._rounds.rest()
        if version != self._commits.version and await self._commits.refresh():
            await self._call()  # arrivals at other coordinators may be enough to start

    # --- devices

    async def enrol(self, request: Enrol, token: str, expires_at: float) -> Enrolled:
        """Register a device; the same request again gets the same answer. Raises Refusal, StateError.

        It takes part from the moment it first asks for work. `token` is the SHA-256 of the join token.
        """
        stopped = self._commits.state.phase == "stopped"
        await self.devices.enrol(request, token, expires_at, stopped)
        c = self.config
        return Enrolled(
            federation=self.id, device=request.device, bundle=c.bundle, method=c.method, rounds=c.rounds,
            cohort=self._commits.initial_config.cohort, seed=c.seed, backend=c.backend, personalise=c.personalise,
            licence=c.licence,
        )  # fmt: skip

    def fetched(self, device: str, down: Downlink, size: int) -> None:
        """Account for an answer that carried `size` bytes of a downlink."""
        self.devices.fetched(device, size)
        if size and down.round > self.config.rounds:
            self.devices.has_last(device, down.sizes)

    async def work(self, device: str, wait: float) -> Work:
        """What `device` is to do, held back up to `wait` seconds while that is nothing. Raises Refusal, StateError.

        The first request for work makes the device ready, so that it can be drawn.
        """
        arrives = self.devices.arrives(device)
        self.devices.note(device)
        with self._faults.watch(f"work of {device}", f"{device!r} cannot be given its work"):
            if arrives and self._commits.state.phase not in ("finished", "stopped"):
                await self._arrive(device)
            return await (self._hold(device, wait) if wait > 0 else self._due(device, waited=False))

    async def _hold(self, device: str, wait: float) -> Work:
        """Wait up to `wait` seconds for the work of `device`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        with self.devices.polling(device) as woken:
            while True:
                woken.clear()
                due = await self._due(device, waited=True)
                left = until - loop.time()
                if not isinstance(due, Wait) or left <= 0 or self._closing:
                    return due
                try:
                    await asyncio.wait_for(woken.wait(), left)
                except asyncio.TimeoutError:
                    return await self._due(device, waited=True)

    async def _arrive(self, device: str) -> None:
        """Commit the arrival of a device, so that every process can draw it, and start what waits for devices."""
        now, new = self._clock(), list[int]()
        await self._commits.submit(
            events.Arrived(now, device),
            lambda rows: new.append(rows.arrive(device, now)),
            lambda: self.devices.arrived(device, new[-1]),
        )
        await self._call()

    async def _call(self) -> None:
        """Submit the devices that are present, if the engine waits for them."""
        s, c = self._commits.state, self.config
        starts = s.phase == "recruiting" and c.start == "auto" and self.devices.ready_count >= c.min_devices
        if starts or s.stage == "drawing":
            await self._commits.submit(await self.devices.present(self._clock()))

    async def _due(self, device: str, waited: bool) -> Work:
        fresh = False
        for _ in range(LOOKS):
            s = self._commits.state
            if s.phase == "stopped":
                return Stopped(reason=f"the operator stopped {self.id} in round {s.round}")
            left = engine.left(self.config, s, self._clock())
            asked = s.phase == "running" and s.stage == "collecting" and device in engine.missing(s)
            if s.phase != "finished" and (not asked or left is None):
                why = reason(self.config, s, device, self.devices.ready_count, self._closing)
                return Wait(reason=why, poll_after=POLL_AGAIN if waited else POLL_AFTER)
            round_ = self.config.rounds + 1 if s.phase == "finished" else s.round
            if asked and not fresh:  # another process may just have accepted its update: train no round twice
                fresh = True
                await self._commits.refresh()
                continue
            try:
                down = await self._downlinks.get(round_, device)
            except StaleError:
                await self._commits.refresh()
                continue
            if s.phase == "finished":
                return Finish(round=round_, downlink=down.sha256, downlink_size=down.size)
            return Train(
                round=round_,
                lease=engine.lease(self.config, s, device),
                rounds=self.config.rounds,
                place=s.asked[device],
                downlink=down.sha256,
                downlink_size=down.size,
                deadline_in=left or 0.0,
            )
        raise StorageUnreachableError("other coordinators commit without a pause; ask again")

    async def payload(self, device: str, sha256: str) -> Downlink:
        """The downlink with this digest, when `device` has to fetch it now. Raises Refusal, StateError."""
        with self._faults.watch(f"work of {device}", f"{device!r} cannot be given its downlink"):
            for _ in range(LOOKS):
                s, version = self._commits.state, self._commits.version
                with suppress(StaleError):
                    round_ = self.config.rounds + 1 if s.phase == "finished" else s.round
                    down = await self._downlinks.get(round_, device)
                    if down.sha256 == sha256:
                        return down
                if not await self._commits.refresh(version):
                    break
        raise Refusal("not-found", f"payload {sha256} is not due in round {s.round} of {self.id}; ask for work again")

    def refused(self, round_: int, device: str, error: Refusal) -> None:
        """An update was refused."""
        error.about = f"{self.id}: the update of {device} for round {round_}"
        metrics.REFUSED.labels(error.kind).inc()
        self.feed.refused(UpdateRefused(round=round_, device=device, problem=error.kind, detail=str(error)))

    async def fail(self, round_: int, device: str, lease: str, failure: Failure) -> None:
        """A device cannot do its round. Repeating it is harmless. Raises Refusal, StateError."""
        event = events.Failed(self._clock(), round_, device, lease, failure.kind, failure.reason)
        text, after_loss = failure.model_dump_json(), None

        def write(rows: Rows) -> None:
            rows.add_failure(device, text)
            if after_loss is not None:
                rows.leave_record(device, *after_loss)

        with self._faults.watch(f"failure of {device}", f"the failure of {device!r} could not be written down"):
            if failure.kind == "lost":
                with suppress(StaleError):  # of a closed round: the engine refuses it
                    after_loss = await asyncio.to_thread(self._method_state.record_after_loss, device, round_)
            await self._commits.submit(event, write, lambda: self._downlinks.forget(device))
        log.warning("%s: %s cannot do round %d: %s: %s", self.id, device, round_, failure.kind, failure.reason,
                    extra={"federation": self.id, "device": device, "round": round_, "failure": failure.kind,
                           "limited": "failed"})  # fmt: skip

    async def report(self, device: str, report: Report) -> None:
        """Store a device's report. Raises StateError."""
        await self.devices.report(device, report)
        log.info("%s: %s ends with its %s model, score %.3f on %d samples, %d of %d parameters", self.id, device,
                 report.source, report.score, report.test_samples, report.parameters_compact, report.parameters_dense,
                 extra={"federation": self.id, "device": device, "score": report.score,
                        "limited": "reported"})  # fmt: skip

    # --- the operator

    async def operate(self, kind: type[events.Event]) -> None:
        """Start, pause, resume or stop. Raises Refusal, StateError."""
        if kind is events.Started:
            await self._commits.refresh()
            found = await self.devices.present(self._clock())
            event: events.Event = events.Started(found.now, found.devices, found.fleet)
        else:
            event = kind(self._clock())
        await self._commits.submit(event)
        log.info("%s: %s by the operator, now %s", self.id, kind.__name__.lower(), self._commits.state.phase,
                 extra={"federation": self.id})  # fmt: skip

    async def change(self, change: Change, seen: tuple[str, ...] | None = None) -> None:
        """Change settings, if they have one of the tags in `seen`. Raises Refusal, StateError."""
        new = change.model_dump(exclude_none=True)
        if change.rounds is not None:
            await self._method_state.check_rounds(change.rounds)
        if new or seen is not None:
            await self._commits.submit(events.Changed(self._clock(), new, seen))
        if new:
            said = ", ".join(f"{name} = {value:g}" for name, value in new.items())
            log.info("%s: changed by the operator: %s", self.id, said, extra={"federation": self.id})
            await self._call()  # fewer devices may now be enough to start

    async def delete(self) -> None:
        """Delete the federation and all its rows; its blobs stay. Raises Refusal, StateError."""
        await self._commits.submit(events.Deleted(self._clock()), Rows.delete_federation)
        log.info("%s: deleted by the operator", self.id)

    async def remove(self, device: str) -> None:
        """Remove a device for good. Raises Refusal, StateError."""
        if await asyncio.to_thread(self._store.metadata.device, self.id, device) is None:
            raise not_enrolled(self.id, device)
        was_ready = list[int]()
        await self._commits.submit(
            events.Removed(self._clock(), device),
            lambda rows: was_ready.append(rows.remove_device(device)),
            lambda: self.devices.removed(device, was_ready[-1]),
        )
        with suppress(Refusal, StateError):  # else the timer draws
            await self._call()
        self._faults.forget(device)
        log.info("%s: %s is removed by the operator", self.id, device, extra={"federation": self.id, "device": device})

    def summary(self) -> Federation:
        """The federation as it stands."""
        fault = self._commits.state.fault or self._faults.text
        found = summary(self.config, self._commits.state, self.devices.ready_count, self._clock(), fault)
        return found.model_copy(update={"created_at": self.created_at})

    async def shown(self) -> Federation:
        """The same, with the reason why it has no global model. Takes the bundle into memory once."""
        why = await self._method_state.no_global_model()
        return self.summary().model_copy(update={"no_global_model": why})

    def progress(self) -> Progress:
        """The round under way, by device."""
        return progress(self._commits.state, self._clock())

    async def rounds(self, first: int = 1, last: int = MAX_ROUNDS, limit: int | None = None) -> dict[int, str | None]:
        """The records of the closed rounds `first` .. `last` as JSON, in order. Raises StateError.

        None where one cannot be read; the federation's `fault` names it. The last round's with what was fetched after
        it was written.
        """
        found = await self._records.read(first, last, limit)
        end = self.config.rounds
        if (text := found.get(end)) is not None:
            last_one = Round.model_validate_json(text)
            traffic = last_one.traffic.model_copy(update={"last_down": await self.devices.last_downlinks()})
            found[end] = last_one.model_copy(update={"traffic": traffic}).model_dump_json()
        return found

    async def global_values(self) -> dict[str, NDArray[np.float32]]:
        """The global model after the last closed round, by name. Raises StateError, ConfigError when there is none.

        The method's own reason for having none comes before that of a federation without a closed round.
        """
        method, now = self._method_state.method, await self._method_state.current()
        model = await asyncio.to_thread(global_model, method, now.course, now.state, now.round)
        if now.round == 0:
            begin = f"to begin as it does, leave start_from out and give bundle {self.config.bundle}"
            raise ConfigError(f"it has closed no round yet; wait for its first, or {begin}")
        return warm.by_name(now.course.model.manifest, model)

    async def exported(self) -> tuple[int, bytes]:
        """The last closed round and the method's global state after it, as safetensors bytes. Raises StateError."""
        return await self._method_state.exported()
