"""ExecuTorch: a `.pte` file as a call from arrays to arrays.

Its Python side imports torch and takes torch's tensors, so this module needs the extra `author`; it is imported only
where a program is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Runtime, Verification
from numpy.typing import NDArray

from edge_client.errors import ConfigError, MaskfleetError

DTYPES = {6: np.float32, 4: np.int64, 3: np.int32}
"""By ExecuTorch's number of a scalar type."""


class Pte:
    """The method `forward` of a program. `sizes` are those of its inputs; a dynamic axis counts with its bound.

    XNNPACK keeps the address of the threads that were there when it was loaded, so it is loaded again after they were
    replaced: it would crash the process.
    """

    _pool = 0  # how often the threads, which the whole process shares, were replaced

    def __init__(self, data: Path | bytes) -> None:
        self._data = data
        self._load()
        meta = self._method.metadata
        inputs = [meta.input_tensor_meta(i) for i in range(meta.num_inputs())]
        self.sizes = [tuple(int(n) for n in t.sizes()) for t in inputs]
        self.dtypes = [np.dtype(DTYPES.get(int(t.dtype()), np.float32)) for t in inputs]

    def _load(self) -> None:
        # A method is gone without its program.
        self._program = Runtime.get().load_program(self._data, verification=Verification.InternalConsistency)
        self._method: Any = self._program.load_method("forward")
        if self._method is None:
            raise KeyError("forward")
        self._loaded_for = Pte._pool

    @staticmethod
    def use_threads(threads: int) -> None:
        """Give the process's pool so many threads."""
        with _silent():
            if portable_lib._threadpool_get_thread_count() != threads:
                portable_lib._unsafe_reset_threadpool(threads)
                Pte._pool += 1

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """The outputs, by position. Raises RuntimeError for inputs that it does not take."""
        return [np.asarray(made.numpy()) for made in self.run(tensors(inputs))]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """As a call, from tensors to tensors."""
        if self._loaded_for != Pte._pool:
            self._load()
        made: list[Any] = self._method.execute(inputs)
        return made


def open_pte(
    program: Path | bytes,
    *,
    threads: int = 1,
    what: str = "",
    advice: str = "",
    refused: type[MaskfleetError] = ConfigError,
) -> Pte:
    """A program, file or serialised, once ExecuTorch has checked its inner consistency.

    The process has one pool of threads, which gets `threads` of them: programs opened before run on them too. Raises
    `refused`, which names `what` or else the file and ends with `advice`, when it does not open.
    """
    try:
        Pte.use_threads(threads)
        return Pte(program)
    except Exception as error:  # the runtime's errors share no base class
        name = what or (str(program) if isinstance(program, Path) else "the program")
        text = f"ExecuTorch cannot open {name}: {error}"
        raise refused(f"{text}; {advice}" if advice else text) from None


@contextmanager
def _silent() -> Iterator[None]:
    """Without the lines on the processor that ExecuTorch's C++ part writes to standard error."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def tensors(arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """The same memory where that can be: torch has no read-only tensors and warns of them."""
    whole = (np.ascontiguousarray(a).reshape(a.shape) for a in arrays)  # which gives a number an axis
    return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in whole]
