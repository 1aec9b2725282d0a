"""The suite in other engines: ``python -m edge_bench.compaction.engines --json FILE`` (needs extra `author`).

Each masked graph is compacted, and the compact model goes on as an ExecuTorch program (XNNPACK, float32) and as int8
for ONNX Runtime. Both are compared with the masked module in float64, as the suite compares `personal.onnx`. With
``--runs`` the dense and the compact model are timed in turns, in every engine. ``--align`` lowers the widths too that
run fastest in ONNX Runtime.

Lowering takes seconds of CPU for a small graph and minutes for a deep one.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.compaction.masks import MaskKind
from edge_bench.compaction.options import Bundles, Family, Json, Kept, Masks, Models, Runs, chosen, cuts
from edge_bench.compaction.suite import EXACT, Subject, compacted, export, prepare
from edge_client.artifacts import BATCH, writer
from edge_client.artifacts.making import Limits, make
from edge_client.compaction.tuning import clock
from edge_client.errors import MaskfleetError
from edge_client.measure.engines import open_model
from edge_client.measure.latency import in_turns
from edge_client.measure.macs import macs

ENGINES = {"executorch": "pte", "onnxruntime-int8": "int8"}
"""Beside ONNX Runtime in float32: the kind of artifact that each runs."""
ANY = Limits(agreement=0.0, error=float("inf"))
"""An int8 model's error is a result here."""
FIELDS = {
    "mac_ratio": "dense over compact multiply-adds",
    "error_std": "largest error over the standard deviation of the masked module's outputs in float64",
    "error_dense_std": "the same for the dense graph of the masked model in float32 in ONNX Runtime",
    "agreement": "share of samples whose largest output is the masked module's",
    "error_rms": "root mean square error over the standard deviation",
    "speedup": "dense over compact milliseconds of one sample in the same engine: processor time, one thread, in turns",
    "ms_dense": "of the dense model in the same engine",
    "bytes": "of the file",
    "seconds": "processor time of writing and proving the artifact",
}
Variant = Literal["dense", "compact", "aligned"]


@dataclass
class Row:
    """One compact model in one engine; see `FIELDS`. `status` is as in the suite."""

    model: str
    mask: str
    kept: float
    engine: str
    aligned: bool = False
    status: str = "ok"
    mac_ratio: float | None = None
    error_std: float | None = None
    error_dense_std: float | None = None
    agreement: float | None = None
    error_rms: float | None = None
    speedup: float | None = None
    ms_dense: float | None = None
    ms: float | None = None
    bytes: int | None = None
    seconds: float | None = None

    @property
    def exact(self) -> bool:
        """Whether its outputs equal the masked module's, up to float32's own rounding."""
        return self.error_std is not None and self.error_std <= max(EXACT, 2 * (self.error_dense_std or 0.0))

    def row(self) -> dict[str, Any]:
        """The fields that are known, rounded."""
        found = {k: v for k, v in asdict(self).items() if v is not None}
        return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}


