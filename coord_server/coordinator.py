"""The coordinator without HTTP: federations that are alive, join tokens. Bundles are in `bundles`, viewers in `roles`.

Several coordinators may share one data folder: each watches the versions of the federations in the database. HTTP
checks who may call what; `live` holds what one federation does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from coord_server import aggregation, auth, engine, events
from coord_server.bundles import MAX_PARAMETERS, Bundles, load_model, read_manifest
from coord_server.live.federation import LiveFederation
from coord_server.live.status import summary
from coord_server.problems import Refusal
from coord_server.roles import Roles
from coord_server.store import Store
from coord_server.store.blobs import federation_shelf, owner
from coord_server.store.values import put
from coord_server.warm import Derived
from edge_client.backends import check_parts, installed
from edge_client.errors import (
    BundleError,
    ConfigError,
    MaskfleetError,
    StateError,
    first_fault,
)
from edge_client.methods import Method, make_method
from edge_client.protocol.messages import Enrol, Enrolled, Federation, FederationConfig
from edge_client.protocol.operator import JoinToken, TokenRequest, TokenSummary
from edge_client.task import Course

log = logging.getLogger("maskfleet")

WATCH = 0.3  # seconds between looks at what other coordinators have committed
RESERVED = ("bundles", "incoming")  # names that mean something else in the blob store


class _Unloaded(NamedTuple):
    """A federation that cannot be loaded: the versions that it began with and was read at, and what can be shown."""

    first: int
    version: int
    shown: Federation


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
        self._clock = clock
        self._federations: dict[str, LiveFederation] = {}
        self._unloaded: dict[str, _Unloaded] = {}
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
            await self._look()
            self._sweeping = asyncio.create_task(self._sweep_all())

    async def _watch(self) -> None:
        """Notice what other coordinators on the same data folder do."""
        while True:
            await asyncio.sleep(WATCH)
            try:
                await self._look()
            except StateError as error:
                log.error("the database cannot be watched: %s", error)
            except Exception:
                log.exception("the database cannot be watched")

    async def _look(self) -> None:
        """Bring every federation up to date, load those that are new, drop the deleted ones. Raises StateError."""
        await self.roles.look()
        async with self._looking:
            known = await asyncio.to_thread(self.store.metadata.known)
            for id_, first in {**{i: live.first for i, live in self._federations.items()},
                               **{i: unloaded.first for i, unloaded in self._unloaded.items()}}.items():  # fmt: skip
                if id_ not in known or known[id_].first != first:
                    await self._forget(id_)
            for id_, found in known.items():
                live = self._federations.get(id_)
                try:
                    if live is not None:
                        await live.look(found.version)
                    elif id_ not in self._unloaded or self._unloaded[id_].version != found.version:
                        await self._load(id_)
                except MaskfleetError as error:
                    log.error("%s: %s", id_, error)

    async def _load(self, id_: str) -> None:
        text = await asyncio.to_thread(self.store.metadata.config, id_)
        head = await asyncio.to_thread(self.store.metadata.head, id_)
        try:
            config = FederationConfig.model_validate_json(text)
            live = LiveFederation(self.store, id_, config, head, self._clock)
        except Exception as error:
            shown = self._shown(id_, text, head.state, head.ready, error)
            shown = shown.model_copy(update={"created_at": head.created_at})
            self._unloaded[id_] = _Unloaded(head.first, head.version, shown)
            return
        self._unloaded.pop(id_, None)
        self._federations[id_] = live
        live.begin()

    async def _forget(self, id_: str) -> None:
        """Drop a deleted federation from memory; its devices are answered that it is not here."""
        self._unloaded.pop(id_, None)
        live = self._federations.pop(id_, None)
        if live is not None:
            await live.close(deleted=True)

    async def _sweep_all(self) -> None:
        """Drop what a deletion that was killed has left in the blob store."""
        try:
            for what, version in (await asyncio.to_thread(self.store.metadata.deleted)).items():
                kind, _, digest = what.rpartition("/")
                await asyncio.to_thread(self.bundles.sweep if kind else self._sweep_federation, digest, version)
        except (MaskfleetError, OSError) as error:
            log.warning("blobs of deleted federations were not swept, the next start tries again: %s", error)

    def _sweep_federation(self, id_: str, version: int) -> None:
        """Drop the blobs of the federations of this name that ended at `version` or before. Blocks."""
        for shelf in self.store.blobs.shelves(""):
            name, first = owner(shelf)
            if name == id_ and first <= version:
                self.store.blobs.drop(shelf)

    def _shown(self, id_: str, config: str, state: str, ready: int, error: Exception) -> Federation:
        """A federation that could not be loaded because of `error`, as far as it can be read."""
        known = isinstance(error, (MaskfleetError, ValidationError))
        why = first_fault(error, error.title) if isinstance(error, ValidationError) else str(error)
        fault = (
            f"federation {id_!r} could not be loaded: {why if known else repr(error)}; mend that (install a "
            "method that is missing, restore a damaged data folder), then start the coordinator again"
        )
        log.error("%s", fault, exc_info=None if known else error)
        try:
            read = FederationConfig.model_validate_json(config), engine.load(state)
        except ValidationError:
            return Federation(id=id_, config=None, phase=None, round=0, devices=0, updates=0, fault=fault)
        return summary(*read, ready, self._clock(), fault)

    def answer_polls(self) -> None:
        """Let every long poll answer now: the coordinator is about to go down."""
        for live in self._federations.values():
            live.answer_polls()

    async def close(self) -> None:
        """Stop everything; the store stays open."""
        for task in (self._watching, self._sweeping):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for live in self._federations.values():
            await live.close()

    # --- federations

    async def create(self, config: FederationConfig) -> LiveFederation:
        """Create a federation. Raises Refusal, StateError."""
        taken = Refusal("name-taken", f"there is already a federation {config.name!r}; choose another name")
        if config.name in {*self._federations, *self._unloaded, *RESERVED}:
            raise taken
        receipt = await self.bundles.receipt(config.bundle)
        if receipt.missing:
            raise Refusal(
                "bundle-incomplete",
                f"bundle {receipt.name!r} lacks parts {receipt.missing}; PUT them under "
                f"/v1/bundles/{config.bundle}/parts/ first",
            )
        derived = None if config.start_from is None else await self._warm(config.bundle, config.start_from.federation)
        found = await asyncio.to_thread(self._add, config, derived)
        if found == "taken":
            raise taken
        if found == "no-bundle":
            raise Refusal("not-found", f"bundle {config.bundle} was deleted meanwhile; POST its manifest again")
        return await self.find(config.name)

    async def _warm(self, bundle: str, source: str) -> Derived:
        """The bundle with the global model of another federation, not stored yet. Raises Refusal, StateError."""
        live = await self.find(source)
        try:
            values = await live.global_values()
            return await asyncio.to_thread(self.bundles.derived, bundle, values)
        except (BundleError, ConfigError) as error:
            raise Refusal("bad-config", f"start_from federation {source!r}: {error}") from None

    def _begin(self, config: FederationConfig, derived: Derived | None) -> tuple[Method, Any]:
        """The method of a new federation and its state before round 1. Blocks. Raises Refusal, StateError."""
        try:
            method = make_method(config.method)
            if config.backend is not None:
                # As with methods: a backend that is not installed here is taken for a typing error.
                installed(
                    config.backend, "; for one that only the devices have, leave `backend` out and join with --backend"
                )
                check_parts(config.backend, read_manifest(self.store, config.bundle))
            model = load_model(self.store, config.bundle) if derived is None else derived.model
            course = Course(model, config.seed, config.rounds, config.cohort)
            start = method.start(course)
            if caution := method.caution(course):
                log.warning("%s: method %s: %s", config.name, method.name, caution)
            return method, start
        except (ConfigError, BundleError) as error:
            raise Refusal("bad-config", str(error)) from None

    def _add(self, config: FederationConfig, derived: Derived | None) -> Literal["added", "taken", "no-bundle"]:
        """Check a new federation and store it; one that is refused leaves nothing. Blocks. Raises Refusal, StateError.

        With `derived` it begins from that bundle, which is made from its configured one.
        """
        method, start = self._begin(config, derived)
        source = config.bundle
        try:
            # Every setting is written down, so that a device of another version does not fill in its own defaults.
            settings = {"name": config.method["name"], **method.model_dump(mode="json")}
            bundle = source if derived is None else derived.digest
            config = config.model_copy(update={"method": settings, "bundle": bundle})
            text = config.model_dump_json()
        except ValueError:
            raise Refusal("bad-config", "the settings hold text that is not Unicode; leave it out") from None
        if FederationConfig.model_validate_json(text) != config:
            raise Refusal("bad-config", "the settings hold a value that JSON cannot; leave out infinity and NaN")
        if derived is not None:
            self.bundles.keep(source, derived)
        first = self.store.metadata.first_version(config.name)
        values = put(self.store.blobs, f"{federation_shelf(config.name, first)}/values/0", aggregation.pack(start))
        state = engine.dump(engine.State())
        return self.store.metadata.add_federation(config.name, text, config.bundle, state, values, self._clock(), first)

    async def delete(self, id_: str) -> None:
        """Delete a federation that does not run, and all that belongs to it. Raises Refusal, StateError.

        One that could not be loaded here may run at another coordinator: it is refused while its state shows that. Once
        the rows are gone a kill loses nothing: the next start drops the blobs that are left.
        """
        with suppress(Refusal):
            await self.find(id_)
        if id_ in self._unloaded:
            await self._delete_unloaded(id_)
        else:
            await self.federation(id_).delete()
        await self._look()  # which leaves alone what another coordinator has just made of that name
        version = (await asyncio.to_thread(self.store.metadata.deleted)).get(id_, -1)
        await asyncio.to_thread(self._sweep_federation, id_, version)

    async def _delete_unloaded(self, id_: str) -> None:
        head = await asyncio.to_thread(self.store.metadata.head, id_)
        with suppress(ValidationError):  # a state that cannot be read runs nowhere
            why = engine.keeps(engine.load(head.state))
            if why is not None:
                raise Refusal("wrong-phase", why)
        if not await asyncio.to_thread(self.store.metadata.delete_federation, id_, head.version):
            raise _changed(id_)
        log.info("%s: deleted by the operator; it could not be loaded", id_)

    async def operate(self, id_: str, kind: type[events.Event]) -> Federation:
        """Start, pause, resume or stop a federation; one that could not be loaded can be stopped.

        Raises Refusal, StateError.
        """
        with suppress(Refusal):
            await self.find(id_)
        if id_ in self._unloaded and kind is events.Stopped:
            await self._stop_unloaded(id_)
        else:
            await self.federation(id_).operate(kind)
        return self.summary(id_)

    async def _stop_unloaded(self, id_: str) -> None:
        head = await asyncio.to_thread(self.store.metadata.head, id_)
        try:
            state = engine.load(head.state)
        except ValidationError:
            raise Refusal("wrong-phase", f"the state of {id_!r} cannot be read, so it never runs; delete it") from None
        if events.Stopped not in engine.ACCEPTED[state.phase]:
            raise Refusal("wrong-phase", f"the federation is {state.phase}; it cannot be stopped now")
        text = engine.dump(engine.stopped(state))
        if not await asyncio.to_thread(self.store.metadata.commit, id_, head.version, text, ()):
            raise _changed(id_)
        log.info("%s: stopped by the operator; it could not be loaded", id_, extra={"federation": id_})
        async with self._looking:
            await self._load(id_)

    async def find(self, id_: str) -> LiveFederation:
        """As `federation`, also when another coordinator has just made it. Raises Refusal, StateError."""
        if id_ not in self._federations and id_ not in self._unloaded:
            await self._look()
        return self.federation(id_)

    def federation(self, id_: str) -> LiveFederation:
        """The federation of this id. Raises Refusal."""
        live = self._federations.get(id_)
        if id_ in self._unloaded:
            raise Refusal(
                "not-loaded",
                f"federation {id_!r} could not be loaded; its `fault` tells the operator what to mend. "
                "It can be stopped or deleted",
            )
        if live is None:
            raise Refusal("not-found", f"there is no federation {id_!r}; GET /v1/federations lists them")
        return live

    def federations(self) -> list[LiveFederation]:
        """All federations that could be loaded, oldest first."""
        return list(self._federations.values())

    def summary(self, id_: str) -> Federation:
        """The federation of this id as it stands. Raises Refusal."""
        return self._unloaded[id_].shown if id_ in self._unloaded else self.federation(id_).summary()

    def summaries(self) -> list[Federation]:
        """All federations as they stand, oldest first; those that could not be loaded at the end."""
        return [
            *(live.summary() for live in sorted(self._federations.values(), key=lambda f: (f.created_at, f.id))),
            *(self._unloaded[id_].shown for id_ in sorted(self._unloaded)),
        ]

    async def federations_of(self, credential: str) -> list[str]:
        """The ids of the federations in which a device has this credential, a SHA-256. Raises StateError."""
        return await asyncio.to_thread(self.store.metadata.federations_of, credential)

    # --- tokens and enrolment

    async def new_token(self, id_: str, request: TokenRequest) -> JoinToken:
        """A fresh join token; only its digest is stored. Raises Refusal, StateError."""
        live = await self.find(id_)
        token, expires = auth.new_secret(), self._clock() + request.expires_in
        await asyncio.to_thread(self.store.metadata.add_token, auth.hashed(token), live.id, request.uses, expires)
        id_ = auth.token_id(auth.hashed(token))
        return JoinToken(token=token, id=id_, federation=live.id, uses=request.uses, expires_at=expires)

    async def tokens(self, id_: str, after: str, limit: int) -> list[TokenSummary]:
        """The join tokens of a federation that were not revoked, by id beyond `after`. Raises Refusal, StateError."""
        live = await self.find(id_)
        rows = await asyncio.to_thread(self.store.metadata.tokens, live.id, after, limit)
        return [
            TokenSummary(id=auth.token_id(row.token), uses_left=row.uses_left, expires_at=row.expires_at)
            for row in rows
        ]

    async def remove_token(self, id_: str, token: str) -> None:
        """Revoke a join token; who has joined with it stays. Raises Refusal, StateError."""
        live = await self.find(id_)
        if not await asyncio.to_thread(self.store.metadata.remove_token, live.id, token):
            raise Refusal("not-found", f"{live.id} has no join token {token}; GET .../tokens lists them")
        log.info("%s: the join token %s is revoked by the operator", live.id, token, extra={"federation": live.id})

    async def enrol(self, request: Enrol) -> Enrolled:
        """Enrol the device that presents a join token. Raises Refusal, StateError."""
        token = auth.hashed(request.token)
        terms = await asyncio.to_thread(self.store.metadata.token, token)
        if terms is None:
            raise Refusal("unauthorized", "this join token is unknown here; check it, or ask the operator for one")
        live = await self.find(terms.federation)
        if (await asyncio.to_thread(self.store.metadata.head, live.id)).first != live.first:
            await self._look()  # it was deleted and created again at another coordinator
            live = self.federation(live.id)
        if request.sample is not None:
            takes = (await asyncio.to_thread(read_manifest, self.store, live.config.bundle)).input.shape
            if request.sample != takes:
                said = f"samples of {request.device} have shape {request.sample}, the model of {live.id} takes {takes}"
                raise Refusal("wrong-samples", f"{said}; correct them and join again with the same token")
        return await live.enrol(request, token, terms.uses_left, terms.expires_at)


def _changed(id_: str) -> Refusal:
    return Refusal("wrong-phase", f"federation {id_!r} has just changed; send the request again")
