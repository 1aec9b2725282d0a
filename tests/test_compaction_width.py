"""Widths of a compact model: which pruned channels come back, and that none of them changes the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest

from edge_client.compaction import tuning
from edge_client.compaction.smaller import analysed, cut, written
from edge_client.compaction.study import study
from edge_client.compaction.surgery import freeze
from edge_client.compaction.tuning import aligned
from edge_client.compaction.width import forced, rounded, streams, widened
from edge_client.measure.macs import macs

GRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,3,6,6] x, float[12,3,3,3] a, float[12,1,3,3] d, float[12] db, float[20,12,1,1] p, float[20,12,1,1] q,
   float[4,20] h) => (float[n,4] y) {
  u = Conv<pads=[1,1,1,1]>(x, a)
  v = Relu(u)
  w = Conv<group=12, pads=[1,1,1,1]>(v, d, db)
  r = Relu(w)
  s = Conv(r, p)
  t = Conv(r, q)
  m = Add(s, t)
  z = Relu(m)
  k = GlobalAveragePool(z)
  f = Flatten(k)
  y = Gemm<transB=1>(f, h)
}
"""
KEPT = {"a": [0, 1, 2, 5, 7], "d": [1, 2, 3, 5, 7, 9], "p": [0, 3, 4, 8, 9, 10, 11], "q": [0, 1, 2, 3, 15]}


