"""Local rounds of many devices, in this process or spread over several.

A worker holds what stays the same through a federation: the method, every device's data, and one trainer whose sessions
are opened once. It receives turns (a device, what the device kept, its downlink as bytes) and returns what the device
keeps and uploads. It never sees the server's state. A turn's result depends on nothing but the turn, so any number of
processes gives the same bytes.

Processes are forked where the system can fork: the data is then shared, not copied.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from edge_kernels import counter

from edge_client.bundle import digest
from edge_client.data import DeviceData
from edge_client.device import local
from edge_client.errors import DivergedError, LostError, MaskfleetError
from edge_client.methods import Method
from edge_client.protocol import payload
from edge_client.protocol.messages import Personalise, Source
from edge_client.protocol.payload import Arrays, Payload
from edge_client.task import Assignment, Course, Personal, Task
from edge_client.training import Trainer

PAYS = 4.0  # seconds of work left from which starting processes is worth their start
READS = 4  # decoded downlinks that a process keeps; each has arrays of the model's size
CHUNKS = 5  # least parts of a round for each process, where there are as many devices: no process is long idle


class WorkerEndedError(MaskfleetError):
    """A worker process was killed or ran out of memory, whatever the method and its settings are."""


@dataclass(frozen=True)
class Site:
    """What every worker holds of a federation. `open_trainer` is called once in each process."""

    method: Method
    course: Course
    devices: Mapping[str, DeviceData]
    open_trainer: Callable[[], Trainer]
    personalise: Personalise = "global"


@dataclass(frozen=True)
class Turn:
    """One device's part in a round: what it kept, as flat arrays, its audience, which names its downlink, its place."""

    device: str
    kept: Arrays
    audience: str
    place: int = 0


@dataclass(frozen=True)
class Trained:
    """What a device keeps after a round, and its update as it travels."""

    kept: Arrays
    update: bytes


@dataclass(frozen=True)
class Lost:
    """The device could not read its downlink, because it builds on values the device no longer holds."""

    reason: str


@dataclass(frozen=True)
class Evaluated:
    """A device's personal model from a downlink: its score, its SHA-256, and with `Evaluation.models` the model itself.

    `source` says which model it is. `kept` is the share of the parameters that its mask keeps, 1 for a dense model.
    `after` is the score after the local epochs of one more round, None without `Evaluation.epochs`.
    """

    score: float
    sha256: str
    kept: float
    source: Source
    after: float | None
    personal: Personal | None


@dataclass(frozen=True)
class Evaluation:
    """What to find out of each device beside the score of its personal model."""

    epochs: bool = False
    models: bool = False
    personalise: Personalise = "global"


# --- one turn


@dataclass(frozen=True)
class _Read:
    """A decoded downlink, and the round, audience and kept arrays that it was decoded for."""

    round: int
    audience: str
    kept: Arrays
    decoded: tuple[Any, Any]


@dataclass(frozen=True)
class _Kit:
    """A site with its trainer, and the downlinks decoded last."""

    site: Site
    trainer: Trainer
    reads: deque[_Read] = field(default_factory=lambda: deque(maxlen=READS))

    def read(
        self, audience: str, method: Method, a: Assignment, kept: Mapping[str, Any], downlink: Payload
    ) -> tuple[Any, Any]:
        """As `local.read_downlink`, but once for devices of one audience that kept the same."""
        if self.reads and self.reads[-1].round != a.round:
            self.reads.clear()
        own = local.of_method(kept)
        for known in self.reads:
            if known.audience == audience and _same(known.kept, own):
                return known.decoded
        decoded = local.read_downlink(method, a, kept, downlink)
        self.reads.append(_Read(a.round, audience, own, decoded))
        return decoded

    def task(self, round_: int, turn: Turn) -> Task:
        course = self.site.course
        secret = counter.key(course.seed, "secret", turn.device)
        a = Assignment(course, round_, turn.device, turn.place)
        return Task(a, self.trainer, self.site.devices[turn.device], secret)


def _same(one: Arrays, other: Arrays) -> bool:
    """Whether both have the same bits; -0 is not 0."""
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        for a, b in ((one[name], other[name]) for name in one)
    )


def _train(kit: _Kit, round_: int, turn: Turn, downlink: Payload) -> Trained | Lost:
    try:
        task, site = kit.task(round_, turn), kit.site
        read = partial(kit.read, turn.audience)
        outcome = local.run_round(site.method, task, turn.kept, downlink, site.personalise, read)
    except LostError as error:
        return Lost(str(error))
    except DivergedError as error:
        raise DivergedError(f"device {turn.device!r}: {error}", error.at_start) from None
    return Trained(outcome.kept, payload.encode(outcome.update))


