"""`maskfleet compact`: masked values become a small model, without a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from edge_client.align import Align
from edge_client.bundle import Bundle, stored_model
from edge_client.compaction.personal import write_personal
from edge_client.compaction.tuning import clock
from edge_client.data import fit, read
from edge_client.errors import ConfigError
from edge_client.named_bundles import bundle_folder
from edge_client.task import Personal


def compact(
    bundle: Annotated[str, typer.Argument(help="The model's bundle: a folder, or the name of a packaged one.")],
    values: Annotated[
        Path, typer.Argument(help="The masked values: a safetensors file with every tensor of the bundle by name.")
    ],
    out: Annotated[Path, typer.Option(help="Where the small model goes, an ONNX file.")],
    align: Annotated[
        Align, typer.Option(help="How wide its layers are: by a rule, as masked, or measured here.")
    ] = "rule",
    data: Annotated[
        Path | None, typer.Option(help="Samples to check on, an .npz file; needed where a model reads integers.")
    ] = None,
) -> None:
    """Cut a masked model down to what its mask leaves, checked against the masked model.

    A masked value is a zero.
    """
    opened = Bundle.open(bundle_folder(bundle, Path()))
    manifest = opened.manifest
    model = stored_model(manifest, values, "write it with safetensors, float32, one tensor for each of the bundle's")
    if data is None and manifest.input.dtype != "float32":
        raise ConfigError("this model reads integers; give samples to check on with --data")
    samples = None if data is None else fit(read(data), manifest).x
    sample = np.zeros((1, *manifest.input.shape), np.float32) if samples is None else samples[:1]
    personal = Personal(model.parameters, model.buffers, model.parameters != 0)
    report = write_personal(
        opened, personal, out, samples, align=align, clock=clock(sample) if align == "auto" else None
    )
    for name, (whole, left) in report.layers.items():
        print(f"{name}: {left} of {whole} channels")
    for line in report.stopped:
        print(f"stays: {line}")
    print(f"{report.parameters_dense} -> {report.parameters_compact} parameters; model in {out}")