def measure(
    subject: Subject, kind: MaskKind, kept: float, folder: Path, engines: list[str], runs: int, align: bool
) -> list[Row]:
    """The rows of one graph under one mask; files are left in `folder`."""
    compact = compacted(subject, kind, kept, folder / "compact.onnx")
    if compact.status != "ok":
        return [Row(subject.case.name, kind, kept, e, status=compact.status) for e in ("onnxruntime", *engines)]
    (folder / "compact.dense.onnx").rename(folder / "dense.onnx")
    variants: list[Variant] = ["compact"]
    if align:
        settings: dict[str, Any] = {"align": "auto", "clock": clock(subject.x[:1])}
        if compacted(subject, kind, kept, folder / "aligned.onnx", **settings).status == "ok":
            variants.append("aligned")
    dense_macs = macs(folder / "dense.onnx")
    rows: dict[tuple[str, Variant], Row] = {}
    files: dict[tuple[str, Variant], Path] = {}
    for engine in ("onnxruntime", *engines):
        for variant in (*variants, "dense") if runs else variants:
            row = Row(subject.case.name, kind, kept, engine, variant == "aligned")
            source = folder / f"{variant}.onnx"
            row.mac_ratio, row.error_dense_std = dense_macs / max(1, macs(source)), compact.error_dense_std
            _write(row, source, subject, folder, files, (engine, variant))
            rows[engine, variant] = row
    if runs:
        times = in_turns([open_model(path, subject.x[:1]) for path in files.values()], runs, max(3, runs // 10)).cpu
        for key, series in zip(files, times, strict=True):
            rows[key].ms = float(np.median(series))
        for (engine, _), row in rows.items():
            dense = rows[engine, "dense"]
            if row.ms and dense.ms:
                row.ms_dense, row.speedup = dense.ms, dense.ms / row.ms
    return [row for (_, variant), row in rows.items() if variant != "dense"]


def _write(
    row: Row,
    source: Path,
    subject: Subject,
    folder: Path,
    files: dict[tuple[str, Variant], Path],
    key: tuple[str, Variant],
) -> None:
    """Make the engine's file of `source`, and compare it with the masked module."""
    path = source
    start = time.process_time()
    try:
        if row.engine != "onnxruntime":
            art = ENGINES[row.engine]
            path = folder / f"{source.stem}-{art}{'.onnx' if art == 'int8' else '.pte'}"
            make(source.read_bytes(), art, path, subject.x, ANY)
            row.seconds = time.process_time() - start
        found = _outputs(row.engine, path, subject.x)
        error, spread = np.abs(found - subject.expected), max(float(subject.expected.std()), 1e-12)
        row.error_std, row.error_rms = float(error.max()) / spread, float(np.sqrt((error**2).mean())) / spread
        row.agreement = float((found.argmax(-1) == subject.expected.argmax(-1)).mean())
        row.bytes, files[key] = path.stat().st_size, path
    except MaskfleetError as error:
        row.status = f"refused: {error}"
    except Exception as error:  # a crash is a result too
        row.status = f"crashed: {type(error).__name__}: {str(error)[:200]}"


def _outputs(engine: str, path: Path, x: NDArray[Any]) -> NDArray[Any]:
    run: Callable[[NDArray[Any]], NDArray[Any]] = writer(ENGINES.get(engine, "int8")).open(path.read_bytes())
    return np.concatenate([run(x[i : i + BATCH]) for i in range(0, len(x), BATCH)])


def summary(rows: list[Row]) -> dict[str, Any]:
    """By engine: graphs, those exact under every mask, and those refused or crashed; int8 is never exact."""
    made: dict[str, Any] = {}
    for engine in dict.fromkeys(r.engine for r in rows):
        by: dict[str, list[Row]] = {}
        for r in (r for r in rows if r.engine == engine and not r.aligned):
            by.setdefault(r.model, []).append(r)
        done = {name: own for name, own in by.items() if all(r.status == "ok" for r in own)}
        made[engine] = {
            "graphs": len(by),
            "written": len(done),
            "exact": sum(all(r.exact for r in own) for own in done.values()),
            "refused": sorted(n for n, own in by.items() if any(r.status.startswith("refused") for r in own)),
            "crashed": sorted(n for n, own in by.items() if any(r.status.startswith("crashed") for r in own)),
        }
    return made


def line(r: Row) -> str:
    """A row for the terminal."""
    name = f"{r.model}{' aligned' if r.aligned else ''}"
    if r.status != "ok":
        return f"{name:34} {r.mask:6} {r.kept} {r.engine:16} {r.status[:160]}"
    speed = f"{r.ms_dense:8.3f} -> {r.ms:8.3f} ms x{r.speedup:.2f}" if r.ms and r.ms_dense and r.speedup else ""
    return (
        f"{name:34} {r.mask:6} {r.kept} {r.engine:16} error {r.error_std:.1e} (rms {r.error_rms:.1e}), same class "
        f"{r.agreement:.3f}  {r.bytes or 0:9,} bytes  {f'{r.seconds:.0f} s' if r.seconds else ''} {speed}"
    )


def main(
    json_file: Json = None,
    models: Models = None,
    family: Family = None,
    masks: Masks = "act,weight",
    kept: Kept = "0.5,0.3",
    engines: Annotated[str, typer.Option(help="Engines beside ONNX Runtime, by comma.")] = ",".join(ENGINES),
    runs: Runs = 0,
    align: Annotated[bool, typer.Option("--align", help="Also the widths that run fastest in ONNX Runtime.")] = False,
    bundles: Bundles = None,
) -> None:
    """Compact graphs of the suite and run them in every engine; a line for each."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    check_writable(json_file)
    wanted = cuts(masks, kept)
    origin = provenance.origin()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        for case in chosen(models, family):
            name = case.name.replace(" ", "-").replace(",", "")
            try:
                bundle = export(case, (bundles or scratch / "bundles") / name)
            except MaskfleetError as error:
                rows.append(Row(case.name, "", 0.0, "export", status=f"refused: {error}"))
                continue
            for kind, share in wanted:
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    subject = prepare(case, bundle, kind, share)
                    names = [e for e in ENGINES if e in engines.split(",")]
                    found = measure(subject, kind, share, Path(folder), names, runs, align)
                rows += found
                for r in found:
                    print(line(r), flush=True)
            shown = [r.row() for r in rows]
            write_json(json_file, {**origin, "fields": FIELDS, "summary": summary(rows), "rows": shown})
    for engine, counts in summary(rows).items():
        print(f"{engine}: {counts}")


if __name__ == "__main__":
    run_module(main)