def _evaluate(kit: _Kit, round_: int, turn: Turn, downlink: Payload, what: Evaluation) -> Evaluated | Lost:
    method, task, read = kit.site.method, kit.task(round_, turn), partial(kit.read, turn.audience)
    try:
        chosen = local.choose_model(method, task, turn.kept, downlink, what.personalise, read)
    except LostError as error:
        return Lost(str(error))
    model, after = chosen.personal, None
    if what.epochs:
        trained = chosen.local or local.choose_model(method, task, turn.kept, downlink, "local", read).personal
        after = task.score(trained)
    sha = digest(np.concatenate([model.parameters, model.buffers]).tobytes())
    kept_share = 1.0 if model.mask is None else float(model.mask.mean())
    return Evaluated(task.score(model), sha, kept_share, chosen.source, after, model if what.models else None)


# --- many turns

R = TypeVar("R")
_Work = Callable[[_Kit, int, Turn, Payload], R]


class Workers:
    """Runs turns, in the order given. With `processes` None it begins here and starts processes once they pay.

    `turns` is how many turns are expected in all. Use it in a `with` block: the processes end with it.
    """

    def __init__(self, site: Site, trainer: Trainer, processes: int | None, turns: int) -> None:
        self._kit, self._processes = _Kit(site, trainer), processes
        self._turns, self._done, self._spent = turns, 0, 0.0
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def task(self, round_: int, turn: Turn) -> Task:
        """What a method is given for this turn."""
        return self._kit.task(round_, turn)

    def train(self, round_: int, turns: Sequence[Turn], downlinks: Mapping[str, bytes]) -> Iterator[Trained | Lost]:
        """Each device's local round."""
        return self._run(_train, round_, turns, downlinks)

    def evaluate(
        self, round_: int, turns: Sequence[Turn], downlinks: Mapping[str, bytes], what: Evaluation
    ) -> Iterator[Evaluated | Lost]:
        """Each device's personal model from its downlink, and its score."""
        return self._run(partial(_evaluate, what=what), round_, turns, downlinks)

    def _run(self, work: _Work[R], round_: int, turns: Sequence[Turn], downlinks: Mapping[str, bytes]) -> Iterator[R]:
        decoded = {} if self._pool else {audience: payload.decode(data) for audience, data in downlinks.items()}
        here = 0
        while here < len(turns) and not self._spread():
            started = time.perf_counter()
            yield work(self._kit, round_, turns[here], decoded[turns[here].audience])
            here, self._done, self._spent = here + 1, self._done + 1, self._spent + time.perf_counter() - started
        if here < len(turns):
            yield from self._in_pool(work, round_, turns[here:], downlinks)

    def _spread(self) -> bool:
        """Whether turns go to processes from now on."""
        if self._pool is not None or self._processes == 1:
            return self._pool is not None
        count = self._processes or cores()
        if self._processes is None:
            measured = self._spent / self._done if self._done > 1 else 0.0  # the first turn opens the sessions
            if count == 1 or measured * (self._turns - self._done) < PAYS:
                return False
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._pool = ProcessPoolExecutor(count, context, _begin, (self._kit.site,))
        self._processes = count
        return True

    def _in_pool(
        self, work: _Work[R], round_: int, turns: Sequence[Turn], downlinks: Mapping[str, bytes]
    ) -> Iterator[R]:
        assert self._pool is not None
        assert self._processes is not None
        size = max(1, len(turns) // (self._processes * CHUNKS))
        chunks = [turns[low : low + size] for low in range(0, len(turns), size)]
        try:
            futures = [
                self._pool.submit(_chunk, work, round_, c, {t.audience: downlinks[t.audience] for t in c})
                for c in chunks
            ]
            for future in futures:
                yield from future.result()
        except BrokenProcessPool:
            raise WorkerEndedError(
                "a worker process ended (killed, or out of memory); run again with fewer `processes`"
            ) from None


def cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_kit: _Kit | None = None  # of a worker process


def _begin(site: Site) -> None:
    """Set up a worker process. An interrupt is for the parent, which ends its workers."""
    global _kit
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's, which a fork inherits
    _kit = _Kit(site, site.open_trainer())


def _end_with_parent() -> None:
    """End this process when its parent has ended, also by a signal that the parent cannot handle."""
    if parent := multiprocessing.parent_process():
        connection.wait([parent.sentinel])
        os._exit(1)


def _chunk(work: _Work[R], round_: int, turns: Sequence[Turn], downlinks: Mapping[str, bytes]) -> list[R]:
    assert _kit is not None
    decoded = {audience: payload.decode(data) for audience, data in downlinks.items()}
    return [work(_kit, round_, t, decoded[t.audience]) for t in turns]
