"""A benchmark of variants on this machine, as a report: plain values, ready for JSON.

A row is one variant on one number of threads. All variants of a number take turns for their times. A row's memory and
cold start are measured in processes of its own, its energy in a block between two rests. See `docs/bench.md`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edge_client.bench import child
from edge_client.bench.subject import Subject
from edge_client.bench.training import Training
from edge_client.bench.variants import Variant
from edge_client.errors import ConfigError, MaskfleetError, MeterError
from edge_client.measure import engines, machine
from edge_client.measure.energy import Meter, Trace, above_idle, joules
from edge_client.measure.latency import FEWEST, Times, in_turns, summary
from edge_client.measure.macs import macs
from edge_client.measure.meters import Choice

FORMAT = 2
REST = 1.0  # seconds of rest on each side of a block whose energy is measured
FEWEST_ROUNDS = 3  # of training, however long they take
LEAVE = 2.0  # seconds in which a meter leaves its device as it was, after a block that failed
BUSY = 0.25  # load of each core before the start from which it is said
LOSSES = 0.1  # of a block's samples, from which it is said
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How much is measured. `seconds` bounds the turns of one number of threads; `energy_seconds` one block."""

    threads: tuple[int, ...]
    runs: int = 1024
    warm_up: int = 50
    seconds: float = 60.0
    energy_seconds: float = 3.0
    cold_starts: int = 3


def recorded(
    works: Iterable[Callable[[], int]], meter: Meter, rest: float
) -> tuple[Trace, list[tuple[list[float], int]]]:
    """One recording of all works, and for each work four moments and its number of calls.

    The moments are those at which rest, work, rest begin, and the end. A work is made before its block, so that its
    preparation is outside every window. Raises what the meter raises.
    """
    found = []
    meter.start()
    try:
        for work in works:
            marks = [time.monotonic()]
            time.sleep(rest)
            marks.append(time.monotonic())
            calls = work()
            marks.append(time.monotonic())
            time.sleep(rest)
            marks.append(time.monotonic())
            found.append((marks, calls))
    except BaseException:  # Ctrl-C too: a meter must neither hide it nor hold it up, as one that waits for a file would
        ending = threading.Thread(target=_stop, args=(meter,), daemon=True)
        ending.start()
        ending.join(LEAVE)
        raise
    return meter.stop(), found


def _stop(meter: Meter) -> None:
    with suppress(Exception):
        meter.stop()


def lasting(call: Callable[[], object], seconds: float) -> Callable[[], int]:
    """As many calls as take `seconds`; returns how many they were."""

    def work() -> int:
        calls, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            call()
            calls += 1
        return calls

    return work


def add_energy(
    rows: Sequence[dict[str, Any]], works: Iterable[Callable[[], int]], meter: Meter | None, rest: float
) -> None:
    """Add to each row the joules of a call above rest, their error and lost samples; or why there are none."""
    if meter is None or not rows:
        return
    try:
        trace, measured = recorded(works, meter, rest)
    except Exception as error:  # another package's meter may fail in any way; what was timed before is kept
        fault = str(error) if isinstance(error, MaskfleetError) else f"{type(error).__name__}: {error}"
        for row in rows:
            row["energy_fault"] = fault
        return
    for row, (marks, calls) in zip(rows, measured, strict=True):
        try:
            before, busy, after = (joules(trace, a, b) for a, b in pairwise(marks))
        except MeterError as error:
            row["energy_fault"] = str(error)
            continue
        found = above_idle(busy, [before, after])
        row |= {
            "joules": found.joules / calls, "joules_error": found.error / calls, "watts_above_rest": found.watts,
            "energy_calls": calls, "energy_samples": found.samples, "energy_lost": found.lost,
            "energy_clipped": found.clipped,
        }  # fmt: skip


def inference(variants: Sequence[Variant], x: NDArray[Any], settings: Settings, say: Say) -> list[dict[str, Any]]:
    """The rows of all variants on each number of threads. Raises ConfigError when one does not run."""
    rows = []
    for threads in settings.threads:
        say(f"{', '.join(v.name for v in variants)} in turns, {threads} thread{'s' * (threads > 1)}")
        calls = [engines.open_model(v.file, x, threads) for v in variants]
        times = in_turns(calls, settings.runs, settings.warm_up, settings.seconds)
        for i, variant in enumerate(variants):
            row = {"variant": variant.name, "engine": engines.engine_of(variant.file), "threads": threads}
            if settings.cold_starts:
                say(f"{variant.name}: memory and cold start, {threads} thread{'s' * (threads > 1)}")
            rows.append(row | timed(times, i) | _alone(variant.file, x, threads, settings))
    return rows


def _works(
    variants: Sequence[Variant], x: NDArray[Any], settings: Settings, trains: Training | None, say: Say
) -> Iterator[Callable[[], int]]:
    """The blocks whose energy is measured, in the order of the rows, then a training step and a round."""
    for threads in settings.threads:
        for variant in variants:
            say(f"{variant.name}: energy, {threads} thread{'s' * (threads > 1)}")
            yield lasting(engines.open_model(variant.file, x, threads), settings.energy_seconds)
    for call in () if trains is None else (trains.step, trains.round):
        say("training: energy")
        yield lasting(call, settings.energy_seconds)


def timed(times: Times, index: int) -> dict[str, Any]:
    """Wall and processor time of one call of several."""
    return {"wall_ms": summary(times.wall[index]).to_json(), "cpu_ms": summary(times.cpu[index]).to_json()}


