"""Writes the test vectors in this folder: ``python tests/vectors/write_vectors.py``. Run it only when a format changes.

Each file is a list of cases: the input, the parameters and the payload in hex, for readers in any language.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from edge_kernels import codecs, counter, coupling, lattice
from edge_kernels.codecs import counts, fuse, klms, png, values
from numpy.typing import NDArray

HERE = Path(__file__).parent


def positions_at(d: int, rate: float, *words: int | str) -> list[int]:
    """Positions whose uniform lies below `rate`."""
    return [int(i) for i in np.flatnonzero(counter.uniform(counter.key("vectors", *words), d) < rate)]


def sets() -> list[dict[str, Any]]:
    """Cases of sets: empty, full, single, sparse, even, dense, uneven."""
    uneven = positions_at(4000, 0.3, "uneven")
    return [
        {"d": 0, "positions": []},
        {"d": 1, "positions": [0]},
        {"d": 13, "positions": [0, 3, 12]},
        {"d": 64, "positions": list(range(64))},
        {"d": 1000, "positions": positions_at(1000, 0.02, "sparse")},
        {"d": 300, "positions": positions_at(300, 0.5, "even")},
        {"d": 300, "positions": positions_at(300, 0.9, "dense")},
        {"d": 5000, "positions": [p for p in uneven if p < 500 or p % 97 == 0]},
    ]


def set_cases(name: str) -> list[dict[str, Any]]:
    """Every set in one exact codec."""
    return [
        {**case, "hex": codecs.encode(name, np.array(case["positions"], np.uint32), case["d"]).hex()} for case in sets()
    ]


def context_cases() -> list[dict[str, Any]]:
    """Codec `entropy` with contexts: some are used, some are empty, one is full of flips."""
    d = 600
    contexts = (counter.uint64(counter.key("vectors", "contexts"), d) % np.uint64(7)).astype(np.uint8)
    rates = np.array([0.01, 0.02, 0.5, 0.0, 0.9, 1.0, 0.1])[contexts]
    positions = np.flatnonzero(counter.uniform(counter.key("vectors", "flips"), d) < rates).astype(np.uint32)
    payload = codecs.encode("entropy", positions, d, contexts)
    return [{"d": d, "contexts": contexts.tolist(), "positions": positions.tolist(), "hex": payload.hex()}]


def fuse_cases() -> list[dict[str, Any]]:
    """Filters, and all positions they hold."""
    out = []
    for width in (8, 16, 32):
        for d, rate in ((50, 0.1), (2000, 0.02)):
            keys = positions_at(d, rate, "fuse", d)
            payload = fuse.build(np.array(keys, np.uint32), width).to_bytes()
            held = fuse.decode(payload, d, width).tolist()
            out.append({"codec": f"fuse{width}", "d": d, "keys": keys, "positions": held, "hex": payload.hex()})
    keys = positions_at(2000, 0.02, "fuse", 2000)
    image = png.encode_filter(fuse.build(np.array(keys, np.uint32), 8).to_bytes())
    held = png.decode(image, 2000).tolist()
    return [*out, {"codec": "fuse8-png", "d": 2000, "keys": keys, "positions": held, "hex": image.hex()}]


def count_cases() -> list[dict[str, Any]]:
    """Counts with and without a prediction, small and large."""
    out = []
    for d, top in ((40, 0), (200, 1), (200, 10), (100, 1000)):
        before = (counter.uint64(counter.key("vectors", "before", top), d) % np.uint64(top + 1)).astype(
            counts.dtype_for(top)
        )
        stay = counter.uniform(counter.key("vectors", "stay", top), d) < 0.7
        drawn = counter.uint64(counter.key("vectors", "now", top), d) % np.uint64(top + 1)
        now = np.where(stay, before, drawn).astype(before.dtype)
        for prediction in (None, before):
            given = None if prediction is None else prediction.tolist()
            payload = counts.encode(now, top, prediction)
            out.append({"d": d, "top": top, "prediction": given, "values": now.tolist(), "hex": payload.hex()})
    return out


def klms_cases() -> list[dict[str, Any]]:
    """Masks: the prior as float32 in hex, the stream, the payload and the ones; a full and a short last place."""
    out = []
    for d, moved in ((40, 0.3), (300, 0.05), (301, 0.0)):
        stream = counter.key("vectors", "klms", d)
        prior = (counter.uint64(counter.key("vectors", "prior"), d) % np.uint64(11)).astype(np.float32) / np.float32(10)
        payload = klms.encode(np.clip(prior + np.float32(moved), 0, 1), prior, stream, counter.key("vectors", "choice"))
        ones = np.flatnonzero(klms.decode(payload, prior, stream)).tolist()
        out.append({"prior_float32_hex": prior.astype("<f4").tobytes().hex(), "stream": str(stream),
                    "hex": payload.hex(), "positions": ones})  # fmt: skip
    return out


def coupling_cases() -> list[dict[str, Any]]:
    """Flips of one device and net flips of three, with and without history; few flips take no model."""
    shapes, stream = [(12, 30), (140,)], counter.key("vectors", "coupled")
    d = sum(int(np.prod(shape)) for shape in shapes)
    theta = np.clip(counter.uniform(stream, d), 0.03125, 0.96875)
    streams = [counter.key("vectors", "coupled", n) for n in "abc"]
    uniforms = [counter.uniform(s, d) for s in streams]
    pull = 0.5 * (counter.uniform(counter.key("vectors", "pull"), d) - 0.5)
    after = [np.clip(theta + pull * (1 + i / 4), 0, 1) for i in range(len(streams))]
    masks = [u < a for u, a in zip(uniforms, after, strict=True)]
    cohort = coupling.Cohort.empty(d)
    for u in uniforms:
        cohort.add(theta, u)
    net = sum(mask.astype(np.int32) for mask in masks) - cohort.reference.astype(np.int32)
    before = np.rint(6 * pull).astype(np.int32)
    past = coupling.history(before, shapes)
    flips, few = masks[0] ^ (uniforms[0] < theta), np.arange(d) % 101 == 7
    packed = np.packbits(uniforms[0] < theta, bitorder="little")
    known = {"d": d, "theta": [float(t).hex() for t in theta], "streams": [str(s) for s in streams],
             "shapes": shapes, "past": before.tolist(),
             "reference": hashlib.sha256(packed).hexdigest()[:16]}  # fmt: skip
    out: list[dict[str, Any]] = []
    for history in (None, past):
        for what in (flips, few):
            data = coupling.encode_flips(what, theta, uniforms[0], history)
            out.append({"kind": "flips", "history": history is not None,
                        "positions": np.flatnonzero(what).tolist(), "hex": data.hex()})  # fmt: skip
        data = coupling.encode_net(net, theta, cohort, history)
        out.append({"kind": "net", "history": history is not None, "net": net.tolist(), "hex": data.hex()})
    return [{**known, "cases": out}]


def low_bits(values: NDArray[np.int32], known: lattice.Known) -> bytes:
    """A payload with 12 low bits of each value in planes."""
    data = lattice._encoded(values, known, 12)
    assert data is not None
    return data


def lattice_cases() -> list[dict[str, Any]]:
    """A device's numbers, a cohort's sum and a whole vector; large numbers, few, none, several lanes."""
    shapes = [(30, 20), (30, 1), (4, 31), (3, 1)]
    spans, d = [], 0
    for rows, columns in shapes:
        spans.append((slice(d, d + rows * columns), rows, columns))
        d += rows * columns
    streams = [counter.key("vectors", "lattice", n) for n in "ab"]
    dithers = [(counter.uint64(s, d) >> np.uint64(32)).astype(np.uint32) for s in streams]
    lean = counter.uniform(counter.key("vectors", "lean"), d) - 0.5
    held = np.rint(4 * lean * (np.arange(d) % 20 < 9)).astype(np.int32)
    few, many = ([np.floor(size * lean**3 + u * 2.0**-32).astype(np.int32) for u in dithers] for size in (0.6, 4.0))
    large = np.where(np.arange(d) % 50 == 3, np.arange(d) * 2837465 - 2**30, held).astype(np.int32)
    fall, rise = np.minimum(*dithers), np.minimum(*(~u for u in dithers))
    up, down = lattice.up(dithers[0], spans, held), lattice.down(fall, rise, spans, held)
    made = [
        ("up", few[0], up),
        ("up", many[0], up),
        ("up", 0 * held, up),
        ("down", few[0] + few[1], down),
        ("down", large, down),
        ("whole", held, lattice.whole(spans)),
        ("whole", large, lattice.whole(spans)),
    ]
    known = {"shapes": shapes, "streams": [str(s) for s in streams], "held": held.tolist()}
    return [
        {
            **known,
            "cases": [
                {"kind": kind, "values": values.tolist(), "hex": lattice.encode(values, what).hex()}
                for kind, values, what in made
            ],
            # What a writer does with many more numbers of this size: their lowest 12 bits are in planes.
            "low": [
                {"kind": kind, "values": values.tolist(), "hex": low_bits(values, what).hex()}
                for kind, values, what in made
                if values is large
            ],
        }
    ]


def value_cases() -> list[dict[str, Any]]:
    """Vectors of floats; `decoded` where that is not what was encoded."""
    exact, rounded = [0.0, -0.0, 1.0, -2.5, 0.333251953125, 65504.0], [0.0, 0.125, -0.375, 0.75, -1.0, 0.0625, -0.5]
    stream = counter.key("vectors", "values")
    out: list[dict[str, Any]] = []
    for codec, floats in (("float32", exact), ("float16", exact), ("stochastic8", rounded)):
        data = values.encode(codec, np.array(floats), stream)
        decoded = values.decode(codec, data, len(floats), stream).tolist()
        case = {"codec": codec, "stream": str(stream), "values": floats, "hex": data.hex()}
        out.append(case if decoded == floats else {**case, "decoded": decoded})
    return out


def coarse_cases() -> list[dict[str, Any]]:
    """Codecs of changes, at every kind of parameter. `values` are quarters, which JSON holds exactly.

    With `ends` the values are coded in parts.
    """
    out: list[dict[str, Any]] = []
    for codec, d in (
        ("eden", 200), ("eden:2", 70), ("eden:3", 64), ("eden:4", 65), ("eden:0.25", 300), ("drive", 200),
        ("drive:mse", 130), ("qsgd", 600), ("qsgd:1", 60), ("qsgd:255", 60), ("topk:0.1", 120), ("topk", 40),
        ("stc:0.1", 120), ("sign", 43), ("eden", 0), ("qsgd", 0), ("topk", 0), ("stc", 0), ("sign", 0),
        ("drive+", 200), ("drive+:mse", 130), ("drive+", 0),
    ):  # fmt: skip
        out.append(coarse_case(codec, (d,)))
    out += [coarse_case(codec, (70, 70, 79, 200)) for codec in ("topk:0.1", "drive+", "qsgd")]
    return out


def coarse_case(codec: str, ends: tuple[int, ...]) -> dict[str, Any]:
    """One of them, in parts if there is more than one."""
    stream = counter.key("vectors", "coarse", codec)
    given = np.rint(400 * (counter.uniform(stream, ends[-1]) - 0.5) ** 3).astype(np.float32) / 4
    data = values.encode_parts(codec, given, ends, stream)
    decoded = [float(f"{v:.6g}") for v in values.decode_parts(codec, data, ends, stream)]
    case = {"codec": codec, "stream": str(stream), "values": given.tolist(), "hex": data.hex(), "decoded": decoded}
    return case | ({"ends": ends} if len(ends) > 1 else {})


def bloom_cases() -> list[dict[str, Any]]:
    """Filters, and all positions they hold."""
    out = []
    for codec, d, rate in (("bloom", 2000, 0.02), ("bloom:0.5", 60, 0.3), ("bloom:0.000001", 300, 0.05),
                           ("bloom:0.1", 20, 0.0)):  # fmt: skip
        keys = positions_at(d, rate, "bloom", d)
        data = codecs.encode(codec, np.array(keys, np.uint32), d)
        held = codecs.decode(codec, data, d).tolist()
        out.append({"codec": codec, "d": d, "keys": keys, "positions": held, "hex": data.hex()})
    return out


def counter_cases() -> list[dict[str, Any]]:
    """The generator. 64-bit numbers are decimal texts, since JSON readers may round them."""
    out = []
    for words, start in (((), 0), ((0,), 0), ((7, "cohort", 3), 0), ((-1, "é"), 1000), ((2**64 - 1,), 2**40)):
        stream = counter.key(*words)
        out.append(
            {
                "words": [w if isinstance(w, str) else {"integer": str(w)} for w in words],
                "key": str(stream),
                "start": str(start),
                "uint64": [str(n) for n in counter.uint64(stream, 4, start)],
                "uniform": [float(u).hex() for u in counter.uniform(stream, 4, start)],
                "permutation": counter.permutation(stream, 8).tolist(),
            }
        )
    return out


def main() -> None:
    """Write every file."""
    files = {name: set_cases(name) for name in codecs.names(exact_only=True)}
    files |= {"entropy-contexts": context_cases(), "fuse": fuse_cases(), "counts": count_cases(), "klms": klms_cases(),
              "coupling": coupling_cases(), "lattice": lattice_cases(),
              "values": value_cases(), "coarse": coarse_cases(), "bloom": bloom_cases(),
              "counter": counter_cases()}  # fmt: skip
    for name, cases in files.items():
        lines = ",\n".join(json.dumps(case, separators=(", ", ": ")) for case in cases)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
