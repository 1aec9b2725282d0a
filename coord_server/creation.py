"""How a federation comes into being: its settings are checked, its method begins, its first row is written."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from coord_server import aggregation, engine
from coord_server.bundles import Bundles, load_model, read_manifest
from coord_server.live.federation import LiveFederation
from coord_server.problems import Refusal
from coord_server.store import Store, in_turn
from coord_server.store.blobs import bundle_shelf, federation_shelf
from coord_server.store.values import put
from coord_server.warm import Derived
from edge_client.backends import check_parts, installed
from edge_client.errors import BundleError, ConfigError, StorageDamagedError
from edge_client.methods import Method, make_method
from edge_client.protocol.messages import FederationConfig
from edge_client.task import Course

log = logging.getLogger("maskfleet")

FIRST_BITS = 52  # random, of a federation's first version: none is that of a deleted one of its name; a double holds it


def taken(name: str) -> Refusal:
    """The answer to a creation with a name that is in use."""
    return Refusal("name-taken", f"there is already a federation {name!r}; choose another name")


async def create(
    store: Store,
    bundles: Bundles,
    config: FederationConfig,
    find: Callable[[str], Awaitable[LiveFederation]],
    clock: Callable[[], float],
) -> str | None:
    """Store a new federation; one that is refused leaves nothing. Raises Refusal, StateError.

    Returns the method's caution, None when it has none. `find` gives the federation of an id, to start from its model.
    """
    receipt = await bundles.receipt(config.bundle)
    if receipt.missing:
        raise Refusal(
            "bundle-incomplete",
            f"bundle {receipt.name!r} lacks parts {receipt.missing}; PUT them under "
            f"/v1/bundles/{config.bundle}/parts/ first",
        )
    source, derived = config.bundle, None
    try:
        if config.start_from is not None:
            derived = await _warm(bundles, source, await find(config.start_from.federation))
        method, start, caution = await asyncio.to_thread(_begin, store, config, derived)
        config, text = _written(config, method, source if derived is None else derived.digest)
        await in_turn(lambda: _add(store, bundles, config, text, start, clock(), source, derived))
    except StorageDamagedError:
        if await asyncio.to_thread(store.metadata.added_at, source) is None:
            raise _gone(source) from None
        raise
    if caution is not None:
        log.warning("%s: %s", config.name, caution)
    return caution


async def _warm(bundles: Bundles, bundle: str, source: LiveFederation) -> Derived:
    """The bundle with the global model of `source`, not stored yet. Raises Refusal, StateError."""
    try:
        values = await source.global_values()
        return await asyncio.to_thread(bundles.derived, bundle, values)
    except (BundleError, ConfigError) as error:
        raise Refusal("bad-config", f"start_from federation {source.id!r}: {error}") from None


def _written(config: FederationConfig, method: Method, bundle: str) -> tuple[FederationConfig, str]:
    """The settings as they are stored, with the bundle that it begins from, and as JSON. Raises Refusal.

    Every setting is written down, so that a device of another version does not fill in its own defaults.
    """
    try:
        settings = {"name": config.method["name"], **method.model_dump(mode="json")}
        config = config.model_copy(update={"method": settings, "bundle": bundle})
        text = config.model_dump_json()
    except ValueError:
        raise Refusal("bad-config", "the settings hold text that is not Unicode; leave it out") from None
    if FederationConfig.model_validate_json(text) != config:
        raise Refusal("bad-config", "the settings hold a value that JSON cannot; leave out infinity and NaN")
    return config, text


def _add(
    store: Store, bundles: Bundles, config: FederationConfig, text: str, start: Any, now: float,
    source: str, derived: Derived | None,
) -> None:  # fmt: skip
    """Store a new federation, whose settings are `text` as JSON and whose method begins with `start`. Blocks.

    Its bundle is stored too if it was `derived` from bundle `source`. Raises Refusal, StateError.
    """
    first = secrets.randbits(FIRST_BITS)
    shelf = federation_shelf(config.name, first)
    with ExitStack() as changing:
        if derived is not None:
            changing.enter_context(store.changing(bundle_shelf(config.bundle)))
            bundles.write(source, derived)
        changing.enter_context(store.changing(shelf))
        values = put(store.blobs, f"{shelf}/values/0", aggregation.pack(start))
        state, made = engine.dump(engine.State()), derived is not None
        found = store.metadata.add_federation(config.name, text, config.bundle, state, values, now, first, made)
        if found == "taken":
            raise taken(config.name)
        if found == "no-bundle":
            raise _gone(source)


def _gone(bundle: str) -> Refusal:
    return Refusal("not-found", f"bundle {bundle} was deleted meanwhile; POST its manifest again")


def _begin(store: Store, config: FederationConfig, derived: Derived | None) -> tuple[Method, Any, str | None]:
    """The method of a new federation, its state before round 1, and its caution. Blocks. Raises Refusal, StateError."""
    try:
        method = make_method(config.method)
        if config.backend is not None:
            # As with methods: a backend that is not installed here is taken for a typing error.
            installed(
                config.backend, "; for one that only the devices have, leave `backend` out and join with --backend"
            )
            check_parts(config.backend, read_manifest(store, config.bundle))
        model = load_model(store, config.bundle) if derived is None else derived.model
        course = Course(model, config.seed, config.rounds, config.cohort)
        start, said = method.start(course), method.caution(course)
        return method, start, said and f"method {method.name}: {said}"
    except (ConfigError, BundleError) as error:
        raise Refusal("bad-config", str(error)) from None
