"""What Lattice makes of hostile and damaged payloads, and how far one update moves the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits, lattice
from lattice_fleet import NORMED, THREE, D, LatticeFleet, M, pull, samples
from numpy.typing import NDArray

from coord_server import guard
from edge_client.errors import LostError, PayloadError
from edge_client.methods.lattice import method as method_module
from edge_client.methods.lattice.delivery import CHANGE
from edge_client.methods.lattice.grid import MIDDLE, dither, spans, trainable
from edge_client.methods.lattice.method import MOVES, Lattice
from edge_client.methods.lattice.wire import UpHead, up_head
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment

pytestmark = pytest.mark.usefixtures("no_network_is_small")


def test_one_hostile_update_moves_the_model_no_further_than_the_limit() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    for _ in range(2):
        fleet.play(*"abc")
    a = Assignment(fleet.course, 3, "a")
    update = method_module.Update(np.full(D, 30_000, np.int32), None, np.zeros(0, np.float32), 1e9, -1.0)
    honest = replace(update, moves=np.full(D, 1, np.int32), samples=8.0)
    claimed, usual = (fleet.method.influence(a, fleet.state, u) for u in (update, honest))
    assert claimed is not None
    assert usual is not None
    assert claimed.norm * claimed.weight == pytest.approx(30_000 * D)
    assert usual.norm * usual.weight == pytest.approx(max(D, 64))
    limited = fleet.method.limited(a, fleet.state, update, 1e-3, 80.0)
    assert np.abs(fleet.method.moved(a, trainable(M), limited)).sum() == pytest.approx(30_000 * D * 1e-3 * 80 / 1e9)
    assert limited.samples == 80


@pytest.mark.parametrize("first", [True, False])
def test_an_update_s_statistics_are_limited_with_its_moves(first: bool) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE, m=NORMED, trainer=pull(NORMED))
    fleet.play(*"abc")
    each = np.ones(len(trainable(NORMED).blocks), np.float32) if first else None
    change = np.array([8.0, -4.0, 0.0, 2.0], np.float32)
    update = method_module.Update(np.full(D, 8, np.int32), each, change, 40.0, -1.0)
    limited = fleet.method.limited(Assignment(fleet.course, 2, "a"), fleet.state, update, 0.25, 20.0)
    assert limited.statistics.tolist() == [2.0, -1.0, 0.0, 0.5]  # whatever their weight
    assert limited.scale == (0.25 if first else 0.125)


def _with_gain(moves: NDArray[Any], gain: float) -> NDArray[Any]:
    """Coded moves with another gain; all else is right."""
    head, coded = up_head(moves.tobytes())
    return np.frombuffer(replace(head, gain=gain).pack() + coded, np.uint8)


def _bad_updates() -> dict[str, Callable[[Payload], Payload]]:
    def array(name: str, value: NDArray[Any]) -> Callable[[Payload], Payload]:
        return lambda p: replace(p, arrays={**p.arrays, name: value})

    return {
        "unknown array": array("more", np.zeros(1)),
        "no moves": lambda p: replace(p, arrays={"rms": p.arrays["rms"]} if "rms" in p.arrays else {}),
        "moves of another kind": array(MOVES, np.zeros(60)),
        "too short": array(MOVES, np.zeros(5, np.uint8)),
        "nothing coded": lambda p: array(MOVES, p.arrays[MOVES][:8])(p),
        "a wrong checksum": lambda p: array(MOVES, np.append(p.arrays[MOVES][:1] ^ np.uint8(1), p.arrays[MOVES][1:]))(
            p
        ),
        "gain is NaN": lambda p: array(MOVES, _with_gain(p.arrays[MOVES], float("nan")))(p),
        "statistics": array("statistics", np.zeros(3, np.float16)),
    }


@pytest.mark.parametrize("kind", sorted(_bad_updates()))
@pytest.mark.parametrize("round_", [1, 3])
def test_a_hostile_update_is_refused(kind: str, round_: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=0.5, lr=0.1), THREE)
    for _ in range(round_ - 1):
        fleet.play(*"abc")
    fleet.change = lambda device, update: _bad_updates()[kind](update) if device == "b" else update
    with pytest.raises(PayloadError):
        fleet.play(*"abc")


def test_an_update_without_samples_is_refused() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    before, a = fleet.state, fleet.task("a").assignment
    fleet.play("a")
    with pytest.raises(PayloadError, match="samples"):
        fleet.method.read_update(a, before, None, Payload(fleet.local["a"].update.arrays))


@pytest.mark.parametrize("each", [[-1, 1, 1, 1], [3e38, 1, 1, 1], [np.nan, 1, 1, 1], [1, 1]])
def test_a_hostile_rms_is_refused(each: list[float]) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    fleet.change = lambda device, p: replace(p, arrays={**p.arrays, "rms": np.array(each, np.float32)})
    with pytest.raises(PayloadError):
        fleet.play(*"abc")


def test_numbers_beyond_the_limit_are_refused() -> None:
    fleet = LatticeFleet(Lattice(epochs=1, lr=0.1), THREE)
    fleet.play(*"abc")
    a = Assignment(fleet.course, 2, "b", 1)
    moves = np.full(D, 40_000, np.int32)
    coded = lattice.encode(moves, lattice.up(dither(a, D), spans(trainable(M)), np.abs(fleet.state.counts) >> MIDDLE))
    head = UpHead(bits.checksum([moves]), 0.0).pack()
    with pytest.raises(PayloadError, match="leaves"):
        fleet.method.read_update(
            a, fleet.state, None, Payload({MOVES: np.frombuffer(head + coded, np.uint8)}, {"samples": 8})
        )


@pytest.mark.parametrize("base", ["zero", "held"])
def test_a_damaged_downlink_is_refused_or_reported_as_lost(base: str) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=1, lr=0.1), THREE)
    for _ in range(3):
        fleet.play(*"abc")
    device = "a" if base == "held" else "new"
    a, kept = Assignment(fleet.course, 4, device), fleet.kept.get(device)
    whole = fleet.method.downlink(fleet.course, 4, fleet.state, fleet.records.get(device))
    data = whole.arrays[CHANGE]
    error: type[Exception] = LostError if base == "held" else PayloadError
    flipped = data.copy()
    flipped[0] ^= 1
    for bad in (flipped, data[:-1], data[:12]):
        with pytest.raises(error):
            fleet.method.receive(a, kept, replace(whole, arrays={**whole.arrays, CHANGE: bad}))
    for arrays in ({}, {**whole.arrays, "x": data}, {**whole.arrays, CHANGE: data[:9]}):
        with pytest.raises(PayloadError):
            fleet.method.receive(a, kept, Payload(arrays))
    with pytest.raises(PayloadError):
        fleet.method.receive(Assignment(fleet.course, 1, device), kept, whole)


@pytest.mark.parametrize("few", [4, 10, 20])
def test_an_honest_device_of_few_samples_is_not_limited_for_the_noise_of_few_moves(few: int) -> None:
    fleet = LatticeFleet(Lattice(epochs=1, quantum=2), {d: samples(i, 8) for i, d in enumerate("abc")})
    fleet.play(*"abc")
    state = replace(fleet.state, samples=100.0)
    a, moves = fleet.task("a").assignment, np.zeros(D, np.int32)
    each = {}
    for name, n in {"few": few, "b": 100, "c": 100, "d": 110}.items():
        own = moves.copy()
        own[: n // 10] = 1  # far fewer than `FEW`
        update = method_module.Update(own, None, state.statistics, float(n), 0.0)
        each[name] = fleet.method.influence(a, state, update)
    assert guard.limits(each, "clip") == {}
