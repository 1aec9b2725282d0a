"""FedDR: its fixed point on quadratics, its three steps against numpy, what stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy_mlp import NumpyMlp, clusters, course, mlp
from rounds import Rounds, weighed

from edge_client.bundle import F32, Manifest
from edge_client.errors import ConfigError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.feddr import FedDR, Kept, reflected
from edge_client.methods.fedmap import DouglasRachford, FedMap
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Local, Task
from edge_client.training import Gradient

M = mlp(2, 2, bias=False)
NONE = np.zeros(0, np.float32)


@dataclass
class Quadratic:
    """f(w) = sum curvature (w - centre)^2 / 2, whatever the batch."""

    manifest: Manifest
    curvature: F32
    centre: F32

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        return Gradient(1.0, self.curvature * (parameters - self.centre), buffers)

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        return np.zeros((len(x), 2), np.float32)


def vec(*values: float) -> F32:
    return np.array(values, np.float32)


OWN = {
    "a": Quadratic(M, vec(1, 2, 0.5, 1), vec(4, 1, -2, 0)),
    "b": Quadratic(M, vec(3, 1, 0.5, 1), vec(-1, 2, 6, 0)),
    "c": Quadratic(M, vec(0.2, 1, 2, 1), vec(9, -5, 1, 3)),
}
OPTIMUM = sum(q.curvature * q.centre for q in OWN.values()) / sum(q.curvature for q in OWN.values())


def federate(
    method: Any,
    rounds: int,
    devices: Mapping[str, Quadratic] = OWN,
    cohort: Callable[[int], Iterable[str]] | None = None,
    loses: Mapping[str, int] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The state and what devices kept; `cohort` names the devices of a round, all without it.

    The devices in `loses` lose what they kept before a round, report it, and sit the round out.
    """
    fleet = Rounds(method, M, rounds, data={d: clusters(M, 1) for d in devices}, trainers=devices)
    for round_ in range(1, rounds + 1):
        unlucky = [d for d, when in (loses or {}).items() if when == round_]
        for d in unlucky:
            del fleet.kept[d]
        fleet.play(*sorted(cohort(round_) if cohort else devices), lost=unlucky)
    return fleet.state, fleet.kept


def test_the_fixed_point_is_the_optimum_of_all_devices_where_federated_averaging_is_not() -> None:
    settings: dict[str, Any] = {"epochs": 60, "batch": 40, "lr": 0.2, "momentum": 0}
    state, kept = federate(FedDR(eta=1.0, alpha=1.0, **settings), 60)
    assert state.parameters == pytest.approx(OPTIMUM, abs=1e-3)
    for k in kept.values():
        assert k.x == pytest.approx(OPTIMUM, abs=1e-3)
    averaged, _ = federate(FedAvg(**settings), 60)
    assert np.abs(averaged.parameters - OPTIMUM).max() > 0.3


def test_the_fixed_point_stays() -> None:
    """At theta = x, y = x + eta grad f(x) nothing moves: the proximal step of y is x, the mean reflection is theta."""
    eta = 0.7
    c, method = course(M, 9), FedDR(eta=eta, alpha=1.3, epochs=200, batch=40, lr=0.1, momentum=0)
    state, total = replace(method.start(c), parameters=OPTIMUM.astype(np.float32)), None
    for d, q in OWN.items():
        a, x = Assignment(c, 5, d), state.parameters
        kept = Kept(x, x + np.float32(eta) * q.curvature * (x - q.centre))
        t = Task(a, q, clusters(M, 1), 0)
        local = weighed(method.local_round(t, kept, state), t.samples)
        assert local.kept.x == pytest.approx(x, abs=1e-4)
        total, _ = method.fold(a, state, total, method.read_update(a, state, None, local.update), None)
    assert method.finish(c, 5, list(OWN), state, total)[0].parameters == pytest.approx(OPTIMUM, abs=1e-4)


def test_a_device_that_joins_late_starts_at_the_global_model_and_the_optimum_is_found() -> None:
    method = FedDR(eta=1.0, alpha=1.0, epochs=60, batch=40, lr=0.2, momentum=0)
    state, _ = federate(method, 80, cohort=lambda round_: [d for d in OWN if d != "c" or round_ > 10])
    assert state.parameters == pytest.approx(OPTIMUM, abs=1e-3)


