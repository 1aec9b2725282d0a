"""The task: batches in order, finite gradients, scores of the parts, an epoch's loss; a device's whole round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import counter
from numpy_mlp import NumpyMlp, assignment, clusters, mlp, model, secret, task

from edge_client.bundle import F32, Manifest
from edge_client.data import DeviceData
from edge_client.device.local import read_downlink, run_round
from edge_client.errors import DivergedError
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.fedpm import FedPM
from edge_client.protocol.metrics import METRICS, split_metrics
from edge_client.protocol.payload import Payload
from edge_client.task import SCORE_BATCH, Batch, EpochLoss, Personal, Task
from edge_client.training import Gradient

M = mlp(6, 5, 3)
NONE = np.zeros(0, np.float32)


def numbered(count: int) -> Task:
    """Samples that are their own numbers."""
    x = np.arange(count, dtype=np.float32)[:, None].repeat(6, axis=1)
    y = np.arange(count) % 3
    return task(M, data=DeviceData(x, y, x[:0], y[:0], x[:0], y[:0]))


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def visited(t: Task, epochs: int, size: int, phase: str = "train") -> list[list[int]]:
    return [b.x[:, 0].astype(int).tolist() for b in t.batches(epochs, size, phase)]


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    batches = visited(numbered(40), 2, 7)
    assert [len(b) for b in batches] == [7, 7, 7, 7, 7, 5] * 2
    first, second = flat(batches[:6]), flat(batches[6:])
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_the_order_is_that_of_the_shared_key_and_differs_by_device_round_and_phase() -> None:
    t = numbered(20)
    order = flat(visited(t, 1, 6))
    assert order == counter.permutation(counter.key(3, "batches", "train", "a", 1, 0), 20).tolist()
    others = [
        visited(t, 1, 6, "probe"),
        visited(replace(t, assignment=assignment(M, "b")), 1, 6),
        visited(replace(t, assignment=assignment(M, "a", 2)), 1, 6),
    ]
    assert all(flat(o) != order for o in others)
    assert visited(replace(t, secret=9), 1, 6) == visited(t, 1, 6)


def test_batches_know_their_step_epoch_and_labels() -> None:
    seen = [(b.index, b.epoch, len(b)) for b in numbered(5).batches(2, 3)]
    assert seen == [(0, 0, 3), (1, 0, 2), (2, 1, 3), (3, 1, 2)]
    assert all((b.y == b.x[:, 0].astype(int) % 3).all() for b in numbered(9).batches(1, 2))


@pytest.mark.parametrize("frugal", [True, False])
def test_the_trainer_of_a_frugal_task_rests_after_each_pass(frugal: bool) -> None:
    t = replace(task(M), frugal=frugal)
    for passes in (1, 2):
        for _ in t.batches(2, 3):
            assert t.trainer.rests == (passes - 1) * frugal  # not before the last step is done
        assert t.trainer.rests == passes * frugal


def test_the_trainer_rests_after_a_pass_that_ends_early() -> None:
    t = replace(task(M), frugal=True)
    for _ in t.batches(2, 3):
        break
    assert t.trainer.rests == 1


@dataclass
class Broken:
    """A trainer with a given answer."""

    manifest: Manifest
    answer: Gradient

    def gradient(self, parameters: F32, buffers: F32, x: Any, y: Any) -> Gradient:
        return self.answer

    def logits(self, parameters: F32, buffers: F32, x: Any) -> F32:
        return np.zeros((len(x), 3), np.float32)


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["loss", "gradient", "batch-norm statistics"])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_an_error_that_names_it_and_the_step(wild: float, where: str) -> None:
    ones = np.ones(M.d, np.float32)
    broken = ones.copy()
    broken[3] = wild
    answers = {
        "loss": Gradient(wild, ones, NONE),
        "gradient": Gradient(1.0, broken, NONE),
        "batch-norm statistics": Gradient(1.0, ones, broken),
    }
    t = replace(task(M, round_=4), trainer=Broken(M, answers[where]))
    for index, at_start in ((0, True), (5, False)):
        batch = Batch(index, 0, np.zeros((1, 6), np.float32), np.zeros(1, np.int64))
        with pytest.raises(DivergedError, match=rf"{where} overflowed in step {index + 1} of round 4") as caught:
            t.gradient(ones, NONE, batch)
        assert caught.value.at_start == at_start


@pytest.mark.filterwarnings("error")
def test_a_gradient_too_large_to_square_is_an_error_without_a_warning() -> None:
    t = replace(task(M), trainer=Broken(M, Gradient(1.0, np.full(M.d, 1e30, np.float32), NONE)))
    with pytest.raises(DivergedError, match="gradient"):
        t.gradient(NONE, NONE, next(t.batches(1, 4)))


def test_each_part_is_scored_on_its_own_samples() -> None:
    good, empty = clusters(M, 1, 30), clusters(M, 2, 0)
    wrong = (good.y + 1) % 3
    data = DeviceData(good.x, good.y, good.x, wrong, empty.x, empty.y)
    t = task(M, data=data)
    found = Personal(model(M).parameters, NONE)
    predicted = NumpyMlp(M).logits(found.parameters, NONE, good.x).argmax(1)
    assert t.score(found, "train") == (predicted == good.y).mean()
    assert t.score(found, "validation") == (predicted == wrong).mean()
    assert t.score(found) == 0.0  # no test samples


def test_scores_do_not_depend_on_how_samples_are_batched() -> None:
    data = clusters(M, 1, 2 * SCORE_BATCH + 7)
    t = Task(assignment(M), NumpyMlp(M), data, secret("a"))
    found = Personal(model(M).parameters, NONE)
    whole = (NumpyMlp(M).logits(found.parameters, NONE, data.x).argmax(1) == data.y).mean()
    assert t.score(found) == pytest.approx(whole)


def test_the_loss_is_the_last_epochs_mean_weighted_by_samples() -> None:
    loss = EpochLoss()
    assert loss.mean == 0.0
    for epoch, size, value in ((0, 4, 9.0), (1, 4, 1.0), (1, 2, 4.0)):
        x, y = np.zeros((size, 6), np.float32), np.zeros(size, np.int64)
        loss.add(Batch(0, epoch, x, y), Gradient(value, NONE, NONE))
    assert loss.mean == pytest.approx((4 * 1 + 2 * 4) / 6)


# --- a whole round of a device


def test_an_update_carries_its_devices_metrics_at_few_digits() -> None:
    t, method = task(M, "b", 2), FedAvg(epochs=1)
    down = Payload({"parameters": model(M).parameters, "buffers": NONE})
    outcome = run_round(method, t, {}, down)
    before, after = t.score(Personal(model(M).parameters, NONE)), t.score(outcome.trained)
    loss = method.local_round(t, None, method.receive(t.assignment, None, down)).loss
    due = [40, float(f"{loss:.4g}"), round(before, 4), round(after, 4), 40]
    assert outcome.update.meta == {METRICS: due}
    content, metrics = split_metrics(outcome.update)
    assert (content.meta, metrics) == ({"samples": 40}, outcome.metrics)
    assert outcome.kept == {}


def test_a_loss_that_cannot_be_reported_is_divergence() -> None:
    t = replace(task(M), trainer=Broken(M, Gradient(1e7, np.zeros(M.d, np.float32), NONE)))
    down = Payload({"parameters": model(M).parameters, "buffers": NONE})
    with pytest.raises(DivergedError) as caught:
        run_round(FedAvg(epochs=1), t, {}, down)
    said = "the training of 'fedavg' diverged in round 1: loss = 1e+07; lower `lr`, or look for outliers"
    assert str(caught.value).startswith(said)
    assert not caught.value.at_start


@pytest.mark.parametrize("damage", ["missing", "extra", "dtype"])
def test_kept_arrays_that_do_not_make_the_kept_value_count_as_none(damage: str) -> None:
    method, t = FedPM(persistent=True, probe_rounds=1), task(M, "a", 2)
    head = method.probed(model(M)).gather(model(M).parameters)
    theta = np.full(method.masked(model(M)).size, 0.9, np.float32)
    down = Payload({"head": head, "theta": theta})
    kept = run_round(method, t, {}, down).kept
    assert read_downlink(method, t.assignment, kept, down)[0].adam.steps == 1
    wrong = {
        "missing": {k: v for k, v in kept.items() if k != "adam.mean"},
        "extra": {**kept, "other": NONE},
        "dtype": {**kept, "adam.steps": np.zeros((), np.float32)},
    }[damage]
    assert read_downlink(method, t.assignment, wrong, down)[0] is None
