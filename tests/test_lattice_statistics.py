"""Batch-norm statistics in Lattice: averaged, sent as whole numbers, or local."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lattice_fleet import NORMED, THREE, LatticeFleet, M, pull, samples
from numpy_mlp import model

from edge_client.bundle import F32
from edge_client.errors import PayloadError
from edge_client.methods.lattice import batch_norm
from edge_client.methods.lattice.method import MOVES, Lattice
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course

pytestmark = pytest.mark.usefixtures("no_network_is_small")


def test_the_server_s_statistics_are_the_mean_of_what_the_devices_sent_weighted_by_samples() -> None:
    """What they sent is a change of the rounded statistics that they hold, not of the server's own.

    One, two and three steps add a quarter each, so the three send different statistics.
    """
    data = {"a": samples(0, 4), "b": samples(1, 8), "c": samples(2, 12)}
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1, batch=4), data, m=NORMED, trainer=pull(NORMED))
    before = fleet.state.statistics
    held = batch_norm.numbers(before)
    assert (before != batch_norm.values(held)).all()
    fleet.play(*"abc")
    sent = [batch_norm.values(batch_norm.read(fleet.local[d].update, held)) for d in "abc"]
    assert fleet.state.statistics == pytest.approx(np.average(sent, axis=0, weights=[4, 8, 12]), rel=1e-5)


def test_statistics_are_averaged_and_travel_as_changes_or_stay_local() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE, m=NORMED, trainer=pull(NORMED))
    fleet.play(*"abc")
    fleet.play(*"abc")
    fleet.play("a", "b")
    assert np.allclose(fleet.state.statistics, 1.25, rtol=0.03)  # a quarter more in every step
    for device in ("a", "c", "new"):  # one of them missed a round, one has nothing
        assert np.array_equal(fleet.receive(device).statistics, batch_norm.as_sent(fleet.state.statistics))
    assert not fleet.lost
    own = LatticeFleet(Lattice(epochs=1, lr=0.1, statistics="local"), THREE, m=NORMED, trainer=pull(NORMED))
    own.play(*"abc")
    own.play("a", "b")
    assert set(own.local["a"].update.arrays) == {MOVES}
    assert own.receive("a").statistics[0] == 1.0
    assert own.receive("c").statistics[0] == 0.75


@given(
    hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-(2.0**127), 2.0**127, width=32)), st.integers(0, 9)
)
def test_statistics_as_whole_numbers_keep_their_digits(values: F32, seed: int) -> None:
    whole = batch_norm.numbers(values)
    back = batch_norm.values(whole)
    assert (np.abs(back - values) <= (np.abs(values) + 2.0**-10) / 60).all()
    assert np.array_equal(batch_norm.numbers(back), whole)
    order = np.argsort(values)
    assert (np.diff(whole[order]) >= 0).all()
    other = np.random.default_rng(seed).permutation(whole)
    sent = Payload({"statistics": batch_norm.change(whole, other)} if len(whole) else {})
    assert np.array_equal(batch_norm.read(sent, other), whole)


def test_rounding_of_statistics_at_random_is_right_on_average() -> None:
    values = np.float32([0.003, 0.7, -2.5, 40.0])
    rounds, course = 400, Course(model(M), 3, 400, 2)
    drawn = [batch_norm.dither(Assignment(course, r, "a", r % 2), 4) for r in range(1, rounds + 1)]
    sent = [batch_norm.values(batch_norm.numbers(values, up)) for up in drawn]
    assert np.allclose(np.mean(sent, axis=0), values, rtol=0.004)
    assert len({x[1] for x in sent}) == 2
    both = [batch_norm.dither(Assignment(course, 1, "a", place), 4) for place in (0, 1)]
    assert np.allclose((both[1] - both[0]) % 1, 0.5)


def test_a_statistic_that_an_update_makes_infinite_is_refused() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), {"a": samples(0)}, m=NORMED, trainer=pull(NORMED), cohort=1)
    fleet.play("a")
    far = np.full(4, 3e38, np.float32)
    fleet.state = replace(fleet.state, statistics=-far)
    sent = batch_norm.change(batch_norm.numbers(far), batch_norm.numbers(-far))
    fleet.change = lambda device, p: replace(p, arrays={**p.arrays, "statistics": sent})
    with pytest.raises(PayloadError, match="infinite"):
        fleet.play("a")


def test_damaged_statistics_are_refused() -> None:
    held = np.zeros(4, np.int32)
    good = batch_norm.change(np.int32([5, -3, 0, 1]), held)
    far = batch_norm.change(np.int32([batch_norm.MOST + 1, 0, 0, 0]), held)
    for arrays in ({}, {"statistics": good.astype(np.float16)}, {"statistics": good[:-1]}, {"statistics": far}):
        with pytest.raises(PayloadError):
            batch_norm.read(Payload(arrays), held)
