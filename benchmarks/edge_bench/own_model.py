"""A bundle from the user's own Python file: `bundle = "model.py:build"`, exported once and found again by its content.

The address is a digest of the file, of the files beside it that it imports, of the weights files beside it (their
sizes and times), and of the settings. Exporting needs torch, opening what was exported before does not.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from edge_bench.bundles import can_export, into_cache, recipe
from edge_bench.data.own import DeviceFiles
from edge_bench.data.sources import Samples
from edge_client.bundle import MANIFEST, About, Bundle, ClassNames
from edge_client.errors import ConfigError, DataError, ModelError
from edge_client.measure.machine import installed
from edge_client.targets import Classification, Sequence

WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors"})


class ExportConfig(About):
    """The table `[export]`, for a `bundle` that is a function of a Python file. The data give what is left out."""

    input: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Shape of one sample; None: that of the data's samples."""
    dtype: Literal["float32", "int64"] | None = None
    """None: int64 for samples that are whole numbers, such as token ids, else float32."""
    target: str | None = None
    """None: classification for one whole number a sample, sequence for several, regression for others."""
    classes: Annotated[int, Field(ge=1)] | None = None
    """Number of labels; None: the model's outputs."""
    outputs: Annotated[int, Field(ge=1)] | None = None
    """Regression: numbers a sample; None: the model's outputs."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Draw the weights from this seed at the scale that methods on frozen weights need; None: the module's own."""
    init: Literal["he", "torch", "sign"] = "he"
    """How the seed draws weights."""
    class_names: ClassNames = ()
    """What the classes are called, in their order; empty: the data's names, if they have any."""


def settings(table: ExportConfig, data: Samples | DeviceFiles) -> dict[str, Any]:
    """The arguments of an export: shape, dtype, target, seed, init and what the author says of the samples."""
    if isinstance(data, DeviceFiles):
        arrays = next(iter(data.devices.values())).arrays
        x, y = arrays["x"][:1], arrays["y"]
    else:
        x, y = data.samples(np.arange(1)), data.y
    if x.ndim == 1 and table.input is None:
        raise DataError(f"samples have no axis, x has shape {y.shape[:1]}; give each a list of values, like x[:, None]")
    if y.ndim == 2 and y.shape[1] == 1 and np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels have shape {y.shape}; give one class a sample, shape {y.shape[:1]}")
    if table.target is None and y.ndim == 2 and y.shape[1] > 1 and (np.sort(y, axis=1) == np.eye(y.shape[1])[-1]).all():
        raise DataError("labels are one-hot; give y.argmax(axis=1), or say what they are with `[export]` target")
    whole = np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8
    kind = "regression" if y.dtype.kind not in "iub" else "classification" if y.ndim == 1 else "sequence"
    sizes = {k: n for k, n in (("classes", table.classes), ("outputs", table.outputs)) if n is not None}
    return {
        "shape": table.input or tuple(x.shape[1:]),
        "dtype": table.dtype or ("int64" if whole else "float32"),
        "target": {"kind": table.target or kind, **sizes},
        "seed": table.seed,
        "init": table.init,
        "about": About(**{k: getattr(table, k) for k in About.model_fields}),
    }


def open_module(place: str, table: ExportConfig, data: Samples | DeviceFiles, torch_part: bool = False) -> Bundle:
    """The bundle of the module that the function at `place` builds, for these data.

    Raises ConfigError when torch is missing and the model was not exported before, else as an export does.
    """
    file = Path(place.rpartition(":")[0])
    if not file.is_file():
        raise ConfigError(f"bundle = {place!r}: there is no file {file.resolve()}")
    arguments = {**settings(table, data), "torch_part": torch_part}
    in_data = () if isinstance(data, DeviceFiles) else data.classes
    function = place.rpartition(":")[2]
    known = () if table.class_names else in_data
    address = sha256(repr((function, arguments, known, recipe(), installed(("torch",)).get("torch", ""))).encode())
    for source in sources(file):
        address.update(source.read_bytes())
    for weights in sorted(f for f in file.parent.iterdir() if f.suffix in WEIGHTS):
        about = weights.stat()
        address.update(repr((weights.name, about.st_size, about.st_mtime_ns)).encode())

    def build(folder: Path) -> None:
        from edge_export.factories import export_factory

        print(f"exporting {os.path.normpath(place)} ...", file=sys.stderr, flush=True)
        try:
            _named(export_factory(place, out=folder, **arguments), known)
        except ModelError as error:
            raise ModelError(f"{error}{_advice(table, arguments, str(error))}") from error

    def check() -> None:
        if not can_export():
            raise ConfigError(
                f"bundle = {place!r} is exported with PyTorch; run: pip install 'maskfleet[author]', or try a packaged "
                "bundle that takes such samples, like --bundle digits for 8x8 images"
            )

    return with_warnings(into_cache(f"{file.stem}-{function}-{address.hexdigest()[:12]}", build, check))


def with_warnings(bundle: Bundle) -> Bundle:
    """The bundle, once what its export warned of is printed."""
    for line in bundle.warnings:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    return bundle


def _advice(table: ExportConfig, made: Mapping[str, Any], fault: str) -> str:
    """What to add to the exporter's `fault`, when it may come from what the data were taken for."""
    kind = made["target"]["kind"]
    if table.dtype is None and made["dtype"] == "int64" and "does not run" in fault:
        return '; whole numbers go in as int64, as ids do: for measurements set `[export]` dtype = "float32"'
    if table.input is None and len(made["shape"]) == 1 and "does not run" in fault:
        return (
            f"; a sample is {made['shape'][0]} values: for another shape set `[export]` input, as input = [3, 32, 32]"
        )
    if table.target is None and kind == "classification" and "do not suit" in fault:
        return '; labels need an output for each class, and numbers to predict `[export]` target = "regression"'
    return ""


def _named(bundle: Bundle, classes: tuple[str, ...]) -> None:
    """Give an exported bundle the data's names of its classes, if it has as many."""
    m = bundle.manifest
    if classes and isinstance(m.target, Classification | Sequence) and m.target.classes == len(classes):
        (bundle.folder / MANIFEST).write_bytes(m.model_copy(update={"class_names": classes}).to_bytes())


def command(place: str, table: ExportConfig, bundle: Bundle, about: Path | None) -> list[str]:
    """The `maskfleet export` that writes the bundle of a simulation, with the file `about`."""
    m, default = bundle.manifest, ExportConfig()
    options: dict[str, Any] = {"--input": ",".join(map(str, m.input.shape))}
    if m.input.dtype != "float32":
        options["--dtype"] = m.input.dtype
    if m.target.kind != "classification":
        options["--target"] = m.target.kind
    options |= {f"--{k}": v for k in ("seed", "init") if (v := getattr(table, k)) != getattr(default, k)}
    if about is not None:
        options["--about"] = about
    return ["maskfleet", "export", place, *(str(word) for pair in options.items() for word in pair), "-o", "bundle"]


def sources(file: Path) -> list[Path]:
    """The file and those of its folder that it imports, directly or through one another."""
    found, todo = dict[Path, None](), [file.resolve()]
    while todo:
        current = todo.pop()
        if current not in found:
            found[current] = None
            todo += [path for name in _imported(current) for path in _beside(file.resolve().parent, name)]
    return sorted(found)


def _imported(file: Path) -> Iterator[str]:
    """The first names of what a file imports; nothing when it is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _beside(folder: Path, name: str) -> list[Path]:
    if (folder / f"{name}.py").is_file():
        return [folder / f"{name}.py"]
    return sorted((folder / name).rglob("*.py")) if name and (folder / name).is_dir() else []
