"""Which ids a sample may hold: what lies between the samples and the tables that they index is run on numbers.

An index that is always one value of the sample plus a constant, such as a column behind a slice or an offset, bounds
this value by the rows of its table. What is clipped, compared or taken modulo first bounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from onnxruntime import InferenceSession

from edge_client.runtimes.onnx import open_onnx
from edge_export.tables import Tables

ANY = np.iinfo(np.int64)
MOST = 1_000_000  # of the numbers that are tried


def sample_ids(graph: ModelProto, found: Tables, sample: Sequence[int]) -> list[tuple[int, int]] | None:
    """The least id and the end of ids, one pair for all values of a sample or one for each; None without a bound."""
    tensors = {row.name: row.shape for row in (*found.parameters, *found.buffers)}
    rows = [(n.input[1], tensors[n.input[0]][0]) for n in graph.graph.node if n.op_type == "Gather"
            and n.input[0] in tensors and not any(a.name == "axis" and a.i for a in n.attribute)]  # fmt: skip
    if not rows:
        return None
    size = prod(sample)
    numbers = np.random.default_rng(0).integers(1, MOST, size)
    session = _indices(graph, [name for name, _ in rows])
    feeds = {k: np.zeros(shape, np.float32) for k, shape in tensors.items()}
    tried = [feeds | {"x": x.reshape(1, *sample)} for x in (np.zeros(size, np.int64), np.arange(1, size + 1), numbers)]
    try:
        start, ramp, drawn = ([i.reshape(-1) for i in session.run(None, _read(session, given))] for given in tried)
    except Exception:  # a table behind a table has no rows for these numbers; the runtime's errors share no base class
        return None
    low, end = np.full(size, ANY.min), np.full(size, ANY.max)
    for (_, count), base, one, other in zip(rows, start, ramp, drawn, strict=True):
        source = np.clip(one - base - 1, 0, size - 1)
        own = (one - base == source + 1) & (other - base == numbers[source])
        np.maximum.at(low, source[own], -base[own])
        np.minimum.at(end, source[own], count - base[own])
    pairs = list(zip(low.tolist(), end.tolist(), strict=True))
    if set(pairs) <= {(ANY.min, ANY.max)}:
        return None
    return pairs[:1] if len(set(pairs)) == 1 else pairs


def _indices(graph: ModelProto, names: Sequence[str]) -> InferenceSession:
    """The graph up to the values `names`, which are its outputs as int64."""
    model = ModelProto()
    model.CopyFrom(graph)
    del model.graph.node[:], model.graph.output[:]
    due, kept = set(names), []
    for node in reversed(graph.graph.node):
        if due & set(node.output):
            due |= set(node.input)
            kept.append(node)
    model.graph.node.extend(kept[::-1])
    for k, name in enumerate(names):
        model.graph.node.append(helper.make_node("Cast", [name], [f"index:{k}"], to=TensorProto.INT64))
        model.graph.output.append(helper.make_tensor_value_info(f"index:{k}", TensorProto.INT64, None))
    return open_onnx(model.SerializeToString())


def _read(session: InferenceSession, given: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {i.name: given[i.name] for i in session.get_inputs()}
