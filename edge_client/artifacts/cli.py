"""`maskfleet artifact`: a personal model in the form of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from edge_client import card
from edge_client.artifacts.making import Limits, make
from edge_client.data import normalised, read
from edge_client.errors import BundleError, ConfigError
from edge_client.runtimes.onnx import open_onnx


def artifact(
    model: Annotated[Path, typer.Argument(metavar="PERSONAL.onnx", help="A personal model.")],
    kind: Annotated[str, typer.Option(help="pte (ExecuTorch), int8 (ONNX Runtime) or pte-int8, or another installed.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the artifact goes.")],
    data: Annotated[
        Path | None, typer.Option(help="The device's .npz file: int8 is calibrated on half of it, proved on the rest.")
    ] = None,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="int8: least share of equal labels.")] = 0.95,
    error: Annotated[
        float, typer.Option(min=0, help="int8: largest RMS error of an output, in its standard deviations.")
    ] = 0.25,
) -> None:
    """Write a personal model for another engine, once its outputs are shown to be the model's."""
    try:
        content = model.read_bytes()
    except OSError as fault:
        raise ConfigError(f"cannot read {model}: {fault.strerror}; name a personal.onnx") from None
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"-o {out} is not a file in an existing folder; name one")
    samples = None if data is None else taken(content, data)
    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status(f"{kind}: a deep network takes minutes") as status:
        proof = make(
            content,
            kind,
            out,
            samples,
            Limits(agreement, error),
            lambda line: status.update(Text(f"{kind}: {line}")),
        )
    same = "" if proof.agreement is None else f"the same label for {proof.agreement:.1%}, "
    typer.echo(
        f"{out}: {proof.bytes_artifact:,} bytes, of a model of {proof.bytes_model:,}; on {proof.samples} samples {same}"
        f"the worst output is off by {proof.error_rms:.2g} of its standard deviations (at most {proof.error_std:.2g})"
    )


def taken(model: bytes, data: Path) -> NDArray[Any]:
    """The samples x [n, ...] of a device's file as `model` takes them: normalised by its metadata.

    Raises BundleError, DataError.
    """
    entries = open_onnx(model, advice="name a personal.onnx", refused=BundleError).get_modelmeta().custom_metadata_map
    arrays = read(data).arrays
    if not card.has_card(entries):
        return arrays["x"]
    return normalised(arrays, card.read(entries, "the model").input, str(data))["x"]
