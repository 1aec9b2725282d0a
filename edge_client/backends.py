"""Training backends by name: which are installed, and which parts of a bundle they open.

No backend is imported here, because the coordinator uses this too. What a backend does is in `edge_client.training`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from edge_client import extras
from edge_client.bundle import Manifest
from edge_client.errors import ConfigError

DEFAULT_BACKEND = "onnxruntime"
PARTS = {
    "onnxruntime": ("train.onnx", "eval.onnx"),
    "torch": ("model.pt2", "model-eval.pt2"),
    "executorch": ("train.pte", "eval.pte"),
}
"""What this project's backends open. The parts that a third party's backend opens are known when it runs."""


def installed(backend: str, advice: str = "") -> EntryPoint:
    """The entry point of a backend. Raises ConfigError with the choices and `advice` when there is none."""
    found = extras.installed("maskfleet.trainers")
    if backend not in found:
        raise ConfigError(f"there is no training backend {backend!r}; choose one of {', '.join(sorted(found))}{advice}")
    return found[backend]


def check_parts(backend: str, manifest: Manifest) -> None:
    """Raise ConfigError when the bundle lacks a part that `backend` opens."""
    missing = sorted(set(PARTS.get(backend, ())) - manifest.parts.keys())
    if missing:
        raise ConfigError(
            f"training backend {backend!r} needs {', '.join(missing)} of bundle {manifest.name!r}, which has only "
            f"{', '.join(sorted(manifest.parts))}; export the bundle with it, or choose another backend"
        )
