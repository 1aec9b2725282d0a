"""FedMask, FedAvg and Standalone: both halves against each other, without engine, network or disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import NumpyMlp, assignment, clusters, mlp, model, task

from edge_client.bundle import F32, Init, Input, Layer, Manifest, Model, Tensor
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, DataError, PayloadError
from edge_client.methods import Assignment, Local, Method, Task, bits_digest, make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.fedmask import FedMask
from edge_client.methods.standalone import Standalone
from edge_client.protocol.payload import Arrays, Payload, decode, encode
from edge_client.training import Gradient
from edge_client.training.loop import batches
from edge_client.targets import Classification

M = mlp(6, 5, 4, 3)
MASKED = 6 * 5 + 5 * 4 + 4 * 3
DEVICES = ("a", "b", "c")


def server_round(
    method: Method,
    state: Arrays,
    records: dict[str, Arrays],
    updates: dict[str, Payload],
    round_: int = 1,
    m: Manifest = M,
) -> Arrays:
    total: Arrays = {}
    for device in sorted(updates):
        a = assignment(m, device, round_)
        record = records.get(device, {})
        read = method.read_update(a, state, record, decode(encode(updates[device])))
        total, records[device] = method.fold(a, state, total, read, record)
    return method.finish(model(m), round_, state, total)


def one_round(method: Method, m: Manifest = M, device: str = "a") -> tuple[Payload, Local]:
    """The first round of one device: its downlink and what comes of it."""
    a = assignment(m, device)
    down = method.downlink(a, method.start(a.model, a.seed), {})
    return down, method.local_round(task(m, device), {}, down)


# --- FedAvg


def test_fedavg_is_the_mean_weighted_by_samples() -> None:
    m = mlp(1, 2, bias=False)
    state = FedAvg().start(model(m), 0)
    none = np.zeros(0, np.float32)
    updates = {
        "a": Payload({"parameters": np.array([2.0, 0.0], np.float32), "buffers": none}, {"samples": 1}),
        "b": Payload({"parameters": np.array([6.0, 1.0], np.float32), "buffers": none}, {"samples": 3}),
    }
    assert server_round(FedAvg(), state, {}, updates, m=m)["parameters"].tolist() == [5.0, 0.75]


def test_fedavg_sends_everything_both_ways_in_32_bits() -> None:
    down, local = one_round(FedAvg())
    assert down.arrays["parameters"].nbytes == local.update.arrays["parameters"].nbytes == 4 * M.d
    assert FedAvg().update_limit(model(M)) == sum(a.nbytes for a in local.update.arrays.values())
    assert local.kept == {}


def test_fedavg_learns() -> None:
    down, local = one_round(FedAvg(epochs=30, lr=0.05))
    data, engine = clusters(M, 1), NumpyMlp(M)
    before = (engine.logits(down.arrays["parameters"], np.zeros(0, np.float32), data.x).argmax(1) == data.y).mean()
    after = (engine.logits(local.trained.parameters, np.zeros(0, np.float32), data.x).argmax(1) == data.y).mean()
    assert after > max(before, 0.9)


def _bad(update: Payload, arrays: Arrays | None = None, **meta: Any) -> Payload:
    return Payload({**update.arrays, **(arrays or {})}, {**update.meta, **meta})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"arrays": {"parameters": np.zeros(M.d - 1, np.float32)}}, "parameters"),
        ({"arrays": {"parameters": np.zeros(M.d, np.float64)}}, "float64"),
        ({"arrays": {"parameters": np.full(M.d, np.nan, np.float32)}}, "NaN"),
        ({"arrays": {"extra": np.zeros(1, np.float32)}}, "extra"),
        ({"samples": 0}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 2.5}, "samples"),
        ({"samples": 2**40}, "samples"),
    ],
)
def test_fedavg_refuses_what_it_did_not_ask_for(change: dict[str, Any], word: str) -> None:
    _, local = one_round(FedAvg())
    state = FedAvg().start(model(M), 0)
    with pytest.raises(PayloadError, match=word):
        FedAvg().read_update(assignment(M), state, {}, _bad(local.update, **change))


# --- Standalone


def test_standalone_exchanges_nothing_and_goes_on_from_its_own_model() -> None:
    method = Standalone(epochs=2)
    down, first = one_round(method)
    assert down.arrays == {}
    assert first.update.arrays == {}
    second = method.local_round(task(M, round_=2), first.kept, down)
    assert second.loss < first.loss
    assert np.array_equal(method.personal(task(M), second.kept, down).parameters, second.trained.parameters)
    with pytest.raises(PayloadError, match="standalone"):
        method.read_update(assignment(M), {}, {}, Payload({"x": np.zeros(1, np.uint8)}))


# --- the local loop


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    t = task(M)
    first, second = (np.concatenate(list(batches(t, 7, epoch, "train"))) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first.tolist() != second.tolist()
    assert [len(b) for b in batches(t, 7, 0, "train")] == [7, 7, 7, 7, 7, 5]


def test_a_loss_that_diverges_is_an_error_and_not_an_update() -> None:
    data = clusters(M, 1)
    wild = DeviceData(data.x * np.float32(1e30), data.y, data.x, data.y)
    with np.errstate(all="ignore"), pytest.raises(DataError, match="learning rate"):
        FedAvg().local_round(task(M, data=wild), {}, FedAvg().downlink(assignment(M), FedAvg().start(model(M), 0), {}))


@pytest.mark.parametrize("method", [FedAvg, Standalone])
def test_plain_sgd_has_the_momentum_and_the_epochs_it_is_given(method: type[FedAvg] | type[Standalone]) -> None:
    # Velocities 1, 1.5, 1.75 in three epochs of one batch: lr times 4.25 in all.
    trainer = Fixed(M, np.ones(M.d, np.float32))
    chosen = method(lr=0.25, momentum=0.5, epochs=3, batch=64)
    down = chosen.downlink(assignment(M), chosen.start(model(M), 0), {})
    local = chosen.local_round(replace(task(M), trainer=trainer), {}, down)
    assert np.allclose(local.trained.parameters, model(M).parameters - 0.25 * 4.25, atol=1e-6)


def test_every_epoch_is_trained_and_fedmask_prunes_in_one_more() -> None:
    # 40 samples in batches of 16 are three steps an epoch.
    for method, steps in (
        (FedMask(epochs=4, batch=16), 3 * (1 + 4)),
        (FedMask(epochs=4, batch=16, prune_layers=0), 3 * 4),
        (FedAvg(epochs=4, batch=16), 3 * 4),
        (Standalone(epochs=4, batch=16), 3 * 4),
    ):
        engine = NumpyMlp(M)
        down = method.downlink(assignment(M), method.start(model(M), 0), {})
        method.local_round(replace(task(M), trainer=engine), {}, down)
        assert engine.calls == steps


# --- FedMask: who owns which parameter


def test_the_last_two_masked_layers_are_pruned_to_a_fifth() -> None:
    layout = FedMask().layout(M)
    assert layout.masked == MASKED
    assert layout.prunable.sum() == 20 + 12
    assert layout.kept == (4, 2)
    assert layout.live == 30 + 4 + 2


def test_ranked_together_the_layers_share_one_budget() -> None:
    layout = FedMask(rank="together").layout(M)
    assert layout.kept == (6,)


def test_with_a_local_head_the_layers_before_it_are_masked_and_pruned() -> None:
    layout = FedMask(head="local", keep=0.8).layout(M)
    assert layout.masked == 30 + 20
    assert layout.kept == (24, 16)
    head = np.flatnonzero(np.isin(layout.local, np.arange(M.tensors["2.w"].offset, M.tensors["2.w"].offset + 12)))
    assert len(head) == 12


def test_layers_can_be_named() -> None:
    assert FedMask(prune_layers=("0",)).layout(M).kept == (6,)
    for wrong in (("9",), 4):
        with pytest.raises(ConfigError, match=r"masked layers are \['0', '1', '2'\]"):
            FedMask(prune_layers=wrong).layout(M)


def test_settings_out_of_range_are_refused_by_name() -> None:
    for name, value in {"keep": 0.0, "radius": -1, "lr": 0, "down": "float", "epochs": 0, "group_lasso": -1}.items():
        with pytest.raises(ConfigError, match=name):
            make_method({"name": "fedmask", name: value})
    with pytest.raises(ConfigError, match="keeps one bit"):
        make_method({"name": "fedmask", "state": "client", "down": "count"})


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
    layout = FedMask(prune_layers=1).layout(lstm())
    assert layout.masked == 3 * (6 + 4) + 4
    assert layout.real.tolist() == [*range(18, 24), *range(24 + 12, 40)]
    assert [b.shape for b in layout.blocks] == [(2, 3)] * 3 + [(2, 2)] * 3 + [(2, 2)]
    assert FedMask(prune_layers=1).exchanged(model(lstm())) == 34 + 10


def test_an_lstm_is_pruned_as_one_layer_and_not_gate_by_gate() -> None:
    # 30 masked elements in six matrices; the last layer has 4.
    layout = FedMask(prune_layers=2, keep=0.5).layout(lstm())
    assert layout.kept == (15, 2)
    assert len(layout.ranked[0]) == 6
    lopsided = np.zeros(34, np.bool_)
    lopsided[[*range(15), 30, 31]] = True
    assert layout.counts(lopsided) == (15, 2)


def test_a_layout_is_made_once_for_a_method_and_a_model() -> None:
    layout = FedMask().layout(M)
    assert FedMask(lr=3.0).layout(mlp(6, 5, 4, 3)) is layout
    assert FedMask(keep=0.5).layout(M).kept == (10, 6)
    assert not layout.prunable.flags.writeable


# --- FedMask: the device's half


@dataclass
class Fixed:
    """A trainer whose gradient is always the same vector."""

    manifest: Manifest
    value: F32

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        return Gradient(1.0, self.value, buffers)

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        return np.zeros((len(x), self.manifest.classes), np.float32)


@pytest.mark.parametrize("wild", [np.nan, np.inf, 1e30])
@pytest.mark.filterwarnings("error")
def test_a_gradient_that_is_not_a_number_or_too_large_is_an_error_though_the_loss_is_finite(wild: float) -> None:
    value = np.zeros(M.d, np.float32)
    value[3] = wild
    broken = replace(task(M), trainer=Fixed(M, value))
    method = FedMask(epochs=1)
    with pytest.raises(DataError, match="gradient"):
        method.local_round(broken, {}, method.downlink(assignment(M), method.start(model(M), 0), {}))


def test_the_structure_is_the_largest_change_of_weight_times_score() -> None:
    # One batch in the only epoch: s moves by -lr * g * W / 4, so the rank is that of |g| W^2.
    m = mlp(3, 2, bias=False)
    weights = np.array([1, -2, 3, -1, 2, 0.5], np.float32)
    gradient = np.array([9, 1, 1, -1, 2, 40], np.float32)
    # |g| W^2 = 9, 4, 9, 1, 8, 10: the last goes first, then the tie of 9s by index.
    method = FedMask(keep=0.5, prune_layers=1, group_lasso=0, momentum=0, epochs=1, batch=64)
    a = Assignment(Model(m, weights, np.zeros(0, np.float32)), seed=0, rounds=1, round=1, device="a")
    t = Task(a, Fixed(m, gradient), clusters(m, 1))
    down = method.downlink(a, method.start(a.model, 0), {})
    structure = bitset.unpack(method.local_round(t, {}, down).kept["structure"], 6)
    assert structure.tolist() == [True, False, True, False, False, True]


def test_a_bit_is_one_exactly_where_its_score_ends_at_zero_or_above() -> None:
    m = mlp(3, 2, bias=False)
    weights = np.ones(6, np.float32)
    # Psi(.1) is about .2494: with lr 1 a gradient of 1 moves the score from .1 to below 0, one of .1 does not.
    gradient = np.array([1, 0.1, -1, 1, 0, 1], np.float32)
    method = FedMask(codec="bits", prune_layers=0, group_lasso=0, momentum=0, lr=1, epochs=1, batch=64)
    a = Assignment(Model(m, weights, np.zeros(0, np.float32)), seed=0, rounds=1, round=1, device="a")
    down = method.downlink(a, method.start(a.model, 0), {})
    local = method.local_round(Task(a, Fixed(m, gradient), clusters(m, 1)), {}, down)
    assert bitset.unpack(local.update.arrays["mask.bits"], 6).tolist() == [False, True, True, False, True, False]
    assert local.trained.parameters.tolist() == [0, 1, 1, 0, 1, 0]


def test_the_group_lasso_pulls_at_every_score_of_a_live_group() -> None:
    # Two rows and three columns of equal scores: d norm / d sigmoid is 1/sqrt(3) in a row and 1/sqrt(2) in a column.
    m = mlp(3, 2, bias=False)
    a = Assignment(Model(m, np.ones(6, np.float32), np.zeros(0, np.float32)), seed=0, rounds=1, round=1, device="a")
    slope = 1 / (1 + np.exp(-0.1)) / (1 + np.exp(0.1))
    for lasso in (0.0, 0.01):
        method = FedMask(prune_layers=0, group_lasso=lasso, momentum=0, lr=2, epochs=1, batch=64, restart="latent")
        down = method.downlink(a, method.start(a.model, 0), {})
        local = method.local_round(Task(a, Fixed(m, np.zeros(6, np.float32)), clusters(m, 1)), {}, down)
        moved = 2 * lasso * (3**-0.5 + 2**-0.5) * slope
        assert local.kept["scores"].tolist() == pytest.approx([0.1 - moved] * 6, rel=1e-4)


def test_scores_and_what_is_trained_beside_them_have_the_momentum_they_are_given() -> None:
    # Velocities g, 1.5 g, 1.75 g in three epochs of one batch. Steps this small leave the sigmoid's slope as it is.
    m = mlp(3, 2)
    a = Assignment(Model(m, np.ones(8, np.float32), np.zeros(0, np.float32)), seed=0, rounds=1, round=1, device="a")
    method = FedMask(
        prune_layers=0, group_lasso=0, restart="latent", lr=1e-3, local_lr=0.25, momentum=0.5, epochs=3, batch=64
    )
    down = method.downlink(a, method.start(a.model, 0), {})
    local = method.local_round(Task(a, Fixed(m, np.ones(8, np.float32)), clusters(m, 1)), {}, down)
    slope = 1 / (1 + np.exp(-0.1)) / (1 + np.exp(0.1))
    moved = np.float32(0.1) - local.kept["scores"]
    assert moved.tolist() == pytest.approx([1e-3 * 4.25 * slope] * 6, rel=1e-3)
    assert local.kept["local"].tolist() == pytest.approx([1 - 0.25 * 4.25] * 2)


def test_pruned_elements_stay_zero_and_frozen_weights_stay_as_drawn() -> None:
    method = FedMask()
    _, local = one_round(method)
    layout, drawn = method.layout(M), model(M).parameters
    live = layout.expand(bitset.unpack(local.kept["structure"], 32))
    mask = local.trained.mask
    assert mask is not None
    for b in layout.blocks:
        assert not mask[b.span][~live[b.at]].any()
        assert np.array_equal(local.trained.parameters[b.span], drawn[b.span] * mask[b.span])


def test_biases_are_trained_and_kept_or_stay_as_drawn() -> None:
    spans = [M.tensors[f"{i}.b"].span for i in range(3)]
    _, local = one_round(FedMask(biases="local"))
    assert any(local.trained.parameters[s].any() for s in spans)
    assert len(local.kept["local"]) == 5 + 4 + 3
    _, frozen = one_round(FedMask(biases="frozen"))
    assert not any(frozen.trained.parameters[s].any() for s in spans)
    assert frozen.kept["local"].size == 0


def test_a_structure_is_sent_once_and_then_only_live_bits() -> None:
    method = FedMask(codec="bits")
    down, local = one_round(method)
    assert down.meta["structure"] == ""
    assert set(local.update.arrays) == {"mask.bits", "structure.bits"}
    assert "structure.bits" in method.one_time
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(M), 3), records, {"a": local.update})
    down = method.downlink(assignment(M, round_=2), state, records["a"])
    assert down.arrays["mask.planes"].nbytes == bitset.size(36)
    again = method.local_round(task(M, round_=2), local.kept, down)
    assert set(again.update.arrays) == {"mask.bits"}
    assert again.update.arrays["mask.bits"].nbytes == bitset.size(36)


def test_an_upload_that_got_lost_heals_in_the_next_round() -> None:
    method = FedMask()
    _, lost = one_round(method)
    down = method.downlink(assignment(M, round_=2), method.start(model(M), 3), {})
    again = method.local_round(task(M, round_=2), lost.kept, down)
    assert np.array_equal(again.update.arrays["structure.bits"], lost.kept["structure"])
    server_round(method, method.start(model(M), 3), {}, {"a": again.update}, 2)


def test_a_device_that_lost_its_storage_prunes_again_and_says_so() -> None:
    method = FedMask()
    _, local = one_round(method)
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(M), 3), records, {"a": local.update})
    down = method.downlink(assignment(M, round_=4), state, records["a"])
    fresh = method.local_round(task(M, round_=4, data=clusters(M, 9)), {}, down)
    assert "structure.bits" in fresh.update.arrays
    assert not np.array_equal(fresh.kept["structure"], local.kept["structure"])
    server_round(method, state, records, {"a": fresh.update}, 4)
    assert np.array_equal(records["a"]["structure"], fresh.kept["structure"])


def test_a_personal_model_without_training_is_the_downlink_within_the_structure() -> None:
    method = FedMask()
    _, local = one_round(method)
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(M), 3), records, {"a": local.update})
    personal = method.personal(task(M), local.kept, method.downlink(assignment(M, round_=6), state, records["a"]))
    assert np.array_equal(personal.parameters, local.trained.parameters)  # alone in its round: nothing was averaged


def test_latent_restart_keeps_scores_whose_bit_came_back() -> None:
    method = FedMask(restart="latent", prune_layers=0)
    own = np.array([0.3, -0.4, 0.05, -0.2], np.float32)
    share = np.array([1, 1, 0, 0], np.float32)
    scores = method._scores({"scores": own}, share, np.ones(4, np.bool_))
    assert scores.tolist() == pytest.approx([0.3, 0.1, -0.1, -0.2])


def test_the_same_round_is_the_same_bytes() -> None:
    for method in (FedMask(), FedMask(head="local", restart="latent", down="count"), FedAvg(), Standalone()):
        (_, one), (_, two) = one_round(method), one_round(method)
        assert encode(one.update) == encode(two.update)
        assert encode(Payload(one.kept)) == encode(Payload(two.kept))


def test_real_gates_move_by_plain_sgd_and_are_sent_and_statistics_stay_on_the_device() -> None:
    m = lstm().model_copy(
        update={"buffers": (Tensor(name="mean", shape=(2,), offset=0, init=Init(kind="constant", scale=0.0)),)}
    )
    method = FedMask(codec="bits", prune_layers=0, local_lr=0.5, momentum=0, epochs=1, batch=64)
    a = assignment(m)

    @dataclass
    class WithStatistics(Fixed):
        def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
            return Gradient(1.0, self.value, buffers + np.float32(1))

    trainer = WithStatistics(m, np.ones(m.d, np.float32))
    down = method.downlink(a, method.start(a.model, 0), {})
    local = method.local_round(Task(a, trainer, clusters(m, 1)), {}, down)
    layout = method.layout(m)
    assert np.allclose(local.update.arrays["real"], a.model.parameters[layout.real] - 0.5)
    assert set(local.update.arrays) == {"mask.bits", "structure.bits", "real"}
    assert local.kept["buffers"].tolist() == [1, 1]
    assert local.trained.buffers.tolist() == [1, 1]
    again = method.local_round(Task(a, trainer, clusters(m, 1)), local.kept, down)
    assert again.kept["buffers"].tolist() == [2, 2]


# --- FedMask: the server's half


def update(method: FedMask, structure: list[int], mask: list[int]) -> Payload:
    packed = bitset.pack(np.array(structure))
    arrays = {"mask.bits": bitset.pack(np.array(mask)), "structure.bits": packed}
    return Payload(arrays, {"structure": bits_digest(packed)})


SIX = mlp(3, 2, bias=False)
HALF = FedMask(codec="bits", keep=0.5, prune_layers=1)


def bits_down(method: FedMask, state: Arrays, record: Arrays, device: str, count: int) -> list[int]:
    payload = method.downlink(assignment(SIX, device, 2), state, record)
    return bitset.unpack(payload.arrays["mask.planes"][0], count).astype(int).tolist()


def test_only_elements_that_two_structures_hold_are_averaged() -> None:
    # Elements   0 1 2 3 4 5     a holds 0 1 2, b holds 0 1 3, c holds 0 4 5.
    updates = {
        "a": update(HALF, [1, 1, 1, 0, 0, 0], [1, 0, 0]),
        "b": update(HALF, [1, 1, 0, 1, 0, 0], [0, 0, 0]),
        "c": update(HALF, [1, 0, 0, 0, 1, 1], [0, 0, 1]),
    }
    records: dict[str, Arrays] = {}
    state = server_round(HALF, HALF.start(model(SIX), 0), records, updates, m=SIX)
    # Element 0 is 1 in one of three, element 1 in none of two; the others are as each device has them.
    assert state["share"].tolist() == pytest.approx([1 / 3, 0, 1, 1, 1, 1])
    assert bits_down(HALF, state, records["a"], "a", 3) == [0, 0, 0]
    assert bits_down(HALF, state, records["b"], "b", 3) == [0, 0, 0]
    assert bits_down(HALF, state, records["c"], "c", 3) == [0, 0, 1]


def test_a_tie_becomes_one() -> None:
    updates = {d: update(HALF, [1, 1, 1, 0, 0, 0], [d == "a", 0, 1]) for d in ("a", "b")}
    records: dict[str, Arrays] = {}
    state = server_round(HALF, HALF.start(model(SIX), 0), records, updates, m=SIX)
    assert bits_down(HALF, state, records["b"], "b", 3) == [1, 0, 1]


def test_an_old_average_does_not_undo_what_a_device_learned_since() -> None:
    records: dict[str, Arrays] = {}
    first = {d: update(HALF, [1, 1, 1, 0, 0, 0], [0, 0, 0]) for d in ("a", "b")}
    state = server_round(HALF, HALF.start(model(SIX), 0), records, first, 1, m=SIX)
    state = server_round(HALF, state, records, {"a": update(HALF, [1, 1, 1, 0, 0, 0], [1, 0, 1])}, 2, m=SIX)
    assert bits_down(HALF, state, records["a"], "a", 3) == [1, 0, 1]
    assert bits_down(HALF, state, records["b"], "b", 3) == [0, 0, 0]


def test_client_state_shows_a_device_only_the_averages_it_took_part_in() -> None:
    method = FedMask(codec="bits", keep=0.5, prune_layers=1, state="client")
    records: dict[str, Arrays] = {}
    both = {d: update(method, [1, 1, 1, 0, 0, 0], [0, d == "a", 1]) for d in ("a", "b")}
    state = server_round(method, method.start(model(SIX), 0), records, both, 1, m=SIX)
    later = {d: update(method, [1, 1, 1, 0, 0, 0], [1, 1, 0]) for d in ("b", "c")}
    state = server_round(method, state, records, later, 2, m=SIX)
    assert bits_down(method, state, records["a"], "a", 3) == [0, 1, 1]
    assert bits_down(method, state, records["b"], "b", 3) == [1, 1, 0]


@pytest.mark.parametrize(("cohort", "width"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_counts_travel_in_as_many_bits_as_the_cohort_needs(cohort: int, width: int) -> None:
    method = FedMask(codec="bits", keep=0.5, prune_layers=1, down="count")
    devices = [f"d{k}" for k in range(cohort)]
    updates = {d: update(method, [1, 1, 1, 0, 0, 0], [k == 0, 1, 0]) for k, d in enumerate(devices)}
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(SIX), 0), records, updates, m=SIX)
    payload = method.downlink(assignment(SIX, "d0", 2), state, records["d0"])
    assert payload.arrays["mask.planes"].shape == (width, 1)
    assert bitset.unpack_planes(payload.arrays["mask.planes"], width, 3).tolist() == [1, cohort, 0]


def test_a_newcomer_receives_every_element_once() -> None:
    state = HALF.start(model(SIX), 0)
    assert bits_down(HALF, state, {}, "new", 6) == [1] * 6


def test_real_gates_are_averaged_and_sent_down() -> None:
    m, method = lstm(), FedMask(codec="bits", prune_layers=0)
    state = method.start(model(m), 0)
    empty = bitset.pack(np.zeros(0, np.bool_))
    updates = {
        d: Payload(
            {
                "mask.bits": bitset.pack(np.ones(34, np.bool_)),
                "structure.bits": empty,
                "real": np.full(10, value, np.float32),
            },
            {"structure": bits_digest(empty)},
        )
        for d, value in (("a", 1), ("b", 4))
    }
    state = server_round(method, state, {}, updates, m=m)
    assert state["real"].tolist() == [2.5] * 10
    assert method.downlink(assignment(m), state, {}).arrays["real"].tolist() == [2.5] * 10


def _malformed() -> list[tuple[str, Payload, str]]:
    good = update(HALF, [1, 1, 1, 0, 0, 0], [1, 0, 1])
    return [
        ("an unused bit set", _bad(good, {"mask.bits": np.array([0b1101], np.uint8)}), "unused"),
        ("too many bytes", _bad(good, {"mask.bits": np.zeros(2, np.uint8)}), r"uint8\[2\]"),
        ("another dtype", _bad(good, {"mask.bits": np.zeros(1, np.int8)}), "int8"),
        ("a greedy structure", update(HALF, [1, 1, 1, 1, 0, 0], [1, 0, 1]), "keep = 0.5 and rank = 'layer'"),
        ("another structure than it names", _bad(good, structure="0" * 16), "structure"),
        ("an array too many", _bad(good, {"real": np.zeros(1, np.float32)}), "real"),
        ("no mask", Payload({"structure.bits": good.arrays["structure.bits"]}, good.meta), "mask"),
        ("no structure", Payload({"mask.bits": good.arrays["mask.bits"]}, good.meta), "send `structure.bits`"),
    ]


@pytest.mark.parametrize(("what", "payload", "word"), _malformed(), ids=[m[0] for m in _malformed()])
def test_fedmask_refuses(what: str, payload: Payload, word: str) -> None:
    with pytest.raises(PayloadError, match=word):
        HALF.read_update(assignment(SIX), HALF.start(model(SIX), 0), {}, payload)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fedmask_refuses_a_real_gate_that_is_not_a_number(bad: float) -> None:
    m, method = lstm(), FedMask(epochs=1)
    a = assignment(m)
    state = method.start(a.model, 0)
    trainer = Fixed(m, np.zeros(m.d, np.float32))
    sent = method.local_round(Task(a, trainer, clusters(m, 1)), {}, method.downlink(a, state, {})).update
    assert method.read_update(a, state, {}, sent)["real"].shape == (10,)
    broken = sent.arrays["real"].copy()
    broken[7] = bad
    with pytest.raises(PayloadError, match="10 finite float32"):
        method.read_update(a, state, {}, _bad(sent, {"real": broken}))


def test_an_update_for_a_forgotten_structure_is_refused_with_what_to_do() -> None:
    records: dict[str, Arrays] = {}
    state = server_round(
        HALF, HALF.start(model(SIX), 0), records, {"a": update(HALF, [1, 1, 1, 0, 0, 0], [1, 0, 1])}, m=SIX
    )
    other = update(HALF, [0, 0, 0, 1, 1, 1], [1, 0, 1])
    with pytest.raises(PayloadError, match="send the structure again"):
        HALF.read_update(
            assignment(SIX), state, records["a"], Payload({"mask.bits": other.arrays["mask.bits"]}, other.meta)
        )


@pytest.mark.parametrize("broken", [{"levels": 0}, {"levels": "2"}, {"levels": 9}])
def test_a_malformed_downlink_is_refused_by_the_device(broken: dict[str, Any]) -> None:
    method = FedMask(codec="bits")
    down, _ = one_round(method)
    with pytest.raises(PayloadError, match="fetch it again"):
        method.local_round(task(M), {}, replace(down, meta={**down.meta, **broken}))


# --- FedMask: changes instead of bits


def test_changes_are_to_the_bits_received_and_to_the_last_update_and_the_first_mask() -> None:
    method = FedMask()
    down, local = one_round(method)
    everything = method.layout(M).masked
    assert codecs.decode("auto", down.arrays["flips.auto"].tobytes(), everything).size == 0  # it is the first mask
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(M), 3), records, {"a": local.update})
    mask = bitset.unpack(records["a"]["bits"], 36)
    flips = codecs.decode_mask("auto", local.update.arrays["flips.auto"].tobytes(), 36)
    assert np.array_equal(mask, ~flips)
    assert np.array_equal(records["a"]["bits"], local.kept["bits"])
    down = method.downlink(assignment(M, round_=2), state, records["a"])
    assert down.meta["reference"] == bits_digest(local.kept["bits"])
    again = method.local_round(task(M, round_=2), local.kept, down)
    received = mask ^ codecs.decode_mask("auto", down.arrays["flips.auto"].tobytes(), 36)
    assert again.update.meta["reference"] == bits_digest(bitset.pack(received))
    assert set(again.update.arrays) == {"flips.auto"}
    read = method.read_update(assignment(M, round_=2), state, records["a"], again.update)
    assert np.array_equal(read["bits"], again.kept["bits"])


def test_a_downlink_against_another_update_than_the_devices_last_is_passed_over() -> None:
    method = FedMask(epochs=1)
    _, local = one_round(method)
    records: dict[str, Arrays] = {}
    state = server_round(method, method.start(model(M), 3), records, {"a": local.update})
    down = method.downlink(assignment(M, round_=2), state, records["a"])
    later = {**local.kept, "bits": bitset.pack(~bitset.unpack(local.kept["bits"], 36))}
    personal = method.personal(task(M, round_=2), later, down)
    layout = method.layout(M)
    own = layout.expand(bitset.unpack(later["structure"], layout.thinned))
    own[own] = bitset.unpack(later["bits"], 36)
    assert personal.mask is not None
    assert all(np.array_equal(personal.mask[b.span], own[b.at]) for b in layout.blocks)
    again = method.local_round(task(M, round_=2), later, down)
    assert again.update.meta["reference"] == bits_digest(bitset.pack(np.ones(36, np.bool_)))  # the first mask
    read = method.read_update(assignment(M, round_=2), state, records["a"], again.update)
    assert np.array_equal(read["bits"], again.kept["bits"])


@pytest.mark.parametrize(
    ("arrays", "meta", "word"),
    [
        ({}, {"reference": "0" * 16}, "which the server has not sent"),
        ({"flips.auto": np.full(9, 255, np.uint8)}, {}, "the changes of device 'a' in round 1"),
        ({"flips.auto": np.zeros(9, np.float32)}, {}, r"float32\[9\]"),
        ({"mask.bits": np.zeros(5, np.uint8)}, {}, "FedMask sends"),
    ],
)
def test_changes_that_cannot_be_read_are_refused(arrays: Arrays, meta: dict[str, Any], word: str) -> None:
    method = FedMask(epochs=1)
    _, local = one_round(method)
    with pytest.raises(PayloadError, match=word):
        method.read_update(assignment(M), method.start(model(M), 3), {}, _bad(local.update, arrays, **meta))


@settings(max_examples=20, deadline=None)
@given(
    codec=st.sampled_from(["auto", "entropy", "rice"]),
    first=st.sampled_from(["ones", "random"]),
    state=st.sampled_from(["global", "client"]),
    down=st.sampled_from(["bit", "count"]),
    restart=st.sampled_from(["radius", "latent"]),
    absent=st.lists(st.sampled_from(["a", "b", "c"]), min_size=3, max_size=3),
    wiped=st.integers(0, 3),
)
def test_coded_changes_lead_exactly_where_bits_lead(
    codec: str, first: str, state: str, down: str, restart: str, absent: list[str], wiped: int
) -> None:
    if state == "client":
        down = "bit"
    made = {"initial_mask": first, "state": state, "down": down, "restart": restart, "epochs": 1, "lr": 30.0}
    ends = []
    for method in (FedMask.model_validate({**made, "codec": codec}), FedMask.model_validate({**made, "codec": "bits"})):
        records: dict[str, Arrays] = {}
        kept: dict[str, Arrays] = {}
        value = method.start(model(M), 3)
        for round_, away in enumerate(absent, 1):
            updates = {}
            for i, d in enumerate(x for x in "abc" if x != away):
                if round_ == wiped and i == 0:
                    kept.pop(d, None)
                t = task(M, d, round_, clusters(M, ord(d)))
                local = method.local_round(t, kept.get(d, {}), method.downlink(t.assignment, value, records.get(d, {})))
                kept[d], updates[d] = local.kept, local.update
            value = server_round(method, value, records, updates, round_)
        ends.append((value, records, kept))
    for ours, theirs in zip(*ends, strict=True):
        assert repr(ours) == repr(theirs)


@settings(max_examples=25, deadline=None)
@given(
    keep=st.floats(0.05, 1),
    rank=st.sampled_from(["layer", "together"]),
    head=st.sampled_from(["masked", "local"]),
    down=st.sampled_from(["bit", "count"]),
    restart=st.sampled_from(["radius", "latent"]),
    layers=st.integers(0, 2),
)
def test_two_rounds_of_any_configuration_agree_on_both_sides(
    keep: float, rank: str, head: str, down: str, restart: str, layers: int
) -> None:
    method = FedMask.model_validate(
        {
            "keep": keep,
            "rank": rank,
            "head": head,
            "down": down,
            "restart": restart,
            "prune_layers": layers,
            "epochs": 1,
        }
    )
    state, records, kept = method.start(model(M), 3), dict[str, Arrays](), dict[str, Arrays]()
    for round_ in (1, 2):
        updates = {}
        for i, d in enumerate(DEVICES):
            payload = decode(encode(method.downlink(assignment(M, d, round_), state, records.get(d, {}))))
            local = method.local_round(task(M, d, round_, clusters(M, i)), kept.get(d, {}), payload)
            kept[d], updates[d] = local.kept, local.update
            assert sum(a.nbytes for a in local.update.arrays.values()) <= method.update_limit(model(M))
            assert ("structure.bits" in local.update.arrays) == (round_ == 1)
        state = server_round(method, state, records, updates, round_)
    for d in DEVICES:
        assert np.array_equal(records[d]["structure"], kept[d]["structure"])
        layout = method.layout(M)
        live = layout.expand(bitset.unpack(records[d]["structure"], int(layout.prunable.sum())))
        personal = method.personal(task(M, d, 3), kept[d], method.downlink(assignment(M, d, 3), state, records[d]))
        assert personal.mask is not None
        for b in layout.blocks:
            assert not personal.mask[b.span][~live[b.at]].any()
            three = live[b.at] & (state["averaged"][b.at] == 2)
            assert np.array_equal(personal.mask[b.span][three], state["share"][b.at][three] >= 0.5)
