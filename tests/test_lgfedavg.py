"""LG-FedAvg: federated averaging first, then a global head above bodies that never leave their devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_mlp import CountingSamples, clusters, counted, course, mlp
from rounds import Rounds

from edge_client.bundle import Manifest
from edge_client.errors import ConfigError, LostError, PayloadError
from edge_client.methods import Method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.lgfedavg import Kept, LGFedAvg, Record
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment
from edge_client.training import Trainer

M = mlp(6, 5, 4, 3)
HEAD = slice(M.tensors["2.w"].offset, M.d)  # with num_layers = 1
SETTINGS: dict[str, Any] = {"epochs": 2, "batch": 20, "lr": 0.05, "momentum": 0.5}


def federation(method: Method, manifest: Manifest = M, engine: Trainer | None = None) -> Rounds:
    """Three devices of unlike data."""
    data = {d: clusters(M, i, count=30 + 10 * i) for i, d in enumerate("abc")}
    return Rounds(method, manifest, rounds=9, data=data, trainer=engine)


def fleet(rounds: int, num_layers: int = 1, global_rounds: int = 2) -> Rounds:
    f = federation(LGFedAvg(num_layers=num_layers, global_rounds=global_rounds, **SETTINGS))
    for _ in range(rounds):
        f.play(*"abc")
    return f


def test_the_first_phase_is_federated_averaging_bit_for_bit() -> None:
    ours, theirs = fleet(2), federation(FedAvg(**SETTINGS))
    theirs.play(*"abc")
    theirs.play(*"abc")
    assert ours.state.parameters.tobytes() == theirs.state.parameters.tobytes()
    assert ours.kept == {"a": None, "b": None, "c": None}


def test_every_device_starts_the_second_phase_from_the_averaged_model_and_then_receives_the_head_alone() -> None:
    f = fleet(2)
    checkpoint = f.state.parameters
    for d in "abc":
        assert set(f.ask(d).arrays) == {"head", "body", "statistics"}
        assert np.array_equal(f.receive(d).parameters, checkpoint)
    f.play(*"abc")
    assert set(f.ask("a").arrays) == {"head"}
    assert set(f.local["a"].update.arrays) == {"head"}
    assert f.ask("a").arrays["head"].size == M.d - HEAD.start == 3 * 4 + 3


def test_only_the_head_is_averaged_and_every_device_goes_on_with_its_own_body() -> None:
    f = fleet(3)
    trained = {d: f.local[d].trained.parameters for d in "abc"}
    samples = [len(f.data[d].y) for d in "abc"]
    mean = np.average([trained[d][HEAD] for d in "abc"], axis=0, weights=samples)
    for d in "abc":
        received = f.receive(d).parameters
        assert received[HEAD] == pytest.approx(mean, abs=1e-6)
        assert np.array_equal(received[: HEAD.start], trained[d][: HEAD.start])
    assert not np.array_equal(f.receive("a").parameters, f.receive("b").parameters)


def test_the_servers_body_stays_that_of_the_first_phase_for_devices_that_join_late() -> None:
    f = fleet(2)
    body = f.state.parameters[: HEAD.start].copy()
    for _ in range(3):
        f.play("a", "b")
    assert set(f.ask("c").arrays) == {"head", "body", "statistics"}
    received = f.receive("c").parameters
    assert np.array_equal(received[: HEAD.start], body)
    assert np.array_equal(received[HEAD], f.receive("a").parameters[HEAD])


def test_without_a_first_phase_the_bodies_start_from_the_bundle() -> None:
    f = fleet(0, global_rounds=0)
    assert np.array_equal(f.receive("a").parameters, f.course.model.parameters)
    assert f.method.exchanged(f.course) == M.d - HEAD.start
    assert fleet(0).method.exchanged(f.course) == M.d


def test_batch_norm_statistics_are_averaged_in_the_first_phase_and_stay_on_the_device_in_the_second() -> None:
    m = counted(M)
    f = federation(LGFedAvg(num_layers=1, global_rounds=1, **SETTINGS), manifest=m, engine=CountingSamples(m))
    f.play(*"abc")
    mean = 2 * (30**2 + 40**2 + 50**2) / 120  # two epochs; weighted by samples
    assert f.state.buffers.tolist() == pytest.approx([mean] * 2)
    f.play(*"abc")
    f.play("a", "b")
    assert f.state.buffers.tolist() == pytest.approx([mean] * 2)
    assert f.receive("a").buffers.tolist() == pytest.approx([mean + 2 * 60] * 2)
    del f.records["c"]  # the server left out its update: it keeps its own body
    assert f.receive("c").buffers.tolist() == pytest.approx([mean + 2 * 50] * 2)
    f.kept["c"] = None
    assert f.receive("c").buffers.tolist() == pytest.approx([mean] * 2)


def test_a_first_phase_that_covers_every_round_is_said_before_the_first() -> None:
    method = LGFedAvg(num_layers=1, global_rounds=9)
    said = method.caution(course(M, 9))
    assert said is not None
    assert "global_rounds = 9 covers all 9 rounds" in said
    assert said.endswith("set global_rounds below 9")
    assert method.caution(course(M, 10)) is None
    assert str(LGFedAvg(num_layers=1).caution(course(M, 1))).endswith("set global_rounds below 1")
    assert LGFedAvg(num_layers=1, global_rounds=0).caution(course(M, 1)) is None


def test_the_last_layers_are_the_global_ones() -> None:
    method = LGFedAvg(num_layers=2)
    assert [b.name for b in method.head(course(M).model).blocks] == ["1.w", "1.b", "2.w", "2.b"]
    assert [b.name for b in method.body(course(M).model).blocks] == ["0.w", "0.b"]
    with pytest.raises(ConfigError, match="one at least stays local"):
        LGFedAvg(num_layers=3).start(course(M))


def test_a_device_that_lost_its_body_receives_one_again() -> None:
    f = fleet(4)
    f.kept["a"] = None
    with pytest.raises(LostError):
        f.receive("a")
    f.kept["a"] = Kept(np.zeros(3, np.float32), np.zeros(0, np.float32))
    with pytest.raises(LostError):
        f.receive("a")
    del f.records["a"]  # what the server does then
    assert np.array_equal(f.receive("a").parameters, f.state.parameters)


@pytest.mark.parametrize("round_", [2, 4])
def test_influence_and_limits_are_of_what_travels(round_: int) -> None:
    f = fleet(round_ - 1)
    state, before = f.state, f.receive("a").parameters
    f.play(*"abc")
    a = Assignment(f.course, round_, "a")
    update = f.method.read_update(a, state, Record(round_ - 1), f.local["a"].update)
    moved = f.local["a"].trained.parameters - before
    moved = moved if round_ == 2 else moved[HEAD]
    influence = f.method.influence(a, state, update)
    assert influence.norm == pytest.approx(float(np.linalg.norm(moved)), rel=1e-4)
    assert influence.weight == 30
    start = before if round_ == 2 else before[HEAD]
    assert f.method.limited(a, state, update, 0.5, 1.0).parameters == pytest.approx(start + moved / 2, abs=1e-6)


@pytest.mark.parametrize(
    "arrays",
    [
        {"head": np.zeros(3, np.float32)},
        {"head": np.full(15, np.inf, np.float32)},
        {"parameters": np.zeros(M.d, np.float32)},
        {"body": np.zeros(1, np.float32)},
    ],
)
def test_in_the_second_phase_nothing_but_a_finite_head_is_accepted(arrays: Arrays) -> None:
    f = fleet(3)
    a = Assignment(f.course, 4, "a")
    update = Payload({**f.local["a"].update.arrays, **arrays}, {"samples": 3})
    with pytest.raises(PayloadError):
        f.method.read_update(a, f.state, f.records["a"], update)
    down = f.ask("a")
    with pytest.raises(PayloadError):
        f.method.receive(a, f.kept["a"], Payload({**down.arrays, **arrays}, down.meta))
