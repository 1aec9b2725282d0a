"""Options that the suite's commands share, and which graphs, masks and shares they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_bench.command_line import known_names
from edge_bench.compaction.masks import KINDS, MaskKind
from edge_bench.compaction.zoo import FAMILIES, ZOO, Case
from edge_client.errors import ConfigError

Json = Annotated[Path | None, typer.Option("--json", help="Write the rows here.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only this graph; may be given again.")]
Family = Annotated[str | None, typer.Option(help=f"Only this family: {', '.join(FAMILIES)}.")]
Masks = Annotated[str, typer.Option(help="Kinds of mask, by comma.")]
Kept = Annotated[str, typer.Option(help="Shares of channels that stay, by comma.")]
Runs = Annotated[int, typer.Option(min=0, help="Timed calls of each model; 0: no timing.")]
Bundles = Annotated[Path | None, typer.Option(help="Keep exported graphs here. [default: a scratch folder]")]


def chosen(names: list[str] | None, family: str | None) -> list[Case]:
    """The named cases, else those of the family, else all. Raises ConfigError."""
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"there is no family {family!r}; the suite has {', '.join(FAMILIES)}")
    if unknown := sorted(set(names or ()) - ZOO.keys()):
        raise ConfigError(f"there are no graphs {unknown}; the suite has {', '.join(ZOO)}")
    return [ZOO[name] for name in names] if names else list(FAMILIES[family] if family else ZOO.values())


def cuts(masks: str, kept: str) -> list[tuple[MaskKind, float]]:
    """Every kind of mask with every share. Raises ConfigError."""
    kinds = known_names(masks, "--masks", KINDS, "there is no mask")
    try:
        shares = [float(share) for share in kept.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0.0 < share <= 1.0 for share in shares):
        raise ConfigError(f"--kept {kept!r}: give shares above 0 and up to 1, with commas between")
    return [(kind, share) for kind in KINDS if kind in kinds for share in shares]
