"""Inference engines of this machine, and a model opened in one of them as a call without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError
from edge_client.runtimes import onnx

if TYPE_CHECKING:  # torch is large, and not everywhere
    from edge_client.runtimes.executorch import Pte

ONNX, EXECUTORCH = "onnxruntime", "executorch"
ENGINE_OF = {".onnx": ONNX, ".pte": EXECUTORCH}
ADVICE = "name a model that ONNX Runtime runs, such as a personal.onnx"
Call = Callable[[], object]


def missing(engine: str) -> str:
    """What to run before `engine` is there; "" when it is installed."""
    there = engine == ONNX or (find_spec("executorch") and find_spec("torch"))
    return "" if there else "not installed; run: pip install 'maskfleet[author]'"


def engine_of(path: Path) -> str:
    """The engine that runs a file, by its name's end. Raises ConfigError."""
    engine = ENGINE_OF.get(path.suffix)
    if engine is None:
        raise ConfigError(
            f"{path} is no model; name a bundle's folder, or a file that ends in {' or '.join(ENGINE_OF)}"
        )
    return engine


def open_model(path: Path, x: NDArray[Any], threads: int = 1) -> Call:
    """A call that runs the model in `path` on the batch `x`. Raises ConfigError when that does not run here."""
    return onnx_call(path, x, threads) if engine_of(path) == ONNX else _pte_call(path, x, threads)


def _pte(path: Path, threads: int = 1) -> Pte:
    if absent := missing(EXECUTORCH):
        raise ConfigError(f"{path} needs ExecuTorch: {absent}")
    from edge_client.runtimes.executorch import open_pte

    program = open_pte(path, threads=threads)
    if len(program.sizes) != 1:
        raise ConfigError(f"{path} has {len(program.sizes)} inputs; a model with one can be measured")
    return program


def _pte_call(path: Path, x: NDArray[Any], threads: int) -> Call:
    program = _pte(path, threads)
    from edge_client.runtimes.executorch import tensors

    inputs = tensors([x])
    try:
        program.run(inputs)
    except RuntimeError as error:
        raise ConfigError(
            f"{path} does not run on {x.dtype}{list(x.shape)}: {error}; lower it for a batch of {len(x)}, or for "
            "batches of any size"
        ) from None
    return lambda: program.run(inputs)


def onnx_call(model: Path | bytes, x: NDArray[Any], threads: int = 1) -> Call:
    """A model in ONNX Runtime, file or serialised. Raises ConfigError when it does not open or does not take `x`."""
    if threads < 1:
        raise ConfigError(f"threads = {threads}: need 1 at least")
    what = str(model) if isinstance(model, Path) else "the model"
    session = onnx.open_onnx(model, threads=threads, settings=onnx.NO_SPINNING_AFTER, advice=ADVICE)
    try:
        (name,) = (i.name for i in session.get_inputs())
        feed = {name: x}
        session.run(None, feed)
    except Exception as error:  # onnxruntime raises a class of its own for every status
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"{what} does not run on {x.dtype}{list(x.shape)}: {said}; does it need another shape?"
        ) from None
    return lambda: session.run(None, feed)


NUMPY = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}
MOST = 1 << 30  # values of an input


def sample_of(path: Path, asked: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], str]:
    """Shape of a batch of one and its dtype, as the model in `path` takes it; a free axis counts as 1, or as `asked`.

    Raises ConfigError when it does not open, has more than one input, or does not take what is asked.
    """
    declared, dtype = _input_of(path)
    fixed = [n if isinstance(n, int) and n > 0 else None for n in declared]
    shape = tuple(n or 1 for n in fixed) if asked is None else asked
    if len(shape) != len(fixed) or any(n not in (None, m) for n, m in zip(fixed, shape, strict=True)):
        raise ConfigError(f"{path} takes [{', '.join(map(str, declared))}], which {list(shape)} is not; mend --shape")
    if prod(shape) > MOST:
        raise ConfigError(f"{path} takes {list(shape)}, more than {MOST} values a run; measure a smaller model")
    return shape, dtype


def _input_of(path: Path) -> tuple[Sequence[int | str | None], str]:
    """The declared shape of the model's input, a name or None where it is free, and its dtype. Raises ConfigError."""
    if engine_of(path) == EXECUTORCH:
        program = _pte(path)
        return (None, *program.sizes[0][1:]), program.dtypes[0].name
    inputs = onnx.open_onnx(path, advice=ADVICE).get_inputs()
    if len(inputs) != 1 or inputs[0].type not in NUMPY:
        said = ", ".join(f"{i.name} {i.type}" for i in inputs) or "none"
        known = ", ".join(np.dtype(t).name for t in NUMPY.values())
        raise ConfigError(f"{path} has inputs {said}; a model with one input of {known} can be measured")
    if not inputs[0].shape:
        raise ConfigError(f"{path} does not say the shape of its input {inputs[0].name}; export it with one")
    return inputs[0].shape, np.dtype(NUMPY[inputs[0].type]).name


def free_axes(path: Path) -> list[int]:
    """The axes without a fixed size, other than the first. Raises ConfigError."""
    return [i for i, n in enumerate(_input_of(path)[0]) if i and not isinstance(n, int)]


def largest_batch(path: Path) -> int:
    """Samples of the largest batch that a `.pte` file runs. Raises ConfigError as `sample_of`."""
    return (_pte(path).sizes[0] or (1,))[0]


def batch(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """A batch to run a model on: normal numbers, or zeros where it takes integers, which any vocabulary has."""
    if np.issubdtype(np.dtype(dtype), np.integer):
        return np.zeros(shape, dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)
