"""`maskfleet export`: a function in the author's Python file builds the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edge_client.errors import ConfigError
from edge_client.files import disk
from edge_export.executorch.lowering import check_installed
from edge_export.executorch.parts import add_parts
from edge_export.factories import SILENT, export_factory, read_about


def _check_folder(out: Path) -> None:
    """Raise ConfigError when `out` is a file, or lies below one."""
    there = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ConfigError(f"-o {out}: {there} is a file; name an empty or a new folder")


def export(
    place: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Function that returns the torch module.")],
    input_: Annotated[str, typer.Option("--input", help="Shape of one sample, e.g. 1152 or 1,28,28.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write the bundle to.")],
    target: Annotated[
        str, typer.Option(help="What the model predicts: classification, sequence (a label per step) or regression.")
    ] = "classification",
    classes: Annotated[int | None, typer.Option(help="Number of labels; the model's outputs when left out.")] = None,
    outputs: Annotated[
        int | None, typer.Option(help="Regression: numbers per sample; the model's outputs when left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the weights from this seed instead of storing them.")] = None,
    init: Annotated[Literal["he", "torch", "sign"], typer.Option(help="How the seed draws weights.")] = "he",
    dtype: Annotated[Literal["float32", "int64"], typer.Option(help="Type of one input value.")] = "float32",
    name: Annotated[str | None, typer.Option(help="The bundle's name; the file's when left out.")] = None,
    about: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Class names, the scale of samples; see docs/export.md."),
    ] = None,
    torch_part: Annotated[bool, typer.Option(help="Add model.pt2, which the PyTorch backend needs.")] = True,
    executorch: Annotated[
        bool, typer.Option("--executorch", help="Add train.pte and eval.pte, which the ExecuTorch backend needs.")
    ] = False,
    executorch_batch: Annotated[int, typer.Option(min=2, help="The most samples of a batch they run.")] = 64,
) -> None:
    """Export a PyTorch model as a bundle that devices train without PyTorch."""
    try:
        shape = tuple(int(n) for n in input_.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--input {input_!r} is not a shape; write positive numbers with commas, e.g. 1,28,28")
    sizes = {k: n for k, n in (("classes", classes), ("outputs", outputs)) if n is not None}
    _check_folder(out)
    said = SILENT if about is None else read_about(about)
    if executorch:
        check_installed()
    with disk(out, "name another folder with -o"):
        bundle = export_factory(
            place,
            shape,
            out,
            dtype=dtype,
            target={"kind": target, **sizes},
            seed=seed,
            init=init,
            name=name,
            torch_part=torch_part,
            about=said,
            progress=typer.echo,
        )
    if executorch:
        bundle = add_parts(bundle, most=executorch_batch, progress=typer.echo)
    m = bundle.manifest
    typer.echo(f"{m.name}: {m.d:,} parameters; maskable layers: {len(m.layers)}, channel groups: {len(m.groups)}")
    typer.echo(f"target {', '.join(f'{k} {v}' for k, v in m.target.model_dump().items())}")
    for part, entry in m.parts.items():
        typer.echo(f"  {part:20} {entry.size:>12,} bytes")
    typer.echo(f"written to {bundle.folder}")
    for line in m.stopped:
        typer.echo(f"no channel group: {line}")
    if not m.groups:
        typer.echo("no channel group was found: methods that prune whole channels refuse this model")
    maskable = {w for layer in m.layers for w in layer.weights}
    if whole := [t.name for t in m.parameters if len(t.shape) > 1 and t.name not in maskable]:
        typer.echo(f"no method masks {', '.join(whole)}: only linear, convolution and LSTM layers are maskable")
    for line in bundle.warnings:
        typer.echo(line)
