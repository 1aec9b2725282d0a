"""Which of its models a device ends with, and what it says of the choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_client.device import local
from edge_client.device.local import TRAINED
from edge_client.errors import DivergedError
from edge_client.flat import to_arrays
from edge_client.protocol.payload import Payload
from edge_client.task import Personal

MODELS = {
    name: Personal(np.full(3, i, np.float32), np.zeros(1, np.float32))
    for i, name in enumerate(("local", "last", "global"))
}
KEPT = {TRAINED + name: array for name, array in to_arrays(MODELS["last"]).items()}


def chosen(how: Any, scores: tuple[float, float, float], samples: int = 20, kept: Any = KEPT, **more: Any) -> Any:
    """What `local.choose_model` chooses among models with these validation scores."""

    def trained(*_: Any) -> SimpleNamespace:
        if more.get("diverges"):
            raise DivergedError("the loss overflowed", at_start=False)
        return SimpleNamespace(trained=MODELS["local"])

    def score(model: Personal, part: str) -> float:
        assert part == "validation"
        return scores[int(model.parameters[0])]

    method = SimpleNamespace(
        kept_type=None, receive=lambda *_: None, personal=lambda *_: MODELS["global"], local_round=trained
    )
    task = SimpleNamespace(assignment=None, data=SimpleNamespace(y_val=np.zeros(samples)), score=score)
    return local.choose_model(method, task, kept, Payload(), how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "source"),
    [
        ((0.9, 0.8, 0.7), "local"),
        ((0.8, 0.9, 0.7), "last"),
        ((0.7, 0.8, 0.9), "global"),
        ((0.9, 0.9, 0.9), "local"),
        ((0.8, 0.9, 0.9), "last"),
        ((-5.0, -3.0, -4.0), "last"),
    ],
)
def test_the_best_on_the_validation_samples_is_kept_and_of_equal_ones_the_most_local(scores: Any, source: str) -> None:
    found = chosen("best", scores)
    assert found.source == source
    assert found.personal.parameters.tolist() == MODELS[source].parameters.tolist()
    assert found.why == "on 20 validation samples: " + ", ".join(
        f"{name} {score:.3f}" for name, score in zip(MODELS, scores, strict=True)
    )


def test_the_settings_global_and_local_compare_nothing() -> None:
    assert chosen("global", (1, 1, 0)).source == "global"
    assert chosen("local", (0, 1, 1)).source == "local"


def test_without_validation_samples_it_is_the_global_model_and_says_why() -> None:
    found = chosen("best", (1, 1, 0), samples=0)
    assert (found.source, found.why) == ("global", "there are no validation samples to compare it on")


def test_a_model_that_is_not_there_is_not_compared() -> None:
    assert chosen("best", (0.6, 0.9, 0.5), kept={}).source == "local"
    other = {TRAINED + "parameters": np.full(7, 2, np.float32), TRAINED + "buffers": np.zeros(1, np.float32)}
    assert chosen("best", (0.6, 0.9, 0.5), kept=other).source == "local"
    without = chosen("best", (0.9, 0.6, 0.5), diverges=True)
    assert without.source == "last"
    assert without.why.endswith("; the last local epochs failed: the loss overflowed")
    found = chosen("local", (1, 0, 0), diverges=True)
    assert found.source == "global"
    assert "the loss overflowed" in found.why
