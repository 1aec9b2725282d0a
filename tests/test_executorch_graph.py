"""ONNX graphs as PyTorch modules: each operator beside ONNX Runtime. ExecuTorch itself is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_client.bundle import views
from edge_client.errors import ModelError

torch = pytest.importorskip("torch")
from edge_export.executorch.graph import Graph  # noqa: E402
from edge_export.executorch.layout import Laid, laid, merged, transposed  # noqa: E402
from edge_export.executorch.operators import TABLE  # noqa: E402
from exported import exported  # noqa: E402

RNG = np.random.default_rng(3)
KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(bool): TensorProto.BOOL,
}


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Op:
    """One operator: its type, inputs, stored inputs (which come after), settings and number of outputs."""

    kind: str
    inputs: Sequence[np.ndarray | None]
    stored: Sequence[np.ndarray | None] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


IMAGE = floats(3, 4, 7, 6)
EACH = [
    *(
        Op(kind, [floats(2, 3, 5)])
        for kind in [
            "Abs",
            "Ceil",
            "Cos",
            "Elu",
            "Erf",
            "Exp",
            "Floor",
            "HardSigmoid",
            "HardSwish",
            "Identity",
            "LeakyRelu",
            "LogSoftmax",
            "Neg",
            "Relu",
            "Selu",
            "Sigmoid",
            "Sign",
            "Sin",
            "Softmax",
            "Mish",
            "Softplus",
            "Tanh",
            "Gelu",
        ]
    ),
    *(Op(kind, [np.abs(floats(2, 3)) + 0.1]) for kind in ("Log", "Sqrt", "Reciprocal")),
    *(
        Op(kind, [floats(2, 3), floats(3)])
        for kind in ["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "Less"]
    ),
    *(Op(kind, [floats(2, 3), floats(2, 1)]) for kind in ("GreaterOrEqual", "LessOrEqual", "PRelu")),
    *(Op(kind, [floats(2, 3) > 0, floats(2, 3) > 0]) for kind in ("And", "Or", "Xor")),
    Op("Div", [ints(7, -7, 5), ints(2, 2, -3)]),
    Op("Not", [floats(2, 3) > 0]),
    Op("Pow", [np.abs(floats(2, 3))], [np.float32(1.5)]),
    Op("Clip", [floats(3, 4)], [np.float32(-0.5), np.float32(0.4)]),
    Op("Clip", [floats(3, 4)], [None, np.float32(0.4)]),
    Op("Cast", [floats(2, 3) > 0], settings={"to": TensorProto.FLOAT}),
    Op("Where", [floats(2, 3) > 0, floats(2, 3), floats(3)]),
    Op("Gelu", [floats(2, 3)], settings={"approximate": "tanh"}),
    Op("Gemm", [floats(4, 3), floats(4, 5), floats(5)], settings={"transA": 1, "alpha": 0.5, "beta": 2.0}),
    Op("Gemm", [floats(3, 4), floats(5, 4), floats(5)], settings={"transB": 1}),
    Op("Gemm", [floats(3, 4)], [floats(4, 5), floats(5)]),
    Op("MatMul", [floats(2, 3, 4), floats(4, 5)]),
    Op("MatMul", [floats(2, 3, 4)], [floats(4, 5)]),
    Op("MatMul", [floats(2, 2, 3, 4), floats(2, 4, 5)]),
    *(
        Op("Conv", inputs, stored, settings)
        for settings, weight in (
            ({"pads": [1, 1, 1, 1]}, (6, 4, 3, 3)),
            ({"pads": [0, 1, 2, 0], "strides": [2, 1], "dilations": [1, 2]}, (6, 4, 3, 2)),
            ({"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2]}, (6, 2, 3, 3)),
            ({"group": 4, "pads": [1, 1, 1, 1]}, (4, 1, 3, 3)),
            ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (6, 4, 3, 3)),
        )
        for inputs, stored in (([IMAGE, floats(*weight), floats(weight[0])], []), ([IMAGE], [floats(*weight)]))
    ),
    Op("Conv", [floats(2, 3, 9), floats(4, 3, 3)], settings={"pads": [2, 0], "strides": [2]}),
    Op("Conv", [floats(2, 4, 5, 6, 7)], [floats(6, 2, 3, 2, 3), floats(6)], {"group": 2, "pads": [1, 0, 1, 1, 1, 0]}),
    Op("ConvTranspose", [floats(2, 3, 4, 5, 3)], [floats(3, 4, 2, 3, 2), floats(4)], {"strides": [2, 1, 2]}),
    *(
        Op("ConvTranspose", inputs, stored, settings)
        for settings, weight in (
            ({"pads": [1, 1, 1, 1]}, (4, 5, 3, 3)),
            ({"strides": [2, 2], "pads": [1, 0, 1, 1], "output_padding": [1, 0]}, (4, 5, 3, 2)),
            ({"group": 2, "strides": [2, 3], "dilations": [2, 1]}, (4, 3, 2, 2)),
        )
        for inputs, stored in (
            ([IMAGE, floats(*weight), floats(weight[1] * settings.get("group", 1))], []),
            ([IMAGE], [floats(*weight)]),
        )
    ),
    Op("MaxPool", [IMAGE], settings={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Op("MaxPool", [IMAGE], settings={"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    Op("MaxPool", [IMAGE], settings={"kernel_shape": [2, 2], "strides": [2, 4], "ceil_mode": 1}),
    Op("AveragePool", [IMAGE], settings={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Op("AveragePool", [IMAGE], settings={"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    Op("AveragePool", [IMAGE], settings={"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    Op("GlobalAveragePool", [IMAGE]),
    Op("GlobalMaxPool", [IMAGE]),
    Op("BatchNormalization", [IMAGE], [floats(4), floats(4), floats(4), np.abs(floats(4)) + 0.5]),
    Op("BatchNormalization", [IMAGE, floats(4), floats(4), floats(4), np.abs(floats(4)) + 0.5]),
    Op("LayerNormalization", [floats(2, 3, 6), floats(6), floats(6)]),
    Op("LayerNormalization", [floats(2, 3, 6)], [floats(3, 6)], {"axis": 1}),
    Op("LayerNormalization", [floats(2, 3, 6), floats(6), floats(6)], outputs=3),
    Op("InstanceNormalization", [IMAGE, floats(4), floats(4)]),
    Op("GroupNormalization", [IMAGE, floats(4), floats(4)], settings={"num_groups": 2}),
    *(
        Op(kind, [floats(2, 3, 4)], [ints(0, 2)], {"keepdims": keep})
        for kind in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"]
        for keep in (0, 1)
    ),
    Op("Reshape", [floats(2, 3, 4)], [ints(0, -1)]),
    Op("Flatten", [floats(2, 3, 4)]),
    Op("Flatten", [floats(2, 3, 4)], settings={"axis": 2}),
    Op("Transpose", [floats(2, 3, 4)], settings={"perm": [2, 0, 1]}),
    Op("Squeeze", [floats(2, 1, 3, 1)], [ints(1, -1)]),
    Op("Unsqueeze", [floats(2, 3)], [ints(0, -1)]),
    Op("Concat", [floats(2, 3), floats(2, 1)], settings={"axis": 1}),
    Op("Split", [floats(2, 7)], [ints(2, 5)], {"axis": 1}, 2),
    Op("Split", [floats(2, 7)], settings={"axis": 1, "num_outputs": 3}, outputs=3),
    Op("Slice", [floats(5, 6)], [ints(1, -1), ints(4, -10), ints(0, 1), ints(2, -1)]),
    Op("Slice", [floats(5, 6)], [ints(-3), ints(2**62), ints(1)]),
    Op("Gather", [floats(5, 3)], [np.array([[0, -1], [2, 2]])]),
    Op("Gather", [floats(5, 3)], [np.array(1)], {"axis": 1}),
    Op("Gather", [floats(2, 5, 3), ints(1, 0, 2, 1)], settings={"axis": 2}),
    Op("GatherElements", [floats(3, 4), np.array([[0, 2], [1, 1], [0, 0]])], settings={"axis": 1}),
    Op("ScatterElements", [floats(3, 4), np.array([[0, 2]]), floats(1, 2)], settings={"axis": 1, "reduction": "add"}),
    Op("ScatterND", [floats(4, 3), np.array([[1], [3], [1]]), floats(3, 3)], settings={"reduction": "add"}),
    Op("Expand", [floats(3, 1)], [ints(2, 1, 4)]),
    Op("Tile", [floats(2, 3)], [ints(2, 3)]),
    Op("Pad", [floats(2, 3, 4)], [ints(0, 1, -1, 0, 0, 2), np.float32(0.5)]),
    *(Op("Pad", [floats(2, 3, 4)], [ints(0, 1, 2, 0, 2, 1)], {"mode": m}) for m in ("edge", "reflect", "wrap")),
    Op(
        "Resize",
        [IMAGE],
        [None, np.array([1, 1, 2, 3], np.float32)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    Op("Resize", [IMAGE], [None, np.array([1, 1, 3, 2], np.float32)]),
    *(
        Op("Resize", [IMAGE], [None, np.array([1, 1, 2, 2], np.float32)], {"nearest_mode": f"round_prefer_{way}"})
        for way in ("floor", "ceil")
    ),
    Op("Resize", [IMAGE], [None, np.array([1, 1, 2, 1.5], np.float32)], {"mode": "linear"}),
    Op("Resize", [IMAGE], [None, None, ints(3, 4, 14, 9)], {"mode": "linear"}),
    Op("DepthToSpace", [floats(2, 8, 3, 2)], settings={"blocksize": 2}),
    Op("DepthToSpace", [floats(2, 8, 3, 2)], settings={"blocksize": 2, "mode": "CRD"}),
    Op("SpaceToDepth", [floats(2, 3, 4, 6)], settings={"blocksize": 2}),
    Op("ConstantOfShape", [], [ints(2, 3)]),
    Op("Range", [], [np.array(1), np.array(7), np.array(2)]),
    Op("OneHot", [np.array([0, 2, 1])], [np.array(3), np.array([0.5, 2.0], np.float32)]),
    Op("Trilu", [floats(4, 4)], [np.array(1)], {"upper": 0}),
    Op("Shape", [floats(2, 3)]),
    *(
        Op(
            "LSTM",
            [floats(5, 2, 3), floats(w, 16, 3), floats(w, 16, 4), floats(w, 32), None, h, h],
            [],
            {"hidden_size": 4, "direction": way},
            3,
        )
        for way, w in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
        for h in (None, floats(w, 2, 4))
    ),
    *(
        Op(
            "GRU",
            [floats(5, 2, 3), floats(w, 12, 3), floats(w, 12, 4), floats(w, 24)],
            [],
            {"hidden_size": 4, "direction": way, "linear_before_reset": reset},
            2,
        )
        for way, w in (("forward", 1), ("bidirectional", 2))
        for reset in (0, 1)
    ),
]


def info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, KINDS[value.dtype], value.shape)


def single(op: Op) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    given = {f"i{k}": v for k, v in enumerate(op.inputs) if v is not None}
    stored = {f"s{k}": np.asarray(v) for k, v in enumerate(op.stored) if v is not None}
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(op.inputs)]
    names += [f"s{k}" if v is not None else "" for k, v in enumerate(op.stored)]
    outputs = [f"o{k}" for k in range(op.outputs)]
    node = helper.make_node(op.kind, names, outputs, **op.settings)
    graph = helper.make_graph(
        [node],
        "g",
        [info(k, v) for k, v in given.items()],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), given


def compare(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> None:
    expected = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
    graph = Graph(model)
    found = graph(*(torch.from_numpy(given[name]) for name in graph.inputs))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("op", EACH, ids=lambda op: op.kind)
def test_an_operator_computes_what_onnx_runtime_computes(op: Op) -> None:
    compare(*single(op))


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_a_convolution_with_depth_uses_no_kernel_that_executorch_lacks(kind: str) -> None:
    model, given = single(Op(kind, [floats(2, 3, 4, 5, 6)], [floats(3, 3, 3, 3, 3)], {"pads": [1] * 6}))
    graph = Graph(model)
    traced = torch.export.export(graph, tuple(torch.from_numpy(v) for v in given.values()), strict=False)
    assert not [n for n in traced.graph.nodes if "conv" in str(n.target)]


def test_every_operator_of_the_table_is_tried() -> None:
    # The first computes sizes, in the graphs below; the second is a MatMul with a stored weight.
    assert TABLE.keys() - {op.kind for op in EACH} == {"ReduceProd", "Linear"}


def test_what_follows_from_stored_tensors_alone_is_stored_and_weights_lie_as_they_are_read() -> None:
    make = helper.make_node
    stored = {"a": floats(2, 4), "b": floats(3, 4), "bias": floats(5)}
    nodes = [
        make("Concat", ["a", "b"], ["rows"], axis=0),
        make("Transpose", ["rows"], ["w"], perm=[1, 0]),
        make("MatMul", ["x", "w"], ["y"]),
        make("Gemm", ["x", "w", "bias"], ["z"]),
    ]
    given = {"x": floats(3, 4)}
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", given["x"])],
        [onnx.ValueInfoProto(name=o) for o in ("y", "z")],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    compare(model, given)
    module = Graph(model)
    assert [n.op_type for n in module.onnx.node] == ["Linear", "Gemm"]
    assert sorted(tuple(b.shape) for b in module.buffers()) == [(5,), (5, 4)]


@pytest.mark.parametrize("name", ["mlp", "max-pool cnn"])
@pytest.mark.parametrize("part", ["eval.onnx", "train.onnx"])
def test_a_bundles_graphs_compute_the_same_as_modules(name: str, part: str) -> None:
    bundle = exported(name).bundle
    m, start = bundle.manifest, bundle.model()
    given = {**views(m.parameters, start.parameters), **views(m.buffers, start.buffers)}
    given |= {"x": floats(7, *m.input.shape), "y": RNG.integers(0, m.target.output[-1], 7)}
    model = onnx.load(bundle.part(part))
    compare(model, {i.name: np.array(given[i.name]) for i in model.graph.input})


def test_transposes_are_put_off_through_a_chain_and_come_out_right() -> None:
    make = helper.make_node
    nodes = [
        make("Transpose", ["x"], ["a"], perm=[0, 3, 1, 2]),  # channels first, stored last
        make("Relu", ["a"], ["b"]),
        make("Mul", ["b", "scale"], ["c"]),
        make("Slice", ["c", "low", "high", "axes"], ["d"]),
        make("Pad", ["d", "pads"], ["e"]),
        make("ReduceSum", ["e", "rows"], ["sums"], keepdims=0),
        make("Unsqueeze", ["e", "last"], ["f"]),
        make("Concat", ["f", "f"], ["g"], axis=4),
        make("Reshape", ["g", "wide"], ["doubled"]),
        make("Reshape", ["e", "flat"], ["flattened"]),
        make("Add", ["e", "y"], ["mixed"]),
    ]
    stored = {
        "scale": floats(1, 5, 1, 1),
        "low": ints(1, 0),
        "high": ints(5, 3),
        "axes": ints(2, 3),
        "pads": ints(0, 0, 1, 0, 0, 0, 0, 2),
        "rows": ints(2),
        "last": ints(4),
        "wide": ints(-1, 5, 5, 10),
        "flat": ints(-1, 125),
    }
    given = {"x": floats(2, 6, 4, 5), "y": floats(2, 5, 5, 5)}
    graph = helper.make_graph(
        nodes,
        "g",
        [info(k, v) for k, v in given.items()],
        [onnx.ValueInfoProto(name=o) for o in ("sums", "doubled", "flattened", "mixed")],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )
    compare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), given)


def test_two_transposes_that_cancel_leave_the_stored_tensor_and_a_merge_of_neighbours_stays_a_view() -> None:
    x = torch.from_numpy(floats(2, 3, 4, 5))
    there = transposed(x, [0, 3, 1, 2])
    assert isinstance(there, Laid)
    assert there.base is x
    assert transposed(there, [0, 2, 3, 1]) is x
    both = merged(laid(there), [2, 5, 12])  # the two axes behind the channels, side by side in x
    assert isinstance(both, Laid)
    torch.testing.assert_close(both.tensor(), x.permute(0, 3, 1, 2).reshape(2, 5, 12))
    assert merged(laid(there), [2, 15, 4]) is None


@pytest.mark.parametrize("part", ["body", "graph"])
def test_an_operator_without_a_form_is_refused_by_name(part: str) -> None:
    odd = helper.make_node("Det", ["x"], ["o"])
    if part == "body":
        body = helper.make_graph([odd], "b", [info("x", floats(3, 3))], [onnx.ValueInfoProto(name="o")])
        odd = helper.make_node("Scan", ["x"], ["o"], body=body, num_scan_inputs=1)
    graph = helper.make_graph([odd], "g", [info("x", floats(2, 3, 3))], [onnx.ValueInfoProto(name="o")])
    with pytest.raises(ModelError, match="operator Det has no ExecuTorch form"):
        Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))


@pytest.mark.parametrize(
    ("op", "what"),
    [
        (Op("MaxPool", [IMAGE], settings={"kernel_shape": [2, 2]}, outputs=2), "indices"),
        (Op("Resize", [IMAGE], [None, np.array([1, 1, 1.3, 1], np.float32)]), "scales"),
        (Op("Resize", [IMAGE], [None, None, ints(3, 4, 10, 9)]), "nearest"),
        (Op("Resize", [IMAGE], [None, np.array([1, 1, 2, 2], np.float32)], {"nearest_mode": "floor"}), "nearest"),
        (
            Op("Resize", [IMAGE], [None, None, ints(3, 4, 18, 18)], {"coordinate_transformation_mode": "asymmetric"}),
            "asymmetric, round_prefer_floor",
        ),
        (Op("Resize", [IMAGE], [None, None, ints(3, 4, 9, 9)], {"mode": "linear", "antialias": 1}), "antialias"),
        (Op("Slice", [floats(5)], [ints(4), ints(0), ints(0), ints(-2)]), "step -2"),
        (
            Op(
                "LSTM",
                [floats(5, 2, 3), floats(1, 16, 3), floats(1, 16, 4), None, np.array([5, 4], np.int32)],
                [],
                {"hidden_size": 4},
            ),
            "sequence lengths",
        ),
    ],
    ids=lambda v: v.kind if isinstance(v, Op) else "",
)
def test_a_form_that_is_not_supported_is_refused_and_named(op: Op, what: str) -> None:
    KINDS.setdefault(np.dtype(np.int32), TensorProto.INT32)
    model, given = single(op)
    with pytest.raises(ModelError, match=f"{op.kind}.*{what}"):
        Graph(model)(*(torch.from_numpy(v) for v in given.values()))
