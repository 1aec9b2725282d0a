"""DeltaMask: a pre-trained network fine-tuned by masks whose changes travel in a probabilistic filter.

Tsouvalas, Asano, Saeed, "Federated Fine-Tuning of Foundation Models via Probabilistic Masking", arXiv 2311.17299. What
is masked, probed, trained and aggregated is in `bernoulli`; the paper masks the last blocks (`layers`) and probes the
head for one round. Where the paper contradicts itself, the default is the reading argued in docs/methods/deltamask.md:
Algorithm 2 to the letter is ``tally="mean", posterior="mean"``.

- Both sides draw the reference mask m_g ~ Bern(theta) from a shared key. A device draws m_k ~ Bern(theta_k); of the
  positions where it differs from m_g it keeps the share kappa with the largest KL(theta_k || theta) (eq. 4) and writes
  them with `codec`: a binary fuse filter, by default inside a grayscale image as in the paper. A filter answers for
  all positions, its false positives too, and the server flips every one it is told of.
- `sampling`: ``independent`` draws m_k with the device's own randomness (Algorithm 1 as written), ``common`` with the
  very uniforms of m_g, the same for every device (which correlates all devices' masks), ``device`` gives each device
  and round uniforms of its own for both masks.
- The update names m_g by a hash (`reference`), so that two sides whose m_g differ find out.
- Down go theta and the head as float32, every round. The paper does not count them; the record of a round does.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import bits, codecs, counter
from edge_kernels.codecs import CodecError
from edge_kernels.coupling import coupling_contexts
from numpy.typing import NDArray
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Personal, Task, bits_digest
from edge_client.methods.bernoulli import F64, BernoulliMasks, Bits, check_reference, logistic
from edge_client.protocol.payload import Arrays, Payload, coded, u8


class DeltaMask(BernoulliMasks):
    """Bernoulli masks: filtered changes up, probabilities down."""

    name: ClassVar[str] = "deltamask"
    one_time: ClassVar[frozenset[str]] = frozenset({"head"})

    codec: Literal["fuse8-png", "fuse8", "fuse16", "fuse32", "bits", "rice", "entropy", "auto"] = "fuse8-png"
    sampling: Literal["independent", "common", "device"] = "independent"
    kappa: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The share of the changes that is sent."""
    kappa_end: Annotated[float, Field(gt=0, le=1)] | None = None
    """kappa goes there from `kappa` along half a cosine over the rounds; None keeps it."""

    @property
    def changes(self) -> str:
        """The name of the array of changes: what it holds, and the codec."""
        return f"changes.{self.codec}"

    def kappa_at(self, a: Assignment) -> float:
        """The share of round `a.round`."""
        if self.kappa_end is None:
            return self.kappa
        along = (a.round - self.probing - 1) / max(a.rounds - self.probing - 1, 1)
        return self.kappa_end + (self.kappa - self.kappa_end) * (1 + math.cos(math.pi * along)) / 2

    def uniforms(self, a: Assignment, n: int) -> F64:
        """What the reference mask of a device is drawn with, float64[n], as both sides know it."""
        whose = (a.device,) if self.sampling == "device" else ()
        return counter.uniform(counter.key(a.seed, "uniforms", a.round, *whose), n)

    def contexts(self, theta: F64, uniforms: F64) -> NDArray[np.uint8]:
        """What both sides know of a change's odds, for the codecs that can use it."""
        if self.sampling == "independent":
            sixteenth: NDArray[np.uint8] = np.clip(theta * 16, 0, 15).astype(np.uint8)
            return 2 * sixteenth + (uniforms < theta).astype(np.uint8)
        return coupling_contexts(theta, uniforms)

    # --- server half

    def global_theta(self, a: Assignment, state: Arrays) -> F32:
        """theta as it travels."""
        return self.theta(a.model, a.seed, state).astype(np.float32)

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """theta and the probed head, float32."""
        head: Arrays = {"head": state["head"]} if self.head == "probe" else {}
        return Payload(head if a.round <= self.probing else {**head, "theta": self.global_theta(a, state)})

    def update_limit(self, model: Model) -> int:
        """A head, or a filter with a 32-bit print for every parameter."""
        return max(4 * self.probed(model.manifest).size, 5 * self.exchanged(model) + 4096)

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """A head, or the mask `mask`, packed bool[masked]: the reference, flipped wherever the filter says so."""
        if a.round <= self.probing:
            return self.read_head(a, update)
        theta = self.global_theta(a, state).astype(np.float64)
        u = self.uniforms(a, theta.size)
        reference = u < theta
        check_reference(a, update, reference)
        try:
            flips = codecs.decode_mask(self.codec, coded(update, self.changes), theta.size, self.contexts(theta, u))
        except CodecError as error:
            raise PayloadError(f"the changes of device {a.device!r} in round {a.round}: {error}") from None
        return {"mask": bits.pack(reference ^ flips)}

    # --- client half

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Probe, or train, and upload the changes that matter most."""
        a = task.assignment
        head = self.sent_head(a, downlink)
        if a.round <= self.probing:
            return self.probe(task, kept, head)
        theta, buffers = self.sent_theta(a, downlink), self.statistics(a, kept)
        scores, loss, moments = self.train_scores(task, kept, theta, head, buffers)
        own = logistic(scores).astype(np.float64)
        u = self.uniforms(a, theta.size)
        reference, drawn = u < theta, u
        if self.sampling == "independent":
            drawn = counter.uniform(counter.key(a.seed, "uploaded mask", a.round, a.device), theta.size)
        flips = most_telling((drawn < own) ^ reference, own, theta, self.kappa_at(a))
        coded_flips = u8(codecs.encode(self.codec, flips, flips.size, self.contexts(theta, u)))
        trained = self.masked_model(a, head, reference ^ flips, buffers)
        update = Payload({self.changes: coded_flips}, {"reference": bits_digest(bits.pack(reference))})
        return Local({"buffers": buffers, **moments}, update, trained, loss)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The global model, with the device's own batch-norm statistics."""
        a = task.assignment
        head = self.sent_head(a, downlink)
        theta = self.sent_theta(a, downlink) if a.round > self.probing else self.first_theta(a.model, a.seed)
        return self.global_model(task, kept, theta, head)


def most_telling(flips: Bits, own: F64, theta: F64, kappa: float) -> Bits:
    """Of `flips` bool[n] the share `kappa` (rounded) with the largest KL(Bern(own) || Bern(theta)), eq. 4."""
    at = np.flatnonzero(flips)
    p, q = np.clip(own[at], 1e-6, 1 - 1e-6), np.clip(theta[at], 1e-6, 1 - 1e-6)
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    kept = np.zeros(flips.size, np.bool_)
    kept[at[np.argsort(-divergence, kind="stable")[: round(kappa * at.size)]]] = True
    return kept
