"""The network behind Bernoulli masks: which parameters are masked, trained once or frozen, and the model of a mask.

- The layers named by `layers` are masked: their weights, and with `biases` their biases. The head is the bundle's last
  layer. With `head="probe"` federated averaging trains it as float32 in the first `probe_rounds` rounds (linear
  probing), then it is frozen; with `head="keep"` it stays as the bundle has it; with `head="mask"` it is masked like
  any other layer. A head that the bundle freezes is kept. Every other parameter stays as the bundle has it, also what
  is frozen of a masked or probed layer. Batch-norm statistics follow a device's own training and never leave it.
- A pre-trained bundle (weights from a file, not from a seed) must not end below its start. So a trained head is kept,
  only dense layers are masked unless `layers` names others, the frozen weights are divided by theta0, so that the
  expected network is the pre-trained one, and the global model is that expected network.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from edge_kernels import counter
from pydantic import Field

from edge_client.blocks import Blocks, head, tensors, trained_layers
from edge_client.bundle import F32, Bits, Model
from edge_client.errors import ConfigError
from edge_client.methods import MORE_EPOCHS, Method, few_masked, pretrained, trained_head
from edge_client.methods.shared.theta import F64
from edge_client.task import Assignment, Course, Personal

LEAST = 1e-6  # of theta0 and of 1 - theta0: far less is 0 in float32, and weights over it are infinite


class MaskedNetwork(Method):
    """The settings that choose what is masked and what the global model is, and the models that follow."""

    layers: tuple[str, ...] = ()
    """Masked layers by name or dotted prefix; empty: all but a head that is not masked, of a pre-trained bundle only
    the dense ones."""
    biases: bool = False
    """Mask the biases of the masked layers too."""
    head: Literal["auto", "probe", "mask", "keep"] = "auto"
    """`auto` keeps the head of a pre-trained bundle and probes any other; a head of zeros counts as new."""
    probe_rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Rounds of federated averaging of the head before the first masks."""
    theta0: Annotated[float, Field(ge=LEAST, le=1 - LEAST)] = 0.95
    """The first probability that a weight stays; 0.5 suits weights from a seed."""
    rescale: bool = True
    """Divide the masked weights of a pre-trained bundle by theta0."""
    evaluate: Literal["auto", "sample", "threshold", "expected"] = "auto"
    """The global model is one drawn mask, the mask 1[theta >= 1/2], or the weights times theta. `auto`: `expected` of a
    pre-trained bundle, else `sample`."""

    def head_of(self, model: Model) -> str:
        """What happens to the head: "probe", "mask" or "keep". Raises ConfigError for a model without layers."""
        if not model.manifest.layers:
            raise ConfigError(
                f"bundle {model.manifest.name!r} has no layer to mask (linear, convolution or LSTM); choose another "
                "method"
            )
        if not head(model.manifest).blocks:
            return "keep"
        if self.head != "auto":
            return self.head
        return "keep" if trained_head(model) else "probe"

    def masked(self, model: Model) -> Blocks:
        """The masked parameters. Raises ConfigError when `layers` names a layer that is not there, or none is left."""
        m = model.manifest
        layers = trained_layers(m, m.layers if self.head_of(model) == "mask" else m.layers[:-1])
        found = [x for x in layers if any(_within(x.name, p) for p in self.layers)]
        idle = [p for p in self.layers if not any(_within(x.name, p) for x in layers)]
        if not self.layers:
            found = [x for x in layers if x.kind == "linear" or not pretrained(model)]
        if idle:
            raise ConfigError(f"layers = {idle}: the layers that can be masked are {[x.name for x in layers]}")
        if not found and layers:
            raise ConfigError(
                "no seed draws this bundle's weights, so they count as trained ([export] seed = 1 draws random ones). "
                "Of trained weights only linear layers are masked unless `layers` names others, and beside the head "
                f"there is none; choose `layers` from {[x.name for x in layers]}, or another method"
            )
        if not found and not head(m).blocks:
            raise ConfigError(f"bundle {m.name!r} trains no layer that can be masked; choose another method")
        if not found:
            raise ConfigError(
                f'no layer but the head {m.layers[-1].name!r} is trained, and head = "{self.head_of(model)}" does not '
                'mask that; set head = "mask", or choose another method'
            )
        names = {n for x in found for n in (*x.weights, *(x.biases if self.biases else ()))}
        return tensors(m, {n for n in names if m.tensors[n].trainable})

    def probed(self, model: Model) -> Blocks:
        """The head's parameters when it is probed, else nothing."""
        return head(model.manifest) if self.head_of(model) == "probe" else Blocks(())

    def probing(self, model: Model) -> int:
        """The number of rounds that train the head; they come first."""
        return self.probe_rounds if self.head_of(model) == "probe" else 0

    def hints(self, model: Model | None = None) -> tuple[str, ...]:
        """From a random network hardly any weight is worth keeping at first, so theta0 comes before the epochs."""
        then = (MORE_EPOCHS, "lr and more rounds")
        if self.theta0 <= 0.5 or (model is not None and pretrained(model)):
            return then
        return ("theta0 = 0.5" if model is not None else "theta0 = 0.5 for weights from a seed", *then)

    def caution(self, course: Course) -> str | None:
        """That no round is left for masks, or that they leave out most of the network without being told to."""
        model, probing = course.model, self.probing(course.model)
        if probing >= course.rounds:
            return (
                f"probe_rounds = {probing}, but rounds = {course.rounds}: only the head is trained and no mask is "
                'sent; make rounds larger than probe_rounds, or set head = "mask"'
            )
        if self.layers:
            return None
        kinds = "linear layers" if pretrained(model) else "linear, convolution and LSTM layers"
        return few_masked(model, self.masked(model).size + self.probed(model).size, kinds)

    def exchanged(self, course: Course) -> int:
        """The masked parameters."""
        return self.masked(course.model).size

    # --- models

    def dense(self, model: Model, head: F32) -> F32:
        """The frozen parameters with a head, float32[d]."""
        values: F32 = model.parameters.copy()
        self.probed(model).scatter(head, values)
        return values

    def frozen(self, model: Model, head: F32) -> F32:
        """The parameters behind the masks, float32[d]: those of `dense`, of a pre-trained bundle divided by theta0."""
        values = self.dense(model, head)
        if self.rescale and pretrained(model):
            part = self.masked(model)
            part.scatter(part.gather(values) / np.float32(self.theta0), values)
        return values

    def under(self, model: Model, head: F32, mask: Bits, buffers: F32) -> Personal:
        """The model under one mask, bool[masked]."""
        part, values, alive = self.masked(model), self.frozen(model, head), np.ones(model.manifest.d, np.bool_)
        part.scatter(part.gather(values) * mask, values)
        part.scatter(mask, alive)
        return Personal(values, buffers, alive)

    def global_model(self, a: Assignment, kept: Any, theta: F64, head: F32) -> Personal:
        """The federation's model with the device's own statistics; dense until the first masks of a probed network."""
        buffers = own_statistics(a.model, kept)
        probing = self.probing(a.model)
        if probing and a.round <= probing + 1:
            return Personal(self.dense(a.model, head), buffers)
        evaluate = self.evaluate
        if evaluate == "auto":
            evaluate = "expected" if pretrained(a.model) else "sample"
        if evaluate == "threshold":
            return self.under(a.model, head, theta >= 0.5, buffers)
        if evaluate == "sample":
            u = counter.uniform(counter.key(a.seed, "evaluated mask", a.round), theta.size)
            return self.under(a.model, head, u < theta, buffers)
        part, values = self.masked(a.model), self.frozen(a.model, head)
        part.scatter(part.gather(values) * theta.astype(np.float32), values)
        return Personal(values, buffers)


def own_statistics(model: Model, kept: Any) -> F32:
    """The device's own batch-norm statistics, at first the bundle's; a copy to train on."""
    own: F32 = (model.buffers if kept is None else kept.buffers).copy()
    return own


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
