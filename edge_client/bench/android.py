"""Models measured on an Android phone through adb, by a runner that its engine's makers build for it.

No Python is needed on the phone: `executor_runner` of ExecuTorch runs .pte files, `onnxruntime_perf_test` of ONNX
Runtime .onnx files. Runner, its libraries and the models are pushed into one folder; each model runs in short turns, so
that all of them see the same heat; the printed times come back. The report has the form of one of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from edge_client.bench.measure import REST, Say, Settings, add_energy, files_of, header, warnings
from edge_client.bench.subject import Subject
from edge_client.bench.variants import Variant
from edge_client.errors import ConfigError
from edge_client.measure import machine
from edge_client.measure.adb import Adb, AdbError
from edge_client.measure.energy import Meter
from edge_client.measure.engines import EXECUTORCH, ONNX, engine_of, largest_batch
from edge_client.measure.latency import F64, summary
from edge_client.measure.meters import Choice

FOLDER = "/data/local/tmp/maskfleet"
TURNS = 8  # in which the runs of a model are made
SECONDS = 600.0
ITERATION = re.compile(r"Iteration \d+ of \d+: ([\d.]+) ms")
WHOLE = "Model executed successfully"


@dataclass(frozen=True)
class Turn:
    """One start of a runner: milliseconds of each run, and the most memory in MB where the runner reports it."""

    ms: F64
    peak_mb: float | None = None


def _executor_runner(adb: Adb, runner: str, model: str, threads: int, runs: int) -> Turn:
    command = (
        f"cd {FOLDER} && LD_LIBRARY_PATH=. ./{quote(runner)} --model_path={quote(model)} --num_executions={runs} "
        f"--cpu_threads={threads} --print_output=none 2>&1"
    )
    said = adb.shell(command, SECONDS)
    times = [float(ms) for ms in ITERATION.findall(said)]
    if not times:
        older = ": it is of an older ExecuTorch, which prints their sum; build a newer one" if WHOLE in said else ""
        raise AdbError(f"{runner} printed no times of the runs of {model}{older or f': {_last(said)}'}")
    return Turn(np.array(times))


def _perf_test(adb: Adb, runner: str, model: str, threads: int, runs: int) -> Turn:
    result = "times.csv"
    command = (
        f"cd {FOLDER} && rm -f {result} && ORT_DISABLE_TELEMETRY=1 LD_LIBRARY_PATH=. ./{quote(runner)} -e cpu -I "
        f"-m times -r {runs} -x {threads} -y 1 {quote(model)} {result} 2>&1"
    )
    said = adb.shell(command, SECONDS)
    rows = [line.split(",") for line in adb.pull(f"{FOLDER}/{result}").splitlines() if line.count(",") >= 3]
    if not rows:
        raise AdbError(f"{runner} wrote no times for {model}: {_last(said)}")
    ms = [float(row[1]) * 1e3 for row in rows]  # written in seconds
    return Turn(np.array(ms), max(float(row[2]) for row in rows) / 1e6)


RUNNERS: Mapping[str, Callable[[Adb, str, str, int, int], Turn]] = {EXECUTORCH: _executor_runner, ONNX: _perf_test}


NAMED: Mapping[str, str] = {"executor_runner": EXECUTORCH, "perf_test": ONNX}  # engines by the runner's name


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1][:200]


def description(adb: Adb) -> dict[str, Any]:
    """The phone, in the words of `measure.machine.description`."""

    def prop(name: str) -> str | None:
        return adb.shell(["getprop", name]).strip() or None

    cpu = "/sys/devices/system/cpu"
    governor = _text(adb, f"cat {cpu}/cpufreq/policy*/scaling_governor")
    limits = [
        [int(v) / 1000 for v in _text(adb, f"cat {cpu}/cpufreq/policy*/cpuinfo_{end}_freq").split() if v.isdigit()]
        for end in ("min", "max")
    ]
    cores = _text(adb, "nproc")
    memory = re.search(r"MemTotal:\s+(\d+) kB", _text(adb, "cat /proc/meminfo"))
    return {
        "board": f"{prop('ro.product.manufacturer') or ''} {prop('ro.product.model') or ''}".strip() or None,
        "processor": prop("ro.soc.model") or prop("ro.board.platform") or "unknown",
        "architecture": prop("ro.product.cpu.abi"),
        "cores": int(cores) if cores.isdigit() else None,
        "governor": " ".join(sorted(set(governor.split()))) or None,
        "frequency_mhz": [min(limits[0], default=None), max(limits[1], default=None)],
        "memory_mb": None if memory is None else round(int(memory[1]) * 1024 / 1e6),
        "system": f"Android {prop('ro.build.version.release') or ''} {prop('ro.build.id') or ''}".strip(),
        "kernel": _text(adb, "uname -r"),
        "engines": {},
        "packages": machine.installed(machine.PACKAGES),
        "virtual": None,
    }


def _text(adb: Adb, command: str) -> str:
    """What a command prints; nothing where the phone does not allow it."""
    try:
        return adb.shell(command).strip()
    except AdbError:
        return ""


def state(adb: Adb) -> dict[str, Any]:
    """How the phone is now: the battery's temperature, the mean of the clocks, the load."""
    celsius = re.search(r"temperature: (\d+)", _text(adb, "dumpsys battery"))
    words = _text(adb, "cat /sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq").split()
    clocks = [int(v) for v in words if v.isdigit()]
    load = _text(adb, "cat /proc/loadavg").split()
    return {
        "celsius": None if celsius is None else int(celsius[1]) / 10,
        "mhz": round(float(np.mean(clocks)) / 1000) if clocks else None,
        "load": float(load[0]) if load else None,
        "free_mb": None,
    }


