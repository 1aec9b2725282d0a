"""FedAvg and Standalone, both halves against each other; how a configuration becomes a method."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from edge_kernels.codecs import values
from numpy_mlp import NumpyMlp, Steady, assignment, clusters, course, mlp, task
from pydantic import Field, ValidationError
from rounds import Rounds, size, stored

from edge_client import methods
from edge_client.blocks import head
from edge_client.bundle import F32, Init, Tensor
from edge_client.errors import ConfigError, DivergedError, PayloadError
from edge_client.methods import ALL, Method, below, make_method, trained_head
from edge_client.methods.fedavg import FedAvg, State, Update
from edge_client.methods.shared.averaging import Weights, accelerated, distance, toward
from edge_client.methods.standalone import Standalone
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Course, Local

M = mlp(6, 5, 4, 3)
NONE = np.zeros(0, np.float32)


@pytest.mark.parametrize(
    ("name", "followed", "advice"),
    [
        ("coupled", {"theta0": 0.5}, "theta0 = 0.5 for weights from a seed"),
        ("deltamask", {"theta0": 0.4}, "theta0 = 0.5 for weights from a seed"),
        ("fedmap", {"floor": 1}, "a larger every"),
        ("fedmask", {"keep": 0.8}, "keep = 0.8"),
        ("federated_pruning", {"keep": 1}, "a larger keep"),
        ("hermes", {"target": 1}, "a larger target"),
        ("hidenseek", {"keep": 1}, "a larger keep"),
    ],
)
def test_advice_that_the_settings_follow_is_not_given(name: str, followed: dict[str, Any], advice: str) -> None:
    assert advice in make_method({"name": name}).hints()
    left = make_method({"name": name, **followed}).hints()
    assert left
    assert advice not in left


def test_the_advice_on_keep_and_rate_depends_on_the_bundle_as_their_defaults_do() -> None:
    drawn, trained = (course(m).model for m in (M, M.model_copy(update={"seed": None})))
    assert make_method({"name": "fedmask"}).hints(drawn) == ("keep = 0.8", "lr (here 10)")
    assert make_method({"name": "fedmask"}).hints(trained)[0] == "lr (here 0.03)"  # it keeps all
    assert make_method({"name": "fedmask", "keep": 0.2}).hints(trained)[0] == "keep = 0.8"


def test_a_score_below_a_base_is_said_without_advice_where_there_is_none() -> None:
    assert below("m", 0.5, 0.5, "x", ["lr"]) is None
    assert below("m", 0.25, 0.5, "x", ["lr", "rounds"]) == (
        "m ends at 0.250, below x (0.500); what most often helps: lr, then rounds"
    )
    assert below("m", 0.25, 0.5, "x", []) == "m ends at 0.250, below x (0.500)"


OF_LAYERS = ("bnn", "coupled", "deltamask", "federated_pruning", "fedmask", "fedpm", "hermes", "hidenseek", "lgfedavg",
             "linear_probing", "signed")  # fmt: skip


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("name", sorted(e.name for e in entry_points(group="maskfleet.methods")))
def test_a_bundle_without_layers_is_refused_in_a_sentence_or_trained(name: str, seed: int | None) -> None:
    bare, method = M.model_copy(update={"layers": (), "seed": seed}), make_method({"name": name})
    if name in OF_LAYERS:
        with pytest.raises(ConfigError, match=r"no (trained )?layer|has no other|the model has 0|no channel groups"):
            Rounds(method, bare)
        return
    there = Rounds(method, bare)
    for devices in ("a", "ab", "b"):
        there.play(*devices)
    assert np.isfinite(there.personal("a").parameters).all()


def one_round(method: Method, device: str = "a", state: Any = None) -> tuple[Payload, Local]:
    """A device's first round: its downlink and what comes of it."""
    a = assignment(M, device)
    down = decode(encode(method.downlink(a.course, 1, method.start(a.course) if state is None else state, None)))
    return down, method.local_round(task(M, device), None, method.receive(a, None, down))


# --- FedAvg


def test_fedavg_is_the_mean_weighted_by_samples() -> None:
    m = mlp(1, 2, bias=False)
    updates = {
        "a": Payload({"parameters": np.array([2.0, 0.0], np.float32), "buffers": NONE}, {"samples": 1}),
        "b": Payload({"parameters": np.array([6.0, 1.0], np.float32), "buffers": NONE}, {"samples": 3}),
    }
    fleet = Rounds(FedAvg(), m)
    fleet.close(updates)
    assert fleet.state.parameters.tolist() == [5.0, 0.75]


