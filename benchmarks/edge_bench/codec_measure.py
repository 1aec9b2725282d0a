"""Measures codecs (bytes against the entropy, time, memory, false flips) and the folding of masks.

The peers are used as their documentation shows. Nothing here prints; the commands are in `codecs.py`.
"""

from __future__ import annotations

import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from edge_kernels import codecs, counter
from edge_kernels.coupling import coupling_contexts
from edge_kernels.folding import Tally
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
SAMPLE = 20_000  # positions queried in pyfusefilter, which takes one key at a time
PEERS = ("pyfusefilter", "zlib", "zstd", "constriction")


@dataclass(frozen=True)
class Row:
    """One codec at one size and flip rate. Times are medians per parameter, from mask to bytes and back.

    `false_flips` counts decoded flips that were not encoded; for pyfusefilter it is scaled up from a sample.
    `peak_bytes` is the larger of both directions' peaks, without the memory of native code.
    """

    codec: str
    d: int
    flip_rate: float
    bits_per_parameter: float
    entropy_bits_per_parameter: float
    encode_ns_per_parameter: float
    decode_ns_per_parameter: float
    false_flips: int
    peak_bytes: int


@dataclass(frozen=True)
class Subject:
    """A codec to measure. `size` is the number of bytes of what `encode` returns.

    `queried` is the number of positions that `decode` returns: all of them, except for a slow peer.
    """

    encode: Callable[[Mask], Any]
    decode: Callable[[Any], Mask]
    size: Callable[[Any], int]
    queried: int


def flips(d: int, rate: float) -> Mask:
    """Independent flips, the same on every machine."""
    return counter.uniform(counter.key("codec bench", d, str(rate)), d) < rate


def entropy_bits(mask: Mask, contexts: NDArray[np.unsignedinteger[Any]] | None = None) -> float:
    """Bits per parameter if the flips of each context are independent, at the context's own rate."""
    size = np.array([len(mask)]) if contexts is None else np.bincount(contexts)
    hits = np.array([np.count_nonzero(mask)]) if contexts is None else np.bincount(contexts[mask], minlength=len(size))
    p = hits[(hits > 0) & (hits < size)] / size[(hits > 0) & (hits < size)]
    n = size[(hits > 0) & (hits < size)]
    return float(-(n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum()) / max(len(mask), 1)


def subject(name: str, d: int, rate: float) -> Subject:
    """The named codec or peer. Raises ImportError when a peer is not installed."""
    if name in codecs.CODECS:
        return Subject(
            lambda mask: codecs.encode(name, mask, d), lambda data: codecs.decode_mask(name, data, d), len, d
        )
    if name == "zlib":
        return Subject(
            lambda mask: zlib.compress(_pack(mask), 9), lambda data: _unpack(zlib.decompress(data), d), len, d
        )
    if name == "zstd":
        import zstandard

        return Subject(
            lambda mask: zstandard.ZstdCompressor(level=19 if d <= 1_000_000 else 9).compress(_pack(mask)),
            lambda data: _unpack(zstandard.ZstdDecompressor().decompress(data), d),
            len,
            d,
        )
    return _constriction(d, rate) if name == "constriction" else _pyfusefilter(d)


def _pack(mask: Mask) -> bytes:
    return np.packbits(mask, bitorder="little").tobytes()


def _unpack(data: bytes, d: int) -> Mask:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=d, bitorder="little").view(np.bool_)


def _constriction(d: int, rate: float) -> Subject:
    """A range coder with the known rate; 8 bytes are added for sending the rate."""
    import constriction

    queue = constriction.stream.queue
    model = constriction.stream.model.Bernoulli(rate, perfect=False)

    def encode(mask: Mask) -> NDArray[np.uint32]:
        encoder = queue.RangeEncoder()
        encoder.encode(mask.astype(np.int32), model)
        compressed: NDArray[np.uint32] = encoder.get_compressed()
        return compressed

    def decode(words: NDArray[np.uint32]) -> Mask:
        return np.asarray(queue.RangeDecoder(words).decode(model, d)).astype(np.bool_)

    return Subject(encode, decode, lambda words: words.nbytes + 8, d)


def _pyfusefilter(d: int) -> Subject:
    """Fuse8 of a list of keys and `key in filter`, as its README shows."""
    from pyfusefilter import Fuse8

    queried = min(d, SAMPLE)

    def decode(filter_: Any) -> Mask:
        return np.fromiter((key in filter_ for key in range(queried)), np.bool_, queried)

    return Subject(lambda mask: Fuse8(np.flatnonzero(mask).tolist()), decode, lambda f: len(f.serialize()), queried)


