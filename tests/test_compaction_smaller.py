"""Graphs of every kind on fewer channels: the same outputs, no multiply-add that a dead channel takes part in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from onnx import numpy_helper
from small_graphs import (
    BY_ELEMENT,
    CONV,
    FRAMES,
    GRAPHS,
    MERGED_HEADS,
    MERGED_ROWS,
    Graph,
    Kind,
    bundle_of,
    compact,
    masked,
    personal_of,
    run,
    samples,
    weights,
)

from edge_client.align import Align
from edge_client.compaction import personal as personal_module
from edge_client.compaction.personal import write_personal
from edge_client.compaction.pieces import Ragged
from edge_client.compaction.smaller import Smaller
from edge_client.compaction.tuning import aligned
from edge_client.compaction.writer import Writer
from edge_client.errors import CompactionError

EVERY = {**GRAPHS, "merged heads": MERGED_HEADS, "merged rows": MERGED_ROWS, "frames": FRAMES, "by element": BY_ELEMENT}


@pytest.mark.parametrize("kept", [0.5, 0.3])
@pytest.mark.parametrize("kind", ["act", "weight"])
@pytest.mark.parametrize("name", EVERY)
def test_the_smaller_graph_says_the_same(name: str, kind: Kind, kept: float, tmp_path: Path) -> None:
    graph = EVERY[name]
    model, report, error = compact(graph, masked(graph, kind, kept, 1), tmp_path)
    assert error <= 1e-5
    dense = sum(np.prod(graph.tensors[w]) for w in graph.rows)
    live = sum(
        np.prod(shape) for shape in weights(model, "Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "Gather")
    )
    assert live < 0.8 * dense
    # Under "weight" a pruned channel emits a constant, and a map of constants has parameters too.
    assert report.parameters_compact <= (report.parameters_live if kind == "act" else report.parameters_dense)
    assert all(left <= np.ceil(kept * size) for name, (size, left) in report.layers.items() if name in graph.rows)


@pytest.mark.parametrize("kind", ["act", "weight"])
@pytest.mark.parametrize("name", ["heads", "fused heads", "norm over channels", "residual", "lstm"])
def test_a_graph_with_fewer_moves_says_the_same(name: str, kind: Kind, tmp_path: Path) -> None:
    graph = GRAPHS[name]
    values = masked(graph, kind, 0.5, 2)
    model, _, error = compact(graph, values, tmp_path, "rule")
    fewest, _, _ = compact(graph, values, tmp_path)
    moves = [[n.op_type for n in m.graph.node].count("Gather") for m in (model, fewest)]
    assert error <= 1e-5
    assert moves[0] <= moves[1]


def test_conflicting_masks_of_a_residual_stream_cut_every_layer_by_its_own(tmp_path: Path) -> None:
    graph = GRAPHS["residual"]
    values = masked(graph, "weight", 1.0, 0)
    values["a"][:4], values["c"][2:6], values["d"][6:] = 0, 0, 0  # rows that are left: 4, 4 and 6, of a stream of 8
    model, _, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    # the stream behind the first sum has channels 0, 1, 4 .. 7; b reads the 4 of `a` alone
    assert weights(model, "Conv") == [(4, 2, 3, 3), (6, 4, 3, 3), (4, 6, 3, 3), (6, 6, 3, 3)]


def test_constants_behind_padding_are_a_map_and_no_channel(tmp_path: Path) -> None:
    graph = GRAPHS["chain with a flatten"]
    values = masked(graph, "weight", 1.0, 0)
    values["a"][2:] = 0
    model, _, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    assert weights(model, "Conv") == [(2, 2, 3, 3), (6, 2, 3, 3)]
    maps = [numpy_helper.to_array(t) for t in model.graph.initializer if len(t.dims) == 4 and t.dims[0] == 1]
    assert [m.shape for m in maps] == [(1, 6, 3, 3)]  # stored by its distinct rows and columns: two borders, inside


def test_without_constants_nothing_is_added(tmp_path: Path) -> None:
    graph = GRAPHS["chain with a flatten"]
    model, _, error = compact(graph, masked(graph, "act", 0.5, 2), tmp_path)
    assert error <= 1e-5
    kinds = [n.op_type for n in model.graph.node]
    assert kinds == [
        "Conv",
        "Relu",
        "Conv",
        "Elu",
        "MaxPool",
        "Flatten",
        "Gemm",
        "Softplus",
        "Add",
        "Gemm",
    ] or kinds == [
        *("Conv", "Relu", "Conv", "Elu", "MaxPool", "Flatten", "Gemm", "Softplus", "Gemm"),
    ]


def test_heads_keep_different_entries(tmp_path: Path) -> None:
    """Queries and keys lose entries head by head; scores take as many entries as the widest head has."""
    graph = GRAPHS["heads"]
    values = masked(graph, "act", 1.0, 0)
    for name in "qk":
        for gone in (0, 1, 5, 10, 11):  # head 0 keeps 2 entries, head 1 keeps 3, head 2 keeps 2
            values[name][:, gone] = 0
            values[f"{name}b"][gone] = 0
    model, _, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    assert weights(model, "MatMul")[:2] == [(6, 7), (6, 7)]


@pytest.mark.parametrize("align", ["none", "rule"])
@pytest.mark.parametrize("gone", [[0], [1], [0, 2]])
@pytest.mark.parametrize("name", ["heads", "fused heads"])
def test_whole_heads_that_are_gone_are_not_computed(name: str, gone: list[int], align: Align, tmp_path: Path) -> None:
    """As a method leaves them that prunes whole heads: no layer before or behind them has their entries."""
    graph = GRAPHS[name]
    values = masked(graph, "act", 1.0, 0)
    for made in ("a",) if name == "fused heads" else "qkv":
        for tensor in (made, f"{made}b"):
            heads = values[tensor].reshape(*values[tensor].shape[:-1], -1, 3, 4)  # a view: all parts, heads, entries
            heads[..., gone, :] = 0
    model, report, error = compact(graph, values, tmp_path, align)
    assert error <= 1e-5
    left = 12 - 4 * len(gone)
    assert weights(model, "MatMul") == [*[(6, left)] * 3, (left, 8)]
    assert not report.stopped


@pytest.mark.parametrize("align", ["none", "rule"])
def test_whole_groups_of_a_group_norm_that_are_gone_are_not_computed(align: Align, tmp_path: Path) -> None:
    graph = GRAPHS["group norm"]
    values = masked(graph, "weight", 1.0, 0)
    for name in ("a", "ab", "g", "h"):
        values[name][[0, 1, 2, 6, 7, 8]] = 0
    model, report, error = compact(graph, values, tmp_path, align)
    assert error <= 1e-5
    assert weights(model, "Conv") == [(6, 2, 3, 3), (8, 6, 3, 3)]
    assert not report.stopped


def test_heads_that_share_an_axis_with_the_batch_are_right_for_every_sample(tmp_path: Path) -> None:
    """Queries live in head 0 alone, keys in both: sixteen samples must not get the scores of the first."""
    values = masked(MERGED_HEADS, "act", 1.0, 7)
    for name, gone in (("q", [0, 1, 3, 4, 5, 6, 7]), ("k", [0, 5]), ("v", [0, 1, 2, 5])):
        values[name][:, gone], values[f"{name}b"][gone] = 0, 0
    _, _, error = compact(MERGED_HEADS, values, tmp_path)
    assert error <= 1e-5


def test_the_units_of_a_recurrent_layer_leave_all_gates(tmp_path: Path) -> None:
    graph = GRAPHS["lstm"]
    model, _, error = compact(graph, masked(graph, "act", 0.5, 0), tmp_path)
    assert error <= 1e-5
    (node,) = (n for n in model.graph.node if n.op_type == "LSTM")
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    assert [shapes[v] for v in node.input[1:4]] == [(1, 12, 4), (1, 12, 3), (1, 24)]


STATES = {
    "both": "i = Constant <value_ints = [2]> () p = Gather <axis = 0> (st, i) j = Constant <value_ints = [3]> () "
    "q = Gather <axis = 0> (st, j) k = Concat <axis = 2> (p, q) h = Squeeze(k, z)",
    "the last": "j = Constant <value_int = 3> () h = Gather <axis = 0> (st, j)",
    "all": "k = Transpose <perm = [1, 0, 2]> (st) d = Constant <value_ints = [-1, 24]> () h = Reshape(k, d)",
}


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("states", STATES)
def test_final_states_of_directions_that_lost_different_units_are_read(
    states: str, cell: Literal["LSTM", "GRU"], tmp_path: Path
) -> None:
    """Two layers both ways; four of six units stay forwards, two others backwards, and other ones in the second."""
    gates, width = {"LSTM": 4, "GRU": 3}[cell], {"both": 12, "the last": 6, "all": 24}[states]
    rows = 6 * gates
    given = 'hidden_size = 6, direction = "bidirectional"' + (", linear_before_reset = 1" if cell == "GRU" else "")
    tensors: dict[str, tuple[int, ...]] = {"o": (3, width), "ob": (3,)}
    tensors |= {f"w{k}": (2, rows, 4 if k == 1 else 12) for k in (1, 2)} | {f"r{k}": (2, rows, 6) for k in (1, 2)}
    tensors |= {f"b{k}": (2, 2 * rows) for k in (1, 2)}
    body = (
        f"z = Constant <value_ints = [0]> () s = Transpose <perm = [1, 0, 2]> (x) y1, l1 = {cell} <{given}> "
        "(s, w1, r1, b1) t = Transpose <perm = [0, 2, 1, 3]> (y1) f = Constant <value_ints = [5, -1, 12]> () "
        f"g = Reshape(t, f) y2, l2 = {cell} <{given}> (g, w2, r2, b2) st = Concat <axis = 0> (l1, l2) {STATES[states]} "
        "logits = Gemm <transB = 1> (h, o, ob)"
    )
    graph = Graph((5, 4), tensors, body, {}, {})
    values = masked(graph, "act", 1.0, 0)
    for k, ways in ((1, ([0, 2], [1, 2, 3, 4])), (2, ([1, 3, 4], [0, 5]))):
        for way, gone in enumerate(ways):
            for name in "wr":
                values[f"{name}{k}"][way].reshape(gates, 6, -1)[:, gone] = 0
            values[f"b{k}"][way].reshape(2 * gates, 6)[:, gone] = 0
    model, _, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    units = [shapes[n.input[2]][2] for n in model.graph.node if n.op_type == cell]
    assert units == [4, 4]


def test_a_recurrent_layer_of_which_each_use_names_other_outputs_is_written_for_each(tmp_path: Path) -> None:
    once = GRAPHS["lstm"]
    layer = "LSTM <hidden_size = 6> (s, w, r, wb)"
    body = once.body.replace(f"y, last = {layer}", f"y, last = {layer} e, f, cell = {layer}")
    graph = replace(
        once, body=body.replace("h = Squeeze(last, z)", "h1 = Squeeze(last, z) h2 = Squeeze(cell, z) h = Mul(h1, h2)")
    )
    _, _, error = compact(graph, masked(graph, "act", 0.5, 0), tmp_path)
    assert error <= 1e-5


def test_a_recurrent_layer_reads_the_steps_that_a_mixing_of_steps_left_constant(tmp_path: Path) -> None:
    """A zero row of a matrix over the steps makes its step constant; the layer takes as many steps as before."""
    once = GRAPHS["lstm"]
    body = once.body.replace("(x)", "(v)").replace("s = ", "u = MatMul(m, x) v = Add(u, c) s = ", 1)
    graph = replace(once, tensors={**once.tensors, "m": (5, 5), "c": (5, 1)}, body=body)
    values = masked(graph, "act", 0.5, 0)
    values["m"][[0, 3]] = 0
    model, _, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    assert (3, 5) in {tuple(t.dims) for t in model.graph.initializer}


@pytest.mark.parametrize("align", ["none", "rule"])
@pytest.mark.parametrize("op", ["CumSum(u, one)", "AveragePool <kernel_shape = [3, 1], pads = [1, 0, 1, 0]> (u)"])
def test_an_operator_along_channels_takes_them_in_their_order(op: str, align: Align, tmp_path: Path) -> None:
    """A shuffle of channels is none while their order does not matter, and a sum may hold its channels in another."""
    order = "i = Constant <value_ints = [5, 2, 0, 7, 4, 1, 6, 3]> () "
    end = "f = ReduceMean <keepdims = 0> (c, last) g = Flatten(f) logits = Gemm <transB = 1> (g, o, ob)"
    if op.startswith("CumSum"):
        body = "v = Conv(x, a, ab) u = Gather <axis = 1> (v, i) one = Constant <value_int = 1> () "
        last = "last = Constant <value_ints = [2, 3]> () "
    else:  # the channels lie along the rows of an image
        body = "b = Conv(x, a, ab) v = Transpose <perm = [0, 2, 1, 3]> (b) u = Gather <axis = 2> (v, i) "
        last = "last = Constant <value_ints = [1, 3]> () "
    tensors: dict[str, tuple[int, ...]] = {"a": (8, 2, 1, 1), "ab": (8,), "o": (3, 8), "ob": (3,)}
    graph = Graph((2, 4, 4), tensors, f"{order}{last}{body}c = {op} {end}", {"a": (0, 1)}, {"a": "ab"})
    _, _, error = compact(graph, masked(graph, "act", 1.0, 0), tmp_path, align)
    assert error <= 1e-5


PLAIN = {"a": (8, 6), "ab": (8,), "o": (3, 8), "ob": (3,)}
SINES = "k = Constant <value_float = 1000000.> () y = Gemm <transB = 1> (x, a, ab) v = Mul(y, k) u = Sin(v) "
LENGTHS = (
    "one = Constant <value_ints = [1]> () n = ReduceL2(a, one) w = Div(a, n) u = Gemm <transB = 1> (x, w, ab) "
    "logits = Gemm <transB = 1> (u, o, ob)"
)


def damaged(operator: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Smaller]:
    """`aligned` with the last constant of the last `operator` changed: compaction with a fault."""

    def made(*given: Any) -> Smaller:
        result = aligned(*given)
        node = [n for n in result.model.graph.node if n.op_type == operator][-1]
        (tensor,) = (t for t in result.model.graph.initializer if t.name in node.input[-1 if operator == "Gemm" else 0])
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
        return result

    return made


def test_rounding_excuses_no_error_of_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sines of a million: one rounding moves them by 0.1 and more, and would excuse the loss of a bias."""
    monkeypatch.setattr(personal_module, "aligned", damaged("Gemm", lambda bias: bias + 1))
    graph = Graph((6,), PLAIN, SINES + "logits = Gemm <transB = 1> (u, o, ob)", {"a": (0, 1)}, {})
    with pytest.raises(CompactionError, match="outputs differ"):
        compact(graph, masked(graph, "act", 1.0, 0), tmp_path)


