"""Mine: federated averaging whose devices send only the largest values of their change, and the rest later.

A method is one class: its fields are the settings, its functions the two halves. This one changes how an update travels
up; the rest is FedAvg's. The docstring of `edge_client.methods.Method` describes every function.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from edge_client.methods.fedavg import FedAvg
from edge_client.methods.shared.value_changes import Feedback, Uplink
from edge_client.task import Course


class Mine(FedAvg):
    """FedAvg with the largest changes sent, the others kept for the next round."""

    name: ClassVar[str] = "mine"
    share: Annotated[float, Field(ge=0.001, le=1)] = 0.1
    """The share of the changes that a device sends."""
    up: Literal["topk"] = "topk"
    """The value codec of what a device sends: `share` of the values, with their places."""
    feedback: Feedback = True
    """The device adds to a change what was not sent before."""

    @property
    def uplink(self) -> Uplink:
        """How the change travels up; the device encodes and the server decodes by it."""
        return replace(super().uplink, codec=f"topk:{self.share}")

    def paper_bytes(self, course: Course) -> None:
        """No paper counts its bytes."""
