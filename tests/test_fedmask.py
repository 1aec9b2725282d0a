"""FedMask: both halves against each other, without engine, network or disk."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import codecs, counter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import NumpyMlp, Steady, assignment, clusters, course, mlp, model, task
from rounds import Rounds
from sign_fleet import fixed_task

from edge_client.bundle import Init, Input, Layer, Manifest, Model, Tensor
from edge_client.errors import ConfigError, DivergedError, LostError, PayloadError
from edge_client.flat import to_arrays
from edge_client.global_model import global_model
from edge_client.methods import bits_digest, make_method
from edge_client.methods.fedmask.method import Choice, FedMask
from edge_client.methods.fedmask.wire import Held, Kept
from edge_client.methods.shared import changes
from edge_client.protocol.payload import Arrays, Payload, decode, encode
from edge_client.targets import Classification
from edge_client.task import Assignment, Local, Progress, Task

M = mlp(6, 5, 4, 3)
MASKED = 6 * 5 + 5 * 4 + 4 * 3
LIVE = 6 * 5 + 4 + 2
DEVICES = ("a", "b", "c")
NONE = np.zeros(0, np.float32)


def first_downlink(method: FedMask, m: Manifest = M) -> Payload:
    """The downlink of a new device in round 1."""
    return method.downlink(course(m), 1, method.start(course(m)), None)


def trained(method: FedMask, t: Task, kept: Kept | None = None, down: Payload | None = None) -> Local:
    """A device's round, by default from the downlink of a new device."""
    a = t.assignment
    down = method.downlink(a.course, a.round, method.start(a.course), None) if down is None else down
    return method.local_round(t, kept, method.receive(a, kept, decode(encode(down))))


def one_round(method: FedMask, m: Manifest = M) -> Local:
    """The first round of one device."""
    return trained(method, task(m))


def reads(fleet: Rounds, device: str) -> bool:
    """Whether the device holds what its next downlink builds on."""
    try:
        fleet.receive(device)
    except LostError:
        return False
    return True


# --- which parameter is whose


def test_the_last_two_masked_layers_are_pruned_to_a_fifth() -> None:
    division = FedMask().division(model(M))
    assert division.masked.size == MASKED
    assert division.prunable.tolist() == list(range(30, MASKED))
    assert division.kept == (4, 2)
    assert division.live == LIVE


@pytest.mark.parametrize(("keep", "kept"), [(0.3, (6, 4)), (0.24, (5, 3)), (0.01, (1, 1))])
def test_the_share_that_is_kept_of_a_layer_is_rounded_and_leaves_an_element(keep: float, kept: tuple[int, ...]) -> None:
    assert FedMask(keep=keep).division(model(M)).kept == kept  # of 20 and 12


def test_with_a_local_head_the_layers_before_it_are_masked_and_pruned() -> None:
    division = FedMask(head="local", keep=0.8).division(model(M))
    assert division.masked.size == 30 + 20
    assert division.kept == (24, 16)
    assert "2.w" in [b.name for b in division.local.blocks]
    frozen = FedMask(head="local", biases="frozen").division(model(M))
    assert [b.name for b in frozen.local.blocks] == ["2.w", "2.b"]


def test_a_model_that_is_mostly_without_masks_is_named_before_round_1() -> None:
    few, half = (M.model_copy(update={"layers": M.layers[-n:]}) for n in (1, 2))
    for biases, others in (
        ("local", "on the device, which trains them"),
        ("frozen", "as the bundle has them"),
    ):
        said = FedMask(biases=biases).caution(course(few))
        assert said is not None
        assert "only 12 of 74 trainable parameters have masks" in said
        assert said.endswith(f"the others stay {others}")
    assert FedMask().caution(course(half)) is not None  # 32 of 74
    assert FedMask().caution(course(M)) is None  # 62 of 74


def test_the_first_mask_is_all_ones_or_a_fair_coin_an_element_from_the_seed() -> None:
    c = course(mlp(60, 50, 3))
    assert FedMask().first_mask(c).all()
    random = FedMask(initial_mask="random").first_mask(c)
    key = counter.key(c.seed, "fedmask", "first mask")
    assert random.tolist() == [bool(number >> 63) for number in counter.uint64(key, 60 * 50 + 50 * 3).tolist()]
    assert random.mean() == pytest.approx(0.5, abs=0.03)


def test_layers_can_be_named() -> None:
    assert FedMask(prune_layers=("0",)).division(model(M)).kept == (6,)
    assert FedMask(prune_layers=9).division(model(M)).kept == FedMask(prune_layers=3).division(model(M)).kept
    assert FedMask(prune_layers=("2", "0")).division(model(M)).prunable.tolist() == [*range(30), *range(50, MASKED)]
    with pytest.raises(ConfigError, match="masked layers are 0, 1, 2; name some"):
        FedMask(prune_layers=("9",)).division(model(M))