@pytest.mark.parametrize("name", ["feddr", "fedmap"])
def test_a_device_that_loses_its_state_changes_nothing_of_the_fixed_point(name: str) -> None:
    settings: dict[str, Any] = {"epochs": 60, "batch": 40, "lr": 0.2, "momentum": 0}
    dr = DouglasRachford(eta=1.0, alpha=1.0)
    method = (
        FedDR(eta=1.0, alpha=1.0, **settings) if name == "feddr" else FedMap(prune=0, dr=dr, weight_decay=0, **settings)
    )
    state, _ = federate(method, 90, loses={"a": 12, "c": 25})
    assert (state.parameters if name == "feddr" else state.theta) == pytest.approx(OPTIMUM, abs=1e-3)
    assert state.weight == len(OWN)


@pytest.mark.parametrize("eta", [1.0, 0.4])
def test_a_reflection_that_nothing_replaces_counts_like_a_device_with_a_quadratic_loss_around_it(eta: float) -> None:
    def without_c(round_: int) -> list[str]:
        return [d for d in OWN if d != "c" or round_ < 3]

    method = FedDR(eta=eta, alpha=1.0, epochs=60, batch=40, lr=0.2)
    early, kept = federate(method, 2)
    last, left = reflected(kept["c"].x, kept["c"].y), {d: q for d, q in OWN.items() if d != "c"}
    pull = sum(q.curvature * q.centre for q in left.values()) + last / eta
    due = pull / (sum(q.curvature for q in left.values()) + 1 / eta)
    state, _ = federate(method, 80, cohort=without_c)
    assert state.weight == early.weight == len(OWN)
    assert state.parameters == pytest.approx(due, abs=1e-3)
    assert np.abs(state.parameters - OPTIMUM).max() > 0.1


def many(weights: Sequence[float]) -> tuple[dict[str, Quadratic], Any]:
    """Ten devices with unlike optima, and the optimum of all."""
    rng = np.random.default_rng(0)
    found = {}
    for i in range(10):
        curvature, centre = rng.uniform(0.3, 3, 4), 3 * rng.standard_normal(4)
        found[f"d{i}"] = Quadratic(M, curvature.astype(np.float32), centre.astype(np.float32))
    curvatures = [w * q.curvature for w, q in zip(weights, found.values(), strict=True)]
    return found, sum(c * q.centre for c, q in zip(curvatures, found.values(), strict=True)) / sum(curvatures)


def three_of_ten(round_: int) -> list[str]:
    return [f"d{i}" for i in np.random.default_rng(round_).choice(10, 3, replace=False)]


@pytest.mark.parametrize("name", ["feddr", "fedmap"])
def test_the_fixed_point_is_the_optimum_of_all_devices_with_a_drawn_cohort_of_three_of_ten(name: str) -> None:
    devices, optimum = many([1] * 10)
    settings: dict[str, Any] = {"epochs": 30, "batch": 40, "lr": 0.2, "momentum": 0}
    if name == "feddr":
        state, _ = federate(FedDR(eta=1.0, alpha=1.0, **settings), 130, devices, three_of_ten)
        found = state.parameters
    else:
        dr = DouglasRachford(eta=1.0, alpha=1.0)
        method = FedMap(prune=0, weight_decay=0, dr=dr, **settings)
        found = federate(method, 130, devices, three_of_ten)[0].theta
    assert found == pytest.approx(optimum, abs=2e-3)


def test_a_reflection_replaces_the_devices_last_one_in_the_mean_also_when_its_weight_changes_or_its_state_is_lost() -> (
    None
):
    fleet, reflections = Rounds(FedDR(weights="samples"), M, rounds=9), dict[str, tuple[int, F32]]()
    rng = np.random.default_rng(2)
    for round_, names in enumerate(("ab", "bc", "a", "acd", "b"), 1):
        updates = {}
        for d in names:
            far = 1e8 if round_ == 2 else 1.0
            n, sent = reflections[d] = int(rng.integers(1, 90)), far * rng.standard_normal(4).astype(np.float32)
            updates[d] = Payload({"parameters": sent, "buffers": NONE}, {"samples": n})
            if round_ % 2:
                fleet.lose(d)
        fleet.close(updates)
        due = sum(w * r for w, r in reflections.values()) / sum(w for w, _ in reflections.values())
        assert fleet.state.parameters == pytest.approx(due, abs=1e-5, rel=1e-6)


