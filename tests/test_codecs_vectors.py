"""The committed test vectors, which readers in every language must reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import codec_readers
import coupling_reader
import lattice_reader
import numpy as np
import pytest
from edge_kernels import codecs, counter, coupling, lattice
from edge_kernels.codecs import CodecError, counts, fuse, klms, png, values

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
        if case["codec"] == "fuse8-png":  # the pixels are specified, not the deflate stream
            data = png.filter_bytes(data, case["d"])
        width = 8 if case["codec"] == "fuse8-png" else int(case["codec"][4:])
        assert fuse.build(keys, width).to_bytes() == data


def test_counts_have_the_committed_bytes_both_ways() -> None:
    for case in cases("counts"):
        dtype = counts.dtype_for(case["top"])
        prediction = None if case["prediction"] is None else np.array(case["prediction"], dtype)
        assert counts.encode(np.array(case["values"], dtype), case["top"], prediction).hex() == case["hex"]
        assert counts.decode(bytes.fromhex(case["hex"]), case["d"], case["top"], prediction).tolist() == case["values"]


def test_masks_by_klms_are_the_committed_ones() -> None:
    for case in cases("klms"):
        data, stream = bytes.fromhex(case["hex"]), int(case["stream"])
        prior = np.frombuffer(bytes.fromhex(case["prior_float32_hex"]), "<f4")
        mask = klms.decode(data, prior, stream)
        assert np.flatnonzero(mask).tolist() == case["positions"]
        assert codec_readers.klms(data, prior.tolist(), stream) == mask.tolist()


def coupled_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The knowledge of both sides, and each payload."""
    return [(known, case) for known in cases("coupling") for case in known["cases"]]


