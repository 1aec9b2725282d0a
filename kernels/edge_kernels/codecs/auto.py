"""Codec `auto`: the smallest exact codec for a set.

Bytes: one byte that names the codec (0 `bits`, 1 `rice`, 2 `entropy`), then the payload of that codec. The encoder
tries all three, so a payload is one byte larger than the smallest of them.
"""

from __future__ import annotations

from edge_kernels.codecs import bits, entropy, rice
from edge_kernels.codecs.sets import CodecError, Contexts, Positions

_TAGS = ("bits", "rice", "entropy")


def encode(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """Write the set with the codec whose payload is smallest."""
    candidates = (
        b"\2" + entropy.encode(positions, d, contexts),
        b"\0" + bits.encode(positions, d),
        b"\1" + rice.encode(positions, d),
    )
    return min(candidates, key=len)


def decode(data: bytes, d: int, contexts: Contexts | None = None) -> Positions:
    """The set of a payload made by :func:`encode`. Raises CodecError."""
    if len(data) > 1 + entropy.size_limit(d):
        raise CodecError(f"{len(data)} bytes are more than any exact codec needs for a set out of {d}; is d right?")
    name, body = codec_of(data), data[1:]
    if name == "bits":
        return bits.decode(body, d)
    return rice.decode(body, d) if name == "rice" else entropy.decode(body, d, contexts)


def codec_of(data: bytes) -> str:
    """Name of the codec inside an `auto` payload. Raises CodecError."""
    if not data or data[0] >= len(_TAGS):
        raise CodecError("the first byte of an auto payload names its codec and is 0, 1 or 2")
    return _TAGS[data[0]]
