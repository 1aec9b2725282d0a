"""A federation's values: the global state, what is kept of each device, downlinks made from them, rounds folded in.

Which round it is and what counts in it is the engine's business; when something is journalled, the live
federation's. Functions that say so block and run in threads; the rest runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

from coord_server import aggregation, events
from coord_server.aggregation import Checked, Closed, Contribution, Course, UnusableUpdate
from coord_server.bundles import load_model
from coord_server.store import Store
from coord_server.store.tables import INLINE, ClosedRound, Content, FederationRow
from edge_client.bundle import digest as sha256_of
from edge_client.errors import MaskfleetError, PayloadError, StateError
from edge_client.methods import make_method
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.payload import Arrays

log = logging.getLogger("maskfleet")

IN_MEMORY = 8 << 20  # a downlink that all devices share stays in memory up to this size
FRESH = 32 << 20  # bytes of checked updates kept for the fold; those beyond are read back
AT_ONCE = 0.02  # seconds that the last fold took at most, for the next one to be done while an acknowledgement waits


@dataclass(frozen=True)
class Downlink:
    """A round's downlink: digest, size in bytes, bytes by kind; its content, or None when it lies on its shelf."""

    round: int
    shelf: str
    sha256: str
    size: int
    sizes: dict[str, int]
    data: bytes | None


def _size(arrays: Arrays) -> int:
    return sum(a.nbytes for a in arrays.values())


class NothingUsable(MaskfleetError):
    """Not one acknowledged update of a round can be folded; `devices` are whose they are."""

    def __init__(self, round_: int, devices: tuple[str, ...]) -> None:
        super().__init__(f"no update of round {round_} can be folded; it is run again without {', '.join(devices)}")
        self.devices = devices


@dataclass(frozen=True)
class Folded:
    """A round folded in memory: its outcome, devices' new records packed, the next downlink if all share it."""

    closed: Closed
    kept: dict[str, bytes]
    downlink: Downlink | None

    @cached_property
    def packed(self) -> bytes:
        """The new global state as it is stored."""
        return aggregation.pack(self.closed.state)


