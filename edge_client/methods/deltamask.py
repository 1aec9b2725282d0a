"""DeltaMask: a pre-trained network fine-tuned by masks whose changes travel in a probabilistic filter.

Tsouvalas, Asano, Saeed, "Federated Fine-Tuning of Foundation Models via Probabilistic Masking", arXiv 2311.17299.
`bernoulli` says what is masked, probed, trained and aggregated; the paper masks the last blocks (`layers`) and probes
the head for one round. Where the paper contradicts itself, docs/methods/deltamask.md argues for the default;
Algorithm 2 to the letter is ``tally="mean", posterior="mean"``.

- Both sides draw the reference mask m_g ~ Bern(theta) from a shared key. A device draws m_k ~ Bern(theta_k). Of the
  positions where m_k differs from m_g it keeps the share kappa with the largest KL(theta_k || theta) (eq. 4). `codec`
  writes them: a binary fuse filter, by default inside a grayscale image as in the paper. A filter has false positives;
  the server flips these too.
- `sampling`: ``independent`` draws m_k with the device's secret randomness (Algorithm 1 as written). ``common`` takes
  the uniforms of m_g, the same for every device, which correlates all masks. ``device`` gives each device and round
  uniforms of its own, for both masks.
- The update names m_g by a hash (`reference`), which reveals two sides with different reference masks.
- Down: theta and the head as float32, every round. The paper does not count them; a round's record does.
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

from edge_client.bundle import Model
from edge_client.errors import PayloadError
from edge_client.methods import SetCodecName, bits_digest
from edge_client.methods.bernoulli import (
    F64,
    BernoulliMasks,
    Bits,
    HeadUpdate,
    Kept,
    MaskUpdate,
    Received,
    State,
    check_reference,
)
from edge_client.protocol.payload import Payload, coded, u8
from edge_client.task import Assignment, Course, Local, Personal, Task


class DeltaMask(BernoulliMasks):
    """Bernoulli masks: filtered changes up, probabilities down."""

    name: ClassVar[str] = "deltamask"

    codec: SetCodecName = "fuse8-png"
    sampling: Literal["independent", "common", "device"] = "independent"
    kappa: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The share of the changes that is sent."""
    kappa_end: Annotated[float, Field(gt=0, le=1)] | None = None
    """kappa moves from `kappa` to this along half a cosine over the rounds; None keeps it."""

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
        """The uniforms of a device's reference mask, float64[n], which both sides draw."""
        whose = (a.device,) if self.sampling == "device" else ()
        return counter.uniform(counter.key(a.seed, "uniforms", a.round, *whose), n)

    def contexts(self, theta: F64, uniforms: F64) -> NDArray[np.uint8]:
        """What both sides know of a change's odds, for the codecs that can use it."""
        if self.sampling == "independent":
            sixteenth: NDArray[np.uint8] = np.clip(theta * 16, 0, 15).astype(np.uint8)
            return 2 * sixteenth + (uniforms < theta).astype(np.uint8)
        return coupling_contexts(theta, uniforms)

    # --- server half

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """theta and the probed head, float32."""
        head = {"head": state.head} if self.head == "probe" else {}
        if round_ <= self.probing:
            return Payload(head)
        return Payload({**head, "theta": self.theta(course, state.posterior).astype(np.float32)})

    def update_limit(self, model: Model) -> int:
        """A head, or a filter with a 32-bit fingerprint for every parameter."""
        return max(4 * self.probed(model.manifest).size, 5 * self.exchanged(model) + 4096)

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> HeadUpdate | MaskUpdate:
        """A head, or a mask: the reference, flipped at every position that the filter names. Raises PayloadError."""
        if a.round <= self.probing:
            return self.read_head(a, payload)
        theta = self.theta(a.course, state.posterior).astype(np.float32).astype(np.float64)  # as it travels
        u = self.uniforms(a, theta.size)
        reference = u < theta
        check_reference(a, payload, reference)
        try:
            flips = codecs.decode_mask(self.codec, coded(payload, self.changes), theta.size, self.contexts(theta, u))
        except CodecError as error:
            raise PayloadError(f"the changes of device {a.device!r} in round {a.round}: {error}") from None
        return MaskUpdate(bits.pack(reference ^ flips))

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """theta and the head. Raises PayloadError."""
        head = self.sent_head(a, downlink)
        if a.round <= self.probing:
            return Received(self.first_theta(a.course), head)
        return Received(self.sent_theta(a, downlink), head)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Probe, or train the probabilities, draw a mask and send the changes that matter most."""
        a, theta = task.assignment, received.theta
        if a.round <= self.probing:
            return self.probe(task, kept, received.head)
        own = self.train(task, kept, theta, received.head)
        u = self.uniforms(a, theta.size)
        reference, drawn = u < theta, u
        if self.sampling == "independent":
            drawn = counter.uniform(counter.key(task.secret, "uploaded mask", a.round), theta.size)
        trained = own.theta.astype(np.float64)
        flips = most_telling((drawn < trained) ^ reference, trained, theta, self.kappa_at(a))
        coded_flips = u8(codecs.encode(self.codec, flips, flips.size, self.contexts(theta, u)))
        model = self.under(a.model, received.head, reference ^ flips, own.buffers)
        update = Payload({self.changes: coded_flips}, {"reference": bits_digest(bits.pack(reference))})
        return Local(Kept(own.buffers, own.adam), update, model, own.loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model, with the device's own batch-norm statistics."""
        return self.global_model(task.assignment, kept, received.theta, received.head)


def most_telling(flips: Bits, own: F64, theta: F64, kappa: float) -> Bits:
    """Of `flips` bool[n] the share `kappa` (rounded) with the largest KL(Bern(own) || Bern(theta)), eq. 4."""
    at = np.flatnonzero(flips)
    p, q = np.clip(own[at], 1e-6, 1 - 1e-6), np.clip(theta[at], 1e-6, 1 - 1e-6)
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    kept = np.zeros(flips.size, np.bool_)
    kept[at[np.argsort(-divergence, kind="stable")[: round(kappa * at.size)]]] = True
    return kept
