"""Writes the payload vectors: ``python tests/vectors/write_payload_vectors.py`` (with node on the path).

Run only when the container's format changes. Three files:

- `payload.json`: contents, and the bytes that this project's writer makes of them, in hex
- `payload-javascript.json`: contents, and the bytes that `payload_writer.mjs` makes of them
- `payload-refused.json`: bytes that every reader must refuse, and why
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.protocol.payload import Payload, encode

HERE = Path(__file__).parent
CODES = {"F16": "f2", "F32": "f4", "F64": "f8", "U8": "u1", "I8": "i1", "U16": "u2", "U32": "u4", "I32": "i4",
         "U64": "u8", "I64": "i8", "BOOL": "?"}  # fmt: skip
META: dict[str, Any] = {"m": [120, 0.4375, 0.3125, 0.5, 30]}
BYTES = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def described(content: Payload) -> dict[str, Any]:
    """A payload's contents as JSON."""
    names = {np.dtype(code): name for name, code in CODES.items()}
    arrays = {
        name: {"dtype": names[a.dtype], "shape": list(a.shape), "values": a.ravel().tolist()}
        for name, a in content.arrays.items()
    }
    return {"metadata": dict(content.meta), "arrays": arrays}


def javascript(command: str, cases: list[Any]) -> list[Any]:
    """What `payload_writer.mjs` makes of `cases`."""
    script = ["node", str(HERE / "payload_writer.mjs"), command]
    done = subprocess.run(script, input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=60)
    answer: list[Any] = json.loads(done.stdout)
    return answer


def contents() -> list[Payload]:
    """Nothing, words alone, every dtype, no elements, no dimensions, an update with a coded array."""
    every = {name: (np.arange(6) % 2).astype(code).reshape(2, 3) for name, code in CODES.items()}
    words: dict[str, Any] = {"text": "h\u00e9 \"\U0001f600\"\n\x7f/", "least": 5e-324, "small": 1.5e-05, "large": 1e300,
                             "minus": -0.25, "whole": 100000, "integer": 2**53 - 1, "list": [0, -7],
                             "mixed": [1, 0.5, 1e300], "none": []}  # fmt: skip
    (coupled,) = json.loads((HERE / "coupling.json").read_text())
    flips = np.frombuffer(bytes.fromhex(coupled["cases"][0]["hex"]), np.uint8)
    return [
        Payload(),
        Payload({}, words),
        Payload(every, META),
        Payload({"none": np.zeros((0, 4), np.float32), "one": np.array(3, np.int64)}),
        Payload({"flips.coupled": flips}, {**META, "reference": coupled["reference"]}),
    ]


def packed(header: str, arrays: bytes = b"") -> str:
    """A container of this header, in hex."""
    text = header.encode()
    return (len(text).to_bytes(8, "little") + text + arrays).hex()


def refused_cases() -> list[dict[str, str]]:
    """One broken rule each."""
    meta, body = json.dumps({"a": "1"}), b"\0\1\2\3"

    def word(text: object) -> str:
        return packed(json.dumps({"__metadata__": {"a": text}}))

    def entries(*shown: str, arrays: bytes = body) -> str:
        return packed("{" + ", ".join((f'"__metadata__": {meta}', *shown)) + "}", arrays)

    def entry(name: str = "a", **changed: object) -> str:
        return f'"{name}": {json.dumps(BYTES | changed)}'

    whole = bytes.fromhex(entries(entry()))
    broken = {
        "fewer than eight bytes": b"\x07\0\0".hex(),
        "the header is longer than the file": (2**12 - 8).to_bytes(8, "little").hex() + "7b7d",
        "the header has more than 4096 bytes": packed("{}" + " " * 4096),
        "the header does not begin with {": packed(" {}"),
        "the header is not UTF-8": whole.replace(b'"a"', b'"\xff"').hex(),
        "the header is JSON but no object": packed("[]"),
        "metadata twice": packed(f'{{"__metadata__": {meta}, "__metadata__": {meta}}}'),
        "metadata that is not an object": packed('{"__metadata__": []}'),
        "a metadata value that is not a text": word(1),
        "a metadata value that is not JSON": word("'a'"),
        "a metadata value that is empty": word(""),
        "a metadata key twice": packed('{"__metadata__": {"since": "3", "since": "9"}}'),
        "a metadata key twice, once escaped": packed('{"__metadata__": {"since": "3", "\\u0073ince": "9"}}'),
        "half a surrogate pair": word('"\\ud800"'),
        "half a surrogate pair in a key": packed('{"__metadata__": {"\\ud800": "1"}}'),
        "a boolean in the metadata": word("true"),
        "a boolean in a list": word("[true]"),
        "null in a list": word("[null]"),
        "a text in a list": word('["b"]'),
        "null in the metadata": word("null"),
        "an object in the metadata": word("{}"),
        "NaN in the metadata": word("NaN"),
        "an infinite number": word("1e999"),
        "an integer of 2**53": word(str(2**53)),
        "an array twice": entries(entry(), entry()),
        "an array twice, of another dtype": entries(entry(), entry(dtype="I8")),
        "a dtype twice": entries(entry().replace('"dtype"', '"dtype": "I8", "dtype"')),
        "another field": entries(entry(more=1)),
        "another dtype": entries(entry(dtype="BF16", shape=[2])),
        "nine dimensions": entries(entry(shape=[4] + [1] * 8)),
        "more than 2**48 elements but for a 0": entries(entry(), entry("b", shape=[0, 2**48 + 1], data_offsets=[4, 4])),
        "a negative dimension": entries(entry(shape=[-4])),
        "a dimension that is not an integer": entries(entry(shape=[4.0])),
        "a shape of other bytes": entries(entry(shape=[5])),
        "a gap before an array": entries(entry(shape=[3], data_offsets=[1, 4])),
        "bytes after the last array": entries(entry(), arrays=body + b"\0"),
        "arrays that overlap": entries(entry(), entry("b", shape=[1], data_offsets=[3, 4])),
        "an array past the end": entries(entry(), arrays=body[:3]),
        "a BOOL of 7": entries(entry(dtype="BOOL"), arrays=b"\0\1\7\1"),
    }
    return [{"why": why, "hex": data} for why, data in broken.items()]


def main() -> None:
    """Write the files."""
    cases = [described(content) for content in contents()]
    ours = [case | {"hex": encode(content).hex()} for case, content in zip(cases, contents(), strict=True)]
    theirs = [case | {"hex": data} for case, data in zip(cases, javascript("write", cases), strict=True)]
    files = {"payload": ours, "payload-javascript": theirs, "payload-refused": refused_cases()}
    for name, written in files.items():
        lines = ",\n".join(json.dumps(case, separators=(", ", ": ")) for case in written)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
