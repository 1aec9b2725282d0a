"""Sparse ternary compression: conservation on both sides, exact models after any missed rounds, hostile payloads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edge_kernels.codecs import sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_mlp import CountingSamples, clusters, counted, course, mlp, model
from rounds import M, Rounds, size

from edge_client.bundle import Init, Tensor
from edge_client.errors import LostError, PayloadError
from edge_client.methods.shared.averaging import Weights
from edge_client.methods.stc import MODEL, STC, UPDATE, UPDATES, checksum, contexts, read_whole, whole
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment


def reference(values: np.ndarray, share: float) -> np.ndarray:
    """STC_p by the paper's Algorithm 1."""
    k = max(round(share * values.size), 1)
    out = np.zeros_like(values)
    top = np.argsort(-np.abs(values), kind="stable")[:k]
    out[top] = np.sign(values[top]) * np.abs(values[top]).mean()
    return out


def test_a_round_is_the_papers_algorithm() -> None:
    counts = {"a": 30, "b": 90}
    fleet = Rounds(STC(keep=0.1, epochs=1), data={d: clusters(M, ord(d), n) for d, n in counts.items()})
    w, server = fleet.course.model.parameters.copy(), np.zeros(M.d)
    residual = {d: np.zeros(M.d) for d in "ab"}
    for _ in range(3):
        fleet.play("a", "b")
        sent = []
        for d in "ab":
            due = residual[d] + fleet.local[d].trained.parameters - w
            sent.append(reference(due, 0.1))
            residual[d] = due - sent[-1]
            assert np.abs(fleet.kept[d].residual - residual[d]).max() < 1e-5
        due = server + np.average(sent, axis=0, weights=list(counts.values()))  # weighted, where the paper's is plain
        step = reference(due, 0.1)
        server, w = due - step, w + step
        assert np.abs(fleet.state.model.parameters - w).max() < 1e-5
        assert np.abs(fleet.state.residual - server).max() < 1e-5


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=6), st.integers(0, 4), st.booleans())
def test_every_device_holds_the_servers_model_after_any_pattern_of_missed_rounds(
    rounds: list[set[str]], history: int, per_tensor: bool
) -> None:
    fleet = Rounds(STC(keep=0.05, history=history, per_tensor=per_tensor, epochs=1))
    for devices in rounds:
        fleet.play(*sorted(devices))
        for d in "abcd":
            found = fleet.receive(d)
            assert found.model.parameters.tobytes() == fleet.state.model.parameters.tobytes()
            assert found.version == fleet.state.version


def test_a_late_device_receives_the_missed_updates_or_the_whole_model_if_that_is_smaller() -> None:
    fleet = Rounds(STC(keep=0.02, history=3, epochs=1))
    assert size(fleet.ask("a")) == 0  # the bundle's weights
    fleet.play("a", "b")
    for _ in range(3):
        fleet.play("b")
    assert set(fleet.ask("b").arrays) == {UPDATES}
    assert size(fleet.ask("b")) < size(fleet.ask("a"))
    assert set(fleet.ask("a").arrays) == {MODEL}  # four updates, three are kept
    assert set(Rounds(STC(history=0)).ask("a").arrays) == set()


def test_what_changed_before_makes_later_updates_cheaper() -> None:
    m = mlp(30, 60, 40, 3)
    w0 = model(m).parameters
    moved = w0.copy()
    moved[::20] += np.float32(0.1)
    change = np.zeros(m.d, np.float32)
    change[::40] = 1
    t = sparse.ternary(change, 0.025, (m.d,))
    method, none = STC(keep=0.025), np.zeros(0, np.float32)
    sizes = [len(method.write(model(m), Weights(w, none), t, none)) for w in (moved, w0)]
    assert sizes[0] < 0.55 * sizes[1]


def test_contexts_are_the_tensor_and_the_distance_in_powers_of_two() -> None:
    m = mlp(2, 2)
    w0 = model(m)
    w = w0.parameters.copy()
    w0 = replace(w0, parameters=np.zeros_like(w))
    w[:] = 0, 1, -0.5, 0.001, 0.26, 0
    where, leaning = contexts(w0, w)
    assert where.tolist() == [0, 7, 6, 1, 8 + 5, 8]
    assert leaning.tolist() == [0, 1, 2, 1, 1, 0]


