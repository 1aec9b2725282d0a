"""A user's own data: arrays of a file, of a Python function or of another package, a Hugging Face data set.

What is read is either one data set (`Samples`), which is then divided over devices, or what each device has
(`DeviceFiles`): the arrays of the .npz file that `maskfleet join --data` reads there. docs/data.md describes the forms.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from edge_bench.data import images
from edge_bench.data.images import Form
from edge_bench.data.sources import PARTS, Samples
from edge_client import authored, extras
from edge_client.data import DataFile, arrays_of, checked, finite
from edge_client.data import read as read_file
from edge_client.errors import ConfigError, DataError, suggestion
from edge_client.protocol.messages import Name

GROUP = "maskfleet.sources"
WHOLE = ("x", "y", "owner", "group", "is_test")
FACTORY = "a function that returns a data set's arrays"
RETURNS = (
    "a mapping with x, y and, if there are any, owner, group, is_test; the pair (x, y); or a mapping of each device's "
    "name to such a mapping of its own (x, y, group, x_val, y_val, x_test, y_test)"
)
_NAME = TypeAdapter(Name)


@dataclass(frozen=True)
class DeviceFiles:
    """What each device has, by its name, as in the file that it would join with."""

    devices: Mapping[str, DataFile]


def check_name(name: str, what: str) -> None:
    """Raise DataError unless a device can be called `name`."""
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise DataError(
            f"{what}: {name!r} cannot name a device; use at most 64 letters, digits, '.', '-' and '_', and begin with "
            "a letter or digit"
        ) from None


def _files(devices: Mapping[str, DataFile], what: str) -> DeviceFiles:
    """Each device's arrays. Raises DataError when the names are those of splits."""
    if len(devices) > 1 and {name.lower() for name in devices} <= PARTS:
        raise DataError(
            f"{what} has {', '.join(devices)}, which name parts of one data set and no devices; put all samples into "
            "one x and y, and mark test samples by `is_test`"
        )
    return DeviceFiles(devices)


# --- .npz


def read_npz(path: Path) -> Samples | DeviceFiles:
    """One file for all devices, or a folder with a file for each, called DEVICE.npz. Raises DataError."""
    if not path.is_dir():
        return whole(arrays_of(path), str(path))
    files = sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"the folder {path} holds no .npz file; name a file, or put DEVICE.npz files there")
    for file in files:
        check_name(file.stem, str(file))
    return _files({file.stem: read_file(file) for file in files}, f"the folder {path}")


def whole(arrays: Mapping[str, NDArray[Any]], what: str) -> Samples:
    """A data set from its arrays: x, y; optional `owner`, the device of each sample, `group`, kept together, `is_test`.

    Raises DataError naming what is missing, too long or unknown.
    """
    classes: tuple[str, ...] = ()
    if "y" in arrays:
        y, classes = numbered(arrays["y"])
        arrays = {**arrays, "y": y}
    checked(what, arrays, WHOLE)
    x, y = arrays["x"], arrays["y"]
    n = len(y)
    for key in ("owner", "group", "is_test"):
        if key in arrays and arrays[key].shape != (n,):
            raise DataError(f"{what}: `{key}` has shape {arrays[key].shape}; give one a sample, shape {(n,)}")
    for key in ("owner", "group"):
        if key in arrays and arrays[key].dtype.kind == "f" and (bad := ~np.isfinite(arrays[key])).any():
            raise DataError(f"{what}: `{key}` of sample {bad.argmax()} is {arrays[key][bad.argmax()]}; give each one")
    if "is_test" in arrays and not np.isin(arrays["is_test"], (0, 1)).all():
        raise DataError(f"{what}: `is_test` holds other values than true and false; give one truth value a sample")
    if "is_test" in arrays and len(np.unique(arrays["is_test"])) < 2:
        raise DataError(f"{what}: `is_test` marks no sample or every one; mark some, or leave it out")
    unit = np.unique(arrays["group"], return_inverse=True)[1] if "group" in arrays else np.arange(n)
    if "group" in arrays and "is_test" in arrays:
        marked = np.bincount(unit, arrays["is_test"]) / np.bincount(unit)
        if (cut := (marked[unit] > 0) & (marked[unit] < 1)).any():
            group = arrays["group"][cut.argmax()]
            raise DataError(f"{what}: `is_test` marks a part of group {group}; mark all of its samples, or none")
    owner, names = named(arrays.get("owner"), what)
    published = arrays["is_test"].astype(bool) if "is_test" in arrays else None
    return Samples(_narrow(x, what), y, unit.astype(np.int64), owner, names, published, classes=classes)


