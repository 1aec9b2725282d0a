"""Graphs in plain form: what a rewriting must leave as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnxruntime import InferenceSession

from edge_client.compaction.net import build
from edge_client.compaction.preparation import dense, prepare
from edge_client.runtimes.onnx import open_onnx

HEAD = '<ir_version: 10, opset_import: ["" : 18]> g (float[N, 3] x) => (float[M, 2] y) '
X = np.random.default_rng(0).standard_normal((4, 3), np.float32)

GRAPHS = {
    "a split along the batch": """{
        n = Neg (x) t = Concat <axis = 0> (x, n) h = MatMul (t, w) r = Relu (h) o = MatMul (r, v)
        a, b = Split <axis = 0, num_outputs = 2> (o) y = Add (a, b) }""",
    "a name that a subgraph reads": """{
        h = MatMul (x, w) r = Relu (h) i = Identity (r) s = ReduceSum <keepdims = 0> (i) z = Less (s, s)
        q = If (z) <then_branch = t () => (float[N, 4] a) { a = Neg (i) },
                    else_branch = e () => (float[N, 4] b) { b = Identity (i) }>
        y = MatMul (q, v) }""",
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_prepared_graph_gives_the_outputs_of_the_graph_for_every_number_of_samples(name: str) -> None:
    model = parser.parse_model(HEAD + GRAPHS[name])
    rng = np.random.default_rng(1)
    for key, shape in (("w", (3, 4)), ("v", (4, 2))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), key))
    net = prepare(model, X)
    made = build(net, net.nodes, net.constants, [onnx.ValueInfoProto(name=net.output)])
    for n in (1, 2, 4):
        (right,), (found,) = (_open(m).run(None, {"x": X[:n]}) for m in (model, made))
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_the_graph_that_runs_once_for_its_shapes_holds_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model(HEAD + "{ h = MatMul (x, w) y = MatMul (h, v) }")
    for key, shape in (("w", (3, 900)), ("v", (900, 2))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), key))
    sizes = list[int]()

    def opened(given: bytes, **options: Any) -> InferenceSession:
        sizes.append(len(given))
        return open_onnx(given, **options)

    monkeypatch.setattr("edge_client.compaction.preparation.open_onnx", opened)
    net = prepare(model, X)
    assert net.shapes["y"] == (1, 2)
    assert max(sizes) < 1000
    assert net.model.ByteSize() < 1000  # nor does what stays of the graph beside its constants


def _open(model: onnx.ModelProto) -> InferenceSession:
    return open_onnx(model.SerializeToString())


@pytest.mark.parametrize(("settings", "outputs", "left"), [("", "y", 0), ("<training_mode = 1>", "y, m, v", 1)])
def test_a_batch_norm_that_takes_the_statistics_of_the_batch_is_not_folded(
    settings: str, outputs: str, left: int
) -> None:
    body = f"{{ h = Gemm <transB = 1> (x, w) {outputs} = BatchNormalization {settings} (h, s, b, e, d) }}"
    model = parser.parse_model(HEAD + body)
    for key, shape in (("w", (2, 3)), ("s", 2), ("b", 2), ("e", 2), ("d", 2)):
        model.graph.initializer.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), key))
    made = dense(model)
    assert [n.op_type for n in made.graph.node].count("BatchNormalization") == left
    (right,), (found,) = (_open(m).run(None, {"x": X}) for m in (model, made))
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
