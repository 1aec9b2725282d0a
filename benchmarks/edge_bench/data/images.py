"""Images as samples: folders with a folder for each class, and pictures as arrays of the size that a model takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edge_bench.data.sources import PARTS, Samples
from edge_client.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
ORIENTATION = 0x0112  # the EXIF tag
Colour = Literal["grey", "rgb"]


@dataclass(frozen=True)
class Form:
    """How an image becomes a sample float32[channels, *size]: (value / 255 - mean) / deviation.

    `size` is (height, width); it and `colour` may be None: then those of the first image. `mean` and `deviation` have
    one value for all channels, or one each. With `guessed` nothing but the first image says that all are grey.
    """

    size: tuple[int, int] | None = None
    colour: Colour | None = None
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    guessed: bool = False

    @property
    def channels(self) -> int:
        return 1 if self.colour == "grey" else 3

    def of(self, image: Image.Image) -> Form:
        """With what is not set taken from `image`. Raises DataError for a mean or deviation of wrong length."""
        height, width = (image.width, image.height) if _lies(image) else (image.height, image.width)
        colour = self.colour or ("grey" if _is_grey(image) else "rgb")
        guessed = self.colour is None and colour == "grey"
        form = replace(self, size=self.size or (height, width), colour=colour, guessed=guessed)
        for key in ("mean", "deviation"):
            if len(getattr(form, key)) not in (1, form.channels):
                raise DataError(
                    f"`{key}` has {len(getattr(form, key))} values for {form.channels} channels; give 1 or as many"
                )
        return form


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")


def _has_colour(image: Image.Image) -> bool:
    """Whether a pixel is other than grey: grey pictures are often stored in three channels or with a palette."""
    if _is_grey(image):
        return False
    pixels = np.asarray(image.convert("RGB"))
    return bool((pixels != pixels[..., :1]).any())


def _lies(image: Image.Image) -> bool:
    """Whether the picture is stored on its side, as cameras do: upright, its height is the width of what is stored."""
    return image.getexif().get(ORIENTATION) in (5, 6, 7, 8)


def form(
    shape: tuple[int, ...] | None,
    size: int | tuple[int, int] | None,
    colour: Colour | None,
    mean: tuple[float, ...] | None,
    deviation: tuple[float, ...] | None,
) -> Form:
    """The settings, completed by the model's input `shape` where that is an image's."""
    of_model = shape if shape is not None and len(shape) == 3 and shape[0] in (1, 3) else None
    if colour is None and of_model is not None:
        colour = "grey" if of_model[0] == 1 else "rgb"
    if isinstance(size, int):
        size = size, size
    if size is None and of_model is not None:
        size = of_model[1], of_model[2]
    return Form(size, colour, mean or (0.0,), deviation or (1.0,))


def stack(pictures: Iterable[tuple[str, Image.Image]], n: int, form: Form) -> NDArray[np.float32]:
    """`n` pictures, each with where it is from, as samples float32[n, channels, height, width]; `form` is complete.

    Raises DataError for one in colour where the first image, which is grey, stands for all.
    """
    assert form.size is not None
    height, width = form.size
    x = np.empty((n, form.channels, height, width), np.float32)
    for place, (whence, picture) in zip(x, pictures, strict=True):
        if form.guessed and _has_colour(picture):
            raise DataError(f'the first image is grey and {whence} has colour; set colour = "rgb", or "grey" for all')
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I"):  # 16 bits a pixel: Pillow's own conversion would cut at 255
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        fitted = upright.convert("L" if form.colour == "grey" else "RGB")
        if fitted.size != (width, height):
            fitted = fitted.resize((width, height), Image.Resampling.BILINEAR)
        place[...] = np.asarray(fitted, np.float32).reshape(height, width, -1).transpose(2, 0, 1)
    x /= np.float32(255)
    mean, deviation = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (form.mean, form.deviation))
    x -= mean
    x /= deviation
    return x


def read_folder(path: Path, wanted: Form) -> Samples:
    """Images in a folder for each class, `CLASS/x.png`, or these in a folder for each device, `DEVICE/CLASS/x.png`.

    Folders above of the names of splits, `train/CLASS/x.png` and `test/CLASS/x.png`, are no devices: what is in those
    that begin with "test" are test samples. Classes are numbered in the order of their names. The files are opened when
    a device needs its samples. Raises DataError for a folder without such images, with both depths, or with folders of
    devices beside those of splits.
    """
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; `images` reads a folder with one folder of images for each class")
    files = sorted(f.relative_to(path) for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    files = [f for f in files if not any(part.startswith(".") for part in f.parts)]
    depths = Counter(len(f.parts) for f in files)
    if not files:
        raise DataError(f"{path} holds no images; they end in {', '.join(sorted(SUFFIXES))}")
    if len(depths) > 1 or not depths.keys() <= {2, 3}:
        usual = max((n, depth) for depth, n in depths.items() if depth in (2, 3))[1] if depths.keys() & {2, 3} else 2
        odd = next(f for f in files if len(f.parts) != usual)
        raise DataError(f"{path}: give all images as CLASS/image, or all as DEVICE/CLASS/image; {odd} is not like that")
    classes, y = np.unique([f.parts[-2] for f in files], return_inverse=True)
    with opened(path / files[0]) as first:
        complete = wanted.of(first)
    names: tuple[str, ...] = ()
    owner = published = None
    above = sorted({f.parts[0] for f in files}) if 3 in depths else []
    splits = [name for name in above if name.lower() in PARTS]
    if splits and len(splits) < len(above):
        raise DataError(
            f"{path} has folders of devices, such as {next(n for n in above if n not in splits)}, beside {splits[0]}, "
            "which names a part of a data set; rename it, or give all images as train/CLASS/image and test/CLASS/image"
        )
    if splits:
        published = np.array([f.parts[0].lower().startswith("test") for f in files])
    elif above:
        found, owner = np.unique([f.parts[0] for f in files], return_inverse=True)
        names = tuple(found.tolist())

    def decode(rows: NDArray[Any]) -> NDArray[np.float32]:
        return stack(((str(f), _read(f)) for f in (path / files[int(i)] for i in rows)), len(rows), complete)

    rows = np.arange(len(files))
    published = published if published is not None and published.any() else None
    y = y.astype(np.int64)
    return Samples(rows, y, rows, owner, names, published, decode=decode, classes=tuple(classes.tolist()))


def opened(file: Path) -> Image.Image:
    """An image file, opened. Raises DataError."""
    try:
        return Image.open(file)
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not a readable image: {error}; remove or replace it") from None


def _read(file: Path) -> Image.Image:
    with opened(file) as image:
        if image.mode == "F":
            raise DataError(f"{file} has floating-point values, of what range it does not say; give them as arrays")
        try:
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} is not a readable image: {error}; remove or replace it") from None
        whole: Image.Image = image.copy()
        return whole