def model(text: str = GRAPH, kept: Mapping[str, Sequence[int]] = KEPT) -> onnx.ModelProto:
    """An expansion, a depthwise convolution and two branches in a sum, each with a mask of its own."""
    parsed = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    tensors = {}
    for value in list(parsed.graph.input)[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        made = random.standard_normal(shape).astype(np.float32)
        if value.name in kept:
            made[np.setdiff1d(np.arange(len(made)), kept[value.name])] = 0
        tensors[value.name] = made
    return freeze(parsed, tensors)


PROBE = np.zeros((2, 3, 6, 6), np.float32)


def widths(made: onnx.ModelProto) -> list[tuple[int, ...]]:
    """(outputs, inputs) of the convolutions, in order."""
    sizes = {t.name: tuple(t.dims) for t in made.graph.initializer}
    return [sizes[n.input[1]][:2] for n in made.graph.node if n.op_type == "Conv"]


def outputs(made: onnx.ModelProto) -> np.ndarray:
    import onnxruntime as ort

    x = np.random.default_rng(1).standard_normal((5, 3, 6, 6)).astype(np.float32)
    found: np.ndarray = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    return found


def test_a_stream_holds_a_depthwise_layer_with_the_layer_before_it_and_a_sum_with_both_its_branches() -> None:
    found = {s.size: s for s in streams(analysed(model(), PROBE))}
    assert sorted(found) == [12, 20]
    assert (len(found[12].layers), len(found[12].depthwise), len(found[12].readers)) == (1, 1, 2)
    assert (len(found[20].layers), len(found[20].depthwise)) == (2, 0)


def test_facts_and_pieces_take_memory_for_channels_and_not_for_places() -> None:
    found = analysed(model(), PROBE)
    for facts in (found.value, found.varies, found.label, found.read, found.due):
        assert sum(v.base.size for v in facts.values()) <= 3 * 6 * 6 + sum(found.shape(v)[1] for v in facts)
    assert list(written(found).pieces) == ["y"]  # the others are dropped behind their last readers


def test_without_alignment_every_layer_has_what_its_own_mask_leaves() -> None:
    made = aligned(analysed(model(), PROBE), "none", None).model
    assert widths(made) == [(4, 3), (4, 1), (7, 4), (5, 4)]  # the depthwise layer reads what both masks leave
    np.testing.assert_allclose(outputs(made), outputs(model()), atol=1e-5)


@pytest.mark.parametrize(("step", "joined", "expected"), [
    (8, False, [(8, 3), (8, 1), (7, 8), (5, 8)]),  # no layer reads the sum as images
    (4, True, [(4, 3), (4, 1), (12, 4), (12, 4)]),
    (1, True, [(4, 3), (4, 1), (10, 4), (10, 4)]),
    (16, False, [(4, 3), (4, 1), (7, 4), (5, 4)]),
])  # fmt: skip
def test_widths_that_are_read_are_multiples_as_far_as_there_are_channels_and_the_outputs_stay(
    step: int, joined: bool, expected: list[tuple[int, int]]
) -> None:
    found = analysed(model(), PROBE)
    made = cut(study(found.net, widened(forced(found, lambda stream, count: step, joined)))).model
    assert widths(made) == expected
    np.testing.assert_allclose(outputs(made), outputs(model()), atol=1e-5)


def test_layers_that_share_a_stream_take_its_channels_first() -> None:
    kept, first = np.zeros(8, np.bool_), np.zeros(8, np.bool_)
    kept[[1, 6]], first[[1, 5, 6, 7]] = True, True
    assert np.flatnonzero(rounded(kept, 4, first)).tolist() == [1, 5, 6, 7]
    assert np.flatnonzero(rounded(first, 3, kept)).tolist() == [0, 1, 2, 5, 6, 7]
    assert rounded(kept, 16, first) is kept  # there are not so many


def by_macs(models: Sequence[bytes]) -> list[float]:
    """A clock on which fewer multiply-adds are faster."""
    return [float(macs(data)) for data in models]


def test_auto_is_as_narrow_as_possible_where_no_width_runs_faster_and_the_rule_without_a_clock() -> None:
    found = analysed(model(), PROBE)
    assert aligned(found, "auto", by_macs).model == aligned(found, "none", None).model
    assert aligned(found, "auto", None).model == aligned(found, "rule", None).model  # without a clock


def test_auto_takes_the_fastest_of_six_models() -> None:
    found, seen = analysed(model(), PROBE), dict[int, list[tuple[int, ...]]]()
    for fastest in range(6):

        def clock(data: Sequence[bytes], fastest: int = fastest) -> list[float]:
            seen.update({i: widths(onnx.load_from_string(d)) for i, d in enumerate(data)})
            return [1.0 + (i != fastest) for i in range(len(data))]

        assert widths(aligned(found, "auto", clock).model) == seen[fastest]
    # As masked; by the rule; both branches of the sum alike; all that no layer reads as images; all; the graph itself.
    assert [(made[0][0], *(out for out, _ in made[2:])) for made in seen.values()] == [
        (4, 7, 5), (4, 7, 10), (4, 10, 10), (4, 20, 20), (12, 20, 20), (12, 20, 20),
    ]  # fmt: skip


@pytest.mark.parametrize(("counts", "width"), [((9, 9), 10), ((9, 10, 9), 5), ((9, 10, 10), 20)])
def test_a_model_that_costs_more_than_the_dense_one_is_narrower_and_if_that_costs_more_too_whole(
    counts: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(counts)  # of the dense model, the one by the rule, and the narrowest
    monkeypatch.setattr(tuning, "macs", lambda model: left.pop(0))
    made = aligned(analysed(model(), PROBE), "rule", None)
    assert widths(made.model)[-1][0] == width
    assert any("more multiply-adds" in line for line in made.stopped) == (width == 20)
    assert not left
    np.testing.assert_allclose(outputs(made.model), outputs(model()), rtol=1e-4, atol=1e-5)


WHOLE = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,3,6,6] x, float[5,3,1,1] a, float[3,3,1,1] z, float[12,11,1,1] b, float[4,12] h) => (float[n,4] y)
<int64[8] pads = {0, 1, 0, 0, 0, 2, 0, 0}> {
  u = Conv(x, a)
  p = Pad(u, pads)
  q = Conv(x, z)
  c = Concat<axis=1>(p, q)
  v = Conv(c, b)
  r = Relu(v)
  k = GlobalAveragePool(r)
  f = Flatten(k)
  y = Gemm<transB=1>(f, h)
}
"""


def test_values_that_stay_whole_keep_the_zeros_that_are_padded_and_concatenated() -> None:
    text = model(WHOLE, {"z": [], "a": [0, 2]})
    found = analysed(text, PROBE)
    made = cut(found.again(dict.fromkeys(found.varies, "it stays")))
    assert made.stopped == ("it stays",)
    assert widths(made.model)[-1] == (12, 11)
    np.testing.assert_allclose(outputs(made.model), outputs(text), rtol=1e-4, atol=1e-5)


SUM = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,3,6,6] x, float[40,3,3,3] a, float[40,3,3,3] b, float[40] bb, float[8,40,3,3] c, float[4,8] h)
  => (float[n,4] y) {
  u = Conv<pads=[1,1,1,1]>(x, a)
  r = Relu(u)
  v = Conv<pads=[1,1,1,1]>(x, b, bb)
  m = Add(r, v)
  z = Relu(m)
  w = Conv(z, c)
  k = GlobalAveragePool(w)
  f = Flatten(k)
  y = Gemm<transB=1>(f, h)
}
"""