def test_fedavg_sends_everything_both_ways_in_32_bits_to_one_audience() -> None:
    down, local = one_round(FedAvg())
    assert down.arrays["parameters"].nbytes == local.update.arrays["parameters"].nbytes == 4 * M.d
    assert FedAvg().update_limit(course(M)) == sum(a.nbytes for a in local.update.arrays.values())
    assert local.kept is None
    assert FedAvg().audience(course(M), 1, None) == ALL


def test_fedavg_learns() -> None:
    down, local = one_round(FedAvg(epochs=30, lr=0.05))
    data, engine = clusters(M, 1), NumpyMlp(M)
    before = (engine.logits(down.arrays["parameters"], NONE, data.x).argmax(1) == data.y).mean()
    after = (engine.logits(local.trained.parameters, NONE, data.x).argmax(1) == data.y).mean()
    assert after > max(before, 0.9)


def test_fedavg_refuses_an_update_of_no_samples() -> None:
    _, local = one_round(FedAvg())
    update = Payload(local.update.arrays, {"samples": 0})
    with pytest.raises(PayloadError, match="samples"):
        FedAvg().read_update(assignment(M), FedAvg().start(course(M)), None, update)


def test_influence_is_the_norm_of_each_change_and_limited_scales_both() -> None:
    method, state = FedAvg(), State(np.zeros(4, np.float32), np.ones(2, np.float32))
    update = Update(np.array([3, 0, 4, 0], np.float32), np.array([1, 11], np.float32), 9.0)
    influence = method.influence(assignment(M), state, update)
    assert (influence.norm, influence.statistics, influence.weight) == (5.0, 10.0, 9.0)
    limited = method.limited(assignment(M), state, update, 0.5, 2.0)
    assert limited.parameters.tolist() == [1.5, 0, 2, 0]
    assert limited.buffers.tolist() == [1, 6]
    assert limited.samples == 2.0


def test_the_largest_floats_have_a_finite_distance_and_can_be_scaled() -> None:
    top = np.finfo(np.float32).max
    a, b = np.full(3, top, np.float32), np.full(3, -top, np.float32)
    assert distance(a, b) == pytest.approx(2 * float(top) * 3**0.5)
    assert toward(a, b, 0.5).tolist() == [0, 0, 0]
    assert toward(a, b, 1.0).tolist() == b.tolist()
    assert toward(a, b, 0.0).tolist() == a.tolist()


# --- FedAvg: the mean of the last rounds


NORMED = M.model_copy(
    update={"buffers": (Tensor(name="s", shape=(5,), offset=0, init=Init(kind="constant", scale=0)),)}
)


def ended(made: FedAvg, run: Course, round_: int, state: State, parameters: F32, buffers: F32) -> State:
    """The state after a round in which one device sent these values, stored and read again."""
    a = assignment(run.model.manifest, "a", round_, run.rounds)
    total, _ = made.fold(a, state, None, Update(parameters, buffers, 7.0), None)
    return stored(made.finish(run, round_, ["a"], state, total)[0])


