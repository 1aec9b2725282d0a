"""A device's data: one .npz file, checked against the bundle before anything trains on it.

Keys: `x` [n, *input.shape] and `y` [n, ...], labels as the bundle's target has them; optional `x_val`, `y_val` and
`x_test`, `y_test`. A missing part is cut from the training samples, chosen by the seed: a fifth for testing, then a
tenth for validation; a part given with 0 samples stays empty. Optional `group` [n]: samples of one group (a recording,
a writer's page) never fall on both sides of a cut.

Where the bundle has a normalisation of raw samples, `fit` applies it, unless the file has ``normalised = True``.

`read` checks what needs no bundle, before a device joins; `fit` checks the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import Input, Manifest
from edge_client.errors import DataError, suggestion

TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1
SAMPLES = ("x", "x_val", "x_test")
KEYS = (*SAMPLES, "y", "y_val", "y_test", "group", "normalised")
CHECKED = 1000  # samples, at most about twice as many, whose scale is looked at
FAR, NEAR = 10.0, 0.02  # times the model's scale: values beyond the first, or differences below the second, are named
ADVICE = "write x and y with numpy.savez(path, x=..., y=...)"
FEWEST = 20  # training samples below which none are kept for validation

DataPart = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class DeviceData:
    """Training, validation and test samples of one device. The last two may be empty.

    `x` is [n, *input.shape] in the bundle's dtype, `y` as the bundle's target has it: int64[n] for classes.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    x_val: NDArray[Any]
    y_val: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]

    def part(self, name: DataPart) -> tuple[NDArray[Any], NDArray[Any]]:
        """The samples and labels of one part."""
        parts = {
            "train": (self.x, self.y),
            "validation": (self.x_val, self.y_val),
            "test": (self.x_test, self.y_test),
        }
        return parts[name]


def check(manifest: Manifest, x: NDArray[Any], y: NDArray[Any], what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """`x`, `y` in the bundle's dtypes. Raises DataError naming `what` and the value that does not fit."""
    if x.ndim == 0 or x.shape[1:] != manifest.input.shape:
        turned = sorted(x.shape[1:]) == sorted(manifest.input.shape)
        advice = "transpose its axes: a reshape would mix its values" if turned else "reshape them"
        raise DataError(
            f"{what}: a sample has shape {x.shape[1:]}, the model takes {manifest.input.shape}; {advice}, "
            "or use a model that takes such samples"
        )
    _check_lengths(x, y, what)
    y = manifest.target.check(y, what)
    return numbers(manifest.input, x, what), y


def numbers(takes: Input, x: NDArray[Any], what: str) -> NDArray[Any]:
    """Samples [n, ...] in the dtype that the model takes. Raises DataError naming `what` and the sample at fault."""
    if x.dtype.kind not in "fiub":
        raise DataError(f"{what}: samples have dtype {x.dtype}; give numbers")
    if takes.dtype == "int64" and x.dtype.kind == "f":
        raise DataError(f"{what}: samples have dtype {x.dtype}, the model takes whole numbers; give integers")
    x = finite(x, takes.dtype, what)
    if (bounds := takes.bounds()) is not None and (bad := (x < bounds[0]) | (x >= bounds[1])).any():
        at = tuple(np.argwhere(bad)[0])
        low, end = (bound[at[1:]] for bound in bounds)
        raise DataError(f"{what}: sample {at[0]} holds the id {x[at]}; the model's table has {low}..{end - 1}")
    return x


def finite(x: NDArray[Any], dtype: str, what: str) -> NDArray[Any]:
    """Samples [n, ...] as `dtype`. Raises DataError naming `what` and the first sample that is not finite."""
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype)
    if not np.isfinite(x).all():
        at = int(np.argwhere(~np.isfinite(x))[0][0])
        raise DataError(f"{what}: sample {at} holds NaN, infinity or a value beyond {dtype}; clean the data")
    return x


def _check_lengths(x: NDArray[Any], y: NDArray[Any], what: str) -> None:
    if x.ndim == 0 or y.shape[:1] != x.shape[:1]:
        raise DataError(f"{what}: samples of shape {x.shape} but labels of shape {y.shape}; give one label a sample")


