"""Properties that hold for many methods: the order of updates, a federation of one device, what was pruned."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from edge_bench.testing import digits, methods
from every_method import every_method, made
from rounds import Rounds

from coord_server import aggregation
from edge_client.flat import to_arrays
from edge_client.methods import make_method
from edge_client.protocol.payload import Arrays
from edge_client.training import open_trainer

pytest.importorskip("sklearn")


@every_method
@pytest.mark.parametrize("rounds", [0, 2])
def test_the_order_in_which_updates_are_added_changes_nothing_but_rounding(name: str, rounds: int) -> None:
    there = methods.middle(made(name), digits(), rounds)
    method, course, state = there.sim.method, there.sim.course, there.sim.state
    updates = {d: there.update(d) for d in digits().devices}

    def closed(order: tuple[str, ...]) -> Arrays:
        total: Any = None
        for d in order:
            record = there.sim.records.get(d)
            checked = aggregation.check_update(method, there.assignment(d), state, record, updates[d])
            total, _ = method.fold(there.assignment(d), state, total, checked.update, record)
        arrays = dict(to_arrays(method.finish(course, rounds + 1, sorted(order), state, total)[0]))
        # Coupled names the round's streams in the order in which they were added.
        return {field: np.sort(a) if field.endswith(".streams") else a for field, a in arrays.items()}

    first, *others = (closed(order) for order in permutations(digits().devices))
    for other in others:
        for field, values in first.items():
            assert np.allclose(values, other[field], rtol=1e-4, atol=1e-5), field


def alone(settings: dict[str, Any], rounds: int) -> Rounds:
    """A federation of one device "a"."""
    data, trainer = next(iter(digits().devices.values())), open_trainer("onnxruntime", digits().bundle)
    return Rounds(
        make_method(settings), digits().bundle.model(), rounds, seed=digits().seed, cohort=1, data={"a": data},
        trainer=trainer,
    )  # fmt: skip


AVERAGING: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg-coded": {"name": "fedavg", "up": "float16"},
    "fedprox": {},
    "fedmap": {"every": 9},
    "federated_pruning_lamp": {"every": 9},
    "federated_pruning": {"keep": 0.5},
    "hermes": {"threshold": 0.0},
    "lgfedavg": {"num_layers": 1, "global_rounds": 1},
    "linear_probing": {},
    "standalone": {},
    "fedmask": {},
    "fedmask-counts": {"name": "fedmask", "down": "count", "restart": "latent"},
    "fedmask-own": {"name": "fedmask", "state": "client"},
    "signed": {},
    "fedcode": {"request_every": 1},
    "perfedavg": {"batch": 4096},
}


@pytest.mark.parametrize("name", sorted(AVERAGING))
def test_a_federation_of_one_device_is_local_training(name: str) -> None:
    """After every round the device receives the very model that it trained; coded changes to their precision.

    - FedMask and Signed: an element that one device holds is not averaged; it stays as the device has it.
    - FedCode: the model is the clustered one, whose clusters travel in each update. k-means finds its values again.
    - Per-FedAvg: the model is that after the personal step. On all samples at once it is the same in every round.
    """
    fleet = alone({"name": name, **AVERAGING[name]}, rounds=4)
    tolerance = (
        partial(np.allclose, rtol=1e-5, atol=1e-6) if name != "fedavg-coded" else partial(np.allclose, atol=1e-3)
    )
    start = fleet.course.model.parameters
    for _ in range(4):
        fleet.play("a")
        trained, received = fleet.local["a"].trained, fleet.personal("a")
        assert not np.allclose(trained.parameters, start, atol=1e-3)
        assert tolerance(received.parameters, trained.parameters)
        assert tolerance(received.buffers, trained.buffers)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_per_fedavg_of_one_device_goes_on_from_the_meta_model_that_it_sent(variant: str) -> None:
    """The server has the model after the meta-steps, bit for bit; the personal step leaves no trace in it."""
    fleet = alone({"name": "perfedavg", "variant": variant}, rounds=3)
    for _ in range(3):
        fleet.play("a")
        sent = fleet.local["a"].update.arrays["parameters"]
        assert np.array_equal(fleet.receive("a").parameters, sent)
        assert not np.array_equal(fleet.local["a"].trained.parameters, sent)


@pytest.mark.parametrize("keep", [0.02, 1.0])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_what_one_device_of_stc_receives_and_its_residual_are_its_local_training(keep: float, per_tensor: bool) -> None:
    """The server drops nothing, since the ternary form of a ternary change is that change.

    So the next model plus the device's new residual is what it trained plus its old one. With keep = 1 there is a
    residual too: all entries get one magnitude.
    """
    fleet, before = alone({"name": "stc", "keep": keep, "per_tensor": per_tensor}, rounds=4), np.float32(0)
    for _ in range(4):
        fleet.play("a")
        trained, received = fleet.local["a"].trained.parameters, fleet.personal("a").parameters
        residual = fleet.kept["a"].residual
        assert not fleet.state.residual.any()
        assert np.allclose(received + residual, trained + before, rtol=1e-5, atol=1e-6)
        assert residual.any()
        before = residual


PRUNING: dict[str, dict[str, Any]] = {
    "hermes": {"threshold": 0.0, "rate": 0.3},
    "fedmap": {"every": 1},
    "hidenseek": {},
    "signed": {},
    "lattice": {"prune": 0.5, "prune_after": 2},
}


@pytest.mark.parametrize("name", sorted(PRUNING))
def test_pruned_stays_pruned(name: str) -> None:
    fleet, before, pruned = alone({"name": name, "epochs": 1, **PRUNING[name]}, rounds=6), None, 0
    for _ in range(6):
        fleet.play("a")
        for model in (fleet.local["a"].trained, fleet.personal("a")):
            if model.mask is None:
                assert before is None
                continue
            assert not model.parameters[~model.mask].any()
            assert before is None or not (model.mask & ~before).any()
            before, pruned = model.mask, int(np.count_nonzero(~model.mask))
    assert pruned > 0.1 * len(fleet.course.model.parameters)