class Values:
    """The values of one federation. Not the rounds: a round's number comes with every call that needs it."""

    def __init__(self, store: Store, row: FederationRow, config: FederationConfig, records: dict[str, str]) -> None:
        """`records` are the digests of what is kept of each device."""
        self.id, self.config, self.method = row.id, config, make_method(config.method)
        self._store = store
        self._global, self._records = Content(row.global_state, row.global_content), records
        self._course: Course | None = None
        self._arrays: Arrays | None = None
        self._loading = asyncio.Lock()
        self._downlinks: dict[tuple[int, str], Downlink] = {}
        self._fresh: dict[str, Checked] = {}
        self._room = FRESH
        self._fold_took = math.inf  # nothing is known of the first fold: nobody waits for it
        self.large = False
        """Whether anything was ever too large for its row, so that there are blobs to sweep."""

    async def reload(self, row: FederationRow, records: dict[str, str]) -> None:
        """Take everything from the journal anew; what was derived from it is made again when it is asked for."""
        async with self._loading:  # what is being loaded now is what was there before
            self._global, self._records = Content(row.global_state, row.global_content), records
            self._arrays, self._downlinks = None, {}
            self._fresh, self._room = {}, FRESH

    # --- what there is

    async def ready(self) -> tuple[Course, Arrays]:
        """The course and the global state, loaded at first use."""
        if self._course is None or self._arrays is None:
            async with self._loading:
                if self._course is None:
                    model = await asyncio.to_thread(load_model, self._store, self.config.bundle)
                    self._course = Course(self.method, model, self.config.seed, self.config.rounds)
                if self._arrays is None:
                    self._arrays = aggregation.unpack(await asyncio.to_thread(self.exported))
        return self._course, self._arrays

    def exported(self) -> bytes:
        """The global state as it was last journalled, as safetensors bytes. Blocks."""
        return self._read(self._state_shelf, self._global)

    def _record(self, device: str) -> Arrays:
        if device not in self._records:
            return {}
        found = self._store.metadata.record(self.id, device)
        return {} if found is None else aggregation.unpack(self._read(self._record_shelf(device), found))

    # --- downlinks: made when first asked for, remade after a restart (same state, same bytes)

    async def downlink(self, round_: int, device: str) -> Downlink:
        """What `device` fetches in `round_`."""
        key = self._downlink_key(round_, device)
        found = self._downlinks.get(key)
        if found is not None:
            return found
        course, arrays = await self.ready()
        async with self._loading:  # whoever asks meanwhile waits for this one
            found = self._downlinks.get(key)
            if found is None:
                found = await asyncio.to_thread(self._make_downlink, course, arrays, round_, device)
                if self._arrays is arrays:
                    self._downlinks[key] = found
            return found

    def _downlink_key(self, round_: int, device: str) -> tuple[int, str]:
        return round_, "" if self.method.shared_downlink else device

    def _make_downlink(self, course: Course, arrays: Arrays, round_: int, device: str) -> Downlink:
        shared = self.method.shared_downlink
        data, kinds = aggregation.downlink(course, round_, device, arrays, {} if shared else self._record(device))
        shelf = self._downlink_shelf(round_)
        if shared and len(data) <= IN_MEMORY:
            return Downlink(round_, shelf, sha256_of(data), len(data), kinds, data)
        self.large = True
        stored = self._store.blobs.put(shelf, data, durable=False)
        return Downlink(round_, shelf, stored.sha256, stored.size, kinds, None)

    # --- updates

    def updates_shelf(self, round_: int) -> str:
        """Where the large updates of a round lie."""
        return f"{self.id}/updates/{round_}"

    def check(self, course: Course, arrays: Arrays, round_: int, device: str, data: bytes) -> Checked:
        """Decode an update and check it against the values it was trained from. Blocks. Raises PayloadError."""
        self.large = self.large or len(data) > INLINE
        try:
            return aggregation.check_update(course, round_, device, arrays, self._record(device), data)
        except PayloadError as error:
            raise PayloadError(f"the update of {device!r} for round {round_}: {error}") from None

    def remember(self, device: str, checked: Checked) -> None:
        """Keep an acknowledged update for the fold, while there is room."""
        size = _size(checked.arrays)
        if size <= self._room:
            self._room -= size
            self._fresh[device] = checked

    # --- closing a round

    async def fold(self, decision: events.Aggregate) -> Folded:
        """Fold the acknowledged updates of a round; nothing is changed yet.

        One that cannot be folded is left out: the same updates give the same outcome whenever this is done. Raises
        NothingUsable when none is left, StateError when one cannot be read.
        """
        course, arrays = await self.ready()
        round_, devices = decision.round, decision.devices
        if self.method.shared_downlink:
            downs = dict.fromkeys(devices, (await self.downlink(round_, devices[0])).sizes)
        else:
            downs = {d: (await self.downlink(round_, d)).sizes for d in devices}
        return await asyncio.to_thread(self._fold, course, arrays, decision, downs, dict(self._fresh))

    def fold_at_once(self, decision: events.Aggregate, taken: Mapping[str, Checked]) -> Folded | None:
        """Fold a small round while its last updates, `taken`, wait to be journalled. Blocks.

        None when it is not small: when the last one took long, a downlink has to be made again, or something would
        not lie in its row.
        """
        course, arrays = self._course, self._arrays
        if course is None or arrays is None or not decision.devices:
            return None
        if self._fold_took > AT_ONCE or _size(arrays) > INLINE:
            return None
        downs = {d: self._downlinks.get(self._downlink_key(decision.round, d)) for d in decision.devices}
        sizes = {d: down.sizes for d, down in downs.items() if down is not None}
        if len(sizes) < len(downs):
            return None
        folded = self._fold(course, arrays, decision, sizes, {**self._fresh, **taken})
        return folded if all(len(data) <= INLINE for data in (folded.packed, *folded.kept.values())) else None

    def _fold(
        self,
        course: Course,
        arrays: Arrays,
        decision: events.Aggregate,
        downs: dict[str, dict[str, int]],
        fresh: dict[str, Checked],
    ) -> Folded:
        began = perf_counter()
        kept, devices, skipped = dict[str, bytes](), list(decision.devices), list[str]()

        def contributions() -> Iterator[Contribution]:
            for device in devices:
                update = fresh.get(device) or self._acknowledged(decision.round, device)
                yield Contribution(device, update, self._record(device), downs[device])

        def keep(device: str, record: Arrays) -> None:
            kept[device] = aggregation.pack(record)

        while True:
            try:
                parts = contributions()
                closed = aggregation.close_round(course, decision.round, arrays, parts, keep, 0.0, skipped)
                break
            except UnusableUpdate as unusable:
                log.error("%s: round %d: %s; it is left out", self.id, decision.round, unusable)
                kept.clear()
                devices.remove(unusable.device)
                skipped.append(unusable.device)
            if not devices:
                raise NothingUsable(decision.round, tuple(sorted(skipped)))
        following = None
        if self.method.shared_downlink:
            following = self._make_downlink(course, closed.state, decision.round + 1, decision.devices[0])
        self._fold_took = perf_counter() - began
        return Folded(closed, kept, following)

    def _acknowledged(self, round_: int, device: str) -> bytes:
        found = self._store.metadata.update_content(self.id, round_, device)
        if found is None:
            raise StateError(f"the update of {device!r} in round {round_} is not in the database")
        return self._read(self.updates_shelf(round_), found)

    def rows(self, folded: Folded, seconds: float) -> ClosedRound:
        """A folded round as it is written down; what is too large for its row is durable now. Blocks."""
        record = folded.closed.record.model_copy(update={"seconds": seconds})
        total = self._keep(self._state_shelf, folded.packed)
        kept = {device: self._keep(self._record_shelf(device), data) for device, data in folded.kept.items()}
        return ClosedRound(record.round, record.model_dump_json(), total, kept)

    def journal(self, closed: ClosedRound, state: str) -> None:
        """Write a closed round down, with the engine's state after it. Blocks. Raises StateError."""
        self._store.metadata.close_round(self.id, closed, state)

    def written(self, closed: ClosedRound) -> None:
        """A closed round is in the journal."""
        self._global = closed.total
        self._records.update({device: content.sha256 for device, content in closed.kept.items()})

    def adopt(self, folded: Folded) -> None:
        """Go on from a folded round."""
        round_ = folded.closed.record.round
        self._arrays = folded.closed.state
        self._downlinks = {} if folded.downlink is None else {(round_ + 1, ""): folded.downlink}
        self._fresh, self._room = {}, FRESH

    # --- the shelves

    @property
    def _state_shelf(self) -> str:
        return f"{self.id}/state"

    def _record_shelf(self, device: str) -> str:
        return f"{self.id}/records/{device}"

    def _downlink_shelf(self, round_: int) -> str:
        return f"{self.id}/downlinks/{round_}"

    def _read(self, shelf: str, content: Content) -> bytes:
        """Content as it was written. Blocks. Raises StateError when it is damaged, wherever it lies."""
        if content.data is None:
            return self._store.blobs.read(shelf, content.sha256)
        if sha256_of(content.data) != content.sha256:
            raise StateError(
                f"the database's {shelf} is damaged: it has not SHA-256 {content.sha256}; check the coordinator's disk "
                "and restore its data folder"
            )
        return content.data

    def _keep(self, shelf: str, data: bytes) -> Content:
        """Make `data` ready for its row: small, it goes into it; large, it is durable in the blob store now."""
        if len(data) <= INLINE:
            return Content(sha256_of(data), data)
        self.large = True
        return Content(self._store.blobs.put(shelf, data, indexed=True).sha256, None)

    def sweep(self, round_: int, over: bool, first: bool = False) -> None:
        """Drop the blobs that nothing can ask for in `round_`, or any more when it is `over`. Blocks.

        A federation whose values all fit into rows has none; `first` looks what an earlier process left.
        """
        blobs = self._store.blobs
        if first:
            self.large = self.large or bool(blobs.shelves(self.id))
        if not self.large:
            return
        blobs.keep_only(self._state_shelf, {self._global.sha256})
        for device, sha256 in list(self._records.items()):
            blobs.keep_only(self._record_shelf(device), {sha256})
        for name in blobs.shelves(f"{self.id}/updates"):
            if over or int(name) < round_:
                blobs.drop(self.updates_shelf(int(name)))
        for name in blobs.shelves(f"{self.id}/downlinks"):
            if int(name) < round_:
                blobs.drop(self._downlink_shelf(int(name)))
