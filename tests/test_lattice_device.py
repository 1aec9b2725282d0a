"""Both halves of Lattice against `lattice_device`, a reader of its payloads written from the docs alone."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import lattice_device
import numpy as np
import pytest
from lattice_device import Device, Numbers, whole
from lattice_fleet import LatticeFleet, pull, samples
from numpy_mlp import grouped, mlp

from edge_client.bundle import F32, Init, Tensor
from edge_client.methods.lattice import grid as grid_module
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.lattice.values import Received
from edge_client.task import Local, Task

pytestmark = pytest.mark.usefixtures("no_network_is_small")

MEANS = Tensor(name="mean", shape=(20,), offset=0, init=Init(kind="uniform", scale=1.0))
M = grouped(mlp(6, 8, 5, 3)).model_copy(update={"buffers": (MEANS,)})
FOUR = {"a": samples(0), "b": samples(1), "c": samples(2), "d": samples(0, 400)}  # d's moves are a level higher
COHORTS = ("abc", "acd", "db", "abc", "da", "abd", "ab", "ab")  # c is away for more than HISTORY rounds
BAD = (2, 3, 4)  # rounds after which moves are finer
HISTORY = 3
AVERAGE = 4


def of_docs(fleet: LatticeFleet, received: Received) -> Device:
    """The docs' device in the network of this round."""
    shapes = [t.shape for t in received.net.model.manifest.parameters]
    c = fleet.course
    d = Device(c.seed, c.cohort, c.rounds, AVERAGE, shapes, nearest(c.model.buffers))
    if received.net.units is None:
        return d
    live = [int(n) for n in received.net.units.places]
    return replace(d, live=live, whole=fleet.m.d, pruned=fleet.method.prune_after)


def nearest(statistics: F32) -> list[int]:
    """Their whole numbers."""
    return [int(n) for n in np.floor(whole(statistics) + 0.5)]


def cut(held: Numbers | None, d: Device) -> Numbers | None:
    """What a device held of the whole network, in the smaller one."""
    if held is None or len(held.counts) == d.size:
        return held
    return replace(held, counts=[held.counts[i] for i in d.live])


def check_update(d: Device, task: Task, received: Received, local: Local) -> None:
    """The moves and statistics of an update are those that the docs give for the change of the training."""
    a, update, trained = task.assignment, local.update, local.trained
    held = nearest(received.statistics)
    level, share = received.level, 1.0
    part = slice(None) if received.net.units is None else received.net.units.places
    change = trained.parameters[part].astype(np.float64) - received.parameters
    sizes = [rows * columns for rows, columns in d.tensors]
    if received.samples:
        ratio = task.samples / received.samples
        level += max(0, int(np.floor(np.log2(ratio))) - 3)
        steps, share = received.steps.astype(np.float64) * 2.0 ** (level - 8), ratio
    else:  # a quarter of the quantum 1
        r = update.arrays["rms"].astype(np.float64)
        each = max(np.sqrt((r**2 * sizes).sum() / d.size), 1e-12)
        steps = (0.25 * d.cohort * each * np.minimum(1, np.maximum(1 / 50, each / np.maximum(r, 1e-12)))).astype("<f4")
    u = (np.array(d.stream(a.round)) + a.place * 2**32 // d.cohort) % 2**32 * 2.0**-32
    due = np.floor(change * share / np.repeat(steps.astype(np.float64), sizes) + u)
    moves = d.moves(a.round, a.place, level, update.arrays["moves"].tobytes(), received.counts.tolist())
    assert moves == [int(n) for n in due]
    assert d.changed(held, update.arrays["statistics"].tobytes()) == d.dithered(a.round, a.place, trained.buffers)


@pytest.mark.parametrize("after", [None, 1, 3, 6])
def test_a_device_written_from_the_docs_reads_every_downlink_and_every_update(
    after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (grid_module, lattice_device):
        monkeypatch.setattr(module, "HISTORY", HISTORY)
    monkeypatch.setattr(Lattice, "window", lambda self, course: AVERAGE)
    pruning: dict[str, Any] = {} if after is None else {"prune": 0.5, "prune_after": after}
    method = Lattice(epochs=1, lr=0.1, quantum=1, batch=512, **pruning)
    fleet = LatticeFleet(method, FOUR, m=M, trainer=pull(M), rounds=len(COHORTS))
    held: dict[str, Numbers] = {}
    since = set()

    def read(device: str) -> tuple[Device, Received, Numbers]:
        sent = method.downlink(fleet.course, fleet.round + 1, fleet.state, fleet.records.get(device))
        received = fleet.receive(device)
        d = of_docs(fleet, received)
        if "change" not in sent.arrays:
            return d, received, Numbers([0] * d.size, list(d.start), 1)
        change, statistics = (sent.arrays[name].tobytes() for name in ("change", "statistics"))
        since.add(struct.unpack_from("<IB", change)[1])
        now = d.received(fleet.round + 1, change, statistics, cut(held.get(device), d))
        assert now.counts == received.counts.tolist()
        return d, received, now

    for round_, cohort in enumerate(COHORTS, 1):
        before = {device: read(device) for device in cohort}
        fleet.play(*cohort, gain=1.0 if round_ in BAD else -1.0)
        for place, device in enumerate(cohort):
            d, received, held[device] = before[device]
            check_update(d, fleet.task(device, round_, place), received, fleet.local[device])
    for device in "abcdx":
        read(device)
    assert since >= {0, 1, 2, 3}
    assert not fleet.lost
