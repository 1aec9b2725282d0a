"""BNN-FedAvg: binary weights with real latents, signs up, their mean or majority down.

"BNNAvg" of HideNseek's tables: Courbariaux, Hubara, Soudry, El-Yaniv, Bengio, "Binarized Neural Networks", 2016,
averaged as McMahan et al. do. docs/methods/bnn.md lists what differs from the paper's network.

- A device has real latents in [-1, 1]. A weight is the sign of its latent times the root mean square of its tensor's
  first values, a constant that both sides know. The gradient passes the sign unchanged where the latent is within its
  range, and latents are clipped after each step.
- Signs travel as in signs.py. A device starts its latents anew at the mean that it received.
- Activations are those of the bundle: binary ones are signs in its module. The last layer stays real and on the device.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from edge_client.bundle import F32, Model
from edge_client.methods.shared.network import Network
from edge_client.methods.shared.signs import SignMasks
from edge_client.training.gates import ClippedSign, Gate


class BnnFedAvg(SignMasks):
    """Weights of one magnitude a tensor, their signs averaged."""

    name: ClassVar[str] = "bnn"
    gate: ClassVar[Gate] = ClippedSign()

    radius: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """A received mean m of signs becomes the latent radius * m."""

    def magnitudes(self, model: Model) -> F32:
        masked = self.parts(model).masked
        rms = [np.sqrt(np.mean(np.square(model.parameters[b.span], dtype=np.float64))) for b in masked.blocks]
        return np.repeat(np.array(rms, np.float32), [b.size for b in masked.blocks])

    def sureness(self, net: Network) -> F32:
        """The first weights as shares of the largest of their tensor: the latents begin as the real weights."""
        blocks = [np.abs(net.model.parameters[b.span]) for b in self.parts(net.model).masked.blocks]
        return np.concatenate([size / max(size.max(), np.float32(1e-30)) for size in blocks])

    def bound(self, latents: F32) -> None:
        np.clip(latents, -1, 1, out=latents)
