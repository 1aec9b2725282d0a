"""Bernoulli masks on frozen weights: what FedPM, DeltaMask and Coupled have in common.

A weight of a masked layer is kept with a probability theta that the federation learns; nothing else about it changes.
What travels, and as which bytes, is each method's own affair: they differ in `downlink`, `read_update` and in how a
local round ends. Here are the parts that are the same.

- **Who is what.** The layers named by `layers` are masked (their weights, and with `biases` their biases); the head,
  the bundle's last layer, is `head="probe"`: trained as float32 in the first `probe_rounds` rounds by federated
  averaging (linear probing) and frozen from then on, or `head="mask"`: masked like any other layer. Every other
  parameter (biases, batch-norm scale and shift, layers not named) stays as the bundle has it. Batch-norm statistics
  follow a device's own training and never leave it.
- **Local training** (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023):
  scores s = logit(theta), a fresh draw m ~ Bern(sigmoid(s)) for each batch, straight-through gradient, Adam on s.
- **Aggregation** is Bayesian: Beta(prior, prior) gets the ones and zeros of the round's masks, and is reset every
  `reset_every` rounds (1/rho). theta is its mode (with prior 1: the share of ones) or its mean, clipped to
  [clip, 1 - clip]. The server therefore keeps integers: `ones` uint32[masked] of `masks` masks since the reset; with
  ``tally="mean"`` also `shares` float64[masked], the sum of every round's share of ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
from edge_kernels import bits, counter
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.bundle import F32, Manifest, Model
from edge_client.errors import ConfigError, PayloadError
from edge_client.methods import Assignment, Local, Method, Personal, Task, Total, bits_digest
from edge_client.protocol.messages import MAX_SAMPLES
from edge_client.protocol.payload import Arrays, Payload
from edge_client.training.gates import sigmoid
from edge_client.training.loop import train
from edge_client.training.sampled_adam import sampled_adam
from edge_client.training.sgd import Sgd

Bits = NDArray[np.bool_]
F64 = NDArray[np.float64]
MOMENTS = ("adam_mean", "adam_square", "adam_steps")  # what a device keeps of Adam when it is persistent
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Spans:
    """A part of the flat parameter vector: whole tensors, in the order of the parameter table."""

    tensors: tuple[slice, ...]
    size: int

    def gather(self, flat: NDArray[_Value]) -> NDArray[_Value]:
        """The part as one contiguous vector of length `size`, a copy."""
        return np.concatenate([flat[s] for s in self.tensors]) if self.tensors else flat[:0].copy()

    def scatter(self, part: NDArray[_Value], flat: NDArray[_Value]) -> None:
        """Write the part back into the flat vector."""
        low = 0
        for s in self.tensors:
            high = low + s.stop - s.start
            flat[s] = part[low:high]
            low = high


def spans(m: Manifest, names: set[str]) -> Spans:
    """The tensors called `names`."""
    chosen = tuple(t.span for t in m.parameters if t.name in names)
    return Spans(chosen, sum(s.stop - s.start for s in chosen))


def posterior_theta(successes: NDArray[np.number], masks: int, prior: float, posterior: str, clip: float) -> F64:
    """theta float64[masked] after `successes` of `masks` masks; exact IEEE arithmetic, the same on every machine."""
    alpha = prior + successes.astype(np.float64)
    total = 2 * prior + masks
    theta = alpha / total if posterior == "mean" else (alpha - 1) / (total - 2)
    clipped: F64 = np.clip(theta, clip, 1 - clip)
    return clipped


class BernoulliMasks(Method):
    """Base of the methods that learn probabilities of masks."""

    layers: tuple[str, ...] = ()
    """Masked layers by name or dotted prefix; none named: all (but a probed head)."""
    biases: bool = False
    """Mask the biases of the masked layers too."""
    head: Literal["probe", "mask"] = "probe"
    probe_rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    probe_epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    probe_lr: Annotated[float, Field(gt=0, le=1000)] = 0.1
    probe_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=65536)] = 64
    lr: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Adam's step on the scores."""
    ste: Literal["identity", "ref"] = "identity"
    """The gradient of a draw reaches theta as it is, or times theta as FedPM's published code has it."""
    persistent: bool = False
    """Adam's moments stay on the device from round to round instead of starting anew."""
    theta0: Annotated[float, Field(gt=0, lt=1)] = 0.95
    spread: Annotated[float, Field(ge=0, le=10)] = 0.0
    """theta is drawn at first: its score has this standard deviation (FedPM: theta0 = 0.5, spread = 1)."""
    prior: Annotated[float, Field(ge=1, le=1000)] = 1.0
    posterior: Literal["mode", "mean"] = "mode"
    tally: Literal["sum", "mean"] = "sum"
    """`mean` adds a round's share of ones (to the zeros: the rest of its masks): DeltaMask's Algorithm 2 as printed."""
    reset_every: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Rounds between resets of the Beta posterior, 1 / rho."""
    clip: Annotated[float, Field(ge=1e-6, le=0.4)] = 0.01
    evaluate: Literal["sample", "threshold", "expected"] = "sample"
    """The global model is one drawn mask, the mask 1[theta >= 1/2], or the weights times theta."""

    @model_validator(mode="after")
    def _posterior_exists(self) -> BernoulliMasks:
        if self.tally == "mean" and self.posterior == "mode" and self.prior == 1:
            raise ValueError('tally="mean" needs posterior="mean": its mode is 0 almost everywhere')
        return self

    def require_counts_to_say_all(self) -> None:
        """Raise ValueError when theta is more than a function of the counts of ones, so they cannot be sent for it."""
        if self.tally == "mean" and self.reset_every > 1:
            raise ValueError(
                f'tally="mean" weighs each round by its own cohort, which counts over {self.reset_every} rounds do not '
                'tell apart; use reset_every=1, or method "fedpm" or "deltamask" with theta down as float32'
            )

    # --- who is what

    def masked(self, m: Manifest) -> Spans:
        """The masked part of the parameters. Raises ConfigError when `layers` names what is not there."""
        layers = m.layers[:-1] if self.head == "probe" else m.layers
        found = [x for x in layers if not self.layers or any(_within(x.name, p) for p in self.layers)]
        idle = [p for p in self.layers if not any(_within(x.name, p) for x in layers)]
        if idle or not found:
            raise ConfigError(f"layers = {idle or self.layers}: the layers to mask are {[x.name for x in layers]}")
        names = {n for x in found for n in (*x.weights, *(x.biases if self.biases else ()))}
        return spans(m, names)

    def probed(self, m: Manifest) -> Spans:
        """The head's parameters, when it is probed."""
        return spans(m, {*m.layers[-1].weights, *m.layers[-1].biases} if self.head == "probe" else set())

    @property
    def probing(self) -> int:
        """The rounds that train the head, the first ones."""
        return self.probe_rounds if self.head == "probe" else 0

    def exchanged(self, model: Model) -> int:
        """The masked parameters."""
        return self.masked(model.manifest).size

    # --- server half

    def start(self, model: Model, seed: int) -> Arrays:
        """No masks yet, and the bundle's head."""
        none = self.tally_of(np.zeros(self.exchanged(model), np.uint32), 0)
        return {**none, "head": self.probed(model.manifest).gather(model.parameters)}

    def first_theta(self, model: Model, seed: int) -> F64:
        """theta before any mask is in, float64[masked]."""
        n = self.exchanged(model)
        if not self.spread:
            return np.full(n, self.theta0)
        # Twelve uniforms make a normal number (Irwin-Hall) without a logarithm. The exponential is the one step that
        # machines may round differently, so its result is put on a grid.
        z = np.full(n, -6.0)
        for i in range(12):
            z += counter.uniform(counter.key(seed, "first scores", i), n)
        theta = 1 / (1 + np.exp(-self.spread * z) * ((1 - self.theta0) / self.theta0))
        on_grid: F64 = np.clip(np.round(theta * 4096) / 4096, self.clip, 1 - self.clip)
        return on_grid

    def theta(self, model: Model, seed: int, state: Arrays) -> F64:
        """The global probabilities, float64[masked], from a tally."""
        masks = int(state["masks"][0])
        if not masks:
            return self.first_theta(model, seed)
        successes = state["shares" if self.tally == "mean" else "ones"]
        return posterior_theta(successes, masks, self.prior, self.posterior, self.clip)

    def read_head(self, a: Assignment, payload: Payload) -> Arrays:
        """A probing round's update: `head` float32 and the samples behind it. Raises PayloadError."""
        due = self.probed(a.model.manifest).size
        head = payload.arrays.get("head")
        if set(payload.arrays) != {"head"} or head is None or head.dtype != np.float32 or head.shape != (due,):
            raise PayloadError(f"round {a.round} trains the head: send the one array head, float32[{due}]")
        if not np.isfinite(head).all():
            raise PayloadError("the head holds NaN or infinity; lower probe_lr")
        samples = payload.meta.get("samples")
        if not isinstance(samples, int) or isinstance(samples, bool) or not 0 < samples <= MAX_SAMPLES:
            raise PayloadError(f"samples = {samples!r}; send how many samples were trained on, 1..{MAX_SAMPLES}")
        return {"head": head, "samples": np.array([samples], np.int64)}

    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Add a head weighted by its samples, or a mask (`mask`, packed bool[masked])."""
        if "head" in update:
            n = update["samples"]
            head = update["head"].astype(np.float64) * n
            return {"head": total.get("head", 0.0) + head, "samples": total.get("samples", 0) + n}, record
        if not total:
            total = {"masks": Tally(self.exchanged(a.model))}
        total["masks"].add(update["mask"])
        return total, record

    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """The averaged head, or the posterior with the round's masks in it."""
        if not total:
            return state
        if "head" in total:
            return {**state, "head": (total["head"] / total["samples"][0]).astype(np.float32)}
        return {**state, **self.tallied(round_, state, total["masks"].counts(), total["masks"].total)}

    def tallied(self, round_: int, state: Arrays, ones: NDArray[np.integer], masks: int) -> Arrays:
        """The tally in `state` and the `masks` masks of a round, which have `ones` ones; those alone after a reset."""
        new = self.tally_of(ones, masks)
        if (round_ - self.probing - 1) % self.reset_every == 0:
            return new
        return {name: new[name] + state[name] for name in new}

    def tally_of(self, ones: NDArray[np.integer], masks: int) -> Arrays:
        """The tally of one round: `ones` uint32[masked], `masks` int64[1], and `shares` where theta is made of them."""
        shares: Arrays = {"shares": ones / max(masks, 1)} if self.tally == "mean" else {}
        return {"ones": ones.astype(np.uint32), "masks": np.array([masks], np.int64), **shares}

    # --- client half

    def sent_head(self, a: Assignment, downlink: Payload) -> F32:
        """The head of a downlink, float32; empty when there is none to probe. Raises PayloadError."""
        due = self.probed(a.model.manifest).size
        head = downlink.arrays.get("head", np.zeros(0, np.float32))
        if head.dtype != np.float32 or head.shape != (due,) or not np.isfinite(head).all():
            raise PayloadError(f"the downlink's head is {head.dtype}{list(head.shape)}; finite float32[{due}] was due")
        return head

    def sent_theta(self, a: Assignment, downlink: Payload) -> F64:
        """theta of a downlink that has it as float32[masked], within (0, 1). Raises PayloadError."""
        due, theta = self.exchanged(a.model), downlink.arrays.get("theta", np.zeros(0))
        if theta.dtype != np.float32 or theta.shape != (due,) or not ((theta > 0) & (theta < 1)).all():
            raise PayloadError(
                f"the downlink's theta is {theta.dtype}{list(theta.shape)}; float32[{due}] in (0, 1) was due"
            )
        wide: F64 = theta.astype(np.float64)
        return wide

    def probe(self, task: Task, kept: Arrays, head: F32) -> Local:
        """One round of linear probing: only the head moves, on the dense frozen network."""
        a, m = task.assignment, task.assignment.model.manifest
        part = self.probed(m)
        values, buffers = a.model.parameters.copy(), self.statistics(a, kept)
        own = head.copy()
        part.scatter(own, values)
        optimiser = Sgd(part.size, self.probe_lr, self.probe_momentum)

        def step(gradient: F32) -> None:
            optimiser.step(own, part.gather(gradient))
            part.scatter(own, values)

        loss = train(task, buffers, lambda: values, step, self.probe_epochs, self.batch, "probe")
        update = Payload({"head": own}, {"samples": len(task.data.y)})
        return Local({"buffers": buffers}, update, Personal(values, buffers), loss)

    def statistics(self, a: Assignment, kept: Arrays) -> F32:
        """The device's own batch-norm statistics, a copy to train on."""
        own: F32 = kept.get("buffers", a.model.buffers).copy()
        return own

    def train_scores(self, task: Task, kept: Arrays, theta: F64, head: F32, buffers: F32) -> tuple[F32, float, Arrays]:
        """Scores after the local epochs, float32[masked], the loss, and what of Adam is kept. `buffers` follow."""
        a, m = task.assignment, task.assignment.model.manifest
        part = self.masked(m)
        weights = part.gather(a.model.parameters)
        values: F32 = a.model.parameters.copy()
        self.probed(m).scatter(head, values)
        scores = np.log(theta / (1 - theta)).astype(np.float32)
        steps = sampled_adam(weights, scores, self.lr, self.ste)
        adam = steps.adam
        if self.persistent and "adam_steps" in kept:
            adam.mean, adam.square = kept["adam_mean"].copy(), kept["adam_square"].copy()
            adam.steps = int(kept["adam_steps"][0])
        effective = np.empty(part.size, np.float32)
        batches = 0

        def sampled() -> F32:
            nonlocal batches
            steps.sample(counter.key(a.seed, "training masks", a.device, a.round, batches), effective)
            batches += 1
            part.scatter(effective, values)
            return values

        def step(gradient: F32) -> None:
            steps.step(part.gather(gradient))

        loss = train(task, buffers, sampled, step, self.epochs, self.batch)
        moments: Arrays = {}
        if self.persistent:
            moments = dict(zip(MOMENTS, (adam.mean, adam.square, np.array([adam.steps])), strict=True))
        return scores, loss, moments

    def masked_model(self, a: Assignment, head: F32, mask: Bits, buffers: F32) -> Personal:
        """The model under one mask, bool[masked]."""
        part = self.masked(a.model.manifest)
        values, alive = a.model.parameters.copy(), np.ones(a.model.manifest.d, np.bool_)
        self.probed(a.model.manifest).scatter(head, values)
        part.scatter(part.gather(values) * mask, values)
        part.scatter(mask, alive)
        return Personal(values, buffers, alive)

    def global_model(self, task: Task, kept: Arrays, theta: F64, head: F32) -> Personal:
        """The federation's model on this device. Until a mask was learned a probed network is still dense."""
        a = task.assignment
        buffers: F32 = kept.get("buffers", a.model.buffers)
        if a.round <= self.probing + 1 and self.head == "probe":
            dense = a.model.parameters.copy()
            self.probed(a.model.manifest).scatter(head, dense)
            return Personal(dense, buffers)
        if self.evaluate == "threshold":
            return self.masked_model(a, head, theta >= 0.5, buffers)
        if self.evaluate == "sample":
            u = counter.uniform(counter.key(a.seed, "evaluated mask", a.round), theta.size)
            return self.masked_model(a, head, u < theta, buffers)
        part = self.masked(a.model.manifest)
        values = a.model.parameters.copy()
        self.probed(a.model.manifest).scatter(head, values)
        part.scatter(part.gather(values) * theta.astype(np.float32), values)
        return Personal(values, buffers)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def check_reference(a: Assignment, update: Payload, reference: Bits) -> None:
    """Raise PayloadError unless the update changes the reference mask bool[masked] that the server has."""
    said, named = update.meta.get("reference"), bits_digest(bits.pack(reference))
    if said != named:
        raise PayloadError(
            f"the changes of device {a.device!r} in round {a.round} are to reference mask {said!r}, the server's is "
            f"{named!r}: start the client again to train the round anew; if that does not help, update maskfleet on "
            "the device"
        )


def count(payload: Payload, name: str) -> int:
    """A positive number in a payload's metadata. Raises PayloadError."""
    value = payload.meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**32:
        raise PayloadError(f"metadata {name} = {value!r}; a positive number was due")
    return value


def logistic(scores: F32) -> F32:
    """Probabilities of scores, float32."""
    out = np.empty_like(scores)
    sigmoid(scores, out)
    return out
