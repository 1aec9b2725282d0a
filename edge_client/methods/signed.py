"""Signed: FedMask with signs in place of bits, a baseline of HideNseek's tables.

Vallapuram et al., "HideNseek", arXiv 2206.04385, 2022, section 4.3. A live element of the mask is -1 or +1, learned
with forward sign(s) and slope 1 - tanh(s)^2; an element outside a device's structure is 0. Everything else is
FedMask's: the device prunes after one epoch, elements that two or more devices hold are averaged, one bit each way
(fedmask.py). As in those tables the head stays on the device and 80 % of the layers before it are kept.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from edge_client.methods.fedmask.method import Choice, FedMask
from edge_client.task import Course
from edge_client.training.gates import Gate, SignTanh


class Signed(FedMask):
    """Personal sign masks on frozen weights."""

    name: ClassVar[str] = "signed"
    gate: ClassVar[Gate] = SignTanh()

    drawn: ClassVar[Choice] = Choice(keep=0.8, head="local", group_lasso=0.0, restart="radius", lr=10.0)
    trained: ClassVar[Choice] = Choice(keep=1.0, head="masked", group_lasso=0.0, restart="latent", lr=0.1)

    radius: Annotated[float, Field(ge=1e-6, le=100)] = 1.0
    """A received bit becomes the score +radius or -radius."""
    group_lasso: Annotated[float, Field(ge=0, le=0)] | None = None
    """Always 0: the lasso pulls soft values to 0, where a sign is least decided and not dead."""

    def paper_bytes(self, course: Course) -> tuple[int, int]:
        """One byte a sign: those of the structure up, all of them down (HideNseek, Table 2)."""
        division = self.division(course.model)
        return division.live + 4 * division.real.size, division.masked.size + 4 * division.real.size
