"""Codec `auto`: the smallest exact codec for a set.

Bytes: one byte that names the codec (0 `bits`, 1 `rice`, 2 `entropy`), then that codec's payload. The sizes of `bits`
and `rice` are known before anything is coded. That of `entropy` is estimated from the real gaps, as on sets in bursts
these cost far less than independent flips would; where it may be the smallest it is coded and counted. So the payload
is one byte larger than the best of them, for any set.
"""

from __future__ import annotations

from edge_kernels.codecs import bits, entropy, rice
from edge_kernels.codecs.sets import CodecError, Contexts, Positions

_TAGS = ("bits", "rice", "entropy")
_DOUBT = 1.125  # an estimate of the size of `entropy` is above it by less than an eighth and a byte


def encode(positions: Positions, d: int, contexts: Contexts | None = None) -> bytes:
    """Write the set with the codec whose payload is smallest."""
    plain, gaps = bits.size(d), rice.size(positions, d)
    least = min(plain, gaps)
    prepared = entropy.prepare(positions, d, contexts)
    if prepared.size() <= _DOUBT * least:
        coded = prepared.to_bytes()
        if len(coded) <= least:  # sizes are whole: at `least` - 1 or less, the estimate is below _DOUBT * least
            return b"\2" + coded
    return b"\0" + bits.encode(positions, d) if plain <= gaps else b"\1" + rice.encode(positions, d)


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
