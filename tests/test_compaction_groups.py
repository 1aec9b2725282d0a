"""Channel groups found in graphs whose groups are known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels.channels import ChannelGroup, Place, by_channel, place
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from small_graphs import GRAPHS, Graph

from edge_client.compaction.groups import Found, _named, find_groups


def found(graph: Graph) -> Found:
    return find_groups(graph.model(), graph.tensors, graph.x, graph.dtype)


def entries(group: ChannelGroup, *channels: int) -> set[str]:
    """The places of channels in words: role, tensor, axis and entries."""
    made = set()
    for p in group.places:
        own = p.of(group.size)[list(channels)].reshape(-1)
        made.add(f"{p.role} {p.tensor}.{p.axis} {' '.join(map(str, own))}")
    return made


SIZES = {
    "chain with a flatten": {"a": 8, "b": 6, "c": 10},
    "residual": {"a": 8, "b": 6},
    "concatenation": {"a": 4, "b": 6, "c": 5, "d": 8},
    "depthwise": {"a": 8, "c": 8},
    "groups": {"a": 3, "c": 8},
    "shuffle and split": {"a:0": 4, "a:4": 4, "b": 4, "c": 8},
    "transposed skip": {"a": 4, "b": 6, "up": 4, "c": 8},
    "squeeze and excite": {"a": 8, "b": 4, "d2": 8},
    "norms and slopes": {"a": 6, "b": 8, "c": 8},
    "group norm": {"a": 4, "b": 8},
    "norm over channels": {"b": 12},
    "heads": {"q": 3, "p": 8},
    "fused heads": {"a": 3, "p": 8},
    "lstm": {"w": 6},
    "gru of two directions": {"w": 6},
    "one layer twice": {"a": 8},
    "embedding": {"e": 6, "c": 8},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_has_the_groups_known_by_hand(name: str) -> None:
    assert {g.name: g.size for g in found(GRAPHS[name]).groups} == SIZES[name]


def places(name: str, group: str, *channels: int) -> set[str]:
    return entries(next(g for g in found(GRAPHS[name]).groups if g.name == group), *channels)


def test_a_chain_s_channel_is_its_row_bias_and_column() -> None:
    assert places("chain with a flatten", "a", 3) == {"makes a.0 3", "shifts ab.0 3", "reads b.1 3"}
    nine = " ".join(map(str, range(9, 18)))
    assert places("chain with a flatten", "b", 1) == {"makes b.0 1", "shifts bb.0 1", f"reads c.1 {nine}"}


def test_layers_of_a_residual_stream_lose_a_channel_together() -> None:
    due = {"makes a.0 5", "shifts ab.0 5", "reads b.1 5", "makes c.0 5", "shifts cb.0 5", "reads d.1 5"}
    assert places("residual", "a", 5) == due | {"makes d.0 5", "shifts db.0 5", "reads o.1 5"}


def test_concatenated_channels_have_an_offset_in_what_reads_them() -> None:
    assert places("concatenation", "b", 0) == {"makes b.0 0", "shifts bb.0 0", "reads c.1 4", "reads d.1 4"}
    assert places("concatenation", "c", 2) == {"makes c.0 2", "shifts cb.0 2", "reads d.1 12"}


def test_a_depthwise_filter_belongs_to_its_channel_and_a_group_leaves_as_one() -> None:
    due = {"makes a.0 2", "shifts ab.0 2", "makes b.0 2", "shifts bb.0 2", "reads c.1 2"}
    assert places("depthwise", "a", 2) == due
    rows, columns = "3 4 5", "4 5 6 7"
    assert places("groups", "a", 1) == {
        *(f"makes a.0 {rows}", f"shifts ab.0 {rows}"),
        *(f"makes b.0 {columns}", f"shifts bb.0 {columns}", f"reads c.1 {columns}"),
    }


def test_a_shuffled_channel_is_read_where_it_arrives() -> None:
    assert places("shuffle and split", "a:0", 3) == {"makes a.0 3", "shifts ab.0 3", "reads c.1 6"}
    assert places("shuffle and split", "b", 0) == {"makes b.0 0", "shifts bb.0 0", "reads c.1 1"}


def test_a_transposed_convolution_has_its_outputs_on_axis_1() -> None:
    assert places("transposed skip", "up", 1) == {"makes up.1 1", "shifts upb.0 1", "reads c.1 5"}


def test_norms_and_slopes_belong_to_their_channel() -> None:
    due = {
        "makes a.0 4",
        "shifts ab.0 4",
        "scales g.0 4",
        "shifts h.0 4",
        "holds mu.0 4",
        "holds va.0 4",
        "holds sl.0 4",
    }
    assert places("norms and slopes", "a", 4) == due | {"reads b.1 4"}


def test_the_channels_that_a_group_norm_takes_together_leave_together() -> None:
    due = {f"{role} {tensor}.0 6 7 8" for role, tensor in [("makes", "a"), ("shifts", "ab"), ("scales", "g")]}
    assert places("group norm", "a", 2) == due | {"shifts h.0 6 7 8", "reads b.1 6 7 8"}


def test_a_part_of_a_group_norm_with_the_model_s_inputs_in_it_stays() -> None:
    body = (
        "h = Gemm <transB = 1> (x, a) c = Concat <axis = 1> (h, x) parts = Constant <value_ints = [0, 4, 3]> () "
        "r = Reshape(c, parts) n = Softmax <axis = 2> (r) f = Flatten(n) logits = Gemm <transB = 1> (f, o)"
    )
    made = found(Graph((5,), {"a": (7, 5), "o": (3, 12)}, body, {}, {}))
    assert [(g.size, g.at("makes")[0].of(g.size).tolist()) for g in made.groups] == [(2, [[0, 1, 2], [3, 4, 5]])]


def test_groups_of_one_layer_have_the_shortest_names_that_differ() -> None:
    def names(*made: tuple[str, int, int]) -> list[str]:
        groups = [ChannelGroup("w", 4, (Place(tensor, axis, "makes", start, 1, 1, 1),)) for tensor, axis, start in made]
        return [g.name for g in _named(groups)]

    assert names(("w.a", 0, 0)) == ["w"]
    assert names(("w.a", 0, 0), ("w.b", 0, 0)) == ["w.a", "w.b"]
    assert names(("w.a", 0, 0), ("w.a", 0, 4)) == ["w.a:0", "w.a:4"]
    assert names(("w.a", 0, 0), ("w.a", 1, 0)) == ["w.a.0:0", "w.a.1:0"]


def test_the_rows_of_an_embedding_stay_also_where_another_layer_makes_them() -> None:
    body = (
        "e = Gather(a, x) t = Constant <value_ints = [1]> () m = ReduceMean <keepdims = 0> (e, t) "
        "u = Gemm <transB = 1> (m, a) logits = Gemm <transB = 1> (u, o)"
    )
    made = found(Graph((5,), {"a": (9, 6), "o": (3, 9)}, body, {}, {}, "int64"))
    assert {g.name: g.size for g in made.groups} == {"a": 6}
    assert made.stopped == ("a: samples name them by number",)


def test_a_head_is_a_channel_also_of_a_fused_projection() -> None:
    due = {f"makes {k}.1 4 5 6 7" for k in "qkv"} | {f"shifts {k}b.0 4 5 6 7" for k in "qkv"}
    assert places("heads", "q", 1) == due | {"reads p.0 4 5 6 7"}
    fused = next(g for g in found(GRAPHS["fused heads"]).groups if g.name == "a")
    rows = fused.at("makes")
    assert [(p.start, p.step, p.repeat, p.stride) for p in rows] == [(0, 4, 4, 1), (12, 4, 4, 1), (24, 4, 4, 1)]


Q = "q = Gemm <transB = 1> (x, a) s = Constant <value_ints = [0, 3, 4]> () h = Reshape(q, s) "
WHERE_CHANNELS_MEET = {
    "a product with a fixed graph of steps": (
        "w = Transpose(a) u = MatMul(x, w) j = Constant <value = float[2, 3] {1, 1, 0, 0, 1, 1}> () y = MatMul(j, u) ",
        {"x": (3, 4), "a": (8, 4), "o": (3, 16)},
        (8, [0], [0, 8]),
    ),
    "weights of steps from a softmax": (
        "w = Transpose(a) u = MatMul(x, w) one = Constant <value_ints = [1]> () m = ReduceMean(x, one) "
        "t = Softmax(m) y = MatMul(t, u) ",
        {"x": (4, 4), "a": (8, 4), "o": (3, 8)},
        (8, [0], [0]),
    ),
    "halves of heads that are swapped": (
        f"{Q} c, d = Split <axis = 2, num_outputs = 2> (h) e = Neg(d) r = Concat <axis = 2> (e, c) y = Add(h, r) ",
        {"x": (5,), "a": (12, 5), "o": (3, 12)},
        (3, [0, 1, 2, 3], [0, 1, 2, 3]),
    ),
    "a mask that is repeated for every head": (
        f"{Q} k = Constant <value_ints = [1]> () m = ReduceSum(x, k) b = Unsqueeze(m, k) "
        "i = Constant <value_ints = [1, 3, 4]> () e = Expand(b, i) t = Add(h, e) y = Softmax <axis = 2> (t) ",
        {"x": (5,), "a": (12, 5), "o": (3, 12)},
        (3, [0, 1, 2, 3], [0, 1, 2, 3]),
    ),
    "a gate for each of several layers": (
        f"{Q} k = Constant <value_ints = [2]> () w = Gemm <transB = 1> (x, g) z = Softmax(w) b = Unsqueeze(z, k) "
        "v = Mul(h, b) one = Constant <value_ints = [1]> () y = ReduceSum(v, one) ",
        {"x": (5,), "a": (12, 5), "o": (3, 4), "g": (3, 5)},
        (4, [0, 4, 8], [0]),
    ),
}


@pytest.mark.parametrize("name", WHERE_CHANNELS_MEET)
def test_channels_keep_apart_where_what_they_meet_is_one_value_for_all(name: str) -> None:
    body, shapes, (size, rows, columns) = WHERE_CHANNELS_MEET[name]
    tensors = {k: shape for k, shape in shapes.items() if k != "x"}
    read = "f = Flatten(y) logits = Gemm <transB = 1> (f, o)"
    (group,) = found(Graph(shapes["x"], tensors, body + read, {}, {})).groups
    assert group.size == size
    assert group.at("makes")[0].of(size)[0].tolist() == rows
    assert group.at("reads")[0].of(size)[0].tolist() == columns


def test_a_recurrent_unit_has_a_row_in_every_gate_and_a_column() -> None:
    gates = "1 7 13 19"
    both = " ".join(map(str, (1, 7, 13, 19, 25, 31, 37, 43)))
    due = {f"makes w.1 {gates}", f"makes r.1 {gates}", "reads r.2 1", f"shifts wb.1 {both}", "reads o.1 1"}
    assert places("lstm", "w", 1) == due


def test_a_weight_used_twice_is_cut_along_both_axes() -> None:
    due = {"makes a.0 2", "shifts ab.0 2", "makes s.0 2", "reads s.1 2", "shifts sb.0 2", "reads o.1 2"}
    assert places("one layer twice", "a", 2) == due


def test_what_forms_no_group_is_named_with_the_operator_that_stops_it() -> None:
    assert found(GRAPHS["norm over channels"]).stopped == (
        "a: LayerNormalization mixes them",
        "c: LayerNormalization mixes them",
    )


def test_a_layer_is_named_with_the_first_operator_that_stops_it() -> None:
    body = (
        "h = Gemm <transB = 1> (x, a) one = Constant <value_ints = [1]> () u = Unsqueeze(h, one) "
        "v = Conv <pads = [1, 1]> (u, c) w = Squeeze(v, one) y = Mul(h, w) logits = Gemm <transB = 1> (y, o)"
    )
    made = found(Graph((5,), {"a": (7, 5), "c": (1, 1, 3), "o": (3, 7)}, body, {}, {}))
    assert (made.groups, made.stopped) == ((), ("a: Conv mixes them",))


def test_a_layer_of_one_channel_has_no_line() -> None:
    body = "h = Gemm <transB = 1> (x, a) g = Gemm <transB = 1> (h, b) y = Mul(h, g) logits = Gemm <transB = 1> (y, o)"
    made = found(Graph((5,), {"a": (7, 5), "b": (1, 7), "o": (3, 7)}, body, {}, {}))
    assert ([g.name for g in made.groups], made.stopped) == (["a"], ())


@pytest.mark.parametrize(
    ("end", "tensors", "lines"),
    [
        (
            "h = Squeeze(last, z) n = LayerNormalization(h, g, gb) logits = Gemm <transB = 1> (n, o, ob)",
            {"g": (6,), "gb": (6,), "o": (3, 6), "ob": (3,)},
            ("c: LayerNormalization mixes them",),
        ),
        ("logits = Squeeze(last, z)", {}, ()),
    ],
)
def test_a_layer_of_two_weights_is_named_once_and_the_last_layer_never(
    end: str, tensors: dict[str, tuple[int, ...]], lines: tuple[str, ...]
) -> None:
    start = "s = Transpose <perm = [1, 0, 2]> (x) y, last = LSTM <hidden_size = 6> (s, w, r) "
    tensors = {"w": (1, 24, 4), "r": (1, 24, 6), **tensors}
    model = Graph(
        (5, 4), tensors, f"{start} z = Constant <value_ints = [0]> () {end}", {}, {}, classes=3 if lines else 6
    ).model()
    layer = {"w": "c.w", "r": "c.r"}
    for value in model.graph.input:
        value.name = layer.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [layer.get(v, v) for v in node.input]
    assert find_groups(model, {layer.get(k, k): v for k, v in tensors.items()}, (5, 4)).stopped == lines


def test_an_operator_on_a_value_without_elements_forms_no_group_and_the_others_do() -> None:
    body = (
        "y = Gemm <transB = 1> (x, a, ab) one = Constant <value_ints = [1]> () none = Constant <value_ints = [0]> () "
        "e = Slice(y, none, none, one) t = ReduceSum(e, one) u = Add(x, t) r = Gemm <transB = 1> (u, b, bb) "
        "logits = Gemm <transB = 1> (r, o, ob)"
    )
    tensors = {"a": (8, 6), "ab": (8,), "b": (4, 6), "bb": (4,), "o": (3, 4), "ob": (3,)}
    made = found(Graph((6,), tensors, body, {}, {}))
    assert {g.name: g.size for g in made.groups}["b"] == 4


def test_groups_survive_the_manifest_s_json() -> None:
    adapter = TypeAdapter(tuple[ChannelGroup, ...])
    groups = found(GRAPHS["fused heads"]).groups
    assert adapter.validate_json(adapter.dump_json(groups)) == groups


@given(st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_place_holds_any_entries_by_rule_or_one_by_one(table: list[list[int]]) -> None:
    given = np.array(table)
    made = place("t", 0, "makes", given)
    np.testing.assert_array_equal(made.of(len(table)), given)
    for ruled in (Place("t", 0, "makes", 3, 5, 2, 20), Place("t", 0, "makes", 3)):
        assert place("t", 0, "makes", ruled.of(4)) == ruled


def test_the_values_of_a_channel_are_those_at_its_entries() -> None:
    tensor = np.arange(24).reshape(2, 12)
    by_rule = by_channel(tensor, Place("t", 1, "reads", 0, 4, 4, 1), 3)
    assert by_rule.tolist() == [
        [0, 12, 1, 13, 2, 14, 3, 15],
        [4, 16, 5, 17, 6, 18, 7, 19],
        [8, 20, 9, 21, 10, 22, 11, 23],
    ]
    assert by_channel(tensor, Place("t", 1, "reads", 1, 1, 2, 6), 2).tolist() == [[1, 13, 7, 19], [2, 14, 8, 20]]