def test_settings_out_of_range_are_refused_by_name() -> None:
    wrong = {"keep": 0.0, "radius": -1, "lr": 0, "down": "float", "epochs": 0, "group_lasso": -1, "codec": "zip"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            make_method({"name": "fedmask", name: value})
    with pytest.raises(ConfigError, match="keeps one bit"):
        make_method({"name": "fedmask", "state": "client", "down": "count"})


def test_where_every_device_has_averages_of_its_own_there_is_no_global_model() -> None:
    there = Rounds(FedMask(state="client", head="masked", epochs=1), M)
    there.play("a", "b")
    with pytest.raises(ConfigError, match="no global model: every device has averages of its own"):
        global_model(there.method, there.course, there.state, 1)


@pytest.mark.parametrize("codec", ["auto", "bits", "rice", "entropy"])
def test_an_update_in_which_half_of_the_bits_change_is_within_the_limit(codec: str) -> None:
    """As after a round from a random mask, or at a high rate."""
    for n in (100, 1000, 3_000_000):
        none = np.zeros(n, np.bool_)
        for drawn in (np.random.default_rng(0).random(n) < 0.5, np.arange(n) // 400 % 2 == 0):
            (sent,) = changes.encode(codec, drawn, none).arrays.values()
            assert sent.nbytes <= changes.limit(n)


def test_a_codec_that_adds_false_positives_is_refused() -> None:
    with pytest.raises(ConfigError, match="false positives"):
        make_method({"name": "fedmask", "codec": "fuse8"})
    assert [FedMask(codec=c).codec for c in codecs.names(exact_only=True)] == codecs.names(exact_only=True)


def lstm() -> Manifest:
    uniform, zero = Init(kind="uniform", scale=0.5), Init(kind="constant", scale=0.0)
    return Manifest(
        name="lstm",
        input=Input(shape=(4, 3)),
        target=Classification(classes=2),
        parameters=(
            Tensor(name="ih", shape=(8, 3), offset=0, init=uniform),
            Tensor(name="hh", shape=(8, 2), offset=24, init=uniform),
            Tensor(name="b", shape=(8,), offset=40, init=zero),
            Tensor(name="out", shape=(2, 2), offset=48, init=uniform),
        ),
        layers=(
            Layer(name="lstm", kind="lstm", weights=("ih", "hh"), biases=("b",), gates=("i", "f", "g", "o")),
            Layer(name="out", kind="linear", weights=("out",)),
        ),
        seed=1,
    )


def test_an_lstm_masks_three_gates_and_sends_the_output_gate_as_floats() -> None:
    division = FedMask(prune_layers=1).division(model(lstm()))
    assert division.masked.size == 3 * (6 + 4) + 4
    assert division.real.gather(np.arange(52)).tolist() == [*range(18, 24), *range(24 + 12, 40)]
    assert [b.shape for b in division.masked.blocks] == [(2, 3)] * 3 + [(2, 2)] * 3 + [(2, 2)]
    assert division.local.gather(np.arange(52)).tolist() == [*range(40, 48)]
    assert FedMask(prune_layers=1).exchanged(course(lstm())) == 34 + 10
    assert FedMask(prune_layers=1).paper_bytes(course(lstm())) == (5 + 40, 5 + 40)


def test_an_lstm_is_pruned_as_one_layer_and_not_gate_by_gate() -> None:
    # 30 masked elements in six matrices; the last layer has 4.
    division = FedMask(prune_layers=2, keep=0.5).division(model(lstm()))
    assert division.kept == (15, 2)
    assert [g.size for g in division.groups] == [30, 4]
    lopsided = np.zeros(34, np.bool_)
    lopsided[[*range(15), 30, 31]] = True
    assert np.array_equal(division.expand(bitset.pack(lopsided)), lopsided)


# --- a trained network


TRAINED = M.model_copy(update={"seed": None})


def test_defaults_for_a_trained_network_are_its_own_and_given_settings_win() -> None:
    drawn, trained = FedMask().chosen(model(M)), FedMask().chosen(model(TRAINED))
    assert drawn == Choice(keep=0.2, head="masked", group_lasso=2e-4, restart="radius", lr=10)
    assert trained == Choice(keep=1, head="masked", group_lasso=0, restart="latent", lr=0.03)
    paper = {f.name: getattr(drawn, f.name) for f in fields(Choice)}
    assert FedMask(**paper).chosen(model(TRAINED)) == drawn
    assert FedMask(**paper).division(model(TRAINED)).kept == FedMask().division(model(M)).kept
    assert FedMask(lr=3).chosen(model(TRAINED)) == replace(trained, lr=3)


def test_an_untrained_head_of_a_trained_network_is_not_masked() -> None:
    m = model(TRAINED)
    parameters = m.parameters.copy()
    parameters[-15:-3] = 0  # 4 x 3 weights before 3 biases
    untrained = Model(TRAINED, parameters, m.buffers)
    assert FedMask().chosen(untrained).head == "local"
    assert FedMask().division(untrained).masked.size == 30 + 20
    assert FedMask(head="masked").division(untrained).masked.size == MASKED


def test_without_pruning_no_structure_is_sent_and_no_epoch_is_trained_for_it() -> None:
    data, method = clusters(TRAINED, 1), FedMask(epochs=1, batch=40)
    trainer = NumpyMlp(TRAINED)
    t = replace(task(TRAINED, data=data), trainer=trainer)
    done = trained(method, t)
    assert trainer.calls == 1
    assert done.update.arrays["structure.bits"].size == 0
    assert method.division(model(TRAINED)).live == MASKED


def test_devices_that_learn_nothing_leave_a_trained_network_as_it_is() -> None:
    still = Steady(TRAINED, np.zeros(TRAINED.d, np.float32))
    fleet = Rounds(FedMask(biases="frozen"), TRAINED, trainer=still)
    for _ in range(3):
        fleet.play(*DEVICES)
    assert np.array_equal(fleet.personal("a").parameters, model(TRAINED).parameters)


# --- the device's half


@pytest.mark.parametrize("wild", [np.nan, np.inf, 1e30])
@pytest.mark.filterwarnings("error")
def test_a_gradient_that_is_not_a_number_or_too_large_is_an_error_though_the_loss_is_finite(wild: float) -> None:
    value = np.zeros(M.d, np.float32)
    value[3] = wild
    broken = replace(task(M), trainer=Steady(M, value))
    with pytest.raises(DivergedError, match="gradient"):
        trained(FedMask(epochs=1), broken)


def test_every_epoch_is_trained_and_pruning_takes_one_more() -> None:
    # 40 samples in batches of 16 are three steps an epoch.
    for layers, epochs in ((2, 1 + 4), (0, 4)):
        engine = NumpyMlp(M)
        trained(FedMask(epochs=4, batch=16, prune_layers=layers), replace(task(M), trainer=engine))
        assert engine.calls == 3 * epochs


@pytest.mark.parametrize("lr", [0.05, 10.0])
def test_the_structure_is_the_largest_change_of_weight_times_score(lr: float) -> None:
    # One batch in the only epoch: s moves by -lr * g * W / 4, so the rank is that of |g| W^2 at any rate.
    # |g| W^2 = 9, 4, 9, 1, 8, 10: the last goes first, then the tie of 9s by index.
    # At the small rate s hardly leaves the radius, and the largest |W s| are those of the largest |W|.
    method = FedMask(keep=0.5, prune_layers=1, group_lasso=0, momentum=0, epochs=1, batch=64, lr=lr)
    t = fixed_task(mlp(3, 2, bias=False), [9, 1, 1, -1, 2, 40], [1, -2, 3, -1, 2, 0.5])
    structure = bitset.unpack(trained(method, t).kept.held.structure, 6)
    assert structure.tolist() == [True, False, True, False, False, True]


def test_the_pruning_epoch_trains_the_real_values_and_statistics_and_leaves_the_scores() -> None:
    """One batch an epoch at a slope of 1: two steps of .25 for the biases, two calls, one step for the scores."""
    mean = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.0))
    m = mlp(3, 2).model_copy(update={"buffers": (mean,)})
    method = FedMask(
        keep=0.5, prune_layers=1, group_lasso=0, momentum=0, epochs=1, batch=64, lr=1, local_lr=0.25, restart="latent"
    )
    done = trained(method, fixed_task(m, np.ones(8)))
    assert done.kept.local.tolist() == [0.5, 0.5]
    assert done.kept.buffers.tolist() == [2, 2]
    slope = 1 / (1 + np.exp(-0.1)) / (1 + np.exp(0.1))
    assert done.kept.scores[:3] == pytest.approx(0.1 - slope, rel=1e-5)


