"""Bundles in the blob store: where their manifests and parts lie, and how they are read back."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from coord_server.store import Store
from edge_client.bundle import WEIGHTS, Bundle, Manifest, Model, parse_manifest
from edge_client.errors import BundleError, StorageDamagedError


def bundle_shelf(digest: str) -> str:
    """Where a bundle's manifest and parts lie."""
    return f"bundles/{digest}"


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