def test_a_sum_that_a_convolution_reads_is_filled_up_with_zeros_and_needs_no_gather() -> None:
    whole = model(SUM, {"a": [*range(0, 40, 2)], "b": [*range(1, 40, 3)]})  # 20 channels, and 7 others
    found = analysed(whole, PROBE)
    made = aligned(found, "rule", None).model
    assert widths(made) == [(20, 3), (28, 3), (8, 28)]
    assert "Gather" not in [n.op_type for n in made.graph.node]
    assert widths(aligned(found, "none", None).model)[2] == (8, 27)
    np.testing.assert_allclose(outputs(made), outputs(whole), atol=1e-5, rtol=1e-4)


DEPTHWISE = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n,3,6,6] x, float[40,3,1,1] a, float[40,1,3,3] d, float[8,40,1,1] b, float[4,8] h) => (float[n,4] y) {
  u = Conv(x, a)
  v = Relu(u)
  w = Conv<group=40, pads=[1,1,1,1]>(v, d)
  z = Conv(w, b)
  k = GlobalAveragePool(z)
  f = Flatten(k)
  y = Gemm<transB=1>(f, h)
}
"""


@pytest.mark.parametrize(("live", "width"), [(3, 16), (17, 32), (33, 36), (38, 40)])
def test_the_rule_fills_the_blocks_of_a_depthwise_layer_as_far_as_there_are_channels(live: int, width: int) -> None:
    whole = model(DEPTHWISE, {"a": [*range(live)]})
    made = aligned(analysed(whole, PROBE), "rule", None).model
    assert widths(made) == [(width, 3), (width, 1), (8, width)]
    np.testing.assert_allclose(outputs(made), outputs(whole), atol=1e-5, rtol=1e-4)


def test_the_rule_leaves_layers_as_they_are_that_read_less_than_a_block() -> None:
    whole = model(SUM, {"a": [1, 2, 5], "b": [2, 3, 7, 9]})
    assert widths(aligned(analysed(whole, PROBE), "rule", None).model) == [(3, 3), (6, 3), (8, 6)]


def test_a_layer_that_another_reads_with_nothing_between_is_a_stream() -> None:
    text = """
    <ir_version: 9, opset_import: ["" : 20]>
    g (float[n,6] x, float[12,6] a, float[4,12] h) => (float[n,4] y) {
      u = Gemm<transB=1>(x, a)
      y = Gemm<transB=1>(u, h)
    }
    """
    (found,) = streams(analysed(model(text, {}), np.zeros((2, 6), np.float32)))
    assert (found.size, len(found.layers), len(found.readers)) == (12, 1, 1)
