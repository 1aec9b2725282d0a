"""Aggregation over bytes: what is counted, what is refused, and that the bits never depend on the order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from coordination import D, manifest, said, update

from coord_server import aggregation
from coord_server.aggregation import Contribution, UnusableUpdate
from edge_client.bundle import Model
from edge_client.errors import PayloadError, StorageDamagedError
from edge_client.methods import Method
from edge_client.methods.coupled import Coupled
from edge_client.methods.coupled import State as CoupledState
from edge_client.methods.fedavg import FedAvg, State
from edge_client.methods.standalone import Nothing, Standalone
from edge_client.protocol.messages import MAX_LOSS, MAX_SAMPLES, Round
from edge_client.protocol.metrics import METRICS
from edge_client.protocol.payload import Payload, decode, encode
from edge_client.task import Assignment, Course


def course() -> Course:
    return Course(Model(manifest(), np.zeros(D, np.float32), np.zeros(0, np.float32)), seed=7, rounds=2, cohort=3)


def close(updates: Iterable[tuple[str, bytes]], method: Method | None = None, **more: Any) -> aggregation.Closed:
    method, c = method or FedAvg(), course()
    down = {"parameters": 4 * D, "header": 100}
    parts = (Contribution(device, data, None, down) for device, data in updates)
    return aggregation.close_round(method, c, 1, method.start(c), parts, {}, "none", 3, **more)


def test_a_round_is_the_weighted_mean_and_its_record_counts_every_byte() -> None:
    one, three = update(np.full(D, 1.0), 1), update(np.full(D, 3.0), 3, score_after=0.5)
    closed = close([("a", one), ("b", three)])
    assert closed.state.parameters.tolist() == [2.5] * D
    record = closed.round
    assert record.devices == ["a", "b"]
    assert record.traffic.up["parameters"] == 2 * 4 * D
    assert sum(record.traffic.up.values()) == len(one) + len(three)
    assert record.traffic.down == {"parameters": 8 * D, "header": 200}
    assert record.bits_per_parameter_up == 8 * (len(one) + len(three)) / (2 * D)
    assert record.bits_per_parameter_down == 8 * (8 * D + 200) / (2 * D)
    assert record.score_after is not None
    assert (record.score_after.mean, record.score_after.worst) == (0.625, 0.5)


def test_the_mean_score_is_weighted_by_test_samples_and_ignores_devices_without_any() -> None:
    found = aggregation.scores([1.0, 0.5, 0.0], [1, 3, 0])
    assert found is not None
    assert (found.mean, found.worst, found.best) == (0.625, 0.5, 1.0)
    assert found.p10 == pytest.approx(0.55)
    assert aggregation.scores([0.3], [0]) is None


def test_no_device_outweighs_the_others_in_the_means_of_a_record() -> None:
    most = {"samples": MAX_SAMPLES, "test_samples": MAX_SAMPLES, "loss": 9.0, "score_after": 0.0}
    claims = [("a", {}), ("b", {}), ("c", {}), ("evil", most)]
    record = close([(d, update(np.ones(D), **more)) for d, more in claims]).round
    assert record.loss == pytest.approx((3 * 10 * 0.5 + 100 * 9.0) / 130)
    assert record.score_after is not None
    assert record.score_after.mean == pytest.approx(3 * 4 * 0.75 / (3 * 4 + 40))
    assert aggregation.scores([1.0, 0.0, 0.0, 0.0], [8, 0, 0, 0]) is not None  # devices without samples do not count


def test_a_round_without_samples_has_no_loss_and_no_score() -> None:
    nothing = encode(Payload({}, said(0, loss=0.0, score_before=0.0, score_after=0.0, test_samples=0)))
    record = close([(d, nothing) for d in "ab"], Standalone()).round
    assert (record.loss, record.score_before, record.score_after) == (None, None, None)
    assert record.traffic.up["header"] > 0
    assert Round.model_validate_json(record.model_dump_json()) == record
    some = encode(Payload({}, said(4, score_before=0.0, score_after=1.0, test_samples=2)))
    record = close([("a", nothing), ("b", some)], Standalone()).round
    assert record.score_after is not None
    assert (record.loss, record.score_after.worst) == (0.5, 1.0)


def test_scores_of_a_regression_may_be_negative() -> None:
    record = close([("a", update(np.ones(D), score_before=-3.5, score_after=-0.25))]).round
    assert record.score_before is not None
    assert record.score_after is not None
    assert (record.score_before.mean, record.score_after.mean) == (-3.5, -0.25)


def test_devices_out_of_order_or_twice_are_a_mistake_of_the_caller() -> None:
    for names in ("ba", "aa"):
        with pytest.raises(ValueError, match="sort"):
            close([(n, update(np.ones(D))) for n in names])
    with pytest.raises(ValueError, match="no update"):
        close([])


def test_skipped_devices_are_named_in_the_record() -> None:
    assert close([("a", update(np.ones(D)))], skipped=["z", "b"]).round.skipped == ["b", "z"]


def test_an_update_that_cannot_be_folded_names_its_device() -> None:
    class Failing(FedAvg):
        def fold(self, a: Assignment, state: Any, total: Any, update: Any, record: Any) -> Any:
            raise ArithmeticError("cannot")

    for method, data in ((Failing(), update(np.ones(D))), (FedAvg(), b"junk")):
        with pytest.raises(UnusableUpdate, match="'a' cannot be folded") as caught:
            close([("a", data)], method)
        assert caught.value.device == "a"


@dataclass(frozen=True)
class Seen:
    alive: int


def test_updates_are_read_one_at_a_time_and_finish_may_replace_records() -> None:
    alive: list[str] = []

    def lazily() -> Iterable[tuple[str, bytes]]:
        for device in "abc":
            alive.append(device)
            yield device, update(np.ones(D))

    class Spy(FedAvg):
        def fold(self, a: Assignment, state: Any, total: Any, update: Any, record: Any) -> tuple[Any, Any]:
            return [*(total or []), a.device], Seen(len(alive))

        def finish(
            self, course: Course, round_: int, took_part: Sequence[str], state: Any, total: Any
        ) -> tuple[Any, Mapping[str, Any]]:
            assert total == list(took_part) == ["a", "b", "c"]
            assert (course.seed, round_) == (7, 1)
            return state, {"b": Seen(99)}

    closed = close(lazily(), Spy())
    assert {d: r.alive for d, r in closed.records.items()} == {"a": 1, "b": 99, "c": 3}


def test_a_method_is_given_the_size_of_the_fleet_before_a_round_ends_that_counts_an_update() -> None:
    class Sized(FedAvg):
        def sized(self, state: Any, fleet: int) -> Any:
            return replace(state, parameters=np.full(D, fleet, np.float32))

        def finish(
            self, course: Course, round_: int, took_part: Sequence[str], state: Any, total: Any
        ) -> tuple[Any, Mapping[str, Any]]:
            return state, {}

    assert close([("a", update(np.ones(D)))], Sized()).state.parameters.tolist() == [3.0] * D


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (update(np.full(D, np.nan)), "NaN"),
        (update(np.ones(D - 1)), "float32"),
        (update(np.ones(D))[:-3], "not a maskfleet payload"),
        (update(np.ones(D), score_after=1.5), "score_after = 1.5"),
        (update(np.ones(D), score_before=-1e7), "score_before"),
        (update(np.ones(D), -1), "samples"),
        (update(np.ones(D), 2**31), "samples"),
        (update(np.ones(D), 2**53 - 1), "samples"),
        (update(np.ones(D), test_samples=2**53 - 1), "test_samples"),
        (update(np.ones(D), loss=1e308), "loss"),
        (update(np.ones(D), loss=-1e308), "loss"),
        (update(np.ones(D), loss=2**53 - 1), "loss"),
        (update(np.ones(D), test_samples=-1), "test_samples"),
        (encode(Payload({"parameters": np.ones(D, np.float32)})), "m = None; it must be the list samples, loss"),
        (encode(Payload({}, {METRICS: 3})), "m = 3"),
        (encode(Payload({}, {METRICS: [1, 0.5, 0.25, 0.75]})), "it must be the list"),
        (encode(Payload({}, {METRICS: [1, 0.5, 0.25, 0.75, 4, 4]})), "it must be the list"),
        (update(np.ones(D), 1.5), "samples"),  # type: ignore[arg-type]
        (encode(Payload({"buffers": np.zeros(0, np.float32)}, said())), "parameters"),
        (b"", "not a maskfleet payload"),
    ],
)
def test_what_is_wrong_with_an_update_is_named(body: bytes, word: str) -> None:
    c = course()
    with pytest.raises(PayloadError, match=word):
        aggregation.check_update(FedAvg(), Assignment(c, 1, "a"), FedAvg().start(c), None, body)


def test_a_checked_update_has_its_influence_and_its_bytes_by_kind() -> None:
    c, data = course(), update(np.full(D, 2.0), 5)
    checked = aggregation.check_update(FedAvg(), Assignment(c, 1, "a"), FedAvg().start(c), None, data)
    assert checked.influence is not None
    assert (checked.influence.norm, checked.influence.weight) == (pytest.approx(2 * D**0.5), 5)
    assert sum(checked.sizes.values()) == len(data)
    assert checked.metrics.samples == 5


def test_the_largest_figures_that_are_taken_leave_a_finite_record() -> None:
    figures = {"samples": MAX_SAMPLES, "test_samples": MAX_SAMPLES, "score_after": 1.0, "loss": MAX_LOSS}
    record = close([(d, update(np.ones(D), **figures)) for d in "ab"]).round
    assert record.score_after is not None
    assert (record.loss, record.score_after.mean) == (MAX_LOSS, 1.0)
    assert Round.model_validate_json(record.model_dump_json()) == record


def test_a_downlink_is_what_the_method_says_and_nothing_else() -> None:
    c = course()
    encoded = aggregation.downlink(FedAvg(), c, 2, FedAvg().start(c), None)
    assert decode(encoded.data).meta == {}
    assert encoded.sizes["parameters"] == 4 * D
    assert sum(encoded.sizes.values()) == len(encoded.data)


def test_packed_states_come_back_bit_for_bit() -> None:
    state = State(np.array([1.5, -0.0], np.float32), np.zeros(0, np.float32))
    found = aggregation.unpack(State, aggregation.pack(state))
    assert found.parameters.tobytes() == state.parameters.tobytes()
    assert found.buffers.dtype == np.float32
    assert aggregation.pack(found) == aggregation.pack(state)
    first = Coupled(head="mask").start(course())
    assert aggregation.pack(aggregation.unpack(CoupledState, aggregation.pack(first))) == aggregation.pack(first)
    assert aggregation.unpack(Nothing, aggregation.pack(Nothing())) == Nothing()


@pytest.mark.parametrize(
    "data", [b"", b"junk", aggregation.pack(State(np.ones(1, np.float32), np.ones(1, np.float32)))]
)
def test_a_damaged_state_is_damaged_storage(data: bytes) -> None:
    with pytest.raises(StorageDamagedError, match="restore the data folder"):
        aggregation.unpack(CoupledState, data)
