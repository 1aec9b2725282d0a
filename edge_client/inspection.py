"""`maskfleet bundle inspect` and `maskfleet payload inspect`: what a file holds, as a person reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from edge_client.bundle import MANIFEST, Bundle, Manifest, digest
from edge_client.errors import PayloadError
from edge_client.protocol.payload import FILE_HEADER_BYTES, decode

HEAD = 8  # values of an array that are shown


def bundle(folder: Annotated[Path, typer.Argument(help="A bundle's folder.")]) -> None:
    """Show what a bundle holds, and check its parts against their digests."""
    opened = Bundle.open(folder)
    _print_manifest(opened.manifest, digest((folder / MANIFEST).read_bytes()))
    for name in opened.manifest.parts:
        opened.part(name)
    typer.echo("all parts match their digests")


def payload(
    file: Annotated[Path, typer.Argument(help="A payload: an update, a downlink, a state.")],
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Parameters the method exchanges, to show bits per parameter.")
    ] = None,
) -> None:
    """Explain a payload: its size, its metadata, each array with its bytes and what they look like."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PayloadError(f"cannot read {file}: {error.strerror}; name a payload's file") from None
    content = decode(data, FILE_HEADER_BYTES)
    console = Console(highlight=False)
    arrays = sum(a.nbytes for a in content.arrays.values())
    console.print(f"[bold]{file.name}[/]  SHA-256 {digest(data)}")
    console.print(f"{len(data)} bytes: {arrays} in {len(content.arrays)} arrays, {len(data) - arrays} of header")
    if parameters is not None:
        console.print(f"{8 * len(data) / parameters:.4f} bits for each of {parameters} parameters")
    table = Table("array", "dtype", "shape", "bytes", "what it looks like", title="arrays", title_justify="left")
    for name, array in sorted(content.arrays.items()):
        shape = "x".join(map(str, array.shape)) or "scalar"
        table.add_row(name, str(array.dtype), shape, str(array.nbytes), _look(array))
    console.print(table)
    meta = Table("key", "value", title="metadata", title_justify="left")
    for key, value in sorted(content.meta.items()):
        meta.add_row(key, str(value))
    console.print(meta)


def _look(array: np.ndarray[Any, Any]) -> str:
    """One line about an array's values."""
    if not array.size:
        return "empty"
    if array.dtype == np.uint8:
        ones = int(np.unpackbits(array).sum())
        head = array.reshape(-1)[:HEAD].tobytes().hex(" ")
        return f"{head}{' ...' if array.size > HEAD else ''}; {ones / (8 * array.size):.1%} of the bits are ones"
    if array.dtype == np.bool_:
        return f"{array.mean():.1%} true"
    values = array.astype(np.float64)
    return f"{values.min():.6g} .. {values.max():.6g}, mean {values.mean():.6g}"


def _print_manifest(m: Manifest, address: str) -> None:
    console = Console(highlight=False)
    weights = "in weights.safetensors" if m.seed is None else f"from seed {m.seed}"
    console.print(f"[bold]{m.name}[/]  {address}")
    console.print(f"input {m.input.dtype}{list(m.input.shape)}, {m.classes} classes, loss {m.loss}")
    console.print(f"{m.d} parameters, {m.buffers_d} statistics; values {weights}")
    layer_of = {n: layer for layer in m.layers for n in (*layer.weights, *layer.biases)}
    table = Table("tensor", "shape", "from", "init", "trained", "layer", title="parameters", title_justify="left")
    for t in m.parameters:
        layer = layer_of.get(t.name)
        where = "" if layer is None else f"{layer.name} ({layer.kind})"
        init = f"{t.init.kind} {t.init.scale:.4g}"
        table.add_row(t.name, "x".join(map(str, t.shape)), str(t.offset), init, "yes" if t.trainable else "", where)
    console.print(table)
    groups = Table("channel group", "channels", title="groups that are compacted together", title_justify="left")
    for group in m.groups:
        groups.add_row(group.name, str(group.size))
    console.print(groups)
    parts = Table("part", "bytes", "SHA-256", title="parts", title_justify="left")
    for name, part in m.parts.items():
        parts.add_row(name, str(part.size), part.sha256[:16] + "...")
    console.print(parts)