def test_the_pruning_epoch_has_the_group_lasso_too() -> None:
    """One batch, scores all alike: s moves by -lr * (g W + lasso * (3^-1/2 + 2^-1/2)) * slope, the same slope for all.

    The loss is that of every epoch; without the lasso other elements would stay.
    """
    g, w, kept = np.array([1, 1, -1, -2, -2, 4]), np.array([1, -2, 3, -1, 2, 0.5]), []
    for lasso in (0.0, 4.0):
        method = FedMask(keep=0.5, prune_layers=1, group_lasso=lasso, momentum=0, epochs=1, batch=64)
        done = trained(method, fixed_task(mlp(3, 2, bias=False), g, w))
        rank = np.abs(w * (g * w + lasso * (3**-0.5 + 2**-0.5)))
        kept.append(set(np.argsort(-rank)[:3]))
        assert set(np.flatnonzero(bitset.unpack(done.kept.held.structure, 6))) == kept[-1]
    assert kept[0] != kept[1]


def test_a_bit_is_one_exactly_where_its_score_ends_at_zero_or_above() -> None:
    # Psi(.1) is about .2494: with lr 1 a gradient of 1 moves the score from .1 to below 0, one of .1 does not.
    method = FedMask(codec="bits", prune_layers=0, group_lasso=0, momentum=0, lr=1, epochs=1, batch=64)
    done = trained(method, fixed_task(mlp(3, 2, bias=False), [1, 0.1, -1, 1, 0, 1]))
    assert bitset.unpack(done.kept.held.bits, 6).tolist() == [False, True, True, False, True, False]
    assert bitset.unpack(done.update.arrays["changes.bits"], 6).tolist() == [True, False, False, True, False, True]
    assert done.trained.parameters.tolist() == [0, 1, 1, 0, 1, 0]


def test_the_group_lasso_pulls_at_every_score_of_a_live_group() -> None:
    # Two rows and three columns of equal scores: d norm / d sigmoid is 1/sqrt(3) in a row and 1/sqrt(2) in a column.
    slope = 1 / (1 + np.exp(-0.1)) / (1 + np.exp(0.1))
    for lasso in (0.0, 0.01):
        method = FedMask(prune_layers=0, group_lasso=lasso, momentum=0, lr=2, epochs=1, batch=64, restart="latent")
        done = trained(method, fixed_task(mlp(3, 2, bias=False), np.zeros(6)))
        moved = 2 * lasso * (3**-0.5 + 2**-0.5) * slope
        assert done.kept.scores.tolist() == pytest.approx([0.1 - moved] * 6, rel=1e-4)


def test_scores_and_what_is_trained_beside_them_have_the_momentum_they_are_given() -> None:
    # Velocities g, 1.5 g, 1.75 g in three epochs of one batch. Steps this small leave the sigmoid's slope as it is.
    method = FedMask(
        prune_layers=0, group_lasso=0, restart="latent", lr=1e-3, local_lr=0.25, momentum=0.5, epochs=3, batch=64
    )
    done = trained(method, fixed_task(mlp(3, 2), np.ones(8)))
    slope = 1 / (1 + np.exp(-0.1)) / (1 + np.exp(0.1))
    moved = np.float32(0.1) - done.kept.scores
    assert moved.tolist() == pytest.approx([1e-3 * 4.25 * slope] * 6, rel=1e-3)
    assert done.kept.local.tolist() == pytest.approx([1 - 0.25 * 4.25] * 2)


