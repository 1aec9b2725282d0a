"""`maskfleet bundle inspect` and `maskfleet payload inspect`: the content of a file in words and tables."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from edge_kernels.codecs import CodecError, describe
from edge_kernels.codecs.sets import popcount
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edge_client.bundle import Bundle, Manifest, digest
from edge_client.errors import ConfigError, PayloadError
from edge_client.named_bundles import bundle_folder
from edge_client.protocol.metrics import METRICS, split_metrics
from edge_client.protocol.payload import FILE_HEADER_BYTES, Meta, Payload, decode

HEAD = 8  # values of an array that are shown
NO_GROUPS = "no channel groups: no layer before the last uses a parameter directly as its weight"

AnyArray = np.ndarray[Any, Any]


def bundle(
    folder: Annotated[str, typer.Argument(help="A bundle's folder, or the name of a packaged bundle.")],
) -> None:
    """Show what a bundle holds, and check its parts against their digests."""
    opened = Bundle.open(bundle_folder(folder, Path()))
    _print_manifest(opened.manifest, opened.sha256)
    for name in opened.manifest.parts:
        opened.part(name)
    typer.echo("all parts match their digests")


def payload(
    file: Annotated[Path, typer.Argument(help="A payload: an update, a downlink, a state.")],
    parameters: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters the method exchanges, to show bits per parameter and sets' entropy."),
    ] = None,
) -> None:
    """Explain a payload: its size, its metadata in words, each array with its bytes and its codec's description."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; name a payload's file") from None
    content = decode(data, FILE_HEADER_BYTES)
    console = Console(highlight=False, emoji=False)
    arrays = sum(a.nbytes for a in content.arrays.values())
    console.print(f"[bold]{escape(file.name)}[/]  SHA-256 {digest(data)}", soft_wrap=True)
    console.print(f"{len(data)} bytes: {arrays} in {len(content.arrays)} arrays, {len(data) - arrays} of header")
    if parameters is not None:
        console.print(f"{8 * len(data) / parameters:.4f} bits for each of {parameters} parameters")
    for line in _words(dict(content.meta)):
        console.print(line, markup=False, soft_wrap=True)
    table = Table("array", "dtype", "shape", "bytes", "share", title="arrays", title_justify="left")
    if parameters is not None:
        table.add_column("bits per parameter")
    for name, array in sorted(content.arrays.items()):
        shape = "x".join(map(str, array.shape)) or "scalar"
        cells = [escape(name), str(array.dtype), shape, str(array.nbytes), f"{array.nbytes / len(data):.1%}"]
        if parameters is not None:
            cells.append(f"{8 * array.nbytes / parameters:.4f}")
        table.add_row(*cells)
    if content.arrays:
        console.print(table)
    for name, array in sorted(content.arrays.items()):
        console.print(f"{name}: {_explained(name, array, parameters)}", markup=False, soft_wrap=True)


def _words(meta: dict[str, Meta]) -> list[str]:
    """The metadata: sentences for an update's metrics and a reference, the rest as it is."""
    lines = []
    with suppress(PayloadError):
        _, m = split_metrics(Payload({}, meta))
        lines.append(f"trained on {m.samples} samples, mean loss {m.loss:g}")
        if m.test_samples:
            scores = f"score {m.score_before:g} before training, {m.score_after:g} after"
            lines.append(f"{scores}, on {m.test_samples} test samples")
        del meta[METRICS]
    if "reference" in meta:
        lines.append(f"changes to the reference mask {meta.pop('reference')} (start of the SHA-256 of its bits)")
    return [*lines, *(f"{key} = {value}" for key, value in sorted(meta.items()))]


