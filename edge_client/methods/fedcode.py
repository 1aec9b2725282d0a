"""FedCode: most rounds exchange a codebook of weight values alone.

Khalilian, Tsouvalas, Ozcelebi, Meratnia, "FedCode: Communication-Efficient Federated Learning via Transferring
Codebooks", arXiv 2311.09270, as its published code has it. All trained parameters share one codebook of `clusters`
values, the centres of k-means; frozen ones stay as the bundle has them.

- Down: in rounds 1 and 2, in every round that `broadcast_every` divides (f1), after the last one, and to a device that
  did not take part in the round before: the codebook and the cluster of every weight, ``clusters.counts``. Else the
  codebook; the device moves each weight that it kept to the nearest value of the codebook.
- Up: in round 1 and every round that `request_every` divides (f2), codebook and clusters, of which the server takes the
  mean, weighted by samples. Else the codebook; the server moves each weight of its model to the nearest value of all
  codebooks together.
- A device clusters its model after training, and keeps the clustered model.

The paper prices a cluster at log2(clusters) bits; `counts` writes them at their entropy. Batch-norm statistics, which
the code clusters with the weights, travel as `buffers` float32 with the clusters, and stay where they are otherwise.
k-means draws nothing at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated, Any, ClassVar

import numpy as np
from edge_kernels.codecs import counts
from numpy.typing import NDArray
from pydantic import Field

from edge_client.blocks import rest
from edge_client.bundle import F32, Model
from edge_client.errors import LostError, PayloadError
from edge_client.methods import Influence, Range, Search
from edge_client.methods.shared import averaging
from edge_client.methods.shared.averaging import Weights, added
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload, allow_only, coded, count, decoding, u8, vector
from edge_client.task import Assignment, Course, Local, Personal, Task

CLUSTERS = "clusters.counts"  # a coded array is named after what it holds and its codec
PASSES = 20  # of k-means
CELLS = 512  # runs that clusters are made of at first: what they cost grows with the square


@dataclass(frozen=True)
class Record:
    """The last round in which a device took part."""

    round: int


@dataclass(frozen=True)
class Kept:
    """A device's own clustered model, and the round it is from."""

    model: Weights
    round: int


@dataclass(frozen=True)
class Clustered:
    """Ascending values float32[n <= clusters]; the cluster of every trained weight [t]."""

    codebook: F32
    clusters: NDArray[np.unsignedinteger[Any]]

    @property
    def weights(self) -> F32:
        """What the clusters stand for, float32[t]."""
        weights: F32 = self.codebook[self.clusters]
        return weights


@dataclass(frozen=True)
class Update:
    """A device's codebook; in a round with clusters its model as well."""

    codebook: F32
    model: averaging.Update | None


@dataclass
class Total:
    """The codebooks of a round, or the means of parameters and statistics."""

    codebooks: list[F32]
    means: averaging.Total | None


