"""The commands `maskfleet codec bench`, `conditional` and `fold`. `codec_measure.py` takes the measurements."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from edge_kernels.codecs import names

from edge_bench import provenance
from edge_bench.cli import write_json
from edge_client.errors import ConfigError

if TYPE_CHECKING:
    from edge_bench.codec_measure import Row

app = typer.Typer(no_args_is_help=True, help="Codecs measured: bytes against the entropy, time, memory.")

Json = Annotated[Path | None, typer.Option("--json", help="Write the measurements here.")]
BIG = 10_000_000
TABLE_WIDTH = 112


def _command() -> str:
    return " ".join(["maskfleet", *sys.argv[1:]])


def _numbers(text: str, kind: type[int] | type[float], option: str) -> list[float]:
    try:
        return [kind(float(part)) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a comma-separated list of numbers") from None


@app.command()
def bench(
    params: Annotated[str, typer.Option(help="Sizes d, comma-separated.")] = "100000,1000000,10000000",
    flips: Annotated[str, typer.Option(help="Flip rates, comma-separated.")] = "0.1,0.02,0.01,0.005,0.002",
    codecs: Annotated[str | None, typer.Option(help="Only these codecs or peers, comma-separated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median is shown. One at d >= 1e7.")] = 3,
    json_file: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of bits per parameter and of the entropy.")] = None,
) -> None:
    """Measure all codecs and peers at the given sizes and flip rates."""
    from rich.console import Console

    from edge_bench.codec_measure import PEERS, measure

    known = [*names(), *PEERS]
    chosen = known if codecs is None else codecs.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        raise ConfigError(f"there is no codec {', '.join(unknown)}; the codecs are {', '.join(known)}")
    rates = _numbers(flips, float, "--flips")
    if not all(0 < rate < 1 for rate in rates):
        raise ConfigError(f"--flips {flips}: a flip rate lies between 0 and 1")
    sizes = [int(d) for d in _numbers(params, int, "--params")]
    if min(sizes) < 1:
        raise ConfigError(f"--params {params}: a size is at least 1")
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH  # output into a file or a pipe
    origin = provenance.origin(_command())
    rows: list[Row] = []
    for d in sizes:
        for rate in rates:
            found = measure(chosen, d, rate, repeats if d < BIG else 1)
            console.print(_table(found))
            rows += found
    if json_file is not None:
        write_json(json_file, {**origin, "rows": [asdict(row) for row in rows]})
        console.print(f"wrote {json_file}")
    if plot is not None:
        draw(rows, plot)
        console.print(f"wrote {plot}")


@app.command()
def conditional(
    params: Annotated[int, typer.Option(min=1000, help="Parameters d.")] = 1_000_000,
    spread: Annotated[float, typer.Option(min=0.01, help="theta ~ Beta(spread, spread).")] = 0.3,
    steps: Annotated[str, typer.Option(help="Sizes of the local step in the score, comma-separated.")] = "0.1,0.3,1",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Json = None,
) -> None:
    """Coupled samples: the bits that shared contexts save, and the bounds."""
    from rich.console import Console
    from rich.table import Table

    from edge_bench.codec_measure import conditional as measure_conditional

    origin = provenance.origin(_command())
    rows = [measure_conditional(params, spread, step, seed) for step in _numbers(steps, float, "--steps")]
    table = Table(title=f"coupled flips, theta ~ Beta({spread}, {spread}), d = {params:,}: bits per parameter")
    heads = ("step", "flips", "entropy", "coded", "given bins", "coded", "saved", "given all")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        coded, plain = row["conditional_bits_per_parameter"], row["unconditional_bits_per_parameter"]
        table.add_row(
            f"{row['step']:g}", f"{row['flip_rate']:.2%}", f"{row['entropy_bits_per_parameter']:.4f}", f"{plain:.4f}",
            f"{row['conditional_entropy_bits_per_parameter']:.4f}", f"{coded:.4f}", f"{1 - coded / plain:.0%}",
            f"{row['ideal_bits_per_parameter']:.4f}",
        )  # fmt: skip
    Console(highlight=False, soft_wrap=True).print(table)
    if json_file is not None:
        write_json(json_file, {**origin, "rows": rows})


@app.command()
def fold(
    params: Annotated[int, typer.Option(min=1, help="Positions d.")] = BIG,
    masks: Annotated[int, typer.Option(min=1, help="Masks to sum.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median is shown.")] = 9,
    json_file: Json = None,
) -> None:
    """Sum packed masks: carry-save counters against unpack-and-add, in process CPU time."""
    from rich.console import Console

    from edge_bench.codec_measure import fold as measure_fold

    origin = provenance.origin(_command())
    row = measure_fold(params, masks, repeats)
    ours, narrow, wide = (row[f"{name}_s"] for name in ("carry_save", "unpack_add_uint8", "unpack_add_uint16"))
    Console(highlight=False, soft_wrap=True).print(
        f"{masks} masks of {params:,} bits: carry-save {ours:.3f} s, unpack-and-add {narrow:.3f} s in uint8 "
        f"({narrow / ours:.1f}x), {wide:.3f} s in uint16 ({wide / ours:.1f}x); peak {row['peak_bytes'] / 1e6:.1f} MB "
        "beside the masks"
    )
    if json_file is not None:
        write_json(json_file, {**origin, **row})


def _table(rows: list[Row]) -> object:
    """The table of one size and flip rate, smallest payload first."""
    from rich.table import Table

    head = rows[0]
    bound = head.entropy_bits_per_parameter
    table = Table(title=f"d = {head.d:,}, flip rate {head.flip_rate:g}, entropy {bound:.4f} bits per parameter")
    table.add_column("codec")
    heads = "bits/param", "/ entropy", "encode ns", "decode ns", "encode MB/s", "decode MB/s", "false flips", "peak MB"
    for name in heads:
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda r: r.bits_per_parameter):
        table.add_row(
            row.codec, f"{row.bits_per_parameter:.4f}", f"{row.bits_per_parameter / bound:.3f}",
            f"{row.encode_ns_per_parameter:.2f}", f"{row.decode_ns_per_parameter:.2f}",
            f"{125 / row.encode_ns_per_parameter:.1f}", f"{125 / row.decode_ns_per_parameter:.1f}",
            f"{row.false_flips:,}", f"{row.peak_bytes / 1e6:.1f}",
        )  # fmt: skip
    table.caption = (
        "MB/s of the packed mask (d / 8 bytes); zlib 9, zstd 19 (9 for d > 1e6); pyfusefilter decodes a sample"
    )
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Plot bits per parameter and their ratio to the entropy over the flip rate, at the largest size."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib.figure import Figure

    d = max(row.d for row in rows)
    rows = [row for row in rows if row.d == d]
    rates = sorted({row.flip_rate for row in rows})
    figure = Figure(figsize=(12, 5), layout="constrained")
    bits, ratio = figure.subplots(1, 2)
    p = np.geomspace(min(rates) / 1.2, min(max(rates) * 1.2, 0.5), 200)
    bits.plot(p, -(p * np.log2(p) + (1 - p) * np.log2(1 - p)), color="black", linewidth=2.5, label="entropy")
    ratio.axhline(1, color="black", linewidth=2.5)
    for i, name in enumerate(dict.fromkeys(row.codec for row in rows)):
        mine = sorted((r for r in rows if r.codec == name), key=lambda row: row.flip_rate)
        style = {"marker": "osv^D<>px*hP"[i % 12], "color": mpl.colormaps["tab20"](i % 20), "linewidth": 0.8}
        x = [row.flip_rate for row in mine]
        bits.plot(x, [row.bits_per_parameter for row in mine], markersize=4, label=name, **style)
        above = [row.bits_per_parameter / row.entropy_bits_per_parameter for row in mine]
        ratio.plot(x, above, markersize=4, **style)
    bits.set(xscale="log", yscale="log", xlabel="flip rate", ylabel="bits per parameter", title=f"d = {d:,}")
    ratio.set(xscale="log", ylim=(0.95, 1.6), xlabel="flip rate", ylabel="bits / entropy")
    bits.legend(fontsize="small", ncols=2)
    for axes in (bits, ratio):
        axes.grid(visible=True, which="both", alpha=0.2)
    figure.savefig(path, dpi=120)
