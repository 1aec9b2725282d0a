"""What is measured side by side: variants of one model. A variant is a name and a file; the suffix names the engine.

A bundle gives those that `MAKERS` lists. A maker writes its file into a folder, or raises MaskfleetError with why it
cannot: the report then has that sentence. A file that is given is a variant by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edge_client.artifacts import writer
from edge_client.artifacts.making import Limits, make
from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.compaction.tuning import clock
from edge_client.errors import ConfigError, DataError, MaskfleetError
from edge_client.measure import engines
from edge_client.methods.shared.shrinking import counts, strongest
from edge_client.methods.shared.units import whole
from edge_client.task import Personal


@dataclass(frozen=True)
class Variant:
    """A model file that can be run. `note` describes it, where the name does not."""

    name: str
    file: Path
    note: str = ""


@dataclass(frozen=True)
class Source:
    """What variants are made of: a bundle, the personal values (None: the bundle's own), samples to prove equality."""

    bundle: Bundle
    personal: Personal | None
    samples: NDArray[Any]
    noise: bool = True
    """Whether the samples are made up."""

    @property
    def dense(self) -> Personal:
        """The bundle's own values, nothing masked."""
        model = self.bundle.model()
        return Personal(model.parameters, model.buffers)

    @property
    def masked(self) -> Personal:
        """The personal values. Raises ConfigError without any."""
        if self.personal is None:
            raise ConfigError("needs a mask: give --personal FILE, or --keep SHARE to keep the largest units")
        return self.personal


Maker = Callable[[Source, Path], str]
"""Writes the variant's file; returns a note."""


def _dense(source: Source, file: Path) -> str:
    write_dense(source.bundle, source.dense, file, source.samples)
    return ""


def _masked(source: Source, file: Path) -> str:
    personal = source.masked
    write_dense(source.bundle, personal, file, source.samples)
    return f"{1 - np.count_nonzero(personal.parameters) / personal.parameters.size:.0%} of the parameters are zero"


def _compact(source: Source, file: Path) -> str:
    report = write_personal(source.bundle, source.masked, file, source.samples)
    near = f"outputs within {report.max_abs_diff:.1g} of the masked model's"
    return f"{report.parameters_compact} of {report.parameters_dense} parameters, {near}"


def _aligned(source: Source, file: Path) -> str:
    masked = source.masked
    measure = clock(source.samples[:1])
    report = write_personal(source.bundle, masked, file, source.samples, align="auto", clock=measure)
    return f"{report.parameters_compact} of {report.parameters_dense} parameters, widths that run fastest here"


def _smallest(source: Source, folder: Path) -> Path:
    """The compact model, else the dense one; made in `folder` unless it is there."""
    compact, dense = folder / "compact.onnx", folder / "dense.onnx"
    with suppress(MaskfleetError):
        if not compact.is_file():
            _compact(source, compact)
        return compact
    if not dense.is_file():
        _dense(source, dense)
    return dense


def _artifact(kind: str) -> Maker:
    """A maker of another form of the smallest model there is, compact or dense."""

    def write(source: Source, file: Path) -> str:
        base = _smallest(source, file.parent)
        anything = Limits(agreement=0.0, error=np.inf)
        limits, target = anything if source.noise else Limits(), source.bundle.manifest.target
        proof = make(base.read_bytes(), kind, file, source.samples, limits, target=target)
        if source.noise and not writer(kind).exact:
            return f"of {base.stem}, calibrated on noise: its speed is real, its outputs are not"
        same = "" if proof.agreement is None else f"the same label for {proof.agreement:.1%}, "
        return f"of {base.stem}, {same}error {proof.error_rms:.2g} standard deviations on {proof.samples} samples"

    return write


MAKERS: Mapping[str, tuple[str, Maker]] = {
    "dense": (".onnx", _dense),
    "masked": (".onnx", _masked),
    "compact": (".onnx", _compact),
    "aligned": (".onnx", _aligned),
    "int8": (".onnx", _artifact("int8")),
    "pte": (".pte", _artifact("pte")),
    "pte-int8": (".pte", _artifact("pte-int8")),
}
"""By name: the end of its file's name, and what makes it."""


def made(source: Source, folder: Path, names: Sequence[str] = tuple(MAKERS)) -> tuple[list[Variant], dict[str, str]]:
    """The variants that can be made, and why the others cannot."""
    found, failed = [], {}
    for name in names:
        if name not in MAKERS:
            raise ConfigError(f"there is no variant {name!r}; choose some of {', '.join(MAKERS)}")
        end, make = MAKERS[name]
        file = folder / f"{name}{end}"
        absent = engines.missing(engines.engine_of(file))
        if absent:
            failed[name] = f"its engine is {absent}"
            continue
        try:
            found.append(Variant(name, file, make(source, file)))
        except MaskfleetError as error:
            failed[name] = str(error)
    return found, failed


def read_personal(path: Path, bundle: Bundle) -> Personal:
    """Personal values from a safetensors file: `parameters` float32[d], and if there are any `buffers`; or a `mask`
    bool[d] or uint8[d] alone, which is put on the bundle's own values. Raises DataError.
    """
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is no safetensors file of personal values: {error}; name one") from None
    model, d = bundle.model(), bundle.manifest.d
    mask = arrays["mask"] != 0 if "mask" in arrays else None
    parameters, buffers = arrays.get("parameters", model.parameters), arrays.get("buffers", model.buffers)
    if "parameters" not in arrays and mask is None:
        raise DataError(f"{path} has {sorted(arrays)}; give `parameters` or `mask`, {d} values in the manifest's order")
    for name, value, size in (
        ("parameters", parameters, d),
        ("mask", mask, d),
        ("buffers", buffers, len(model.buffers)),
    ):
        if value is not None and value.shape != (size,):
            raise DataError(
                f"{path}: {name} has shape {list(value.shape)}, bundle {bundle.manifest.name!r} has [{size}]; "
                "name the bundle that the values are of"
            )
    parameters = parameters.astype(np.float32)
    if mask is not None:
        parameters = np.where(mask, parameters, np.float32(0))
    return Personal(parameters, buffers.astype(np.float32), mask)


def keep_largest_units(bundle: Bundle, share: float) -> Personal:
    """The bundle's own values with this share of each channel group's units kept, those of largest norm.

    A stand-in for a trained mask: it has a trained mask's shape and speed, not its accuracy. Raises ConfigError.
    """
    model = bundle.model()
    units = whole(bundle.manifest)
    kept = strongest(units, model.parameters, [ceil(share * n) for n in counts(units)])
    return kept.applied(model.parameters, model.buffers)
