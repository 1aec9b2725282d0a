"""`maskfleet codec`: the sizes it measures are correct, and the JSON has the documented fields."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from edge_bench.timing import codecs as timing
from edge_bench.timing.codecs import bench, entropy_bits, flips, measure
from edge_kernels import codecs
from typer import Typer
from typer.testing import CliRunner

from edge_client.errors import ConfigError

FIELDS = {"codec", "d", "flip_rate", "bits_per_parameter", "entropy_bits_per_parameter", "encode_ns_per_parameter",
          "decode_ns_per_parameter", "false_flips", "peak_bytes"}  # fmt: skip


app = Typer()
app.command()(bench)


def test_bench_writes_a_row_for_every_codec_size_and_rate(tmp_path: Path) -> None:
    chosen = ["bits", "rice", "fuse8", "zlib"]
    arguments = ["--params", "2000,3000", "--flips", "0.1,0.01", "--codecs", ",".join(chosen), "--repeats", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "a.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {(r["codec"], r["d"], r["flip_rate"]) for r in rows} == {
        (name, d, rate) for name in chosen for d in (2000, 3000) for rate in (0.1, 0.01)
    }
    assert all(r.keys() == FIELDS for r in rows)


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "find_spec", lambda module: None if module == "constriction" else module)
    monkeypatch.setattr(timing, "PEERS", {"zlib": "zlib", "constriction": "constriction"})
    monkeypatch.setitem(sys.modules, "constriction", None)
    arguments = ["--params", "2000", "--flips", "0.1", "--repeats", "1"]
    every = CliRunner().invoke(app, arguments)
    assert every.exit_code == 0, every.output
    assert "not installed: constriction;" in every.output
    assert "zlib" in every.output
    assert isinstance(CliRunner().invoke(app, [*arguments, "--codecs", "constriction"]).exception, ImportError)


def test_rows_have_the_sizes_and_false_flips_of_the_codecs() -> None:
    d = 20_000
    mask = flips(d, 0.02)
    rows = {row.codec: row for row in measure(["bits", "entropy", "fuse8"], d, 0.02, 1)}
    assert rows["bits"].bits_per_parameter == 1
    assert rows["entropy"].bits_per_parameter == len(codecs.encode("entropy", mask, d)) * 8 / d
    assert rows["entropy"].false_flips == 0
    held = codecs.decode("fuse8", codecs.encode("fuse8", mask, d), d)
    assert rows["fuse8"].false_flips == len(held) - mask.sum()
    assert rows["bits"].entropy_bits_per_parameter == entropy_bits(mask)
    assert all(row.peak_bytes > 0 and row.encode_ns_per_parameter > 0 for row in rows.values())


@pytest.mark.parametrize("peer", ["pyfusefilter", "zstd", "constriction"])
def test_peers_decode_and_have_plausible_sizes(peer: str) -> None:
    pytest.importorskip({"zstd": "zstandard"}.get(peer, peer))
    d = 50_000
    (row,) = measure([peer], d, 0.02, 1)
    low, high = {"pyfusefilter": (1.4, 1.9), "zstd": (1.1, 1.6), "constriction": (0.99, 1.02)}[peer]
    assert low < row.bits_per_parameter / row.entropy_bits_per_parameter < high
    assert (row.false_flips > 0) == (peer == "pyfusefilter")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--codecs", "gzip"],
        ["--flips", "2"],
        ["--flips", "x"],
        ["--params", "0"],
        ["--params", "1.5"],
        ["--params", "inf"],
    ],
)
def test_wrong_options_are_named(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert arguments[1] in str(result.exception)


def test_a_mask_without_flips_has_sizes_and_no_ratio_to_its_entropy_of_zero() -> None:
    result = CliRunner().invoke(app, ["--params", "10", "--flips", "1e-9", "--codecs", "rice", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert [cell.strip() for cell in result.output.split("│")[1:4:2]] == ["rice", "-"]
