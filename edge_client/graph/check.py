"""A check of an ONNX graph from the network, made once, before the file is kept and before a session opens it.

A device runs graphs that its coordinator sends. They may compute, and nothing else: no file of the device is read
through external data, and only operators of ONNX itself run, without loops, branches and chance. What a graph takes is
bounded by its file and by a device's own samples: every tensor's size is inferred for one large batch and has a limit,
stored tensors are no larger than the file, and a `Scan`, which `edge_export` writes for recurrent layers, has at most
16 steps more than a sample has values.

Inference itself could be made to take any memory or time, so it runs in a process of its own, with limits on both.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.errors import BundleError

if TYPE_CHECKING:  # onnx is large, and only the process that checks needs it
    from onnx import GraphProto, NodeProto, ValueInfoProto

GRAPH_MOST = 32 << 20  # bytes: weights are inputs of a graph, so a large file is not a graph of ours
NODES_MOST = 20_000
BATCH = 512  # samples, as many as a device runs at a time; smaller batches make smaller tensors
ELEMENTS_MOST = 1 << 31  # of a tensor for such a batch
CHECK_MEMORY, CHECK_SECONDS = 1 << 29, 60  # of the process that checks
STEPS_MORE = 16  # of a Scan than a sample has values: a network may put ids of its own beside those of a sample
REFUSED = re.compile("Constant|If|Loop|SequenceMap|Random.*|Bernoulli|Multinomial")
MOVES = ("Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")  # no larger than their input


def check_graph(path: Path, name: str, sample: tuple[int, ...]) -> None:
    """Raise BundleError unless the graph in `path`, part `name` of a bundle, is one that a device may run.

    `sample` is the shape of one sample, the graph's input `x` without its batch axis.
    """
    command = [sys.executable, "-m", "edge_client.graph.check", str(path), *map(str, sample)]
    env = {**os.environ, "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}  # a thread's stack counts as memory
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=10 * CHECK_SECONDS)
        if done.returncode == 0:
            return
        said = done.stdout.decode(errors="replace").strip()
        why = said if done.returncode == 1 and said else f"its check ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        why = "its check did not end"
    raise BundleError(f"{name} is refused: {why}; a device runs plain ONNX graphs as `maskfleet export` writes them")


def check_file(path: Path, sample: tuple[int, ...]) -> None:
    """As `check_graph`, in this process. Raises ValueError, or anything that onnx raises for what is no graph."""
    import onnx
    from onnx.shape_inference import infer_shapes

    if path.stat().st_size > GRAPH_MOST:
        raise ValueError(f"it has more than {GRAPH_MOST} bytes")
    model = onnx.load(path, load_external_data=False)
    if model.functions:
        raise ValueError(f"it defines the function {model.functions[0].name!r}")
    graphs = [model.graph]
    for at, graph in enumerate(graphs):  # which grows by the bodies
        graphs += _check_nodes(graph, scans=at == 0)
    if sum(len(graph.node) for graph in graphs) > NODES_MOST:
        raise ValueError(f"it has more than {NODES_MOST} nodes")
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name == "x":
            del dims[:]
            for size in (BATCH, *sample):
                dims.add().dim_value = size
        elif value.name == "y" and dims:
            dims[0].dim_value = BATCH
    _check_sizes(infer_shapes(model, data_prop=True).graph, {}, prod(sample) + STEPS_MORE)


def _check_nodes(graph: GraphProto, scans: bool) -> list[GraphProto]:
    """The bodies of a graph's Scans. Drops the shapes that it declares, so that inference finds the true ones.

    Raises ValueError for what no graph, or with `scans` False no body of a Scan, may hold.
    """
    bodies: list[GraphProto] = []
    for node in graph.node:
        what = f"node {node.name or node.output[:1]!s:.60}"
        if node.domain not in ("", "ai.onnx"):
            raise ValueError(f"{what} is {node.op_type!r} of domain {node.domain!r}")
        if REFUSED.fullmatch(node.op_type) or (node.op_type == "Scan" and not scans):
            raise ValueError(f"{what} is a {node.op_type}{'' if scans else ' inside a Scan'}")
        for a in node.attribute:
            bodies += [*([a.g] if a.HasField("g") else ()), *a.graphs]
    if bodies and not scans:
        raise ValueError("a graph is inside a Scan's body")
    if graph.sparse_initializer:
        raise ValueError("it holds a sparse tensor")
    for tensor in graph.initializer:
        if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
            raise ValueError(f"tensor {tensor.name!r:.60} lies in another file")
        if min(tensor.dims, default=0) < 0 or prod(tensor.dims) > GRAPH_MOST:
            raise ValueError(f"tensor {tensor.name!r:.60} claims the shape {list(tensor.dims)!s:.60}")
    del graph.value_info[:]
    for value in graph.output:
        value.ClearField("type")
    for value in () if scans else graph.input:
        value.type.tensor_type.ClearField("shape")
    return bodies


def _check_sizes(graph: GraphProto, outer: Mapping[str, list[int] | None], steps: int) -> None:
    """Raise ValueError for a tensor whose inferred size is unknown or too large, or a Scan of more than `steps`."""
    known = {**outer, **{t.name: list(t.dims) for t in graph.initializer}}
    known |= {v.name: _shape(v) for v in (*graph.input, *graph.value_info, *graph.output)}
    for node in graph.node:
        what = f"node {node.name or node.output[:1]!s:.60} ({node.op_type})"
        for name in filter(None, node.output):
            shape = known.get(name)
            if shape is None:
                shape = known[name] = _bound(node, known)
            if shape is None or prod(shape) > ELEMENTS_MOST:
                raise ValueError(f"{what} has an output of {shape or 'unknown'!s:.60} for {BATCH} samples")
        if node.op_type == "Scan":
            settings = {a.name: a for a in node.attribute}
            count = settings["num_scan_inputs"].i
            scanned = [known.get(i) for i in node.input[-count:]] if count > 0 else []
            if "scan_input_axes" in settings and any(settings["scan_input_axes"].ints):
                raise ValueError(f"{what} scans another axis than the first")
            if not scanned or any(not s or s[0] > steps for s in scanned):
                raise ValueError(f"{what} has steps over {scanned!s:.60}, at most {steps} are accepted")
            _check_sizes(settings["body"].g, known, steps)


def _bound(node: NodeProto, known: Mapping[str, list[int] | None]) -> list[int] | None:
    """A size that a move's output does not exceed: its data's, of a Gather times its indices'. None: not known."""
    if node.op_type not in (*MOVES, "Gather"):
        return None
    shapes = [known.get(i) for i in node.input[: 2 if node.op_type == "Gather" else 1]]
    return None if None in shapes else [prod(n for s in shapes for n in s or ())]


def _shape(value: ValueInfoProto) -> list[int] | None:
    """The inferred shape, None when an axis is unknown."""
    kind = value.type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
    return sizes if kind.HasField("shape") and min(sizes, default=0) >= 0 else None


def main(path: str, *sample: str) -> int:
    """Check a file with limits on this process; 1 and a line on standard output when it is refused."""
    import onnx.shape_inference  # noqa: F401 - before the limits

    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY, CHECK_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_SECONDS, CHECK_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        check_file(Path(path), tuple(map(int, sample)))
    except (ValueError, MemoryError) as error:
        print(error if isinstance(error, ValueError) else "its check takes too much memory")
        return 1
    except Exception as error:  # protobuf's own error class depends on its version
        print(f"it is not an ONNX graph ({error})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
