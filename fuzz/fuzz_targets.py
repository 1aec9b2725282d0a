"""The fuzz targets: decoders, each with a valid payload and the size of its result.

A target is a decoder with its d, contexts, prediction, prior or probabilities. Giving one target's payload to another
tries a wrong d. Most targets are small, so many payloads fit in a minute; the `large` ones show memory that grows with
d. `Target.craft` makes payloads that random changes do not reach: images with valid checksums and consistent headers.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from edge_kernels import codecs, counter, coupling, lattice
from edge_kernels.codecs import CodecError, counts, fuse, klms, png, values
from numpy.typing import NDArray

from edge_client.errors import PayloadError
from edge_client.protocol import payload as container

SMALL = ((0, 0.5), (1, 0.5), (37, 0.3), (300, 0.02), (60, 0.6), (4000, 0.003), (70000, 0.0001))
LARGE = 1_000_000
PARAMETERS = ("eden:4", "eden:0.0001", "eden:0.9", "drive:mse", "drive+:mse", "qsgd:255", "topk:1", "stc:1")

Craft = Callable[[random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A decoder, a valid payload (`seed`), the least bytes of its result (`decoded`), and its error.

    A result may be larger than `decoded`: the positions of a set take four bytes each.
    """

    name: str
    decode: Callable[[bytes], object]
    seed: bytes
    decoded: int
    refusal: type[Exception] = CodecError
    craft: Craft | None = None