def test_the_nan_of_a_masked_model_is_said_to_be_its_own(tmp_path: Path) -> None:
    graph = Graph((6,), PLAIN, LENGTHS, {"a": (0, 1)}, {})
    with pytest.raises(CompactionError, match="the masked model itself gives NaN on the given samples"):
        compact(graph, masked(graph, "act", 0.5, 0), tmp_path)


@pytest.mark.parametrize("ids", [None, ((0, 9),)])
def test_a_model_of_ids_is_proved_on_all_rows_of_its_table(
    ids: tuple[tuple[int, int], ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 8 is in no sample."""
    monkeypatch.setattr(personal_module, "aligned", damaged("Gather", lambda t: np.vstack([t[:8], t[8:] + 1])))
    body = (
        "e = Gather <axis = 0> (t, x) u = Flatten(e) y = Gemm <transB = 1> (u, a, ab) "
        "logits = Gemm <transB = 1> (y, o, ob)"
    )
    graph = Graph((2,), {"t": (9, 3), **PLAIN}, body, {"a": (0, 1)}, {}, dtype="int64")
    bundle = bundle_of(graph, tmp_path)
    manifest = bundle.manifest
    ranged = manifest.model_copy(update={"input": manifest.input.model_copy(update={"ids": ids})})
    given = replace(bundle, manifest=ranged), personal_of(masked(graph, "act", 0.5, 0)), tmp_path / "personal.onnx"
    x = np.random.default_rng(0).integers(0, 8, (16, 2))
    with pytest.raises(CompactionError, match="on ids of its table") if ids else nullcontext():
        write_personal(*given, x)


ROUTED = "v = Gemm <transB = 1> (x, g, gb) i = ArgMax <axis = 1, keepdims = 1> (v) y = Gemm <transB = 1> (x, a, ab) "
READ = "logits = Gemm <transB = 1> (u, o, ob)"
BETWEEN = {
    "a scatter into zeros of its size": ROUTED + "s = Shape(y) z = ConstantOfShape(s) p = ReduceMax(v, one) "
    "t = ScatterElements <axis = 1> (z, i, p) u = Mul(t, y) ",
    "a gate's largest entry": ROUTED + "p = GatherElements <axis = 1> (v, i) u = Mul(y, p) ",
    "its number of elements": ROUTED + "n = Size(y) c = Cast <to = 1> (n) u = Div(y, c) ",
    "a choice by channel": ROUTED + "h = Constant <value_floats = [0., 1., 0., 1., 0., 1., 0., 1.]> () "
    "z = Constant <value_float = 0.> () c = Greater(h, z) u = Where(c, y, z) ",
}
"""What a graph computes of the cut value `y`, of a value `v` that varies or not, and of their sizes."""


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("name", BETWEEN)
def test_constants_sizes_and_values_that_do_not_vary_are_taken_whole(name: str, gate: float, tmp_path: Path) -> None:
    tensors = {"g": (8, 6), "gb": (8,), "a": (8, 6), "ab": (8,), "o": (3, 8), "ob": (3,)}
    body = "one = Constant <value_ints = [1]> () " + BETWEEN[name] + READ
    graph = Graph((6,), tensors, body, {"a": (0, 1)}, {"a": "ab"})
    values = masked(graph, "act", 0.5, 3)
    values["g"] *= np.float32(gate)
    _, report, error = compact(graph, values, tmp_path)
    assert error <= 1e-5
    assert report.layers["a"][1] <= 4


def test_the_size_of_rows_that_hold_samples_and_steps_is_that_of_every_batch(tmp_path: Path) -> None:
    body = (
        "r = Constant <value_ints = [-1, 6]> () rows = Reshape(x, r) y = Gemm <transB = 1> (rows, a, ab) s = Shape(y) "
        "z = ConstantOfShape(s) i = ArgMax <axis = 1, keepdims = 1> (y) one = Constant <value_ints = [1]> () "
        "p = ReduceMax(y, one) t = ScatterElements <axis = 1> (z, i, p) v = Gemm <transB = 1> (t, o, ob) "
        "b = Constant <value_ints = [-1, 3]> () w = Reshape(v, b) q = Constant <value_ints = [-1, 2, 3]> () "
        "k = Reshape(w, q) logits = ReduceSum <keepdims = 0> (k, one)"
    )
    tensors = {"a": (8, 6), "ab": (8,), "o": (3, 8), "ob": (3,)}
    graph = Graph((2, 6), tensors, body, {"a": (0, 1)}, {"a": "ab"})
    _, _, error = compact(graph, masked(graph, "act", 0.5, 0), tmp_path)
    assert error <= 1e-5


@pytest.mark.parametrize("pool", ["AveragePool", "MaxPool"])
def test_a_pool_over_channels_of_which_one_is_live_opens(pool: str, tmp_path: Path) -> None:
    """ONNX Runtime would take the zeros of the seven others as the pool's padding, larger than its window."""
    body = (
        "y = Conv (x, a, ab) s = Constant <value_ints = [-1, 1, 8, 16]> () r = Reshape(y, s) "
        f"p = {pool} <kernel_shape = [2, 1]> (r) f = Flatten(p) logits = Gemm <transB = 1> (f, o, ob)"
    )
    tensors = {"a": (8, 2, 1, 1), "ab": (8,), "o": (3, 112), "ob": (3,)}
    graph = Graph((2, 4, 4), tensors, body, {"a": (0, 1)}, {"a": "ab"})
    _, report, error = compact(graph, masked(graph, "act", 1 / 8, 0), tmp_path)
    assert error <= 1e-5
    assert report.layers["a"] == (8, 1)


def test_a_depthwise_convolution_of_which_a_channel_comes_back_may_read_none(tmp_path: Path) -> None:
    """Bands of frequencies are scaled apart, as in BC-ResNet, so dead channels come back behind the reshape alone."""
    body = (
        f"u = {CONV} (x, a, ab) f = Conv <group = 16, pads = [1, 0, 1, 0]> (u, k) "
        "bands = Constant <value_ints = [0, 32, 3, 6]> () q = Reshape(f, bands) e = Mul(q, g) "
        "image = Constant <value_ints = [0, 16, 6, 6]> () v = Reshape(e, image) h = Constant <value_ints = [2]> () "
        "t = ReduceMean(v, h) d = Conv <group = 16, pads = [0, 1, 0, 1]> (t, l) z = Relu(d) y = Conv (z, c) "
        "s = Add(y, v) hw = Constant <value_ints = [2, 3]> () m = ReduceMean <keepdims = 0> (s, hw) "
        "logits = Gemm <transB = 1> (m, o, ob)"
    )
    tensors = {"a": (16, 2, 3, 3), "ab": (16,), "k": (16, 1, 3, 1), "g": (32, 1, 1), "l": (16, 1, 1, 3)}
    graph = Graph((2, 6, 6), {**tensors, "c": (16, 16, 1, 1), "o": (3, 16), "ob": (3,)}, body, {}, {})
    values = masked(graph, "act", 1.0, 0)
    for name in ("a", "ab", "k", "l", "c"):
        values[name][8:] = 0
    values["g"][16:] = 0
    _, report, error = compact(graph, values, tmp_path, "rule")
    assert error <= 1e-5
    assert report.stopped == ()
    assert report.layers["k"] == (16, 8)


def test_what_reads_dead_channels_is_named(tmp_path: Path) -> None:
    graph = GRAPHS["norm over channels"]
    _, report, _ = compact(graph, masked(graph, "act", 0.5, 0), tmp_path)
    assert report.stopped == ("a: LayerNormalization reads dead channels (4 of 8)",)
    assert report.layers["a"] == (8, 4)


def test_a_reshape_that_keeps_dead_channels_says_so_once(tmp_path: Path) -> None:
    body = (
        "y = Gemm <transB = 1> (x, a, ab) s = Constant <value_ints = [-1, 2, 4]> () r = Reshape(y, s) "
        "k = Constant <value_ints = [1]> () m = ReduceMax <keepdims = 0> (r, k) logits = Gemm <transB = 1> (m, o, ob)"
    )
    tensors = {"a": (8, 6), "ab": (8,), "o": (3, 4), "ob": (3,)}
    graph = Graph((6,), tensors, body, {"a": (0, 1)}, {"a": "ab"})
    _, report, error = compact(graph, masked(graph, "act", 1 / 2, 2), tmp_path)
    assert error <= 1e-5
    why = "makes parts of one width, which ReduceMax behind it needs"
    assert report.stopped == (f"a: Reshape {why}, so dead entries stay (2 of 6)",)


def test_a_reason_is_given_once_and_names_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "y = Gemm <transB = 1> (x, a, ab) n = LayerNormalization(y, g, gb) m = LayerNormalization(y, h, hb) "
        "u = Add(n, m) logits = Gemm <transB = 1> (u, o, ob)"
    )
    scales = {"g": (8,), "gb": (8,), "h": (8,), "hb": (8,)}
    graph = Graph((6,), {**PLAIN, **scales}, body, {"a": (0, 1)}, {"a": "ab"})
    values = masked(graph, "act", 0.5, 0)
    _, report, _ = compact(graph, values, tmp_path)
    assert report.stopped == ("a: LayerNormalization reads dead channels (4 of 8)",)

    def ragged(writer: Writer, rewrite: object) -> None:
        raise Ragged("n", "it is cut differently from entry to entry")

    monkeypatch.setattr(Writer, "run", ragged)
    with pytest.raises(CompactionError, match=r"^a: what reads its channels .* keep the dense model and report"):
        compact(graph, values, tmp_path)


def test_a_dead_network_gives_its_constant_for_every_batch_size(tmp_path: Path) -> None:
    graph = GRAPHS["residual"]
    values = masked(graph, "weight", 0.0, 0)
    model, report, _ = compact(graph, values, tmp_path)
    assert not weights(model, "Conv")
    for n in (1, 5):
        assert run(model, {"x": np.ones((n, *graph.x), np.float32)}).shape == (n, 3)
    assert report.layers["a"] == (8, 0)


def test_the_batch_size_stays_free(tmp_path: Path) -> None:
    for name in ("fused heads", "gru of two directions", "shuffle and split"):
        graph = GRAPHS[name]
        values = masked(graph, "weight", 0.5, 3)
        model, _, _ = compact(graph, values, tmp_path)
        x = samples(graph)
        for n in (1, 3):
            np.testing.assert_allclose(run(model, {"x": x[:n]}), run(model, {"x": x})[:n], rtol=1e-4, atol=1e-5)
