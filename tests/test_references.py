"""Whole federations of the methods beside second versions of them (`references`).

Every setting has each of its values in some federation; which goes with which is drawn from the federation's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy_mlp import clusters, grouped, mlp
from reference_averages import Averages
from reference_bernoulli import Bernoulli
from reference_masks import Masks
from reference_means import Means
from reference_signs import Signs
from reference_units import Subnetworks
from references import CentredMlp, centred, rehearse
from rounds import Rounds

from edge_client.bundle import Manifest, Model, generate
from edge_client.data import DeviceData
from edge_client.methods import Method, make_method

ROUNDS = 5
DEVICES = ("a", "b", "c", "d")
Choices = Mapping[str, Sequence[Any]]

TRAINING: Choices = {"epochs": (1, 2), "batch": (4, 32), "momentum": (0.0, 0.9)}
MASKS: Choices = {
    **TRAINING,
    "keep": (0.33, 0.8, 1.0),
    "prune_layers": (1, 2, ["0"]),
    "restart": ("radius", "latent"),
    "radius": (0.1, 1.0),
    "initial_mask": ("ones", "random"),
    "codec": ("auto", "bits"),
    "head": ("masked", "local"),
    "biases": ("local", "frozen"),
    "real_gates": (["o"], [], ["i", "g"]),
    "lr": (1.0, 10.0),
    "local_lr": (0.01, 0.1),
}
SIGNS: Choices = {
    **TRAINING,
    "down": ("sign", "count"),
    "restart": ("radius", "latent"),
    "radius": (0.5, 1.0),
    "biases": ("local", "frozen"),
    "codec": ("auto", "bits"),
    "lr": (1.0, 10.0),
    "local_lr": (0.01, 0.1),
}
PERSONAL: Choices = {**TRAINING, "lr": (0.03, 0.1)}


def drawn(name: str, seed: int, choices: Choices, **given: Any) -> Method:
    """A method with settings drawn by this number."""
    rng = np.random.default_rng([seed, 1])
    settings = {key: options[int(rng.integers(len(options)))] for key, options in choices.items()}
    return make_method({"name": name, **settings, **given})


def fleet(method: Method, m: Manifest, seed: int) -> Rounds:
    """Devices with 5 to 20 samples, or all with 8, so that votes tie."""
    rng, m = np.random.default_rng([seed, 2]), centred(m)
    sizes = np.full(len(DEVICES), 8) if seed % 3 == 0 else rng.integers(5, 21, len(DEVICES))
    data = {}
    for d, n in zip(DEVICES, sizes, strict=True):
        x = rng.standard_normal((n + 3, *m.input.shape)).astype(np.float32) + 0.5
        y = rng.integers(3, size=n + 3)
        data[d] = DeviceData(x[:n], y[:n], x[:0], y[:0], x[n:], y[n:])
    return Rounds(method, m, ROUNDS, seed=seed, cohort=4, data=data, trainer=CentredMlp(m))


def with_gates(m: Manifest) -> Manifest:
    """The same network, its second layer declared an LSTM's: four blocks of rows."""
    layers = list(m.layers)
    layers[1] = layers[1].model_copy(update={"kind": "lstm", "gates": ("i", "f", "g", "o")})
    return m.model_copy(update={"layers": tuple(layers)})


@pytest.mark.parametrize("seed", range(24))
def test_fedmask_is_what_its_page_says(seed: int) -> None:
    state, down = (("global", "bit"), ("global", "count"), ("client", "bit"))[seed % 3]
    method = drawn("fedmask", seed, {**MASKS, "group_lasso": (0.0, 2e-4, 0.01)}, state=state, down=down)
    m = mlp(5, 6, 8, 3)
    played = fleet(method, with_gates(m) if seed % 2 else m, seed)
    rehearse(played, Masks(played, method), seed)


@pytest.mark.parametrize("seed", range(8))
def test_signed_is_fedmask_with_signs(seed: int) -> None:
    method = drawn("signed", seed, MASKS, group_lasso=0.0)
    played = fleet(method, mlp(5, 6, 8, 3), seed)
    rehearse(played, Masks(played, method, signed=True), seed)


@pytest.mark.parametrize("seed", range(12))
def test_hidenseek_is_what_its_page_says_after_its_pruning(seed: int) -> None:
    method: Any = drawn("hidenseek", seed, {**SIGNS, "keep": (0.5, 0.8), "prune_layers": ([], ["1"])})
    played = fleet(method, grouped(mlp(5, 9, 8, 3)), seed)
    rehearse(played, Signs(played, method, method.prune(played.course).channels), seed)


@pytest.mark.parametrize("seed", range(12))
def test_bnn_fedavg_is_what_its_page_says(seed: int) -> None:
    method = drawn("bnn", seed, SIGNS)
    m = mlp(5, 6, 8, 3)
    played = fleet(method, with_gates(m) if seed % 2 else m, seed)
    rehearse(played, Signs(played, method, None), seed)


@pytest.mark.parametrize("seed", range(3))
def test_standalone_is_what_its_page_says(seed: int) -> None:
    method = drawn("standalone", seed, PERSONAL)
    played = fleet(method, mlp(5, 6, 8, 3), seed)
    rehearse(played, Means(played, method), seed)


