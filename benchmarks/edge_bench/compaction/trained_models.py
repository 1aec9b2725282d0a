"""Trained personal models before and after compaction: ``python -m edge_bench.compaction.trained_models --json FILE``.

Methods train a few rounds on real data in the simulator (`trained_models.toml` has them, tasks and settings). Each
device's personal model is compacted as a device does it. A sample counts as differing when the predicted class of the
masked network, run by the trainer, is not the compact model's. Milliseconds are processor time of one sample on one
thread, median of calls in turns; the rest is a median over the devices.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from edge_bench import provenance
from edge_bench.command_line import check_writable, known_names, run_module, write_json
from edge_bench.data import datasets
from edge_bench.reproductions.reproduction import Cell, cells, parse
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import find_bundle
from edge_client.artifacts.making import Limits, make
from edge_client.bundle import F32, Bundle
from edge_client.compaction.personal import write_dense, write_personal
from edge_client.compaction.tuning import clock
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError
from edge_client.measure.engines import onnx_call
from edge_client.measure.latency import in_turns
from edge_client.measure.macs import macs
from edge_client.runtimes.onnx import open_onnx
from edge_client.task import SCORE_BATCH, Personal
from edge_client.training import Trainer, open_trainer

CONFIG = Path(__file__).with_suffix(".toml")
ANY = Limits(agreement=0.0, error=float("inf"))
"""An int8 model's error is a result here."""
FIELDS = {
    "samples": "test samples of all devices",
    "differing": "of them, predicted otherwise by the compact model",
    "differing_aligned": "the same of the timed devices' models that are as wide as runs fastest",
    "error_std": "largest difference of two outputs over their standard deviation, of all devices",
    "live_share": "parameters that are not zero",
    "parameter_ratio": "dense over compact",
    "mac_ratio": "dense over compact multiply-adds of one sample",
    "byte_ratio": "dense over compact file",
    "speedup": "dense over compact milliseconds, of the timed devices",
    "speedup_aligned": "the same for the widths that run fastest",
    "speedup_int8": "the same for the compact model in int8",
    "int8_agreement": "test samples of the timed devices that int8 predicts as the compact model does",
    "int8_gain": "test samples right by int8 minus those right by the compact model, as a share",
}


@dataclass(frozen=True)
class Found:
    """One device's model; see `FIELDS`. `samples` and what differs are counts."""

    samples: int
    differing: int
    error_std: float
    live_share: float
    parameter_ratio: float
    mac_ratio: float
    byte_ratio: float
    bytes: int


@dataclass(frozen=True)
class Timed:
    """The same model's latency, aligned and in int8."""

    differing_aligned: int
    ms_dense: float
    ms: float
    speedup: float
    speedup_aligned: float
    speedup_int8: float
    int8_agreement: float
    int8_gain: float
    int8_bytes: int


def outputs(model: Path, x: NDArray[Any]) -> F32:
    """The ONNX model's outputs for `x`, in pieces as a device scores."""
    session = open_onnx(model)
    (name,) = (i.name for i in session.get_inputs())
    return _pieces(lambda part: session.run(None, {name: part})[0], x)


def _pieces(call: Callable[[NDArray[Any]], F32], x: NDArray[Any]) -> F32:
    return np.concatenate([call(x[low : low + SCORE_BATCH]) for low in range(0, len(x), SCORE_BATCH)])


def _differ(found: F32, due: F32) -> int:
    return int((found.argmax(-1) != due.argmax(-1)).sum())


def compare(bundle: Bundle, trainer: Trainer, personal: Personal, data: DeviceData, folder: Path) -> Found:
    """Write `compact.onnx` and `dense.onnx` into `folder`, and compare the first with the masked network."""
    compact, dense = folder / "compact.onnx", folder / "dense.onnx"
    report = write_personal(bundle, personal, compact, data.x, align="none")
    write_dense(bundle, personal, dense, data.x)
    due = _pieces(lambda x: trainer.logits(personal.parameters, personal.buffers, x), data.x_test)
    found = outputs(compact, data.x_test)
    return Found(
        samples=len(data.y_test),
        differing=_differ(found, due),
        error_std=float(np.abs(found - due).max() / max(float(due.std()), 1e-30)),
        live_share=report.parameters_live / report.parameters_dense,
        parameter_ratio=report.parameters_dense / max(1, report.parameters_compact),
        mac_ratio=macs(dense) / max(1, macs(compact)),
        byte_ratio=dense.stat().st_size / compact.stat().st_size,
        bytes=compact.stat().st_size,
    )