def split(
    group: NDArray[Any], seed: int, part: str, share: float, must: bool = True
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which samples stay and which go to `part` ("test", "validation"), bool[n] each; `group` has one entry a sample.

    Whole groups go in an order drawn from `seed`, up to the first that would exceed `share` of the samples. If that is
    the first of all, the smallest one goes when the part `must` have samples, and none otherwise. No part takes the
    only group: one that must have samples raises DataError, another stays empty.
    """
    ids, counts = np.unique(group, return_counts=True)
    if must and len(ids) < 2:
        raise DataError(
            f"all samples belong to one group, so none can be kept for the {part} part; give x_{part} and y_{part}"
        )
    order = counter.permutation(counter.key(seed, f"{part} split"), len(ids))
    chosen = order[np.cumsum(counts[order]) <= max(int(len(group) * share), 1)]
    if must and not len(chosen):
        chosen = np.array([counts.argmin()])
    elif not must and len(chosen) == len(ids):
        chosen = chosen[:0]
    gone = np.isin(group, ids[chosen])
    return ~gone, gone


def arrays_of(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an .npz file by name. Raises DataError when it is not one."""
    try:
        with path.open("rb") as file:
            archive = is_zipfile(file)
    except FileNotFoundError:
        raise DataError(f"there is no data file {path}; {ADVICE}") from None
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror or error}; {ADVICE}") from None
    if not archive:
        raise DataError(f"{path} is not a readable .npz file: it is not a zip archive of arrays; {ADVICE}")
    found, name = dict[str, NDArray[Any]](), ""
    try:
        with np.load(path, allow_pickle=False) as z:
            for name in z:
                found[name] = z[name]
    except Exception as error:  # zipfile, its decompressors and numpy's parser raise nearly anything on a bad file
        if "Object arrays" in str(error):  # numpy's, of a table of mixed columns
            advice = f"save {name}.astype('float32'), or names of classes as {name}.astype('str')"
            raise DataError(f"{path}: {name} holds Python objects; {advice}") from None
        raise DataError(f"{path} is not a readable .npz file ({type(error).__name__}: {error}); {ADVICE}") from None
    for name, array in found.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path} holds {name!r}, which is not an array; {ADVICE}")
    return found


@dataclass(frozen=True)
class DataFile:
    """The arrays of a device's file, which errors call `what`: x and y are present and equally long."""

    what: str
    arrays: Mapping[str, NDArray[Any]]


def read(path: Path) -> DataFile:
    """Read a device's file, and check what needs no bundle. Raises DataError with what is wrong."""
    return checked(str(path), arrays_of(path))


def checked(what: str, arrays: Mapping[str, NDArray[Any]], keys: Collection[str] = KEYS) -> DataFile:
    """A device's arrays, checked as far as that needs no bundle; `what` names them in errors. Raises DataError."""
    missing = {"x", "y"} - arrays.keys()
    if missing:
        raise DataError(f"{what} lacks {' and '.join(sorted(missing))}; it has {', '.join(sorted(arrays))}: {ADVICE}")
    if unknown := sorted(arrays.keys() - set(keys)):
        raise DataError(f"{what} holds {unknown}; known are {', '.join(keys)}{suggestion(unknown[0], keys)}")
    y = arrays["y"]
    _check_lengths(arrays["x"], y, what)
    if y.dtype.kind not in "fiub":
        raise DataError(f"{what}: labels have dtype {y.dtype}; number the classes 0, 1, 2, ...")
    if len(y) < 2:
        held = "1 sample" if len(y) else "no samples"
        raise DataError(f"{what} holds {held}; training needs at least 2: give this device more, or leave it out")
    for part in ("val", "test"):
        names = {f"x_{part}", f"y_{part}"}
        given = names & arrays.keys()
        if len(given) == 1:
            (lacks,) = names - given
            raise DataError(f"{what} has {given.pop()} but no {lacks}; give both, or neither")
        if given:
            x = arrays[f"x_{part}"]
            _check_lengths(x, arrays[f"y_{part}"], f"{what} ({part})")
            if x.shape[1:] != arrays["x"].shape[1:]:
                raise DataError(
                    f"{what}: a sample of x_{part} has shape {x.shape[1:]}, one of x {arrays['x'].shape[1:]}; "
                    "give both in the shape that the model takes"
                )
    if "group" in arrays and arrays["group"].shape != y.shape[:1]:
        shape = arrays["group"].shape
        raise DataError(f"{what}: `group` has shape {shape}; give one group a sample, shape {y.shape[:1]}")
    _marked(arrays, what)
    return DataFile(what, arrays)