def test_pruned_elements_stay_zero_and_frozen_weights_stay_as_drawn() -> None:
    method = FedMask()
    done = one_round(method)
    division, drawn = method.division(model(M)), model(M).parameters
    mask = division.masked.gather(done.trained.mask)
    assert not mask[~division.expand(done.kept.held.structure)].any()
    assert np.array_equal(division.masked.gather(done.trained.parameters), division.masked.gather(drawn) * mask)


def test_biases_are_trained_and_kept_or_stay_as_drawn() -> None:
    spans = [M.tensors[f"{i}.b"].span for i in range(3)]
    done = one_round(FedMask(biases="local"))
    assert any(done.trained.parameters[s].any() for s in spans)
    assert len(done.kept.local) == 5 + 4 + 3
    frozen = one_round(FedMask(biases="frozen"))
    assert not any(frozen.trained.parameters[s].any() for s in spans)
    assert frozen.kept.local.size == 0


def test_latent_restart_keeps_scores_whose_bit_came_back() -> None:
    own = np.array([0.3, -0.4, 0.05, -0.2, 0.3, 0.3, -0.2], np.float32)
    share, live = np.array([1, 1, 0, 0, 1, 0.5, 0.5], np.float32), np.array([1, 1, 1, 1, 0, 1, 1], np.bool_)
    scores = FedMask(restart="latent", prune_layers=0).scores(share, live, own)
    assert scores.tolist() == pytest.approx([0.3, 0.1, -0.1, -0.2, -np.inf, 0.3, 0])  # a share of a half is a 1


@pytest.mark.parametrize("restart", ["radius", "latent"])
def test_a_device_keeps_its_scores_only_where_it_restarts_from_them(restart: Any) -> None:
    fleet = Rounds(FedMask(restart=restart, epochs=1), M)
    fleet.play("a")
    assert (fleet.kept["a"].scores is not None) is (restart == "latent")


def test_the_pruning_epoch_has_an_order_of_its_own() -> None:
    seen: list[Progress] = []
    trained(FedMask(epochs=2, batch=64), replace(task(M), watch=seen.append))
    assert [p.phase for p in seen] == ["prune", "train", "train"]


def test_the_same_round_is_the_same_bytes() -> None:
    for method in (FedMask(), FedMask(head="local", restart="latent", down="count")):
        one, two = one_round(method), one_round(method)
        assert encode(one.update) == encode(two.update)
        assert encode(Payload(to_arrays(one.kept))) == encode(Payload(to_arrays(two.kept)))


def test_real_gates_move_by_plain_sgd_and_are_sent_and_statistics_stay_on_the_device() -> None:
    mean = Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.0))
    m = lstm().model_copy(update={"buffers": (mean,)})
    method = FedMask(codec="bits", prune_layers=0, local_lr=0.5, momentum=0, epochs=1, batch=64)
    t = fixed_task(m, np.ones(m.d))
    done = trained(method, t)
    assert done.update.arrays["real"].tolist() == [0.5] * 10
    assert set(done.update.arrays) == {"changes.bits", "structure.bits", "real"}
    assert done.kept.buffers.tolist() == [1, 1]
    assert done.trained.buffers.tolist() == [1, 1]
    again = trained(method, t, done.kept)
    assert again.kept.buffers.tolist() == [2, 2]


# --- the server's half


SIX = mlp(3, 2, bias=False)
HALF = FedMask(codec="bits", keep=0.5, prune_layers=1)


def update(structure: list[int], mask: list[int], known: list[int] | None = None, send: bool = True) -> Payload:
    """An update of live bits; `known` are those that the device received, by default ones."""
    packed = bitset.pack(np.array(structure, np.bool_))
    received = np.ones(len(mask), np.bool_) if known is None else np.array(known, np.bool_)
    sent = changes.encode("bits", np.array(mask, np.bool_), received)
    arrays = {"structure.bits": packed} if send else {}
    return Payload({**sent.arrays, **arrays}, {**sent.meta, "structure": bits_digest(packed)})


def shares(server: Rounds, device: str) -> list[float]:
    """The shares of live elements that the device reads, of all elements for a new one; updates are written by hand."""
    record = server.records.get(device)
    if record is None:
        return list(server.receive(device).share.tolist())
    server.kept[device] = Kept(record.held, NONE, NONE)
    live = server.method.division(server.course.model).expand(record.held.structure)
    return list(server.receive(device).share[live].tolist())


def test_only_elements_that_two_structures_hold_are_averaged() -> None:
    # Elements   0 1 2 3 4 5     a holds 0 1 2, b holds 0 1 3, c holds 0 4 5.
    server = Rounds(HALF, SIX)
    server.close(
        {
            "a": update([1, 1, 1, 0, 0, 0], [1, 0, 0]),
            "b": update([1, 1, 0, 1, 0, 0], [0, 0, 0]),
            "c": update([1, 0, 0, 0, 1, 1], [0, 0, 1]),
        }
    )
    # Element 0 is 1 in one of three, element 1 in none of two; the others are as each device has them.
    assert server.state.share.tolist() == pytest.approx([1 / 3, 0, 1, 1, 1, 1])
    assert shares(server, "a") == [0, 0, 0]
    assert shares(server, "b") == [0, 0, 0]
    assert shares(server, "c") == [0, 0, 1]


