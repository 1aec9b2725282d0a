"""What every codec must do: give back what it may not lose, repeat itself, and survive damaged bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from edge_kernels import counter
from edge_kernels.codecs import CodecError, SetCodec
from edge_kernels.codecs.sets import as_positions
from edge_kernels.codecs.values import ValueCodec, limit

from edge_bench.testing.require import require

SIZES = (0, 1, 7, 64, 600, 9000)
RATES = (0.0, 0.002, 0.1, 0.5, 0.97, 1.0)


def check_codec(codec: SetCodec | ValueCodec) -> None:
    """Sets of many sizes and rates, or vectors; then damaged payloads. Raises AssertionError."""
    if isinstance(codec, SetCodec):
        _check_set(codec)
    else:
        _check_values(codec)


def _check_set(codec: SetCodec) -> None:
    for d in SIZES:
        contexts = (counter.uint64(1, d) % np.uint64(5)).astype(np.uint8)
        for rate in RATES:
            mask = counter.uniform(counter.key("check", d), d) < rate
            positions, what = np.flatnonzero(mask).astype(np.uint32), f"{int(mask.sum())} of {d} positions"
            for known in (None, contexts):
                data = codec.encode(positions, d, known)
                require(
                    codec.encode(positions, d, known) == data, f"the codec: {what} gave other bytes the second time"
                )
                try:
                    found = as_positions(codec.decode(data, d, known), d)
                except CodecError as error:
                    raise AssertionError(f"the codec: {what} came back as no set: {error}") from error
                if codec.exact:
                    same = np.array_equal(found, positions)
                    require(same, f"the codec: {what} came back as other {len(found)}; set exact=False if it may")
                missing = np.setdiff1d(positions, found)
                require(not len(missing), f"the codec: {what} came back without {missing[:3].tolist()}")
            for bad in _damaged(data):
                try:
                    as_positions(codec.decode(bad, d, contexts), d)
                except MemoryError:
                    raise AssertionError(f"the codec: a damaged payload of {what} asks for too much memory") from None
                except Exception:  # the caller of a codec makes it a CodecError
                    continue


def _check_values(codec: ValueCodec) -> None:
    for d in SIZES:
        v = np.random.default_rng(d).standard_normal(d).astype(np.float32)
        data, what = codec.encode(v.copy(), 5), f"{d} values"
        require(len(data) <= limit(d), f"the codec: {what} take {len(data)} bytes; the most is {limit(d)}")
        require(
            codec.encode(v.copy(), 5) == data, f"the codec: {what} gave other bytes the second time; draw from `stream`"
        )
        found = codec.decode(data, d, 5)
        fits = found.dtype == np.float32 and found.shape == (d,) and bool(np.isfinite(found).all())
        require(fits, f"the codec: {what} came back as {found.dtype}{list(found.shape)}, or not finite")
        require(float(found @ v) >= 0, f"the codec: {what} came back pointing the other way")
        zero = codec.decode(codec.encode(np.zeros(d, np.float32), 5), d, 5)
        require(codec.coarse or not zero.any(), "the codec: zeros came back as other values")
        for bad in _damaged(data):
            try:
                codec.decode(bad, d, 5)
            except MemoryError:
                raise AssertionError(f"the codec: a damaged payload of {what} asks for too much memory") from None
            except Exception:  # the caller of a codec makes it a CodecError
                continue


def _damaged(data: bytes) -> Iterator[bytes]:
    """The payload cut, grown and with flipped bits, and others that claim a lot."""
    rng = np.random.default_rng(len(data))
    yield from (b"", data[: len(data) // 2], data[:-1], data + b"\0", b"\xff" * 40, b"\x10" + b"\xff" * 39)
    for _ in range(8 if data else 0):
        bad = bytearray(data)
        bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        yield bytes(bad)