@pytest.mark.parametrize("seed", range(12))
def test_lg_fedavg_is_what_its_page_says(seed: int) -> None:
    up, feedback = (("float32", False), ("topk:0.3", False), ("topk:0.3", True))[seed % 3]
    choices = {**PERSONAL, "num_layers": (1, 2), "global_rounds": (0, 2, 2, ROUNDS)}
    method = drawn("lgfedavg", seed, choices, up=up, feedback=feedback)
    played = fleet(method, mlp(5, 6, 8, 3), seed)
    rehearse(played, Means(played, method), seed)


@pytest.mark.parametrize("seed", range(12))
def test_per_fedavg_is_what_its_page_says(seed: int) -> None:
    choices = {**PERSONAL, "alpha": (0.05, 0.2), "delta": (0.01, 0.05), "personal_epochs": (0, 2)}
    method = drawn("perfedavg", seed, choices, variant=("fo", "hf")[seed % 2])
    played = fleet(method, mlp(5, 6, 8, 3), seed)
    rehearse(played, Means(played, method), seed)


@pytest.mark.parametrize("seed", range(16))
def test_hermes_is_what_its_page_says(seed: int) -> None:
    """The validation part is the training samples, of which a device classifies some right and some wrong."""
    choices = {**PERSONAL, "rate": (0.2, 0.5), "target": (0.3, 0.7), "threshold": (0.3, -1.0), "lasso": (0.0, 0.01)}
    method = drawn("hermes", seed, choices, state=("global", "client")[seed % 2])
    played = fleet(method, grouped(mlp(5, 9, 8, 3)), seed)
    played.data = {d: replace(data, x_val=data.x, y_val=data.y) for d, data in played.data.items()}
    rehearse(played, Subnetworks(played, method), seed)


def averaging(rng: np.random.Generator, kind: str) -> Method:

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    local = {"epochs": 1, "batch": one(5, 10, 20), "lr": 0.05, "weights": one("uniform", "samples")}
    if kind == "feddr":
        return make_method({"name": "feddr", "eta": one(0.5, 10), "alpha": one(0.9, 1.5), **local})
    local |= {"every": one(1, 2, 3), "prune": one(0.1, 0.3, 0.6), "floor": one(0.01, 0.3), "weight_decay": 0.05}
    local["schedule"] = one("step", "continuous")
    if kind == "fedmap with dr":
        later = one({}, {"later": "fedavg"}, {"later_eta": 3, "later_alpha": 1.75})
        local |= {"momentum": 0, "dr": {"eta": one(0.5, 10), "alpha": one(0.9, 1.5), "switch": 2, **later}}
    return make_method({"name": kind.removesuffix(" with dr"), **local})


@pytest.mark.parametrize("kind", ["feddr", "fedmap", "fedmap with dr", "federated_pruning_lamp"])
@pytest.mark.parametrize("seed", range(6))
def test_averages_are_what_their_pages_say(kind: str, seed: int) -> None:
    rng, m = np.random.default_rng(seed), mlp(4, 5, 3)
    data = {d: clusters(m, i, int(rng.integers(6, 40))) for i, d in enumerate(DEVICES)}
    played = Rounds(averaging(rng, kind), m, int(rng.integers(4, 9)), cohort=4, data=data)
    rehearse(played, Averages(played), seed)


def masking(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Settings, each of which is the default half of the time."""

    def one(default: Any, *others: Any) -> Any:
        return default if rng.random() < 0.5 else others[rng.integers(len(others))]

    s = {
        "name": name, "head": one("auto", "probe", "keep", "mask"), "biases": one(False, True),
        "probe_rounds": one(1, 2), "probe_epochs": one(1, 2), "probe_lr": one(0.1, 0.02),
        "probe_momentum": one(0.9, 0.5), "epochs": one(1, 2), "batch": one(64, 16, 7), "lr": one(0.1, 0.5),
        "ste": one("identity", "ref"), "persistent": one(False, True), "theta0": one(0.95, 0.5, 0.8),
        "clip": one(0.01, 0.04), "rescale": one(True, False),
        "evaluate": one("auto", "sample", "threshold", "expected"),
        "spread": 0.0, "prior": 1.0, "posterior": "mode", "reset_every": 1,
    }  # fmt: skip
    if rng.random() < 0.5:  # with these as they are, masks on trained weights are aggregated by differences
        s |= {"spread": one(0.0, 1.0), "prior": one(1.0, 2.5), "posterior": one("mean", "mode")}
        s |= {"reset_every": one(3, 1)}
    if name == "fedpm":
        s |= {"down": one("float32", "counts"), "codec": one("entropy", "klms")}
    if name == "deltamask":
        s |= {"sampling": one("device", "independent", "common", "stratified"), "codec": "entropy"}
        s |= {"kappa": one(0.8, 1.0, 0.3), "kappa_end": one(None, 1.0, 0.4)}
        s["tally"] = one("mean", "sum") if s["posterior"] == "mean" else "sum"
    if name == "coupled":
        s["references"] = one(64, 0, 2)
    return s


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["fedpm", "deltamask", "coupled"])
def test_bernoulli_masks_are_what_their_pages_say(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(name)])
    settings, cohort = masking(rng, name), int(rng.choice([2, 3, 3, 25]))
    m = mlp(6, 9, 7, 3).model_copy(update={"seed": None if seed % 3 else 1})  # random weights, or trained ones
    data = {f"{i:02}": clusters(m, i, int(rng.integers(5, 50))) for i in range(cohort + 2)}
    start = Model(m, generate(m.parameters, 1), np.zeros(0, np.float32))
    played = Rounds(make_method(settings), start, 6, seed=seed, cohort=cohort, data=data)
    rehearse(played, Bernoulli(played, settings), seed, guarded=False)
