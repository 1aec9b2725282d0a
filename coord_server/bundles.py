"""Bundles in the blob store: received part by part, read back, listed, derived from one another, deleted."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from coord_server import warm
from coord_server.problems import Refusal
from coord_server.store import Store, in_turn
from coord_server.store.blobs import bundle_shelf
from edge_client.bundle import WEIGHTS, Bundle, Manifest, Model, parse_manifest
from edge_client.bundle import digest as sha256_of
from edge_client.errors import BundleError, StorageDamagedError
from edge_client.protocol.operator import BundleReceipt, BundleSummary

log = logging.getLogger("maskfleet")

NAMED = 5  # federations that a refusal names
MAX_PARAMETERS = 1 << 28  # of one model: a gigabyte of float32, before a manifest of a few bytes could ask for more


def read_manifest(store: Store, digest: str) -> Manifest:
    """The manifest of a bundle that is here. Raises StateError."""
    try:
        return _parsed(store.blobs.read(bundle_shelf(digest), digest))
    except (StorageDamagedError, BundleError) as error:
        raise StorageDamagedError(
            f"the manifest of bundle {digest} cannot be read ({error}); upload the bundle again, or delete it"
        ) from None


@lru_cache(8)
def _parsed(data: bytes) -> Manifest:
    """Parsed once: a device that joins asks for each part by its name in the manifest."""
    return parse_manifest(data)


def load_model(store: Store, digest: str) -> Model:
    """The initial values of a bundle whose parts are all here. Raises BundleError, StateError."""
    manifest = read_manifest(store, digest)
    with tempfile.TemporaryDirectory() as folder:
        if manifest.seed is None and WEIGHTS in manifest.parts:
            stored = store.blobs.read(bundle_shelf(digest), manifest.parts[WEIGHTS].sha256)
            (Path(folder) / WEIGHTS).write_bytes(stored)
        return Bundle(manifest, Path(folder)).model()


class Bundles:
    """The bundles of one data folder."""

    def __init__(self, store: Store, clock: Callable[[], float], most: int) -> None:
        """A bundle of more than `most` parameters and statistics is refused."""
        self._store, self._clock, self.most = store, clock, most

    async def add(self, manifest: bytes) -> BundleReceipt:
        """Store a manifest; repeating this is harmless, and finds damaged parts. Raises Refusal, StateError."""
        try:
            parsed = parse_manifest(manifest)
        except BundleError as error:
            raise Refusal("bad-bundle", str(error)) from None
        values = parsed.d + parsed.buffers_d
        if values > self.most:
            raise Refusal(
                "bad-bundle",
                f"the model has {values} parameters and statistics, this coordinator takes at most "
                f"{self.most}; raise it with `maskfleet serve --max-parameters`",
            )
        digest = sha256_of(manifest)
        await in_turn(lambda: self._add(digest, manifest))
        log.info("bundle %s (%s) is stored by the operator", digest, parsed.name)
        return await asyncio.to_thread(self._receipt, digest, checked=True)

    def _add(self, digest: str, manifest: bytes) -> None:
        with self._store.changing(bundle_shelf(digest)):
            if not self._store.blobs.holds(bundle_shelf(digest), digest):
                self._store.blobs.put(bundle_shelf(digest), manifest)
            self._store.metadata.add_bundle(digest, self._clock())

    async def receipt(self, digest: str) -> BundleReceipt:
        """What is still missing of a bundle. Raises Refusal when its manifest is not here."""
        return await asyncio.to_thread(self._receipt, digest)

    async def part(self, digest: str, name: str) -> tuple[str, str, int]:
        """Shelf, SHA-256 and size of a part, here or still to come. Raises Refusal."""
        manifest = await asyncio.to_thread(self._manifest, digest)
        part = manifest.parts.get(name)
        if part is None:
            raise Refusal("not-found", f"bundle {manifest.name!r} has no part {name!r}; its manifest lists them")
        return bundle_shelf(digest), part.sha256, part.size

    async def listed(self, after: tuple[float, str] | None, limit: int) -> list[BundleSummary]:
        """The bundles beyond the one stored at a time with a digest, `after`, oldest first. Raises StateError."""
        rows = await asyncio.to_thread(self._store.metadata.bundles, after, limit)
        return [await asyncio.to_thread(self._summary, row.digest, row.added_at) for row in rows]

    async def summary(self, digest: str) -> BundleSummary:
        """A bundle in figures. Raises Refusal, StateError."""
        added_at = await asyncio.to_thread(self._store.metadata.added_at, digest)
        return await asyncio.to_thread(self._summary, digest, added_at or 0.0)

    async def derive(self, digest: str, weights: bytes) -> BundleReceipt:
        """A bundle with the graphs of another one and the values of a safetensors file. Raises Refusal, StateError."""
        receipt = await self.receipt(digest)
        if receipt.missing:
            raise Refusal("bundle-incomplete", f"bundle {receipt.name!r} lacks parts {receipt.missing}; PUT them first")
        try:
            values = await asyncio.to_thread(warm.read_values, weights)
            made = await asyncio.to_thread(self.derived, digest, values)
        except BundleError as error:
            raise Refusal("bad-bundle", str(error)) from None
        await in_turn(lambda: self._keep(digest, made))
        log.info("bundle %s (%s with other values) is stored by the operator", made.digest, digest)
        return await self.receipt(made.digest)

    def _keep(self, source: str, made: warm.Derived) -> None:
        with self._store.changing(bundle_shelf(made.digest)):
            self.write(source, made)
            self._store.metadata.add_bundle(made.digest, self._clock())

    def derived(self, digest: str, values: warm.Values) -> warm.Derived:
        """A bundle with other values, not stored yet. Blocks. Raises BundleError, StateError."""
        return warm.derive(read_manifest(self._store, digest), values)

    def write(self, source: str, made: warm.Derived) -> None:
        """Write the blobs of a bundle that was derived from `source`; the caller, within `changing`, adds its row.

        Repeating this is harmless. Blocks. Raises StateError.
        """
        blobs, shelf = self._store.blobs, bundle_shelf(made.digest)
        blobs.put(shelf, made.content)
        blobs.put(shelf, made.weights)
        for name, part in made.model.manifest.parts.items():
            if name != WEIGHTS and not blobs.holds(shelf, part.sha256):
                blobs.put(shelf, blobs.read(bundle_shelf(source), part.sha256))

    async def values_limit(self, digest: str) -> int:
        """The most bytes that the values of a bundle take as a file. Raises Refusal, StateError."""
        return warm.limit(await asyncio.to_thread(self._manifest, digest))

    async def delete(self, digest: str) -> None:
        """Delete a bundle. Raises Refusal when a federation uses it or there is none, StateError."""
        used = await in_turn(lambda: self._delete(digest))
        if used is None:
            raise Refusal(
                "not-found", f"there is no bundle {digest}; `maskfleet bundle list` or GET /v1/bundles has them"
            )
        if used:
            first, more = ", ".join(used[:NAMED]), f" and {len(used) - NAMED} more" if len(used) > NAMED else ""
            raise Refusal("bundle-in-use", f"bundle {digest} is used by {first}{more}; delete these federations first")
        log.info("bundle %s is deleted by the operator", digest)

    def _delete(self, digest: str) -> list[str] | None:
        if self._store.metadata.added_at(digest) is None:  # a shelf that no row ever named is not touched
            return None
        with self._store.changing(bundle_shelf(digest), deletes=True):
            return self._store.metadata.delete_bundle(digest)

    def _manifest(self, digest: str) -> Manifest:
        if self._store.metadata.added_at(digest) is None:
            raise Refusal("not-found", f"there is no bundle {digest}; POST its manifest to /v1/bundles first")
        return read_manifest(self._store, digest)

    def _receipt(self, digest: str, checked: bool = False) -> BundleReceipt:
        """What is missing: parts of another size, and if `checked` those of another digest, each read once."""
        manifest, shelf, blobs = self._manifest(digest), bundle_shelf(digest), self._store.blobs
        due = {part.sha256: part.size for part in manifest.parts.values()}
        here = {sha256 for sha256, size in due.items() if blobs.size(shelf, sha256) == size}
        if checked:
            here = {sha256 for sha256 in here if blobs.holds(shelf, sha256)}
        missing = [name for name, part in manifest.parts.items() if part.sha256 not in here]
        return BundleReceipt(digest=digest, name=manifest.name, missing=sorted(missing))

    def _summary(self, digest: str, added_at: float) -> BundleSummary:
        users = self._store.metadata.users(digest)
        try:
            receipt, manifest = self._receipt(digest), self._manifest(digest)
        except StorageDamagedError as error:  # the others are listed
            return BundleSummary(digest=digest, added_at=added_at, federations=users, fault=str(error))
        return BundleSummary(
            digest=digest, name=manifest.name, added_at=added_at, missing=receipt.missing,
            federations=users, input=list(manifest.input.shape),
            target=manifest.target.kind, parameters=manifest.d, statistics=manifest.buffers_d,
            layers=len(manifest.layers), groups=len(manifest.groups), seed=manifest.seed,
            parts={name: part.size for name, part in manifest.parts.items()},
        )  # fmt: skip
