"""Bernoulli masks on frozen weights: what FedPM, DeltaMask and Coupled have in common.

A weight of a masked layer is kept with a probability theta, which the federation learns; the weight itself never
changes. The methods differ in what travels and how it is coded: in `downlink`, `read_update` and the end of a local
round. What they share is here.

- **What is masked**, and the model of a mask: `bernoulli_network`.
- **Local training** (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023):
  scores s = logit(theta), a fresh draw m ~ Bern(sigmoid(s)) for each batch, straight-through gradient, Adam on s.
- **Aggregation** is Bayesian: Beta(prior, prior) receives the ones and zeros of the round's masks and is reset every
  `reset_every` rounds (1 / rho). theta is its mode (with prior 1: the share of ones) or its mean, clipped to
  [clip, 1 - clip]. The server therefore holds integers.
- **By differences** (a pre-trained bundle, when the server holds the reference mask beside which a device draws its
  own): theta moves by the cohort's mean of mask less reference. Where devices learn nothing, mask and reference agree
  and theta stays; the share of ones in K masks would drift to 0 or 1. `theta` counts steps of 1 / K around theta0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from edge_kernels import bits, counter
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.bundle import F32, Bits, Model, Packed
from edge_client.errors import PayloadError
from edge_client.methods import Influence, Range, Search, pretrained
from edge_client.methods.shared.averaging import Mean, distance, toward
from edge_client.methods.shared.bernoulli_network import MaskedNetwork, own_statistics
from edge_client.methods.shared.local_sgd import descend_on
from edge_client.methods.shared.theta import F64, Ints, Posterior, drawn, stepped, steps
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Payload, allow_only, count, vector
from edge_client.task import Assignment, Course, EpochLoss, Local, Personal, Task
from edge_client.training.gates import Bernoulli, sigmoid
from edge_client.training.sgd import Adam, Sgd
from edge_client.training.steps import masked_step

MOST_MASKS = 2**32 - 1  # of one posterior


@dataclass(frozen=True)
class State:
    """The server's global values. `head` float32 is empty when the head is masked."""

    posterior: Posterior
    """theta is the posterior's mode or its mean."""
    head: F32


@dataclass(frozen=True)
class HeadUpdate:
    """The update of a probing round: the trained head and the number of samples behind it."""

    head: F32
    samples: float


@dataclass(frozen=True)
class Moments:
    """Adam's moments, float32[masked] each, after `steps` steps."""

    mean: F32
    square: F32
    steps: int


@dataclass(frozen=True)
class Kept:
    """A device's own batch-norm statistics, and Adam's moments when they are persistent."""

    buffers: F32
    adam: Moments | None = None


@dataclass(frozen=True)
class Received:
    """A downlink decoded: theta float64[masked] and the head, float32."""

    theta: F64
    head: F32


@dataclass
class Votes:
    """A round's masks, counted, and the sum int64[masked] of their references; 0 where there are none."""

    masks: Tally
    reference: Ints