def _marked(arrays: Mapping[str, NDArray[Any]], what: str) -> bool:
    """Whether a file says that its samples are normalised already. Raises DataError unless that is one truth value."""
    mark = np.asarray(arrays.get("normalised", False))
    if mark.size != 1 or mark.dtype.kind not in "biuf" or mark.item() not in (0, 1):
        raise DataError(f"{what}: `normalised` is {str(mark)[:60]!r}; give True or False, one value that is no text")
    return bool(mark.all())


def normalised(arrays: Mapping[str, NDArray[Any]], takes: Input, what: str) -> Mapping[str, NDArray[Any]]:
    """The arrays of a file with its samples as the model takes them; those that do not fit stay as they are.

    Raises DataError naming `what` when the file's mark is not one truth value.
    """
    marked, how = _marked(arrays, what), takes.normalisation
    if how is None or marked:
        return arrays
    raw = {n: a for n, a in arrays.items() if n in SAMPLES and a.shape[1:] == takes.shape and a.dtype.kind in "fiub"}
    return {**arrays, **{name: how.apply(array) for name, array in raw.items()}}


def doubts(arrays: Mapping[str, NDArray[Any]], x: NDArray[Any], takes: Input, what: str) -> Iterator[str]:
    """Reasons to doubt that the samples suit the model, one sentence each; `what` names the file.

    `arrays` are as the file has them, `x` [n, *shape] some of the samples as the model takes them.
    """
    if takes.normalisation is None and takes.between is None and "normalised" in arrays:
        mark = "normalised" if _marked(arrays, what) else "not normalised"
        yield (
            f"{what}: its samples are marked as {mark}, but the bundle has no normalisation, so they are used as they "
            "stand; prepare those of all devices alike"
        )
    off = _off_scale(x[:: max(len(x) // CHECKED, 1)].astype(np.float64), takes)
    if off is not None:
        yield f"{what}: as the model takes them, samples lie between {x.min():.4g} and {x.max():.4g}; {off}"


def _off_scale(x: NDArray[np.float64], takes: Input) -> str | None:
    """What scale the model is made for, and what to do, when `x` is far from it.

    None when `x` is near, or the bundle gives no scale.
    """
    if not x.size:
        return None
    if takes.between is not None:
        low, high = takes.between
        width, span = high - low, float(np.ptp(x))
        far = 2.0 * float(np.abs(x - (low + high) / 2.0).max()) > FAR * width
        if far or 0.0 < span < NEAR * width:
            return f"it is made for {low:.4g} to {high:.4g}: give them on that scale, such as images divided by 255"
    if takes.normalisation is not None:
        size, spread = (float(np.sqrt(np.square(v).mean())) for v in (x, x.std(axis=0)))
        if size > FAR or 0.0 < spread < NEAR:
            return (
                "it is made for a mean of 0 and a deviation of 1: give raw samples on the scale of its normalisation, "
                f"which begins with mean {takes.normalisation.mean[0]:.4g} and std {takes.normalisation.std[0]:.4g}"
            )
    return None


def fit(found: DataFile, manifest: Manifest, seed: int = 0) -> DeviceData:
    """A file's samples as the bundle takes them. Raises DataError with what is wrong and what the bundle takes.

    A file without a test part gives up a fifth of its samples for one. A file without a validation part then gives up
    a tenth of the remaining training samples, unless they are fewer than `FEWEST` or no group is that small.
    """
    what, arrays = found.what, normalised(found.arrays, manifest.input, found.what)
    x, y = check(manifest, arrays["x"], arrays["y"], what)
    group = arrays.get("group", np.arange(len(y)))
    if "x_test" in arrays:
        test = check(manifest, arrays["x_test"], arrays["y_test"], f"{what} (test)")
    else:
        try:
            stay, gone = split(group, seed, "test", TEST_SHARE)
        except DataError as error:
            raise DataError(f"{what}: {error}") from None
        test, x, y, group = (x[gone], y[gone]), x[stay], y[stay], group[stay]
    if "x_val" in arrays:
        validation = check(manifest, arrays["x_val"], arrays["y_val"], f"{what} (validation)")
    elif len(y) < FEWEST:
        validation = x[:0], y[:0]
    else:
        stay, gone = split(group, seed, "validation", VALIDATION_SHARE, must=False)
        validation, x, y = (x[gone], y[gone]), x[stay], y[stay]
    return DeviceData(x, y, *validation, *test)
