"""Rebuilds the two bundles that `maskfleet demo` uses: ``python -m edge_export.demo_bundles`` (`make bundles`).

They are package data of `edge_bench`. A seed replaces the weights and `model.pt2` is left out: the bundles take a few
kilobytes, and the demo runs without torch. The models are defined here because `edge_export` may not import the
benchmarks.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from edge_client.bundle import Bundle
from edge_client.targets import Classification
from edge_export.writer import export_bundle

SEED = 2026
MODELS: dict[str, tuple[int, ...]] = {"digits": (64, 64, 32, 10), "har": (1152, 300, 100, 6)}


def build(name: str, folder: Path) -> Bundle:
    """Export the demo bundle `name` (a key of `MODELS`) to `folder`."""
    sizes = MODELS[name]
    parts: list[nn.Module] = []
    for inner, out in pairwise(sizes):
        parts += [nn.Linear(inner, out), nn.ReLU()]
    module = nn.Sequential(*parts[:-1])
    example, target = torch.zeros(2, sizes[0]), Classification(classes=sizes[-1])
    return export_bundle(module, example, folder, name=name, target=target, seed=SEED, torch_part=False)


def main() -> None:
    """Write every demo bundle beside the benchmarks' package."""
    spec = importlib.util.find_spec("edge_bench")
    if spec is None or spec.origin is None:
        raise SystemExit("edge_bench is not importable; run this in a checkout with `pip install -e .`")
    for name in MODELS:
        bundle = build(name, Path(spec.origin).parent / "bundles" / name)
        size = sum(p.stat().st_size for p in bundle.folder.iterdir())
        print(f"{name}: {bundle.manifest.d:,} parameters, {size:,} bytes in {len(bundle.manifest.parts) + 1} files")


if __name__ == "__main__":
    main()
