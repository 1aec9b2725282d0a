"""FedPM: a random network's subnetwork, learned as probabilities and sent as samples.

Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse Random Networks for Communication-Efficient Federated Learning",
ICLR 2023. What is masked, trained and aggregated, and how, is in `bernoulli`; the paper's own setting is a bundle
whose seed draws signed constants (`init="sign"`), ``head="mask"``, ``biases=true``, ``theta0=0.5``, ``spread=1``,
``ste="ref"`` and ``persistent=true`` (its published code keeps Adam's moments on the device, multiplies the gradient
of a draw by theta, resets the posterior every round and uses its mode).

- Up: one mask drawn from the device's probabilities, with the device's own randomness, arithmetic-coded by its
  frequency of ones, as the paper says and its code only estimates. A probed head goes up as float32.
- Down: theta, as float32 (``down="float32"``, what the paper leaves uncounted) or as the count of ones, coded at its
  plain entropy and without loss (``down="counts"``). A probed head goes down with it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from edge_kernels import bits, codecs, counter
from edge_kernels.codecs import CodecError, counts
from pydantic import model_validator

from edge_client.bundle import F32, Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Personal, Task
from edge_client.methods.bernoulli import F64, BernoulliMasks, count, logistic
from edge_client.protocol.payload import Arrays, Payload, coded, u8

MASK, COUNTS = "mask.entropy", "counts.counts"  # a coded array is named after what it holds and its codec


class FedPM(BernoulliMasks):
    """Bernoulli masks: one sample up, probabilities down."""

    name: ClassVar[str] = "fedpm"
    one_time: ClassVar[frozenset[str]] = frozenset({"head"})

    down: Literal["float32", "counts"] = "float32"

    @model_validator(mode="after")
    def _counts_say_all(self) -> FedPM:
        if self.down == "counts":
            self.require_counts_to_say_all()
        return self

    # --- server half

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """theta in either form, none before the first masks when counts are sent; and a probed head."""
        head: Arrays = {"head": state["head"]} if self.head == "probe" else {}
        if a.round <= self.probing:
            return Payload(head)
        if self.down == "float32":
            return Payload({**head, "theta": self.theta(a.model, a.seed, state).astype(np.float32)})
        masks = int(state["masks"][0])
        if not masks:
            return Payload(head)
        coded_ones = u8(counts.encode(state["ones"], masks))
        return Payload({**head, COUNTS: coded_ones}, {"masks": masks})

    def update_limit(self, model: Model) -> int:
        """A head, or a mask at little more than a bit a parameter."""
        return max(4 * self.probed(model.manifest).size, self.exchanged(model) // 7 + 4096)

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """A head, or the mask `mask`, packed bool[masked]. Raises PayloadError."""
        if a.round <= self.probing:
            return self.read_head(a, update)
        try:
            mask = codecs.decode_mask("entropy", coded(update, MASK), self.exchanged(a.model))
        except CodecError as error:
            raise PayloadError(f"the mask of device {a.device!r} in round {a.round}: {error}") from None
        return {"mask": bits.pack(mask)}

    # --- client half

    def understand(self, a: Assignment, downlink: Payload) -> tuple[F64, F32]:
        """theta float64[masked] and the head from a downlink. Raises PayloadError."""
        head = self.sent_head(a, downlink)
        others = ("head",) if self.head == "probe" else ()
        n = self.exchanged(a.model)
        if COUNTS in downlink.arrays:
            masks = count(downlink, "masks")
            try:
                ones = counts.decode(coded(downlink, COUNTS, others), n, masks)
            except CodecError as error:
                raise PayloadError(f"the downlink of round {a.round}: {error}") from None
            return self.theta(a.model, a.seed, self.tally_of(ones, masks)), head
        if "theta" in downlink.arrays:
            return self.sent_theta(a, downlink), head
        return self.first_theta(a.model, a.seed), head

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Probe, or train, draw a mask and upload it."""
        a = task.assignment
        theta, head = self.understand(a, downlink)
        if a.round <= self.probing:
            return self.probe(task, kept, head)
        buffers = self.statistics(a, kept)
        scores, loss, moments = self.train_scores(task, kept, theta, head, buffers)
        u = counter.uniform(counter.key(a.seed, "uploaded mask", a.round, a.device), theta.size)
        mask = u < logistic(scores)
        update = Payload({MASK: u8(codecs.encode("entropy", mask, mask.size))})
        return Local({"buffers": buffers, **moments}, update, self.masked_model(a, head, mask, buffers), loss)

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The global model, with the device's own batch-norm statistics."""
        theta, head = self.understand(task.assignment, downlink)
        return self.global_model(task, kept, theta, head)
