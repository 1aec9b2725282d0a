"""What `maskfleet bench` measures: a bundle's variants, or model files side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.bench.variants import Source, Variant, keep_largest_units, made, read_personal
from edge_client.bundle import Bundle
from edge_client.data import DeviceData, fit, read
from edge_client.errors import ConfigError, suggestion
from edge_client.measure.engines import batch, free_axes, sample_of
from edge_client.named_bundles import bundle_path, packaged


@dataclass(frozen=True)
class Subject:
    """What is measured: variants, why others were not made, one sample's shape (with a batch of 1) and dtype.

    `bundle` and `data` are None for model files, `data` also for a bundle that is measured on noise.
    """

    name: str
    variants: Sequence[Variant]
    failed: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: str
    bundle: Bundle | None = None
    data: DeviceData | None = None


def find_subject(
    models: Sequence[str],
    personal: Path | None,
    keep: float | None,
    data: Path | None,
    shape: tuple[int, ...] | None,
    wanted: Sequence[str],
    scratch: Path,
) -> Subject:
    """A bundle's `wanted` variants, or model files. Raises ConfigError, BundleError, DataError."""
    places = [bundle_path(model) for model in models]
    folders = [m for m in places if m.is_dir()]
    if not folders:
        for model in places:
            if not model.exists():
                names = packaged()
                known = f"model files, a bundle's folder, or one of the bundles {', '.join(names)}"
                raise ConfigError(f"{model} is not there; name {known}{suggestion(str(model), names)}")
        if personal is not None or keep is not None or data is not None:
            raise ConfigError("--personal, --keep and --data go with a bundle's folder; these are model files")
        return _of_files(places, shape)
    if len(models) > 1:
        raise ConfigError(f"{folders[0]} is a bundle; give it alone, or several model files")
    if shape is not None:
        raise ConfigError("--shape goes with model files; a bundle says the shape of its input")
    return _of_bundle(folders[0], personal, keep, data, wanted, scratch)


def _of_files(models: Sequence[Path], asked: tuple[int, ...] | None) -> Subject:
    """Model files side by side. Raises ConfigError."""
    names, notes = distinct(models), []
    shape, dtype = sample_of(models[0], asked)
    for model in models:
        other, its = sample_of(model, asked)
        if (other, its) != (shape, dtype):
            raise ConfigError(
                f"{model} takes {its}{list(other)} and {models[0]} {dtype}{list(shape)} (a free axis counts as 1); "
                "measure models of one input side by side, the others apart"
            )
        free = [] if asked is not None else free_axes(model)
        notes.append(f"its input's free axes {free} have size 1 here; --shape gives them another" if free else "")
    variants = list(map(Variant, names, models, notes))
    return Subject(", ".join(names), variants, {}, shape, dtype)


def _of_bundle(
    folder: Path, personal: Path | None, keep: float | None, data: Path | None, wanted: Sequence[str], scratch: Path
) -> Subject:
    """The `wanted` variants of a bundle, made in `scratch`. Raises ConfigError, BundleError, DataError."""
    if personal is not None and keep is not None:
        raise ConfigError("--personal and --keep both say the mask; give one of them")
    bundle = Bundle.open(folder)
    m = bundle.manifest
    values = None
    if personal is not None:
        values = read_personal(personal, bundle)
    elif keep is not None:
        values = keep_largest_units(bundle, keep)
    given = None if data is None else fit(read(data), m)
    samples = batch((64, *m.input.shape), m.input.dtype) if given is None else given.x
    variants, failed = made(Source(bundle, values, samples, noise=given is None), scratch, wanted)
    if not variants:
        raise ConfigError(
            f"no variant of {folder} can be made: {'; '.join(f'{k}: {why}' for k, why in failed.items())}"
        )
    return Subject(m.name, variants, failed, (1, *m.input.shape), m.input.dtype, bundle, given)


def distinct(models: Sequence[Path]) -> list[str]:
    """A name for each file, the shortest that no other has: its stem, its name, or the end of its path.

    Raises ConfigError for a file that is given twice.
    """
    whole = [model.resolve() for model in models]
    for path in whole:
        if whole.count(path) > 1:
            raise ConfigError(f"{path} is given twice; name each file once")
    ends = [[path.stem, *("/".join(path.parts[-n:]) for n in range(1, len(path.parts) + 1))] for path in whole]

    def free(name: str, mine: list[str]) -> bool:
        return all(name not in others for others in ends if others is not mine)

    return [next(name for name in mine if free(name, mine)) for mine in ends]
