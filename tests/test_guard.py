"""The guard: what it limits, what it leaves alone, and that no single device moves a model beyond a bound."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from coordination import D, manifest, said
from hypothesis import given
from hypothesis import strategies as st
from numpy_mlp import NumpyMlp, clusters, mlp, model

from coord_server import aggregation
from coord_server.aggregation import Checked, Contribution
from coord_server.guard import FEWEST, MOST_NORM, MOST_PRODUCT, MOST_WEIGHT, limits
from edge_client.bundle import Init, Model, Tensor
from edge_client.errors import DivergedError
from edge_client.methods import Influence, Method
from edge_client.methods.fedavg import FedAvg, Update
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.messages import MAX_SAMPLES, DeviceMetrics
from edge_client.protocol.payload import Payload, encode
from edge_client.task import Assignment, Course, Task

How = Literal["clip", "drop"]
TOP = float(np.finfo(np.float32).max)


def named(*influences: Influence) -> dict[str, Influence]:
    return {f"d{i}": influence for i, influence in enumerate(influences)}


def test_an_update_within_the_multiples_of_the_median_is_left_alone() -> None:
    honest = named(Influence(1, 10), Influence(2, 100), Influence(MOST_NORM * 2, 10), Influence(3, 30))
    assert limits(honest, "clip") == {}
    assert limits(honest, "drop") == {}


def test_by_hand() -> None:
    found = limits(named(Influence(1, 10), Influence(2, 20), Influence(100, 1000)), "clip")
    assert set(found) == {"d2"}
    # The change comes down to norm 3 x 2; then norm x weight, to 5 x 40.
    assert (found["d2"].scale, found["d2"].weight, found["d2"].drop) == (0.06, pytest.approx(200 / 6), False)
    assert found["d2"].reason == (
        "clipped to change times 0.06 and weight 33.33: its change has norm 100, the round's median is 2; "
        "it claims weight 1000, the round's median is 20; its norm times its weight is 1e+05, the round's median is 40"
    )
    dropped = limits(named(Influence(1, 100), Influence(2, 20), Influence(11, 20)), "drop")["d2"]
    assert dropped.drop
    assert dropped.reason == "left out: its change has norm 11, the round's median is 2"


def test_norm_and_weight_are_also_compared_together() -> None:
    inside = named(Influence(1, 10), Influence(1, 10), Influence(2, 5 * MOST_PRODUCT))
    assert limits(inside, "clip") == {}
    found = limits(named(Influence(1, 10), Influence(1, 10), Influence(2, 10 * MOST_PRODUCT)), "clip")["d2"]
    assert (found.scale, found.weight) == (1.0, 5 * MOST_PRODUCT)
    assert "its norm times its weight is 100" in found.reason


def test_statistics_are_compared_with_statistics() -> None:
    found = limits(named(Influence(1, 1, 1000), Influence(1, 1, 900), Influence(1, 1, 50_000)), "clip")
    assert found["d2"].scale == pytest.approx(MOST_NORM * 1000 / 50_000)
    assert "statistics" in found["d2"].reason


def test_a_change_is_scaled_to_nothing_when_most_devices_change_nothing() -> None:
    found = limits(named(Influence(0, 1), Influence(0, 1), Influence(7, 1)), "clip")
    assert found["d2"].scale == 0.0
    assert limits(named(*[Influence(0, 1)] * 4), "clip") == {}


@pytest.mark.parametrize("count", range(FEWEST))
def test_fewer_than_three_updates_have_no_majority(count: int) -> None:
    assert limits(named(*[Influence(10.0**i, 10.0**i) for i in range(count)]), "clip") == {}


def test_none_limits_nothing() -> None:
    assert limits(named(Influence(1, 1), Influence(1, 1), Influence(1e9, 1e9)), "none") == {}


POSITIVE = st.floats(0, 1e30)


@given(st.lists(st.builds(Influence, POSITIVE, st.integers(1, 2**31).map(float), POSITIVE), max_size=9))
def test_what_is_limited_comes_down_to_the_limits_and_a_majority_is_never_limited_for_one_figure(
    given_influences: list[Influence],
) -> None:
    devices = named(*given_influences)
    found = limits(devices, "clip")
    assert limits(devices, "drop").keys() == found.keys()
    if len(devices) < FEWEST:
        return
    beyond = set[str]()
    figures = (("norm", MOST_NORM), ("statistics", MOST_NORM), ("weight", MOST_WEIGHT), ("product", MOST_PRODUCT))
    for name, most in figures:
        of = {d: i.norm * i.weight if name == "product" else getattr(i, name) for d, i in devices.items()}
        median = sorted(of.values())[(len(of) - 1) // 2]
        far = {d for d, figure in of.items() if figure > most * median}
        assert len(far) <= len(of) / 2
        beyond |= far
        for device, limit in found.items():
            i = devices[device]
            after = {
                "norm": i.norm * limit.scale,
                "statistics": i.statistics * limit.scale,
                "weight": limit.weight,
                "product": i.norm * limit.scale * limit.weight,
            }
            assert after[name] <= most * median * (1 + 1e-9)
    assert found.keys() == beyond
    for limit in found.values():
        assert 0 <= limit.scale <= 1
        assert limit.reason


# --- a whole round


def course() -> Course:
    buffers = (Tensor(name="bn", shape=(4,), offset=0, init=Init(kind="constant", scale=1.0)),)
    m = manifest().model_copy(update={"buffers": buffers})
    return Course(Model(m, np.zeros(D, np.float32), np.ones(4, np.float32)), 7, 2, 5)


def update(parameters: Any, buffers: Any, samples: int) -> bytes:
    arrays = {"parameters": np.float32(parameters), "buffers": np.float32(buffers)}
    return encode(Payload(arrays, said(samples)))


def close(method: Method, updates: dict[str, bytes], how: Any) -> aggregation.Closed:
    c = course()
    state = method.start(c)
    checked = {d: aggregation.check_update(method, Assignment(c, 1, d), state, None, u) for d, u in updates.items()}
    influences = {d: x.influence for d, x in checked.items() if x.influence is not None}
    parts = [Contribution(d, checked[d], None, {}) for d in sorted(checked)]
    return aggregation.close_round(method, c, 1, state, parts, influences, how, len(parts))


HONEST = {d: update(np.full(D, 0.1 * i), np.full(4, 1 + 0.01 * i), 10 * i) for i, d in enumerate("abcd", 1)}
HUGE = {
    "a huge change": (np.full(D, TOP), np.ones(4), 10),
    "huge statistics": (np.zeros(D), np.full(4, TOP), 10),
    "a huge weight": (np.full(D, 0.4), np.ones(4), MAX_SAMPLES),
    "everything": (np.full(D, -TOP), np.full(4, -TOP), MAX_SAMPLES),
}


@pytest.mark.parametrize("attack", HUGE)
@pytest.mark.parametrize("how", ["clip", "drop"])
def test_one_device_cannot_move_the_model_beyond_a_bound(attack: str, how: How) -> None:
    parameters, buffers, samples = HUGE[attack]
    closed = close(FedAvg(), {**HONEST, "evil": update(parameters, buffers, samples)}, how)
    honest = close(FedAvg(), HONEST, how)
    assert honest.round.guarded == {}
    norms = sorted(0.1 * i * D**0.5 for i in range(1, 5))
    moved = np.linalg.norm(closed.state.parameters - honest.state.parameters)
    statistics = np.linalg.norm(closed.state.buffers - honest.state.buffers)
    if how == "drop":
        assert moved == 0.0
        assert statistics == 0.0
        assert "evil" not in closed.round.devices
    else:
        # At most 5 x the median product of norm and weight, over the 100 samples of the others, and their own shift.
        assert moved <= MOST_PRODUCT * norms[2] * 30 / 100 + norms[3]
        assert statistics <= MOST_NORM * 0.04 * 2
        assert closed.round.devices == [*"abcd", "evil"]
    assert set(closed.round.guarded) == {"evil"}
    assert ("left out" in closed.round.guarded["evil"]) == (how == "drop")


def test_without_the_guard_it_does() -> None:
    parameters, buffers, samples = HUGE["a huge weight"]
    closed = close(FedAvg(), {**HONEST, "evil": update(parameters, buffers, samples)}, "none")
    assert np.allclose(closed.state.parameters, 0.4, atol=1e-5)
    assert closed.round.guarded == {}


def test_an_absurd_claim_comes_down_to_the_limit() -> None:
    closed = close(FedAvg(), {**HONEST, "evil": update(np.full(D, 0.4), np.ones(4), MAX_SAMPLES)}, "clip")
    # Norm x weight of the others is 1, 4, 9 and 16 times the root of D; the median of all five is 9.
    weight = MOST_PRODUCT * 9 / 0.4
    expected = np.average([0.1, 0.2, 0.3, 0.4, 0.4], weights=[10, 20, 30, 40, weight])
    assert closed.state.parameters.tolist() == pytest.approx([expected] * D, rel=1e-6)


def test_a_round_whose_every_update_is_left_out_keeps_the_state() -> None:
    # Two of four have a huge change, the other two a huge weight: under "drop" nothing remains.
    updates = {
        "a": update(np.full(D, 0.1), np.ones(4), MAX_SAMPLES),
        "b": update(np.full(D, 0.1), np.ones(4), MAX_SAMPLES),
        "c": update(np.full(D, 100.0), np.ones(4), 1),
        "d": update(np.full(D, 100.0), np.ones(4), 1),
    }
    closed = close(FedAvg(), updates, "drop")
    assert closed.state.parameters.tolist() == [0.0] * D
    assert closed.round.devices == []
    assert set(closed.round.guarded) == set("abcd")
    assert (closed.round.loss, closed.round.bits_per_parameter_up) == (None, 0.0)


def test_the_heads_of_a_probing_round_are_guarded_and_masks_need_not_be() -> None:
    m = manifest()
    extra = Tensor(name="h", shape=(2, 6), offset=D, init=Init(kind="uniform", scale=1.0))
    layers = (*m.layers, m.layers[0].model_copy(update={"name": "h", "weights": ("h",)}))
    two = m.model_copy(update={"parameters": (*m.parameters, extra), "layers": layers})
    c, method = Course(Model(two, np.ones(D + 12, np.float32), np.zeros(0, np.float32)), 7, 3, 5), FedPM()
    state, checked = method.start(c), {}
    for device, value, samples in (("a", 1.1, 5), ("b", 1.2, 5), ("c", 1.3, 5), ("evil", TOP, MAX_SAMPLES)):
        data = encode(Payload({"head": np.full(12, value, np.float32)}, said(samples)))
        checked[device] = aggregation.check_update(method, Assignment(c, 1, device), state, None, data)
    influences = {d: x.influence for d, x in checked.items() if x.influence is not None}
    assert set(influences) == set(checked)
    parts = [Contribution(d, checked[d], None, {}) for d in sorted(checked)]
    closed = aggregation.close_round(method, c, 1, state, parts, influences, "clip", len(parts))
    assert set(closed.round.guarded) == {"evil"}
    # The head comes down to MOST_PRODUCT x the median of norm x weight, .2 x 5, over the 15 samples of the others.
    assert np.abs(closed.state.head - 1).max() <= (0.1 + 0.2 + 0.3 + MOST_PRODUCT * 0.2) * 5 / 15


# --- whole federations

CLUSTERS = mlp(6, 16, 4)


def federation(how: Any, poisoned: bool, rounds: int = 8, devices: int = 10) -> float:
    """The score after some rounds of equal devices, one of which may send the others' change times -1000."""
    c, method = Course(model(CLUSTERS), 3, rounds, devices), FedAvg(epochs=2, lr=0.05)
    names = [f"d{i}" for i in range(devices)]
    data = {name: clusters(CLUSTERS, seed) for seed, name in enumerate(names)}
    state = method.start(c)
    for round_ in range(1, rounds + 1):
        updates = {}
        for name in names:
            task = Task(Assignment(c, round_, name), NumpyMlp(CLUSTERS), data[name], 1)
            trained = method.local_round(task, None, state).trained
            updates[name] = Update(trained.parameters, trained.buffers, 40.0)
        if poisoned:
            mean = np.mean([updates[name].parameters - state.parameters for name in names[1:]], axis=0)
            updates["d0"] = Update(np.float32(state.parameters - 1000 * mean), state.buffers, float(MAX_SAMPLES))
        influences = {d: method.influence(Assignment(c, round_, d), state, u) for d, u in updates.items()}
        figures = DeviceMetrics(samples=40, loss=0.5)
        parts = [Contribution(d, Checked(u, figures, {}, influences[d]), None, {}) for d, u in updates.items()]
        closed = aggregation.close_round(method, c, round_, state, parts, influences, how, len(parts))
        assert list(closed.round.guarded) == (["d0"] if poisoned and how != "none" else [])
        state = closed.state
    test = Task(Assignment(c, rounds, "d1"), NumpyMlp(CLUSTERS), clusters(CLUSTERS, 99, 400), 1)
    return test.score(method.personal(test, None, state))


def test_one_device_of_ten_cannot_keep_the_model_from_learning() -> None:
    honest = federation("clip", poisoned=False)
    assert honest > 0.9
    assert federation("drop", poisoned=True) >= honest - 0.03
    assert federation("clip", poisoned=True) >= honest - 0.15  # it learns, more slowly
    with pytest.raises(DivergedError), np.errstate(divide="ignore"):
        federation("none", poisoned=True)
