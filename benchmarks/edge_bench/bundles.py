"""Bundles by name: built by `pretrain` on first use, then found in a cache folder.

The cache is `~/.cache/maskfleet/bundles`, or the folder that $MASKFLEET_BUNDLES names. A bundle's folder there ends in
a digest of the code that builds it, so that changed code builds it again. Building needs torch (extra `author`) and,
for pre-trained weights, the data; opening a built one needs neither.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from edge_client.bundle import MANIFEST, Bundle
from edge_client.errors import BundleError, ConfigError
from edge_client.files import disk
from edge_client.named_bundles import packaged

NAMES = (
    "mlp-har",
    "mlp-har-binary",
    "mlp-mnist",
    "mlp-mnist04",
    "mlp-signs",
    "cnn-mnist",
    "cnn-fashion",
    "cnn-femnist",
    "cnn-femnist-pretrained",
    "cnn-emnist",
    "lenet-cifar10",
    "lenet-cifar10-he",
    "vgg9-mnist",
    "vgg9-femnist",
    "vgg9-cifar10",
    "resnet20-cifar10",
    "resnet20-cifar100",
    "resnet56-cifar10",
    "mobilenetv2-cifar10",
    "vit-cifar10",
    "lstm-shakespeare",
    "lstm-shakespeare-small",
    "mobilenetv2-imagenet",
    "squeezenet-imagenet",
)
"""What `pretrain` builds; docs/models.md describes each."""
REVISIONS = {"mlp-mnist04": 2, "cnn-femnist-pretrained": 2}
"""Raised when the weights of a bundle change; 1 of all others. 2: each processor trains the same weights."""
CODE = (
    "edge_bench.pretrain",
    "edge_bench.data.sources",
    "edge_bench.models",
    "edge_export",
    "edge_client.bundle",
    "edge_client.targets",
    "edge_client.graph",
    "edge_client.compaction",
    "edge_client.narrow",
    "edge_client.training",
    "edge_kernels.channels",
    "edge_kernels.counter",
)
"""The packages and modules that decide what a bundle holds: its weights, its graphs and its channel groups."""
UNSEEN = {"cnn-femnist-pretrained": ("femnist", 57)}
"""Pre-trained bundles that have seen a data set, test samples too: its name, and how many of its first owners they have
not seen."""


def cache_folder() -> Path:
    """Where built bundles are kept."""
    return Path(os.environ.get("MASKFLEET_BUNDLES") or Path.home() / ".cache" / "maskfleet" / "bundles")


def open_named(name: str) -> Bundle:
    """The bundle `name` of `NAMES`, built now unless the cache has it.

    Raises BundleError for an unknown name, ConfigError when torch is missing, DataError when the data is.
    """
    if name not in NAMES:
        raise BundleError(f"no bundle is named {name!r}; there are {', '.join(NAMES)}")

    def check() -> None:
        if not can_export():
            raise ConfigError(f"bundle {name!r} is built with PyTorch; run: pip install 'maskfleet[author]'")

    def make(folder: Path) -> None:
        from edge_bench.pretrain import build

        build(name, folder)

    return into_cache(f"{name}-{recipe()}", make, check)


def is_named(name: str) -> bool:
    """Whether a bundle of this name is packaged or built on demand."""
    return name in NAMES or name in packaged()


def can_export() -> bool:
    """Whether PyTorch is installed."""
    return find_spec("torch") is not None


def into_cache(name: str, build: Callable[[Path], None], check: Callable[[], None]) -> Bundle:
    """The bundle in the cache's folder `name`; when there is none, `check` may refuse and `build` writes it."""
    folder = cache_folder() / name
    if (folder / MANIFEST).is_file():
        return Bundle.open(folder)
    check()
    with disk(folder, "set MASKFLEET_BUNDLES to another folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as fresh:
            made = Path(fresh) / "bundle"
            build(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not (folder / MANIFEST).is_file():
                    raise
    return Bundle.open(folder)


def recipe() -> str:
    """Twelve hex digits of everything that decides a built bundle's bytes but PyTorch itself."""
    files: list[Path] = []
    for spec in filter(None, map(find_spec, CODE)):
        folders = spec.submodule_search_locations
        files += [Path(spec.origin or "")] if folders is None else sorted(Path(next(iter(folders))).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