def test_a_tie_becomes_one() -> None:
    server = Rounds(HALF, SIX)
    server.close({d: update([1, 1, 1, 0, 0, 0], [d == "a", 0, 1]) for d in ("a", "b")})
    assert shares(server, "b") == [1, 0, 1]


def test_an_old_average_does_not_undo_what_a_device_learned_since() -> None:
    server = Rounds(HALF, SIX)
    server.close({d: update([1, 1, 1, 0, 0, 0], [0, 0, 0]) for d in ("a", "b")})
    server.close({"a": update([1, 1, 1, 0, 0, 0], [1, 0, 1], known=[0, 0, 0], send=False)})
    assert shares(server, "a") == [1, 0, 1]
    assert shares(server, "b") == [0, 0, 0]


def test_client_state_shows_a_device_only_the_averages_it_took_part_in() -> None:
    server = Rounds(FedMask(codec="bits", keep=0.5, prune_layers=1, state="client"), SIX)
    server.close({d: update([1, 1, 1, 0, 0, 0], [0, d == "a", 1]) for d in ("a", "b")})
    assert shares(server, "a") == shares(server, "b") == [0, 1, 1]
    later = {"b": update([1, 1, 1, 0, 0, 0], [1, 1, 0], known=[0, 1, 1], send=False)}
    server.close({**later, "c": update([1, 1, 1, 0, 0, 0], [1, 1, 0])})
    assert shares(server, "a") == [0, 1, 1]
    assert shares(server, "b") == [1, 1, 0]
    assert shares(server, "new") == [1] * 6
    assert server.state.share.tolist() == [1] * 6  # what devices hold is in their records alone


def test_client_state_leaves_an_element_that_one_device_holds_as_it_is() -> None:
    server = Rounds(FedMask(codec="bits", keep=0.5, prune_layers=1, state="client"), SIX)
    server.close({"a": update([1, 1, 1, 0, 0, 0], [0, 0, 1]), "b": update([1, 0, 0, 0, 1, 1], [0, 0, 1])})
    assert shares(server, "a") == [0, 0, 1]
    assert shares(server, "b") == [0, 0, 1]


