"""Products whose batch axes the exporter joined are written on the axes themselves."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_client.compaction.smaller import analysed, cut
from edge_client.compaction.surgery import freeze

HEADS = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,5,6] x, float[6,6] q, float[6] qb, float[6,6] k, float[6] kb) => (float[n,3,5,5] y)
<int64[4] parts = {-1, 5, 3, 2}, int64[3] one = {-1, 5, 2}, int64[3] two = {-1, 2, 5}, int64[4] back = {-1, 3, 5, 5}> {
  a = MatMul(x, q)
  b = Add(a, qb)
  c = Reshape(b, parts)
  d = Transpose<perm=[0, 2, 1, 3]>(c)
  ds = Shape(d)
  de = Expand(d, ds)
  e = Reshape(de, one)
  f = MatMul(x, k)
  h = Add(f, kb)
  i = Reshape(h, parts)
  j = Transpose<perm=[0, 2, 3, 1]>(i)
  m = Reshape(j, two)
  p = MatMul(e, m)
  y = Reshape(p, back)
}
"""


def drawn(graph: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A graph and values of its tensors."""
    model, random = onnx.parser.parse_model(graph), np.random.default_rng(0)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in list(model.graph.input)[1:]}
    return model, {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def compacted(frozen: onnx.ModelProto, *sample: int) -> onnx.ModelProto:
    """The smaller graph, which gives the outputs of `frozen` for one sample and for four."""
    made, random = cut(analysed(frozen, np.zeros((2, *sample), np.float32))).model, np.random.default_rng(1)
    for n in (1, 4):
        x = random.standard_normal((n, *sample)).astype(np.float32)
        due, found = (
            ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
            for m in (frozen, made)
        )
        np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-5)
    return made


def test_heads_that_were_joined_with_the_batch_are_parted_and_get_constants_of_their_own() -> None:
    model, tensors = drawn(HEADS)
    # constant in query and key, in another head each: products of two constants, and of one
    tensors["q"][:, [0, 3, 4]] = 0
    tensors["k"][:, [0, 3]] = 0
    assert "Expand" not in [n.op_type for n in compacted(freeze(model, tensors), 5, 6).graph.node]


WINDOWS = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,8,4] x, float[4,6] a, float[6] s) => (float[n,8,6] y)
<int64[3] windows = {-1, 4, 6}, int64[3] back = {-1, 8, 6}, int64[1] last = {2}> {
  c = MatMul(x, a)
  d = Add(c, s)
  e = Reshape(d, windows)
  f = Mul(e, e)
  h = ReduceSum(f, last)
  i = Div(e, h)
  y = Reshape(i, back)
}
"""


def test_constants_are_put_in_for_the_windows_of_all_samples_and_not_for_those_of_one() -> None:
    model, tensors = drawn(WINDOWS)
    tensors["a"][:, [0, 3]] = 0
    compacted(freeze(model, tensors), 8, 4)


CONSTANT_HEADS = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,8,4] x, float[4,6] a, float[6] s, float[4,6] b) => (float[n,2,3,4,4] y)
<int64[4] windows = {-1, 4, 3, 2}, int64[3] rows = {-1, 4, 2}, int64[3] columns = {-1, 2, 4},
 int64[5] back = {-1, 2, 3, 4, 4}, int64[1] last = {3}> {
  c = MatMul(x, a)
  d = Add(c, s)
  e = Reshape(d, windows)
  f = Transpose<perm=[0, 2, 1, 3]>(e)
  h = ReduceSum(f, last)
  i = Div(f, h)
  j = Reshape(i, rows)
  k = MatMul(x, b)
  m = Reshape(k, columns)
  r = MatMul(j, m)
  y = Reshape(r, back)
}
"""


CONSTANT_FACTOR = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,8,4] x, float[4,6] a, float[6] s, float[4,6] b) => (float[n,2,4,4] y)
<int64[3] rows = {-1, 4, 6}, int64[3] columns = {-1, 6, 4}, int64[4] back = {-1, 2, 4, 4}, int64[1] last = {2}> {
  c = MatMul(x, a)
  d = Add(c, s)
  e = Reshape(d, rows)
  f = Mul(e, e)
  h = ReduceSum(f, last)
  i = Div(e, h)
  k = MatMul(x, b)
  m = Reshape(k, columns)
  r = MatMul(i, m)
  y = Reshape(r, back)
}
"""


@pytest.mark.parametrize("graph", [CONSTANT_HEADS, CONSTANT_FACTOR], ids=["heads joined with windows", "a factor"])
def test_what_is_constant_in_every_window_is_so_for_the_windows_of_all_samples(graph: str) -> None:
    model, tensors = drawn(graph)
    tensors["a"][:] = 0
    made = compacted(freeze(model, tensors), 8, 4)
    assert [n.op_type for n in made.graph.node].count("MatMul") == 2  # without that by `a`
