"""Training backends by name: which there are here, and which parts of a bundle ours open.

Nothing of a backend is imported: the coordinator asks this too. What a backend does is in `edge_client.training`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from edge_client.bundle import Manifest
from edge_client.errors import ConfigError

DEFAULT_BACKEND = "onnxruntime"
PARTS = {"onnxruntime": ("train.onnx", "eval.onnx"), "torch": ("model.pt2",)}
"""What our own backends open. A third party's is not known before it runs."""


def installed(backend: str, advice: str = "") -> EntryPoint:
    """The backend of this name, not loaded. Raises ConfigError, with the choices and `advice`, when there is none."""
    found = {e.name: e for e in entry_points(group="maskfleet.trainers")}
    if backend not in found:
        raise ConfigError(f"there is no training backend {backend!r}; choose one of {sorted(found)}{advice}")
    return found[backend]


def check_parts(backend: str, manifest: Manifest) -> None:
    """Raise ConfigError when the bundle lacks a part that `backend` opens."""
    missing = sorted(set(PARTS.get(backend, ())) - manifest.parts.keys())
    if missing:
        raise ConfigError(
            f"training backend {backend!r} needs {missing} of bundle {manifest.name!r}, which has only "
            f"{sorted(manifest.parts)}; export the bundle with it, or choose another backend"
        )