def test_the_momentum_of_the_server_moves_beyond_the_mean_of_the_reflections() -> None:
    fleet = Rounds(FedDR(server_momentum=0.9), M, rounds=9)
    theta, velocity = fleet.state.parameters.astype(np.float64), np.zeros(4)
    for sent, agrees in (([1, 2, 3, 4], False), ([4, 5, 6, 9], True), ([30, 20, 20, 10], True)):
        fleet.close({"a": Payload({"parameters": np.array(sent, np.float32), "buffers": NONE}, {"samples": 1})})
        change = np.array(sent) - theta
        lengths = np.linalg.norm(change) * np.linalg.norm(velocity)
        momentum = min(0.9, max(0.0, change @ velocity / lengths)) if agrees else 0.0
        assert (momentum > 0) == agrees
        velocity = change + momentum * velocity
        theta += change + momentum * velocity
        assert fleet.state.parameters == pytest.approx(theta, rel=1e-5)


def one_step(kept: Kept | None) -> tuple[Local, F32, Any]:
    m = mlp(6, 5, 3)
    c, method = course(m), FedDR(eta=0.3, alpha=0.9, epochs=1, batch=40, lr=0.1)
    state, data = method.start(c), clusters(m, 1)
    task = Task(Assignment(c, 2, "a"), NumpyMlp(m), data, 0)
    (batch,) = task.batches(1, 40)

    def grad(w: F32) -> F32:
        return NumpyMlp(m).gradient(w, NONE, batch.x, batch.y).parameters

    return weighed(method.local_round(task, kept, state), task.samples), state.parameters, grad


def test_one_round_is_y_then_x_then_the_reflection() -> None:
    size = mlp(6, 5, 3).d
    rng = np.random.default_rng(1)
    kept = Kept(*(rng.standard_normal((2, size)).astype(np.float32)))
    local, theta, grad = one_step(kept)
    y = kept.y + 0.9 * (theta - kept.x)
    x = y - 0.1 * grad(y.astype(np.float32))
    assert local.kept.y == pytest.approx(y, abs=1e-5)
    assert local.kept.x == pytest.approx(x, abs=1e-5)
    assert local.update.arrays["parameters"] == pytest.approx(2 * x - y, abs=1e-5)
    assert local.trained.parameters is local.kept.x


def test_the_first_round_starts_from_the_global_model() -> None:
    local, theta, grad = one_step(None)
    assert np.array_equal(local.kept.y, theta)
    assert local.update.arrays["parameters"] == pytest.approx(theta - 0.2 * grad(theta), abs=1e-5)


def test_x_and_y_never_travel_and_devices_weigh_the_same_unless_samples_count() -> None:
    local, _, _ = one_step(None)
    assert set(local.update.arrays) == {"parameters", "buffers"}
    m = mlp(6, 5, 3)
    for weights, due in (("uniform", 1.0), ("samples", 40.0)):
        method = FedDR(weights=weights)
        state = method.start(course(m))
        assert method.read_update(Assignment(course(m), 2, "a"), state, None, local.update).samples == due


@pytest.mark.parametrize(
    "settings",
    [{"name": "feddr", "alpha": 2.5}, *({"name": "fedmap", "dr": {key: 2.5}} for key in ("alpha", "later_alpha"))],
)
def test_a_relaxation_beyond_two_which_diverges_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"alpha = 2\.5: .*less than or equal to 2"):
        make_method(settings)


def test_settings_of_a_splitting_that_has_ended_are_refused() -> None:
    for ended in ({"later_alpha": 1.5}, {"later_eta": 1.5}):
        with pytest.raises(ConfigError, match=r"setting dr: later = 'fedavg' .* later_eta and later_alpha change noth"):
            make_method({"name": "fedmap", "dr": {"later": "fedavg", **ended}})
