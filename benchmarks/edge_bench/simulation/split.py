"""`maskfleet data split`: the devices of a simulation as files, so that real devices take part with the same data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_bench import advice, own_model, toml_text
from edge_bench.command_line import check_new_folder, filling
from edge_bench.data import datasets
from edge_bench.simulation.file import prepare, read_simulation
from edge_client.authored import is_place
from edge_client.data import DeviceData

ABOUT = "about.toml"


def split(
    config: Annotated[Path, typer.Argument(help="A simulation's TOML file; its table [data] is what counts.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An empty or a new folder for DEVICE.npz files.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's `seed`.")] = None,
) -> None:
    """Write each device's data of a simulation as the file that `maskfleet join --data` reads.

    The classes' names, and what raw samples went through or else their range, are written beside them, for `maskfleet
    export --about`.
    """
    check_new_folder(out)
    checked = read_simulation(config, methods=advice.ALONE, seed=seed)  # nothing is trained: any method does
    bundle, divided = prepare(checked)
    about: dict[str, Any] = {}
    if names := bundle.manifest.class_names or divided.classes:
        about["class_names"] = names
    m = bundle.manifest
    if divided.normalisation is not None:
        about["normalisation"] = divided.normalisation.model_dump()
    elif ends := m.input.between or _ends(divided.devices):
        about["between"] = ends
    with filling(out):
        paths = datasets.write(divided.devices, out, divided.normalised)
        if about:
            (out / ABOUT).write_text(toml_text.dumps(about), "utf-8")
    first = next(iter(paths))
    typer.echo(f"wrote {len(paths)} files to {out}; on a device:")
    typer.echo(f"maskfleet join URL --token TOKEN --data {shlex.quote(str(paths[first]))} --device {first}")
    if divided.normalised and divided.normalisation is None:
        typer.echo("the samples are normalised, and how cannot be said: the models take normalised samples alone")
    if not any(len(d.x_val) for d in divided.devices.values()):
        typer.echo("no device has validation samples, so each ends with the global model; [data] validation = 0.1")
    if not is_place(checked.bundle):
        if (m.class_names, m.input.normalisation) != (names, divided.normalisation) and about:
            typer.echo(f"{out / ABOUT} has what the bundle {m.name!r} does not say: {', '.join(about)}")
        return
    typer.echo(f"the model, with what {ABOUT} says of its samples and classes:" if about else "the model:")
    typer.echo(shlex.join(own_model.command(checked.bundle, checked.export, bundle, out / ABOUT if about else None)))


def _ends(devices: Mapping[str, DeviceData]) -> tuple[float, float] | None:
    """The lowest and the highest value of the training samples; None when they are ids or all alike."""
    found = [d.x for d in devices.values() if d.x.dtype.kind == "f" and d.x.size]
    low = min((float(x.min()) for x in found), default=0.0)
    high = max((float(x.max()) for x in found), default=0.0)
    return (low, high) if low < high else None