@pytest.mark.parametrize(("cohort", "width"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_counts_travel_in_as_many_bits_as_the_cohort_needs(cohort: int, width: int) -> None:
    server = Rounds(FedMask(codec="bits", keep=0.5, prune_layers=1, down="count"), SIX)
    server.close({f"d{k}": update([1, 1, 1, 0, 0, 0], [k == 0, 1, 0]) for k in range(cohort)})
    payload = server.method.downlink(server.course, 2, server.state, server.records["d0"])
    assert payload.arrays["mask.planes"].shape == (width, 1)
    assert bitset.unpack_planes(payload.arrays["mask.planes"], width, 3).tolist() == [1, cohort, 0]
    assert shares(server, "d0") == pytest.approx([1 / cohort, 1, 0])


def test_a_received_share_becomes_the_score_radius_times_two_p_minus_one() -> None:
    """Nothing is learned, so the scores after the round are those before it."""
    method = FedMask(codec="bits", keep=0.5, prune_layers=1, down="count", radius=0.3, group_lasso=0, restart="latent")
    server = Rounds(method, SIX)
    server.close({f"d{k}": update([1, 1, 1, 0, 0, 0], [k == 0, 1, 0]) for k in range(3)})
    record = server.records["d0"]
    down = method.downlink(server.course, 2, server.state, record)
    done = trained(method, fixed_task(SIX, np.zeros(6)), Kept(record.held, NONE, NONE), down)
    shares = np.array([1 / 3, 1, 0])
    assert done.kept.scores[:3] == pytest.approx(0.3 * (2 * shares - 1), rel=1e-5)
    assert done.kept.scores[3:].tolist() == [-np.inf] * 3


def test_a_score_of_zero_is_a_bit_of_one() -> None:
    """Half of the holders have a 1, and nothing is learned: 1[sigmoid(0) >= 1/2] = 1."""
    server = Rounds(HALF.model_copy(update={"down": "count", "group_lasso": 0.0}), SIX)
    server.close({f"d{k}": update([1, 1, 1, 0, 0, 0], [k == 0, 1, 0]) for k in range(2)})
    record = server.records["d1"]
    down = server.method.downlink(server.course, 2, server.state, record)
    done = trained(server.method, fixed_task(SIX, np.zeros(6)), Kept(record.held, NONE, NONE), down)
    assert bitset.unpack(done.kept.held.bits, 3).tolist() == [True, True, False]


def test_a_newcomer_receives_every_element_once() -> None:
    assert shares(Rounds(HALF, SIX), "new") == [1] * 6


def test_devices_with_equal_records_are_one_audience() -> None:
    server = Rounds(HALF, SIX)
    same = [1, 1, 1, 0, 0, 0]
    server.close({"a": update(same, [1, 0, 1]), "b": update(same, [1, 0, 1]), "c": update(same, [0, 0, 1])})
    a, b, c, new, newer = (HALF.audience(server.course, 2, server.records.get(d)) for d in ("a", "b", "c", "x", "y"))
    assert a == b
    assert new == newer
    assert len({a, c, new}) == 3
    downs = [encode(HALF.downlink(server.course, 2, server.state, server.records[d])) for d in ("a", "b")]
    assert downs[0] == downs[1]


@pytest.mark.parametrize("state", ["global", "client"])
def test_real_gates_are_averaged_and_sent_down_and_a_change_can_be_limited(state: Any) -> None:
    m, method = lstm(), FedMask(codec="bits", prune_layers=0, state=state)
    server = Rounds(method, m)
    updates = {}
    for d, value in (("a", 1), ("b", 4)):
        bits = update([], [1] * 34)
        updates[d] = Payload({**bits.arrays, "real": np.full(10, value, np.float32)}, bits.meta)
    a = Assignment(server.course, 1, "a")
    read = method.read_update(a, server.state, None, updates["a"])
    change = 1 - server.state.real
    found = method.influence(a, server.state, read)
    assert found is not None
    assert found.norm == pytest.approx(float(np.linalg.norm(change)), rel=1e-6)
    half = method.limited(a, server.state, read, 0.5, 1.0)
    assert half.real.tolist() == pytest.approx((server.state.real + change / 2).tolist())
    assert half.held is read.held
    server.close(updates)
    assert server.state.real.tolist() == [2.5] * 10
    down = method.downlink(server.course, 2, server.state, None)
    assert down.arrays["real"].tolist() == [2.5] * 10
    t = fixed_task(m, np.zeros(m.d))
    done = trained(method, t, None, down)
    assert done.update.arrays["real"].tolist() == [2.5] * 10  # where nothing is learned
    personal = method.personal(t, done.kept, method.receive(t.assignment, None, down)).parameters
    for found in (done.trained.parameters, personal):
        assert method.division(server.course.model).real.gather(found).tolist() == [2.5] * 10


def test_a_mask_has_no_influence_that_needs_a_limit() -> None:
    server = Rounds(HALF, SIX)
    read = HALF.read_update(assignment(SIX), server.state, None, update([1, 1, 1, 0, 0, 0], [1, 0, 1]))
    assert HALF.influence(assignment(SIX), server.state, read) is None


def bad(payload: Payload, arrays: Arrays | None = None, **meta: Any) -> Payload:
    return Payload({**payload.arrays, **(arrays or {})}, {**payload.meta, **meta})


GOOD = update([1, 1, 1, 0, 0, 0], [1, 0, 1])
MALFORMED = {
    "an unused bit set": (bad(GOOD, {"changes.bits": np.array([0b1101], np.uint8)}), "unused"),
    "too many bytes": (bad(GOOD, {"changes.bits": np.zeros(2, np.uint8)}), "cannot be decoded"),
    "another dtype": (bad(GOOD, {"changes.bits": np.zeros(1, np.int8)}), "int8"),
    "a greedy structure": (update([1, 1, 1, 1, 0, 0], [1, 0, 1]), r"keeps \[4\] elements; it must keep \[3\]"),
    "a structure of another size": (bad(GOOD, {"structure.bits": np.zeros(2, np.uint8)}), r"uint8\[2\]"),
    "a structure of another dtype": (bad(GOOD, {"structure.bits": np.zeros(1, np.float32)}), "float32"),
    "another structure than it names": (bad(GOOD, structure="0" * 16), "structure"),
    "a structure that is no name": (bad(GOOD, structure=[1, 2]), "structure"),
    "bits the server has not sent": (bad(GOOD, reference="0" * 16), "computed against reference mask '0000"),
    "an array too many": (bad(GOOD, {"extra": np.zeros(1, np.float32)}), "extra"),
    "a real gate too many": (bad(GOOD, {"real": np.zeros(1, np.float32)}), "real"),
    "no mask": (Payload({"structure.bits": GOOD.arrays["structure.bits"]}, GOOD.meta), "changes"),
    "no structure": (Payload({"changes.bits": GOOD.arrays["changes.bits"]}, GOOD.meta), "send `structure.bits`"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_fedmask_refuses(what: str) -> None:
    payload, word = MALFORMED[what]
    with pytest.raises(PayloadError, match=word):
        HALF.read_update(assignment(SIX), HALF.start(course(SIX)), None, payload)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_fedmask_refuses_a_real_gate_that_is_not_a_number(wrong: float) -> None:
    m, method = lstm(), FedMask(epochs=1)
    t = replace(task(m), trainer=Steady(m, np.zeros(m.d, np.float32)))
    a, state = t.assignment, method.start(t.assignment.course)
    sent = trained(method, t).update
    assert method.read_update(a, state, None, sent).real.shape == (10,)
    broken = sent.arrays["real"].copy()
    broken[7] = wrong
    with pytest.raises(PayloadError, match=r"10 finite float32|NaN"):
        method.read_update(a, state, None, bad(sent, {"real": broken}))
    down = method.downlink(a.course, 1, state, None)
    with pytest.raises(PayloadError, match=r"10 finite float32|NaN"):
        method.receive(a, None, bad(down, {"real": broken}))


def test_an_update_for_another_structure_than_the_records_is_refused_with_what_to_do() -> None:
    server = Rounds(HALF, SIX)
    server.close({"a": update([1, 1, 1, 0, 0, 0], [1, 0, 1])})
    with pytest.raises(PayloadError, match="trains again"):
        server.close({"a": update([0, 0, 0, 1, 1, 1], [1, 0, 1], known=[1, 0, 1], send=False)})
    with pytest.raises(PayloadError, match=r"structure\.bits"):
        server.close({"a": update([1, 1, 1, 0, 0, 0], [1, 0, 1], known=[1, 0, 1], send=True)})


@pytest.mark.parametrize(
    ("codec", "arrays", "meta"),
    [
        ("bits", {}, {"levels": 0}),
        ("bits", {}, {"levels": "2"}),
        ("bits", {}, {"levels": 9}),
        ("bits", {}, {"levels": True}),
        ("bits", {"mask.planes": np.zeros((1, 9), np.uint8)}, {}),
        ("bits", {"mask.planes": np.zeros(8, np.float32)}, {}),
    ],
)
def test_malformed_counts_are_refused_by_the_device(codec: str, arrays: Arrays, meta: dict[str, Any]) -> None:
    method = FedMask(codec=codec, down="count")
    with pytest.raises(PayloadError, match=r"fetch it again|it must be|only"):
        method.receive(assignment(M), None, bad(first_downlink(method), arrays, **meta))


def test_a_count_above_the_levels_is_a_share_of_one() -> None:
    """Two levels take two bits, which can hold 3."""
    method = FedMask(codec="bits", down="count")
    planes = bitset.pack_planes(np.full(MASKED, 3, np.uint32), 2)
    down = bad(first_downlink(method), {"mask.planes": planes}, levels=2)
    assert set(method.receive(assignment(M), None, down).share.tolist()) == {1.0}


@pytest.mark.parametrize(
    "arrays",
    [
        {"changes.auto": np.full(9, 255, np.uint8)},
        {"changes.auto": np.zeros(9, np.float32)},
        {"changes.rice": np.zeros(9, np.uint8)},
    ],
)
def test_malformed_changes_are_refused_by_both_sides(arrays: Arrays) -> None:
    method = FedMask(epochs=1)
    with pytest.raises(PayloadError):
        method.receive(assignment(M), None, bad(first_downlink(method), arrays))
    done = one_round(method)
    with pytest.raises(PayloadError):
        method.read_update(assignment(M), method.start(course(M)), None, bad(done.update, arrays))


# --- what both sides hold


def test_changes_are_to_the_first_mask_then_to_the_bits_received_and_to_the_last_update() -> None:
    fleet = Rounds(FedMask(), M)
    down = fleet.ask("a")
    assert codecs.decode("auto", down.arrays["changes.auto"].tobytes(), MASKED).size == 0  # it is the first mask
    fleet.play("a")
    record, sent = fleet.records["a"], fleet.up["a"]
    mask = bitset.unpack(record.held.bits, LIVE)
    assert np.array_equal(mask, ~codecs.decode_mask("auto", sent.arrays["changes.auto"].tobytes(), LIVE))
    assert np.array_equal(record.held.bits, fleet.kept["a"].held.bits)
    down = fleet.ask("a")
    assert down.meta["reference"] == bits_digest(record.held.bits)
    received = mask ^ codecs.decode_mask("auto", down.arrays["changes.auto"].tobytes(), LIVE)
    fleet.play("a")
    assert fleet.up["a"].meta["reference"] == bits_digest(bitset.pack(received))
    assert set(fleet.up["a"].arrays) == {"changes.auto"}


def test_a_structure_is_sent_once_and_then_only_live_bits() -> None:
    fleet = Rounds(FedMask(codec="bits"), M)
    assert fleet.ask("a").meta["structure"] == ""
    fleet.play("a")
    assert set(fleet.up["a"].arrays) == {"changes.bits", "structure.bits"}
    assert "structure.bits" in fleet.method.one_time
    assert fleet.ask("a").arrays["changes.bits"].nbytes == bitset.size(LIVE)
    fleet.play("a")
    assert {k: v.nbytes for k, v in fleet.up["a"].arrays.items()} == {"changes.bits": bitset.size(LIVE)}


def test_an_upload_that_got_lost_heals_in_the_next_round() -> None:
    fleet = Rounds(FedMask(), M)
    fleet.play("a")
    structure = fleet.kept["a"].held.structure
    fleet.records.clear()
    fleet.play("a")
    assert np.array_equal(fleet.up["a"].arrays["structure.bits"], structure)
    assert fleet.took_part == ["a"]


def test_a_device_that_lost_its_storage_sits_one_round_out_and_prunes_again() -> None:
    fleet = Rounds(FedMask(), M)
    fleet.play("a", "b")
    before = fleet.records["a"].held.structure
    del fleet.kept["a"]
    assert not reads(fleet, "a")
    fleet.play("a", "b", lost="a")
    assert fleet.took_part == ["b"]
    fleet.data = {d: clusters(M, 9) for d in "ab"}
    fleet.play("a", "b")
    assert fleet.took_part == ["a", "b"]
    assert "structure.bits" in fleet.up["a"].arrays
    assert not np.array_equal(fleet.records["a"].held.structure, before)


@pytest.mark.parametrize("down", ["bit", "count"])
def test_a_downlink_against_another_update_than_the_devices_last_is_lost(down: str) -> None:
    fleet = Rounds(FedMask.model_validate({"down": down}), M)
    fleet.play("a")
    bits = bitset.unpack(fleet.kept["a"].held.bits, LIVE)
    kept = fleet.kept["a"]
    fleet.kept["a"] = replace(kept, held=replace(kept.held, bits=bitset.pack(~bits)))
    with pytest.raises(LostError, match="reference"):
        fleet.personal("a")
    fleet.play("a", lost="a")
    assert fleet.took_part == []
    fleet.play("a")
    assert fleet.took_part == ["a"]
    assert np.array_equal(fleet.records["a"].held.bits, fleet.kept["a"].held.bits)


def test_a_downlink_for_another_structure_is_lost() -> None:
    fleet = Rounds(FedMask(), M)
    fleet.play("a")
    division, kept = fleet.method.division(model(M)), fleet.kept["a"]
    other = division.choose(-division.expand(kept.held.structure).astype(np.float32))
    fleet.kept["a"] = replace(kept, held=replace(kept.held, structure=other))
    with pytest.raises(LostError, match="structure"):
        fleet.personal("a")


def test_a_device_without_a_record_keeps_its_structure() -> None:
    fleet = Rounds(FedMask(), M)
    fleet.play("a")
    fleet.records.clear()
    division = fleet.method.division(model(M))
    mask = division.masked.gather(fleet.personal("a").mask)
    assert np.array_equal(mask, division.expand(fleet.kept["a"].held.structure))  # all ones arrive, within it


def test_a_personal_model_without_training_is_the_downlink_within_the_structure() -> None:
    fleet = Rounds(FedMask(), M)
    t = fleet.task("a")
    done = trained(fleet.method, t)
    fleet.play("a")
    assert np.array_equal(fleet.personal("a").parameters, done.trained.parameters)  # alone, so nothing was averaged


def arrays_of(value: Any) -> dict[str, Any]:
    return {k: (v.dtype.str, v.shape, v.tobytes()) for k, v in to_arrays(value).items()}


@settings(max_examples=25, deadline=None)
@given(
    codec=st.sampled_from(["auto", "entropy", "rice"]),
    first=st.sampled_from(["ones", "random"]),
    state=st.sampled_from(["global", "client"]),
    down=st.sampled_from(["bit", "count"]),
    restart=st.sampled_from(["radius", "latent"]),
    absent=st.lists(st.sampled_from(["a", "b", "c"]), min_size=4, max_size=4),
    wiped=st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=4, max_size=4),
    dropped=st.lists(st.sampled_from(["a", "b", "c", "", ""]), min_size=4, max_size=4),
)
def test_coded_changes_lead_exactly_where_bits_lead(
    codec: str, first: str, state: str, down: str, restart: str, absent: list[str], wiped: list[str], dropped: list[str]
) -> None:
    down = "bit" if state == "client" else down
    made = {"initial_mask": first, "state": state, "down": down, "restart": restart, "epochs": 1, "lr": 30.0}
    ends: list[Any] = []
    for name in (codec, "bits"):
        fleet, lost = Rounds(FedMask.model_validate({**made, "codec": name}), M), []
        for away, without, forgotten in zip(absent, wiped, dropped, strict=True):
            fleet.kept.pop(without, None)
            fleet.records.pop(forgotten, None)
            present = [d for d in DEVICES if d != away]
            lost.append([d for d in present if not reads(fleet, d)])
            fleet.play(*present, lost=lost[-1])
        models = [arrays_of(fleet.personal(d)) for d in fleet.took_part]
        records = {d: arrays_of(r) for d, r in sorted(fleet.records.items())}
        kept = {d: arrays_of(k) for d, k in sorted(fleet.kept.items())}
        ends.append((arrays_of(fleet.state), records, kept, models, lost))
    assert ends[0] == ends[1]


@settings(max_examples=25, deadline=None)
@given(
    keep=st.floats(0.05, 1),
    head=st.sampled_from(["masked", "local"]),
    down=st.sampled_from(["bit", "count"]),
    restart=st.sampled_from(["radius", "latent"]),
    layers=st.integers(0, 2),
)
def test_two_rounds_of_any_configuration_agree_on_both_sides(
    keep: float, head: str, down: str, restart: str, layers: int
) -> None:
    made = {"keep": keep, "head": head, "down": down, "restart": restart, "prune_layers": layers}
    fleet = Rounds(FedMask.model_validate({**made, "epochs": 1}), M)
    for round_ in (1, 2):
        fleet.play(*DEVICES)
        assert all(("structure.bits" in u.arrays) == (round_ == 1) for u in fleet.up.values())
    division, averaged = fleet.method.division(model(M)), fleet.state.averaged
    for d in DEVICES:
        held = fleet.records[d].held
        assert np.array_equal(held.structure, fleet.kept[d].held.structure)
        live, mask = division.expand(held.structure), division.masked.gather(fleet.personal(d).mask)
        assert not mask[~live].any()
        both = live & (averaged == 2)
        assert np.array_equal(mask[both], fleet.state.share[both] >= 0.5)
        alone = live & (averaged == 0)
        own = np.zeros(division.masked.size, np.bool_)
        own[live] = bitset.unpack(held.bits, division.live)
        assert np.array_equal(mask[alone], own[alone])


def test_a_federation_learns() -> None:
    fleet = Rounds(FedMask(lr=30.0, keep=0.8), M)
    start = [fleet.score(d) for d in DEVICES]
    for _ in range(4):
        fleet.play(*DEVICES)
    end = [fleet.score(d) for d in DEVICES]
    assert np.mean(end) > np.mean(start) + 0.2
    assert isinstance(fleet.records["a"].held, Held)


def test_averages_travel_in_steps_of_the_largest_cohort_so_far() -> None:
    """A later cohort of two averages the elements that it holds; the third of the first one stays a third."""
    server = Rounds(FedMask(codec="bits", keep=0.5, prune_layers=1, down="count"), SIX)
    server.close({f"d{k}": update([1, 1, 1, 0, 0, 0], [k == 0, 1, 0]) for k in range(3)})
    others = {f"e{k}": update([0, 0, 0, 1, 1, 1], [k == 0, 1, 0]) for k in range(2)}
    server.close(others)
    assert server.state.levels == 3
    assert server.state.share.tolist() == pytest.approx([1 / 3, 1, 0, 0.5, 1, 0])
    assert shares(server, "d0") == pytest.approx([1 / 3, 1, 0])
