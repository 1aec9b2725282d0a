"""The committed test vectors: what a reader in another language is held to, this one first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_kernels import codecs, counter
from edge_kernels.codecs import counts, fuse, klms, png, values

FOLDER = Path(__file__).parent / "vectors"


def cases(name: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    assert read
    return read


@pytest.mark.parametrize("name", codecs.names(exact_only=True))
def test_sets_have_the_committed_bytes_both_ways(name: str) -> None:
    for case in cases(name):
        assert codecs.encode(name, np.array(case["positions"], np.uint32), case["d"]).hex() == case["hex"]
        assert codecs.decode(name, bytes.fromhex(case["hex"]), case["d"]).tolist() == case["positions"]


def test_a_set_with_contexts_has_the_committed_bytes_both_ways() -> None:
    for case in cases("entropy-contexts"):
        contexts = np.array(case["contexts"], np.uint8)
        assert (
            codecs.encode("entropy", np.array(case["positions"], np.uint32), case["d"], contexts).hex() == case["hex"]
        )
        assert codecs.decode("entropy", bytes.fromhex(case["hex"]), case["d"], contexts).tolist() == case["positions"]


def test_filters_hold_the_committed_positions() -> None:
    for case in cases("fuse"):
        data, keys = bytes.fromhex(case["hex"]), np.array(case["keys"], np.uint32)
        assert codecs.decode(case["codec"], data, case["d"]).tolist() == case["positions"]
        if case["codec"] == "fuse8-png":  # zlib versions deflate differently; the pixels are what is specified
            data = png.filter_bytes(data, case["d"])
        width = 8 if case["codec"] == "fuse8-png" else int(case["codec"][4:])
        assert fuse.build(keys, width).to_bytes() == data


def test_counts_have_the_committed_bytes_both_ways() -> None:
    for case in cases("counts"):
        dtype = counts.dtype_for(case["top"])
        prediction = None if case["prediction"] is None else np.array(case["prediction"], dtype)
        assert counts.encode(np.array(case["values"], dtype), case["top"], prediction).hex() == case["hex"]
        assert counts.decode(bytes.fromhex(case["hex"]), case["d"], case["top"], prediction).tolist() == case["values"]


def test_samples_are_the_committed_ones() -> None:
    for case in cases("klms"):
        prior = np.frombuffer(bytes.fromhex(case["prior_float32_hex"]), "<f4")
        mask = klms.decode(bytes.fromhex(case["hex"]), prior, int(case["stream"]))
        assert np.flatnonzero(mask).tolist() == case["positions"]


def test_values_have_the_committed_bytes_both_ways() -> None:
    for case in cases("values"):
        data, expected = bytes.fromhex(case["hex"]), np.array(case["values"])
        if case["codec"] == "signs":
            assert values.encode_signs(expected) == data
            assert values.decode_signs(data, len(expected)).tolist() == case["values"]
        else:
            assert values.encode_floats(expected, case["codec"]) == data
            assert np.array_equal(values.decode_floats(data, len(expected), case["codec"]), expected)


def test_the_generator_gives_the_committed_numbers() -> None:
    for case in cases("counter"):
        stream = counter.key(*(w if isinstance(w, str) else int(w["integer"]) for w in case["words"]))
        assert str(stream) == case["key"]
        assert [str(n) for n in counter.uint64(stream, 4, int(case["start"]))] == case["uint64"]
        assert [float(u).hex() for u in counter.uniform(stream, 4, int(case["start"]))] == case["uniform"]
        assert counter.permutation(stream, 8).tolist() == case["permutation"]
