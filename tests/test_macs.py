"""Multiply-adds of ONNX graphs, counted by hand beside them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from edge_client.errors import ConfigError
from edge_client.measure.macs import macs


def parsed(signature: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 19]> g ({signature}) => (float[a, b] y) {{ {body} }}'
    )


@pytest.mark.parametrize(
    ("signature", "body", "expected"),
    [
        ("float[n,3,8,8] x, float[6,3,3,3] w", "y = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w)", 6 * 4 * 4 * 27),
        ("float[n,8,5,5] x, float[8,1,3,3] w", "y = Conv<group=8>(x, w)", 8 * 3 * 3 * 9),
        ("float[n,8,5] x, float[6,4,3] w", "y = Conv<group=2>(x, w)", 6 * 3 * 4 * 3),
        ("float[n,4,5,5] x, float[4,7,2,2] w", "y = ConvTranspose<strides=[2,2]>(x, w)", 4 * 25 * 7 * 4),
        ("float[n,20] x, float[5,20] w", "y = Gemm<transB=1>(x, w)", 100),
        ("float[n,6,20] x, float[20,5] w", "y = MatMul(x, w)", 6 * 100),
        ("float[n,2,6,20] x, float[n,2,20,5] w", "y = MatMul(x, w)", 2 * 6 * 100),
        ("float[n,6,20] x, float[20] w", "y = MatMul(x, w)", 120),
        ("float[n,6,20] x, float[5,20] w", 'y = Einsum<equation="nti,oi->nto">(x, w)', 6 * 100),
        ("float[7,n,5] x, float[2,12,5] w, float[2,12,3] r", "y = LSTM<hidden_size=3>(x, w, r)", 7 * 2 * 12 * 8),
        ("float[7,n,5] x, float[1,9,5] w, float[1,9,3] r", "y = GRU<hidden_size=3>(x, w, r)", 7 * 9 * 8),
        ("float[n,6] x, float[n,6] w", "y = Mul(x, w)", 0),
    ],
)
def test_a_contraction_counts_what_a_hand_count_gives(signature: str, body: str, expected: int) -> None:
    model = parsed(signature, body)
    if "LSTM" in body or "GRU" in body:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    assert macs(model) == expected


def test_a_batch_multiplies_the_count_and_a_reshape_to_minus_one_is_followed() -> None:
    for batch, samples in (("n", 1), ("4", 4)):
        model = parsed(
            f"float[{batch},3,4,4] x, float[5,48] w", "s = Constant<value = int64[2] {-1, 48}>() f = Reshape(x, s) "
            "y = Gemm<transB=1>(f, w)"
        )  # fmt: skip
        assert macs(model) == samples * 240


def test_the_body_of_a_scan_counts_once_a_step() -> None:
    body = onnx.parser.parse_graph("body (float[2,3] h, float[2,3] x) => (float[2,3] g, float[2,3] o) "
                                   "{ m = MatMul(h, w) g = Add(m, x) o = Identity(g) }")  # fmt: skip
    node = onnx.helper.make_node("Scan", ["h0", "x"], ["h", "y"], body=body, num_scan_inputs=1)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [value("h0", 1, [2, 3]), value("x", 1, [11, 2, 3]), value("w", 1, [3, 3])],
        [value("y", 1, [11, 2, 3])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)])
    assert macs(model) == 11 * 2 * 3 * 3


def test_weights_may_be_stored_in_the_file() -> None:
    model = parsed("float[n,20] x", "y = Gemm<transB=1>(x, w)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((5, 20), np.float32), "w"))
    assert macs(model.SerializeToString()) == 100


def test_an_unknown_shape_is_refused_with_its_name() -> None:
    model = parsed("float[n,k] x, float[5,k] w", "y = Gemm<transB=1>(x, w)")
    with pytest.raises(ConfigError, match="'x'"):
        macs(model)


def test_sizes_computed_in_the_graph_are_followed() -> None:
    model = parsed(
        "float[n,3,4,4] x, float[5,48] w",
        "s = Shape(x) zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() "
        "last = Constant<value_ints=[4]>() n = Slice(s, zero, one) r = Slice(s, one, last) "
        "p = ReduceProd<keepdims=1>(r) m = Constant<value_ints=[-1]>() q = Reshape(p, m) t = Concat<axis=0>(n, q) "
        "e = Equal(t, q) u = Where(e, q, t) f = Reshape(x, u) y = Gemm<transB=1>(f, w)",
    )
    assert macs(model) == 240


def test_the_work_of_a_models_own_functions_is_counted() -> None:
    opset = [onnx.helper.make_opsetid("", 19), onnx.helper.make_opsetid("own", 1)]
    body = [onnx.helper.make_node("MatMul", ["a", "w"], ["b"])]
    made = onnx.helper.make_function("own", "Dense", ["a", "w"], ["b"], body, opset[:1])
    model = parsed("float[n,20] x, float[20,5] w", "y = MatMul(x, w)")
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Dense", ["x", "w"], ["y"], domain="own"))
    model.functions.append(made)
    model.opset_import.append(opset[1])
    assert macs(model) == 100


@pytest.mark.parametrize(
    ("domain", "kind"), [("com.microsoft", "FusedGemm"), ("com.microsoft", "Gelu"), ("", "Attention")]
)
def test_an_operator_whose_work_is_not_known_is_no_zero(domain: str, kind: str) -> None:
    model = parsed("float[n,20] x, float[20,5] w", "y = MatMul(x, w)")
    model.graph.node[0].CopyFrom(onnx.helper.make_node(kind, ["x", "w"], ["y"], domain=domain))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ConfigError, match=f"is .*{kind}, whose multiply-adds are not known"):
        macs(model)


def test_values_of_weights_do_not_go_through_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = parsed("float[n,200] x", "y = Gemm<transB=1>(x, w)"), list[int]()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((300, 200), np.float32), "w"))

    def inferred(given: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        sizes.append(given.ByteSize())
        return onnx.shape_inference.infer_shapes(given, **options)

    monkeypatch.setattr("edge_client.measure.macs.infer_shapes", inferred)
    assert macs(model) == 300 * 200
    assert max(sizes) < 1000
