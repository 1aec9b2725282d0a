"""`maskfleet codec bench`: bytes of set codecs against the entropy, their time, memory and false flips.

The peers (zlib, zstd, a range coder, a fuse filter in C) are used as their documentation shows.
"""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from edge_kernels import bits, counter
from edge_kernels import codecs as kernels
from numpy.typing import NDArray
from rich.table import Table

from edge_bench import provenance
from edge_bench.command_line import check_writable, known_names, numbers_of, plain_console, write_json
from edge_client.errors import ConfigError
from edge_client.measure.latency import in_turns

Mask = NDArray[np.bool_]
SAMPLE = 20_000  # positions queried in pyfusefilter, which takes one key at a time
PEERS = {"pyfusefilter": "pyfusefilter", "zlib": "zlib", "zstd": "zstandard", "constriction": "constriction"}
"""Each peer's module."""
BIG = 10_000_000  # from this size on, one timed run
TABLE_WIDTH = 112
CAPTION = "MB/s of the packed mask (d / 8 bytes); zlib 9, zstd 19 (9 for d > 1e6); pyfusefilter decodes a sample"


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
    queried: int
    size: Callable[[Any], int] = len


def flips(d: int, rate: float) -> Mask:
    """Independent flips, the same on every machine."""
    return counter.uniform(counter.key("codec bench", d, str(rate)), d) < rate


def entropy_bits(mask: Mask) -> float:
    """Bits per parameter of independent flips at the mask's rate."""
    p = np.count_nonzero(mask) / len(mask)
    return float(-sum(q * np.log2(q) for q in (p, 1 - p) if q > 0))


def subject(name: str, d: int, rate: float) -> Subject:
    """The named codec or peer. Raises ImportError when a peer is not installed."""
    if name in kernels.CODECS:
        return Subject(lambda m: kernels.encode(name, m, d), lambda data: kernels.decode_mask(name, data, d), d)
    if name == "constriction":
        return _constriction(d, rate)
    if name == "pyfusefilter":
        return _pyfusefilter(d)
    press: Callable[[bytes], bytes] = partial(zlib.compress, level=9)
    unpress: Callable[[bytes], bytes] = zlib.decompress
    if name == "zstd":
        import zstandard

        press = zstandard.ZstdCompressor(level=19 if d <= 1_000_000 else 9).compress
        unpress = zstandard.ZstdDecompressor().decompress
    return Subject(
        lambda mask: press(bits.pack(mask).tobytes()),
        lambda data: bits.unpack(np.frombuffer(unpress(data), np.uint8), d),
        d,
    )


def _constriction(d: int, rate: float) -> Subject:
    """A range coder with the known rate; 8 bytes are added for sending the rate."""
    import constriction

    queue = constriction.stream.queue
    model = constriction.stream.model.Bernoulli(rate, perfect=False)

    def encode(mask: Mask) -> Any:
        encoder = queue.RangeEncoder()
        encoder.encode(mask.astype(np.int32), model)
        return encoder.get_compressed()

    def decode(words: NDArray[np.uint32]) -> Mask:
        return np.asarray(queue.RangeDecoder(words).decode(model, d)).astype(np.bool_)

    return Subject(encode, decode, d, lambda words: int(words.nbytes) + 8)


def _pyfusefilter(d: int) -> Subject:
    """Fuse8 of a list of keys and `key in filter`, as its README shows."""
    from pyfusefilter import Fuse8

    queried = min(d, SAMPLE)

    def decode(filter_: Any) -> Mask:
        return np.fromiter((key in filter_ for key in range(queried)), np.bool_, queried)

    return Subject(lambda mask: Fuse8(np.flatnonzero(mask).tolist()), decode, queried, lambda f: len(f.serialize()))


def measure(names: Iterable[str], d: int, rate: float, repeats: int) -> list[Row]:
    """A row for each codec, on the same mask, which all code in turns."""
    mask = flips(d, rate)
    subjects = {name: subject(name, d, rate) for name in names}
    encodings = [partial(s.encode, mask) for s in subjects.values()]
    decodings = [partial(s.decode, s.encode(mask)) for s in subjects.values()]
    times = in_turns([*encodings, *decodings], repeats, warm_up=0).wall
    medians = np.median(times, axis=1).reshape(2, -1).T
    return [_row(name, s, both, mask, rate) for (name, s), both in zip(subjects.items(), medians, strict=True)]


