"""Codec `auto`: the smallest exact codec for a set, chosen by size before anything is coded.

Bytes: one byte that names the codec (0 `bits`, 1 `rice`, 2 `entropy`), then that codec's payload. The sizes of `bits`
and `rice` are exact, that of `entropy` is known to half a per cent from its flip counts, so the choice is never more
than one per cent or sixteen bytes larger than the best of them.
"""

from __future__ import annotations

from edge_kernels.codecs import bits, entropy, rice
from edge_kernels.codecs.sets import CodecError, Contexts, Positions

_TAGS = ("bits", "rice", "entropy")


def choose(positions: Positions, d: int, contexts: Contexts | None = None) -> str:
    """The exact codec whose payload will be smallest."""
    sizes = (
        float(bits.size(d)),
        float(rice.size(positions, d)),
        entropy.size_estimate(positions, d, contexts),
    )
    return _TAGS[sizes.index(min(sizes))]


def encode(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """Write the set with the codec that :func:`choose` names."""
    name = choose(positions, d, contexts)
    if name == "bits":
        return b"\0" + bits.encode(positions, d)
    if name == "rice":
        return b"\1" + rice.encode(positions, d)
    return b"\2" + entropy.encode(positions, d, contexts)


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
        raise CodecError("an auto payload begins with a byte 0, 1 or 2 that names its codec")
    return _TAGS[data[0]]
