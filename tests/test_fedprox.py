"""FedProx: with mu = 0 it is FedAvg, with a large mu the model stays, in between it follows the formula."""

from __future__ import annotations

import numpy as np
from numpy_mlp import NumpyMlp
from rounds import M, Rounds

from edge_client.methods.fedavg import FedAvg
from edge_client.methods.fedprox import FedProx


def test_mu_zero_is_fedavg_bit_for_bit() -> None:
    fleets = [Rounds(FedAvg(epochs=2)), Rounds(FedProx(epochs=2, mu=0))]
    for fleet in fleets:
        for _ in range(3):
            fleet.play("a", "b")
    assert fleets[0].state.parameters.tobytes() == fleets[1].state.parameters.tobytes()


def test_a_step_adds_mu_times_the_distance_to_the_gradient() -> None:
    fleet = Rounds(FedProx(epochs=2, mu=0.7, lr=0.05, momentum=0.5))
    fleet.play("a")
    start, own, velocity = fleet.received["a"].parameters, fleet.received["a"].parameters.copy(), 0.0
    for batch in fleet.task("a", 1).batches(2, 32):
        g = NumpyMlp(M).gradient(own, np.zeros(0, np.float32), batch.x, batch.y).parameters
        velocity = 0.5 * velocity + g + 0.7 * (own - start)
        own = (own - 0.05 * velocity).astype(np.float32)
    assert np.abs(fleet.local["a"].trained.parameters - own).max() < 1e-6


def test_the_larger_mu_the_nearer_the_model_stays() -> None:
    moved = []
    for mu in (0.0, 1.0, 20.0):
        fleet = Rounds(FedProx(epochs=5, mu=mu, lr=0.05, momentum=0))
        fleet.play("a")
        moved.append(np.linalg.norm(fleet.local["a"].trained.parameters - fleet.received["a"].parameters))
    assert moved[0] > 1.2 * moved[1] > 3 * moved[2] > 0
