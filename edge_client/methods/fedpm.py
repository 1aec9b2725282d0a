"""FedPM: a random network's subnetwork, learned as probabilities and sent as samples.

Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse Random Networks for Communication-Efficient Federated Learning",
ICLR 2023. `bernoulli` says what is masked, trained and aggregated. The paper's own setting is a bundle whose seed draws
signed constants (`init="sign"`), ``head="mask"``, ``biases=true``, ``theta0=0.5``, ``spread=1``, ``ste="ref"`` and
``persistent=true``: its published code keeps Adam's moments on the device, multiplies the gradient of a draw by theta,
resets the posterior every round and uses its mode.

- Up: one mask drawn from the device's probabilities with the device's secret randomness, written by `codec`; by default
  coded at the entropy of its frequency of ones, which the paper describes and its code only estimates. A probed head
  goes up as float32.
- Down: theta as float32 (``down="float32"``; the paper does not count it), or the counts of ones, which determine
  theta, at their plain entropy (``down="counts"``). A probed head goes down with either.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from edge_kernels import bits, codecs, counter
from edge_kernels.codecs import CodecError, counts
from pydantic import model_validator

from edge_client.bundle import Model
from edge_client.errors import PayloadError
from edge_client.methods import SetCodecName
from edge_client.methods.bernoulli import BernoulliMasks, HeadUpdate, Kept, MaskUpdate, Received, State, count
from edge_client.protocol.payload import Payload, coded, u8
from edge_client.task import Assignment, Course, Local, Personal, Task

COUNTS = "counts.counts"  # a coded array is named after what it holds and its codec


class FedPM(BernoulliMasks):
    """Bernoulli masks: one sample up, probabilities down."""

    name: ClassVar[str] = "fedpm"

    codec: SetCodecName = "entropy"
    down: Literal["float32", "counts"] = "float32"

    @model_validator(mode="after")
    def _counts_say_all(self) -> FedPM:
        if self.down == "counts":
            self.require_counts_to_say_all()
        return self

    @property
    def mask(self) -> str:
        """The name of the array of an uploaded mask."""
        return f"mask.{self.codec}"

    # --- server half

    def downlink(self, course: Course, round_: int, state: State, record: None) -> Payload:
        """theta in either form (no counts before the first masks), and a probed head."""
        head = {"head": state.head} if self.head == "probe" else {}
        posterior = state.posterior
        if round_ <= self.probing:
            return Payload(head)
        if self.down == "float32":
            return Payload({**head, "theta": self.theta(course, posterior).astype(np.float32)})
        if not posterior.masks:
            return Payload(head)
        ones = u8(counts.encode(posterior.ones, posterior.masks))
        return Payload({**head, COUNTS: ones}, {"masks": posterior.masks})

    def update_limit(self, model: Model) -> int:
        """A head, or a mask: little more than a bit a parameter by entropy, at most five bytes by another codec."""
        n = self.exchanged(model)
        mask = n // 7 if self.codec == "entropy" else 5 * n
        return max(4 * self.probed(model.manifest).size, mask + 4096)

    def read_update(self, a: Assignment, state: State, record: None, payload: Payload) -> HeadUpdate | MaskUpdate:
        """A head or a mask. Raises PayloadError."""
        if a.round <= self.probing:
            return self.read_head(a, payload)
        try:
            mask = codecs.decode_mask(self.codec, coded(payload, self.mask), self.exchanged(a.model))
        except CodecError as error:
            raise PayloadError(f"the mask of device {a.device!r} in round {a.round}: {error}") from None
        return MaskUpdate(bits.pack(mask))

    # --- client half

    def receive(self, a: Assignment, kept: Kept | None, downlink: Payload) -> Received:
        """theta and the head. Raises PayloadError."""
        head = self.sent_head(a, downlink)
        if "theta" in downlink.arrays:
            return Received(self.sent_theta(a, downlink), head)
        if COUNTS not in downlink.arrays:
            return Received(self.first_theta(a.course), head)
        masks = count(downlink, "masks")
        data = coded(downlink, COUNTS, ("head",) if self.head == "probe" else ())
        try:
            ones = counts.decode(data, self.exchanged(a.model), masks)
        except CodecError as error:
            raise PayloadError(f"the downlink of round {a.round}: {error}") from None
        return Received(self.theta(a.course, self.counted(ones, masks)), head)

    def local_round(self, task: Task, kept: Kept | None, received: Received) -> Local:
        """Probe, or train the probabilities, draw one mask from them and send it."""
        a = task.assignment
        if a.round <= self.probing:
            return self.probe(task, kept, received.head)
        own = self.train(task, kept, received.theta, received.head)
        mask = counter.uniform(counter.key(task.secret, "uploaded mask", a.round), own.theta.size) < own.theta
        update = Payload({self.mask: u8(codecs.encode(self.codec, mask, mask.size))})
        model = self.under(a.model, received.head, mask, own.buffers)
        return Local(Kept(own.buffers, own.adam), update, model, own.loss)

    def personal(self, task: Task, kept: Kept | None, received: Received) -> Personal:
        """The global model, with the device's own batch-norm statistics."""
        return self.global_model(task.assignment, kept, received.theta, received.head)
