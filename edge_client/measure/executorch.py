"""A .pte file in ExecuTorch as a call without arguments. Its Python side takes torch tensors: extra `author`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Runtime, Verification
from numpy.typing import NDArray

from edge_client.errors import ConfigError


def _open(path: Path) -> tuple[Any, Any]:
    """The program, without which its method is gone, and the method `forward`."""
    try:
        program = Runtime.get().load_program(path, verification=Verification.Minimal)
        return program, program.load_method("forward")
    except Exception as error:  # the runtime's errors share no base class
        raise ConfigError(f"{path} does not open in ExecuTorch: {error}") from None


def open_pte(path: Path, x: NDArray[Any], threads: int = 1) -> Callable[[], object]:
    """Its method `forward` on the batch `x`. Raises ConfigError when it does not run, or not on so many threads."""
    program, method = _open(path)
    inputs = [torch.from_numpy(x)]
    if threads != portable_lib._threadpool_get_thread_count():
        portable_lib._unsafe_reset_threadpool(threads)
    try:
        method.execute(inputs)
    except Exception as error:  # see _open
        raise ConfigError(f"{path} does not run on {x.dtype}{list(x.shape)}: {error}") from None
    return lambda: (program, method.execute(inputs))


def sample_of_pte(path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of its one input."""
    _, method = _open(path)
    meta = method.metadata
    if meta.num_inputs() != 1:
        raise ConfigError(f"{path} has {meta.num_inputs()} inputs; a model with one can be measured")
    tensor = meta.input_tensor_meta(0)
    kinds = {6: np.float32, 4: np.int64, 3: np.int32}
    return tuple(tensor.sizes()), np.dtype(kinds.get(int(tensor.dtype()), np.float32)).name
