"""FedPM: a random network's subnetwork, learned as probabilities and sent as samples.

Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse Random Networks for Communication-Efficient Federated Learning",
ICLR 2023. `bernoulli` defines what is masked, trained and aggregated. The paper's own setting is a bundle of signed
constants, biases too (the benchmarks' `mlp-signs`; a seed with `init="sign"` draws smaller ones, and biases of 0),
``head="mask"``, ``biases=true``, ``theta0=0.5``, ``spread=1``, ``ste="ref"``, ``persistent=true``, ``rescale=false``,
``evaluate="sample"``, ``epochs=3`` and ``batch=128``: its published code keeps Adam's moments on the device, multiplies
the gradient of a draw by theta, resets the posterior every round and uses its mode.

- Up: one mask drawn from the device's probabilities with the device's secret randomness, written by `codec`; by default
  coded at the entropy of its frequency of ones, which the paper describes and its code only estimates. With
  ``codec="klms"`` (Isik et al., AISTATS 2024) it is chosen among masks that the server can draw from theta, at about
  two bits for each bit of KL between the device's probabilities and theta. A probed head goes up as float32.
- Down: theta as float32 (``down="float32"``; the paper does not count it), or the counts of ones, which determine
  theta, at their plain entropy (``down="counts"``). A probed head goes down with either.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, counts, klms
from pydantic import AfterValidator

from edge_client.bundle import F32, Bits
from edge_client.methods.shared.bernoulli import MOST_MASKS, BernoulliMasks, Kept, Received, State
from edge_client.methods.shared.theta import Posterior
from edge_client.protocol.payload import Payload, allow_only, coded, count, decoding, u8
from edge_client.task import Assignment, Course, Task

COUNTS = "counts.counts"  # a coded array is named after what it holds and its codec
KLMS = "klms"


def _mask_codec(name: str) -> str:
    """The name of a set codec, or KLMS. Raises ValueError with the choices."""
    try:
        return name if name == KLMS else codecs.checked_name(name)
    except CodecError as error:
        raise ValueError(f"{error}, or {KLMS}") from None


class FedPM(BernoulliMasks):
    """Bernoulli masks: one sample up, probabilities down."""

    name: ClassVar[str] = "fedpm"

    codec: Annotated[str, AfterValidator(_mask_codec)] = "entropy"
    """How the mask travels (docs/codecs.md): by a set codec, or "klms", drawn from candidates of the server's theta."""
    down: Literal["float32", "counts"] = "float32"
    """theta travels as float32 or as the counts of ones, which determine it."""

    @property
    def mask(self) -> str:
        """The name of the array of an uploaded mask."""
        return f"mask.{self.codec}"

    # --- server half

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """theta in either form (no counts before the first masks), and a probed head."""
        if self.down == "float32" or round_ <= self.probing(course.model):
            return super().downlink(course, round_, state, record)
        head = {"head": state.head} if state.head.size else {}
        posterior = state.posterior
        if not posterior.masks:
            return Payload(head)
        ones = u8(counts.encode(posterior.ones, posterior.masks))
        return Payload({**head, COUNTS: ones}, {"masks": posterior.masks})

    def mask_limit(self, n: int) -> int:
        """Little more than a bit a parameter by entropy, at most five bytes by another codec."""
        return n // 7 if self.codec in ("entropy", KLMS) else 5 * n

    def read_mask(self, a: Assignment, state: State, record: None, payload: Payload) -> Bits:
        with decoding(f"the mask of device {a.device!r} in round {a.round}"):
            data = coded(payload, self.mask)
            if self.codec == KLMS:
                return klms.decode(data, self.theta(a.course, state.posterior).astype(np.float32), candidates(a))
            return codecs.decode_mask(self.codec, data, self.exchanged(a.course))

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        if self.down == "float32" or a.round <= self.probing(a.model):
            received: Received = super().receive(a, kept, downlink)
            return received
        allow_only(downlink, "head", COUNTS)
        head = self.sent_head(a, downlink)
        if COUNTS not in downlink.arrays:
            return Received(self.first_theta(a.course), head)
        masks = count(downlink, "masks", MOST_MASKS)
        with decoding(f"the downlink of round {a.round}"):
            ones = counts.decode(coded(downlink, COUNTS, ("head",)), self.exchanged(a.course), masks)
        return Received(self.theta(a.course, Posterior(ones.astype(np.uint32), masks)), head)

    def upload(self, task: Task, received: Received, theta: F32) -> tuple[Bits, Payload]:
        """One mask drawn with the device's secret randomness."""
        key = counter.key(task.secret, "uploaded mask", task.assignment.round)
        if self.codec == KLMS:
            prior, stream = received.theta.astype(np.float32), candidates(task.assignment)
            data = klms.encode(theta, prior, stream, key)
            return klms.decode(data, prior, stream), Payload({self.mask: u8(data)})
        mask: Bits = counter.uniform(key, theta.size) < theta
        return mask, Payload({self.mask: u8(codecs.encode(self.codec, mask, mask.size))})


def candidates(a: Assignment) -> int:
    """The key of the masks among which a device chooses by `klms`."""
    return counter.key(a.seed, "candidates", a.round, a.device)