def codec_targets(large: bool = False) -> list[Target]:
    """All decoders of `edge_kernels.codecs`."""
    out = []
    for d, rate in ((LARGE, 0.01),) if large else SMALL:
        mask = counter.uniform(counter.key("fuzz", d), d) < rate
        contexts = (counter.uint64(counter.key("fuzz contexts", d), d) % np.uint64(5)).astype(np.uint8)
        for name in codecs.names():
            if d != 70000 or name in ("rice", "entropy", "auto"):
                out.append(_set_target(name, mask, None))
        if d != 70000:
            out.append(_set_target("entropy", mask, contexts))
    for d, top in ((LARGE, 3),) if large else ((30, 3), (40, 10), (12, 1000)):
        drawn = counter.uint64(counter.key("fuzz counts", d), d) % np.uint64(top + 1)
        prediction = drawn.astype(counts.dtype_for(top))
        now = np.minimum(prediction + (counter.uniform(5, d) < 0.1), top).astype(prediction.dtype)
        decode = partial(counts.decode, d=d, top=top, prediction=prediction)
        out.append(Target(f"counts d={d}", decode, counts.encode(now, top, prediction), now.nbytes))
        plain = partial(counts.decode, d=d, top=top)
        out.append(Target(f"counts d={d} plain", plain, counts.encode(now, top), now.nbytes))
    for d in (LARGE,) if large else (90, 300):
        prior = counter.uniform(counter.key("fuzz prior", d), d)
        payload = klms.encode(np.clip(prior + 0.1, 0, 1), prior, 1, 2)
        out.append(Target(f"klms d={d}", partial(klms.decode, prior=prior, stream=1), payload, 6 * d))
    for d in (LARGE,) if large else (77, 1300):
        for name in (*values.VALUES, *PARAMETERS):
            payload = values.encode(name, counter.uniform(4, d) - 0.5, 3)
            out.append(Target(f"{name} d={d}", partial(values.decode, name, d=d, stream=3), payload, 4 * d))
        ends = (d // 3, d // 3, d)
        for name in ("topk", "drive+", "qsgd"):
            payload = values.encode_parts(name, counter.uniform(4, d) - 0.5, ends, 3)
            decode = partial(values.decode_parts, name, ends=ends, stream=3)
            out.append(Target(f"{name} in parts d={d}", decode, payload, 4 * d))
    out += [_set_target(name, counter.uniform(6, d) < 0.1, None) for name in ("bloom:0.5", "bloom:0.000001")]
    return out


def coupling_targets(large: bool = False) -> list[Target]:
    """The flips of a device and the net flips of a cohort, each with and without history."""
    d, devices = (LARGE, 2) if large else (480, 3)
    theta = np.clip(counter.uniform(counter.key("fuzz theta", d), d), 0.01, 0.99)
    streams = [counter.uniform(counter.key("fuzz uniforms", i), d) for i in range(devices)]
    pull = 0.6 * (counter.uniform(counter.key("fuzz pull"), d) - 0.5)
    masks = [u < theta + pull for u in streams]
    cohort = coupling.Cohort.empty(d)
    for u in streams:
        cohort.add(theta, u)
    net = sum(mask.astype(np.int32) for mask in masks) - cohort.reference.astype(np.int32)
    flips = masks[0] ^ (streams[0] < theta)
    out = []
    for label, past in (("", None), (" with history", coupling.history(np.rint(5 * pull).astype(np.int32), [(d,)]))):
        data = coupling.encode_flips(flips, theta, streams[0], past)
        read = partial(coupling.decode_flips, theta=theta, uniforms=streams[0], past=past)
        out.append(Target(f"flips d={d}{label}", read, data, d))
        data = coupling.encode_net(net, theta, cohort, past)
        read_net = partial(coupling.decode_net, theta=theta, cohort=cohort, past=past, masks=devices)
        out.append(Target(f"net flips d={d}{label}", read_net, data, 4 * d))
    few = np.arange(d) % 97 == 5
    data = coupling.encode_flips(few, theta, streams[0], None)
    read = partial(coupling.decode_flips, theta=theta, uniforms=streams[0], past=None)
    return [*out, Target(f"flips d={d} without a model", read, data, d)]


TABLES = 1 << 16  # bytes of the model's tables and of a small vector's lanes


def lattice_targets(large: bool = False) -> list[Target]:
    """A device's numbers, and a whole vector."""
    rows = 1000 if large else 30
    spans, d = (
        [(slice(0, rows * rows), rows, rows), (slice(rows * rows, rows * rows + rows), rows, 1)],
        rows * rows + rows,
    )
    dither = (counter.uint64(counter.key("fuzz lattice"), d) >> np.uint64(32)).astype(np.uint32)
    lean = counter.uniform(counter.key("fuzz lean"), d) - 0.5
    held = np.rint(1.1 * lean).astype(np.int32) * 20
    known, whole = lattice.up(dither, spans, held), lattice.whole(spans)
    found = np.floor(4 * lean**5 + dither * 2.0**-32).astype(np.int32)
    out = []
    for label, numbers, what in (("up", found, known), ("whole", held, whole), ("whole sparse", found, whole)):
        data = lattice.encode(numbers, what)
        out.append(Target(f"lattice {label} d={d}", partial(lattice.decode, known=what), data, 8 * d + TABLES))
    if (low := lattice._encoded(1000 * found, known, 9)) is None:
        raise RuntimeError("the coder refuses these numbers with low bits")
    return [*out, Target(f"lattice low bits d={d}", partial(lattice.decode, known=known), low, 8 * d + TABLES)]


def container_targets(large: bool = False) -> list[Target]:
    """The payload container with no arrays, with every dtype, and with the arrays of methods."""
    meta = {"m": [40, 0.25, 0, 0.5, 10], "structure": "00ff00ff", "since": 3, "share": 0.25}
    every = {
        d: (np.arange(6) % 2).astype(d).reshape(2, 3) for d in ("f2", "f4", "f8", "u1", "i1", "u2", "u4", "u8", "?")
    }
    made = {
        "empty": container.Payload(),
        "words": container.Payload({}, meta),
        "dtypes": container.Payload(every, meta),
        "mask": container.Payload({"mask": np.arange(200, dtype=np.uint8), "head": np.ones(5, np.float32)}, meta),
        "scalar": container.Payload({"one": np.array(3, np.int64), "none": np.zeros((0, 4), np.float32)}),
    }
    if large:
        made = {"large": container.Payload({"mask": np.ones(LARGE, np.uint8)}, meta)}
    encoded = {name: container.encode(p) for name, p in made.items()} | ({} if large else {"foreign": _foreign(meta)})
    return [
        Target(f"container {name}", container.decode, data, len(data), PayloadError) for name, data in encoded.items()
    ]


def _foreign(meta: dict[str, Any]) -> bytes:
    """A payload as another language's writer spells it: spaces, other number formats, unescaped text, no padding."""
    words = {key: json.dumps(value, indent=1).replace("0.25", "2.50E-1") for key, value in meta.items()}
    entry = {"shape": [3], "dtype": "U8", "data_offsets": [0, 3]}
    header = {"a": entry, "__metadata__": {**words, "text": '"h\u00e9"'}}
    data = json.dumps(header, ensure_ascii=False).encode()
    return len(data).to_bytes(8, "little") + data + b"abc"


GROUPS: dict[str, Callable[[bool], list[Target]]] = {
    "codecs": codec_targets,
    "coupling": coupling_targets,
    "lattice": lattice_targets,
    "container": container_targets,
}


def _set_target(name: str, mask: NDArray[np.bool_], contexts: codecs.Contexts | None) -> Target:
    d = len(mask)
    payload = codecs.encode(name, mask, d, contexts)
    label = f"{name} d={d}" + (" with contexts" if contexts is not None else "")
    craft = partial(_crafted_filter, d, name) if name.startswith("fuse") else None
    return Target(label, lambda data: codecs.decode(name, data, d, contexts), payload, d, CodecError, craft)


def _crafted_filter(d: int, name: str, rng: random.Random) -> bytes:
    """A filter of any size and geometry with a consistent header and length, as an image for `fuse8-png`."""
    width = 8 if name == "fuse8-png" else int(name[4:])
    size = rng.choice((0, 1, 2, d // 2, d, d, d, d + 1, rng.randrange(2 * d + 2)))
    length = rng.choice((*fuse.geometry(size)[:1], 1 << rng.randrange(20)))
    room = rng.choice((fuse.geometry(size)[1] * length, fuse.most_cells(min(size, d)), 64 + 8 * size))
    segments = max(min(room, 16 * d + 64) // length - rng.randrange(3), 1)
    cells = (segments + 2) * length
    if cells > 16 * d + 4096:  # the network layer refuses payloads of this size
        cells, segments = 3 * length, 1
    data = fuse.HEADER.pack(rng.getrandbits(64), size, length, segments, segments * length, cells)
    count = min(cells, 16 * d + 4096) * width // 8
    data += rng.randbytes(count) if rng.random() < 0.3 else bytes([rng.choice((0, 0, 255))]) * count
    if name != "fuse8-png":
        return data
    image = bytearray(png.encode_filter(data))
    if rng.random() < 0.5:  # other dimensions, with a valid checksum
        side = rng.choice((1, 7, 100, 1 << rng.randrange(31)))
        shape: list[Any] = [side, max(side - rng.randrange(2), 0)]
        if rng.random() < 0.3:
            shape[rng.randrange(2)] = 1 << rng.randrange(31)
        image[16:24] = struct.pack(">II", *shape)
        image[29:33] = zlib.crc32(bytes(image[12:29])).to_bytes(4, "big")
    return bytes(image)
