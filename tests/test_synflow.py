"""SynFlow: flows by hand, against autograd, and what the pruning keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise, product

import numpy as np
import pytest
from channel_groups import between
from edge_kernels import synflow
from edge_kernels.channels import ChannelGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def groups_of(*weights: str, sizes: Mapping[str, int], repeat: int = 1) -> tuple[ChannelGroup, ...]:
    """The channels between layers in a row; the last layer reads `repeat` entries of each."""
    return tuple(between(sizes[a], a, b, repeat=repeat) for a, b in pairwise(weights))


def net(*sizes: int, seed: int = 0) -> tuple[dict[str, F32], list[str], tuple[ChannelGroup, ...]]:
    """A multilayer perceptron of standard normal weights."""
    rng = np.random.default_rng(seed)
    tensors = {str(i): rng.standard_normal((b, a)).astype(np.float32) for i, (a, b) in enumerate(pairwise(sizes))}
    return tensors, list(tensors), groups_of(*tensors, sizes={k: len(v) for k, v in tensors.items()})


def test_the_flow_through_a_unit_of_a_two_layer_net_is_what_comes_in_times_what_goes_out() -> None:
    tensors = {"a": np.array([[1, -2], [3, 0], [0, 0.5]], np.float32), "b": np.array([[1, -1, 4], [2, 0, 0]], "f4")}
    groups = groups_of("a", "b", sizes={"a": 3})
    matrices = synflow.chain(tensors, ["a", "b"], groups)
    # In: 1 + 2, 3, .5. Out: 1 + 2, 1, 4.
    assert synflow.scores(matrices, [np.ones(3, np.bool_)])[0].tolist() == [9, 3, 2]
    assert synflow.prune(tensors, ["a", "b"], groups, {"a"}, 0.67)["a"].tolist() == [0, 1]


def test_the_flow_is_the_sum_of_weight_times_gradient_as_autograd_has_it() -> None:
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(2, 5, 3, padding=1, padding_mode="circular", bias=False),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(5, 4, 3, padding=1, padding_mode="circular", bias=False),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 9, 3, bias=False),
    ).double()
    names = ["0.weight", "3.weight", "6.weight"]
    weights = dict(layers.named_parameters())
    with torch.no_grad():
        for w in weights.values():
            w.abs_()
    alive = [np.array([1, 1, 0, 1, 1], np.bool_), np.array([1, 0, 1, 1], np.bool_)]
    with torch.no_grad():
        weights["0.weight"][~torch.from_numpy(alive[0])] = 0
        weights["3.weight"][~torch.from_numpy(alive[1])] = 0
    layers(torch.ones(1, 2, 6, 6, dtype=torch.float64)).sum().backward()
    due = [(weights[n].grad * weights[n]).sum(dim=(1, 2, 3)).detach().numpy() for n in names[:2]]
    tensors = {n: w.detach().numpy() for n, w in weights.items()}
    groups = groups_of(*names, sizes={names[0]: 5, names[1]: 4}, repeat=9)
    found = synflow.scores(synflow.chain(tensors, names, groups), alive)
    for a, b in zip(found, due, strict=True):
        assert a == pytest.approx(b, rel=1e-12)


def test_every_group_carries_the_whole_flow() -> None:
    tensors, layers, groups = net(7, 6, 5, 4, 3)
    alive = [np.ones(g.size, np.bool_) for g in groups]
    alive[1][[0, 3]] = False
    sums = [s.sum() for s in synflow.scores(synflow.chain(tensors, layers, groups), alive)]
    assert sums == pytest.approx([sums[0]] * 3)
    assert sums[0] < synflow.scores(synflow.chain(tensors, layers, groups), [a | True for a in alive])[0].sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 1), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_a_share_of_all_channels_stays_and_one_of_each_group(seed: int, keep: float, hidden: list[int]) -> None:
    tensors, layers, groups = net(6, *hidden, 3, seed=seed)
    kept = synflow.prune(tensors, layers, groups, {g.name for g in groups}, keep, steps=20)
    due = round(keep * sum(hidden))
    assert due <= sum(map(len, kept.values())) <= due + len(hidden)
    for g in groups:
        assert len(kept[g.name]) >= 1
        assert np.array_equal(kept[g.name], np.unique(kept[g.name]))
        assert kept[g.name].max() < g.size
    assert keep < 1 or all(len(kept[g.name]) == g.size for g in groups)


def test_only_the_groups_named_are_pruned() -> None:
    tensors, layers, groups = net(6, 10, 8, 3)
    assert {name: len(k) for name, k in synflow.prune(tensors, layers, groups, {"1"}, 0.5).items()} == {"1": 4}


def by_paths(tensors: Mapping[str, F32], steps: int, share: Callable[[float], float]) -> list[list[int]]:
    """The units of each hidden layer that stay when `share(progress)` of all stay after each step.

    A unit's score is the sum, over all paths from an input to an output through it, of the product of the absolute
    weights on the path. Every layer keeps its best unit.
    """
    weights = [np.abs(w.astype(np.float64)) for w in tensors.values()]
    left = [list(range(len(w))) for w in weights[:-1]]
    total = sum(map(len, left))
    for step in range(1, steps + 1):
        flow = {(layer, unit): 0.0 for layer, units in enumerate(left) for unit in units}
        for path in product(range(weights[0].shape[1]), *left, range(len(weights[-1]))):
            through = np.prod([w[b, a] for w, (a, b) in zip(weights, pairwise(path), strict=True)])
            for place in enumerate(path[1:-1]):
                flow[place] += through
        ranked = sorted(flow, key=flow.__getitem__, reverse=True)
        best = [next(place for place in ranked if place[0] == layer) for layer in range(len(left))]
        stay = {*ranked[: round(total * share(step / steps))], *best}
        left = [sorted(unit for place, unit in stay if place == layer) for layer in range(len(left))]
    return left


@pytest.mark.parametrize("seed", [0, 2])
def test_exponentially_smaller_shares_stay_step_by_step_so_that_a_wide_layer_does_not_collapse(seed: int) -> None:
    """All layers carry the same flow in all, so in one shot the many units of a wide layer rank last together."""
    tensors, layers, groups = net(2, 30, 6, 2, seed=seed)
    keep = 6 / 36

    def kept(steps: int) -> list[list[int]]:
        return [units.tolist() for units in synflow.prune(tensors, layers, groups, {"0", "1"}, keep, steps).values()]

    assert kept(12) == by_paths(tensors, 12, lambda progress: keep**progress)
    assert kept(12) != by_paths(tensors, 12, lambda progress: 1 - (1 - keep) * progress)
    assert list(map(len, kept(12))) == [3, 3]
    assert list(map(len, kept(1))) == [1, 5]


def test_units_without_flow_go_first_and_in_small_steps_what_only_they_fed_goes_next() -> None:
    # Unit 1 of the second layer lives on units 2 and 3 of the first alone, whose flow falls with every one that goes.
    a = np.array([[3], [3], [1.0], [0.9]], np.float32)
    b = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.float32)
    tensors = {"a": a, "b": b, "c": np.array([[1, 1]], np.float32)}
    groups = groups_of("a", "b", "c", sizes={"a": 4, "b": 2})
    kept = synflow.prune(tensors, ["a", "b", "c"], groups, {"a", "b"}, 0.5)
    assert {k: v.tolist() for k, v in kept.items()} == {"a": [0, 1], "b": [0]}


def test_layers_that_form_no_chain_are_refused() -> None:
    tensors, layers, groups = net(6, 10, 8, 3)
    for wrong in (groups[:1], groups[::-1], ()):
        with pytest.raises(ValueError, match=r"chain|go from"):
            synflow.prune(tensors, layers, wrong, {"0"}, 0.5)
    both = ChannelGroup("0", 10, (*groups[0].places, *groups[1].at("reads")))
    with pytest.raises(ValueError, match="go from"):
        synflow.prune(tensors, layers, (both, groups[1]), {"0"}, 0.5)


def test_a_channel_that_went_does_not_come_back_for_one_whose_flow_ends_later() -> None:
    # Of five units three stay. Unit 0 of "a" goes first, then unit 1 of "b", which unit 1 of "a" alone fed: that one
    # is left without flow, as unit 0 is, which has the lower index.
    tensors = {
        "a": np.array([[0.5], [1], [5]], np.float32),
        "b": np.array([[1, 0, 1], [0, 1, 0]], np.float32),
        "c": np.array([[1, 1]], np.float32),
    }
    kept = synflow.prune(tensors, list(tensors), groups_of(*tensors, sizes={"a": 3, "b": 2}), {"a", "b"}, 0.6)
    assert {k: v.tolist() for k, v in kept.items()} == {"a": [1, 2], "b": [0]}
