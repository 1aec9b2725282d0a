"""A function in the author's Python file builds the model; here the model becomes a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from edge_client import authored
from edge_client.bundle import Bundle
from edge_client.errors import ConfigError
from edge_export.tables import InitScheme
from edge_export.writer import export_bundle

WHAT = "a function that returns the torch module"


def export_factory(
    place: str,
    shape: tuple[int, ...],
    out: Path,
    *,
    dtype: Literal["float32", "int64"] = "float32",
    target: Mapping[str, Any],
    seed: int | None = None,
    init: InitScheme = "he",
    name: str | None = None,
    torch_part: bool = True,
) -> Bundle:
    """The bundle of the module that the function at `place` builds, written to `out`; a sample has `shape`.

    PyTorch's generator starts from `seed`, or 0, so the same file gives the same weights. Raises ConfigError,
    AuthorError for an exception of the author's code, ModelError when the module cannot be a bundle.
    """
    build = authored.load(place, WHAT)
    torch.manual_seed(seed or 0)
    with authored.theirs(place):
        module = build()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"{place} returned a {type(module).__name__}; it must return a torch.nn.Module")
    example = torch.zeros((2, *shape), dtype=getattr(torch, dtype))
    return export_bundle(
        module,
        example,
        out,
        name=name or place.rpartition(":")[2],
        target=target,
        seed=seed,
        init=init,
        torch_part=torch_part,
    )