def measure(names: Iterable[str], d: int, rate: float, repeats: int) -> list[Row]:
    """A row for each codec, on the same mask. Repeats are interleaved, so other load affects all codecs alike."""
    mask = flips(d, rate)
    subjects = {name: subject(name, d, rate) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    made: dict[str, Any] = {}
    for _ in range(repeats):
        for name, s in subjects.items():
            start = time.perf_counter()
            made[name] = s.encode(mask)
            middle = time.perf_counter()
            s.decode(made[name])
            times[name].append((middle - start, time.perf_counter() - middle))
    bound = entropy_bits(mask)
    return [_row(name, s, made[name], times[name], mask, rate, bound) for name, s in subjects.items()]


def _row(
    name: str, s: Subject, made: Any, times: list[tuple[float, float]], mask: Mask, rate: float, bound: float
) -> Row:
    """The row of one codec. Raises AssertionError when a flip was lost."""
    d, queried = len(mask), mask[: s.queried]
    found = s.decode(made)
    if (queried & ~found).any():
        raise AssertionError(f"{name} lost a flip at d = {d}, rate {rate}")
    return Row(
        codec=name,
        d=d,
        flip_rate=rate,
        bits_per_parameter=s.size(made) * 8 / d,
        entropy_bits_per_parameter=bound,
        encode_ns_per_parameter=median(e for e, _ in times) / d * 1e9,
        decode_ns_per_parameter=median(t for _, t in times) / s.queried * 1e9,
        false_flips=round(int(np.count_nonzero(found & ~queried)) * d / s.queried),
        peak_bytes=max(_peak(lambda: s.encode(mask)), _peak(lambda: s.decode(made))),
    )


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def conditional(d: int, spread: float, step: float, seed: int) -> dict[str, float | int]:
    """The value of contexts for coupled samples of theta ~ Beta(spread, spread) and of theta after local training.

    Both sides compare the same uniforms, so a flip is a uniform between theta and the trained theta. Training is a
    normal step of size `step` in the score. Returned in bits per parameter: the entropy of the flips at one rate; their
    conditional entropy given 42 x 4 bins of (distance in odds, theta), the bound of these contexts; given theta, u and
    the size of the step, the bound of any contexts; and the payloads of `entropy` without and with the contexts.
    """
    rng = np.random.default_rng(seed)
    theta = np.clip(rng.beta(spread, spread, d), 0.01, 0.99)
    u = counter.uniform(counter.key("conditional", seed), d)
    moved = 1 / (1 + np.exp(-(np.log(theta / (1 - theta)) + rng.normal(0, step, d))))
    mask = (u < theta) != (u < moved)
    contexts = coupling_contexts(theta, u)
    payloads = {name: codecs.encode("entropy", mask, d, c) for name, c in (("plain", None), ("contexts", contexts))}
    if not np.array_equal(codecs.decode_mask("entropy", payloads["contexts"], d, contexts), mask):
        raise AssertionError("the payload with contexts decodes to another mask")
    return {
        "d": d, "spread": spread, "step": step, "seed": seed, "flip_rate": float(mask.mean()),
        "entropy_bits_per_parameter": entropy_bits(mask),
        "conditional_entropy_bits_per_parameter": entropy_bits(mask, contexts),
        "ideal_bits_per_parameter": _ideal_bits(theta, u, mask, step),
        "unconditional_bits_per_parameter": len(payloads["plain"]) * 8 / d,
        "conditional_bits_per_parameter": len(payloads["contexts"]) * 8 / d,
    }  # fmt: skip


def _ideal_bits(theta: NDArray[np.float64], u: NDArray[np.float64], mask: Mask, step: float) -> float:
    """Bits per parameter of a coder with the true probability of each flip, which is that a normal step crosses u."""
    from scipy.special import log_ndtr

    distance = np.abs(np.log(np.maximum(u, 1e-300) / (1 - u)) - np.log(theta / (1 - theta))) / step
    return float(-np.where(mask, log_ndtr(-distance), log_ndtr(distance)).mean() / np.log(2))


def fold(d: int, masks: int, repeats: int) -> dict[str, float | int]:
    """Sums of packed masks: carry-save counters against unpack-and-add into uint8 and uint16, interleaved medians."""
    packed = [np.packbits(flips(d, 0.1 + 0.05 * i), bitorder="little") for i in range(8)]

    def carry_save() -> NDArray[np.unsignedinteger[Any]]:
        tally = Tally(d)
        for i in range(masks):
            tally.add(packed[i % 8])
        return tally.counts()

    def unpacked(dtype: type[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
        total = np.zeros(d, dtype)
        for i in range(masks):
            total += np.unpackbits(packed[i % 8], count=d, bitorder="little")
        return total

    runs: dict[str, Callable[[], NDArray[np.unsignedinteger[Any]]]] = {
        "carry_save": carry_save,
        "unpack_add_uint8": lambda: unpacked(np.uint8),
        "unpack_add_uint16": lambda: unpacked(np.uint16),
    }
    if not np.array_equal(carry_save(), unpacked(np.uint16)):
        raise AssertionError("the counts differ from the unpacked sum")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    seconds = {f"{name}_s": median(t) for name, t in times.items()}
    return {"d": d, "masks": masks, **seconds, "peak_bytes": _peak(carry_save)}
