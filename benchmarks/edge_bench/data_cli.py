"""`maskfleet data split`: the devices of a simulation as files, so that real devices take part with the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_bench import datasets
from edge_bench.cli import open_simulation
from edge_client.errors import ConfigError

CLASSES = "classes.txt"


def split(
    config: Annotated[Path, typer.Argument(help="A simulation's TOML file; its table [data] is what counts.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An empty or a new folder for DEVICE.npz files.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's `seed`.")] = None,
) -> None:
    """Write each device's data of a simulation as the file that `maskfleet join --data` reads."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name an empty or a new folder")
    checked, bundle, devices = open_simulation(config, seed=seed)
    try:
        paths = datasets.write(devices, out)
        found = datasets.read(checked.data, bundle.manifest.input.shape)
        if names := getattr(found, "classes", ()):
            (out / CLASSES).write_text("".join(f"{name}\n" for name in names), "utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    first = next(iter(paths))
    typer.echo(f"wrote {len(paths)} files to {out}; on a device:")
    typer.echo(f"maskfleet join URL --token TOKEN --data {paths[first]} --device {first}")
