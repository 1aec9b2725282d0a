"""Reading published data sets: samples, labels, who made each sample, and the publisher's own test part.

Nothing is downloaded: the files must be at the given path, in the folder $MASKFLEET_DATA, or in `shared/data` beside
the checkout. `own` reads a user's own, `partition` divides either over devices.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError, DataError

FILES: Mapping[str, str] = {
    "har": "har/ucihar_raw.npz",
    "mnist": "mnist",
    "fashion-mnist": "fashion-mnist",
    "cifar10": "cifar10/cifar10_15k_5k.npz",
    "cifar100": "cifar100/cifar100_9k_2k.npz",
    "femnist": "femnist/femnist_105writers.npz",
    "shakespeare": "shakespeare/shakespeare_roles.jsonl.gz",
}
PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev"})
"""Names of parts of a data set, which are no names of devices."""
# What the pre-trained ResNets expect of red, green and blue; all CIFAR images are normalised so.
CIFAR_MEAN, CIFAR_DEVIATION = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)
CHARACTERS = "\n !&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 73 characters of Shakespeare's roles; a character's id is its place here."""
WINDOW = 80  # characters of a sample


@dataclass(frozen=True)
class Samples:
    """A data set: `x` float32[n, ...] or int64[n, steps], `y` int64[n] or as the target has it.

    `owner` int64[n] is who made each sample, None when unknown; `names` are the owners' names when they are not
    numbers. Samples of one `unit` int64[n] (a recording) stay on one side of every split. `published` bool[n] marks the
    publisher's own test samples. In `sequential` data an owner's samples follow one another in time. With `decode`, `x`
    holds what samples are made from, such as indices of image files; `decode` makes a device's samples when they are
    needed. `classes` are the labels' names when they are not numbers.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    unit: NDArray[np.int64]
    owner: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    published: NDArray[np.bool_] | None = None
    sequential: bool = False
    decode: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    classes: tuple[str, ...] = ()

    def samples(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The samples of these rows, [n, ...]."""
        return self.x[rows] if self.decode is None else self.decode(self.x[rows])


def find(name: str, path: Path | None) -> Path:
    """The data set's file or folder. Raises DataError naming every place where it is not."""
    file = FILES[name]
    if path is not None:
        tried = [path, path / file, path / Path(file).name]
    else:
        roots = [Path(os.environ["MASKFLEET_DATA"])] if "MASKFLEET_DATA" in os.environ else []
        roots += [Path(__file__).resolve().parents[4] / "shared" / "data", Path("..") / "shared" / "data"]
        tried = [root / file for root in roots]
    for candidate in tried:
        if candidate.exists() and (candidate.is_file() or "." not in file):
            return candidate
    raise DataError(f"data set {name!r} is not at {', '.join(map(str, tried))}; give its path or set MASKFLEET_DATA")


def _arrays(path: Path, what: str, *keys: str) -> tuple[NDArray[Any], ...]:
    """The arrays `keys` of an .npz file. Raises DataError naming `what` the file should be."""
    try:
        with np.load(path, allow_pickle=False) as z:
            return tuple(z[k] for k in keys)
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} is not the {what} archive (keys {', '.join(keys)}): {error}") from None


def read_har(path: Path) -> Samples:
    """UCI HAR's raw windows, 9 x 128 values each, by person; the units are continuous recordings."""
    x, y, person, recording = _arrays(path, "UCI HAR", "x", "y", "subject", "segment")
    flat = x.astype(np.float32).reshape(len(x), -1)
    return Samples(flat, y.astype(np.int64), recording.astype(np.int64), person.astype(np.int64))


def read_digits() -> Samples:
    """scikit-learn's 1797 digits, 8 x 8 values in 0..1. Raises ConfigError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("the digits come with scikit-learn; run: pip install 'maskfleet[bench]'") from None
    x, y = load_digits(return_X_y=True)
    return Samples((x / 16).astype(np.float32), y.astype(np.int64), np.arange(len(y)))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes, gzipped: images uint8[n, 28, 28] or labels uint8[n]. Raises DataError."""
    try:
        data = gzip.decompress(path.read_bytes())
        if data[:3] != b"\0\0\x08":
            raise ValueError("its first bytes are not those of an idx file of bytes")
        axes = data[3]
        shape = np.frombuffer(data, ">u4", axes, 4).astype(int)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a gzipped idx file: {error}") from None


def read_mnist(folder: Path) -> Samples:
    """The 60,000 training images, values in 0..1 (each device's test part is cut from them, as from the others)."""
    x = read_idx(folder / "train-images-idx3-ubyte.gz")
    scaled: NDArray[np.float32] = x.reshape(len(x), -1) / np.float32(255)
    y = read_idx(folder / "train-labels-idx1-ubyte.gz").astype(np.int64)
    return Samples(scaled, y, np.arange(len(y)))


def read_cifar(path: Path) -> Samples:
    """A CIFAR subset's images, float32[n, 3 * 32 * 32] channels first, normalised. Raises DataError."""
    x, y, published = _arrays(path, "CIFAR", "x", "y", "is_test")
    scaled = (x.astype(np.float32) / 255 - CIFAR_MEAN) / CIFAR_DEVIATION
    flat = np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)).reshape(len(x), -1)
    return Samples(flat, y.astype(np.int64), np.arange(len(y)), published=published == 1)


def read_femnist(path: Path) -> Samples:
    """FEMNIST by writer, 28 x 28 values, ink 1 on paper 0, 62 classes, with LEAF's own test samples.

    The file has 184 writers; the 79 without training samples are left out.
    """
    x, y, writer, published, whole = _arrays(path, "FEMNIST", "x", "y", "writer", "is_test", "n_complete")
    kept = writer < int(whole)
    ink = 1 - x[kept].reshape(int(kept.sum()), -1) / np.float32(255)
    owner = writer[kept].astype(np.int64)
    return Samples(ink, y[kept].astype(np.int64), np.arange(len(owner)), owner, published=published[kept] == 1)


def read_shakespeare(path: Path, characters: int) -> Samples:
    """The roles with at least `characters` characters, each cut into windows of 80 in the order of the play.

    A sample is the ids int64[80] of a window, its label the id of the next character at each step, int64[80].
    """
    table = np.full(128, -1)
    table[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    xs, ys, owners = [], [], []
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        for role, text in enumerate(t for t in texts if len(t) >= max(characters, WINDOW + 1)):
            ids = table[np.frombuffer(text.encode("ascii"), np.uint8)]
            windows = (len(ids) - 1) // WINDOW
            xs.append(ids[: windows * WINDOW].reshape(windows, WINDOW))
            ys.append(ids[1 : windows * WINDOW + 1].reshape(windows, WINDOW))
            owners.append(np.full(windows, role))
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{path} is not the file of Shakespeare's roles: {error}") from None
    if not xs:
        raise DataError(f"no role of {path} has {characters} characters; lower `characters`")
    x, y = np.concatenate(xs), np.concatenate(ys)
    if min(x.min(), y.min()) < 0:
        raise DataError(f"{path} holds characters that are not among the {len(CHARACTERS)} of Shakespeare's roles")
    return Samples(x, y, np.arange(len(y)), np.concatenate(owners), sequential=True)