@pytest.mark.parametrize(
    ("average", "rounds", "left_out", "covered"),
    [
        (0.0, 10, set(), {10}),
        (0.14, 10, set(), {10}),
        (0.2, 10, set(), {9, 10}),
        (0.26, 10, set(), {8, 9, 10}),
        (0.5, 9, set(), {6, 7, 8, 9}),
        (1.0, 40, set(), {*range(1, 41)}),
        (0.4, 10, {8}, {7, 9, 10}),
        (0.2, 10, {9, 10}, {8}),
    ],
)
def test_after_the_last_round_devices_receive_the_mean_of_the_models_of_the_last_rounds(
    average: float, rounds: int, left_out: set[int], covered: set[int]
) -> None:
    """In rounds `left_out` no update is counted. The server restarts after every round."""
    run_, rng, made = course(NORMED, rounds), np.random.default_rng(0), FedAvg(average=average)
    each = {r: (rng.normal(size=M.d).astype(np.float32), rng.normal(size=5).astype(np.float32)) for r in covered}
    state = made.start(run_)

    def received(round_: int) -> State:
        a = assignment(NORMED, "a", round_, rounds)
        return made.receive(a, None, decode(encode(made.downlink(run_, round_, state, None))))

    for round_ in range(1, rounds + 1):
        if round_ in left_out:
            continue
        own = each.setdefault(round_, (rng.normal(size=M.d).astype(np.float32), np.ones(5, np.float32)))
        state = ended(made, run_, round_, state, *own)
        if round_ < rounds:
            assert np.array_equal(received(round_ + 1).parameters, own[0])
    assert (state.recent is None) == (len(covered) == 1)  # the default stores nothing more
    final = received(rounds + 1)
    for found, models in zip(
        (final.parameters, final.buffers), zip(*(each[r] for r in covered), strict=True), strict=True
    ):
        assert np.allclose(found, np.mean(models, axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7)


def test_the_mean_of_the_last_rounds_costs_no_bytes_and_changes_no_round() -> None:
    fleets = [Rounds(FedAvg(average=average, up="float16", down="float16"), rounds=4) for average in (0.0, 0.75)]
    for fleet in fleets:
        for _ in range(4):
            fleet.play("a", "b")
    last, mean = fleets
    assert all(encode(last.local[d].update) == encode(mean.local[d].update) for d in "ab")
    assert len(encode(last.ask("a"))) == len(encode(mean.ask("a")))
    assert not np.array_equal(last.receive("a").parameters, mean.receive("a").parameters)


@pytest.mark.parametrize("name", ["average", "server_momentum"])
def test_a_method_whose_state_has_no_place_for_a_step_of_the_server_refuses_it(name: str) -> None:
    class Other(FedAvg):
        state_type = Weights  # type: ignore[assignment]

    Other()
    with pytest.raises(ValidationError, match=rf"{name} = 0\.5: method fedavg has a state of its own"):
        Other(**{name: 0.5})


# --- FedAvg: momentum of the server


def test_the_servers_momentum_is_the_cosine_of_a_change_with_those_before_it() -> None:
    """v <- b v + mean - w, then w <- mean + b v; statistics are the mean. The server restarts after every round."""
    run_, rng, made = course(NORMED, 8), np.random.default_rng(0), FedAvg(server_momentum=0.4)
    state, common, found = made.start(run_), rng.normal(size=M.d), []
    w, v = state.parameters.astype(np.float64), np.zeros(M.d)
    for round_, share in enumerate((1.0, 1.0, 0.3, -1.0, 0.3, 0.0), 1):
        own = (w + share * common + rng.normal(size=M.d)).astype(np.float32), rng.normal(size=5).astype(np.float32)
        state = ended(made, run_, round_, state, *own)
        change = own[0] - w
        found.append(min(0.4, max(0.0, change @ v / (np.linalg.norm(change) * np.linalg.norm(v) or 1.0))))
        v = found[-1] * v + change
        w = own[0] + found[-1] * v
        assert np.allclose(state.parameters, w, rtol=1e-4, atol=1e-4)
        assert np.array_equal(state.buffers, own[1])
    assert found[0] == 0
    assert found[1] == 0.4
    assert 0 < found[2] < 0.4
    assert found[3] == 0


def test_the_final_mean_is_of_the_models_that_the_momentum_moved() -> None:
    run_, rng, made = course(M, 4), np.random.default_rng(0), FedAvg(server_momentum=0.9, average=0.5)
    state, models = made.start(run_), []
    direction = rng.normal(size=M.d)
    for round_ in range(1, 5):
        own = (state.parameters + direction).astype(np.float32)
        state = ended(made, run_, round_, state, own, np.zeros(0, np.float32))
        models.append(state.parameters)
    steps = np.linalg.norm(np.diff(models, axis=0), axis=1) / np.linalg.norm(direction)
    assert np.allclose(steps, [1 + 0.9 * 1.9, 1 + 0.9 * 2.71, 1 + 0.9 * 3.439], rtol=1e-3)
    final = made.receive(assignment(M, "a", 5, 4), None, decode(encode(made.downlink(run_, 5, state, None))))
    assert np.allclose(final.parameters, (models[2] + models[3]) / 2, rtol=1e-5, atol=1e-6)


def test_no_means_make_the_model_or_its_velocity_infinite() -> None:
    run_, made = course(M, 20), FedAvg(server_momentum=0.9)
    state = made.start(run_)
    for round_, mean in enumerate([3e38, -3e38, -3e38, -3e38, 3e38, *[0.0] * 8], 1):
        state = ended(made, run_, round_, state, np.full(M.d, mean, np.float32), np.zeros(0, np.float32))
        assert np.isfinite(state.parameters).all()
        assert state.velocity is not None
        assert np.isfinite(state.velocity).all()
    step, velocity = accelerated(np.full(3, 1e200), np.ones(3, np.float32), 0.9)
    assert step.tolist() == velocity.tolist() == [1e200] * 3  # no cosine can be computed


# --- FedAvg: codecs


@pytest.mark.parametrize(
    ("up", "down"),
    [("float16", "float32"), ("float32", "float16"), ("stochastic8", "stochastic8"), ("float32", "eden:4")],
)
def test_a_codec_carries_the_change_up_and_the_model_down(up: str, down: str) -> None:
    fleet = Rounds(FedAvg(up=up, down=down), M)
    before = fleet.state.parameters
    fleet.play("a")
    sent, local, received = fleet.down["a"], fleet.local["a"], fleet.received["a"].parameters
    names = {"change" if up == "float32" else f"change.{up}", "buffers"}
    assert set(local.update.arrays) == names
    assert set(sent.arrays) == {"parameters" if down == "float32" else f"parameters.{down}", "buffers"}
    assert size(local.update) <= fleet.method.update_limit(fleet.course)
    moved = local.trained.parameters - received
    step = {"float32": 1e-7, "float16": 1e-3, "stochastic8": 1 / 127, "eden:4": 0.2}
    assert np.abs(fleet.state.parameters - before - moved).max() <= 2 * step[up] * np.abs(moved).max()
    assert np.abs(received - before).max() <= step[down] * np.abs(before).max()


@pytest.mark.parametrize("down", ["float16", "qsgd", "eden", "drive+"])
def test_values_that_the_codec_of_the_downlink_cannot_write_never_enter_the_model(down: str) -> None:
    method = FedAvg(down=down, server_momentum=0.9)
    fleet = Rounds(method, M)
    for share in (0.5, 0.99, 0.99):  # the server's momentum goes on beyond the devices' model
        moved = np.full(M.d, share * method.largest, np.float32)
        fleet.close({"a": Payload({"change": moved - fleet.state.parameters, "buffers": NONE}, {"samples": 3})})
        assert fleet.ask("a").arrays
    with np.errstate(over="ignore"):
        far = np.full(M.d, 2.5 * method.largest, np.float32)
    with pytest.raises(PayloadError, match=rf"a parameter of 'a' is beyond {re.escape(method.down)}'s"):
        fleet.close({"a": Payload({"change": far, "buffers": NONE}, {"samples": 3})})


def test_rounding_the_downlink_does_not_move_the_servers_model() -> None:
    fleet = Rounds(FedAvg(down="stochastic8", lr=0.1), M, trainer=Steady(M, np.zeros(M.d, np.float32)))
    before = fleet.state.parameters
    fleet.play("a")
    assert (fleet.received["a"].parameters != before).any()
    assert (fleet.state.parameters == before).all()


def test_eight_bits_learn_what_thirty_two_do() -> None:
    ends = {}
    for codec in ("float32", "stochastic8"):
        data = {d: clusters(M, i) for i, d in enumerate("abc")}
        fleet = Rounds(FedAvg(up=codec, down=codec, lr=0.05), M, data=data)
        for _ in range(8):
            fleet.play("a", "b", "c")
        ends[codec] = fleet.score("b")
    assert ends["stochastic8"] > ends["float32"] - 0.05 > 0.75


def test_a_change_that_overflows_or_does_not_decode_is_refused() -> None:
    method = FedAvg(up="stochastic8")
    state = State(np.full(M.d, np.finfo(np.float32).max, np.float32), NONE)
    huge = np.frombuffer(values.codec("stochastic8").encode(state.parameters, 1), np.uint8)
    for data, word in ((huge, "infinite"), (huge[:-1], "take"), (huge.view(np.int8), "uint8")):
        update = Payload({"change.stochastic8": data, "buffers": NONE}, {"samples": 1})
        with pytest.raises(PayloadError, match=word):
            method.read_update(assignment(M), state, None, update)


def test_a_value_codec_that_does_not_exist_is_refused_with_the_choices() -> None:
    for name in ("up", "down"):
        with pytest.raises(ConfigError, match=rf"{name} = 'zip'.*choose one of float32, float16, stochastic8"):
            make_method({"name": "fedavg", name: "zip"})


# --- Standalone


def test_standalone_exchanges_nothing_and_goes_on_from_its_own_model() -> None:
    method = Standalone(epochs=2)
    down, first = one_round(method)
    assert down.arrays == {}
    assert first.update.arrays == {}
    received = method.receive(assignment(M, round_=2), first.kept, down)
    second = method.local_round(task(M, round_=2), first.kept, received)
    assert second.loss < first.loss
    personal = method.personal(task(M), second.kept, method.receive(assignment(M), second.kept, down))
    assert np.array_equal(personal.parameters, second.trained.parameters)
    with pytest.raises(PayloadError, match="standalone"):
        method.read_update(assignment(M), method.start(course(M)), None, Payload({"x": np.zeros(1, np.uint8)}))


# --- both


def test_a_loss_that_diverges_is_an_error_and_not_an_update() -> None:
    data = clusters(M, 1)
    wild = replace(data, x=data.x * np.float32(1e30))
    received = FedAvg().start(course(M))
    with np.errstate(all="ignore"), pytest.raises(DivergedError, match="learning rate"):
        FedAvg().local_round(task(M, data=wild), None, received)


@pytest.mark.parametrize("method", [FedAvg, Standalone])
def test_plain_sgd_has_the_momentum_and_the_epochs_it_is_given(method: type[FedAvg] | type[Standalone]) -> None:
    # Velocities 1, 1.5, 1.75 in three epochs of one batch: lr times 4.25 in all.
    trainer = Steady(M, np.ones(M.d, np.float32))
    chosen = method(lr=0.25, momentum=0.5, epochs=3, batch=64)
    model = course(M).model
    local = chosen.local_round(replace(task(M), trainer=trainer), None, State(model.parameters, model.buffers))
    assert np.allclose(local.trained.parameters, model.parameters - 0.25 * 4.25, atol=1e-6)


@pytest.mark.parametrize("method", [FedAvg(epochs=4, batch=16), Standalone(epochs=4, batch=16)])
def test_every_epoch_is_trained(method: Method) -> None:
    engine = NumpyMlp(M)
    model = course(M).model
    method.local_round(replace(task(M), trainer=engine), None, State(model.parameters, model.buffers))
    assert engine.calls == 3 * 4  # 40 samples in batches of 16 are three steps an epoch


@pytest.mark.parametrize("method", [FedAvg(), FedAvg(up="stochastic8"), Standalone()])
def test_the_same_round_is_the_same_bytes(method: Method) -> None:
    assert encode(one_round(method)[1].update) == encode(one_round(method)[1].update)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"name": "alchemy"}, "choose one of"),
        ({}, "the method has no `name`"),
        ({"name": "fedavg", "epochs": 0}, "epochs = 0"),
        ({"name": "fedavg", "velocity": 9}, "velocity = 9: there is no such setting; there are .*epochs, .*, lr, "),
        ({"name": "lattice", "quantumm": 3}, "quantumm = 3: there is no such setting; did you mean 'quantum'"),
        ({"name": "lattice", "LR": 3}, "LR = 3: there is no such setting; did you mean 'lr'"),
        ({"name": "fedavg", "lr": True}, "lr = true"),
        ({"name": "lattice", "epochs": "4"}, "epochs = '4'"),
        ({"name": "fedavg", "down": "topk"}, "^method 'fedavg', setting conflict: down = 'topk' loses too much"),
        ({"name": "coupled", "theta0": 0.001}, "^method 'coupled', setting conflict: theta0 = 0.001 lies outside"),
    ],
)
def test_a_wrong_method_or_setting_is_named(table: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_method(table)


def test_a_method_of_another_package_may_take_lists_sets_and_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listing(FedAvg):
        layers: list[str] = Field(default_factory=list)
        only: frozenset[str] = frozenset()
        spans: tuple[tuple[int, int], ...] = ()

    monkeypatch.setattr(methods, "load_method", lambda _: Listing)
    made = make_method({"name": "fedavg", "layers": ["a"], "only": ["b"], "spans": [[1, 2]]})
    assert isinstance(made, Listing)
    assert (made.layers, made.only, made.spans) == (["a"], {"b"}, ((1, 2),))
    with pytest.raises(ConfigError, match=r"layers\.0 = 1: Input should be a valid string"):
        make_method({"name": "fedavg", "layers": [1]})


def test_a_head_is_trained_where_the_weights_come_from_a_file_and_are_not_all_zero() -> None:
    drawn, from_file = (course(m).model for m in (M, M.model_copy(update={"seed": None})))
    zeros, last = from_file.parameters.copy(), head(M)
    last.scatter(np.zeros(last.size, np.float32), zeros)
    assert [trained_head(m) for m in (drawn, from_file, replace(from_file, parameters=zeros))] == [False, True, False]
