"""What compaction keeps and why: a layer that cannot be cut, divisions, averages, fixed matrices, plain recurrence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto
from small_graphs import CONV, GRAPHS, MEAN, Graph, compact, masked, weights

from edge_client.compaction import maps
from edge_client.compaction.pieces import Ragged
from edge_client.compaction.rules import REWRITES
from edge_client.compaction.writer import Writer
from edge_client.equality import Probe, Sides, prove
from edge_client.errors import CompactionError


@pytest.mark.parametrize("error", [CompactionError("no"), Ragged("v", "no"), ValueError("no")])
def test_a_layer_whose_reader_cannot_be_cut_stays_whole_and_the_others_go(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = GRAPHS["chain with a flatten"]

    def picky(w: Writer, node: NodeProto) -> None:
        name = node.input[0]
        if node.op_type == "Softplus" and w.pieces[name].ids.size < np.prod(w.study.shape(name)):
            if isinstance(error, Ragged):
                error.value = name
            raise error
        maps.rewrite(w, node)

    monkeypatch.setitem(REWRITES, maps.MAP, picky)
    model, report, found = compact(graph, masked(graph, "weight", 0.5, 0), tmp_path)
    assert found <= 1e-5
    assert weights(model, "Conv", "Gemm") == [(4, 2, 3, 3), (3, 4, 3, 3), (10, 27), (3, 10)]
    reason = "ValueError: no" if isinstance(error, ValueError) else "no"
    assert report.stopped == (f"c: Softplus cannot be written on fewer channels ({reason})",)


def test_a_dead_dividend_makes_its_divisor_dead(tmp_path: Path) -> None:
    graph = Graph(
        (6,),
        {"a": (8, 6), "ab": (8,), "b": (8, 6), "bb": (8,), "o": (3, 8), "ob": (3,)},
        "s = Gemm <transB = 1> (x, a, ab) t = Gemm <transB = 1> (x, b, bb) k = Constant <value_float = 1.0> () "
        "e0 = Abs(t) e = Add(e0, k) q = Div(s, e) "
        "logits = Gemm <transB = 1> (q, o, ob)",
        {"a": (0, 1)},
        {"a": "ab"},
    )
    model, report, error = compact(graph, masked(graph, "act", 0.5, 0), tmp_path)
    assert error <= 1e-5
    assert weights(model, "Gemm") == [(4, 6), (4, 6), (3, 4)]
    assert report.stopped == ()


def test_channels_go_through_a_product_with_one_fixed_matrix_of_three_axes(tmp_path: Path) -> None:
    """As `einsum("nctv,vw->nctw", x, m)` is written: samples, channels and steps in one axis."""
    body = (
        "rows = Constant <value_ints = [1, -1, 6]> () back = Constant <value_ints = [-1, 8, 6, 6]> () "
        f"s = {CONV} (x, a, ab) r = Reshape(s, rows) p = MatMul(r, m1) t = Reshape(p, back) "
        f"z = {CONV} (t, b, bb) " + MEAN.format(v="z").replace("m = ", "k = ").replace("(m,", "(k,")
    )
    tensors: dict[str, tuple[int, ...]] = {
        "a": (8, 2, 3, 3), "ab": (8,), "m1": (1, 6, 6), "b": (4, 8, 3, 3), "bb": (4,), "o": (3, 4), "ob": (3,),
    }  # fmt: skip
    graph = Graph((2, 6, 6), tensors, body, {"a": (0, 1)}, {"a": "ab"})
    model, report, error = compact(graph, masked(graph, "weight", 0.5, 0), tmp_path)
    assert error <= 1e-5
    assert weights(model, "Conv") == [(4, 2, 3, 3), (4, 4, 3, 3)]
    assert report.stopped == ()


def test_an_average_by_a_softmax_of_a_constant_is_that_constant(tmp_path: Path) -> None:
    """Also where the rows of the softmax are moved on their way to the product."""
    body = (
        "s = MatMul(x, q) t = Transpose <perm = [0, 2, 1]> (x) c = MatMul(s, t) p = Softmax <axis = 1> (c) "
        "w = Transpose <perm = [0, 2, 1]> (p) v1 = MatMul(x, v) v2 = Add(v1, vb) y = MatMul(w, v2) r = Relu(y) "
        "u = MatMul(r, d) one = Constant <value_ints = [1]> () m = ReduceMean <keepdims = 0> (u, one) "
        "logits = Gemm <transB = 1> (m, o, ob)"
    )
    tensors: dict[str, tuple[int, ...]] = {
        "q": (5, 5), "v": (5, 8), "vb": (8,), "d": (8, 4), "o": (3, 4), "ob": (3,),
    }  # fmt: skip
    graph = Graph((6, 5), tensors, body, {"v": (1, 1)}, {})
    model, report, error = compact(graph, masked(graph, "weight", 0.5, 0), tmp_path)
    assert error <= 1e-5
    assert weights(model, "MatMul") == [(5, 5), (5, 4), (4, 4)]
    assert report.stopped == ()
    other = replace(graph, body=body.replace("axis = 1", "axis = 2"))  # columns that sum to one average nothing
    model, report, error = compact(other, masked(other, "weight", 0.5, 0), tmp_path)
    assert error <= 1e-5
    assert report.stopped == ("v: MatMul reads dead channels (4 of 8)",)


@pytest.mark.parametrize("function", ["Tanh", "Relu"])
def test_the_units_of_a_plain_recurrent_layer_leave(function: str, tmp_path: Path) -> None:
    once = GRAPHS["lstm"]
    body = once.body.replace("LSTM <", f'RNN <activations = ["{function}"], ')
    shapes = {**once.tensors, "w": (1, 6, 4), "r": (1, 6, 6), "wb": (1, 12)}
    graph = Graph(once.x, shapes, body, {"w": (1, 1), "r": (1, 1)}, {"w": "wb"})
    values = masked(graph, "weight", 1.0, 0)
    for name in ("w", "r", "wb"):
        values[name].reshape(1, -1, 6)[..., :3] = 0 if name == "wb" else values[name].reshape(1, -1, 6)[..., :3]
    values["w"][:, :3], values["r"][:, :3] = 0, 0
    model, _, error = compact(graph, values, tmp_path)
    (cell,) = (n for n in model.graph.node if n.op_type == "RNN")
    assert error <= 1e-5
    assert {t.name: tuple(t.dims) for t in model.graph.initializer}[cell.input[2]] == (1, 3, 3)


SIDES = Sides("made", "right", "stop", "nan")


def proved(outputs: np.ndarray, error: float, rounding: float) -> tuple[float, float]:
    probe = Probe("inputs", True, np.zeros((len(outputs), 1)))
    sides = [lambda _, e=e: outputs + e for e in (0.0, error, rounding)]
    return prove([probe], *sides, SIDES)


def test_outputs_far_from_zero_are_compared_by_their_spread() -> None:
    outputs = np.random.default_rng(0).standard_normal((16, 3))
    assert proved(outputs, 5e-6, 0.0)[1] <= 1e-5
    with pytest.raises(CompactionError, match="differ"):
        proved(1000 + outputs, 1e-3, 0.0)  # a thousandth of the spread, a millionth of the outputs
    assert proved(1000 + outputs, 2e-4, 0.0)[1] <= 1e-5  # float32 holds a thousand no better
    assert proved(np.full((4, 1), 7.0), 1e-7, 0.0)[1] <= 1e-5  # nothing varies


def test_a_difference_that_rounding_excuses_is_reported_as_it_is() -> None:
    outputs = np.random.default_rng(0).standard_normal((16, 3))
    assert proved(outputs, 1e-3, 1e-3)[1] > 1e-4
