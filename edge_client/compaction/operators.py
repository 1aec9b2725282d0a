"""Runs single ONNX operators on arrays: what an operator does is asked of the operator.

ONNX Runtime computes every operator, in float64 where it has a kernel for that and in float32 otherwise. Convolutions
have none, so `conv` and `conv_transpose` compute them in float64 here: a constant that is folded into a bias must not
be rounded before a batch-norm behind it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, helper

from edge_client.errors import CompactionError, ConfigError
from edge_client.runtimes.onnx import open_onnx

Array = NDArray[Any]
F64 = NDArray[np.float64]


class Operators:
    """Sessions of one node each, kept by operator, settings and types."""

    def __init__(self, imports: Sequence[Any], ir_version: int) -> None:
        self._imports, self._ir = list(imports), ir_version
        self._version = next((o.version for o in imports if o.domain in ("", "ai.onnx")), 1)
        self._sessions: dict[bytes, ort.InferenceSession | None] = {}

    def run(self, node: NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
        """The outputs of `node` on `inputs` (None: an input left out). Float results come back as float64.

        Raises CompactionError when ONNX Runtime has no such operator.
        """
        free, failed = self._free_floats(node), "no kernel for these types"
        for kind in (np.float64, np.float32):
            given = [
                None
                if x is None
                else np.ascontiguousarray(x, kind if k in free else np.float32)
                if x.dtype.kind == "f"
                else x
                for k, x in enumerate(inputs)
            ]
            found = self._open(node, given)
            if found is None:
                continue
            feed = {f"i{k}": x for k, x in enumerate(given) if x is not None}
            try:
                made = found.run(None, feed)
            except Exception as error:  # onnxruntime raises a class of its own for every status
                failed = str(error)
                continue
            return [np.asarray(x, np.float64) if np.asarray(x).dtype.kind == "f" else np.asarray(x) for x in made]
        raise CompactionError(f"ONNX Runtime does not run operator {node.op_type}: {failed}")

    def _free_floats(self, node: NodeProto) -> set[int]:
        """The inputs that may be float64 as well."""
        if node.domain not in ("", "ai.onnx"):
            return set()
        inputs = onnx.defs.get_schema(node.op_type, self._version).inputs
        last = len(inputs) - 1
        return {k for k in range(len(node.input)) if "tensor" not in inputs[min(k, last)].type_str}

    def _open(self, node: NodeProto, inputs: Sequence[Array | None]) -> ort.InferenceSession | None:
        made = NodeProto()
        made.CopyFrom(node)
        made.name = made.doc_string = ""
        del made.metadata_props[:], made.input[:], made.output[:]
        made.input.extend("" if x is None else f"i{k}" for k, x in enumerate(inputs))
        made.output.extend(f"o{k}" if name else "" for k, name in enumerate(node.output))
        types = [None if x is None else helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
        key = made.SerializeToString(deterministic=True) + repr(types).encode()
        if key not in self._sessions:
            ins = [helper.make_tensor_value_info(f"i{k}", t, None) for k, t in enumerate(types) if t is not None]
            outs = [onnx.ValueInfoProto(name=name) for name in made.output if name]
            graph = helper.make_graph([made], "one", ins, outs)
            try:
                made_one = helper.make_model(graph, opset_imports=self._imports, ir_version=self._ir)
                self._sessions[key] = open_onnx(made_one.SerializeToString(), rewrite=False)
            except ConfigError:  # no kernel for these types
                self._sessions[key] = None
        return self._sessions[key]


def pads(given: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """The zeros that a convolution puts before and after each spatial axis of `size`."""
    n = len(kernel)
    strides, dilations = given.get("strides", [1] * n), given.get("dilations", [1] * n)
    auto = given.get("auto_pad", b"NOTSET")
    if auto in (b"NOTSET", b"VALID"):
        both = given.get("pads", [0] * 2 * n) if auto == b"NOTSET" else [0] * 2 * n
        return list(both[:n]), list(both[n:])
    whole = [
        max(0, (-(-s // t) - 1) * t + d * (k - 1) + 1 - s)
        for s, t, d, k in zip(size, strides, dilations, kernel, strict=True)
    ]
    less = [w // 2 for w in whole]
    more = [w - v for w, v in zip(whole, less, strict=True)]
    return (less, more) if auto == b"SAME_UPPER" else (more, less)


def conv(x: F64, weight: F64, given: Mapping[str, Any]) -> F64:
    """`x` [1, in, *size] convolved with `weight` [out, in, *kernel] by attributes `given`, float64[1, out, *size']."""
    kernel = weight.shape[2:]
    n = len(kernel)
    before, after = pads(given, x.shape[2:], kernel)
    strides, dilations = given.get("strides", [1] * n), given.get("dilations", [1] * n)
    padded = np.pad(x[0], [(0, 0), *zip(before, after, strict=True)])
    size = [
        (s - d * (k - 1) - 1) // t + 1 for s, t, d, k in zip(padded.shape[1:], strides, dilations, kernel, strict=True)
    ]
    made = np.zeros((weight.shape[0], int(np.prod(size))))
    for tap in product(*map(range, kernel)):
        made += _tap(weight, tap) @ padded[_places(tap, dilations, size, strides)].reshape(len(padded), -1)
    return made.reshape(1, -1, *size)


def conv_transpose(x: F64, weight: F64, given: Mapping[str, Any], size: Sequence[int]) -> F64:
    """`x` [1, in, *] spread by `weight` [out, in, *kernel], float64[1, out, *size]; explicit pads only."""
    kernel = weight.shape[2:]
    n = len(kernel)
    before = given.get("pads", [0] * 2 * n)[:n]
    strides, dilations = given.get("strides", [1] * n), given.get("dilations", [1] * n)
    whole = [(s - 1) * t + d * (k - 1) + 1 for s, t, d, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)]
    room = [max(w, b + s) for w, b, s in zip(whole, before, size, strict=True)]
    made = np.zeros((weight.shape[0], *room))
    for tap in product(*map(range, kernel)):
        part = _tap(weight, tap) @ x[0].reshape(x.shape[1], -1)
        made[_places(tap, dilations, x.shape[2:], strides)] += part.reshape(-1, *x.shape[2:])
    kept = (slice(None), *(slice(b, b + s) for b, s in zip(before, size, strict=True)))
    return np.ascontiguousarray(made[kept])[None]


def _tap(weight: F64, tap: tuple[int, ...]) -> F64:
    """One entry of the kernel of a weight [out, in, *kernel]."""
    found: F64 = weight.reshape(*weight.shape[:2], -1)[:, :, np.ravel_multi_index(tap, weight.shape[2:])]
    return found


def _places(
    tap: Sequence[int], dilations: Sequence[int], size: Sequence[int], strides: Sequence[int]
) -> tuple[slice, ...]:
    """Where a tap meets a padded value [channels, *], for outputs of `size`."""
    spatial = zip(tap, dilations, size, strides, strict=True)
    return (slice(None), *(slice(i * d, i * d + (m - 1) * t + 1, t) for i, d, m, t in spatial))
