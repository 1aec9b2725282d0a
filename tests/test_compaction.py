"""Which channels are removed, and how their constants change the layers that read them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edge_kernels.channels import ChannelGroup, Consumer, Op, Producer
from edge_kernels.compaction import compact, constants
from hypothesis import given, settings
from hypothesis import strategies as st


def f32(*values: object) -> np.ndarray:
    return np.asarray(values, np.float32)


def group(size: int, ops: tuple[Op, ...] = (), **consumer: object) -> ChannelGroup:
    """Channels from layer `a` to layer `b` through `ops`, read at the end."""
    reader = replace(Consumer("linear", "b.weight", "b.bias", len(ops)), **consumer)
    return ChannelGroup("a", size, (Producer("linear", "a.weight", "a.bias"),), ops, (reader,))


RELU = Op("relu")


def test_a_constant_is_folded_into_the_bias_of_the_consumer() -> None:
    tensors = {
        "a.weight": f32([1, 1], [0, 0]),
        "a.bias": f32(0.5, 3),
        "b.weight": f32([2, 4], [0, -1]),
        "b.bias": f32(10, 20),
    }
    result = compact(tensors, [group(2, (RELU,))])
    assert result.kept["a"].tolist() == [0]
    np.testing.assert_array_equal(result.tensors["a.weight"], [[1, 1]])
    np.testing.assert_array_equal(result.tensors["a.bias"], [0.5])
    np.testing.assert_array_equal(result.tensors["b.weight"], [[2], [0]])
    np.testing.assert_array_equal(result.tensors["b.bias"], [10 + 4 * 3, 20 - 1 * 3])
    assert result.parameters == 2 + 1 + 2 + 2
    np.testing.assert_array_equal(tensors["b.weight"], [[2, 4], [0, -1]])  # the input is not changed


def test_a_negative_constant_becomes_zero_behind_relu_but_not_behind_leaky_relu() -> None:
    tensors = {"a.weight": f32([1], [0]), "a.bias": f32(0, -2), "b.weight": f32([1, 1]), "b.bias": f32(0)}
    assert compact(tensors, [group(2, (RELU,))]).tensors["b.bias"].tolist() == [0.0]
    leaky = group(2, (Op("leaky_relu", value=0.25),))
    assert compact(tensors, [leaky]).tensors["b.bias"].tolist() == [-0.5]


def test_the_batch_norm_shift_of_a_removed_filter_is_part_of_its_constant() -> None:
    norm = Op("batch_norm", (0,), ("n.weight", "n.bias", "n.mean", "n.var"), 0.0)
    tensors = {
        "a.weight": f32([1], [0], [5]),
        "a.bias": f32(0, 3, 1),
        "b.weight": f32([1, 1, 1]),
        "b.bias": f32(0),
        "n.weight": f32(1, 2, 0),
        "n.bias": f32(0, 1, 7),
        "n.mean": f32(0, 1, 0),
        "n.var": f32(1, 4, 1),
    }
    result = compact(tensors, [group(3, (norm,))])
    # channel 1: (3 - 1) / sqrt(4) * 2 + 1 = 3; channel 2: gamma is 0, so only its shift, 7, remains
    assert result.kept["a"].tolist() == [0]
    assert result.tensors["b.bias"].tolist() == [10.0]
    assert [result.tensors[t].tolist() for t in norm.tensors] == [[1.0], [0.0], [0.0], [1.0]]


def test_constants_propagate_forward_and_unread_channels_propagate_backward() -> None:
    """Unit 0 of `b` reads only a constant. Unit 1 of `b` is unread and was the only reader of unit 1 of `a`."""
    first = ChannelGroup(
        "a", 3, (Producer("linear", "a.w", "a.b"),), (RELU,), (Consumer("linear", "b.w", "b.b", reads=1),)
    )
    second = ChannelGroup("b", 3, (Producer("linear", "b.w", "b.b"),), (), (Consumer("linear", "c.w"),))
    tensors = {
        "a.w": f32([0], [1], [1]),
        "a.b": f32(2, 0, 0),
        "b.w": f32([3, 0, 0], [0, 1, 0], [0, 0, 1]),
        "b.b": f32(1, 0, 0),
        "c.w": f32([5, 0, 2], [0, 0, 1]),
    }
    result = compact(tensors, [first, second])
    assert {name: kept.tolist() for name, kept in result.kept.items()} == {"a": [2], "b": [2]}
    assert result.tensors["b.w"].tolist() == [[1.0]]
    assert result.tensors["c.w"].tolist() == [[2.0], [1.0]]
    assert result.biases["c.w"].tolist() == [5 * (3 * 2 + 1), 0.0]  # the layer had no bias


def test_a_flattened_constant_counts_once_for_every_pixel() -> None:
    flat = group(2, (Op("flatten", value=3.0),), repeat=3)
    tensors = {
        "a.weight": np.stack([np.ones((1, 1, 1)), np.zeros((1, 1, 1))]).astype(np.float32),
        "a.bias": f32(0, 2),
        "b.weight": f32([1, 1, 1, 10, 20, 30]),
        "b.bias": f32(0),
    }
    result = compact(tensors, [flat])
    assert result.tensors["b.weight"].tolist() == [[1.0, 1.0, 1.0]]
    assert result.tensors["b.bias"].tolist() == [2 * 60]


def padded_tensors(constants: tuple[float, ...]) -> dict[str, np.ndarray]:
    """A live 1x1 filter and one filter per constant, read by a 1-filter convolution with taps 1, 2, 3, ..."""
    size = 1 + len(constants)
    weight = np.zeros((size, 1, 1, 1), np.float32)
    weight[0] = 1
    taps = np.arange(1, size + 1, dtype=np.float32).reshape(1, size, 1, 1) * np.ones((1, 1, 3, 3), np.float32)
    return {"a.weight": weight, "a.bias": f32(0, *constants), "b.weight": taps, "b.bias": f32(0)}


def test_constants_before_a_padded_layer_merge_into_the_largest() -> None:
    result = compact(padded_tensors((1.0, -4.0, 2.0)), [group(4, kind="conv", padded=True)])
    assert result.kept["a"].tolist() == [0, 2]
    assert result.tensors["a.bias"].tolist() == [0.0, -4.0]
    # taps of channels 1, 2, 3 are 2, 3, 4: 2 * (1 / -4) + 3 + 4 * (2 / -4)
    assert result.tensors["b.weight"][0, :, 0, 0].tolist() == [1.0, 0.5]
    assert result.tensors["b.bias"].tolist() == [0.0]  # a bias would also apply at the border


def test_zeros_before_a_padded_layer_are_removed() -> None:
    result = compact(padded_tensors((-1.0, 0.0)), [group(3, (RELU,), kind="conv", padded=True)])
    assert result.kept["a"].tolist() == [0]


def test_constants_that_cancel_before_a_padded_layer_are_all_removed() -> None:
    result = compact(padded_tensors((3.0, -2.0)), [group(3, kind="conv", padded=True)])
    assert result.kept["a"].tolist() == [0]  # taps 2 and 3: 2 * 3 - 3 * 2


def test_before_a_pool_that_counts_its_padding_only_zeros_are_removed() -> None:
    pool = Op("avg_pool", value=1.0)
    tensors = padded_tensors((1.0, 0.0))
    assert compact(tensors, [group(3, (pool,), kind="conv")]).kept["a"].tolist() == [0, 1]
    assert compact(tensors, [group(3, (replace(pool, value=0.0),), kind="conv")]).kept["a"].tolist() == [0]


def test_a_channel_with_two_readers_is_removed_only_if_neither_needs_it() -> None:
    """Layer `b` reads before the ReLU, layer `c` behind it. Each folds the constant at its point."""
    fork = ChannelGroup(
        "a",
        3,
        (Producer("linear", "a.w", "a.b"),),
        (RELU,),
        (Consumer("linear", "b.w", reads=0), Consumer("linear", "c.w", reads=1)),
    )
    tensors = {
        "a.w": f32([0], [1], [1]),
        "a.b": f32(-2, 0, 0),
        "b.w": f32([1, 0, 0]),
        "c.w": f32([1, 0, 1]),
    }
    result = compact(tensors, [fork])
    assert result.kept["a"].tolist() == [2]
    assert {k: v.tolist() for k, v in result.biases.items()} == {"b.w": [-2.0]}


def test_with_two_producers_each_value_has_its_own_constants() -> None:
    """Channel 0 is constant for the reader of one producer, but not for the reader of the other."""
    both = ChannelGroup(
        "sum",
        2,
        (Producer("linear", "a.w", "a.b"), Producer("linear", "b.w")),
        (RELU, Op("relu", (1,))),
        (Consumer("linear", "c.w", reads=2), Consumer("linear", "d.w", reads=3)),
    )
    tensors = {"a.w": f32([0], [1]), "a.b": f32(2, 0), "b.w": f32([1], [0]), "c.w": f32([1, 1]), "d.w": f32([1, 0])}
    result = compact(tensors, [both])
    assert result.kept["sum"].tolist() == [0, 1]
    assert result.tensors["c.w"].tolist() == [[0.0, 1.0]]
    assert result.biases["c.w"].tolist() == [2.0]
    assert compact({**tensors, "b.w": f32([0], [0])}, [both]).kept["sum"].tolist() == [1]


def test_constants_follow_every_activation_in_float64() -> None:
    kinds = ("relu", "relu6", "tanh", "sigmoid", "max_pool", "flatten")
    chain = replace(group(2), ops=tuple(Op(kind, (0,)) for kind in kinds))
    values = constants(chain, [np.array([8.0, np.nan])], {})
    expected = [8.0, 8.0, 6.0, np.tanh(8.0), 1 / (1 + np.exp(-8.0)), 8.0, 8.0]
    np.testing.assert_allclose([v[0] for v in values], expected, rtol=1e-15)
    assert all(np.isnan(v[1]) for v in values)


def test_a_group_that_does_not_fit_is_refused_by_name() -> None:
    tensors = padded_tensors((1.0,))
    good = group(2, kind="conv")
    for wrong, why in (
        (replace(good, size=3), "'a.weight' has shape"),
        (group(2, kind="lstm"), "kind 'lstm' cannot be compacted"),
        (group(2, weight="z"), "names tensor 'z', which the model does not have"),
        (group(2, repeat=2), "reads 2 entries"),
        (group(2, reads=1), "value 1 does not exist"),
        (replace(good, ops=(Op("relu", (1,)),)), "op 1 reads values"),
        (replace(good, ops=(Op("batch_norm"),)), "op 1 has tensors"),
        (replace(good, consumers=()), "no producer or no consumer"),
    ):
        with pytest.raises(ValueError, match=why):
            compact(tensors, [wrong])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 6), min_size=2, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_a_random_masked_mlp_computes_the_same_in_float64(
    seed: int, widths: list[int], unit_keep: float, weight_keep: float
) -> None:
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    depth = len(widths) - 1
    for i in range(depth):
        weight = random.standard_normal((widths[i + 1], widths[i])) * (random.random((widths[i + 1], 1)) < unit_keep)
        tensors[f"{i}.w"] = (weight * (random.random(weight.shape) < weight_keep)).astype(np.float32)
        tensors[f"{i}.b"] = random.standard_normal(widths[i + 1]).astype(np.float32)
    groups = [
        ChannelGroup(
            str(i),
            widths[i + 1],
            (Producer("linear", f"{i}.w", f"{i}.b"),),
            (Op("leaky_relu", value=0.1),),
            (Consumer("linear", f"{i + 1}.w", f"{i + 1}.b", reads=1),),
        )
        for i in range(depth - 1)
    ]

    def forward(model: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        for i in range(depth):
            x = x @ model[f"{i}.w"].T.astype(np.float64) + model[f"{i}.b"]
            x = np.where(x < 0, 0.1 * x, x) if i < depth - 1 else x
        return x

    result = compact(tensors, groups)
    x = random.standard_normal((5, widths[0]))
    np.testing.assert_allclose(forward(result.tensors, x), forward(tensors, x), rtol=1e-5, atol=1e-5)
    # nothing removable is left: a second pass finds the same model
    sizes = [replace(g, size=len(result.kept[g.name])) for g in groups]
    assert compact(result.tensors, sizes).parameters == result.parameters
