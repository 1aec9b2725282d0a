"""Every installed method, and settings to try them with.

A method that needs settings of its own on a network as small as a test's has them in SETTINGS. VARIANTS are further
methods with settings under which much of their code differs.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest

from edge_client.methods import Method, make_method
from edge_client.methods.fedavg import FedAvg

KINDS = {e.name: e.load() for e in entry_points(group="maskfleet.methods")}
NAMES = sorted(KINDS)
SETTINGS: dict[str, dict[str, Any]] = {
    "coupled": {"head": "mask", "theta0": 0.5},
    "fedmap": {"every": 1},
    "fedmask": {"keep": 0.5},
    "lgfedavg": {"num_layers": 1, "global_rounds": 1},
    "stc": {"keep": 0.05},
}
DR = {"eta": 10.0, "alpha": 1.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "deepreduce": {"name": "deltamask", "codec": "bloom", "sampling": "independent", "head": "mask"},
    "deltamask-stratified": {"name": "deltamask", "sampling": "stratified", "head": "mask"},
    "eden": {"name": "fedavg", "up": "eden:0.5", "down": "float16"},
    "drive-plus-per-tensor": {"name": "fedavg", "up": "drive+", "per_tensor": True},
    "fedavg-mean": {"name": "fedavg", "average": 0.7},
    "fedavg-momentum": {"name": "fedavg", "average": 0.7, "server_momentum": 0.9},
    "fedmap-dr-c1": {"name": "fedmap", "every": 2, "dr": {**DR, "later": "fedavg"}},
    "fedmap-dr-c2-c3": {"name": "fedmap", "every": 1, "weights": "samples", "dr": {**DR, "later_alpha": 1.75}},
    "fedmap-dr-eden": {"name": "fedmap", "every": 1, "up": "eden:1", "dr": DR},
    "fedpm-klms": {"name": "fedpm", "codec": "klms", "head": "mask"},
    "fedpm-counts": {"name": "fedpm", "down": "counts", "head": "mask"},
    "fedmask-client": {"name": "fedmask", "keep": 0.5, "state": "client"},
    "hermes-client": {"name": "hermes", "state": "client", "threshold": 0.0},
    "lattice-pruned": {"name": "lattice", "prune": 0.5, "prune_after": 1, "personal_epochs": 1},
    "perfedavg-hf": {"name": "perfedavg", "variant": "hf", "up": "drive"},
    "qsgd": {"name": "fedavg", "up": "qsgd:4", "down": "stochastic8"},
    "signed-counts": {"name": "signed", "down": "count"},
    "topk": {"name": "fedavg", "up": "topk:0.1", "feedback": True},
    "topk-per-tensor": {"name": "fedavg", "up": "topk:0.1", "per_tensor": True, "feedback": True},
}
CODED = sorted(name for name, kind in KINDS.items() if "up" in kind.model_fields and not issubclass(kind, FedAvg))
"""Methods that send values of their own in a codec; FedAvg's are tried above."""
CODECS: dict[str, dict[str, Any]] = {"eden": {"up": "eden:1"}, "topk": {"up": "topk:0.1", "feedback": True}}
VARIANTS |= {
    f"{name}-{codec}": {"name": name, **SETTINGS.get(name, {}), **settings}
    for name in CODED
    for codec, settings in CODECS.items()
}
every_method = pytest.mark.parametrize("name", [*NAMES, *VARIANTS])


def made(name: str) -> Method:
    """The method under test: one epoch a round where it has epochs."""
    settings = VARIANTS.get(name, {"name": name, **SETTINGS.get(name, {})})
    epochs = {"epochs": 1} if "epochs" in type(make_method(settings)).model_fields else {}
    return make_method({**epochs, **settings})