def test_statistics_travel_as_halves_and_both_sides_hold_the_same() -> None:
    m = M.model_copy(
        update={"buffers": (Tensor(name="mean", shape=(4,), offset=0, init=Init(kind="constant", scale=1)),)}
    )
    fleet = Rounds(STC(keep=0.1), m)
    held = Weights(fleet.course.model.parameters, fleet.course.model.buffers)
    wanted = np.array([0.1, -2, 1e9, 0], np.float32)
    t = sparse.ternary(held.parameters, 0.1, (m.d,))
    after = fleet.method.after(fleet.course.model, held, fleet.method.write(fleet.course.model, held, t, wanted))
    assert after.buffers - held.buffers == pytest.approx([0.1, -2, 65504, 0], rel=1e-3)
    back = read_whole(fleet.course.model, whole(fleet.course.model, after))
    assert checksum(back) == checksum(after)


@given(st.floats(2**-10, 1e4, width=32), st.floats(0, 1, width=32))
def test_no_variance_becomes_negative_by_rounding(held: float, share: float) -> None:
    """That of a channel which died: -1.3004 is nearest to -1.3008 in float16, and the root of -0.0004 is NaN."""
    m = mlp(2, 2).model_copy(
        update={"buffers": (Tensor(name="var", shape=(3,), offset=0, init=Init(kind="constant", scale=1)),)}
    )
    there = Rounds(STC(), m)
    before = Weights(there.course.model.parameters, np.array([held, held, 1.3004], np.float32))
    now = np.array([held * share, held * 1e-6 * share, 1e-9], np.float32)
    still = sparse.ternary(np.zeros(m.d, np.float32), 0.1, (m.d,))
    data = there.method.write(there.course.model, before, still, now - before.buffers)
    after = there.method.after(there.course.model, before, data).buffers
    assert (after >= 0).all()
    assert np.abs(after - now)[:2].max() <= 0.001 * held
    assert after[2] == pytest.approx(1.3004 - 1.2998, abs=1e-4)


def test_the_statistics_of_the_devices_training_reach_the_server() -> None:
    m = counted(M)
    data = {d: clusters(m, ord(d), n) for d, n in (("a", 30), ("b", 60))}
    fleet = Rounds(STC(epochs=1), m, data=data, trainer=CountingSamples(m))
    for due in (50, 100):  # the mean of 30 and 60 by samples is 50
        fleet.play("a", "b")
        assert fleet.state.model.buffers.tolist() == [due, due]


def test_stc_learns() -> None:
    fleet = Rounds(STC(keep=0.04, epochs=3, lr=0.05))
    for _ in range(8):
        fleet.play("a", "b", "c")
    assert fleet.score("a", "b", "c") > 0.9
    assert size(fleet.local["a"].update) < 0.03 * 4 * M.d


def test_a_device_that_lost_its_model_says_so_and_recovers() -> None:
    fleet = Rounds(STC(epochs=1))
    for _ in range(3):
        fleet.play("a", "b")
    del fleet.kept["a"]
    with pytest.raises(LostError, match="does not hold"):
        fleet.receive("a")
    fleet.kept["b"] = replace(
        fleet.kept["b"], model=Weights(fleet.kept["b"].model.parameters + 1, np.zeros(0, np.float32))
    )
    with pytest.raises(LostError, match="does not fit"):
        fleet.receive("b")
    fleet.records.clear()
    fleet.kept.clear()
    assert fleet.receive("a").version == 3


def test_a_device_that_holds_another_model_recovers_with_the_updates_since_the_bundle() -> None:
    """One of rounds that a coordinator does not know, since it was restored from a backup."""
    fleet = Rounds(STC(epochs=1, keep=0.2))
    for _ in range(2):
        fleet.play("a", "b")
    wrong = Weights(fleet.kept["b"].model.parameters + 1, np.zeros(0, np.float32))
    fleet.kept["b"] = replace(fleet.kept["b"], model=wrong, version=9)
    with pytest.raises(LostError):
        fleet.receive("b")
    fleet.lose("b")
    assert set(fleet.ask("b").arrays) == {UPDATES}
    assert fleet.receive("b").model.parameters.tobytes() == fleet.state.model.parameters.tobytes()
    restored = Rounds(fleet.method)
    restored.kept["b"] = fleet.kept["b"]
    assert restored.receive("b").model.parameters.tobytes() == restored.course.model.parameters.tobytes()