def measure(bundle: Bundle, personal: Personal, data: DeviceData, folder: Path, runs: int) -> Timed:
    """Time the models that `compare` left in `folder` beside an aligned one and one in int8."""
    one, y = data.x_test[:1], data.y_test
    paths = {k: folder / f"{k}.onnx" for k in ("dense", "compact", "aligned", "int8")}
    write_personal(bundle, personal, paths["aligned"], data.x, align="auto", clock=clock(one))
    make(paths["compact"].read_bytes(), "int8", paths["int8"], data.x, ANY)
    says = {k: outputs(path, data.x_test) for k, path in paths.items()}
    cpu = in_turns([onnx_call(path, one) for path in paths.values()], runs).cpu
    ms = {k: float(np.median(t)) for k, t in zip(paths, cpu, strict=True)}
    right = {k: float((v.argmax(-1) == y).mean()) for k, v in says.items()}
    return Timed(
        differing_aligned=_differ(says["aligned"], says["dense"]),
        ms_dense=ms["dense"],
        ms=ms["compact"],
        speedup=ms["dense"] / ms["compact"],
        speedup_aligned=ms["dense"] / ms["aligned"],
        speedup_int8=ms["dense"] / ms["int8"],
        int8_agreement=1 - _differ(says["int8"], says["compact"]) / len(y),
        int8_gain=right["int8"] - right["compact"],
        int8_bytes=paths["int8"].stat().st_size,
    )


def merged(found: Sequence[Found | Timed]) -> dict[str, Any]:
    """Counts are summed, the largest error taken, and everything else is the median over the devices."""
    rows = [asdict(f) for f in found]
    how: Mapping[str, Callable[[list[Any]], Any]] = {
        "samples": sum, "differing": sum, "differing_aligned": sum, "error_std": max,
    }  # fmt: skip
    made = {k: how.get(k, median)([r[k] for r in rows]) for k in rows[0]} if rows else {}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in made.items()}


def row(cell: Cell, timed: int, runs: int) -> dict[str, Any]:
    """Train one method on one task, compact every device's model, and time the first `timed` of them."""
    bundle = find_bundle(cell.config.bundle)
    devices = datasets.load(cell.config.data, cell.config.seed, bundle.manifest)
    start = time.perf_counter()
    result = run_all(cell.config, bundle, devices)[cell.label]
    trained, trainer = time.perf_counter() - start, open_trainer(cell.config.backend, bundle)
    found: list[Found] = []
    times: list[Timed] = []
    with tempfile.TemporaryDirectory() as folder:
        for device, personal in result.personal.items():
            found.append(compare(bundle, trainer, personal, devices[device], Path(folder)))
            if len(times) < timed:
                times.append(measure(bundle, personal, devices[device], Path(folder), runs))
    score = None if result.final is None else round(result.final.mean, 4)
    return {
        "task": cell.task, "method": cell.label, "devices": len(found), "score": score, **merged(found),
        **merged(times), "seconds_training": round(trained, 1),
    }  # fmt: skip


def line(r: Mapping[str, Any]) -> str:
    """A row for the terminal."""
    times = f"time x{r['speedup']:.2f}, aligned x{r['speedup_aligned']:.2f}" if "speedup" in r else ""
    return (
        f"{r['task']:8} {r['method']:22} score {r['score']:.3f}  {r['differing']} of {r['samples']} differ, error "
        f"{r['error_std']:.1e}  live {r['live_share']:.2f}  parameters x{r['parameter_ratio']:.2f}, multiply-adds "
        f"x{r['mac_ratio']:.2f}, bytes x{r['byte_ratio']:.2f}  {times}"
    )


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    task: Annotated[str | None, typer.Option(help="Only these tasks, comma-separated.")] = None,
    method: Annotated[str | None, typer.Option(help="Only these methods, comma-separated.")] = None,
    timed: Annotated[int, typer.Option(min=0, help="Devices of each run whose models are timed.")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="Timed calls of each model.")] = 300,
    config: Annotated[Path, typer.Option(help="Tasks and methods, as a reproduction's file has them.")] = CONFIG,
) -> None:
    """Train every method, compact every personal model, and compare before and after."""
    check_writable(json_file)
    origin = provenance.origin()
    setup = parse(config.read_text("utf-8"), config.stem)
    rows: list[dict[str, Any]] = []
    methods = known_names(method, "--method", setup.methods, f"{config} has no method")
    tasks = known_names(task, "--task", setup.tasks, f"{config} has no task")
    for cell in cells(setup, setup.seeds, methods):
        if cell.task not in tasks:
            continue
        try:
            rows.append(row(cell, timed, runs))
            print(line(rows[-1]), flush=True)
        except MaskfleetError as error:
            rows.append({"task": cell.task, "method": cell.label, "status": f"{type(error).__name__}: {error}"})
            print(f"{cell.task:8} {cell.label:22} {rows[-1]['status']}", flush=True)
        write_json(json_file, {**origin, "fields": FIELDS, "rows": rows})
    if all("status" in r for r in rows):
        raise ConfigError(f"none of {len(rows)} runs has a result; change --task, --method or {config}")


if __name__ == "__main__":
    run_module(main)
