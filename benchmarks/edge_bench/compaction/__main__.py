"""The compaction benchmark: ``python -m edge_bench.compaction --json FILE`` (needs torch).

    python -m edge_bench.compaction --json benchmarks/results/compaction/suite.json
    python -m edge_bench.compaction --json FILE --model VGG16 --model ViT-tiny --masks weight --kept 0.5 --runs 100

For every graph, mask and share: multiply-adds dense, compact and bound (`edge_bench.compaction.oracle`), the error
against the masked module in float64, seconds, and with ``--runs`` the latency of dense, compact and aligned models,
timed in turns on one thread. With ``--peers`` Torch-Pruning's models of the same share join those turns, if the package
is installed.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer

from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.compaction.masks import MaskKind
from edge_bench.compaction.options import Bundles, Family, Json, Kept, Masks, Models, Runs, chosen, cuts
from edge_bench.compaction.peers import ROUND_TO, installed, pruned
from edge_bench.compaction.suite import Result, Subject, compacted, export, prepare, summary, timed
from edge_bench.compaction.zoo import Case
from edge_client.compaction.tuning import clock
from edge_client.errors import MaskfleetError
from edge_client.measure.macs import macs

FIELDS = {
    "mac_ratio": "dense over compact multiply-adds",
    "mac_bound": "dense over the bound's multiply-adds",
    "speedup": "dense over this model's milliseconds of one sample: median processor time, one thread, in turns",
    "error_std": "largest error over the standard deviation of the masked module's outputs in float64",
    "error_dense_std": "the same for the masked dense graph in float32",
    "seconds": "compaction with its proof",
}


def measure(
    case: Case, kind: MaskKind, kept: float, bundles: Path, scratch: Path, runs: int, peers: bool
) -> list[Result]:
    """The rows of one graph under one mask."""
    try:
        bundle = export(case, bundles / case.name.replace(" ", "-").replace(",", ""))
    except MaskfleetError as error:
        return [Result(case.name, kind, kept, status=f"refused: export: {error}")]
    except Exception as error:  # an exporter that fails without a sentence is a crash
        return [Result(case.name, kind, kept, status=f"crashed: export: {type(error).__name__}: {str(error)[:200]}")]
    subject = prepare(case, bundle, kind, kept)
    compact = compacted(subject, kind, kept, scratch / "compact.onnx")
    rows = [compact]
    if runs and compact.status == "ok":
        rows += _timed(subject, compact, kind, scratch, runs, peers)
    return rows


def _timed(subject: Subject, compact: Result, kind: MaskKind, scratch: Path, runs: int, peers: bool) -> list[Result]:
    """Latency of the compact model beside the dense one, and rows of the variants timed with them."""
    others: list[tuple[Result, Path]] = []
    path = scratch / "aligned.onnx"
    aligned = compacted(subject, kind, compact.kept, path, "auto", clock(subject.x[:1]))
    aligned.aligned = True
    if aligned.status == "ok":
        others.append((aligned, path))
    for round_to in (None, ROUND_TO) if peers and installed() else ():
        result = Result(compact.model, compact.mask, compact.kept, tool="torch-pruning", aligned=round_to is not None)
        path = scratch / f"peer{round_to}.onnx"
        try:
            pruned(subject.masked.module, subject.case, compact.kept, round_to, path)
            result.macs_dense, result.macs_compact = compact.macs_dense, macs(path)
            result.mac_ratio = (compact.macs_dense or 0) / max(1, result.macs_compact)
            others.append((result, path))
        except Exception as error:  # what a tool cannot prune is a result
            result.status = f"failed: {type(error).__name__}: {str(error)[:200]}"
            others.append((result, scratch / "compact.dense.onnx"))
    paths = [scratch / "compact.dense.onnx", scratch / "compact.onnx", *(path for _, path in others)]
    dense, own, *rest = timed(paths, subject, runs)
    for result, ms in zip((compact, *(r for r, _ in others)), (own, *rest), strict=True):
        if result.status == "ok":
            result.ms_dense, result.ms, result.speedup = dense, ms, dense / ms
    return [aligned, *(r for r, _ in others if r is not aligned)]


def line(r: Result) -> str:
    """A row for the terminal."""
    if r.tool != "maskfleet":
        name = f"  {r.tool}{' rounded' if r.aligned else ''}"
        return f"{name:34} {r.mask:6} {r.kept}  macs x{r.mac_ratio or 0:6.2f}  x{r.speedup or 0:.2f} {r.status[:100]}"
    if r.status != "ok":
        return f"{r.model:34} {r.mask:6} {r.kept}  {r.status[:140]}"
    name = "  aligned" if r.aligned else r.model
    marks = ("" if r.exact else " WRONG") + ("" if r.reached or r.aligned else " above")
    over = r.macs_compact / max(1, r.macs_bound) if r.macs_compact and r.macs_bound else 0.0
    speed = f" {r.ms_dense:8.3f} -> {r.ms:8.3f} ms x{r.speedup:.2f}" if r.ms and r.ms_dense and r.speedup else ""
    return (
        f"{name:34} {r.mask:6} {r.kept}  macs x{r.mac_ratio:6.2f} of x{r.mac_bound:6.2f} (bound x {over:.2f})  "
        f"error {r.error_std:.1e} ({r.error_dense_std:.1e})  {r.seconds:.1f} s{speed}{marks}"
    )


def main(
    json_file: Json = None,
    models: Models = None,
    family: Family = None,
    masks: Masks = "act,weight",
    kept: Kept = "0.5,0.3",
    runs: Runs = 0,
    peers: Annotated[bool, typer.Option("--peers", help="Time Torch-Pruning's models beside ours.")] = False,
    bundles: Bundles = None,
) -> None:
    """Compact every graph of the suite and print a line for each mask."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    check_writable(json_file)
    wanted = cuts(masks, kept)
    origin = provenance.origin()
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for case in chosen(models, family):
            for kind, share in wanted:
                found = measure(case, kind, share, bundles or scratch / "bundles", scratch, runs, peers)
                rows += found
                for r in found:
                    print(line(r), flush=True)
            shown = [r.row() for r in rows]
            write_json(json_file, {**origin, "fields": FIELDS, "summary": summary(rows), "rows": shown})
    for name, value in summary(rows).items():
        print(f"{name}: {value if isinstance(value, int) else f'{len(value)} {value}'}")


if __name__ == "__main__":
    run_module(main)
