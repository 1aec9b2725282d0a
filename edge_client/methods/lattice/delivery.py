"""Lattice's downlink, written by the server and read by a device: how N changed since the N that the device holds.

A downlink builds on the N at the start of the *base*, the round in which the device took part last; or on N = 0, for a
device that holds none or one of more than HISTORY rounds ago. Both sides know that N, and how close the dither of the
rounds since the base came to 0 and 1: the change is coded given the two. After the last round N and the statistics are
their means over the last rounds. docs/methods/lattice.md lists the arrays (Payloads).
"""

from __future__ import annotations

import numpy as np
from edge_kernels import bits, lattice
from edge_kernels.lattice_model import Known

from edge_client.bundle import F32
from edge_client.errors import PayloadError
from edge_client.methods.lattice import batch_norm, grid
from edge_client.methods.lattice.coordinates import closeness, on_grid, weights
from edge_client.methods.lattice.grid import HIGHEST, MIDDLE, Counts, spans
from edge_client.methods.lattice.settings import Settings
from edge_client.methods.lattice.values import Kept, Received, Record, State, cut
from edge_client.methods.lattice.wire import DownHead, down_head, read_counts, stale
from edge_client.methods.shared.network import Network, network
from edge_client.methods.shared.units import UNITS
from edge_client.protocol.payload import Arrays, Payload, allow_only, bytes_of, u8, vector
from edge_client.task import Assignment, Course

CHANGE, STEPS, STATISTICS, REPORTS = "change", "steps", batch_norm.NAME, "reports"


def base_round(round_: int, record: Record | None) -> int:
    """The round at whose start the device received the N that the downlink builds on; 1 for N = 0."""
    if record is None or round_ - record.round > grid.HISTORY:
        return 1
    return record.round


def known(settings: Settings, net: Network, base: int, round_: int, low: int, held: Counts) -> Known:
    """What both sides know of the change of N from the start of round `base`, where it was `held`, to that of `round_`.

    The mean after the last round also differs where N has changed in the rounds that it covers.
    """
    tensors = spans(on_grid(net))
    if round_ - base > grid.HISTORY:
        return lattice.whole(tensors)
    first = base if round_ <= net.course.rounds else max(1, min(base, round_ + 1 - settings.window(net.course)))
    fall, rise = closeness(net, first, round_, settings.prune_after)
    return lattice.down(fall, rise, tensors, held, low)


# --- server half


def written(settings: Settings, course: Course, round_: int, state: State, record: Record | None) -> Payload:
    """The downlink of a round for a device with this record, from the state at the start of the round."""
    if not state.reports:
        units = {} if state.units is None else {UNITS: state.units}
        return Payload(units, {REPORTS: 0} if round_ > 1 else {})
    net, base = network(course, state.units), base_round(round_, record)
    base = 1 if base <= state.first else base  # N was 0 and without steps
    held, before, low = held_since(net, state, base)
    counts, statistics, finest = delivered(settings, course, round_, state)
    low, sent = min(low, finest), batch_norm.numbers(statistics)
    missed = 0 if base == 1 else round_ - base
    head = DownHead(bits.checksum([counts, sent]), missed, state.level, low, state.samples)
    change = lattice.encode((counts - held) >> low, known(settings, net, base, round_, low, held))
    arrays: Arrays = {CHANGE: u8(head.pack() + change)}
    if base == 1:
        arrays[STEPS] = state.steps
    if state.units is not None and base <= settings.prune_after:
        arrays[UNITS] = state.units
    if len(sent):
        arrays[STATISTICS] = batch_norm.change(sent, batch_norm.numbers(before))
    return Payload(arrays)


def held_since(net: Network, state: State, base: int) -> tuple[Counts, F32, int]:
    """N and the statistics at the start of round `base`, and the lowest level of what N changed by since then."""
    if base == 1:
        return np.zeros_like(state.counts), net.model.buffers, state.lowest
    past = max(0, state.round + 1 - base)  # a base after the last round that counted: the guard dropped its updates
    return state.history.before(state.counts, past), state.recent[-1 - past], state.history.lowest(past)


