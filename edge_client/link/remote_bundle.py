"""A bundle on the coordinator: parts are fetched when a backend asks for them, checked, and kept.

Parts lie under the state folder by the bundle's digest, so a device downloads what its backend needs, once. Nothing is
read before its size is known to be in proportion to the model, and no model before its parameters are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_client.bundle import MANIFEST, MAX_MANIFEST, Bundle, Manifest, digest, parse_manifest
from edge_client.errors import BundleError, PayloadError
from edge_client.files import digest_of, disk, make_folder, replace, write_whole
from edge_client.graph.check import check_graph
from edge_client.link.remote import Remote

MAX_PARAMETERS = 1 << 25  # of one model, statistics included: 134 MB of float32, of which training needs several
SMALL = 64 << 20  # bytes of any part or payload beside the model's values
BYTES_PER_VALUE = 16  # of a part or payload: four float32 vectors of the model's size


@dataclass(frozen=True)
class RemoteBundle(Bundle):
    """A bundle on the coordinator, cached in `folder`."""

    address: str
    remote: Remote

    def part(self, name: str) -> Path:
        """Path of a part, downloaded when it is missing or does not match. Raises BundleError, UnreachableError."""
        entry, path = self.manifest.parts.get(name), self.folder / name
        if entry is None or (path.is_file() and digest_of(path) == entry.sha256):
            return super().part(name)
        if entry.size > most_bytes(self.manifest):
            raise BundleError(
                f"part {name} of model {self.manifest.name!r} has {entry.size} bytes, for this model at most "
                f"{most_bytes(self.manifest)} are accepted; export the bundle again"
            )
        partial = path.with_name(f"{name}.partial")
        what = f"fetching {name} of model {self.manifest.name!r}"
        self.remote.fetch_file(f"/v1/bundles/{self.address}/parts/{name}", entry, partial, what)
        if name.endswith(".onnx"):
            check_graph(partial, name, self.manifest.input.shape)
        replace(partial, path)
        return path


def open_remote(remote: Remote, address: str, cache: Path, max_parameters: int = MAX_PARAMETERS) -> RemoteBundle:
    """The bundle with digest `address`; only its manifest is fetched here. Raises BundleError, UnreachableError."""
    folder = cache / address
    path = folder / MANIFEST
    with disk(path):
        data = path.read_bytes() if path.is_file() else b""
    if digest(data) != address:
        make_folder(folder)
        data = remote.fetch(f"/v1/bundles/{address}", MAX_MANIFEST, address, "fetching the model's manifest")
        write_whole(path, data)
    manifest = parse_manifest(data)
    if manifest.d + manifest.buffers_d > max_parameters:
        raise BundleError(
            f"model {manifest.name!r} has {manifest.d} parameters and {manifest.buffers_d} statistics, this device "
            f"accepts {max_parameters}; give --max-parameters if it has the memory"
        )
    return RemoteBundle(manifest, folder, address, remote)


def most_bytes(manifest: Manifest) -> int:
    """The most bytes that a part or a payload of this model may have."""
    return SMALL + BYTES_PER_VALUE * (manifest.d + manifest.buffers_d)


def check_downlink(manifest: Manifest, size: int) -> None:
    """Raise PayloadError when a downlink of `size` bytes is out of proportion to the model."""
    if size > most_bytes(manifest):
        raise PayloadError(
            f"the coordinator announces a payload of {size} bytes, for model {manifest.name!r} at most "
            f"{most_bytes(manifest)} are accepted; its method and this model do not fit together"
        )
