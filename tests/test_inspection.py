"""`payload inspect` explains any payload and refuses anything else; `bundle inspect` says where weights come from.

More of `bundle inspect` is in test_cli.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_kernels import bits as bitset
from edge_kernels import codecs, coupling
from edge_kernels.codecs import counts
from numpy_mlp import clusters, mlp
from rounds import Rounds

from edge_client.bundle import MANIFEST, Manifest
from edge_client.commands.inspection import NO_GROUPS, bundle, payload
from edge_client.errors import ConfigError, PayloadError
from edge_client.methods import make_method
from edge_client.protocol.metrics import METRICS, split_metrics
from edge_client.protocol.payload import Payload, encode

SMALL, LARGE = mlp(20, 16, 12, 3), mlp(30, 60, 40, 3)


@pytest.fixture
def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `payload inspect` prints of a payload, in a terminal wide enough for any table."""

    def said(content: Payload, parameters: int | None = None) -> str:
        (tmp_path / "update").write_bytes(encode(content))
        payload(tmp_path / "update", parameters)
        return capsys.readouterr().out

    return said


def line_of(said: str, name: str) -> str:
    """The line that explains one array."""
    (line,) = (line for line in said.splitlines() if line.startswith(f"{name}: "))
    return line


def test_a_payload_is_explained(explained: Callable[..., str]) -> None:
    content = Payload(
        {
            "mask": np.full(4, 0x0F, np.uint8),
            "head": np.array([1.0, 3.0, np.nan], np.float32),
            "none": np.zeros((0, 2)),
        },
        {
            METRICS: [40, 0.5, 0.3, 0.9, 10],
            "more": "a[b]",
        },
    )
    data = encode(content)
    said = explained(content, 100)
    assert f"{len(data)} bytes: 16 in 3 arrays, {len(data) - 16} of header" in said
    assert f"{8 * len(data) / 100:.4f} bits for each of 100 parameters" in said
    assert "trained on 40 samples, mean loss 0.5" in said
    assert "score 0.3 before training, 0.9 after, on 10 test samples" in said
    assert "more = a[b]" in said
    assert re.search(rf"mask +│ uint8 +│ 4 +│ 4 +│ {4 / len(data):.1%} +│ 0.3200", said)
    assert re.search(rf"head +│ float32 +│ 3 +│ 12 +│ {12 / len(data):.1%} +│ 0.9600", said)
    assert line_of(said, "mask") == "mask: 0f 0f 0f 0f; 50.0% of the bits are ones"
    assert line_of(said, "head") == "head: least 1, mean 2, greatest 3; 1 of 3 are not finite"
    assert line_of(said, "none") == "none: empty"


@pytest.mark.parametrize("metrics", [3, [], [40, 0.5, 0.3, 0.9], [40, 0.5, 0.3, 1.9, 10]])
def test_metrics_of_another_form_are_shown_as_they_are(explained: Callable[..., str], metrics: Any) -> None:
    assert explained(Payload({}, {METRICS: metrics})).splitlines()[2:] == [f"m = {metrics}"]


def test_bytes_that_are_not_of_their_codec_are_explained_as_such(explained: Callable[..., str]) -> None:
    content = Payload({"mask.rice": np.zeros(3, np.uint8), "kept.device-1": np.zeros(3, np.uint8)})
    said = explained(content, 100)
    assert line_of(said, "mask.rice").startswith("mask.rice: codec rice, but ")
    assert line_of(said, "kept.device-1").startswith("kept.device-1: 00 00 00;")


