"""Codecs: a set of positions out of d, counts, float vectors or samples as bytes, and back, in numpy.

Set codecs have names and one interface, here: ``encode(name, positions or mask, d)`` and ``decode(name, data, d)``.
`contexts` (unsigned integers[d] that both sides know) lower the cost of `entropy` and `auto`; the others ignore them.
Other packages add set codecs by entry points of the group `maskfleet.codecs.sets`, each naming a `SetCodec`.
Value codecs have the same form in `values`. `counts` and `klms` code other things and are called by their own
functions. The bytes are specified in docs/codecs.md. Whatever the bytes, a decoder returns or raises `CodecError`, in
memory bounded by d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_kernels.codecs import auto, bits, bloom, entropy, fuse, png, registry, rice
from edge_kernels.codecs.sets import MAX_D, CodecError, Contexts, Positions, as_positions, check_size, mask_of

__all__ = ["CODECS", "GROUP", "MAX_D", "CodecError", "Contexts", "Positions", "SetCodec", "checked_name",
           "codec", "decode", "decode_mask", "encode", "mask_of", "names"]  # fmt: skip

GROUP = "maskfleet.codecs.sets"


@dataclass(frozen=True)
class SetCodec:
    """One way to write a set. `exact`: what is decoded is what was encoded (a filter adds false positives).

    `with_parameter` makes the codec of ``NAME:PARAMETER``, or raises ValueError with the choices; None if the codec has
    no parameter.
    """

    encode: Callable[[Positions, int, Contexts | None], bytes]
    decode: Callable[[bytes, int, Contexts | None], Positions]
    exact: bool = True
    with_parameter: Callable[[str], SetCodec] | None = None


def _plain(
    enc: Callable[[Positions, int], bytes], dec: Callable[[bytes, int], Positions], exact: bool = True
) -> SetCodec:
    """A codec that has no use for contexts."""
    return SetCodec(lambda positions, d, _: enc(positions, d), lambda data, d, _: dec(data, d), exact)


def _bloom(text: str) -> SetCodec:
    """A Bloom filter with this share of false positives."""
    rate = float(text)
    if not 1e-6 <= rate <= 0.5:
        raise ValueError(f"the rate of false positives is 0.000001 to 0.5, not {text}")
    return _plain(partial(bloom.encode, rate=rate), bloom.decode, exact=False)


CODECS: Mapping[str, SetCodec] = {
    "bits": _plain(bits.encode, bits.decode),
    "rice": _plain(rice.encode, rice.decode),
    "entropy": SetCodec(entropy.encode, entropy.decode),
    "auto": SetCodec(auto.encode, auto.decode),
    **{
        f"fuse{width}": _plain(partial(fuse.encode, width=width), partial(fuse.decode, width=width), exact=False)
        for width in (8, 16, 32)
    },
    "fuse8-png": _plain(png.encode, png.decode, exact=False),
    "bloom": replace(_bloom("0.01"), with_parameter=_bloom),
}


def names(exact_only: bool = False) -> list[str]:
    """Names of the built-in set codecs."""
    return [name for name, codec in CODECS.items() if codec.exact or not exact_only]


def encode(name: str, what: NDArray[Any], d: int, contexts: Contexts | None = None) -> bytes:
    """The set `what` (sorted distinct positions, or bool[d]) as bytes. Raises CodecError for what is no set below d."""
    return codec(name).encode(as_positions(what, d), d, _checked(contexts, d))


def decode(name: str, data: bytes, d: int, contexts: Contexts | None = None) -> Positions:
    """The set in `data` as sorted uint32 positions. `d` and `contexts` as at encoding. Raises CodecError."""
    check_size(d)
    decoder, known = codec(name).decode, _checked(contexts, d)
    return as_positions(
        registry.decode("set codec", name.partition(":")[0], CODECS, lambda: decoder(data, d, known)), d
    )


def decode_mask(name: str, data: bytes, d: int, contexts: Contexts | None = None) -> NDArray[np.bool_]:
    """The set in `data` as bool[d]. Raises CodecError."""
    return mask_of(decode(name, data, d, contexts), d)


def codec(name: str) -> SetCodec:
    """The set codec ``NAME`` or ``NAME:PARAMETER``. Raises CodecError with the choices."""
    return registry.find(name, CODECS, GROUP, "set codec")


def checked_name(name: str) -> str:
    """The name of a set codec in one form, for a setting. Raises CodecError as `codec` does."""
    codec(name)
    return registry.one_form(name, CODECS)


def _checked(contexts: Contexts | None, d: int) -> Contexts | None:
    if contexts is not None and (contexts.shape != (d,) or contexts.dtype.kind != "u"):
        raise CodecError(f"contexts are unsigned integers of shape ({d},), not {contexts.dtype}{contexts.shape}")
    return contexts
