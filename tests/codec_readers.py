"""Readers of the codecs, written from docs/codecs.md alone: one number at a time, without numpy.

The tests compare the fast codecs with them. A port to another language can start from them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

M64 = (1 << 64) - 1


class BitReader:
    """Bits of bytes, least significant first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bit(self) -> int:
        self.at += 1
        return self.data[(self.at - 1) // 8] >> ((self.at - 1) % 8) & 1

    def unary(self) -> int:
        count = 0
        while not self.bit():
            count += 1
        return count

    def planes(self, widths: Sequence[int]) -> list[int]:
        values = [0] * len(widths)
        for j in range(max(widths, default=0)):
            for i, width in enumerate(widths):
                if width > j:
                    values[i] |= self.bit() << j
        return values

    def align(self) -> int:
        self.at = -(-self.at // 8) * 8
        return self.at // 8


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def rice(data: bytes, d: int) -> list[int]:
    log, complement = data[0] & 31, data[0] & 128
    count, at = varint(data, 1)
    out: list[int] = []
    while len(out) < count:
        n = min(1 << log, count - len(out))
        k, thirds = data[at] & 31, data[at] & 32
        _, at = varint(data, at + 1)
        bits = BitReader(data[at:])
        quotients = [bits.unary() for _ in range(n)]
        low = bits.planes([k] * n)
        rests = [0] * n
        if thirds:
            above = [bits.bit() for _ in range(n)]
            rests = [1 + bits.bit() if flag else 0 for flag in above]
        for q, r, rest in zip(quotients, low, rests, strict=True):
            gap = ((q * 3 + rest if thirds else q) << k) + r
            out.append((out[-1] if out else -1) + 1 + gap)
        at += bits.align()
    return sorted(set(range(d)) - set(out)) if complement else out


def table(size: int, runs: int, raw: int) -> list[int]:
    x = ((size - runs) << 64) // size
    for _ in range(raw):
        x = x * x >> 64
    ratio = x >> 32
    rest = 1 << 15
    freqs: list[int] = []
    while rest > 4 and len(freqs) < 127:
        freqs.append(max(1, rest * ((1 << 32) - ratio) >> 32))
        rest -= freqs[-1]
    return [*freqs, rest]


def unzigzag(number: int) -> int:
    return (number + 1) // 2 if number % 2 else -(number // 2)


def expected(flips: Sequence[int], sizes: Sequence[int], offset: int) -> tuple[int, int]:
    """The predicted flips of the class after `flips`, and the order of the code of the difference."""
    i = len(flips)
    guess = sizes[0] // 32
    if i:
        up, down = 2 * flips[i - 1] + 1, 2 * sizes[i - 1] + 2
        if i > 1:
            a, b = up * (2 * sizes[i - 2] + 2), down * (2 * flips[i - 2] + 1)
            if a > 4 * b:
                a, b = 4, 1
            elif b > 4 * a:
                a, b = 1, 4
            up, down = up * a, down * b
        guess = min(sizes[i] * up // down, sizes[i])
    return guess, max(3 * min(guess, sizes[i] - guess).bit_length() // 4 + offset - 2, 0)


def entropy(data: bytes, d: int, contexts: Sequence[int] | None = None) -> list[int]:
    mode = data[0]
    bits = BitReader(data[1:])
    if mode == 15 or contexts is None:
        members = [list(range(d))] if d else []
    else:
        merged = [c >> mode for c in contexts]
        members = [[i for i, c in enumerate(merged) if c == context] for context in sorted(set(merged))]
    sizes, flips = [len(mine) for mine in members], list[int]()
    offset = bits.planes([2])[0] if sizes else 0
    while len(flips) < len(sizes):
        guess, order = expected(flips, sizes, offset)
        width = order + bits.unary()
        flips.append(guess + unzigzag(bits.planes([width])[0] + (1 << width) - (1 << order)))

    coded = []  # (members, inverted, runs, raw, freqs)
    weight = raw_weight = 0
    for mine, n in zip(members, flips, strict=True):
        runs = min(n, len(mine) - n)
        if runs:
            log = (len(mine) // runs).bit_length()
            raw = max(log - 4, 0)
            coded.append((mine, 2 * n > len(mine), runs, raw, table(len(mine), runs, raw)))
            weight += runs * log
            raw_weight += runs * raw
    lanes = min(max(weight >> 12, min(weight >> 11, raw_weight >> 4), 1), 1 << 14) if coded else 0
    lengths = [16 + more for more in bits.planes([4] * lanes)]
    states = [(1 << length) + low for length, low in zip(lengths, bits.planes(lengths), strict=True)]
    at = 1 + bits.align()

    symbols: list[int] = []
    for _, _, runs, _, freqs in coded:
        for _ in range(runs):
            lane = len(symbols) % lanes
            slot, symbol, start = states[lane] % (1 << 15), 0, 0
            while slot >= start + freqs[symbol]:
                start += freqs[symbol]
                symbol += 1
            states[lane] = freqs[symbol] * (states[lane] >> 15) + slot - start
            if states[lane] < 1 << 16:
                states[lane] = states[lane] << 16 | int.from_bytes(data[at : at + 2], "little")
                at += 2
            symbols.append(symbol)
    raw_bits = BitReader(b"".join((x - (1 << 16)).to_bytes(2, "little") for x in states) + data[at:])
    raws = [raw for _, _, runs, raw, _ in coded for _ in range(runs)]
    escapes = [len(freqs) - 1 for _, _, runs, _, freqs in coded for _ in range(runs)]
    low = raw_bits.planes(raws)
    escaped = [i for i in range(len(symbols)) if symbols[i] == escapes[i]]
    lengths = [raw_bits.unary() for _ in escaped]
    for i, extra, length in zip(escaped, raw_bits.planes(lengths), lengths, strict=True):
        symbols[i] += extra + (1 << length) - 1
    gaps = iter([(s << k) + r for s, k, r in zip(symbols, raws, low, strict=True)])

    out = [i for mine, n in zip(members, flips, strict=True) if n == len(mine) for i in mine]
    for mine, inverted, runs, _, _ in coded:
        place, found = -1, set()
        for _ in range(runs):
            place += 1 + next(gaps)
            found.add(place)
        out += [i for place, i in enumerate(mine) if (place in found) != inverted]
    return sorted(out)


def counts(data: bytes, d: int, top: int, prediction: Sequence[int] | None) -> list[int]:
    """A payload of one segment: d is at most 2**20."""

    def class_of(rank: int) -> int:
        return rank if rank < 16 else rank.bit_length() + 11

    contexts = prediction if prediction is None or top < 64 else [p * 64 // (top + 1) for p in prediction]
    at, undecided, classes = 0, list(range(d)), [class_of(top)] * d
    for rank in range(class_of(top)):
        if undecided:
            length, at = varint(data, at)
            given = None if contexts is None else [contexts[i] for i in undecided]
            hits = set(entropy(data[at : at + length], len(undecided), given))
            at += length
            for place in hits:
                classes[undecided[place]] = rank
            undecided = [i for place, i in enumerate(undecided) if place not in hits]
    big = [i for i in range(d) if classes[i] >= 16]
    ranks = list(classes)
    widths = [classes[i] - 12 for i in big]
    for i, width, low in zip(big, widths, BitReader(data[at:]).planes(widths), strict=True):
        ranks[i] = (1 << width) + low
    steps = [(r + 1) // 2 if r % 2 else -(r // 2) for r in ranks]
    return [((prediction[i] if prediction is not None else 0) + step) % (top + 1) for i, step in enumerate(steps)]


def fuse(data: bytes, d: int, width: int) -> list[int]:
    def field(low: int, size: int) -> int:
        return int.from_bytes(data[low : low + size], "little")

    seed, length, span = field(0, 8), field(12, 4), field(20, 4)
    cell: Callable[[int], int] = lambda i: field(28 + i * width // 8, width // 8)  # noqa: E731
    out = []
    for key in range(d):
        h = (key + seed) & M64
        h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & M64
        h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & M64
        h ^= h >> 33
        h0 = h * span >> 64
        h1 = (h0 + length) ^ (h >> 18 & length - 1)
        h2 = (h0 + 2 * length) ^ (h & length - 1)
        if (h ^ h >> 32) & ((1 << width) - 1) == cell(h0) ^ cell(h1) ^ cell(h2):
            out.append(key)
    return out


def auto(data: bytes, d: int, contexts: Sequence[int] | None = None) -> list[int]:
    if data[0] == 0:
        bits = BitReader(data[1:])
        return [i for i in range(d) if bits.bit()]
    return rice(data[1:], d) if data[0] == 1 else entropy(data[1:], d, contexts)


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def key(*words: int | str) -> int:
    out = 0
    for word in words:
        number = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little") if isinstance(word, str) else word
        out = mix((out ^ number & M64) + 0x9E3779B97F4A7C15 & M64)
    return out


def number(stream: int, i: int) -> int:
    return mix(stream + (i + 1) * 0x9E3779B97F4A7C15 & M64)


def bloom(data: bytes, d: int) -> list[int]:
    hashes = data[0]
    _, at = varint(data, 1)
    cells, at = varint(data, at)
    stream = key("bloom")

    def held(position: int) -> bool:
        h, g = number(stream, position) & 0xFFFFFFFF, number(stream, position) >> 32 | 1
        where = [((h + j * g) % 2**32) * cells >> 32 for j in range(hashes)]
        return all(data[at + cell // 8] >> cell % 8 & 1 for cell in where)

    return [position for position in range(d) if cells and held(position)]


def klms(data: bytes, prior: Sequence[float], stream: int) -> list[bool]:
    d, blocks = len(prior), len(data)
    mask = [False] * d
    for i, position in enumerate(sorted(range(d), key=lambda i: number(stream, i))):
        place, block = divmod(i, blocks)
        at = 256 * place + data[block]
        uniform = number(stream, d + at // 4) >> 16 * (at % 4) & 0xFFFF
        mask[position] = uniform < min(max(int(prior[position] * 65536 + 0.5), 1), 65535)
    return mask


def floats(data: bytes, at: int, count: int) -> tuple[list[float], int]:
    return list(struct.unpack_from(f"<{count}f", data, at)), at + 4 * count


def float32(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    return floats(data, 0, d)[0]


def float16(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    return list(struct.unpack(f"<{d}e", data))


def stochastic8(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    scales, at = floats(data, 0, -(-d // 512))
    return [scales[i // 512] * level / 127 for i, level in enumerate(struct.unpack_from(f"<{d}b", data, at))]


CENTROIDS = {
    1: [0.79788],
    2: [0.45278, 1.51042],
    3: [0.24509, 0.75601, 1.34391, 2.15195],
    4: [0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259],
}


def blocks(d: int) -> list[int]:
    out, rest = [8192] * (d // 8192), -(-(d % 8192) // 64)
    return out + [64 << j for j in reversed(range(8)) if rest >> j & 1]


def hadamard(x: list[float]) -> list[float]:
    if len(x) == 1:
        return x
    a, b = hadamard(x[: len(x) // 2]), hadamard(x[len(x) // 2 :])
    return [p + q for p, q in zip(a, b, strict=True)] + [p - q for p, q in zip(a, b, strict=True)]


def rotated(data: bytes, d: int, stream: int, bits: float, centroids: list[float] | None) -> list[float]:
    """Without centroids, each block has two of its own in the place of its factor."""
    width, sizes = max(1, int(bits)), blocks(d)
    factors, at = floats(data, 0, len(sizes) if centroids else 2 * len(sizes))
    sent: list[int] = []
    low = 0
    for n in sizes:
        order = sorted(range(low, low + n), key=lambda i: number(key(stream, "subsample"), i))
        sent += sorted(order[: n if bits >= 1 else max(1, round(bits * n))])
        low += n
    reader, levels = BitReader(data[at:]), [0] * len(sent)
    for j in range(width):
        for i in range(len(sent)):
            levels[i] |= reader.bit() << j
    c = [0.0] * low
    if centroids:
        for i, level in zip(sent, levels, strict=True):
            size = centroids[level % 2 ** (width - 1)]
            c[i] = -size if level >> (width - 1) else size
    else:
        of = [j for j, n in enumerate(sizes) for _ in range(n)]
        c = [factors[2 * of[i] + level] for i, level in enumerate(levels)]
        factors = [1.0] * len(sizes)

    def flipped(x: list[float], start: int, which: int) -> list[float]:
        signs = key(stream, "signs", which)
        return [-v if number(signs, (start + i) // 64) >> (start + i) % 64 & 1 else v for i, v in enumerate(x)]

    out: list[float] = []
    for n, factor in zip(sizes, factors, strict=True):
        start = len(out)
        x = flipped(hadamard(flipped(hadamard(c[start : start + n]), start, 1)), start, 0)
        out += [factor * v for v in x]
    return out[:d]


def eden(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    bits = float(parameter or 1)
    return rotated(data, d, stream, bits, CENTROIDS[max(1, int(bits))])


def drive(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    return rotated(data, d, stream, 1, [1.0])


def drive_plus(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    return rotated(data, d, stream, 1, None)


def signed(reader: BitReader, magnitudes: Sequence[float]) -> list[float]:
    return [-m if reader.bit() else m for m in magnitudes]


def qsgd(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    top = int(parameter or 7)
    norms, at = floats(data, 0, -(-d // 512))
    length, at = varint(data, at)
    levels = counts(data[at : at + length], d, top, None)
    bits = BitReader(data[at + length :])
    signs = [-1 if level and bits.bit() else 1 for level in levels]
    return [signs[i] * norms[i // 512] * level / top for i, level in enumerate(levels)]


def sign(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    (magnitude,), at = floats(data, 0, 1)
    return signed(BitReader(data[at:]), [magnitude] * d)


def placed(d: int, positions: Sequence[int], values: Sequence[float]) -> list[float]:
    out = [0.0] * d
    for position, value in zip(positions, values, strict=True):
        out[position] = value
    return out


def topk(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    length, at = varint(data, 0)
    positions = auto(data[at : at + length], d)
    return placed(d, positions, floats(data, at + length, len(positions))[0])


def stc(data: bytes, d: int, stream: int, parameter: str) -> list[float]:
    (magnitude,), at = floats(data, 0, 1)
    length, at = varint(data, at)
    positions = auto(data[at : at + length], d)
    return placed(d, positions, signed(BitReader(data[at + length :]), [magnitude] * len(positions)))


VALUES = {
    "float32": float32, "float16": float16, "stochastic8": stochastic8, "eden": eden, "drive": drive,
    "drive+": drive_plus, "qsgd": qsgd, "topk": topk, "stc": stc, "sign": sign,
}  # fmt: skip


def parts(codec: str, data: bytes, ends: Sequence[int], stream: int, parameter: str) -> list[float]:
    out: list[float] = []
    at = 0
    for i, end in enumerate(ends):
        length, at = varint(data, at)
        out += VALUES[codec](data[at : at + length], end - len(out), key(stream, i), parameter)
        at += length
    return out