def _alone(file: Path, x: NDArray[Any], threads: int, settings: Settings) -> dict[str, Any]:
    """Medians over processes that do nothing else, each after its files were dropped from the system's cache."""
    found = []
    for _ in range(settings.cold_starts):
        for part in files_of(file):
            child.drop_from_cache(part)
        try:
            found.append(child.measure(file, x.shape, x.dtype.name, threads))
        except ConfigError as error:  # what was timed before is kept
            return {"alone_fault": str(error)}
    return {k: _median([f[k] for f in found]) for k in (found[0] if found else {})}


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(f"{np.median(known):.4g}") if known else None


def of_files(variants: Sequence[Variant]) -> dict[str, Any]:
    """Bytes and multiply-adds of each variant's file, which no thread changes, and what it is."""
    found = {}
    for variant in variants:
        size = sum(file.stat().st_size for file in files_of(variant.file))
        about: dict[str, Any] = {"bytes": size, "macs": _macs(variant.file)}
        found[variant.name] = about | ({"note": variant.note} if variant.note else {})
    return found


def files_of(model: Path) -> list[Path]:
    """The files of a model: its own, and those beside it in which an ONNX model keeps tensors."""
    if engines.engine_of(model) != engines.ONNX:
        return [model]
    tensors = onnx.load(model, load_external_data=False).graph.initializer
    beside = {e.value for t in tensors if t.data_location == t.EXTERNAL for e in t.external_data if e.key == "location"}
    return [model, *(model.parent / name for name in sorted(beside))]


def _macs(file: Path) -> int | None:
    """Multiply-adds of one sample; None where they cannot be counted."""
    if engines.engine_of(file) != engines.ONNX:
        return None
    try:
        return macs(file)
    except Exception:  # shape inference has errors of its own, for a model that runs as well
        return None


def training(done: Training, settings: Settings, say: Say) -> dict[str, Any]:
    """Times of a training step and of a round; a round takes its turn alone, as it is long."""
    say(f"training: steps of {done.batch} samples, rounds of {done.method['name']} on {done.samples}")
    found: dict[str, Any] = {
        "method": done.method, "backend": done.backend, "batch": done.batch, "samples": done.samples,
        "steps_of_a_round": done.steps,
    }  # fmt: skip
    budget = settings.seconds / 3
    for name, call, runs, warm_up, fewest in (
        ("step", done.step, settings.runs, settings.warm_up, FEWEST),
        ("round", done.round, max(5, settings.runs // 50), 1, FEWEST_ROUNDS),
    ):
        found[name] = timed(in_turns([call], runs, warm_up, budget, fewest), 0)
    return found


def warnings(report: Mapping[str, Any]) -> list[str]:
    """What makes the figures less sure, one sentence each."""
    said = []
    about, before, after = report["machine"], report["before"], report["after"]
    governor = about.get("governor")
    if governor not in (None, "performance"):
        said.append(
            f"the governor is {governor!r}: the clock follows the load; run: "
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        )
    if before["load"] is not None and before["load"] > BUSY * (about.get("cores") or 1):
        said.append(f"the load was {before['load']:g} before the start: other processes shared the processor")
    if about.get("virtual"):
        said.append("this is a virtual machine: its processor may be shared, and its sensors are the host's")
    warm = before.get("celsius"), after.get("celsius")
    if None not in warm and warm[1] - warm[0] > 10:
        said.append(f"the processor warmed from {warm[0]:g} to {warm[1]:g} °C: later figures may be throttled")
    noisy = [f"{r['variant']} on {r['threads']}" for r in report["rows"] if r["wall_ms"]["cv"] > 0.2]
    if noisy:
        which = "all variants" if 1 < len(noisy) == len(report["rows"]) else ", ".join(noisy)
        said.append(f"the times of {which} vary by more than a fifth")
    said += [f"no memory and cold start: {r['alone_fault']}" for r in report["rows"] if "alone_fault" in r]
    trained = report.get("training") or {}
    measured = [*report["rows"], *(trained[name] for name in ("step", "round") if name in trained)]
    faults = {r["energy_fault"] for r in measured if "energy_fault" in r}
    clipped = max((r.get("energy_clipped", 0) for r in measured), default=0)
    if clipped:
        said.append(
            f"{clipped} samples were at the end of the meter's range: the joules are too few; use a wider range"
        )
    if any(r.get("energy_lost", 0) > LOSSES * r.get("energy_samples", 0) for r in measured):
        said.append("the meter lost more than a tenth of the samples of a block: its joules have a larger error")
    return [*said, *(f"no joules: {fault}" for fault in sorted(faults))]


def header(subject: Subject, command: str, settings: Settings) -> dict[str, Any]:
    """What a report has of the run, whatever machine it measures."""
    return {
        "format": FORMAT, "model": subject.name, "command": command, "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"), "settings": asdict(settings),
        "variants": of_files(subject.variants), "not_made": dict(subject.failed),
    }  # fmt: skip


def report(
    subject: Subject,
    command: str,
    settings: Settings,
    chosen: Choice,
    trains: Training | None,
    say: Say,
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of a subject; `before` is the machine's state before variants were made."""
    x = engines.batch(subject.shape, subject.dtype) if subject.data is None else subject.data.x[:1]
    about = header(subject, command, settings) | {
        "input": {"shape": list(x.shape), "dtype": x.dtype.name}, "machine": machine.description(),
        "meter": chosen.brief, "before": dict(before),
    }  # fmt: skip
    rows = inference(subject.variants, x, settings, say)
    trained = None if trains is None else training(trains, settings, say)
    measured = rows if trained is None else [*rows, trained["step"], trained["round"]]
    add_energy(measured, _works(subject.variants, x, settings, trains, say), chosen.meter, REST)
    about |= {"rows": rows, "training": trained}
    about["after"] = machine.state()
    return about | {"warnings": warnings(about)}
