"""Bits sent as what changed: the set of elements whose bit differs from bits that both sides hold.

The known bits are the reference. The payload carries the set under ``changes.CODEC``, written by any set codec, and in
its metadata `reference` the name of the known bits. A receiver that holds other bits raises `LostError` instead of
decoding noise. The method decides which bits are known, and when.
"""

from __future__ import annotations

from typing import Annotated

from edge_kernels import bits as bitset
from edge_kernels import codecs
from edge_kernels.codecs import Contexts
from pydantic import AfterValidator

from edge_client.bundle import Bits
from edge_client.errors import LostError
from edge_client.methods import SetCodecName, bits_digest
from edge_client.protocol.payload import Payload, coded, decoding, u8

CODEC_HEAD = 64  # bytes that an exact codec may need beside its bits


def limit(n: int) -> int:
    """The most bytes that the changes of n bits take: a codec that does not suit them may take two bits for each."""
    return 2 * bitset.size(n) + CODEC_HEAD


def _exact(name: str) -> str:
    if not codecs.codec(name).exact:
        raise ValueError(f"codec {name!r} adds false positives, but both sides must hold the same bits; use another")
    return name


ExactCodecName = Annotated[SetCodecName, AfterValidator(_exact)]
"""A setting that names a set codec which decodes what was encoded."""


def array_name(codec: str) -> str:
    """The array that holds the changes."""
    return f"changes.{codec}"


def named(known: Bits) -> dict[str, str]:
    """The metadata that names bool[n] known bits."""
    return {"reference": bits_digest(bitset.pack(known))}


def check(payload: Payload, known: Bits, what: str) -> None:
    """Raise LostError unless the payload was computed against these known bits; `what` names it in errors."""
    said, held = payload.meta.get("reference"), named(known)["reference"]
    if said != held:
        raise LostError(
            f"{what} was computed against reference mask {said!r}, but {held!r} is held here; the device trains again"
        )


def encode(codec: str, bits: Bits, known: Bits, contexts: Contexts | None = None) -> Payload:
    """bool[n] as its changes to bool[n] known bits."""
    return Payload({array_name(codec): u8(codecs.encode(codec, bits ^ known, known.size, contexts))}, named(known))


def decode(
    codec: str, payload: Payload, known: Bits, what: str, others: tuple[str, ...] = (), contexts: Contexts | None = None
) -> Bits:
    """bool[n] from its changes to bool[n] known bits; the payload may hold the arrays `others` beside them.

    Raises LostError when the changes are to other bits, PayloadError when they are malformed.
    """
    check(payload, known, what)
    with decoding(what):
        return known ^ codecs.decode_mask(codec, coded(payload, array_name(codec), others), known.size, contexts)
