"""A round from its cohort to its fold: decoded updates that wait, the fold, what is swept after it.

Folding is deterministic, so any process may do it: the one whose commit closed the round begins at once, another one
after a while if the round is still not folded. The commit decides which result counts; both are the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from coord_server import aggregation, engine, events, metrics
from coord_server.aggregation import Checked, Closed, Contribution, UnusableUpdate
from coord_server.live.commits import Commits
from coord_server.live.downlinks import Downlinks
from coord_server.live.method_state import GlobalState, MethodState, StaleError
from coord_server.problems import Refusal
from coord_server.store import Store
from coord_server.store.tables import Head
from coord_server.store.values import Content, put, read
from edge_client.errors import MaskfleetError, StorageDamagedError
from edge_client.protocol.cost import from_header, means
from edge_client.protocol.messages import Round

log = logging.getLogger("maskfleet")

FRESH = 32 << 20  # bytes of decoded updates kept for the fold; those beyond are decoded again
OTHERS_FOLD = 4.0  # seconds that the process whose commit closed a round has to fold it
RETRY_FIRST, RETRY_MOST = 1.0, 60.0  # seconds between attempts to fold after an error


class Rounds:
    """The rounds of one federation: the updates that wait for the fold, the fold, and the sweep after it."""

    def __init__(self, store: Store, commits: Commits, method_state: MethodState, downlinks: Downlinks) -> None:
        self.id = commits.id
        self._store, self._commits, self._method_state, self._downlinks = store, commits, method_state, downlinks
        self._fresh: dict[str, Checked] = {}
        self._room = FRESH
        self._folding: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._first_sweep: asyncio.Task[None] | None = None

    def remember(self, device: str, checked: Checked) -> None:
        """Keep a decoded update for the fold of the round under way, while there is room."""
        size = _size(checked.update)
        if size <= self._room:
            self._room -= size
            self._fresh[device] = checked

    def reloaded(self, head: Head) -> None:
        """Another process has committed."""
        if head.values_round != self._method_state.closed:
            self._stand_at(head.values_round, None)
        self._fold_pending(OTHERS_FOLD)

    def _stand_at(self, closed: int, current: GlobalState | None) -> None:
        self._method_state.stand_at(closed, current)
        self._fresh, self._room = {}, FRESH

    def rest(self) -> None:
        """Drop from memory what can be read or made again, once it has not been used for a while."""
        if self._method_state.rest():
            self._downlinks.clear()
            self._fresh, self._room = {}, FRESH

    # --- folding

    def begin(self) -> None:
        """Fold what an earlier process left, and sweep."""
        self._fold_pending()
        self._first_sweep = asyncio.create_task(self._sweep_later())

    def _fold_pending(self, delay: float = 0.0) -> None:
        for decision in engine.pending(self._commits.state):
            if isinstance(decision, events.Aggregate):
                self.fold(decision, delay)

    def fold(self, decision: events.Aggregate, delay: float = 0.0) -> None:
        """Fold a round after `delay` seconds, unless that is under way."""
        key = decision.round, decision.attempt
        if key not in self._folding:
            task = self._folding[key] = asyncio.create_task(self._until_folded(decision, delay))
            task.add_done_callback(lambda _: self._folding.pop(key, None))

    def _due(self, decision: events.Aggregate) -> bool:
        return decision in engine.pending(self._commits.state)

    async def _until_folded(self, decision: events.Aggregate, delay: float) -> None:
        """Try to fold the round until it is folded, here or elsewhere; a full disk only delays it."""
        await asyncio.sleep(delay)
        pause = RETRY_FIRST
        while self._due(decision):
            try:
                with self._commits.faults.watch("fold", f"round {decision.round} cannot be aggregated"):
                    await self._fold(decision)
                break
            except Refusal as refused:  # another process has folded it, or the federation was stopped
                log.info("%s: round %d: %s", self.id, decision.round, refused)
                break
            except Exception as error:
                try:
                    await self._commits.refresh()
                    if not self._due(decision):
                        break
                except MaskfleetError as unread:
                    log.debug("%s: %s", self.id, unread)
                known = isinstance(error, MaskfleetError)
                why = str(error) if known else "see the coordinator's log"
                self._commits.faults.set("fold", f"round {decision.round} cannot be aggregated: {why}")
                log.error("%s: round %d: %s; next attempt in %.0f s", self.id, decision.round, error, pause,
                          exc_info=None if known else error)  # fmt: skip
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MOST)
        self._commits.faults.clear("fold")
        await self._sweep_later(decision.devices)

    async def _fold(self, decision: events.Aggregate) -> None:
        current, state, round_ = await self._method_state.current(), self._commits.state, decision.round
        if current.round + 1 != round_:
            raise StaleError(f"round {round_} is not under way")
        down = {d: await self._received(round_, d) for d in decision.devices}
        places = {d: state.asked[d] for d in decision.devices}
        closed, left_out = await asyncio.to_thread(
            self._close, current, decision, down, places, state.fleet, dict(self._fresh)
        )
        now = self._commits.clock()
        if closed is None:
            log.error("%s: no update of round %d can be folded", self.id, round_)
            await self._commits.submit(events.Unusable(now, round_, decision.attempt, tuple(left_out)))
            return
        costs = await asyncio.to_thread(self._store.metadata.costs, self.id, round_)
        taken = [from_header(costs[d]) for d in closed.round.devices if d in costs]
        seconds = max(now - state.opened, 0.0)
        more = {"seconds": seconds, "failed": dict(state.failed), "cost": means(taken),
                "skipped": sorted({*state.unusable, *left_out})}  # fmt: skip
        ended = closed.round.model_copy(update=more)
        record = ended.model_dump_json()
        content, kept = await asyncio.to_thread(self._written, closed, round_)
        await self._commits.submit(
            events.Aggregated(now, round_, decision.attempt, content.sha256),
            lambda rows: rows.close_round(round_, record, content, kept),
            lambda: self._ended(ended, GlobalState(current.course, round_, closed.state)),
        )
        metrics.ROUND.observe(seconds)

    async def _received(self, round_: int, device: str) -> Mapping[str, int]:
        """The bytes by kind of the downlink of a device; nothing for one whose update `_record` leaves out."""
        try:
            return (await self._downlinks.get(round_, device)).sizes
        except StorageDamagedError:
            if not await asyncio.to_thread(self._removed, device):
                raise
            return {}

    def _removed(self, device: str) -> bool:
        """Whether the operator removed `device`: a damaged record of it then stops no round. Blocks."""
        return self._store.metadata.device(self.id, device) is None

    def _ended(self, round_: Round, current: GlobalState) -> None:
        self._stand_at(round_.round, current)
        _say(self.id, round_)

    def _close(
        self,
        current: GlobalState,
        decision: events.Aggregate,
        down: Mapping[str, Mapping[str, int]],
        places: Mapping[str, int],
        fleet: int,
        fresh: Mapping[str, Checked],
    ) -> tuple[Closed | None, list[str]]:
        """Fold the acknowledged updates; one that cannot be folded is left out. Blocks. Raises StateError.

        The same updates and records give the same outcome in every process and at any time.
        """
        round_, devices, left_out = decision.round, list(decision.devices), list[str]()
        influences = self._store.metadata.influences(self.id, round_)

        def contributions() -> Iterator[Contribution]:
            for device in devices:
                update = fresh.get(device) or self._acknowledged(round_, device)
                yield Contribution(device, update, self._record(device, round_), down[device], places[device])

        while devices:
            counted = {d: i for d, i in influences.items() if d in devices}
            try:
                closed = aggregation.close_round(
                    self._method_state.method, current.course, round_, current.state, contributions(), counted,
                    self._commits.config.guard, fleet, left_out,
                )  # fmt: skip
                return closed, left_out
            except UnusableUpdate as unusable:
                log.error("%s: round %d: %s; it is left out", self.id, round_, unusable)
                devices.remove(unusable.device)
                left_out.append(unusable.device)
        return None, left_out

    def _record(self, device: str, round_: int) -> Any:
        """What the method keeps of `device`. Blocks. Raises UnusableUpdate for a damaged one of a removed device."""
        try:
            return self._method_state.record(device, round_)
        except StorageDamagedError as error:
            if not self._removed(device):
                raise
            raise UnusableUpdate(device, f"the device is removed, and {error}") from error

    def _acknowledged(self, round_: int, device: str) -> bytes:
        found = self._store.metadata.update_content(self.id, round_, device)
        if found is None:
            raise StorageDamagedError(f"the update of {device!r} in round {round_} is not in the database; restore it")
        return read(self._store.blobs, self._method_state.shelf("updates", round_), found)

    def _written(self, closed: Closed, round_: int) -> tuple[Content, dict[str, Content | None]]:
        """The new global state and records as they enter their rows; large ones are durable now. Blocks.

        Raises StateError.
        """
        blobs, record_shelf = self._store.blobs, self._method_state.record_shelf
        kept = {
            device: None if value is None else put(blobs, record_shelf(device, round_), aggregation.pack(value))
            for device, value in closed.records.items()
        }
        return put(blobs, self._method_state.shelf("values", round_), aggregation.pack(closed.state)), kept

    async def close(self) -> None:
        """Stop folding: what is not committed is folded again by the next process."""
        tasks = [*self._folding.values(), *([self._first_sweep] if self._first_sweep is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- sweeping

    async def _sweep_later(self, devices: Iterable[str] | None = None) -> None:
        try:
            await asyncio.to_thread(self._sweep, devices)
        except (MaskfleetError, OSError) as error:  # what stays is swept after the next round
            log.warning("%s: old blobs were not swept: %s", self.id, error)

    def _sweep(self, devices: Iterable[str] | None) -> None:
        """Drop the blobs that no process can ask for; records only of `devices`, None: of all. Blocks.

        The downlinks of the last closed round and the values of the one before stay, because a process whose memory is
        one round behind may still read them.
        """
        blobs, method_state, closed = self._store.blobs, self._method_state, self._method_state.closed
        over = self._commits.state.phase in ("finished", "stopped")
        for name, oldest in (("updates", closed + 1 + over), ("downlinks", closed), ("values", closed - 1)):
            for round_ in self._rounds_on(f"{method_state.root}/{name}"):
                if round_ < oldest:
                    blobs.drop(method_state.shelf(name, round_))
        stored = blobs.shelves(f"{method_state.root}/records")  # not of every device: a small record is in its row
        for device in stored if devices is None else set(stored).intersection(devices):
            old = [round_ for round_ in self._rounds_on(f"{method_state.root}/records/{device}") if round_ < closed]
            found = self._store.metadata.record(self.id, device) if old else None
            for round_ in old:
                if found is None or round_ != found[0]:
                    blobs.drop(method_state.record_shelf(device, round_))

    def _rounds_on(self, shelf: str) -> list[int]:
        """The rounds that have a shelf below `shelf`; a folder of another name is not the coordinator's."""
        return [int(name) for name in self._store.blobs.shelves(shelf) if name.isascii() and name.isdecimal()]


def _say(id_: str, r: Round) -> None:
    """Log how a round ended."""
    up, down = (sum(side.values()) for side in (r.traffic.up, r.traffic.down))
    scores = {} if r.score_after is None else r.score_after.model_dump()
    score = f", score {scores['mean']:.3f} (worst {scores['worst']:.3f})" if scores else ""
    missing = f"; failed: {', '.join(sorted(r.failed))}" if r.failed else ""
    log.info("%s: round %d ended: %d devices, %.1f s%s, %d bytes up, %d down%s", id_, r.round, len(r.devices),
             r.seconds, score, up, down, missing,
             extra={"federation": id_, "round": r.round, "devices": len(r.devices), "seconds": r.seconds,
                    "bytes_up": up, "bytes_down": down, "score": scores.get("mean")})  # fmt: skip


def _size(value: Any) -> int:
    """Bytes of the arrays in a decoded update."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_size(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_size(v) for v in value)
    return sum(_size(getattr(value, f.name)) for f in fields(value)) if is_dataclass(value) else 0
