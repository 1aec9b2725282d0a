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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.compaction.masks import MaskKind
from edge_bench.compaction.options import Bundles, Family, Json, Kept, Masks, Models, Runs, chosen, cuts
from edge_bench.compaction.suite import Result, Subject, compacted, export, prepare
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
ORT = "onnxruntime"


def measure(
    subject: Subject, kind: MaskKind, kept: float, folder: Path, engines: list[str], runs: int, align: bool
) -> list[Result]:
    """The rows of one graph under one mask; files are left in `folder`."""
    name, x = subject.case.name, subject.x[:1]
    models, dense = {"compact": folder / "compact.onnx"}, folder / "compact.dense.onnx"
    compact = compacted(subject, kind, kept, models["compact"])
    if compact.status != "ok":
        return [Result(name, kind, kept, engine, status=compact.status) for engine in (ORT, *engines)]
    if align and compacted(subject, kind, kept, folder / "aligned.onnx", "auto", clock(x)).status == "ok":
        models["aligned"] = folder / "aligned.onnx"
    if runs:
        models["dense"] = dense
    rows: dict[tuple[str, str], Result] = {}
    files: dict[tuple[str, str], Path] = {}
    for engine in (ORT, *engines):
        for variant, model in models.items():
            row = rows[engine, variant] = Result(name, kind, kept, engine, aligned=variant == "aligned")
            row.mac_ratio, row.error_dense_std = macs(dense) / max(1, macs(model)), compact.error_dense_std
            try:
                path, row.seconds = made(model, engine, subject)
                compare(row, path, subject)
                files[engine, variant] = path
            except MaskfleetError as error:
                row.status = f"refused: {error}"
            except Exception as error:  # a crash is a result too
                row.status = f"crashed: {type(error).__name__}: {str(error)[:200]}"
    if runs:
        times = in_turns([open_model(path, x) for path in files.values()], runs, max(3, runs // 10)).cpu
        for key, series in zip(files, times, strict=True):
            rows[key].ms = float(np.median(series))
        for (engine, _), row in rows.items():
            row.ms_dense = rows[engine, "dense"].ms
            if row.ms and row.ms_dense:
                row.speedup = row.ms_dense / row.ms
    return [row for (_, variant), row in rows.items() if variant != "dense"]


def made(model: Path, engine: str, subject: Subject) -> tuple[Path, float | None]:
    """The engine's file of a model, and the processor seconds of making it, None for the model itself."""
    if engine == ORT:
        return model, None
    art, start = ENGINES[engine], time.process_time()
    path = model.with_name(f"{model.stem}-{art}{'.onnx' if art == 'int8' else '.pte'}")
    make(model.read_bytes(), art, path, subject.x, ANY)
    return path, time.process_time() - start


def compare(row: Result, path: Path, subject: Subject) -> None:
    """Note how far the file's outputs are from the masked module's, and its size."""
    found = _outputs(row.engine, path, subject.x)
    error, spread = np.abs(found - subject.expected), max(float(subject.expected.std()), 1e-12)
    row.error_std, row.error_rms = float(error.max()) / spread, float(np.sqrt((error**2).mean())) / spread
    row.agreement = float((found.argmax(-1) == subject.expected.argmax(-1)).mean())
    row.bytes = path.stat().st_size


def _outputs(engine: str, path: Path, x: NDArray[Any]) -> NDArray[Any]:
    run: Callable[[NDArray[Any]], NDArray[Any]] = writer(ENGINES.get(engine, "int8")).open(path.read_bytes())
    return np.concatenate([run(x[i : i + BATCH]) for i in range(0, len(x), BATCH)])


def summary(rows: list[Result]) -> dict[str, Any]:
    """By engine: graphs, those exact under every mask, and those refused or crashed; int8 is never exact."""
    made: dict[str, Any] = {}
    for engine in dict.fromkeys(r.engine for r in rows):
        by: dict[str, list[Result]] = {}
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


def line(r: Result) -> str:
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
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        for case in chosen(models, family):
            name = case.name.replace(" ", "-").replace(",", "")
            try:
                bundle = export(case, (bundles or scratch / "bundles") / name)
            except MaskfleetError as error:
                rows.append(Result(case.name, "", 0.0, "export", status=f"refused: {error}"))
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