class BernoulliMasks(MaskedNetwork):
    """Base of the methods that learn probabilities of masks."""

    state_type: ClassVar[type[Any]] = State
    kept_type: ClassVar[type[Any]] = Kept
    one_time: ClassVar[frozenset[str]] = frozenset({"head"})
    of_posterior: ClassVar[tuple[str, ...]] = ("prior", "posterior", "reset_every")
    search: ClassVar[Search] = {
        "lr": Range(0.01, 1.0, log=True),
        "epochs": Range(1, 5),
        "theta0": (0.5, 0.8, 0.95),
        "head": ("auto", "probe", "mask"),
    }

    probe_epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes of a probing round."""
    probe_lr: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Learning rate of the head in a probing round."""
    probe_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Its momentum."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=65536)] = 64
    lr: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Adam's step on the scores."""
    ste: Literal["identity", "ref"] = "identity"
    """The gradient of a draw reaches theta unchanged, or times theta as in FedPM's published code."""
    persistent: bool = False
    """The device keeps Adam's moments from round to round."""
    spread: Annotated[float, Field(ge=0, le=10)] = 0.0
    """The standard deviation of the first scores around logit(theta0) (FedPM: theta0 = 0.5, spread = 1)."""
    prior: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """The posterior begins at Beta(prior, prior)."""
    posterior: Literal["mode", "mean"] = "mode"
    """theta is the posterior's mode or its mean."""
    reset_every: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Rounds between resets of the Beta posterior, 1 / rho."""
    aggregate: Literal["auto", "posterior", "difference"] = "auto"
    """`auto`: by differences for a pre-trained bundle when masks have a reference and no setting of the posterior is
    set, else by the posterior."""
    clip: Annotated[float, Field(ge=1e-6, le=0.4)] = 0.01
    """theta stays between this and 1 less this."""

    @model_validator(mode="after")
    def _can_aggregate(self) -> BernoulliMasks:
        if self.aggregate == "difference" and not self.referenced:
            raise ValueError(
                "aggregate='difference' needs a reference mask that the server can draw, and this method has none; "
                "set aggregate='posterior'"
            )
        if self.aggregate == "difference" and self.spread:
            raise ValueError("aggregate='difference' counts steps from one theta0; set spread = 0")
        if self.aggregate == "difference" and (idle := ", ".join(self.shaping())):
            raise ValueError(f"aggregate='difference' has no posterior, so {idle} change nothing; leave them out")
        return self

    @model_validator(mode="after")
    def _starts_inside(self) -> BernoulliMasks:
        if not self.clip <= self.theta0 <= 1 - self.clip:
            raise ValueError(
                f"theta0 = {self.theta0} lies outside {self.clip} .. {1 - self.clip}, where clip keeps theta from the "
                "first masks on; lower clip, or move theta0"
            )
        return self

    def shaping(self) -> list[str]:
        """The settings of the posterior that differ from their defaults."""
        return [n for n in self.of_posterior if getattr(self, n) != type(self).model_fields[n].default]

    @property
    def referenced(self) -> bool:
        """Whether the server can draw a reference mask with the uniforms of the device's own mask."""
        return False

    def reference(self, a: Assignment, state: Any) -> Bits:
        """That mask, bool[masked]; all zeros where there is none."""
        return np.zeros(self.exchanged(a.course), np.bool_)

    # --- theta

    def first_theta(self, course: Course) -> F64:
        """theta before the first masks, float64[masked]."""
        return drawn(course.seed, self.exchanged(course), self.theta0, self.spread, self.clip)

    def theta(self, course: Course, posterior: Posterior) -> F64:
        """The global probabilities, float64[masked]; exact IEEE arithmetic, the same on every machine."""
        if not posterior.masks:
            return self.first_theta(course)
        if self.by_difference(course.model):
            moved = posterior.ones.astype(np.float64) - self.ends(course)[0]
            return self._clipped(self.theta0 + moved / course.cohort)
        alpha, total = self.prior + posterior.ones.astype(np.float64), 2 * self.prior + posterior.masks
        return self._clipped(alpha / total if self.posterior == "mean" else (alpha - 1) / (total - 2))

    def ends(self, course: Course) -> tuple[int, int]:
        """By differences: the steps below theta0, and all of them."""
        return steps(self.theta0, course.cohort, self.clip)

    def _clipped(self, theta: F64) -> F64:
        inside: F64 = np.clip(theta, self.clip, 1 - self.clip)
        return inside

    def by_difference(self, model: Model) -> bool:
        """Whether theta moves by differences."""
        automatic = self.referenced and pretrained(model) and not self.spread and not self.shaping()
        return self.aggregate == "difference" or (self.aggregate == "auto" and automatic)

    def advanced(
        self, course: Course, round_: int, before: Posterior, reference: Ints, net: Ints, masks: int
    ) -> Posterior:
        """The posterior after a round of `masks` masks, whose ones are ``reference + net`` at each element."""
        if self.by_difference(course.model):
            stream = counter.key(course.seed, "partial cohort", round_)
            return stepped(before, self.ends(course), course.cohort, net, masks, stream)
        new = Posterior(self.counted(reference + net, masks), masks)
        return new if self.resets(course, round_) else Posterior(new.ones + before.ones, new.masks + before.masks)

    def resets(self, course: Course, round_: int) -> bool:
        """Whether the posterior begins anew with the masks of this round (DeltaMask, Algorithm 2, line 3)."""
        return (round_ - self.probing(course.model)) % self.reset_every == 0

    def counted(self, ones: NDArray[np.integer[Any]], masks: int) -> NDArray[Any]:
        """What a round of `masks` masks adds to the posterior's ones."""
        return ones.astype(np.uint32)

    # --- server half

    def start(self, course: Course) -> Any:
        """No masks yet, and the bundle's head."""
        none = Posterior(np.zeros(self.exchanged(course), np.uint32), 0)
        return self.state_type(none, self.probed(course.model).gather(course.model.parameters))

    def downlink(self, course: Course, round_: int, state: Any, record: Any) -> Payload:
        """A probed head and, after the probing rounds, theta; float32."""
        head = {"head": state.head} if state.head.size else {}
        if round_ <= self.probing(course.model):
            return Payload(head)
        return Payload({**head, "theta": self.theta(course, state.posterior).astype(np.float32)})

    def update_limit(self, course: Course) -> int:
        """A head or a mask."""
        return max(4 * self.probed(course.model).size, self.mask_limit(self.exchanged(course)) + 4096)

    @abstractmethod
    def mask_limit(self, n: int) -> int:
        """The most bytes that a mask of `n` elements may take, small constants apart."""
        ...

    def read_update(self, a: Assignment, state: Any, record: Any, payload: Payload) -> HeadUpdate | Packed:
        """A head, or a mask packed bool[masked]. Raises PayloadError."""
        if a.round > self.probing(a.model):
            return bits.pack(self.read_mask(a, state, record, payload))
        allow_only(payload, "head")
        head = vector(payload, "head", self.probed(a.model).size)
        return HeadUpdate(head, count(payload, "samples", MAX_SAMPLES))

    @abstractmethod
    def read_mask(self, a: Assignment, state: Any, record: Any, payload: Payload) -> Bits:
        """The mask that an update stands for, bool[masked]. Raises PayloadError."""
        ...

    def influence(self, a: Assignment, state: Any, update: HeadUpdate | Packed) -> Influence | None:
        """A head's change in norm, and its samples. None for a mask: it adds 0 or 1 to each count."""
        if not isinstance(update, HeadUpdate):
            return None
        return Influence(distance(update.head, state.head), update.samples)

    def limited(self, a: Assignment, state: Any, update: HeadUpdate, scale: float, weight: float) -> HeadUpdate:
        """The head with its change multiplied by `scale`."""
        return HeadUpdate(toward(state.head, update.head, scale), weight)

    def fold(self, a: Assignment, state: Any, total: Any, update: HeadUpdate | Packed, record: Any) -> tuple[Any, Any]:
        """Add a head weighted by its samples, or a mask."""
        if isinstance(update, HeadUpdate):
            total = total or Mean(update.head.size)
            total.add(update.samples, update.head)
        else:
            if total is None:
                n = self.exchanged(a.course)
                total = Votes(Tally(n), np.zeros(n, np.int64))
            total.masks.add(update)
            total.reference += self.reference(a, state)
        return total, record

    def finish(
        self, course: Course, round_: int, took_part: Sequence[str], state: Any, total: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """The averaged head, or the posterior with the round's masks in it."""
        if isinstance(total, Mean):
            return replace(state, head=total.value), {}
        net, masks = total.masks.counts().astype(np.int64) - total.reference, total.masks.total
        return replace(state, posterior=self.advanced(course, round_, state.posterior, total.reference, net, masks)), {}

    def of_device(self, course: Course, state: State, record: Any, everyone: Personal) -> Personal | None:
        return None if course.model.manifest.buffers else everyone

    # --- client half

    def receive(self, a: Assignment, kept: Any, downlink: Payload) -> Any:
        """theta and the head. Raises PayloadError."""
        allow_only(downlink, "head", "theta")
        head = self.sent_head(a, downlink)
        if a.round <= self.probing(a.model):
            return Received(self.first_theta(a.course), head)
        theta = vector(downlink, "theta", self.exchanged(a.course))
        if not ((theta > 0) & (theta < 1)).all():
            raise PayloadError("the downlink's theta leaves the interval (0, 1)")
        return Received(theta.astype(np.float64), head)

    def sent_head(self, a: Assignment, downlink: Payload) -> F32:
        """The head of a downlink, float32; empty when the head is not probed. Raises PayloadError."""
        size = self.probed(a.model).size
        return vector(downlink, "head", size) if size else np.zeros(0, np.float32)

    def local_round(self, task: Task, kept: Any, received: Any) -> Local:
        """Probe, or train the probabilities and send a mask drawn from them."""
        a = task.assignment
        if a.round <= self.probing(a.model):
            return self.probe(task, kept, received.head)
        theta, own, loss = self.train(task, kept, received.theta, received.head)
        mask, update = self.upload(task, received, theta)
        return Local(own, update, self.under(a.model, received.head, mask, own.buffers), loss)

    @abstractmethod
    def upload(self, task: Task, received: Any, theta: F32) -> tuple[Bits, Payload]:
        """The mask bool[masked] that a device with probabilities `theta` sends, and its update."""
        ...

    def personal(self, task: Task, kept: Any, received: Any) -> Personal:
        """The global model, with the device's own batch-norm statistics."""
        return self.global_model(task.assignment, kept, received.theta, received.head)

    def probe(self, task: Task, kept: Any, head: F32) -> Local:
        """One round of linear probing: SGD with momentum on the head, behind the dense frozen network."""
        model = task.assignment.model
        part, values, buffers = self.probed(model), self.dense(model, head), own_statistics(model, kept)
        optimiser = Sgd(part.size, self.probe_lr, self.probe_momentum)
        batches = task.batches(self.probe_epochs, self.batch, "probe")
        own, loss = descend_on(part, task, batches, values, buffers, optimiser)
        return Local(self.kept_type(buffers), Payload({"head": own}), Personal(values, buffers), loss)

    def train(self, task: Task, kept: Any, theta: F64, head: F32) -> tuple[F32, Any, float]:
        """Adam on the scores: the probabilities after it, what the device keeps, and the last epoch's mean loss.

        Each batch is computed with the weights under a draw from the device's secret randomness.
        """
        a, model = task.assignment, task.assignment.model
        part, values, buffers = self.masked(model), self.frozen(model, head), own_statistics(model, kept)
        scores = np.log(theta / (1 - theta)).astype(np.float32)
        adam = Adam(part.size, self.lr)
        if self.persistent and kept is not None and kept.adam is not None:
            adam.mean, adam.square, adam.steps = kept.adam.mean.copy(), kept.adam.square.copy(), kept.adam.steps
        step = masked_step(Bernoulli(self.ste), part.gather(values), scores, adam)
        effective, loss = np.empty(part.size, np.float32), EpochLoss()
        for batch in task.batches(self.epochs, self.batch):
            step.effective(effective, counter.key(task.secret, "training masks", a.round, batch.index))
            part.scatter(effective, values)
            g = task.gradient(values, buffers, batch)
            loss.add(batch, g)
            buffers[:] = g.buffers
            step.step(part.gather(g.parameters))
        moments = Moments(adam.mean, adam.square, adam.steps) if self.persistent else None
        return sigmoid(scores), self.kept_type(buffers, moments), loss.mean
