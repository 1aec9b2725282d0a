"""What an operator is given: its settings, and tensors or what is known while tracing. See `operators`.

Inputs are tensors, perhaps with a transpose put off (`Laid`), or numpy arrays for constants and sizes; a size that
depends on the batch is a `torch.SymInt` in an array of objects. `host` and `tensor` turn one into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional

from edge_client.errors import ModelError
from edge_export.executorch.layout import Laid

Host = NDArray[Any]
Value = Any  # Tensor | Laid | Host | None for an input that is left out
Operator = Callable[..., Value]

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.BOOL: torch.bool,
}


@dataclass(frozen=True)
class Node:
    """One operator: its type, its settings by name, how many outputs are read, and which inputs are constants.

    `looped` says that it is part of a loop's body, where nothing is delegated.
    """

    kind: str
    settings: dict[str, Any]
    outputs: int
    fixed: tuple[bool, ...] = ()
    looped: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or `default` where the file leaves it out."""
        return self.settings.get(name, default)

    def refuse(self, what: str) -> ModelError:
        """The error for a form of this operator that is not supported."""
        return ModelError(
            f"operator {self.kind} with {what} cannot be lowered to ExecuTorch; write the layer otherwise"
        )


def host(value: Value) -> list[Any]:
    """The numbers of an input that must be known while tracing."""
    if isinstance(value, Tensor | Laid):
        raise ModelError("a shape or an axis depends on the values of the input, so it has no ExecuTorch form")
    return list(np.asarray(value).reshape(-1).tolist())


def tensor(value: Value) -> Tensor:
    """`value` as a tensor; an array of sizes becomes int64."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Laid):
        return value.tensor()
    array = np.asarray(value)
    if array.dtype != object:
        return torch.from_numpy(np.array(array))  # a copy: the file's own arrays cannot be written
    flat = [torch.scalar_tensor(v, dtype=torch.int64) for v in array.reshape(-1)]
    return torch.stack(flat).reshape(array.shape)


def operand(value: Value) -> Any:
    """`value` as an operand of arithmetic: one float becomes a Python number, which costs no tensor."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype != object:
        return value.item()
    return value if isinstance(value, Laid) else tensor(value)


def over(x: Value, function: Callable[[Tensor], Tensor]) -> Value:
    """An elementwise function of one tensor, whatever the order of its axes."""
    return x.with_base(function(x.base)) if isinstance(x, Laid) else function(tensor(x))


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def pad(x: Tensor, widths: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` with `widths` [before..., after...] of its last axes; a negative width cuts off."""
    rank = len(widths) // 2
    for i in range(rank):
        before, after = widths[i], widths[rank + i]
        axis = x.ndim - rank + i
        if before < 0 or after < 0:
            x = x.narrow(axis, max(-before, 0), x.shape[axis] - max(-before, 0) - max(-after, 0))
    flat = [max(w, 0) for i in reversed(range(rank)) for w in (widths[i], widths[rank + i])]
    return functional.pad(x, flat, value=value) if any(flat) else x


def reversed_along(x: Tensor, axis: int) -> Tensor:
    """`x` from its end along `axis`, row by row: ExecuTorch's flip moves one number at a time."""
    places = torch.arange(x.shape[axis] - 1, -1, -1)
    return torch.index_select(x, axis, places)
