"""Aggregation over bytes: what is counted, what is refused, and that the bits never depend on the order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from coordination import D, manifest, update

from coord_server import aggregation
from coord_server.aggregation import Contribution, Course
from edge_client.bundle import Model
from edge_client.errors import PayloadError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.standalone import Standalone
from edge_client.protocol.messages import MAX_LOSS, MAX_SAMPLES, Round
from edge_client.protocol.payload import Arrays, Payload, decode, encode


def course() -> Course:
    model = Model(manifest(), np.zeros(D, np.float32), np.zeros(0, np.float32))
    return Course(make_method({"name": "fedavg"}), model, seed=7, rounds=2)


def close(c: Course, updates: Iterable[tuple[str, bytes]]) -> aggregation.Closed:
    state = c.method.start(c.model, c.seed)
    down = {"parameters": 4 * D, "header": 100}
    parts = [Contribution(device, data, {}, down) for device, data in updates]
    return aggregation.close_round(c, 1, state, parts, lambda *_: None, 2.5)


def test_a_round_is_the_weighted_mean_and_its_record_counts_every_byte() -> None:
    one, three = update(np.full(D, 1.0), 1), update(np.full(D, 3.0), 3, device="b", correct=[1, 2, 4])
    closed = close(course(), [("a", one), ("b", three)])
    assert closed.state["parameters"].tolist() == [2.5] * D
    record = closed.record
    assert record.devices == ["a", "b"]
    assert record.traffic.up["parameters"] == 2 * 4 * D
    assert sum(record.traffic.up.values()) == len(one) + len(three)
    assert record.traffic.down == {"parameters": 8 * D, "header": 200}
    assert record.bits_per_parameter_up == 8 * (len(one) + len(three)) / (2 * D)
    assert record.bits_per_parameter_down == 8 * (8 * D + 200) / (2 * D)
    assert record.accuracy_after is not None
    assert (record.accuracy_after.mean, record.accuracy_after.worst) == (0.625, 0.5)
    assert record.seconds == 2.5


def test_the_mean_accuracy_is_weighted_by_test_samples_and_ignores_devices_without_any() -> None:
    found = aggregation.accuracy([1.0, 0.5, 0.0], [1, 3, 0])
    assert found is not None
    assert (found.mean, found.worst, found.best) == (0.625, 0.5, 1.0)
    assert found.p10 == pytest.approx(0.55)
    assert aggregation.accuracy([0.3], [0]) is None


def test_a_round_that_everybody_sits_out_has_no_loss_and_no_accuracy() -> None:
    c = Course(Standalone(), course().model, 7, 2)
    nothing = {"method": "standalone", "round": 1, "samples": 0, "loss": 0.0, "correct": [0, 0, 0]}
    record = close(c, [(d, encode(Payload({}, {**nothing, "device": d}))) for d in "ab"]).record
    assert (record.loss, record.accuracy_before, record.accuracy_after) == (None, None, None)
    assert record.traffic.up["header"] > 0
    assert Round.model_validate_json(record.model_dump_json()) == record
    some = {**nothing, "device": "b", "samples": 4, "loss": 0.5, "correct": [1, 2, 2]}
    mixed = [("a", encode(Payload({}, {**nothing, "device": "a"}))), ("b", encode(Payload({}, some)))]
    record = close(c, mixed).record
    assert record.accuracy_after is not None
    assert (record.loss, record.accuracy_after.worst) == (0.5, 1.0)


def test_devices_out_of_order_or_twice_are_a_mistake_of_the_caller() -> None:
    for names in ("ba", "aa"):
        with pytest.raises(ValueError, match="sort"):
            close(course(), [(n, update(np.ones(D), device=n)) for n in names])
    with pytest.raises(ValueError, match="no update"):
        close(course(), [])


def test_updates_are_read_one_at_a_time() -> None:
    alive: list[str] = []

    def lazily() -> Iterable[Contribution]:
        for device in "abc":
            alive.append(device)
            yield Contribution(device, update(np.ones(D), device=device), {}, {})

    def check(a: object, state: Arrays, total: Arrays, u: Arrays, record: Arrays) -> tuple[Arrays, Arrays]:
        seen.append(len(alive))
        return {"n": np.ones(1)}, {"kept": np.array([len(alive)])}

    class Spy(FedAvg):
        fold = staticmethod(check)

        def finish(self, *_: object) -> Arrays:
            return {}

    seen: list[int] = []
    kept: dict[str, Arrays] = {}
    base = course()
    spied = Course(Spy(), base.model, 7, 2)
    aggregation.close_round(spied, 1, base.method.start(base.model, 7), lazily(), kept.__setitem__, 0.0)
    assert seen == [1, 2, 3]
    assert [int(kept[d]["kept"][0]) for d in "abc"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (update(np.full(D, np.nan)), "NaN"),
        (update(np.ones(D - 1)), "float32"),
        (update(np.ones(D))[:-3], "not a maskfleet payload"),
        (update(np.ones(D), correct=[1, 5, 4]), "5 of 4 test samples cannot be correct"),
        (update(np.ones(D), loss="high"), "loss"),
        (update(np.ones(D), -1), "samples"),
        (update(np.ones(D), 2**31), "samples"),
        (update(np.ones(D), 2**53 - 1), "samples"),
        (update(np.ones(D), correct=[1, 3, 2**53 - 1]), "correct"),
        (update(np.ones(D), correct=[1, 3]), "correct"),
        (update(np.ones(D), loss=1e308), "loss"),
        (update(np.ones(D), loss=-1e308), "loss"),
        (update(np.ones(D), loss=2**53 - 1), "loss"),
        (update(np.ones(D), correct=[-1, 3, 4]), "correct"),
        (encode(Payload({"parameters": np.ones(D, np.float32)})), "method None, due is 'fedavg'"),
        (encode(Payload({}, {"method": "fedavg", "round": 1, "device": "a"})), "Field required"),
        (update(np.ones(D), method="fedpm"), "method 'fedpm', due is 'fedavg'"),
        (update(np.ones(D), round_=2), "round 2, due is 1"),
        (update(np.ones(D), device="b"), "device 'b', due is 'a'"),
        (b"", "not a maskfleet payload"),
    ],
)
def test_what_is_wrong_with_an_update_is_said(body: bytes, word: str) -> None:
    c = course()
    with pytest.raises(PayloadError, match=word):
        aggregation.check_update(c, 1, "a", c.method.start(c.model, 7), {}, body)


def test_the_largest_figures_that_are_taken_leave_a_finite_record() -> None:
    figures = {"samples": MAX_SAMPLES, "correct": [0, MAX_SAMPLES, MAX_SAMPLES], "loss": MAX_LOSS}
    record = close(course(), [(d, update(np.ones(D), device=d, **figures)) for d in "ab"]).record
    assert record.accuracy_after is not None
    assert (record.loss, record.accuracy_after.mean) == (MAX_LOSS, 1.0)
    assert Round.model_validate_json(record.model_dump_json()) == record


def test_a_downlink_says_its_method_and_round_and_its_device_only_when_it_is_for_one() -> None:
    class Own(FedAvg):
        shared_downlink = False

    shared = course()
    state = shared.method.start(shared.model, 7)
    own = Course(Own(), shared.model, 7, 2)
    said = [decode(aggregation.downlink(c, 2, "a", state, {})[0]).meta for c in (shared, own)]
    assert said == [{"method": "fedavg", "round": 2}, {"method": "fedavg", "round": 2, "device": "a"}]


def test_packed_states_come_back_bit_for_bit_and_equal_states_pack_to_equal_bytes() -> None:
    state = {"b": np.array([1.5, -0.0], np.float32), "a": np.arange(3, dtype=np.uint64)}
    data = aggregation.pack(state)
    assert aggregation.pack(dict(reversed(state.items()))) == data
    found = aggregation.unpack(data)
    assert all(found[k].tobytes() == v.tobytes() and found[k].dtype == v.dtype for k, v in state.items())


def test_a_state_with_an_array_for_each_of_a_thousand_devices_comes_back() -> None:
    state = {f"mask.device-{i:04d}": np.array([i], np.uint32) for i in range(1000)}
    found = aggregation.unpack(aggregation.pack(state))
    assert {name: int(a[0]) for name, a in found.items()} == {name: int(a[0]) for name, a in state.items()}
