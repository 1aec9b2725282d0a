"""The author's side: a PyTorch model becomes a bundle. Needs torch."""

from edge_export.writer import export_bundle

__all__ = ["export_bundle"]
