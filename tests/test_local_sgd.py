"""Local SGD: the default rate of every method that trains so, and what holds the weights near a point."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

import numpy as np
import pytest
from lattice_fleet import NORMED
from numpy_mlp import mlp, model, task

from edge_client.bundle import Model
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.shared.averaging import Weights
from edge_client.methods.shared.local_sgd import LocalSgd

M = mlp(6, 5, 4, 3)
FOUND = [e.load() for e in entry_points(group="maskfleet.methods")]
METHODS = sorted((m for m in FOUND if issubclass(m, LocalSgd)), key=lambda m: str(m.name))


def trained(whole: Model) -> Model:
    """The same values, as if from a file."""
    return replace(whole, manifest=whole.manifest.model_copy(update={"seed": None}))


@pytest.mark.parametrize("method", METHODS)
def test_the_default_rate_is_careful_with_trained_weights_and_batch_norm(method: type[LocalSgd]) -> None:
    usual = method.usual_lr
    assert method().learning_rate(model(NORMED)) == method().learning_rate(trained(model(M))) == usual
    assert method().learning_rate(trained(model(NORMED))) == pytest.approx(0.3 * usual)
    assert method(lr=0.5).learning_rate(trained(model(NORMED))) == 0.5


def test_methods_that_move_a_bundle_s_own_weights_have_that_rate() -> None:
    assert {m.name for m in METHODS} >= {
        "fedavg", "fedprox", "feddr", "lattice", "stc", "fedcode", "hermes", "fedmap", "federated_pruning",
        "federated_pruning_lamp", "perfedavg", "lgfedavg", "linear_probing", "standalone",
    }  # fmt: skip


def test_a_step_follows_the_loss_the_pull_and_the_decay_where_weights_live() -> None:
    t, start = task(M, "a"), Weights(np.full(M.d, 0.5, np.float32), np.zeros(0, np.float32))
    method, live = FedAvg(epochs=1, batch=8, lr=0.1, momentum=0.0), np.arange(M.d) % 3 > 0
    w = start.parameters.copy()
    for batch in t.batches(1, 8):
        slope = t.gradient(w, start.buffers, batch).parameters + 0.2 * w + 3 * (w - start.parameters)
        w = w - np.float32(0.1) * np.where(live, slope, 0).astype(np.float32)
    found, _, _ = method.descend(task(M, "a"), start, pull=3.0, decay=0.2, live=live)
    assert np.array_equal(found[~live], start.parameters[~live])
    assert not np.array_equal(found, start.parameters)
    assert found == pytest.approx(w, abs=1e-6)