def _row(name: str, s: Subject, ms: NDArray[np.float64], mask: Mask, rate: float) -> Row:
    """The row of one codec, which takes float64[2] `ms` to encode and decode. Raises AssertionError for a lost flip."""
    d, queried = len(mask), mask[: s.queried]
    made, peak_encode = _peak(lambda: s.encode(mask))
    found, peak_decode = _peak(lambda: s.decode(made))
    if (queried & ~found).any():
        raise AssertionError(f"{name} lost a flip at d = {d}, rate {rate}")
    return Row(
        codec=name,
        d=d,
        flip_rate=rate,
        bits_per_parameter=s.size(made) * 8 / d,
        entropy_bits_per_parameter=entropy_bits(mask),
        encode_ns_per_parameter=float(ms[0]) / d * 1e6,
        decode_ns_per_parameter=float(ms[1]) / s.queried * 1e6,
        false_flips=round(int(np.count_nonzero(found & ~queried)) * d / s.queried),
        peak_bytes=max(peak_encode, peak_decode),
    )


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the most bytes that Python and numpy held during it."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bench(
    params: Annotated[str, typer.Option(help="Sizes d, comma-separated.")] = "100000,1000000,10000000",
    rates: Annotated[str, typer.Option("--flips", help="Flip rates, comma-separated.")] = "0.1,0.02,0.01,0.005,0.002",
    codecs: Annotated[str | None, typer.Option(help="Only these codecs or peers, comma-separated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median is shown. One at d >= 1e7.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements here.")] = None,
) -> None:
    """Measure all codecs, and the peers that are installed, at the given sizes and flip rates."""
    known = [*kernels.names(), *PEERS]
    chosen = known_names(codecs, "--codecs", known, "there is no codec")
    absent = [name for name, module in PEERS.items() if find_spec(module) is None] if codecs is None else []
    chances = numbers_of(rates, "--flips", float)
    if not all(0 < rate < 1 for rate in chances):
        raise ConfigError(f"--flips {rates}: a flip rate lies between 0 and 1")
    given = numbers_of(params, "--params", float)
    if not all(d.is_integer() and d >= 1 for d in given):
        raise ConfigError(f"--params {params}: a size is a whole number, at least 1")
    sizes = [int(d) for d in given]
    console = plain_console(TABLE_WIDTH)
    check_writable(json_file)
    origin = provenance.origin()
    if absent:
        console.print(f"left out, as not installed: {', '.join(absent)}; to compare: pip install 'maskfleet[peers]'")
    rows: list[Row] = []
    for d in sizes:
        for rate in chances:
            found = measure([name for name in chosen if name not in absent], d, rate, repeats if d < BIG else 1)
            console.print(_table(found))
            rows += found
    if json_file is not None:
        write_json(json_file, {**origin, "rows": [asdict(row) for row in rows]})
        console.print(f"wrote {json_file}")


def _table(rows: list[Row]) -> Table:
    """The table of one size and flip rate, smallest payload first."""
    bound = rows[0].entropy_bits_per_parameter
    title = f"d = {rows[0].d:,}, flip rate {rows[0].flip_rate:g}, entropy {bound:.4f} bits per parameter"
    table = Table("codec", title=title, caption=CAPTION)
    heads = "bits/param", "/ entropy", "encode ns", "decode ns", "encode MB/s", "decode MB/s", "false flips", "peak MB"
    for name in heads:
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda r: r.bits_per_parameter):
        table.add_row(
            row.codec, f"{row.bits_per_parameter:.4f}", f"{row.bits_per_parameter / bound:.3f}" if bound else "-",
            f"{row.encode_ns_per_parameter:.2f}", f"{row.decode_ns_per_parameter:.2f}",
            f"{125 / row.encode_ns_per_parameter:.1f}", f"{125 / row.decode_ns_per_parameter:.1f}",
            f"{row.false_flips:,}", f"{row.peak_bytes / 1e6:.1f}",
        )  # fmt: skip
    return table