def test_other_bytes_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"PNG....")
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        payload(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot read"):
        payload(tmp_path / "none")


def test_a_packaged_bundle_is_inspected_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    bundle("digits")
    assert "all parts match" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        bundle("digts")


def test_a_bundle_s_weights_are_stored_or_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, first, second in ((1, "uniform 0.5477", "constant 0"), (None, "stored", "stored")):
        m = mlp(20, 3).model_copy(update={"seed": seed})
        (tmp_path / MANIFEST).write_bytes(m.to_bytes())
        bundle(str(tmp_path))
        said = capsys.readouterr().out
        assert f"values {'in weights.safetensors' if seed is None else 'from seed 1'}" in said
        assert re.search(rf"0\.w +│ 3x20 +│ 0 +│ {first} +│ yes", said)
        assert re.search(rf"0\.b +│ 3 +│ 60 +│ {second} +│ yes", said)


def test_a_bundle_without_groups_and_reasons_says_which_layers_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle("digits")
    assert NO_GROUPS not in capsys.readouterr().out
    (tmp_path / MANIFEST).write_bytes(mlp(20, 3).to_bytes())
    bundle(str(tmp_path))
    assert NO_GROUPS in capsys.readouterr().out


# --- what methods really send


def play(config: dict[str, Any], rounds: int = 3, m: Manifest = SMALL) -> Rounds:
    """A federation after rounds of two devices; what device "a" receives and sends comes last."""
    run = Rounds(make_method(config), m, rounds=5, data={"b": clusters(m, 0), "a": clusters(m, 1)})
    for _ in range(rounds):
        run.play("b", "a")
    return run


def exchanged(run: Rounds) -> int:
    return run.method.exchanged(run.course)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(codec, members, d) of every set that a method has written, the last one last."""
    seen: list[tuple[str, int, int]] = []
    real, real_flips = codecs.encode, coupling.encode_flips

    def spy(name: str, what: np.ndarray, d: int, contexts: Any = None) -> bytes:
        seen.append((name, int(np.count_nonzero(what)) if what.dtype == np.bool_ else len(what), d))
        return real(name, what, d, contexts)

    def spy_flips(flips: np.ndarray, *args: Any) -> bytes:
        data = real_flips(flips, *args)
        seen.append(("coupled", int(np.count_nonzero(flips)), len(flips)))
        return data

    monkeypatch.setattr(codecs, "encode", spy)
    monkeypatch.setattr(coupling, "encode_flips", spy_flips)
    return seen


def entropy_bytes(n: int, d: int) -> float:
    return -sum(k * math.log2(k / d) for k in (n, d - n) if k) / 8


def check_set(said: str, name: str, codec: str, n: int, d: int, size: int) -> None:
    """The line names codec and members, and compares the bytes with the entropy."""
    line = line_of(said, name)
    assert f": codec {codec}; " in line
    assert f"members {n};" in line
    least = entropy_bytes(n, d)
    above = f", these are {abs(size / least - 1):.1%} {'above' if size >= least else 'below'}" if least else ""
    assert f"entropy at rate {n / d:.4g} is {least:.1f} bytes{above}" in line


def test_a_mask_of_fedpm(explained: Callable[..., str], written: list[tuple[str, int, int]]) -> None:
    run = play({"name": "fedpm", "down": "counts"})
    said = explained(run.up["a"], exchanged(run))
    codec, n, d = written[-1]
    assert (codec, d) == ("entropy", exchanged(run))
    check_set(said, "mask.entropy", "entropy", n, d, run.up["a"].arrays["mask.entropy"].nbytes)
    assert "contexts none" in line_of(said, "mask.entropy")
    assert "trained on 40 samples" in said
    _, metrics = split_metrics(run.up["a"])
    assert f"score {metrics.score_before:g} before training, {metrics.score_after:g} after, on 40 test samples" in said


def test_counts_of_fedpm_and_of_coupled(explained: Callable[..., str]) -> None:
    for name in ("fedpm", "coupled"):
        run = play({"name": name, **({"down": "counts"} if name == "fedpm" else {"references": 0})}, 4)
        coded = {"fedpm": "counts.counts", "coupled": "change.counts"}[name]
        line = line_of(explained(run.down["a"], exchanged(run)), coded)
        assert f": codec counts; values {exchanged(run)}; segments 1;" in line
        if name == "fedpm":
            ones = counts.decode(
                run.down["a"].arrays[coded].tobytes(), exchanged(run), int(str(run.down["a"].meta["masks"]))
            )
            assert f"as predicted {np.count_nonzero(ones == 0)};" in line


@pytest.mark.parametrize("codec", codecs.names())
def test_changes_of_deltamask(codec: str, explained: Callable[..., str], written: list[tuple[str, int, int]]) -> None:
    run = play({"name": "deltamask", "codec": codec, "kappa": 1.0, "epochs": 3})
    name = f"changes.{codec}"
    data = run.up["a"].arrays[name].tobytes()
    said = explained(run.up["a"], exchanged(run))
    line, (asked, n, d) = line_of(said, name), written[-1]
    assert (asked, d) == (codec, exchanged(run))
    assert n > 0
    if "contexts" in line and "contexts none" not in line:
        assert codec in ("entropy", "auto")
        assert f": codec {codec}; " in line
    else:
        check_set(said, name, codec, n, d, len(data))
    if codec.startswith("fuse"):
        bits = 8 if codec == "fuse8-png" else int(codec[4:])
        assert f"fingerprint bits {bits}; false positive rate {2.0**-bits:.6g};" in line
    if codec == "fuse8-png":
        width, height = (int.from_bytes(data[low : low + 4], "big") for low in (16, 20))
        assert f"width {width}; height {height}" in line


def test_flips_and_net_flips_of_coupled(explained: Callable[..., str], written: list[tuple[str, int, int]]) -> None:
    run = play({"name": "coupled", "epochs": 1}, 4)
    data = run.up["a"].arrays["flips.coupled"].tobytes()
    said = explained(run.up["a"], exchanged(run))
    _, n, d = [found for found in written if found[0] == "coupled"][-1]
    assert d == exchanged(run)
    assert 0 < n < 64  # so that they are coded without a model
    check_set(said, "flips.coupled", "coupled", n, d, len(data))
    assert f"checksum {int.from_bytes(data[:4], 'little'):08x}" in line_of(said, "flips.coupled")
    assert f"changes to the reference mask {run.up['a'].meta['reference']} (" in said
    said = explained(run.down["a"], exchanged(run))
    net = run.down["a"].arrays["net_long.coupled-net"]
    line = line_of(said, "net_long.coupled-net")
    assert ": codec coupled-net; " in line
    assert f"parts {net[4]}; bytes of parts {int.from_bytes(net[5:9].tobytes(), 'little')}, " in line
    assert "streams: least" in said


def test_many_flips_of_coupled_are_under_a_model(
    explained: Callable[..., str], written: list[tuple[str, int, int]]
) -> None:
    run = play({"name": "coupled", "epochs": 10}, 3, LARGE)
    assert [n for codec, n, _ in written if codec == "coupled"][-1] >= 64
    line = line_of(explained(run.up["a"], exchanged(run)), "flips.coupled")
    assert line.startswith("flips.coupled: codec coupled; model fitted; checksum ")


def test_bits_and_planes_of_fedmask(explained: Callable[..., str]) -> None:
    run = play({"name": "fedmask", "codec": "bits", "down": "count", "keep": 0.5}, 1)
    said = explained(run.up["a"], exchanged(run))
    for name in ("changes.bits", "structure.bits"):
        packed = run.up["a"].arrays[name]
        ones = int(np.unpackbits(packed).sum())
        check_set(said, name, "bits", ones, 8 * packed.size, packed.size)
    run.play("b", "a")
    planes = run.down["a"].arrays["mask.planes"]
    levels = int(str(run.down["a"].meta["levels"]))
    values = bitset.unpack_planes(planes, levels.bit_length(), 8 * planes.shape[1])
    line = line_of(explained(run.down["a"], exchanged(run)), "mask.planes")
    assert f": codec planes; values {values.size}; planes {levels.bit_length()}; " in line
    assert f"mean {values.mean():.6g}" in line


def test_parameters_of_fedavg_and_nothing_of_standalone(explained: Callable[..., str]) -> None:
    run = play({"name": "fedavg"}, 1)
    values = run.up["a"].arrays["parameters"]
    said = explained(run.up["a"], exchanged(run))
    assert (
        line_of(said, "parameters")
        == f"parameters: least {values.min():.6g}, mean {values.mean(dtype=float):.6g}, greatest {values.max():.6g}"
    )
    assert f"│ {values.size} " in said
    assert "32.0000" in said
    said = explained(play({"name": "standalone"}, 1).up["a"])
    assert "0 in 0 arrays" in said
    assert "trained on 40 samples, mean loss " in said
