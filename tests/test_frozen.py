"""What a bundle freezes stays as it is, whatever a method does with the rest, and on a pre-trained bundle too."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from edge_kernels.codecs import values
from numpy.typing import NDArray
from numpy_mlp import NumpyMlp, course, grouped, model
from rounds import M, Rounds

from edge_client.bundle import F32, Manifest
from edge_client.errors import ConfigError
from edge_client.global_model import global_model
from edge_client.methods import Method, make_method
from edge_client.methods.fedmask.method import FedMask
from edge_client.narrow import Channels, narrow
from edge_client.training import Gradient

FROZEN = ("0.w", "1.b")
SETTINGS: dict[str, dict[str, Any]] = {
    "fedmask": {"keep": 0.5, "prune_layers": 3},
    "fedmap": {"every": 1},
    "federated_pruning": {"keep": 1.0},  # a unit that is pruned takes what is frozen of it along
    "hermes": {"target": 1.0},
    "hidenseek": {"keep": 1.0},
    "lgfedavg": {"num_layers": 1, "global_rounds": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg-down": {"name": "fedavg", "down": "eden:1", "up": "eden:1"},
    "feddr-down": {"name": "feddr", "down": "stochastic8", "average": 0.5},
    "perfedavg-down": {"name": "perfedavg", "down": "float16"},
    "coupled-biases": {"name": "coupled", "biases": True, "theta0": 0.5, "head": "mask"},
    "fedpm-sample": {"name": "fedpm", "biases": True, "theta0": 0.5, "evaluate": "sample"},
    "signed-keep": {"name": "signed", "keep": 0.5, "prune_layers": 3},
}
NAMES = sorted(e.name for e in entry_points(group="maskfleet.methods"))


def frozen(*names: str, seed: int | None = 1) -> Manifest:
    m = grouped(M)
    rows = tuple(t.model_copy(update={"trainable": t.name not in names}) for t in m.parameters)
    fields = {name: getattr(m, name) for name in Manifest.model_fields}
    return Manifest(**{**fields, "parameters": rows, "seed": seed})


def made(name: str) -> Method:
    return make_method(VARIANTS.get(name, {"name": name, **SETTINGS.get(name, {})}))


class Trainer(NumpyMlp):
    """Without a gradient at frozen tensors, as every engine has it."""

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[np.int64]) -> Gradient:
        found = super().gradient(parameters, buffers, x, y)
        for t in self.manifest.parameters:
            found.parameters[t.span] *= t.trainable
        return found

    def narrow(self, kept: Channels) -> Trainer:
        return Trainer(narrow(self.manifest, kept).manifest)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_frozen_tensors_never_change(name: str, seed: int | None) -> None:
    m = frozen(*FROZEN, seed=seed)
    there = Rounds(made(name), m, 4, trainer=Trainer(m))
    there.course = replace(there.course, model=replace(model(m), parameters=model(m).parameters + np.float32(0.1)))
    there.state = there.method.start(there.course)
    before = there.course.model.parameters
    for devices in ("ab", "abc", "ac"):
        there.play(*devices)
    for d in "abc":
        for found in (there.personal(d), there.local[d].trained):
            for tensor in FROZEN:
                span = m.tensors[tensor].span
                assert np.array_equal(found.parameters[span], before[span])
            assert not np.array_equal(found.parameters, before)


def test_frozen_values_count_as_nothing_in_a_coded_downlink() -> None:
    """A device has them. A norm or a rotation that holds them would blur all others."""
    m = frozen(*FROZEN)
    there = Rounds(make_method({"name": "fedavg", "down": "float16"}), m, 4, trainer=Trainer(m))
    there.play("a")
    sent = values.decode("float16", there.ask("a").arrays["parameters.float16"].tobytes(), m.d, 0)
    for t in m.parameters:
        assert sent[t.span].any() == t.trainable


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_what_a_device_sends_for_frozen_values_is_dropped(name: str) -> None:
    """Its engine is faulty, or it is hostile."""
    m = frozen(*FROZEN)
    there = Rounds(made(name), m, 4, trainer=NumpyMlp(m))  # which trains them too
    before = there.course.model.parameters
    there.play("a", "b")
    if there.method.stays(there.course) is None:
        after = global_model(there.method, there.course, there.state, there.round).parameters
    elif (after := getattr(there.state, "parameters", None)) is None:
        return  # the server holds no weights
    for tensor in FROZEN:
        assert np.array_equal(after[m.tensors[tensor].span], before[m.tensors[tensor].span])
    assert not np.array_equal(after, before)


@pytest.mark.parametrize("name", ["fedmask", "signed", "bnn", "fedpm", "coupled", "deltamask"])
def test_what_is_frozen_has_no_mask(name: str) -> None:
    method, free = make_method({"name": name}), frozen()
    whole, without = (method.exchanged(course(m)) for m in (free, frozen("0.w")))
    assert whole - without == free.tensors["0.w"].size
    for head in ("local", "masked") if isinstance(method, FedMask) else ():
        assert make_method({"name": name, "head": head}).start(Rounds(method, frozen("0.w")).course)


@pytest.mark.parametrize("settings", [{"name": "fedmask", "head": "local"}, {"name": "bnn"}, {"name": "fedpm"}])
def test_a_bundle_whose_layers_before_the_head_are_frozen_has_nothing_to_mask(settings: dict[str, Any]) -> None:
    there = Rounds(make_method({"name": "fedavg"}), frozen("0.w", "1.w"))
    with pytest.raises(ConfigError, match=r"no trained layer|has no other|no layer but the head"):
        make_method(settings).start(there.course)


@pytest.mark.parametrize("head", ["auto", "mask", "keep"])
def test_a_bundle_without_a_trained_layer_has_nothing_to_mask(head: str) -> None:
    there = Rounds(make_method({"name": "fedavg"}), frozen("0.w", "0.b", "1.w", "1.b", "2.w", "2.b"))
    with pytest.raises(ConfigError, match="trains no layer that can be masked; choose another method"):
        make_method({"name": "fedpm", "head": head}).start(there.course)


@pytest.mark.parametrize("name", ["fedpm", "deltamask", "coupled", "linear_probing"])
def test_a_probed_head_is_what_is_trained_of_the_last_layer(name: str) -> None:
    """Devices whose engine is faulty, or that are hostile, would move what is frozen of it too."""
    m = frozen("2.w")
    there = Rounds(make_method({"name": name}), m, 4, trainer=NumpyMlp(m))
    there.play("a", "b")
    assert there.up["a"].arrays["head"].size == there.state.head.size == m.tensors["2.b"].size
    found, before = there.personal("a").parameters, there.course.model.parameters
    assert np.array_equal(found[m.tensors["2.w"].span], before[m.tensors["2.w"].span])
    assert not np.array_equal(found[m.tensors["2.b"].span], before[m.tensors["2.b"].span])


@pytest.mark.parametrize("name", ["fedpm", "deltamask", "coupled"])
@pytest.mark.parametrize("head", ["auto", "probe", "keep", "mask"])
def test_no_round_probes_a_frozen_head(name: str, head: str) -> None:
    m = frozen("2.w", "2.b")
    there = Rounds(make_method({"name": name, "head": head}), m, 4, trainer=Trainer(m))
    there.play("a", "b")
    assert there.state.posterior.masks == 2
    assert "head" not in there.up["a"].arrays


def test_linear_probing_refuses_a_frozen_head() -> None:
    there = Rounds(make_method({"name": "fedavg"}), frozen("2.w", "2.b"))
    with pytest.raises(ConfigError, match="no trained layer to probe"):
        make_method({"name": "linear_probing"}).start(there.course)
