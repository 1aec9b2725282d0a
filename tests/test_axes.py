"""The table of axes says what running the operators shows."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, helper, numpy_helper
from small_graphs import GRAPHS

from edge_client.compaction import maps
from edge_client.compaction.net import Net
from edge_client.compaction.preparation import prepare
from edge_client.compaction.rules import rule
from edge_client.compaction.study import Study
from edge_client.graph.axes import axes_of

ABSENT = {"InstanceNormalization"}  # of the operators in these graphs; no training graph holds it


def apart(net: Net, node: NodeProto) -> tuple[bool, ...]:
    """By the table: the axes of the output whose entries do not mix."""
    listed = net.constants[node.input[1]].tolist() if node.op_type.startswith("Reduce") else None
    shape = net.shapes[node.output[0]]
    known = axes_of(node, [net.shapes[v] if v else () for v in node.input], shape, listed)
    assert known is not None, node.op_type
    named = {name for names in known.inputs for name in names}
    return tuple(n == 1 or (k in named and k not in known.whole) for k, n in enumerate(shape))


@pytest.mark.parametrize("name", GRAPHS)
def test_the_table_keeps_the_axes_apart_that_a_trial_keeps_apart(name: str) -> None:
    graph, random = GRAPHS[name], np.random.default_rng(0)
    model = graph.model()
    values = {k: random.uniform(0.5, 1.5, shape).astype(np.float32) for k, shape in graph.tensors.items()}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in values.items())
    net = prepare(model, np.zeros((2, *graph.x), graph.dtype), graph.tensors)
    study = Study(net)
    nodes = [n for n in net.nodes if n.output[0] not in net.sizes and n.op_type not in ABSENT]
    for node in [n for n in nodes if rule(study, n) is maps.MAP]:
        tried, shape = maps.behaviour(study, node), net.shapes[node.output[0]]
        assert tried is not None
        assert apart(net, node) == tuple(n == 1 or a for n, a in zip(shape, tried.apart, strict=True))


@pytest.mark.parametrize("kind", ["Atan", "Celu", "Cosh", "IsInf", "Shrink"])
def test_operators_on_single_elements_keep_all_axes(kind: str) -> None:
    known = axes_of(helper.make_node(kind, ["x"], ["y"]), [(2, 3)], (2, 3))
    assert known is not None
    assert not known.whole


@pytest.mark.parametrize(("keep", "names"), [(0, (0, "reduced 1", 1)), (1, (0, "reduced 1", 2))])
def test_the_place_of_the_largest_entry_depends_on_all_of_its_axis(keep: int, names: tuple[int | str, ...]) -> None:
    node = helper.make_node("ArgMax", ["x"], ["y"], axis=-2, keepdims=keep)
    known = axes_of(node, [(2, 3, 4)], (2, *[1] * keep, 4))
    assert known is not None
    assert known.inputs == (names,)
    assert known.whole == {"reduced 1"}


def test_rows_that_are_written_at_places_keep_their_own_entries_apart() -> None:
    known = axes_of(
        helper.make_node("ScatterND", ["x", "at", "rows"], ["y"]), [(9, 4, 6), (5, 7, 2), (5, 7, 6)], (9, 4, 6)
    )
    assert known is not None
    assert known.inputs == ((0, 1, 2), ("row 0", "row 1", "place"), ("row 0", "row 1", 2))
    assert known.whole == {0, 1, "row 0", "row 1", "place"}


def test_an_operator_that_the_table_lacks_has_no_axes() -> None:
    assert axes_of(helper.make_node("CumSum", ["x", "axis"], ["y"]), [(2, 3), ()], (2, 3)) is None
    grouped = helper.make_node("Conv", ["x", "w"], ["y"], group=2)
    assert axes_of(grouped, [(1, 4, 5), (6, 2, 3)], (1, 6, 3)) is None