def test_a_device_whose_update_did_not_count_skips_what_it_has() -> None:
    fleet = Rounds(STC(epochs=1))
    for _ in range(2):
        fleet.play("a", "b")
    before = fleet.records["a"]
    fleet.play("a", "b")
    fleet.records["a"] = before
    assert (fleet.ask("a").meta["since"], fleet.kept["a"].version) == (1, 2)
    assert fleet.receive("a").model.parameters.tobytes() == fleet.state.model.parameters.tobytes()


def test_hostile_payloads_are_refused() -> None:
    fleet = Rounds(STC(epochs=1))
    fleet.play("a")
    a, good = Assignment(fleet.course, 2, "b"), fleet.local["a"].update.arrays[UPDATE]
    for data in (good[:-1], good[:0], np.full(60, 255, np.uint8), np.concatenate([good, good])):
        with pytest.raises(PayloadError):
            fleet.method.read_update(a, fleet.state, None, Payload({UPDATE: data}, {"samples": 1}))
        for name in (MODEL, UPDATES):
            with pytest.raises(PayloadError):
                fleet.method.receive(a, None, Payload({name: data}, {"since": 0, "version": 1}))
    for since, said in ((-1, "must be a version of the model"), ("x", "must be a version of the model"), (7, "7")):
        with pytest.raises(PayloadError, match=said):
            fleet.method.receive(a, None, Payload({}, {"since": since}))


def test_influence_is_the_norm_of_the_change_and_limited_scales_it() -> None:
    fleet = Rounds(STC(epochs=1, keep=0.1))
    fleet.play("a")
    a = Assignment(fleet.course, 2, "a")
    start = Rounds(STC(epochs=1, keep=0.1)).state
    update = fleet.method.read_update(a, start, None, fleet.local["a"].update)
    norm = fleet.method.influence(a, start, update).norm
    assert norm == pytest.approx(np.linalg.norm(update.change.dense(M.d)), rel=1e-5)
    update = replace(update, statistics=np.array([3, -4], np.float32))
    assert fleet.method.influence(a, start, update).statistics == 5
    half = fleet.method.influence(a, start, fleet.method.limited(a, start, update, 0.5, 2.0))
    assert half.norm == pytest.approx(norm / 2, rel=1e-5)
    assert (half.statistics, half.weight) == (2.5, 2.0)


def test_the_papers_bytes_are_golomb_positions_and_a_sign() -> None:
    m = mlp(99, 100)  # d = 10,000
    gaps = np.arange(20_000)
    golomb = (0.01 * 0.99**gaps * (gaps // 64 + 1 + 6)).sum()  # the best Golomb parameter at p = 0.01 is 64
    assert STC(keep=0.01).paper_bytes(course(m)) == (int(4 + 100 * (golomb + 1) / 8),) * 2


def test_a_change_that_could_make_the_model_infinite_is_refused() -> None:
    fleet = Rounds(STC(keep=0.1))
    a = Assignment(fleet.course, 1, "a")
    change = replace(sparse.ternary(np.ones(M.d), 0.1, fleet.method.ends(M)), magnitudes=np.array([3e38], np.float32))
    data = fleet.method.write(fleet.course.model, fleet.state.model, change, np.zeros(M.buffers_d, np.float32))
    with pytest.raises(PayloadError, match="lower the learning rate"):
        fleet.method.read_update(a, fleet.state, None, Payload({UPDATE: np.frombuffer(data, np.uint8)}, {"samples": 1}))


def test_the_whole_model_is_sent_once_the_missed_updates_are_larger_though_all_are_kept() -> None:
    """Half of the parameters change in each update; the whole model takes four bytes for each that ever did."""
    fleet, sizes = Rounds(STC(keep=0.5, epochs=1), rounds=40), []
    for missed in range(1, 31):
        fleet.play("b")
        sent = fleet.ask("a")
        assert len(fleet.state.lengths) == missed  # nothing was dropped
        sizes.append((set(sent.arrays), size(sent)))
        assert size(sent) <= 4 + int(fleet.state.lengths.sum())
    assert sizes[0][0] == {UPDATES}
    assert sizes[-1][0] == {MODEL}
    assert fleet.receive("a").model.parameters.tobytes() == fleet.state.model.parameters.tobytes()


def test_the_whole_model_comes_back_bit_for_bit_also_where_a_zero_has_another_sign() -> None:
    start = model(M)
    start.parameters[:2] = 0.0, -0.0
    held = Weights(start.parameters.copy(), start.buffers)
    held.parameters[:2] = -0.0, 0.0
    assert checksum(read_whole(start, whole(start, held))) == checksum(held)