def numbered(y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Labels that are text as numbers, in the order of their names, and these; other labels as they are."""
    if y.dtype.kind not in "US":
        return y, ()
    found, numbers = np.unique(y.astype(str), return_inverse=True)
    return numbers.reshape(y.shape).astype(np.int64), tuple(found.tolist())


def _narrow(x: NDArray[Any], what: str) -> NDArray[Any]:
    """Floating-point samples as float32, others as they are. Raises DataError for other than finite numbers."""
    if x.dtype.kind not in "fiub":
        raise DataError(f"{what}: samples have dtype {x.dtype}; give numbers")
    return finite(x, "float32", what) if np.issubdtype(x.dtype, np.floating) else x


def named(owner: NDArray[Any] | None, what: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """The owners as numbers, with their names when they are not numbers already. Raises DataError."""
    if owner is None:
        return None, ()
    if np.issubdtype(owner.dtype, np.integer):
        if owner.min(initial=0) < 0:
            raise DataError(f"{what}: owner {owner.min()} is negative; number the devices from 0, or name them")
        return owner.astype(np.int64), ()
    found, numbers = np.unique(owner.astype(str), return_inverse=True)
    for name in found.tolist():
        check_name(name, f"{what}, owner")
    return numbers.astype(np.int64), tuple(found.tolist())


# --- Python


def call(place: str, arguments: Mapping[str, Any]) -> Samples | DeviceFiles:
    """What the user's function returns. Raises ConfigError, DataError, or AuthorError for its own exceptions."""
    return returned(authored.load(place, FACTORY), place, arguments)


def others() -> list[str]:
    """Sources of other packages, by name."""
    return list(extras.installed(GROUP))


def installed(name: str, arguments: Mapping[str, Any]) -> Samples | DeviceFiles:
    """The data set of another package. Raises as `call` does."""
    entry = extras.installed(GROUP)[name]
    with authored.theirs(f"data set {name!r} ({entry.value})"):
        factory = entry.load()
    return returned(factory, f"data set {name!r}", arguments)


def returned(factory: Callable[..., Any], place: str, arguments: Mapping[str, Any]) -> Samples | DeviceFiles:
    """The data set that the function returns, checked."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{place} cannot be called with arguments = {dict(arguments)}: {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    with authored.theirs(place):
        made = factory(**arguments)
    if isinstance(made, tuple) and len(made) == 2:
        made = dict(zip(("x", "y"), made, strict=True))
    if not isinstance(made, Mapping) or not made:
        raise DataError(f"{place} returned {_kind(made)}; return {RETURNS}")
    if all(isinstance(value, Mapping) for value in made.values()):
        devices = {}
        for name, arrays in made.items():
            check_name(str(name), place)
            what = f"{place}, device {str(name)!r}"
            devices[str(name)] = checked(what, _arrays(arrays, what))
        return _files(devices, place)
    if not {"x", "y"} <= made.keys():
        raise DataError(f"{place} returned a mapping with the keys {list(made)[:5]}; return {RETURNS}")
    return whole(_arrays(made, place), place)


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}" + (f" of {len(value)}" if hasattr(value, "__len__") else "")


def _arrays(found: Mapping[str, Any], what: str) -> dict[str, NDArray[Any]]:
    """Arrays, lists and tensors as arrays. Raises DataError for what is none."""
    arrays = {}
    for key, value in found.items():
        try:
            arrays[str(key)] = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors on another device
            raise DataError(f"{what}: {key} is no array ({authored.described(error)})") from None
        if arrays[str(key)].dtype == object and all(isinstance(v, str) for v in arrays[str(key)].flat):
            arrays[str(key)] = arrays[str(key)].astype(str)  # a column of pandas
        if arrays[str(key)].dtype == object:
            raise DataError(f"{what}: {key} is an array of objects; give numbers, all samples of one shape")
    return arrays


# --- Hugging Face


def read_hf(path: Path, features: str | None, label: str, owner: str | None, form: Form) -> Samples:
    """A folder that `Dataset.save_to_disk` wrote, or one with Parquet files (or one such file).

    Splits and files whose names begin with "test" are the publisher's test samples. Raises DataError naming the column.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError('data set "hf" needs Hugging Face\'s datasets; run: pip install datasets') from None
    datasets.disable_progress_bars()
    parts = _splits(path)
    table = datasets.concatenate_datasets(list(parts.values()))
    test = np.concatenate([np.full(len(part), name.startswith("test")) for name, part in parts.items()])
    if features is None:
        features = next((c for c in table.column_names if isinstance(table.features[c], datasets.Image)), "x")
    for key, column in (("features", features), ("label", label), *([("owner", owner)] if owner else [])):
        _check_column(table, key, column, path)
    y, classes = _labels(table, label)
    people, names = named(None if owner is None else np.asarray(table[owner][:]), f"{path}, {owner}")
    published = test if test.any() else None
    if isinstance(table.features[features], datasets.Image):
        column, rows = table.select_columns([features]), np.arange(len(table))
        first = column[0][features]

        def decode(wanted: NDArray[Any]) -> NDArray[np.float32]:
            rows = ((f"{path}, row {i}", column[int(i)][features]) for i in wanted)
            return images.stack(rows, len(wanted), form.of(first))

        return Samples(rows, y, rows, people, names, published, decode=decode, classes=classes)
    try:
        x = np.stack(table.with_format("numpy")[:][features])
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}, column {features!r}: samples are not all of one shape: {error}") from None
    if not np.issubdtype(x.dtype, np.number):
        raise DataError(f"{path}, column {features!r} holds {x.dtype}; write numbers with `map`, e.g. token ids")
    return Samples(_narrow(x, str(path)), y, np.arange(len(y)), people, names, published, classes=classes)


