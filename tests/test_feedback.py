"""Error feedback of FedAvg: what the codec loses of a change is sent later, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kernels.codecs import values
from rounds import M, Rounds

from edge_client.errors import ConfigError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.lgfedavg import LGFedAvg
from edge_client.methods.shared.value_changes import update_stream
from edge_client.task import Assignment


@pytest.mark.parametrize("codec", ["topk:0.1", "stc:0.1", "sign", "drive:mse", "drive+:mse", "eden:0.5", "qsgd:2"])
def test_what_travels_and_what_is_kept_are_the_changes(codec: str) -> None:
    fleet = Rounds(FedAvg(up=codec, feedback=True, epochs=1))
    before = np.zeros(M.d, np.float32)
    for round_ in range(1, 4):
        fleet.play("a")
        change = fleet.local["a"].trained.parameters - fleet.received["a"].parameters
        data = fleet.local["a"].update.arrays[f"change.{codec}"].tobytes()
        sent = values.decode(codec, data, M.d, update_stream(Assignment(fleet.course, round_, "a")))
        residual = fleet.kept["a"].residual
        assert np.abs(sent + residual - (change + before)).max() < 1e-5
        before = residual
    assert np.abs(before).max() > 0


def test_topk_with_feedback_learns_and_one_percent_of_the_bytes_travel_up() -> None:
    ends = {}
    for feedback in (False, True):
        fleet = Rounds(FedAvg(up="topk:0.02", feedback=feedback, epochs=2))
        for _ in range(12):
            fleet.play("a", "b")
        loss = np.mean([fleet.local[d].loss for d in "ab"])
        ends[feedback] = loss
    assert ends[True] < ends[False]
    assert fleet.local["a"].update.arrays["change.topk:0.02"].nbytes < 0.06 * 4 * M.d


def test_per_tensor_the_largest_of_every_tensor_travel() -> None:
    sent = {}
    for per_tensor in (False, True):
        fleet = Rounds(FedAvg(up="topk:0.1", per_tensor=per_tensor, epochs=1))
        fleet.play("a")
        change = fleet.local["a"].trained.parameters - fleet.received["a"].parameters
        due = np.zeros_like(change)
        for part in [t.span for t in M.parameters] if per_tensor else [slice(0, M.d)]:
            k = max(1, round(0.1 * len(change[part])))
            largest = part.start + np.argsort(-np.abs(change[part]), kind="stable")[:k]
            due[largest] = change[largest]
        after = fleet.course.model.parameters + due
        assert fleet.state.parameters == pytest.approx(after, abs=1e-7)
        sent[per_tensor] = due != 0
    assert not np.array_equal(sent[False], sent[True])
    assert all(sent[True][t.span].any() for t in M.parameters)


def test_per_tensor_with_feedback_what_travels_and_what_is_kept_are_the_changes() -> None:
    fleet = Rounds(FedAvg(up="drive+:mse", per_tensor=True, feedback=True, epochs=1))
    before = np.zeros(M.d, np.float32)
    for round_ in range(1, 3):
        old = fleet.state.parameters
        fleet.play("a")
        change = fleet.local["a"].trained.parameters - fleet.received["a"].parameters
        residual = fleet.kept["a"].residual
        assert fleet.state.parameters - old + residual == pytest.approx(change + before, abs=1e-5), round_
        before = residual


def test_a_device_without_its_residual_starts_at_nothing() -> None:
    fleet = Rounds(FedAvg(up="topk:0.1", feedback=True, epochs=1))
    fleet.play("a")
    del fleet.kept["a"]
    fleet.play("a")
    assert fleet.kept["a"].residual.size == M.d


def test_without_feedback_nothing_is_kept() -> None:
    fleet = Rounds(FedAvg(up="topk:0.1", epochs=1))
    fleet.play("a")
    assert fleet.kept["a"] is None


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"feedback": True}, "name one in up"),
        ({"per_tensor": True}, "per_tensor is for codecs; name one in up"),
        ({"down": "topk:0.1"}, "loses too much of a model"),
        ({"down": "sign"}, "loses too much of a model"),
        ({"down": "eden:0.5"}, "loses too much of a model"),
        ({"up": "topk:7"}, "the fraction is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_method({"name": "fedavg", **settings})


def test_the_residual_of_lgfedavgs_whole_model_goes_on_as_that_of_its_head() -> None:
    method, codec = LGFedAvg(num_layers=1, global_rounds=1, up="topk:0.1", feedback=True), "topk:0.1"
    fleet = Rounds(method)
    fleet.play("a")
    head = method.head(fleet.course.model)
    before = head.gather(fleet.kept["a"].residual)
    assert np.abs(before).max() > 0
    fleet.play("a")
    change = head.gather(fleet.local["a"].trained.parameters - fleet.received["a"].parameters)
    data = fleet.local["a"].update.arrays[f"change.{codec}"].tobytes()
    sent = values.decode(codec, data, head.size, update_stream(Assignment(fleet.course, 2, "a")))
    assert sent + fleet.kept["a"].residual == pytest.approx(change + before, abs=1e-6)
