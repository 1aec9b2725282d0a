"""Lattice: federated averaging on a grid of whole numbers, exact both ways.

docs/methods/lattice.md has the reasons.

The model is ``w0 + step / K / 2**MIDDLE * N``: the bundle's weights w0, an integer N for each trainable parameter, a
step for each tensor, the federation's cohort K.

- **Steps** follow from the median of the first cohort's `rms` (`grid.steps`) and stay. In that round each
  device's moves are in steps of its own, from its own `rms` and FIRST * the quantum. Rounds before the first counted
  update follow the rules of round 1.
- **Levels.** A move at level j changes N by 2**j. The first level is MIDDLE; one more doubles the step. N keeps its
  unit, and late devices need not know when the level changed.
- **Up.** A device sends ``m = floor(a + u)`` with its dither u and
  ``a = change / (step * 2**(level - MIDDLE)) * samples / mean samples``, in the first round ``a = change / own step``.
  It keeps nothing of the rounding. A device with 16 times the mean samples or more has a higher level
  (`extra_levels`).
- **Server.** ``M = 2**level * (K * mean samples / samples of the round) * sum of m``. The factor is 1 for K devices of
  the mean samples; the samples of the round count as LEAST of the mean for each update at least. In the first round
  ``samples / mean samples * own step / step * m`` stands for m. By Nesterov's momentum b ``V <- b * V + M`` and
  ``R += M + b * V``; b is how much M and V agree (`averaging.accelerated`). With ``server_momentum = 0`` the model is
  the weighted mean in expectation, as in FedAvg. With ``q = sign(R) floor(|R| / 2**cell + UPWARD)``, ``2**cell * q``
  moves from R to N. The cell is level + `coarser` of the state. With `coarser` above 0, N is rounded to the nearest
  cell first, and R takes the difference.
- **Down.** How N changed since the one that the device holds (`delivery`). Statistics likewise (`batch_norm`).
- **Budget.** `levelled` estimates what the rounds left need; beyond the budget, cells or moves become coarser.
- **Guard.** BAD_ROUNDS rounds in a row with a median gain above 0 lower the level by one, if the budget allows HALVED
  times the bytes.
- **Mean.** After the last round N and the statistics are sent as their means over the last rounds (`delivery`).
- **Pruning.** `current` gives the state at the start of a round: after `prune_after` rounds that of the smaller network
  (`prune`). Every vector of a state, payload or update then is the smaller network's (`network.Network`).

The rms, gains and bytes of a cohort enter by their median, so that no single device sets them. The mean samples are
those of all reports so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median_low
from typing import ClassVar

import numpy as np
from edge_kernels import bits, lattice
from edge_kernels.lattice_model import Known
from numpy.typing import NDArray

from edge_client.blocks import Blocks
from edge_client.bundle import F32
from edge_client.errors import ConfigError, DivergedError, PayloadError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.lattice import batch_norm, delivery, grid, levels
from edge_client.methods.lattice.coordinates import on_grid
from edge_client.methods.lattice.delivery import CHANGE, STEPS
from edge_client.methods.lattice.grid import (
    HIGHEST,
    MIDDLE,
    MOST,
    Counts,
    History,
    dither,
    extra_levels,
    moves,
    rms,
    spans,
    spread,
    steps,
    trainable,
)
from edge_client.methods.lattice.prune import check, pruned
from edge_client.methods.lattice.settings import Settings
from edge_client.methods.lattice.train import train
from edge_client.methods.lattice.values import Kept, Received, Record, State, Total, Update
from edge_client.methods.lattice.wire import MOST_MOVE, UpHead, read_moves
from edge_client.methods.shared.averaging import Mean, accelerated
from edge_client.methods.shared.network import Network, network
from edge_client.methods.shared.units import UNITS
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload, allow_only, bytes_of, count, u8, vector
from edge_client.task import Assignment, Course, Local, Personal, Task

BAD_ROUNDS = 2  # in a row that halve the steps
HALVED = 2  # times the bytes, at most, that halved steps take
FIRST = 0.25  # of the quantum, in round 1: each device has its own steps then, so stratified dither does not cancel
MOST_PARAMETERS = 1 << 24  # where all of them move, the coder takes no more
LEAST = 1 / 16  # of the mean samples: a round's updates count as at least so many each, or small ones' noise would grow
FEW = 64  # moves: the least size that the norm guard gives to an update of a device with the mean samples
UPWARD = 0.3  # added before rounding down: from .7 of a cell on N moves, so noise about half a cell does not flip it

MOVES, STATISTICS = "moves", batch_norm.NAME


class Lattice(Settings):
    """Averaging on a grid of whole numbers."""

    name: ClassVar[str] = "lattice"
    revision: ClassVar[int] = 11  # the guard keeps the budget
    rival: ClassVar[str] = "fedavg"
    search: ClassVar[Search] = {
        "lr": Range(0.001, 0.1, log=True),
        "epochs": Range(1, 5),
        "quantum": Range(2.0, 15.0, log=True),
    }
    state_type: ClassVar[type[State]] = State
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept
    one_time: ClassVar[frozenset[str]] = frozenset({"rms"})
    one_time_down: ClassVar[frozenset[str]] = frozenset({STEPS, UNITS})

    # --- server half

    def start(self, course: Course) -> State:
        self.refuse_idle()
        if self.prune is not None:
            check(course, self.prune, self.prune_after, self.prune_keep)
        part = trainable(course.model.manifest)
        if part.size > MOST_PARAMETERS:
            raise ConfigError(
                f"model {course.model.manifest.name!r} has {part.size:,} trainable parameters and Lattice codes "
                f"{MOST_PARAMETERS:,} at most; freeze layers, or choose stc or fedavg"
            )
        statistics = course.model.buffers[: self.buffers(course.model)].copy()
        none = np.zeros(0, np.int64)
        return State(
            counts=np.zeros(part.size, np.int32),
            steps=np.zeros(len(part.blocks), np.float32),
            statistics=statistics,
            history=History(none, none.astype(np.uint32), none.astype(np.int32), none),
            recent=statistics[None][:0],
            residual=np.zeros(part.size, np.float32),
            velocity=np.zeros(part.size, np.float32),
        )

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        return f"from-{delivery.base_round(round_, record)}"

    def downlink(self, course: Course, round_: int, state: State, record: Record | None) -> Payload:
        return delivery.written(self, course, round_, self.current(course, round_, state), record)

    def known_up(self, net: Network, drawn: NDArray[np.uint32], held: Counts, level: int) -> Known:
        """What both sides know of the moves of a device whose dither is `drawn` and whose N is `held`."""
        return lattice.up(drawn, spans(on_grid(net)), held, level)

    def exchanged(self, course: Course) -> int:
        return trainable(course.model.manifest).size

    def update_limit(self, course: Course) -> int:
        """Three bytes a parameter, more than moves take at the least `quantum`; 4 a statistic and a tensor."""
        part = trainable(course.model.manifest)
        return 3 * part.size + 1024 + 4 * self.buffers(course.model) + 4 * len(part.blocks)

    def read_update(self, a: Assignment, state: State, record: Record | None, payload: Payload) -> Update:
        """The moves decoded with the device's dither. Raises PayloadError."""
        state = self.current(a.course, a.round, state)
        net, first = network(a.course, state.units), () if state.reports else ("rms",)
        allow_only(payload, MOVES, STATISTICS, *first)
        part, data = on_grid(net), bytes_of(payload, MOVES)
        samples = count(payload, "samples", MAX_SAMPLES)
        higher = extra_levels(samples, state.samples) if state.reports else 0
        known = self.known_up(net, dither(a, part.size, keep=True), state.counts, state.level + higher)
        gain, moved = read_moves(a, data, known)
        own_rms = self.read_rms(a, part, payload) if first else None
        statistics = read_statistics(a, state, payload)
        size = len(data) + (payload.arrays[STATISTICS].size if statistics.size else 0)
        return Update(moved, own_rms, statistics, samples, gain, size, 2.0**higher)

    def read_rms(self, a: Assignment, part: Blocks, payload: Payload) -> F32:
        """The rms of an update, float32[tensors]. Raises PayloadError for those that make no finite steps."""
        own_rms = vector(payload, "rms", len(part.blocks))
        with np.errstate(over="ignore"):
            step = self.own_steps(a, part, own_rms)
        if not ((own_rms >= 0).all() and np.isfinite(step).all()):
            least, most = own_rms.min(), own_rms.max()
            raise PayloadError(f"the rms of {a.device!r} are {least} .. {most}; lower the learning rate")
        return own_rms

    def influence(self, a: Assignment, state: State, update: Update) -> Influence:
        """The moves count with the samples that they are weighted by, so their sum is norm times weight."""
        part = on_grid(network(a.course, self.current(a.course, a.round, state).units))
        statistics = float(np.sqrt(np.square(update.statistics, dtype=np.float64).sum()))
        sums = np.array([np.abs(update.moves[p]).sum(dtype=np.int64) for p in part.places]) * update.scale
        if update.rms is not None:
            step = self.own_steps(a, part, update.rms).astype(np.float64)
            few = FEW * float(step @ [b.size for b in part.blocks]) / max(1, part.size)
            return Influence(max(float(step @ sums), few), update.samples, statistics)
        few = FEW * min(1.0, update.samples / state.samples) if state.samples else FEW
        return Influence(max(float(sums.sum()), few) / update.samples, update.samples, statistics)

    def limited(self, a: Assignment, state: State, update: Update, scale: float, weight: float) -> Update:
        """Moves times `scale`, and in the new weight's proportion where they are weighted already."""
        share = scale if update.rms is not None else scale * weight / update.samples
        return replace(
            update,
            scale=update.scale * share,
            samples=weight,
            statistics=(update.statistics * np.float32(scale)).astype(np.float32),
        )

    def moved(self, a: Assignment, part: Blocks, update: Update) -> NDArray[np.float64]:
        """The moves as numbers, in the first round in units of the weights."""
        moves: NDArray[np.float64] = update.moves * np.float64(update.scale)
        if update.rms is not None:
            moves *= spread(part, self.own_steps(a, part, update.rms))
        return moves

    def own_steps(self, a: Assignment, part: Blocks, rms: F32) -> F32:
        """The steps of the first round, from the device's own figures. The size that counts is the whole network's."""
        return steps(part, rms, FIRST * self.first_quantum(a.course), a.course.cohort)

    def fold(
        self, a: Assignment, state: State, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        """Add the moves; in the first round times the samples."""
        state = self.current(a.course, a.round, state)
        if total is None:
            total = Total(np.zeros(state.counts.size), Mean(state.statistics.size))
        part = on_grid(network(a.course, state.units))
        total.moves += self.moved(a, part, update) * (1.0 if update.rms is None else update.samples)
        total.statistics.add(update.samples, update.statistics)
        total.samples.append(update.samples)
        total.gains.append(update.gain)
        total.sizes.append(update.size)
        if update.rms is not None:
            total.rms.append(update.rms)
        return total, Record(a.round)

    def dropped(self, a: Assignment, update: Update, record: Record | None) -> Record:
        return Record(a.round)

    def sized(self, state: State, fleet: int) -> State:
        return replace(state, fleet=fleet)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: State, total: Total
    ) -> tuple[State, Mapping[str, Record]]:
        """N with the round's moves in it; the level of the next ones; the pruning after the last dense round."""
        state = skipped(self.current(course, round_, state), round_)
        net = network(course, state.units)
        step, moved = self.summed(course, on_grid(net), state, total)
        after, residual, velocity = applied(state, moved, self.server_momentum)
        counts, statistics = after.astype(np.int32), mean_statistics(state, total)
        # Onto coarser cells N moves itself: then it is whole in them, and its change in what N was whole in before.
        finest = min(state.lowest, state.cell)
        changed, whole = (finest, state.cell) if state.coarser else (state.cell, finest)
        reports = state.reports + len(total.samples)
        bad = self.guarded(net) and median_low(total.gains) > 0
        now = replace(
            state,
            counts=counts, steps=step, statistics=statistics, residual=residual, velocity=velocity,
            history=state.history.then(counts - state.counts, changed), lowest=whole,
            recent=np.concatenate([state.recent, statistics[None]])[-grid.HISTORY - 1 :],
            first=state.first or round_, round=round_, reports=reports,
            samples=(state.samples * state.reports + math.fsum(total.samples)) / reports,
            bad=state.bad + 1 if bad else 0,
        )  # fmt: skip
        if round_ < course.rounds:
            now = self.levelled(course, round_, now, total)
        return self.current(course, round_ + 1, now), {}

    def summed(self, course: Course, part: Blocks, state: State, total: Total) -> tuple[F32, NDArray[np.float64]]:
        """The steps, and the sum of the moves in them as a full cohort of the mean samples would have it."""
        weight = math.fsum(total.samples)
        if state.reports:
            weight = max(weight, LEAST * state.samples * len(total.samples))
            return state.steps, total.moves * (course.cohort * state.samples / weight)
        middle = np.median(np.stack(total.rms).astype(np.float64), axis=0).astype(np.float32)
        step = steps(part, middle, self.first_quantum(course), course.cohort)
        return step, total.moves * (course.cohort / weight) / spread(part, step)

    def levelled(self, course: Course, round_: int, state: State, total: Total) -> State:
        """The state with the levels of the next round: coarser beyond the budget, finer after bad rounds within it."""
        n = levels.between(state, len(total.samples))
        late, like, grown = levels.lateness(state, n)
        up, down = median_low(total.sizes), self.change_bytes(course, round_, state, late)
        state = replace(state, spent=state.spent + up + down)
        rises = round_ + self.window(course) < course.rounds and not state.bad and not state.coarser
        falls = state.bad >= BAD_ROUNDS and state.level > 0
        if not ((rises or falls) and like and levels.settled(state, like)):
            return state
        typical = down if like == late else self.change_bytes(course, round_, state, like)
        need = self.need(course, round_, state, n, up + grown * typical)
        if falls:
            return replace(state, level=state.level - 1, bad=0) if need <= 1 / HALVED else state
        if need <= 1:
            return state
        cells = levels.coarsest(state, n, course.rounds)
        return levels.coarse(state, cells) if cells else levels.raised(state, need, self.top)

    def need(self, course: Course, round_: int, state: State, n: float, bytes_: float) -> float:
        """What the rounds left take, at `bytes_` each, over what is left of the budget, at least one round's bytes."""
        left = self.allowed(network(course, state.units), n) - state.spent
        return (course.rounds - round_ + n) * bytes_ / max(bytes_, left)

    def change_bytes(self, course: Course, round_: int, state: State, rounds: int) -> int:
        """Coded bytes of the next downlink for a device whose last round lies `rounds` rounds before it."""
        down = self.downlink(course, round_ + 1, state, Record(round_ + 1 - rounds)).arrays
        return sum(down[name].size for name in (CHANGE, STATISTICS) if name in down)

    def current(self, course: Course, round_: int, state: State) -> State:
        """The state at the start of a round: pruned after `prune_after`, even if that round counted no update."""
        if self.prune is None or round_ <= self.prune_after or state.units is not None:
            return state
        return pruned(course, state, self.unit(course, state.steps), self.prune, self.prune_keep)

    def of_device(self, course: Course, state: State, record: Record | None, everyone: Personal) -> Personal | None:
        return None if self.personal_epochs or self.statistics == "local" else everyone

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        return delivery.read(self, a, kept, downlink)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """SGD from the global model; the change as whole numbers."""
        a, net = task.assignment, received.net
        task, part = net.task(task), on_grid(net)
        rival = net.model if self.guarded(net) and received.samples else None
        own = train(task, received.parameters, received.statistics, self.plan(net), rival=rival)
        change = part.gather(own.parameters) - part.gather(received.parameters)
        arrays: Arrays = {}
        if not received.samples:
            arrays["rms"] = rms(part, change)
            level, step, share = received.level, self.own_steps(a, part, arrays["rms"]), 1.0
        else:
            level = received.level + extra_levels(task.samples, received.samples)
            step, share = received.steps, task.samples / received.samples * 2.0 ** (MIDDLE - level)
        drawn = dither(a, part.size)
        own_moves = moves(part, change, share / step.astype(np.float64), drawn, MOST_MOVE)
        del change  # the coder takes several times its memory
        head = UpHead(bits.checksum([own_moves]), own.gain)
        known = self.known_up(net, drawn, received.counts, level)
        arrays[MOVES] = u8(head.pack() + lattice.encode(own_moves, known))
        if self.buffers(net.model):
            trained = batch_norm.numbers(own.buffers, batch_norm.dither(a, own.buffers.size))
            arrays[STATISTICS] = batch_norm.change(trained, batch_norm.numbers(received.statistics))
        mine = own.buffers if self.statistics == "local" else received.statistics
        units = None if net.units is None else net.units.packed
        keep = Kept(a.round, received.counts, received.steps, mine, units)
        return Local(keep, Payload(arrays), net.personal(own.parameters, own.buffers), own.loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model; after the last round trained on the device's samples, if that does not diverge."""
        net, parameters, buffers = received.net, received.parameters, received.statistics
        if self.personal_epochs and task.assignment.round > task.assignment.rounds:
            plan = self.personal_plan(net)
            with suppress(DivergedError):
                own = train(net.task(task), parameters, buffers, plan, phase="personal")
                parameters, buffers = own.parameters, own.buffers
        return net.personal(parameters, buffers)


def skipped(state: State, round_: int) -> State:
    """The state after the rounds before `round_` that counted no update."""
    for _ in range(state.round + 1, round_):
        history = state.history.then(np.zeros(0, np.int32), HIGHEST)
        state = replace(state, history=history, recent=np.concatenate([state.recent, state.statistics[None]]))
    return state


def read_statistics(a: Assignment, state: State, payload: Payload) -> F32:
    """The change of the statistics in an update, float32[buffers_d]. Raises PayloadError."""
    held = batch_norm.numbers(state.statistics)
    statistics = batch_norm.values(batch_norm.read(payload, held))
    with np.errstate(over="ignore"):
        statistics -= batch_norm.values(held)
        if not np.isfinite(state.statistics + statistics).all():
            raise PayloadError(f"the change of {a.device!r} makes a statistic infinite; lower the learning rate")
    return statistics


def mean_statistics(state: State, total: Total) -> F32:
    """The server's statistics after the round; none when they stay on the devices."""
    if not len(state.statistics):
        return state.statistics
    return batch_norm.as_sent(state.statistics) + total.statistics.value


def applied(state: State, moved: NDArray[np.float64], most: float) -> tuple[NDArray[np.float64], F32, F32]:
    """N after a sum of moves, float64[n]; what it lacks and the velocity, float32[n].

    N changes by whole cells. With cells above the moves N itself moves onto the cells: a whole N then takes few bytes.
    """
    step, velocity = accelerated(np.ldexp(moved, state.level), state.velocity, most)
    cell, counts = 2.0**state.cell, state.counts.astype(np.float64)
    base = np.rint(counts / cell) * cell if state.coarser else counts
    left = state.residual + step + (counts - base)
    after = base + np.sign(left) * np.minimum(np.floor(np.abs(left) / cell + UPWARD) * cell, MOST)
    after = np.where(np.abs(after) > MOST, base, after)  # by whole cells, also near the end of 32 bits
    residual = np.clip(left - (after - base), -MOST, MOST).astype(np.float32)
    return after, residual, np.clip(velocity, -MOST, MOST).astype(np.float32)
