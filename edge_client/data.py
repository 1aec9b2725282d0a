"""A device's data: one .npz file, checked against the bundle before anything trains on it.

Keys: `x` [n, *input.shape], `y` [n] integer labels; optional `x_test`, `y_test`. Without the latter, one fifth
of the samples, chosen by the seed, is kept for testing. Optional `group` [n]: samples of one group (a recording,
a writer's page) are never on both sides of that split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from edge_kernels import counter
from numpy.typing import NDArray

from edge_client.bundle import Manifest
from edge_client.errors import DataError


@dataclass(frozen=True)
class DeviceData:
    """Training and test samples of one device. `x` is [n, *input.shape] in the bundle's dtype, `y` int64[n]."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]


def check(manifest: Manifest, x: NDArray[Any], y: NDArray[Any], what: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """`x`, `y` in the bundle's dtypes. Raises DataError naming `what` and the value that does not fit."""
    if x.ndim == 0 or x.shape[1:] != manifest.input.shape:
        raise DataError(f"{what}: a sample has shape {x.shape[1:]}, the model takes {manifest.input.shape}")
    if y.shape != x.shape[:1]:
        raise DataError(f"{what}: {x.shape[0]} samples but labels of shape {y.shape}; give one label a sample")
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


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an .npz file by name. Raises DataError when it is not one."""
    advice = "write x and y with numpy.savez(path, x=..., y=...)"
    if not path.exists():
        raise DataError(f"there is no data file {path}; {advice}")
    if not is_zipfile(path):
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


def load(path: Path, manifest: Manifest, seed: int = 0) -> DeviceData:
    """Read and check a device's file. Raises DataError with what is wrong and what the bundle takes."""
    arrays = _read(path)
    missing = {"x", "y"} - arrays.keys()
    if missing:
        raise DataError(f"{path} lacks {sorted(missing)}; it has {sorted(arrays)}")
    x, y = check(manifest, arrays["x"], arrays["y"], str(path))
    if len(y) < 2:
        raise DataError(f"{path} holds {len(y)} samples; training needs at least 2")
    given = {"x_test", "y_test"} & arrays.keys()
    if len(given) == 1:
        lacks = {"x_test", "y_test"} - given
        raise DataError(f"{path} has {given.pop()} but no {lacks.pop()}; give both, or neither to have a fifth kept")
    if given:
        return DeviceData(x, y, *check(manifest, arrays["x_test"], arrays["y_test"], f"{path} (test)"))
    group = arrays.get("group", np.arange(len(y)))
    if group.shape != y.shape:
        raise DataError(f"{path}: `group` has shape {group.shape}; give one group a sample, shape {y.shape}")
    return split(x, y, group, seed)
