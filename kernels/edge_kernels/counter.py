"""Counter-based randomness that another language implements in ten lines.

The generator is SplitMix64 used as a hash (Steele, Lea, Flood 2014). Number `i` of the stream with 64-bit key `k` is
``mix(k + (i + 1) * G mod 2**64)``, so any slice of a stream is computed without the numbers before it.

    G      = 0x9E3779B97F4A7C15
    mix(z) : z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

A key is folded from words. A word is an integer mod 2**64, or a text, which stands for the first eight bytes, little
endian, of the SHA-256 of its UTF-8. Start from ``k = 0``; for each word, ``k = mix((k ^ word) + G)``. A uniform number
in [0, 1) is ``(u >> 11) * 2**-53`` in float64. No transcendental function is used, so the same seed gives the same
bytes on every machine.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 14  # numbers mixed at a time: the passes stay in the cache
_STEPS = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(GAMMA)


def key(*words: int | str) -> int:
    """Fold `words` into one 64-bit stream key, for example ``key(seed, "cohort", round)``."""
    k = 0
    for w in words:
        z = ((k ^ ((word(w) if isinstance(w, str) else w) & _MASK)) + GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * MIX_A) & _MASK
        z = ((z ^ (z >> 27)) * MIX_B) & _MASK
        k = z ^ (z >> 31)
    return k


@lru_cache(1 << 17)  # a device's name is hashed once, not in every round
def word(text: str) -> int:
    """The 64-bit word that a text is folded as."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def keys(prefix: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``key(*prefix_words, w)`` for every w of `words`, uint64[n]; `prefix` is ``key(*prefix_words)``."""
    z: NDArray[np.uint64] = (words ^ np.uint64(prefix)) + np.uint64(GAMMA)
    _mix(z, np.empty_like(z))
    return z


def uint64(stream: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Numbers `start` .. `start + count - 1` of the stream, uint64[count]."""
    out, spare = np.empty(count, np.uint64), np.empty(min(count, _BLOCK), np.uint64)
    for low in range(0, count, _BLOCK):
        z = out[low : low + _BLOCK]
        base = (stream + (start + low + 1) * GAMMA) & _MASK
        np.add(_STEPS[: len(z)], np.uint64(base), out=z)
        _mix(z, spare[: len(z)])
    return out


def _mix(z: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, in place; `spare` is as long as `z`."""
    z ^= np.right_shift(z, np.uint64(30), out=spare)
    z *= np.uint64(MIX_A)
    z ^= np.right_shift(z, np.uint64(27), out=spare)
    z *= np.uint64(MIX_B)
    z ^= np.right_shift(z, np.uint64(31), out=spare)


def uniform(stream: int, count: int, start: int = 0) -> NDArray[np.float64]:
    """Numbers `start` .. `start + count - 1` of the stream as float64 in [0, 1), exact multiples of 2**-53."""
    numbers: NDArray[np.float64] = (uint64(stream, count, start) >> np.uint64(11)) * 2.0**-53
    return numbers


def permutation(stream: int, count: int) -> NDArray[np.int64]:
    """A permutation of ``range(count)``: the stable ascending order of the stream's first `count` numbers."""
    return np.argsort(uint64(stream, count), kind="stable").astype(np.int64)
