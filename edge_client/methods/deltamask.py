"""DeltaMask: a pre-trained network fine-tuned by masks whose changes travel in a probabilistic filter.

Tsouvalas, Asano, Saeed, "Federated Fine-Tuning of Foundation Models via Probabilistic Masking", arXiv 2311.17299.
`bernoulli` defines what is masked, probed, trained and aggregated; the paper masks the last blocks (`layers`) and
probes the head for one round. Where the paper contradicts itself, docs/methods/deltamask.md argues for the default;
Algorithm 2 as printed is ``tally="mean", posterior="mean"``.

- Both sides draw the reference mask m_g ~ Bern(theta) from a shared key. A device draws m_k ~ Bern(theta_k). Of the
  positions where m_k differs from m_g it keeps the share kappa with the largest KL(theta_k || theta) (eq. 4). `codec`
  writes them: a binary fuse filter, by default inside a grayscale image as in the paper. A filter has false positives;
  the server flips these too. By differences (`bernoulli`) such flips would move theta where devices learn nothing, so
  the default is then the exact codec `entropy`.
- `sampling`: ``device``, the default, gives each device and round uniforms of its own, for both masks: only then do so
  few bits change as the paper reports. ``stratified`` shifts one stream by the device's place in the cohort, so that
  the uniforms of a round's devices are spread evenly. ``independent`` draws m_k with the device's secret randomness
  (Algorithm 1 as written). ``common`` takes the uniforms of m_g, the same for every device, which correlates all masks.
- The update names m_g by a hash (`reference`), which reveals two sides with different reference masks.
- Down: theta and the head as float32, every round. The paper does not count them; a round's record does.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from edge_kernels import codecs, counter
from edge_kernels.coupling import coupling_contexts
from edge_kernels.pruning import keep_largest
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.bundle import F32, Bits, Model
from edge_client.methods import SetCodecName
from edge_client.methods.shared import changes
from edge_client.methods.shared.bernoulli import BernoulliMasks, Received, State
from edge_client.methods.shared.theta import F64
from edge_client.protocol.payload import Payload
from edge_client.task import Assignment, Course, Task


class DeltaMask(BernoulliMasks):
    """Bernoulli masks: filtered changes up, probabilities down."""

    name: ClassVar[str] = "deltamask"
    of_posterior: ClassVar[tuple[str, ...]] = (*BernoulliMasks.of_posterior, "tally")

    codec: SetCodecName | None = None
    """The set codec of the changes (docs/codecs.md). None: "fuse8-png", the paper's; by differences "entropy"."""
    sampling: Literal["independent", "common", "device", "stratified"] = "device"
    """Where a mask's uniforms are from: the device's secret, or a stream that both sides know, one for all devices of a
    round (`common`), one for each (`device`), or one shifted by the device's place (`stratified`)."""
    kappa: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The share of the changes that is sent."""
    kappa_end: Annotated[float, Field(gt=0, le=1)] | None = None
    """kappa moves from `kappa` to this along half a cosine over the rounds; None keeps it."""

    tally: Literal["sum", "mean"] = "sum"
    """`mean`: a round adds its share of ones to the ones and the rest of its masks to the zeros."""

    @model_validator(mode="after")
    def _posterior_exists(self) -> DeltaMask:
        if self.tally == "mean" and self.posterior == "mode" and self.prior == 1:
            raise ValueError('tally="mean" needs posterior="mean": its mode is 0 almost everywhere')
        return self

    def codec_of(self, model: Model) -> str:
        """The codec of the changes for this bundle."""
        return self.codec or ("entropy" if self.by_difference(model) else "fuse8-png")

    def caution(self, course: Course) -> str | None:
        """That no mask is sent, or that a filter by differences moves theta everywhere."""
        others = super().caution(course)
        if self.codec is None or codecs.codec(self.codec).exact or not self.by_difference(course.model):
            return others
        false = (
            f"the false positives of codec {self.codec!r} move theta in every round, also where devices learn nothing; "
            'codec = "entropy" has none'
        )
        return f"{others}; {false}" if others else false

    def counted(self, ones: NDArray[np.integer[Any]], masks: int) -> NDArray[Any]:
        return ones / masks if self.tally == "mean" else super().counted(ones, masks)

    @property
    def referenced(self) -> bool:
        """With uniforms of their own two masks agree where devices learn nothing; with other ones they do not."""
        return self.sampling in ("device", "stratified")

    def reference(self, a: Assignment, state: State) -> Bits:
        theta = self.sent_theta(a, state)
        return self.uniforms(a, theta.size) < theta

    def sent_theta(self, a: Assignment, state: State) -> F64:
        """theta as a device has it: through float32."""
        return self.theta(a.course, state.posterior).astype(np.float32).astype(np.float64)

    def kappa_at(self, a: Assignment) -> float:
        """The share kappa of a round."""
        if self.kappa_end is None:
            return self.kappa
        probing = self.probing(a.model)
        along = (a.round - probing - 1) / max(a.rounds - probing - 1, 1)
        return self.kappa_end + (self.kappa - self.kappa_end) * (1 + math.cos(math.pi * along)) / 2

    def uniforms(self, a: Assignment, n: int) -> F64:
        """The uniforms of a device's reference mask, float64[n], which both sides draw."""
        whose = (a.device,) if self.sampling == "device" else ()
        u = counter.uniform(counter.key(a.seed, "uniforms", a.round, *whose), n)
        return (u + (a.place + 0.5) / a.course.cohort) % 1.0 if self.sampling == "stratified" else u

    def contexts(self, theta: F64, uniforms: F64) -> NDArray[np.uint8]:
        """What both sides know of a change's odds, for the codecs that can use it."""
        if self.sampling == "independent":
            sixteenth: NDArray[np.uint8] = np.clip(theta * 16, 0, 15).astype(np.uint8)
            return 2 * sixteenth + (uniforms < theta).astype(np.uint8)
        return coupling_contexts(theta, uniforms)

    # --- server half

    def mask_limit(self, n: int) -> int:
        """A filter with a 32-bit fingerprint for every parameter."""
        return 5 * n

    def read_mask(self, a: Assignment, state: State, record: None, payload: Payload) -> Bits:
        """The reference, flipped at every position that the filter names. Raises PayloadError."""
        theta = self.sent_theta(a, state)
        u = self.uniforms(a, theta.size)
        what = f"the update of device {a.device!r} in round {a.round}"
        return changes.decode(self.codec_of(a.model), payload, u < theta, what, contexts=self.contexts(theta, u))

    # --- client half

    def upload(self, task: Task, received: Received, theta: F32) -> tuple[Bits, Payload]:
        """The changes from the reference to a mask drawn from `theta` that matter most."""
        a, before, trained = task.assignment, received.theta, theta.astype(np.float64)
        u = self.uniforms(a, theta.size)
        reference, drawn = u < before, u
        if self.sampling == "independent":
            drawn = counter.uniform(counter.key(task.secret, "uploaded mask", a.round), theta.size)
        mask = reference ^ most_telling((drawn < trained) ^ reference, trained, before, self.kappa_at(a))
        return mask, changes.encode(self.codec_of(a.model), mask, reference, self.contexts(before, u))


def most_telling(flips: Bits, own: F64, theta: F64, kappa: float) -> Bits:
    """The share `kappa` (rounded) of `flips` bool[n] with the largest KL(Bern(own) || Bern(theta)), eq. 4."""
    at = np.flatnonzero(flips)
    p, q = np.clip(own[at], 1e-6, 1 - 1e-6), np.clip(theta[at], 1e-6, 1 - 1e-6)
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    kept = np.zeros(flips.size, np.bool_)
    kept[at] = keep_largest(divergence, round(kappa * at.size))
    return kept