def push(adb: Adb, runner: Sequence[Path], variants: Sequence[Variant]) -> None:
    """Bring everything onto the phone, into one folder. Raises ConfigError for a missing file or two of one name."""
    files = list(dict.fromkeys([*runner, *(file for v in variants for file in files_of(v.file))]))
    names = [f.name for f in files]
    twice = sorted({str(f) for f in files if names.count(f.name) > 1})
    if twice:
        raise ConfigError(f"{' and '.join(twice)} have one name, and the phone has one folder for them; rename one")
    missing = [str(f) for f in files if not f.is_file()]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not there; name the runner that you built for Android")
    adb.push(files, FOLDER)
    adb.shell(["chmod", "755", f"{FOLDER}/{runner[0].name}"])


def batched(variant: Variant) -> Variant:
    """A variant whose note describes a run of its file, where that is not one sample.

    `executor_runner` fills a program's inputs to their largest sizes. Raises ConfigError for a file that does not open.
    """
    most = largest_batch(variant.file) if engine_of(variant.file) == EXECUTORCH else 1
    if most == 1:
        return variant
    said = f"on the phone a run is a batch of {most} samples, the largest that the program takes"
    return replace(variant, note=f"{variant.note}; {said}" if variant.note else said)


def of_runner(runner: str, variants: Sequence[Variant]) -> tuple[list[Variant], dict[str, str]]:
    """The variants that a runner runs, and why not the others. Raises ConfigError when it runs none."""
    engines = {engine_of(v.file) for v in variants}
    if len(engines) == 1:  # a runner of any name
        return list(variants), {}
    engine = next((e for word, e in NAMED.items() if word in runner), None)
    if engine is None:
        raise ConfigError(f"{runner}: its name holds none of {', '.join(NAMED)}, so its engine is unknown; rename it")
    kept = [v for v in variants if engine_of(v.file) == engine]
    if not kept:
        raise ConfigError(
            f"{runner} runs none of {', '.join(v.file.name for v in variants)}; name models of its engine"
        )
    return kept, {v.name: f"{runner} does not run it" for v in variants if v not in kept}


def processors(adb: Adb) -> int:
    """How many processors the phone has. Raises ConfigError when it does not report them."""
    said = _text(adb, "nproc")
    if not said.isdigit():
        raise ConfigError("the phone does not report how many processors it has; give --threads numbers")
    return int(said)


def rows(
    adb: Adb, runner: str, variants: Sequence[Variant], settings: Settings, meter: Meter | None, say: Say
) -> list[dict[str, Any]]:
    """The rows of all variants, on each number of threads."""
    found: list[dict[str, Any]] = []
    works: list[Callable[[], int]] = []
    each = max(1, -(-settings.runs // TURNS))
    for threads in settings.threads:
        turns: dict[str, list[Turn]] = {v.name: [] for v in variants}
        for turn in range(-1, TURNS):  # the first one warms the phone up and is not counted
            say(f"turn {turn + 1} of {TURNS}, {threads} thread{'s' * (threads > 1)}")
            for v in variants:
                start = RUNNERS[engine_of(v.file)]
                got = start(adb, runner, v.file.name, threads, each if turn >= 0 else max(settings.warm_up, 1))
                if turn >= 0:
                    turns[v.name].append(got)
        for v in variants:
            ms = np.concatenate([t.ms for t in turns[v.name]])
            peaks = [t.peak_mb for t in turns[v.name] if t.peak_mb is not None]
            row = {"variant": v.name, "engine": engine_of(v.file), "threads": threads, "wall_ms": summary(ms).to_json(),
                   "peak_mb": float(np.median(peaks)) if peaks else None}  # fmt: skip
            runs = max(1, round(settings.energy_seconds / (np.median(ms) / 1e3)))
            found.append(row)
            works.append(_work(adb, runner, v, threads, runs))
    add_energy(found, works, meter, max(REST, 3.0))  # a phone's meters move twice a second
    return found


def _work(adb: Adb, runner: str, variant: Variant, threads: int, runs: int) -> Callable[[], int]:
    """One start of the runner with many runs, which is part of their energy."""
    return lambda: len(RUNNERS[engine_of(variant.file)](adb, runner, variant.file.name, threads, runs).ms)


def report(
    subject: Subject, command: str, adb: Adb, runner: Sequence[Path], settings: Settings, chosen: Choice, say: Say
) -> dict[str, Any]:
    """Push, measure, collect. Raises AdbError, ConfigError."""
    variants, others = of_runner(runner[0].name, subject.variants)
    push(adb, runner, variants)
    variants = [batched(v) for v in variants]
    about = header(replace(subject, variants=variants, failed={**subject.failed, **others}), command, settings) | {
        "input": {"shape": list(subject.shape), "dtype": subject.dtype}, "machine": description(adb),
        "meter": chosen.brief, "before": state(adb), "training": None,
    }  # fmt: skip
    about["rows"] = rows(adb, runner[0].name, variants, settings, chosen.meter, say)
    about["after"] = state(adb)
    return about | {"warnings": warnings(about)}
