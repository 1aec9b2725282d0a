"""Per-FedAvg: its meta-gradient on quadratics, the personal step, what travels. Whole federations: test_references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, clusters, course, mlp
from rounds import Rounds

from edge_client.bundle import F32, Init, Manifest, Tensor
from edge_client.errors import ConfigError
from edge_client.methods import make_method
from edge_client.methods.fedavg import State
from edge_client.methods.perfedavg import PerFedAvg
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Task
from edge_client.training import Gradient, Trainer

QUADRATIC, MLP = mlp(2, 2, bias=False), mlp(6, 5, 3)
NONE = np.zeros(0, np.float32)
ALPHA, BETA = 0.1, 0.3


@dataclass
class Quadratic:
    """f(w) = (w - c)' H (w - c) / 2, whatever the batch; its Hessian is H."""

    manifest: Manifest
    hessian: NDArray[np.float64]
    centre: NDArray[np.float64]
    asked: list[NDArray[Any]] = field(default_factory=list)

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        self.asked.append(x)
        return Gradient(1.0, (self.hessian @ (parameters - self.centre)).astype(np.float32), buffers)

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        return np.zeros((len(x), 2), np.float32)


def quadratic() -> Quadratic:
    root = np.random.default_rng(0).standard_normal((4, 4))
    return Quadratic(QUADRATIC, root @ root.T, np.array([1.0, -2, 0.5, 3]))


def task(trainer: Trainer, round_: int = 1) -> Task:
    return Task(Assignment(course(trainer.manifest), round_, "a"), trainer, clusters(trainer.manifest, 1), 0)


def trained(method: PerFedAvg, trainer: Trainer) -> F32:
    """The global model w after one local round."""
    state = method.start(course(trainer.manifest))
    sent: F32 = method.local_round(task(trainer), None, state).update.arrays["parameters"]
    return sent


def one(variant: str, **settings: Any) -> PerFedAvg:
    return PerFedAvg(
        **{"variant": variant, "alpha": ALPHA, "lr": BETA, "epochs": 1, "batch": 40, "momentum": 0, **settings}
    )


def test_first_order_is_the_gradient_after_the_inner_step_applied_from_the_original_point() -> None:
    q, w = quadratic(), course(QUADRATIC).model.parameters.astype(np.float64)
    ahead = w - ALPHA * q.hessian @ (w - q.centre)
    assert trained(one("fo"), q) == pytest.approx(w - BETA * q.hessian @ (ahead - q.centre), rel=1e-5)


def test_hessian_free_is_the_gradient_of_the_meta_objective() -> None:
    """F(w) = f(w - alpha grad f(w)) has the gradient (I - alpha H) grad f(w')."""
    q, w = quadratic(), course(QUADRATIC).model.parameters.astype(np.float64)
    ahead = w - ALPHA * q.hessian @ (w - q.centre)
    meta = (np.eye(4) - ALPHA * q.hessian) @ q.hessian @ (ahead - q.centre)
    assert trained(one("hf", delta=0.01), q) == pytest.approx(w - BETA * meta, rel=1e-3)


@pytest.mark.parametrize("delta", [1e-9, 1e-50])
def test_a_finite_difference_that_float32_cannot_hold_is_refused(delta: float) -> None:
    """Both weights would be the same number, so that `hf` would be `fo`; a step of 0 would give 0 / 0."""
    with pytest.raises(ConfigError, match="delta"):
        make_method({"name": "perfedavg", "variant": "hf", "delta": delta})


@pytest.mark.parametrize(("variant", "gradients"), [("fo", 2), ("hf", 4)])
def test_a_step_costs_two_gradients_or_four_on_batches_of_different_samples(variant: str, gradients: int) -> None:
    q = quadratic()
    one(variant, batch=10).local_round(task(q), None, PerFedAvg().start(course(QUADRATIC)))
    assert len(q.asked) == 4 * gradients + 1  # four steps, one personal step
    assert not np.array_equal(q.asked[0], q.asked[1])
    assert gradients == 2 or np.array_equal(q.asked[2], q.asked[3])


@pytest.mark.parametrize(("epochs", "steps"), [(0, 1), (1, 3), (2, 6)])
def test_the_personal_model_is_one_step_away_or_some_epochs(epochs: int, steps: int) -> None:
    engine, method = NumpyMlp(MLP), one("fo", batch=15, personal_epochs=epochs)
    state, t = State(course(MLP).model.parameters, NONE), task(engine)
    before = state.parameters.copy()
    personal = method.personal(t, None, state)
    assert engine.calls == steps
    w = before.astype(np.float64)
    for i, b in enumerate(t.batches(max(1, epochs), 15, "personal")):
        if i < steps:
            w = w - ALPHA * NumpyMlp(MLP).gradient(w.astype(np.float32), NONE, b.x, b.y).parameters
    assert personal.parameters == pytest.approx(w, abs=1e-5)
    assert np.array_equal(state.parameters, before)


def test_one_personal_step_of_the_trained_model_fits_the_devices_data_better() -> None:
    method, engine = PerFedAvg(epochs=20, lr=0.1, alpha=0.1, batch=20), NumpyMlp(MLP)
    state, t = State(course(MLP).model.parameters, NONE), task(engine)
    local = method.local_round(t, None, state)

    def loss(w: F32) -> float:
        return NumpyMlp(MLP).gradient(w, NONE, t.data.x, t.data.y).loss

    assert loss(local.trained.parameters) < loss(local.update.arrays["parameters"]) < loss(state.parameters)
    assert t.score(local.trained) > 0.9


def test_the_server_averages_the_models_by_samples() -> None:
    fleet = Rounds(PerFedAvg(), QUADRATIC)
    send: Callable[[list[float], int], Payload] = lambda w, n: Payload(  # noqa: E731
        {"parameters": np.array(w, np.float32), "buffers": NONE}, {"samples": n}
    )
    fleet.close({"a": send([1, 2, 3, 4], 1), "b": send([5, 2, 3, 0], 3)})
    assert fleet.state.parameters.tolist() == [4, 2, 3, 1]
    with pytest.raises(ConfigError, match="variant"):
        make_method({"name": "perfedavg", "variant": "exact"})


@dataclass
class Counting(Quadratic):
    """Each gradient adds 1 to the statistics."""

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        g = super().gradient(parameters, buffers, x, y)
        return Gradient(g.loss, g.parameters, buffers + np.float32(1))


@pytest.mark.parametrize("variant", ["fo", "hf"])
@pytest.mark.parametrize(("epochs", "personal"), [(0, 1), (1, 4)])
def test_batch_norm_statistics_follow_the_outer_gradients_and_then_the_personal_steps(
    variant: str, epochs: int, personal: int
) -> None:
    """Four batches of ten: the inner gradient and those of the curvature leave no trace."""
    statistic = Tensor(name="mean", shape=(1,), offset=0, init=Init(kind="constant", scale=0.5))
    m, q = QUADRATIC.model_copy(update={"buffers": (statistic,)}), quadratic()
    t = task(Counting(m, q.hessian, q.centre))
    method = one(variant, lr=0.01, batch=10, personal_epochs=epochs)
    state = State(np.zeros(4, np.float32), np.array([0.5], np.float32))
    local = method.local_round(t, None, state)
    assert local.update.arrays["buffers"].tolist() == [4.5]
    assert local.trained.buffers.tolist() == [4.5 + personal]
    assert method.personal(t, None, state).buffers.tolist() == [0.5 + personal]
