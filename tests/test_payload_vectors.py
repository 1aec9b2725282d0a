"""The committed payload vectors: this project's writer, a second one in JavaScript, and what every reader refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_payload import same

from edge_client.errors import PayloadError
from edge_client.protocol.payload import Payload, decode, encode

VECTORS = Path(__file__).parent / "vectors"


def vectors(name: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())
    assert read
    return read


DTYPE_NAMES = {"BOOL": "?", **{f"{c}{b}": f"{c.lower()}{b // 8}" for c in "FUI" for b in (8, 16, 32, 64)}}


def contents(case: dict[str, Any]) -> Payload:
    """The payload that a vector describes."""
    arrays = {
        name: np.array(a["values"], DTYPE_NAMES[a["dtype"]]).reshape(a["shape"]) for name, a in case["arrays"].items()
    }
    return Payload(arrays, case["metadata"])


def test_committed_payloads_have_the_committed_contents_both_ways() -> None:
    for case in vectors("payload"):
        assert same(decode(bytes.fromhex(case["hex"])), contents(case))
        assert encode(contents(case)).hex() == case["hex"]


def test_payloads_that_javascript_wrote_have_the_same_contents() -> None:
    ours, theirs = vectors("payload"), vectors("payload-javascript")
    for case in theirs:
        assert same(decode(bytes.fromhex(case["hex"])), contents(case))
    assert [encode(decode(bytes.fromhex(c["hex"]))).hex() for c in theirs] == [c["hex"] for c in ours]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; the committed vectors are tested without it")
def test_javascript_reads_what_python_writes_and_writes_what_the_committed_vectors_hold() -> None:
    def node(command: str, cases: list[Any]) -> list[Any]:
        script = ["node", str(VECTORS / "payload_writer.mjs"), command]
        done = subprocess.run(script, input=json.dumps(cases), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout)
        return answer

    ours, theirs = vectors("payload"), vectors("payload-javascript")
    plain = [{"metadata": c["metadata"], "arrays": c["arrays"]} for c in ours]
    assert [
        same(contents(found), contents(c))
        for found, c in zip(node("read", [c["hex"] for c in ours]), ours, strict=True)
    ]
    assert [contents(c).meta for c in node("read", [c["hex"] for c in ours])] == [contents(c).meta for c in ours]
    assert node("write", plain) == [c["hex"] for c in theirs]


@pytest.mark.parametrize("case", vectors("payload-refused"), ids=lambda case: case["why"])
def test_committed_bytes_that_are_not_a_payload_are_refused(case: dict[str, str]) -> None:
    with pytest.raises(PayloadError):
        decode(bytes.fromhex(case["hex"]))