class FedCode(LocalSgd):
    """Local SGD, then k-means; codebooks in most rounds."""

    name: ClassVar[str] = "fedcode"
    revision: ClassVar[int] = 2
    search: ClassVar[Search] = {"lr": Range(0.001, 0.3, log=True), "broadcast_every": Range(2, 10)}
    state_type: ClassVar[type[Weights]] = Weights
    record_type: ClassVar[type[Record]] = Record
    kept_type: ClassVar[type[Kept]] = Kept

    clusters: Annotated[int, Field(ge=2, le=256)] = 64
    """Values of the codebook."""
    broadcast_every: Annotated[int, Field(ge=1, le=1000)] = 5
    """Rounds between downlinks with clusters (the paper's f1)."""
    request_every: Annotated[int, Field(ge=1, le=1000)] = 2
    """Rounds between updates with clusters (f2)."""

    def requests(self, round_: int) -> bool:
        """Whether the updates of a round have clusters."""
        return round_ == 1 or round_ % self.request_every == 0

    # --- server half

    def start(self, course: Course) -> Weights:
        return Weights(course.model.parameters.copy(), course.model.buffers.copy())

    def audience(self, course: Course, round_: int, record: Record | None) -> str:
        """What a device receives: "whole" or "codebook"."""
        stays = record is not None and record.round == round_ - 1 and 2 < round_ <= course.rounds
        return "codebook" if stays and round_ % self.broadcast_every else "whole"

    def downlink(self, course: Course, round_: int, state: Weights, record: Record | None) -> Payload:
        found = k_means(rest(course.model.manifest).gather(state.parameters), self.clusters)
        if self.audience(course, round_, record) == "codebook":
            return Payload({"codebook": found.codebook})
        return Payload({"codebook": found.codebook, CLUSTERS: packed(found), "buffers": state.buffers})

    def exchanged(self, course: Course) -> int:
        return rest(course.model.manifest).size

    def update_limit(self, course: Course) -> int:
        """A codebook, a statistic in four bytes, a cluster in little more than one."""
        return 4 * (self.clusters + course.model.manifest.buffers_d) + 2 * self.exchanged(course) + 4096

    def read_update(self, a: Assignment, state: Weights, record: Record | None, payload: Payload) -> Update:
        samples = count(payload, "samples", MAX_SAMPLES)
        if self.requests(a.round):
            found, buffers = self.read_whole(a.model, payload)
            return Update(found.codebook, averaging.Update(placed(a.model, found.weights), buffers, samples))
        allow_only(payload, "codebook")
        return Update(self.read_codebook(payload), None)

    def influence(self, a: Assignment, state: Weights, update: Update) -> Influence | None:
        """A model's change. None for a codebook: no weight moves farther than to an honest codebook's nearest value."""
        return None if update.model is None else averaging.influence(state, update.model)

    def limited(self, a: Assignment, state: Weights, update: Update, scale: float, weight: float) -> Update:
        """The changes of parameters and statistics times `scale`."""
        model = None if update.model is None else averaging.limited(state, update.model, scale, weight)
        return Update(update.codebook, model)

    def fold(
        self, a: Assignment, state: Weights, total: Total | None, update: Update, record: Record | None
    ) -> tuple[Total, Record]:
        """Collect a codebook, or add n_k w_k and n_k."""
        total = total or Total([], None)
        if update.model is None:
            total.codebooks.append(update.codebook)
        else:
            total.means = added(total.means, update.model.samples, update.model.parameters, update.model.buffers)
        return total, Record(a.round)

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: Weights, total: Total
    ) -> tuple[Weights, Mapping[str, Record]]:
        if total.means is not None:
            return Weights(total.means.parameters.value, total.means.buffers.value), {}
        codebook = np.unique(np.concatenate(total.codebooks))
        return Weights(snapped(course.model, state.parameters, codebook), state.buffers), {}

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Weights:
        """The clustered global model, or the device's own under the global codebook. Raises LostError, PayloadError."""
        if CLUSTERS in downlink.arrays:
            found, buffers = self.read_whole(a.model, downlink)
            return Weights(placed(a.model, found.weights), buffers)
        allow_only(downlink, "codebook")
        codebook = self.read_codebook(downlink)
        if kept is None or kept.round != a.round - 1 or kept.model.parameters.size != a.model.manifest.d:
            raise LostError(f"a codebook alone came in round {a.round}, and this device holds no model of the last one")
        return Weights(snapped(a.model, kept.model.parameters, codebook), kept.model.buffers)

    def local_round(self, task: Task, kept: Kept | None, received: Weights) -> Local:
        """A few epochs of SGD, then k-means."""
        a = task.assignment
        parameters, buffers, loss = self.descend(task, received)
        found = k_means(rest(a.model.manifest).gather(parameters), self.clusters)
        arrays: Arrays = {"codebook": found.codebook}
        if self.requests(a.round):
            arrays |= {CLUSTERS: packed(found), "buffers": buffers}
        own = Weights(placed(a.model, found.weights), buffers)
        return Local(Kept(own, a.round), Payload(arrays), Personal(own.parameters, buffers), loss)

    def personal(self, task: Task, kept: Kept | None, received: Weights) -> Personal:
        return Personal(received.parameters, received.buffers)

    # --- payloads

    def read_codebook(self, payload: Payload) -> F32:
        """The codebook: 1 to `clusters` ascending values. Raises PayloadError."""
        size = len(found) if (found := payload.arrays.get("codebook")) is not None and found.ndim == 1 else 0
        if not 1 <= size <= self.clusters:
            raise PayloadError(f"the codebook has {size} values; it must have 1 to {self.clusters}")
        codebook = vector(payload, "codebook", size)
        if not (codebook[1:] > codebook[:-1]).all():
            raise PayloadError("the values of the codebook do not ascend")
        return codebook

    def read_whole(self, model: Model, payload: Payload) -> tuple[Clustered, F32]:
        """The clustered weights and the statistics. Raises PayloadError."""
        codebook, buffers = self.read_codebook(payload), vector(payload, "buffers", model.manifest.buffers_d)
        data = coded(payload, CLUSTERS, ("codebook", "buffers"))
        with decoding(f"array {CLUSTERS!r}"):
            clusters = counts.decode(data, rest(model.manifest).size, len(codebook) - 1)
        return Clustered(codebook, clusters), buffers


