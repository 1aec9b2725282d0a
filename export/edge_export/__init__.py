"""The author's side: a PyTorch model becomes a bundle, a compacted model becomes ONNX. Needs torch to be called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_export.writer import export_bundle

__all__ = ["export_bundle"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can list `export` on a device without torch.
    if name == "export_bundle":
        from edge_export.writer import export_bundle

        return export_bundle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