def _explained(name: str, array: AnyArray, parameters: int | None) -> str:
    """One line: the header of the codec that the array's name ends in, or a summary of the values."""
    codec = name.partition(".")[2]  # with its parameter, which may have a point
    if codec.partition(":")[0] not in describe.names() or array.dtype != np.uint8:
        return _look(array)
    data = array.tobytes()
    d = 8 * array.shape[-1] if codec == "planes" and array.ndim == 2 else parameters
    misfit = ""
    try:
        try:
            found = describe.describe(codec, data, d)
        except CodecError as error:
            if d is None:
                raise
            found = describe.describe(codec, data)
            misfit = f"; not of {d} parameters: {error}"
    except CodecError as error:
        return f"codec {codec}, but {error}"
    parts = [f"codec {codec}", *(f"{key.replace('_', ' ')} {_figure(value)}" for key, value in found.items())]
    members, positions = found.get("members"), found.get("positions", parameters)
    if parameters is not None and isinstance(members, int) and isinstance(positions, int):
        parts.append(_against_entropy(members, positions, len(data)))
    return "; ".join(parts) + misfit


def _figure(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _against_entropy(members: int, positions: int, size: int) -> str:
    """A set's bytes beside the entropy of as many members at random positions."""
    rate = members / positions
    least = positions * -sum(p * math.log2(p) for p in (rate, 1 - rate) if p > 0) / 8
    said = f"entropy at rate {rate:.4g} is {least:.1f} bytes"
    if not least:
        return said
    return f"{said}, these are {abs(size / least - 1):.1%} {'above' if size >= least else 'below'}"


def _look(array: AnyArray) -> str:
    """One line about an array's values."""
    if not array.size:
        return "empty"
    if array.dtype == np.uint8:
        ones = popcount(array.reshape(-1))
        head = array.reshape(-1)[:HEAD].tobytes().hex(" ")
        return f"{head}{' ...' if array.size > HEAD else ''}; {ones / (8 * array.size):.1%} of the bits are ones"
    if array.dtype == np.bool_:
        return f"{array.mean():.1%} true"
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    others = f"; {array.size - finite.size} of {array.size} are not finite" if finite.size < array.size else ""
    if not finite.size:
        return others.removeprefix("; ")
    least, most, mean = float(finite.min()), float(finite.max()), float(finite.mean(dtype=np.float64))
    return f"least {least:.6g}, mean {mean:.6g}, greatest {most:.6g}{others}"


def _print_manifest(m: Manifest, address: str) -> None:
    console = Console(highlight=False, emoji=False)
    weights = "in weights.safetensors" if m.seed is None else f"from seed {m.seed}"
    console.print(f"[bold]{m.name}[/]  {address}")
    settings = ", ".join(f"{name} {value}" for name, value in m.target.model_dump(exclude={"kind"}).items())
    console.print(f"input {m.input.dtype}{list(m.input.shape)}, target {m.target.kind} ({settings})")
    console.print(f"{m.d} parameters, {m.buffers_d} statistics; values {weights}")
    layer_of = {n: layer for layer in m.layers for n in (*layer.weights, *layer.biases)}
    table = Table("tensor", "shape", "from", "values", "trained", "layer", title="parameters", title_justify="left")
    for t in m.parameters:
        layer = layer_of.get(t.name)
        where = "" if layer is None else f"{layer.name} ({layer.kind})"
        init = "stored" if m.seed is None else f"{t.init.kind} {t.init.scale:.4g}"
        table.add_row(t.name, "x".join(map(str, t.shape)), str(t.offset), init, "yes" if t.trainable else "", where)
    console.print(table)
    groups = Table("channel group", "channels", "made by", "read by", title="channels that leave together")
    groups.title_justify = "left"
    for group in m.groups:
        sides = [", ".join(dict.fromkeys(p.tensor for p in group.at(role))) for role in ("makes", "reads")]
        groups.add_row(group.name, str(group.size), *sides)
    console.print(groups)
    for line in m.stopped:
        console.print(f"no group: {line}", markup=False, soft_wrap=True)
    if not m.groups and not m.stopped:
        console.print(NO_GROUPS, soft_wrap=True)
    parts = Table("part", "bytes", "SHA-256", title="parts", title_justify="left")
    for name, part in m.parts.items():
        parts.add_row(name, str(part.size), part.sha256[:16] + "...")
    console.print(parts)