def delivered(settings: Settings, course: Course, round_: int, state: State) -> tuple[Counts, F32, int]:
    """N, the statistics and N's lowest level as devices receive them: after the last round their means."""
    rounds = covered(settings, course, state) if round_ > course.rounds else 1
    if rounds == 1:
        return state.counts, state.statistics, HIGHEST
    mean = state.recent[-rounds:].mean(axis=0, dtype=np.float64).astype(np.float32)
    return state.history.mean(state.counts, rounds), mean, state.history.fine(rounds)


def covered(settings: Settings, course: Course, state: State) -> int:
    """The number of rounds whose mean is the final model: since the first one that counted, or the pruning."""
    start = state.first if state.units is None else max(state.first, settings.prune_after + 1)
    return max(1, min(settings.window(course), state.round + 1 - start))


# --- client half


def read(settings: Settings, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
    """The model, from what the device kept and how it changed. Raises LostError, PayloadError."""
    first = a.round == 1 or (downlink.meta.get(REPORTS) == 0 and CHANGE not in downlink.arrays)
    allow_only(downlink, *((CHANGE, STEPS, STATISTICS) if not first else ()), *((UNITS,) if a.round > 1 else ()))
    net = received_network(settings, a, kept, downlink)
    kept, part = cut(kept, net), on_grid(net)
    own = net.model.buffers
    if kept is not None and kept.statistics.size == own.size and settings.statistics == "local":
        own = kept.statistics
    if first:
        zeros, none = np.zeros(part.size, np.int32), np.zeros(len(part.blocks), np.float32)
        return Received(net, zeros, none, MIDDLE, 0.0, own, net.model.parameters)
    head, data = down_head(bytes_of(downlink, CHANGE))
    if head.missed:
        base = a.round - head.missed
        kept = kept_since(net, a, kept, base)
        each, held, before = kept.steps, kept.counts, kept.statistics
    else:
        base, held, before = 1, np.zeros(part.size, np.int32), own
        each = vector(downlink, STEPS, len(part.blocks))
        if not (each > 0).all():
            raise PayloadError("a step of the downlink is not above 0; fetch it again")
    sent = np.zeros(0, np.int32)
    if settings.statistics == "mean":
        sent = batch_norm.read(downlink, batch_norm.numbers(before))
        own = batch_norm.values(sent)
    counts = read_counts(a, base, head, data, held, sent, known(settings, net, base, a.round, head.low, held))
    parameters = weights(net, settings.unit(a.course, each), counts)
    if not np.isfinite(parameters).all():
        raise PayloadError(f"the downlink of round {a.round} makes a parameter infinite; fetch it again")
    return Received(net, counts, each, head.level, head.samples, own, parameters)


def received_network(settings: Settings, a: Assignment, kept: Kept | None, downlink: Payload) -> Network:
    """The network of this round. Raises LostError when the device should know its units and does not."""
    if settings.prune is None or a.round <= settings.prune_after:
        return network(a.course, None)
    if UNITS in downlink.arrays:
        return network(a.course, downlink.arrays[UNITS])
    if kept is None or kept.units is None:
        raise stale(a, "it holds no list of the units that are left")
    try:
        return network(a.course, kept.units)
    except PayloadError as error:
        raise stale(a, str(error)) from None


def kept_since(net: Network, a: Assignment, kept: Kept | None, base: int) -> Kept:
    """What the device kept, when it is of the start of round `base`. Raises LostError, PayloadError."""
    if kept is None:
        raise stale(a, "it holds no counts")
    if base < 2:
        raise PayloadError(f"the downlink of round {a.round} builds on round {base}; fetch it again")
    if kept.round != base or kept.counts.size != on_grid(net).size:
        raise stale(a, f"it holds {kept.counts.size} counts of round {kept.round}, not of round {base}")
    return kept
