"""Writes `payload.json` and `payload-refused.json`: ``python tests/vectors/write_payload_vectors.py``.

Run only when the container's format changes. A case of the first has metadata, arrays and the payload's bytes in hex;
`foreign` says that another writer ordered and spaced the header, so that only reading is held to it. A case of the
second has bytes that every reader must refuse, and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.protocol.payload import FORMAT, Payload, encode

HERE = Path(__file__).parent
CODES = {"F16": "f2", "F32": "f4", "F64": "f8", "U8": "u1", "I8": "i1", "U16": "u2", "U32": "u4", "I32": "i4",
         "U64": "u8", "I64": "i8", "BOOL": "?"}  # fmt: skip
META: dict[str, Any] = {"method": "fedavg", "round": 3, "device": "a-1", "samples": 120, "loss": 0.4375,
                        "correct": [10, 12, 30]}  # fmt: skip
BYTES = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def packed(header: str, arrays: bytes = b"") -> str:
    """A container of this header, in hex."""
    text = header.encode()
    return (len(text).to_bytes(8, "little") + text + arrays).hex()


def described(content: Payload, data: str, foreign: bool = False) -> dict[str, Any]:
    """A case that must be read."""
    names = {np.dtype(code): name for name, code in CODES.items()}
    arrays = {
        name: {"dtype": names[a.dtype], "shape": list(a.shape), "values": a.ravel().tolist()}
        for name, a in content.arrays.items()
    }
    return {"metadata": dict(content.meta), "arrays": arrays, "foreign": foreign, "hex": data}


def read_cases() -> list[dict[str, Any]]:
    """Nothing, words alone, every dtype, no elements, no dimensions, an update of Coupled; and a foreign header."""
    every = {name: (np.arange(6) % 2).astype(code).reshape(2, 3) for name, code in CODES.items()}
    words: dict[str, Any] = {"text": "h\u00e9 \"\U0001f600\"\n\x7f", "least": 5e-324, "small": 1e-05, "large": 1e16,
                             "minus": -0.0, "whole": 100000.0, "integer": 2**53 - 1, "list": [0, -7],
                             "none": []}  # fmt: skip
    (coupled,) = json.loads((HERE / "coupling.json").read_text())
    flips = np.frombuffer(bytes.fromhex(coupled["cases"][0]["hex"]), np.uint8)
    contents = [
        Payload(),
        Payload({}, words),
        Payload(every, META),
        Payload({"none": np.zeros((0, 4), np.float32), "one": np.array(3, np.int64)}),
        Payload({"flips.coupled": flips}, {**META, "method": "coupled", "reference": coupled["reference"]}),
    ]
    cases = [described(content, encode(content).hex()) for content in contents]
    header = {"z": BYTES, "a": {"shape": [], "data_offsets": [4, 5], "dtype": "BOOL"}, "__metadata__": {FORMAT: "{}"}}
    content = Payload({"z": np.arange(4, dtype=np.uint8), "a": np.array(True)})
    return [*cases, described(content, packed(json.dumps(header, indent=1) + "  ", b"\0\1\2\3\1"), foreign=True)]


def refused_cases() -> list[dict[str, str]]:
    """One broken rule each."""
    meta, body = json.dumps({FORMAT: "{}"}), b"\0\1\2\3"

    def words(text: str) -> str:
        return packed(json.dumps({"__metadata__": {FORMAT: text}}))

    def entries(*shown: str, arrays: bytes = body) -> str:
        return packed("{" + ", ".join((f'"__metadata__": {meta}', *shown)) + "}", arrays)

    def entry(name: str = "a", **changed: object) -> str:
        return f'"{name}": {json.dumps(BYTES | changed)}'

    whole = bytes.fromhex(entries(entry()))
    broken = {
        "fewer than eight bytes": b"\x07\0\0".hex(),
        "the header is longer than the file": (2**12 - 8).to_bytes(8, "little").hex() + "7b7d",
        "the header has more than 4096 bytes": packed(json.dumps({"__metadata__": {FORMAT: "{}"}}) + " " * 4096),
        "the header does not begin with {": packed(" " + json.dumps({"__metadata__": {FORMAT: "{}"}})),
        "the header is no UTF-8": whole.replace(b'"a"', b'"\xff"').hex(),
        "no metadata": packed("{}"),
        "metadata of another format": packed(json.dumps({"__metadata__": {"maskfleet/2": "{}"}})),
        "metadata of two keys": packed(json.dumps({"__metadata__": {FORMAT: "{}", "more": ""}})),
        "metadata twice": packed(f'{{"__metadata__": {meta}, "__metadata__": {meta}}}'),
        "metadata that is no object": words("[]"),
        "a metadata key twice": words('{"round":3,"round":9}'),
        "metadata unsorted": words('{"b":1,"a":2}'),
        "metadata with a space": words('{"a": 1}'),
        "a number that is not the shortest": words('{"a":1.50}'),
        "a character that is not escaped": words('{"a":"\u00e9"}'),
        "half a surrogate pair": words('{"a":"\\ud800"}'),
        "a truth in the metadata": words('{"a":true}'),
        "a truth in a list": words('{"a":[true]}'),
        "null in the metadata": words('{"a":null}'),
        "an object in the metadata": words('{"a":{}}'),
        "NaN in the metadata": words('{"a":NaN}'),
        "an infinite number": words('{"a":1e999}'),
        "an integer of 2**53": words(f'{{"a":{2**53}}}'),
        "an array twice": entries(entry(), entry()),
        "an array twice, of another dtype": entries(entry(), entry(dtype="I8")),
        "a dtype twice": entries(entry().replace('"dtype"', '"dtype": "I8", "dtype"')),
        "another field": entries(entry(more=1)),
        "another dtype": entries(entry(dtype="BF16", shape=[2])),
        "nine dimensions": entries(entry(shape=[4] + [1] * 8)),
        "more than 2**48 elements but for a 0": entries(entry(), entry("b", shape=[0, 2**48 + 1], data_offsets=[4, 4])),
        "a negative dimension": entries(entry(shape=[-4])),
        "a dimension that is no integer": entries(entry(shape=[4.0])),
        "a shape of other bytes": entries(entry(shape=[5])),
        "a gap before an array": entries(entry(shape=[3], data_offsets=[1, 4])),
        "bytes after the last array": entries(entry(), arrays=body + b"\0"),
        "arrays that overlap": entries(entry(), entry("b", shape=[1], data_offsets=[3, 4])),
        "an array past the end": entries(entry(), arrays=body[:3]),
        "a BOOL of 7": entries(entry(dtype="BOOL"), arrays=b"\0\1\7\1"),
    }
    return [{"why": why, "hex": data} for why, data in broken.items()]


def main() -> None:
    """Write both files."""
    for name, cases in {"payload": read_cases(), "payload-refused": refused_cases()}.items():
        lines = ",\n".join(json.dumps(case, separators=(", ", ": ")) for case in cases)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
