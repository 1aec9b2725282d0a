"""The guard: what it limits, what it leaves alone, and that no single device moves a model beyond a bound."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from coordination import D, manifest
from hypothesis import given
from hypothesis import strategies as st

from coord_server import aggregation, guard
from coord_server.aggregation import Contribution
from coord_server.guard import FEWEST, MOST_NORM, MOST_WEIGHT, limits
from edge_client.bundle import Init, Model, Tensor
from edge_client.methods import Influence, Method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, encode
from edge_client.task import Assignment, Course

How = Literal["clip", "drop"]
TOP = float(np.finfo(np.float32).max)


def named(*influences: Influence) -> dict[str, Influence]:
    return {f"d{i}": influence for i, influence in enumerate(influences)}


def test_an_update_within_the_multiples_of_the_median_is_left_alone() -> None:
    honest = named(Influence(1, 10), Influence(2, 200), Influence(MOST_NORM * 2, 10), Influence(3, 200))
    assert limits(honest, "clip") == {}
    assert limits(honest, "drop") == {}


def test_by_hand() -> None:
    found = limits(named(Influence(1, 10), Influence(2, 20), Influence(100, 1000)), "clip")
    assert set(found) == {"d2"}
    assert (found["d2"].scale, found["d2"].weight, found["d2"].drop) == (0.1, 400.0, False)
    assert found["d2"].reason == (
        "clipped to change times 0.1 and weight 400: its change has norm 100, the round's median is 2; "
        "it claims weight 1000, the round's median is 20"
    )
    dropped = limits(named(Influence(1, 10), Influence(2, 20), Influence(100, 20)), "drop")["d2"]
    assert dropped.drop
    assert dropped.reason == "left out: its change has norm 100, the round's median is 2"


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
def test_what_is_left_is_within_the_multiples_and_a_majority_is_never_limited_for_one_figure(
    given_influences: list[Influence],
) -> None:
    found = limits(named(*given_influences), "clip")
    assert limits(named(*given_influences), "drop").keys() == found.keys()
    for name, most in (("norm", MOST_NORM), ("statistics", MOST_NORM), ("weight", MOST_WEIGHT)):
        figures = sorted(getattr(i, name) for i in given_influences)
        beyond = 0
        for device, i in named(*given_influences).items():
            limit = found.get(device)
            figure = getattr(i, name)
            after = figure if limit is None else limit.weight if name == "weight" else figure * limit.scale
            if len(figures) >= FEWEST:
                median = figures[(len(figures) - 1) // 2]
                assert after <= most * median * (1 + 1e-9)
                beyond += figure > most * median
        assert beyond <= len(figures) / 2
    for limit in found.values():
        assert 0 <= limit.scale <= 1
        assert limit.reason


# --- a whole round


def course() -> Course:
    buffers = (Tensor(name="bn", shape=(4,), offset=0, init=Init(kind="constant", scale=1.0)),)
    m = manifest().model_copy(update={"buffers": buffers})
    return Course(Model(m, np.zeros(D, np.float32), np.ones(4, np.float32)), 7, 2, 5)


def update(parameters: Any, buffers: Any, samples: int, device: str) -> bytes:
    arrays = {"parameters": np.float32(parameters), "buffers": np.float32(buffers)}
    meta = {"method": "fedavg", "round": 1, "device": device, "samples": samples, "loss": 0.5}
    return encode(Payload(arrays, meta))


def close(method: Method, updates: dict[str, bytes], how: Any) -> aggregation.Closed:
    c = course()
    state = method.start(c)
    checked = {d: aggregation.check_update(method, Assignment(c, 1, d), state, None, u) for d, u in updates.items()}
    influences = {d: x.influence for d, x in checked.items() if x.influence is not None}
    parts = [Contribution(d, checked[d], None, {}) for d in sorted(checked)]
    return aggregation.close_round(method, c, 1, state, parts, influences, how)


HONEST = {d: update(np.full(D, 0.1 * i), np.full(4, 1 + 0.01 * i), 10 * i, d) for i, d in enumerate("abcd", 1)}
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
    closed = close(FedAvg(), {**HONEST, "evil": update(parameters, buffers, samples, "evil")}, how)
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
        assert moved <= MOST_NORM * norms[2] + norms[3]  # a change of five medians against one of the largest honest
        assert statistics <= MOST_NORM * 0.03 * 2 + 0.04 * 2
        assert closed.round.devices == [*"abcd", "evil"]
    assert set(closed.round.guarded) == {"evil"}
    assert ("left out" in closed.round.guarded["evil"]) == (how == "drop")


def test_without_the_guard_it_does() -> None:
    parameters, buffers, samples = HUGE["a huge weight"]
    closed = close(FedAvg(), {**HONEST, "evil": update(parameters, buffers, samples, "evil")}, "none")
    assert np.allclose(closed.state.parameters, 0.4, atol=1e-5)
    assert closed.round.guarded == {}


def test_a_clipped_weight_counts_as_the_multiple_of_the_median() -> None:
    closed = close(FedAvg(), {**HONEST, "evil": update(np.full(D, 0.4), np.ones(4), MAX_SAMPLES, "evil")}, "clip")
    median = 30.0  # of 10, 20, 30, 40 and the claim
    weights, values = [10, 20, 30, 40, MOST_WEIGHT * median], [0.1, 0.2, 0.3, 0.4, 0.4]
    assert closed.state.parameters.tolist() == pytest.approx([np.average(values, weights=weights)] * D, rel=1e-6)


def test_a_round_whose_every_update_is_left_out_keeps_the_state() -> None:
    # Two of four have a huge change, the other two a huge weight: under "drop" nothing remains.
    updates = {
        "a": update(np.full(D, 0.1), np.ones(4), MAX_SAMPLES, "a"),
        "b": update(np.full(D, 0.1), np.ones(4), MAX_SAMPLES, "b"),
        "c": update(np.full(D, 100.0), np.ones(4), 1, "c"),
        "d": update(np.full(D, 100.0), np.ones(4), 1, "d"),
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
        meta = {"method": "fedpm", "round": 1, "device": device, "samples": samples, "loss": 0.5}
        data = encode(Payload({"head": np.full(12, value, np.float32)}, meta))
        checked[device] = aggregation.check_update(method, Assignment(c, 1, device), state, None, data)
    influences = {d: x.influence for d, x in checked.items() if x.influence is not None}
    assert set(influences) == set(checked)
    parts = [Contribution(d, checked[d], None, {}) for d in sorted(checked)]
    closed = aggregation.close_round(method, c, 1, state, parts, influences, "clip")
    assert set(closed.round.guarded) == {"evil"}
    assert np.abs(closed.state.head - 1).max() <= guard.MOST_NORM * 0.2 * 1.001
