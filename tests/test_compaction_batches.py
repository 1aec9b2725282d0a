"""Products whose batch axes the exporter joined are written on the axes themselves."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

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


def test_heads_that_were_joined_with_the_batch_are_parted_and_get_constants_of_their_own() -> None:
    model, random = onnx.parser.parse_model(HEADS), np.random.default_rng(0)
    tensors = {}
    for value in list(model.graph.input)[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        tensors[value.name] = random.standard_normal(shape).astype(np.float32)
    # constant in query and key, in another head each: products of two constants, and of one
    tensors["q"][:, [0, 3, 4]] = 0
    tensors["k"][:, [0, 3]] = 0
    frozen = freeze(model, tensors)
    made = cut(analysed(frozen, np.zeros((2, 5, 6), np.float32))).model
    assert "Expand" not in [n.op_type for n in made.graph.node]
    for n in (1, 4):
        x = random.standard_normal((n, 5, 6)).astype(np.float32)
        due, found = (
            ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
            for m in (frozen, made)
        )
        np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-5)
