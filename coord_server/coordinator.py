"""The coordinator without HTTP: the federations of one data folder, loaded and kept up to date.

`creation` makes a federation, `live` holds what one does, `bundles` the bundles, `roles` the viewers. Several
coordinators may share a data folder: each watches the versions of the federations in the database. HTTP checks who may
call what.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from coord_server import auth, creation, events
from coord_server.bundles import MAX_PARAMETERS, Bundles, read_manifest
from coord_server.live.federation import LiveFederation
from coord_server.live.unloaded import UnloadedFederation
from coord_server.problems import Refusal
from coord_server.roles import Roles
from coord_server.store import Store, in_turn
from coord_server.store.blobs import federation_shelf
from edge_client.errors import MaskfleetError, StateError
from edge_client.protocol.messages import Enrol, Enrolled, Federation, FederationConfig

log = logging.getLogger("maskfleet")

WATCH = 0.3  # seconds between looks at what other coordinators have committed
SILENT = 5.0  # seconds without an answer of the database after which health says so


class Coordinator:
    """Everything that one data folder holds, alive in one process."""

    def __init__(
        self,
        store: Store,
        operator: str,
        clock: Callable[[], float] = time.time,
        max_parameters: int = MAX_PARAMETERS,
    ) -> None:
        """`operator` is the operator's token; `clock` gives seconds since the epoch.

        A bundle of more than `max_parameters` parameters and statistics is refused.
        """
        self.store, self.bundles = store, Bundles(store, clock, max_parameters)
        self.roles = Roles(store.metadata, operator, clock)
        self._read = time.monotonic()  # when the database last answered
        self._clock = clock
        self._federations: dict[str, LiveFederation | UnloadedFederation] = {}
        self._looking = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- life

    async def start(self) -> None:
        """Load every federation and resume it from the database; repeating this is harmless. Raises StateError.

        One that cannot be loaded (its method is no longer installed, its row is damaged) is listed with its fault;
        the others run.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
            await self.look()
            self._sweeping = asyncio.create_task(asyncio.to_thread(self.store.sweep))

    async def _watch(self) -> None:
        """Notice what other coordinators on the same data folder do. An outage is logged when it begins and ends."""
        logged = 0  # in this outage: 1 after the first fault, 2 after an unexpected one, logged with its traceback
        while True:
            await asyncio.sleep(WATCH)
            try:
                await self.look()
            except Exception as error:
                level, trace = (1, None) if isinstance(error, StateError) else (2, error)
                if level > logged:
                    logged = level
                    log.error("the database cannot be watched: %s", error, exc_info=trace)
            else:
                if logged:
                    log.info("the database can be watched again")
                logged = 0

    @property
    def faulty(self) -> bool:
        """Whether the database has not answered for a while: it fails, or its link is broken."""
        return time.monotonic() - self._read > SILENT

    async def look(self) -> None:
        """Bring every federation up to date, load those that are new, drop the deleted ones. Raises StateError."""
        await self.roles.look()
        async with self._looking:
            known = await asyncio.to_thread(self.store.metadata.known)
            self._read = time.monotonic()
            for id_, held in list(self._federations.items()):
                if id_ not in known or known[id_].first != held.first:
                    del self._federations[id_]
                    if isinstance(held, LiveFederation):
                        await held.close()
            for id_, found in known.items():
                here = self._federations.get(id_)
                try:
                    if isinstance(here, LiveFederation):
                        await here.look(found.version)
                    elif here is None or here.version != found.version:
                        await self._load(id_)
                except Refusal:  # another coordinator has just deleted it
                    continue
                except MaskfleetError as error:
                    log.error("%s: %s", id_, error)

    async def _load(self, id_: str) -> None:
        text, head = await asyncio.to_thread(self.store.metadata.stored, id_)
        try:
            config = FederationConfig.model_validate_json(text)
            live = LiveFederation(self.store, id_, config, head, self._clock)
        except Exception as error:
            self._federations[id_] = UnloadedFederation(self.store.metadata, id_, text, head, error, self._clock())
            return
        self._federations[id_] = live
        live.begin()

    def answer_polls(self) -> None:
        """Let every long poll answer now: the coordinator is about to go down."""
        for live in self.federations():
            live.answer_polls()

    async def close(self) -> None:
        """Stop everything; the store stays open."""
        for task in (self._watching, self._sweeping):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for live in self.federations():
            await live.close()

    # --- federations

    async def create(self, config: FederationConfig) -> Federation:
        """Create a federation, and return it with its method's caution. Raises Refusal, StateError."""
        if config.name in self._federations:
            raise creation.taken(config.name)
        caution = await creation.create(self.store, self.bundles, config, self.find, self._clock)
        log.info("%s: created by the operator", config.name, extra={"federation": config.name})
        return (await (await self.find(config.name)).shown()).model_copy(update={"caution": caution})

    async def delete(self, id_: str) -> None:
        """Delete a federation that does not run, and all that belongs to it. Raises Refusal, StateError.

        One that could not be loaded here may run at another coordinator: it is refused while its state shows that. Once
        the rows are gone a kill loses nothing: the next start drops the blobs that are left.
        """
        found = await self.find_any(id_)
        shelf = federation_shelf(id_, found.first)
        changing = ExitStack()
        await in_turn(lambda: changing.enter_context(self.store.changing(shelf, deletes=True)))
        try:
            await found.delete()
            await self.look()  # which leaves alone what another coordinator has just made of that name
        finally:
            await asyncio.to_thread(changing.close)

    async def operate(self, id_: str, kind: type[events.Event]) -> Federation:
        """Start, pause, resume or stop a federation; one that could not be loaded can be stopped.

        Raises Refusal, StateError.
        """
        found = await self.find_any(id_)
        await found.operate(kind)
        if isinstance(found, UnloadedFederation):
            await self.look()
        return await self._held(id_).shown()

    async def find_any(self, id_: str) -> LiveFederation | UnloadedFederation:
        """The federation of this id, loaded or not, also one that another coordinator has just made.

        Raises Refusal, StateError.
        """
        if id_ not in self._federations:
            await self.look()
        return self._held(id_)

    async def find(self, id_: str) -> LiveFederation:
        """As `federation`, also when another coordinator has just made it. Raises Refusal, StateError."""
        return _loaded(await self.find_any(id_))

    def federation(self, id_: str) -> LiveFederation:
        """The federation of this id. Raises Refusal."""
        return _loaded(self._held(id_))

    def _held(self, id_: str) -> LiveFederation | UnloadedFederation:
        if id_ not in self._federations:
            raise Refusal(
                "not-found",
                f"there is no federation {id_!r}; `maskfleet federation list` or GET /v1/federations has them",
            )
        return self._federations[id_]

    def federations(self) -> list[LiveFederation]:
        """All federations that could be loaded, oldest first."""
        return [f for f in self._federations.values() if isinstance(f, LiveFederation)]

    def summary(self, id_: str) -> Federation:
        """The federation of this id as it stands. Raises Refusal."""
        return self._held(id_).summary()

    def summaries(self) -> list[Federation]:
        """All federations as they stand, oldest first; those that could not be loaded at the end."""
        live = sorted(self.federations(), key=lambda f: (f.created_at, f.id))
        unloaded = [f for _, f in sorted(self._federations.items()) if isinstance(f, UnloadedFederation)]
        return [*(f.summary() for f in live), *(f.summary() for f in unloaded)]

    async def federations_of(self, credential: str) -> list[str]:
        """The ids of the federations in which a device has this credential, a SHA-256. Raises StateError."""
        return await asyncio.to_thread(self.store.metadata.federations_of, credential)

    # --- enrolment

    async def enrol(self, request: Enrol) -> Enrolled:
        """Enrol the device that presents a join token. Raises Refusal, StateError.

        A device whose token was revoked before it got its answer asks again: its credential shows what it joined.
        """
        token = auth.hashed(request.token)
        terms = await asyncio.to_thread(self.store.metadata.token, token)
        joined = await self.federations_of(auth.hashed(request.credential)) if terms is None else [terms.federation]
        if len(joined) != 1:
            raise Refusal("unauthorized", "this join token is unknown here; check it, or ask the operator for one")
        live = await self.find(joined[0])
        if (await asyncio.to_thread(self.store.metadata.head, live.id)).first != live.first:
            await self.look()  # it was deleted and created again at another coordinator
            live = self.federation(live.id)
        if request.sample is not None:
            takes = (await asyncio.to_thread(read_manifest, self.store, live.config.bundle)).input.shape
            if request.sample != takes:
                said = f"samples of {request.device} have shape {request.sample}, the model of {live.id} takes {takes}"
                raise Refusal("wrong-samples", f"{said}; correct them and join again with the same token")
        return await live.enrol(request, token, 0.0 if terms is None else terms.expires_at)


def _loaded(found: LiveFederation | UnloadedFederation) -> LiveFederation:
    """The federation if it could be loaded. Raises Refusal."""
    if isinstance(found, UnloadedFederation):
        raise found.refusal()
    return found