def placed(model: Model, weights: F32) -> F32:
    """The parameters float32[d] of these trained weights float32[t]; frozen ones are the bundle's."""
    parameters: F32 = model.parameters.copy()
    rest(model.manifest).scatter(weights, parameters)
    return parameters


def snapped(model: Model, parameters: F32, codebook: F32) -> F32:
    """The parameters float32[d] with each trained one moved to the nearest value of an ascending codebook."""
    return placed(model, codebook[nearest(rest(model.manifest).gather(parameters), codebook)])


def k_means(weights: F32, clusters: int) -> Clustered:
    """k-means in one dimension: at most `clusters` centres, ascending and distinct.

    A cluster is a run of the sorted weights, so running sums give its mean. Lloyd's algorithm begins at the best
    clusters that runs of a finer division can form.
    """
    ordered = np.sort(weights).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    cuts = _joined(sums, _divided(ordered, sums, max(clusters, min(4 * clusters, CELLS))), clusters)
    centres = np.diff(sums[cuts]) / np.diff(cuts)
    for _ in range(PASSES):
        edges = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2, "right")
        cuts = np.unique(np.concatenate([[0], edges, [len(ordered)]]))
        moved = np.diff(sums[cuts]) / np.diff(cuts)
        if np.array_equal(moved, centres):
            break
        centres = moved
    codebook = np.unique(centres.astype(np.float32))
    return Clustered(codebook, nearest(weights, codebook))


def _divided(ordered: NDArray[np.float64], sums: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Where to cut sorted values into at most `most` runs: again and again where a cut lowers the squared error most.

    Ascending, with 0 and the number of values.
    """
    cuts, open_ = [0, len(ordered)], list[tuple[float, int, int, int]]()

    def consider(low: int, high: int) -> None:
        if ordered[low] < ordered[high - 1]:
            size, left, total = np.arange(1, high - low), sums[low + 1 : high] - sums[low], sums[high] - sums[low]
            gains = left**2 / size + (total - left) ** 2 / size[::-1]
            best = int(np.argmax(gains))
            heappush(open_, (total**2 / (high - low) - float(gains[best]), low, low + 1 + best, high))

    consider(0, len(ordered))
    while open_ and len(cuts) <= most:
        _, low, cut, high = heappop(open_)
        cuts.append(cut)
        consider(low, cut)
        consider(cut, high)
    return np.array(sorted(cuts))


def _joined(sums: NDArray[np.float64], cuts: NDArray[np.int64], clusters: int) -> NDArray[np.int64]:
    """Those of the `cuts` that make at most `clusters` runs of the least squared error, by dynamic programming."""
    size, total = (values - values[:, None] for values in (cuts, sums[cuts]))
    gains = np.where(size > 0, total**2 / np.maximum(size, 1), -np.inf)
    best = np.where(cuts == 0, 0.0, -np.inf)  # by last cut, of as many runs as steps so far
    steps = list[NDArray[np.int64]]()
    for _ in range(min(clusters, len(cuts) - 1)):
        reached = best[:, None] + gains
        steps.append(reached.argmax(axis=0))
        best = reached.max(axis=0)
    chosen = [len(cuts) - 1]
    for step in reversed(steps):
        chosen.append(int(step[chosen[-1]]))
    return cuts[chosen[::-1]]


def nearest(weights: F32, codebook: F32) -> NDArray[np.unsignedinteger[Any]]:
    """The index of the value of an ascending codebook that is nearest to each weight; of two, the lower."""
    edges = ((codebook[1:].astype(np.float64) + codebook[:-1]) / 2).astype(np.float32)
    found: NDArray[np.unsignedinteger[Any]] = np.searchsorted(edges, weights).astype(
        counts.dtype_for(len(codebook) - 1)
    )
    return found


def packed(found: Clustered) -> NDArray[np.uint8]:
    """The clusters as a payload's array."""
    return u8(counts.encode(found.clusters, len(found.codebook) - 1))
