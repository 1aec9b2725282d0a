"""A device's data: one .npz file, checked against the bundle before anything trains on it.

Keys: `x` [n, *input.shape], `y` [n] integer labels; optional `x_test`, `y_test`. Without the latter, one fifth
of the samples, chosen by the seed, is kept for testing. Optional `group` [n]: samples of one group (a recording,
a writer's page) are never on both sides of that split.

What can be known without a bundle is checked by `read`, so before a device joins; the rest by `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import Manifest
from edge_client.errors import DataError


@dataclass(frozen=True)
class DeviceData:
    """Training, validation and test samples of one device. Both of the last two may be empty.

    `x` is [n, *input.shape] in the bundle's dtype, `y` what the bundle's target has: int64[n] for classes.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    x_val: NDArray[Any]
    y_val: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]

    def part(self, name: Literal["train", "validation", "test"]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The samples and labels of one part."""
        parts = {
            "train": (self.x, self.y),
            "validation": (self.x_val, self.y_val),
            "test": (self.x_test, self.y_test),
        }
        return parts[name]


def check(manifest: Manifest, x: NDArray[Any], y: NDArray[Any], what: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """`x`, `y` in the bundle's dtypes. Raises DataError naming `what` and the value that does not fit."""
    if x.ndim == 0 or x.shape[1:] != manifest.input.shape:
        raise DataError(f"{what}: a sample has shape {x.shape[1:]}, the model takes {manifest.input.shape}")
    _check_lengths(x, y, what)
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{what}: labels have dtype {y.dtype}; give integers 0..{manifest.classes - 1}")
    bad = (y < 0) | (y >= manifest.classes)
    if bad.any():
        i = int(np.argmax(bad))
        raise DataError(f"{what}: label {y[i]} at index {i} is outside 0..{manifest.classes - 1}")
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_) or np.iscomplexobj(x):
        raise DataError(f"{what}: samples have dtype {x.dtype}; give numbers")
    x = np.ascontiguousarray(x, dtype=manifest.input.dtype)
    if not np.isfinite(x).all():
        raise DataError(
            f"{what}: sample {int(np.argwhere(~np.isfinite(x))[0][0])} holds NaN or infinity; clean the data"
        )
    return x, y.astype(np.int64)


def _check_lengths(x: NDArray[Any], y: NDArray[Any], what: str) -> None:
    if x.ndim == 0 or y.shape != x.shape[:1]:
        raise DataError(f"{what}: samples of shape {x.shape} but labels of shape {y.shape}; give one label a sample")


def split(x: NDArray[Any], y: NDArray[np.int64], group: NDArray[Any], seed: int) -> DeviceData:
    """Whole groups go to the test side, in an order drawn from `seed`, until it holds a fifth of the samples.

    When every group is larger than that the smallest one goes. Raises DataError when there is only one group.
    """
    ids, member, counts = np.unique(group, return_inverse=True, return_counts=True)
    if len(ids) < 2:
        raise DataError("all samples are of one group, so none can be kept for testing; give x_test and y_test")
    order = counter.permutation(counter.key(seed, "test split"), len(ids))
    chosen = order[np.cumsum(counts[order]) <= max(len(y) // 5, 1)]
    test = np.isin(member, chosen if len(chosen) else [counts.argmin()])
    return DeviceData(x[~test], y[~test], x[test], y[test])


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an .npz file by name. Raises DataError when it is not one."""
    advice = "write x and y with numpy.savez(path, x=..., y=...)"
    try:
        with path.open("rb") as file:
            archive = is_zipfile(file)
    except FileNotFoundError:
        raise DataError(f"there is no data file {path}; {advice}") from None
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror or error}; {advice}") from None
    if not archive:
        raise DataError(f"{path} is not a readable .npz file: it is no zip archive of arrays; {advice}")
    try:
        with np.load(path, allow_pickle=False) as z:
            found = {name: z[name] for name in z}
    except Exception as error:  # zipfile, its decompressors and numpy's parser raise nearly anything on a bad file
        raise DataError(f"{path} is not a readable .npz file ({type(error).__name__}: {error}); {advice}") from None
    for name, array in found.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path} holds {name!r}, which is not an array; {advice}")
    return found


@dataclass(frozen=True)
class DataFile:
    """The arrays of a device's file: x and y are there and fit each other, whatever the bundle."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]


def read(path: Path) -> DataFile:
    """Read a device's file, and check what needs no bundle. Raises DataError with what is wrong."""
    arrays = _arrays(path)
    missing = {"x", "y"} - arrays.keys()
    if missing:
        raise DataError(f"{path} lacks {sorted(missing)}; it has {sorted(arrays)}")
    y = arrays["y"]
    _check_lengths(arrays["x"], y, str(path))
    if len(y) < 2:
        raise DataError(f"{path} holds {len(y)} samples; training needs at least 2")
    given = {"x_test", "y_test"} & arrays.keys()
    if len(given) == 1:
        lacks = {"x_test", "y_test"} - given
        raise DataError(f"{path} has {given.pop()} but no {lacks.pop()}; give both, or neither to have a fifth kept")
    if given:
        _check_lengths(arrays["x_test"], arrays["y_test"], f"{path} (test)")
    elif "group" in arrays and arrays["group"].shape != y.shape:
        shape = arrays["group"].shape
        raise DataError(f"{path}: `group` has shape {shape}; give one group a sample, shape {y.shape}")
    return DataFile(path, arrays)


def fit(found: DataFile, manifest: Manifest, seed: int = 0) -> DeviceData:
    """A file's samples as the bundle takes them. Raises DataError with what is wrong and what the bundle takes."""
    path, arrays = found.path, found.arrays
    x, y = check(manifest, arrays["x"], arrays["y"], str(path))
    if "x_test" in arrays:
        return DeviceData(x, y, *check(manifest, arrays["x_test"], arrays["y_test"], f"{path} (test)"))
    return split(x, y, arrays.get("group", np.arange(len(y))), seed)