@pytest.mark.parametrize(("known", "case"), coupled_cases())
def test_coupled_payloads_have_the_committed_meaning_and_bytes(
    known: dict[str, Any], case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = np.array([float.fromhex(t) for t in known["theta"]])
    uniforms = [counter.uniform(int(s), known["d"]) for s in known["streams"]]
    past = coupling.history(np.array(known["past"], np.int32), known["shapes"]) if case["history"] else None
    data = bytes.fromhex(case["hex"])
    # The last digit of a fitted model depends on the machine's linear algebra, so the models come from the vectors.
    models: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    decode_set = coupling._decode

    def recording(part: bytes, n: int, terms: coupling.Terms) -> coupling.Bits:
        if part[0]:
            models.append(np.frombuffer(part[1 : 1 + 2 * len(terms(slice(0, 0)))], "<f2").astype(np.float64))
        return decode_set(part, n, terms)

    monkeypatch.setattr(coupling, "_decode", recording)
    monkeypatch.setattr(coupling, "_fit", lambda *_: models.pop(0))
    if case["kind"] == "flips":
        found = coupling.decode_flips(data, theta, uniforms[0], past)
        assert np.flatnonzero(found).tolist() == case["positions"]
        assert coupling.encode_flips(found, theta, uniforms[0], past).hex() == case["hex"]
    else:
        cohort = coupling.Cohort.empty(known["d"])
        for u in uniforms:
            cohort.add(theta, u)
        net = coupling.decode_net(data, theta, cohort, past, len(uniforms))
        assert net.tolist() == case["net"]
        assert coupling.encode_net(net, theta, cohort, past).hex() == case["hex"]
    assert not models


@pytest.mark.parametrize(("known", "case"), coupled_cases())
def test_the_plain_reader_of_coupled_payloads_agrees(known: dict[str, Any], case: dict[str, Any]) -> None:
    theta = [float.fromhex(t) for t in known["theta"]]
    uniforms = [counter.uniform(int(s), known["d"]).tolist() for s in known["streams"]]
    past = coupling_reader.past(known["past"], known["shapes"]) if case["history"] else None
    data = bytes.fromhex(case["hex"])
    if case["kind"] == "flips":
        assert coupling_reader.flips(data, theta, uniforms[0], past) == case["positions"]
    else:
        assert coupling_reader.net_flips(data, theta, uniforms, past) == case["net"]


def lattice_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The knowledge of both sides, and each payload."""
    return [(known, case) for known in cases("lattice") for case in known["cases"]]


def lattice_distances(known: dict[str, Any], kind: str) -> tuple[Any, Any, Any]:
    """The least dither, its mirror image and N, as the two sides of this kind of payload know them."""
    d = len(known["held"])
    dithers = [(counter.uint64(int(s), d) >> np.uint64(32)).astype(np.uint32) for s in known["streams"]]
    held = np.array(known["held"], np.int32)
    if kind == "up":
        return dithers[0], ~dithers[0], held
    both = np.minimum(*dithers), np.minimum(*(~u for u in dithers)), held
    return both if kind == "down" else (None, None, None)


@pytest.mark.parametrize(("known", "case"), lattice_cases())
def test_lattice_payloads_have_the_committed_bytes_both_ways(known: dict[str, Any], case: dict[str, Any]) -> None:
    spans, at = [], 0
    for rows, columns in known["shapes"]:
        spans.append((slice(at, at + rows * columns), rows, columns))
        at += rows * columns
    what = lattice.Known(spans, *lattice_distances(known, case["kind"]))
    assert lattice.decode(bytes.fromhex(case["hex"]), what).tolist() == case["values"]
    assert lattice.encode(np.array(case["values"], np.int32), what).hex() == case["hex"]


@pytest.mark.parametrize(("known", "case"), lattice_cases())
def test_the_plain_reader_of_lattice_payloads_agrees(known: dict[str, Any], case: dict[str, Any]) -> None:
    plain = [x if x is None else x.tolist() for x in lattice_distances(known, case["kind"])]
    assert lattice_reader.values(bytes.fromhex(case["hex"]), known["shapes"], *plain) == case["values"]


def test_an_update_of_coupled_names_its_reference_mask() -> None:
    (known,) = cases("coupling")
    theta = [float.fromhex(t) for t in known["theta"]]
    u = counter.uniform(int(known["streams"][0]), known["d"]).tolist()
    assert coupling_reader.reference_name(theta, u) == known["reference"]
    (update,) = (c for c in cases("payload") if "flips.coupled" in c["arrays"])
    assert update["metadata"]["reference"] == known["reference"]
    assert bytes(update["arrays"]["flips.coupled"]["values"]).hex() == known["cases"][0]["hex"]


def test_the_coupled_cases_have_payloads_with_and_without_a_model() -> None:
    kinds = {(case["kind"], case["history"], bytes.fromhex(case["hex"])[4]) for _, case in coupled_cases()}
    assert {("flips", known, model) for known in (False, True) for model in (0, 1)} <= kinds
    assert max(abs(n) for _, case in coupled_cases() for n in case.get("net", [0])) > 1


def test_values_have_the_committed_bytes_both_ways() -> None:
    for case in cases("values"):
        data, expected = bytes.fromhex(case["hex"]), np.array(case["values"])
        stream = int(case["stream"])
        assert values.encode(case["codec"], expected, stream) == data
        decoded = [float(v) for v in values.decode(case["codec"], data, len(expected), stream)]
        assert decoded == case.get("decoded", case["values"])
        plain = codec_readers.VALUES[case["codec"]](data, len(expected), stream, "")
        assert plain == pytest.approx(decoded, rel=1e-6)


@pytest.mark.parametrize("case", cases("coarse"), ids=lambda case: f"{case['codec']}-{len(case['values'])}")
def test_coarse_values_have_the_committed_meaning_and_bytes(case: dict[str, Any]) -> None:
    codec, data, stream, d = case["codec"], bytes.fromhex(case["hex"]), int(case["stream"]), len(case["values"])
    due, ends = pytest.approx(case["decoded"], rel=1e-4, abs=1e-4), case.get("ends", [d])
    assert values.decode_parts(codec, data, ends, stream).tolist() == due
    name, _, parameter = codec.partition(":")
    if "ends" in case:
        assert codec_readers.parts(name, data, ends, stream, parameter) == due
    else:
        assert codec_readers.VALUES[name](data, d, stream, parameter) == due
    written = values.encode_parts(codec, np.array(case["values"]), ends, stream)
    if name in ("eden", "drive", "drive+"):  # a level may round differently, and so may a factor's last digit
        assert len(written) == len(data)
        assert values.decode_parts(codec, written, ends, stream) == pytest.approx(
            np.array(case["decoded"]), rel=0.01, abs=0.01
        )
    else:
        assert written == data


def test_the_coarse_cases_cover_every_codec_of_values() -> None:
    covered = {case["codec"].partition(":")[0] for name in ("values", "coarse") for case in cases(name)}
    what_to_do = "add cases to tests/vectors/write_vectors.py and run it, and a reader to tests/codec_readers.py"
    assert covered == set(values.VALUES) == set(codec_readers.VALUES), what_to_do


def test_bloom_filters_hold_the_committed_positions_and_have_the_committed_bytes() -> None:
    for case in cases("bloom"):
        data, d = bytes.fromhex(case["hex"]), case["d"]
        assert codecs.decode(case["codec"], data, d).tolist() == case["positions"] == codec_readers.bloom(data, d)
        assert codecs.encode(case["codec"], np.array(case["keys"], np.uint32), d) == data


def test_the_generator_gives_the_committed_numbers() -> None:
    for case in cases("counter"):
        stream = counter.key(*(w if isinstance(w, str) else int(w["integer"]) for w in case["words"]))
        words = [w if isinstance(w, str) else int(w["integer"]) for w in case["words"]]
        assert str(stream) == case["key"] == str(codec_readers.key(*words))
        assert [str(n) for n in counter.uint64(stream, 4, int(case["start"]))] == case["uint64"]
        assert [float(u).hex() for u in counter.uniform(stream, 4, int(case["start"]))] == case["uniform"]
        assert counter.permutation(stream, 8).tolist() == case["permutation"]


@pytest.mark.parametrize(("known", "case"), [(known, case) for known in cases("lattice") for case in known["low"]])
def test_both_readers_read_planes_of_low_bits_and_padding_is_refused(
    known: dict[str, Any], case: dict[str, Any]
) -> None:
    data, spans, at = bytes.fromhex(case["hex"]), [], 0
    for rows, columns in known["shapes"]:
        spans.append((slice(at, at + rows * columns), rows, columns))
        at += rows * columns
    distances = lattice_distances(known, case["kind"])
    what = lattice.Known(spans, *distances)
    assert data[0] >> 4 == 12
    assert lattice.decode(data, what).tolist() == case["values"]
    plain = [x if x is None else x.tolist() for x in distances]
    assert lattice_reader.values(data, known["shapes"], *plain) == case["values"]
    end_of_plane = 2 + -(-at // 8) - 1
    bad = data[:end_of_plane] + bytes([data[end_of_plane] | 0x80]) + data[end_of_plane + 1 :]
    assert at % 8
    with pytest.raises(CodecError, match="low bits"):
        lattice.decode(bad, what)