def _splits(path: Path) -> dict[str, Any]:
    """The data set's splits by name. Raises DataError when there is none, or none with samples."""
    import datasets

    parts: dict[str, Any]
    try:
        if path.is_dir() and not list(path.rglob("*.parquet")):
            found = datasets.load_from_disk(str(path))
            parts = dict(found) if isinstance(found, dict) else {"train": found}
        else:
            parts = _parquet(path)
    except IndexError:  # how load_from_disk fails on what was saved with no rows
        raise DataError(f"{path} holds no samples, or a split of it has none; save it without") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is neither a folder of save_to_disk nor one with Parquet files: {authored.described(error)}"
        ) from None
    if not any(len(part) for part in parts.values()):
        raise DataError(f"{path} holds no samples")
    return parts


def _check_column(table: Any, key: str, column: str, path: Path) -> None:
    """Raise DataError unless `table` has the column that the setting `key` names, with a value in every row."""
    if column not in table.column_names:
        raise DataError(
            f"{path} has no column {column!r}; set `{key}` to one of {', '.join(table.column_names)}"
            f"{suggestion(column, table.column_names)}"
        )
    empty = table.with_format("arrow")[:][column].is_null().to_numpy()
    if empty.any():
        raise DataError(
            f"{path}, column {column!r}: {empty.sum()} of {len(empty)} rows have no value, first row "
            f"{empty.argmax()}; take them out with `filter`"
        )


def _parquet(path: Path) -> dict[str, Any]:
    import datasets
    from pyarrow import parquet

    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    files = [file for file in files if parquet.read_metadata(file).num_rows]
    parts = {}
    for split, chosen in (
        ("train", [f for f in files if not f.stem.startswith("test")]),
        ("test", [f for f in files if f.stem.startswith("test")]),
    ):
        if chosen:
            with tempfile.TemporaryDirectory(prefix="maskfleet-parquet-") as cache:
                names = [str(file) for file in chosen]
                parts[split] = datasets.Dataset.from_parquet(names, cache_dir=cache, keep_in_memory=True)
    return parts


def _labels(table: Any, column: str) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The labels as numbers, with their names when the data set has names."""
    y = np.asarray(table.with_format("numpy")[:][column])
    known = getattr(table.features[column], "names", None)
    numbers, names = numbered(y.astype(str) if y.dtype == object else y)
    return numbers, names or tuple(known or ())
