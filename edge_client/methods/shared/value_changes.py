"""Values that a device sends: as they are, or what changed of them in a value codec. For every method that averages.

With codec ``float32`` the trained values travel under the method's name for them. With any other the change travels:
the trained values less those that the device received, as ``change.CODEC``. The server adds it to its own values. The
codec's stream is (seed, "update values", round, device).

With `feedback` a device adds what its codec lost of its last change to the next one (Seide et al., Interspeech 2014).
A method keeps that residual on the device, and decides which of it is still of use when other values travel.

Values that no device trains are `fixed`: the server drops what a device sends for them. A codec like EDEN decodes a
change of 0 as another number, and a device may be faulty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from edge_kernels import counter
from edge_kernels.codecs import CodecError, values
from pydantic import AfterValidator, ValidationInfo

from edge_client.bundle import F32, Bits, Manifest
from edge_client.errors import DivergedError, PayloadError
from edge_client.methods import ValueCodecName
from edge_client.methods.shared.local_sgd import LocalSgd
from edge_client.protocol.payload import Arrays, Payload, allow_only, coded, decoding, u8, vector
from edge_client.task import Assignment

PLAIN = "float32"


def _of_a_codec(feedback: bool, info: ValidationInfo) -> bool:
    if feedback and info.data.get("up") == PLAIN:
        raise ValueError("feedback returns what a codec loses; name one in up")
    return feedback


Feedback = Annotated[bool, AfterValidator(_of_a_codec)]
"""Setting `feedback` of a method, declared after its setting `up`."""


@dataclass(frozen=True)
class Uplink:
    """How a method's values travel up: the settings `up` and `feedback`.

    `exact`: devices receive the server's values as they are. If a codec of the downlink rounds them, the change travels
    whatever the codec here, so that rounding errors do not accumulate on the server.
    `per_tensor`: the codec codes each tensor by itself; for values that are all parameters.
    """

    codec: str
    feedback: bool = False
    exact: bool = True
    per_tensor: bool = False

    @property
    def whole(self) -> bool:
        """The values travel and not their change."""
        return self.codec == PLAIN and self.exact

    def limit(self, size: int, parts: int = 1) -> int:
        """The most bytes that `size` values take, coded in `parts`."""
        return 4 * size if self.codec == PLAIN else values.limit(size, parts)

    def ends(self, m: Manifest) -> tuple[int, ...]:
        """Where each part that is coded by itself ends; empty: the values are one part."""
        return tensor_ends(m, True) if self.per_tensor else ()

    # --- client half

    def send(
        self, a: Assignment, name: str, trained: F32, received: F32, fixed: Bits, residual: F32 | None = None
    ) -> tuple[Arrays, F32 | None]:
        """The arrays of an update, and the new residual float32[n], None without feedback.

        `trained`, `received` and `residual` are float32[n]; `fixed` is bool[n], True where no device trains. Without a
        codec the trained values travel under `name`. Raises DivergedError as `send_change` does.
        """
        if self.whole:
            return {name: trained}, None
        return self.send_change(a, trained - received, fixed, residual)

    def send_change(self, a: Assignment, change: F32, fixed: Bits, residual: F32 | None) -> tuple[Arrays, F32 | None]:
        """A change float32[n] in the codec, and with `feedback` the new residual: what the codec lost.

        `fixed` is bool[n], True where no device trains. A device without its residual float32[n] starts at 0.

        Raises DivergedError for a change that the codec cannot hold.
        """
        if self.feedback and residual is not None:
            change = change + residual
        try:
            sent = packed("change", self.codec, change, update_stream(a), self.ends(a.model.manifest))
        except CodecError as error:
            raise DivergedError(
                f"the change of round {a.round} does not fit codec {self.codec!r} ({error}); use a smaller learning "
                "rate, or another codec as setting up",
                at_start=False,
            ) from None
        return sent, change - self.read_change(a, Payload(sent), fixed) if self.feedback else None

    # --- server half

    def read(self, a: Assignment, name: str, payload: Payload, own: F32, fixed: Bits, *others: str) -> F32:
        """The trained values, float32[n].

        `own` float32[n] are the server's values before, `fixed` bool[n] is True where no device trains, `others` are
        further arrays that the payload may hold. Raises PayloadError.
        """
        if self.whole:
            return np.where(fixed, own, unpacked(payload, name, PLAIN, own.size, 0, others))
        return applied(own, self.read_change(a, payload, fixed, *others))

    def read_change(self, a: Assignment, payload: Payload, fixed: Bits, *others: str) -> F32:
        """The change, float32[n], 0 where `fixed` bool[n] is True. Raises PayloadError."""
        ends = self.ends(a.model.manifest)
        change = unpacked(payload, "change", self.codec, fixed.size, update_stream(a), others, ends)
        return np.where(fixed, np.float32(0), change)


class Coded(LocalSgd):
    """Local SGD whose values travel up in a value codec."""

    up: ValueCodecName = PLAIN
    """The value codec of what a device sends (docs/codecs.md); other than float32 it codes the change."""
    feedback: Feedback = False
    """The device adds to a change what the codec `up` lost of the change before."""

    @property
    def uplink(self) -> Uplink:
        """How these values travel up."""
        return Uplink(self.up, self.feedback)


def applied(before: F32, change: F32) -> F32:
    """Values after a change. Raises PayloadError when one is infinite."""
    with np.errstate(over="ignore"):
        after: F32 = before + change
    if not np.isfinite(after).all():
        raise PayloadError("the change makes a parameter infinite; lower the learning rate")
    return after


def tensor_ends(m: Manifest, per_tensor: bool) -> tuple[int, ...]:
    """Where each group of parameters that are coded together ends: every tensor, or all of them."""
    return tuple(t.span.stop for t in m.parameters) if per_tensor else (m.d,)


def update_stream(a: Assignment) -> int:
    """The counter key of the codec of a device's update."""
    return counter.key(a.seed, "update values", a.round, a.device)


def packed(name: str, codec: str, vector: F32, stream: int, ends: tuple[int, ...] = ()) -> Arrays:
    """A vector as an array of a payload: float32 under `name`, or a codec's bytes under ``NAME.CODEC``."""
    if codec == PLAIN:
        return {name: vector}
    return {f"{name}.{codec}": u8(values.encode_parts(codec, vector, ends or (vector.size,), stream))}


def unpacked(
    payload: Payload, name: str, codec: str, size: int, stream: int, others: tuple[str, ...], ends: tuple[int, ...] = ()
) -> F32:
    """The float32[size] that `packed` wrote; the payload may hold arrays `others` beside it. Raises PayloadError."""
    if codec == PLAIN:
        allow_only(payload, name, *others)
        return vector(payload, name, size)
    array = f"{name}.{codec}"
    with decoding(f"array {array!r}"):
        return values.decode_parts(codec, coded(payload, array, others), ends or (size,), stream)
