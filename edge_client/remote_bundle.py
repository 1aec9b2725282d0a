"""A bundle that fetches its parts when a backend asks for them, and keeps them.

Parts lie under the state folder by the bundle's digest, so a device downloads what its backend needs, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_client.bundle import MANIFEST, Bundle, Manifest, digest, parse_manifest
from edge_client.errors import BundleError
from edge_client.files import disk, write_whole
from edge_client.transport import Transport

MANIFEST_MOST = 64 << 20  # bytes; a manifest has one row a tensor


@dataclass(frozen=True)
class RemoteBundle(Bundle):
    """A bundle on the coordinator, cached in `folder`."""

    address: str
    transport: Transport

    def part(self, name: str) -> Path:
        """Path of a part, downloaded when it is not there or does not match. Raises BundleError."""
        entry, path = self.manifest.parts.get(name), self.folder / name
        if entry is not None and not (path.is_file() and digest(path.read_bytes()) == entry.sha256):
            what = f"fetching {name} of model {self.manifest.name!r}"
            self.transport.fetch_file(f"/v1/bundles/{self.address}/parts/{name}", entry, path, what)
        return super().part(name)


def open_remote(transport: Transport, address: str, cache: Path) -> RemoteBundle:
    """The bundle with digest `address`; only its manifest is fetched here. Raises BundleError."""
    folder = cache / address
    path = folder / MANIFEST
    if not (path.is_file() and digest(path.read_bytes()) == address):
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        data = transport.fetch(f"/v1/bundles/{address}", address, MANIFEST_MOST, "fetching the model's manifest")
        write_whole(path, data)
    manifest: Manifest = parse_manifest(path.read_bytes())
    if MANIFEST in manifest.parts:
        raise BundleError(f"bundle {address[:12]}... has a part named {MANIFEST}; export it again under another name")
    return RemoteBundle(manifest, folder, address, transport)
