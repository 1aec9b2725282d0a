"""`maskfleet bench`: statistics, variants, a whole report of a small bundle, comparison, a phone behind adb."""

from __future__ import annotations

import ctypes
import io
import json
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from rich.console import Console
from safetensors.numpy import save_file
from sequential_bundle import Act, Linear, random_personal, sequential_bundle

from edge_client import cli
from edge_client.bench import android, child, compare, measure, plots, report, variants
from edge_client.bench.subject import distinct
from edge_client.bundle import Bundle
from edge_client.compaction.personal import write_dense
from edge_client.errors import ConfigError, DataError, MaskfleetError, MeterError
from edge_client.measure import engines, machine, memory
from edge_client.measure.adb import connect
from edge_client.measure.energy import Trace
from edge_client.measure.latency import FEWEST, in_turns, ranks, summary

DIGITS = Path(__file__).parents[1] / "benchmarks" / "edge_bench" / "bundles" / "digits"
EXACT = ("dense", "masked", "compact", "aligned")
QUICK = ["--runs", "12", "--warm-up", "1", "--seconds", "3", "--cold-starts", "1", "--energy-seconds", "0.1"]


@dataclass(frozen=True)
class Ended:
    """A command that was run: its exit code (1 for an error of maskfleet), all it printed, the error."""

    exit_code: int
    output: str
    exception: Exception | None


def invoke(*words: object) -> Ended:
    """`maskfleet WORDS` in this process."""
    said, code, fault = io.StringIO(), 0, None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            cli.build()([str(w) for w in words], standalone_mode=False)
        except MaskfleetError as error:
            code, fault = 1, error
    return Ended(code, said.getvalue(), fault)


def small(folder: Path) -> Bundle:
    folder.mkdir(exist_ok=True)
    return sequential_bundle(folder, (12,), (Linear(16), Act(), Linear(8), Act(), Linear(3)))


# --- times


def test_calls_take_turns_in_orders_of_their_own() -> None:
    said: list[str] = []
    times = in_turns([lambda: said.append("a"), lambda: said.append("b"), lambda: said.append("c")], 50, 3)
    assert times.wall.shape == times.cpu.shape == (3, 50)
    assert said[:9] == list("abcabcabc")  # the warm-up
    pairs = ["".join(said[i : i + 2]) for i in range(9, len(said), 2)]
    assert set(pairs) == {"aa", "bb", "cc"}
    turns = [tuple(pairs[i : i + 3]) for i in range(0, len(pairs), 3)]
    assert len(turns) == 50
    assert all(len(set(turn)) == 3 for turn in turns)
    assert len(set(turns)) > 3


def test_a_call_in_turns_takes_as_long_as_alone_though_the_one_before_it_left_a_cold_cache() -> None:
    last: list[str] = []

    def call(name: str) -> None:
        if last != [name]:
            time.sleep(0.03)
        last[:] = [name]

    times = in_turns([lambda: call("a"), lambda: call("b")], 12, 1)
    assert np.median(times.wall) < 15  # milliseconds, of a call that does nothing or sleeps for twice as long


def test_each_calls_times_are_its_own_and_sleep_takes_no_processor() -> None:
    def spin() -> None:
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass

    times = in_turns([lambda: time.sleep(0.004), spin, lambda: None], 12, 0)
    assert np.median(times.wall[0]) >= 4
    assert np.median(times.cpu[1]) >= 2
    assert np.median(times.cpu[0]) < np.median(times.cpu[1])
    assert np.median(times.wall[2]) < min(np.median(times.wall[0]), np.median(times.wall[1]))


def test_turns_end_with_their_seconds_but_not_before_the_fewest() -> None:
    assert in_turns([lambda: time.sleep(0.001)], 100_000, 0, seconds=0.0).wall.shape == (1, FEWEST)
    with pytest.raises(ConfigError, match="runs = 0"):
        in_turns([lambda: None], 0)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=60))
def test_a_summary_orders_its_figures(values: list[float]) -> None:
    s = summary(np.array(values))
    assert min(values) <= s.p50 <= s.p90 <= s.p99 <= max(values)
    assert [i is not None for i in (s.p50_interval, s.p90_interval)] == [len(values) >= 6, len(values) >= 36]
    assert s.p99_interval is None
    for p, interval in ((s.p50, s.p50_interval), (s.p90, s.p90_interval)):
        low, high = interval or (p, p)
        assert min(values) <= low <= high <= max(values)
        assert low <= p * (1 + 1e-9)
    assert s.runs == len(values)
    assert s.cv == pytest.approx(np.std(values) / np.mean(values))


@pytest.mark.parametrize(("runs", "percents"), [(6, [50]), (20, [50]), (40, [50, 90]), (400, [50, 90, 99])])
def test_an_interval_holds_the_true_percentile_nineteen_times_in_twenty_or_there_is_none(
    runs: int, percents: list[int]
) -> None:
    """Of 200 series. Nineteen in twenty less twice what 200 series scatter by is 92 %."""
    rng = np.random.default_rng(0)
    series = [summary(rng.exponential(1, runs)) for _ in range(200)]
    for percent in (50, 90, 99):
        found = [getattr(s, f"p{percent}_interval") for s in series]
        assert all((interval is not None) == (percent in percents) for interval in found)
        truth = -np.log(1 - percent / 100)
        inside = [interval[0] <= truth <= interval[1] for interval in found if interval]
        assert sum(inside) >= 0.92 * len(inside)


def test_the_places_of_an_interval_are_those_of_the_tables() -> None:
    """Order statistics of the median as tables have them, counted from 1: 6 values 1 and 6, 20 values 6 and 15."""
    assert [ranks(n, 0.5) for n in (5, 6, 20, 100)] == [None, (0, 5), (5, 14), (39, 60)]
    assert [ranks(n, 0.9) is None for n in (35, 36)] == [True, False]
    assert [ranks(n, 0.99) is None for n in (367, 368)] == [True, False]


# --- variants


def outputs(file: Path, x: Any) -> Any:
    return InferenceSession(str(file)).run(None, {"x": x})[0]


def test_a_bundle_and_a_mask_give_dense_masked_and_compact_which_say_the_same(tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    personal = random_personal(bundle, 1, 0.6, 1.0)
    x = np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)
    found, failed = variants.made(variants.Source(bundle, personal, x), tmp_path, EXACT)
    assert ([v.name for v in found], failed) == (list(EXACT), {})
    dense, masked, compact, aligned = (outputs(v.file, x) for v in found)
    assert np.abs(masked - aligned).max() < 1e-5
    assert np.abs(masked - compact).max() < 1e-5
    assert np.abs(masked - dense).max() > 1e-2
    about = measure.of_files(found)
    assert about["compact"]["macs"] < about["masked"]["macs"] == about["dense"]["macs"] == 12 * 16 + 16 * 8 + 8 * 3
    assert about["compact"]["bytes"] < about["dense"]["bytes"]


@pytest.mark.parametrize("names", [["int8"], ["int8", "dense", "compact"]])
@pytest.mark.parametrize("masked", [True, False])
def test_int8_is_made_of_the_smallest_model_whatever_else_is_asked_for(
    tmp_path: Path, names: list[str], masked: bool
) -> None:
    bundle = small(tmp_path / "b")
    personal = random_personal(bundle, 1, 0.6, 1.0) if masked else None
    x = np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)
    found, failed = variants.made(variants.Source(bundle, personal, x), tmp_path, names)
    assert set(failed) == (set() if masked else {"compact"} & set(names))
    (int8,) = (v for v in found if v.name == "int8")
    assert int8.note.startswith("of compact" if masked else "of dense")


def test_without_a_mask_the_other_variants_say_what_they_need(tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    found, failed = variants.made(variants.Source(bundle, None, np.zeros((1, 12), np.float32)), tmp_path, EXACT)
    assert [v.name for v in found] == ["dense"]
    assert set(failed) == {"masked", "compact", "aligned"}
    assert all("--personal FILE, or --keep SHARE" in why for why in failed.values())
    with pytest.raises(ConfigError, match="no variant 'tiny'"):
        variants.made(variants.Source(bundle, None, np.zeros((1, 12), np.float32)), tmp_path, ["tiny"])


def test_a_share_of_the_largest_units_is_kept() -> None:
    bundle = Bundle.open(DIGITS)
    kept = variants.keep_largest_units(bundle, 0.25)
    assert kept.mask is not None
    weight = bundle.manifest.tensors[bundle.manifest.layers[0].weights[0]]
    rows = kept.mask[weight.span].reshape(weight.shape).any(axis=1)
    norms = np.linalg.norm(bundle.model().parameters[weight.span].reshape(weight.shape), axis=1)
    assert rows.sum() == np.ceil(0.25 * len(rows))
    assert norms[rows].min() >= norms[~rows].max()


def test_personal_values_or_a_mask_come_from_a_file(tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    d, model = bundle.manifest.d, bundle.model()
    mask = np.arange(d) % 3 > 0
    path = tmp_path / "p.safetensors"
    save_file({"mask": mask.astype(np.uint8)}, path)
    assert (variants.read_personal(path, bundle).parameters == np.where(mask, model.parameters, 0)).all()
    save_file({"parameters": np.full(d, 2, np.float32), "mask": mask}, path)
    assert (variants.read_personal(path, bundle).parameters == np.where(mask, 2, 0)).all()
    for arrays, why in (({"x": np.zeros(2)}, "give `parameters` or `mask`"), ({"mask": mask[:5]}, r"shape \[5\]")):
        save_file(arrays, path)
        with pytest.raises(DataError, match=why):
            variants.read_personal(path, bundle)
    path.write_bytes(b"no")
    with pytest.raises(DataError, match="no safetensors file"):
        variants.read_personal(path, bundle)


# --- one process of its own


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what it keeps")
def test_free_memory_below_memory_in_use_goes_back_to_the_system() -> None:
    arrays = [np.ones(100_000, np.uint8) for _ in range(500)]
    last = arrays.pop()
    before = memory.resident_mb()
    assert before is not None
    del arrays
    memory.give_back()
    after = memory.resident_mb()
    assert after is not None
    assert before - after > 40
    assert last.all()


def test_a_process_of_its_own_measures_cold_start_and_the_models_memory(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir()
    large = sequential_bundle(tmp_path / "l", (1000,), (Linear(2000), Act(), Linear(2)))
    source = variants.Source(large, None, np.zeros((1, 1000), np.float32))
    ((dense,), _) = variants.made(source, tmp_path, ["dense"])
    found = child.measure(dense.file, (1, 1000), "float32", 1, 2)
    assert found["model_mb"] >= 8  # the weights alone
    assert found["peak_mb"] > found["model_mb"]
    assert min(found["first_result_ms"], found["import_ms"]) > 0
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"bad\.onnx in a process of its own failed: .*cannot open"):
        child.measure(tmp_path / "bad.onnx", (1, 2), "float32", 1, 1)


def test_without_a_peak_of_the_models_own_there_is_no_memory_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = small(tmp_path / "b")
    ((dense,), _) = variants.made(variants.Source(bundle, None, np.zeros((1, 12), np.float32)), tmp_path, ["dense"])
    words = json.dumps({"file": str(dense.file), "shape": (1, 12), "dtype": "float32", "threads": 1, "runs": 1})
    assert child.main(words)["model_mb"] is not None
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "no" / "file")
    assert child.main(words)["model_mb"] is None
    monkeypatch.setattr(memory, "STATUS", tmp_path / "no" / "file")
    assert child.main(words)["peak_mb"] is None


def test_a_process_that_fails_loses_its_own_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise ConfigError("out of memory")

    monkeypatch.setattr(child, "measure", fail)
    words = ["--threads", "1", "--method", "none", "--variants", "dense", "--meter", "none", "-o", tmp_path]
    result = invoke("bench", DIGITS, *QUICK, *words)
    assert result.exit_code == 0, result.output
    assert "warning: no memory and cold start: out of memory" in result.output
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["wall_ms"]["p50"] > 0
    assert "peak_mb" not in row


# --- energy


class Steps:
    """A meter that takes 1 W at rest and 3 W at work: at work between the calls' first and last moment."""

    name = what = "steps"

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def call(self) -> None:
        self.first = self.first or time.monotonic()
        time.sleep(0.005)
        self.last = time.monotonic()

    def start(self) -> None:
        self.begin = time.monotonic()

    def stop(self) -> Trace:
        times = np.arange(self.begin, time.monotonic() + 0.01, 0.001)
        return Trace(times, np.where((times >= self.first) & (times <= self.last), 3.0, 1.0), "W", 0.001)


def test_the_energy_of_a_call_is_above_rest() -> None:
    meter = Steps()
    found: dict[str, Any] = {}
    measure.add_energy([found], [measure.lasting(meter.call, 0.5)], meter, 0.2)
    span = meter.last - meter.first
    assert found["energy_calls"] * found["joules"] == pytest.approx(2.0 * span, rel=0.05)
    assert found["watts_above_rest"] > 0
    none: dict[str, Any] = {}
    measure.add_energy([none], [measure.lasting(meter.call, 0.1)], None, 0.2)
    assert none == {}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (MeterError("the wire fell off"), "the wire fell off"),
        (ZeroDivisionError("of another package"), "ZeroDivisionError: of another package"),
    ],
)
@pytest.mark.parametrize("when", ["start", "stop"])
def test_a_meter_that_fails_loses_no_figure_but_its_own(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str, when: str
) -> None:
    def fail() -> Trace:
        raise fault

    meter = Steps()
    monkeypatch.setattr(meter, when, fail)
    row: dict[str, Any] = {"threads": 1}
    measure.add_energy([row], [measure.lasting(meter.call, 0.1)], meter, 0.0)
    assert row == {"threads": 1, "energy_fault": said}

    def interrupt() -> int:
        raise KeyboardInterrupt

    if when == "stop":
        with pytest.raises(KeyboardInterrupt):  # it is not lost in the meter's own fault
            measure.add_energy([row], [interrupt], meter, 0.0)


def test_a_meter_that_waits_for_a_person_does_not_hold_up_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    meter, ended = Steps(), list[None]()
    monkeypatch.setattr(meter, "stop", lambda: ended.append(time.sleep(30)))
    monkeypatch.setattr(measure, "LEAVE", 0.1)
    with pytest.raises(KeyboardInterrupt):
        measure.add_energy([{}], [interrupt], meter, 0.0)
    assert not ended


def test_a_reading_that_is_no_number_gives_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Steps()
    meter.start()
    times = np.arange(meter.begin, meter.begin + 2.0, 0.001)
    monkeypatch.setattr(meter, "stop", lambda: Trace(times, np.full(len(times), np.nan), "W", 0.001))
    row: dict[str, Any] = {}
    measure.add_energy([row], [measure.lasting(meter.call, 0.1)], meter, 0.1)
    assert row.keys() == {"energy_fault"}
    assert "no number" in row["energy_fault"]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"energy_samples": 100, "energy_lost": 10, "energy_clipped": 0}, []),
        ({"energy_samples": 100, "energy_lost": 11, "energy_clipped": 0}, ["the meter lost more than a tenth"]),
        ({"energy_samples": 0, "energy_lost": 9, "energy_clipped": 7}, ["7 samples were at the end", "the meter lost"]),
        ({"energy_fault": "no wire"}, ["no joules: no wire"]),
    ],
)
@pytest.mark.parametrize("where", ["row", "step", "round"])
def test_what_a_meter_missed_is_a_warning(figures: dict[str, Any], said: list[str], where: str) -> None:
    row = {"variant": "dense", "threads": 1, "wall_ms": {"cv": 0.0}}
    trained = {"step": figures if where == "step" else {}, "round": figures if where == "round" else {}}
    rows = [row | (figures if where == "row" else {})]
    state = {"load": 0.0}
    found = measure.warnings({"machine": {}, "before": state, "after": state, "rows": rows, "training": trained})
    assert [text.startswith(due) for text, due in zip(found, said, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("spread", "which"),
    [([0.3, 0.3], "all variants"), ([0.3, 0.1], "dense on 1"), ([0.3], "dense on 1"), ([0.1, 0.1], None)],
)
def test_times_that_vary_are_a_warning_that_is_short_when_all_do(spread: list[float], which: str | None) -> None:
    rows = [{"variant": "dense", "threads": i + 1, "wall_ms": {"cv": cv}} for i, cv in enumerate(spread)]
    state = {"load": 0.0}
    found = measure.warnings({"machine": {}, "before": state, "after": state, "rows": rows})
    assert found == ([] if which is None else [f"the times of {which} vary by more than a fifth"])


def test_all_blocks_share_one_recording() -> None:
    """A meter that is recorded by hand plays its pulses once, not once a row."""
    said: list[str] = []

    class Once(Steps):
        def start(self) -> None:
            super().start()
            said.append("start")

        def stop(self) -> Trace:
            said.append("stop")
            return super().stop()

    rows: list[dict[str, Any]] = [{}, {}, {}]
    measure.add_energy(rows, [measure.lasting(lambda: time.sleep(0.002), 0.02)] * 3, Once(), 0.01)
    assert said == ["start", "stop"]
    assert all("joules" in row for row in rows)


def test_a_long_round_ends_with_its_seconds_and_its_warm_up_is_part_of_them() -> None:
    calls: list[int] = []
    times = in_turns([lambda: calls.append(1)], 20, 50, seconds=0.0, fewest=3)
    assert times.wall.shape == (1, 3)
    assert len(calls) == 4


# --- the whole command


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the digits' bundle with half of its units."""
    folder = tmp_path_factory.mktemp("bench")
    made = ",".join((*EXACT, "int8"))
    result = invoke(
        "bench", DIGITS, "--keep", 0.5, *QUICK, "--threads", "1,2", "--meter", "none", "--variants", made, "-o", folder
    )
    assert result.exit_code == 0, result.output
    return folder


def test_a_report_has_every_figure_of_every_variant_and_number_of_threads(digits: Path) -> None:
    found = json.loads((digits / "report.json").read_text())
    rows = found["rows"]
    assert [(r["variant"], r["threads"]) for r in rows] == [(v, t) for t in (1, 2) for v in (*EXACT, "int8")]
    for row in rows:
        for clock in ("wall_ms", "cpu_ms"):
            assert set(row[clock]) == {"p50", "p90", "p99", "p50_interval", "p90_interval", "p99_interval", "mean",
                                       "cv", "runs"}  # fmt: skip
            assert row[clock]["runs"] == 12
        assert row["engine"] == "onnxruntime"
        assert min(row[name] for name in ("peak_mb", "import_ms", "first_result_ms")) > 0
    about = found["variants"]
    assert about["compact"]["macs"] < about["dense"]["macs"]
    assert "of the masked model's" in about["compact"]["note"]
    assert "of compact, calibrated on noise" in about["int8"]["note"]
    assert about["int8"]["macs"] == about["compact"]["macs"]
    assert found["training"]["steps_of_a_round"] >= 8
    for part in ("step", "round"):
        assert found["training"][part]["wall_ms"]["p50"] > 0
    assert {"processor", "kernel", "governor", "engines", "cores", "frequency_mhz"} <= found["machine"].keys()
    assert found["machine"]["engines"]["onnxruntime"]
    assert {"celsius", "mhz", "load"} <= found["before"].keys()
    assert found["meter"] == "no energy meter: switched off"


def test_the_page_has_the_tables_and_the_picture_is_a_picture(digits: Path) -> None:
    page = (digits / "report.md").read_text()
    assert all(
        word in page for word in ("| dense |", "| compact |", "training step of 32 samples", "p99", "report.png")
    )
    assert (digits / "report.png").read_bytes()[:4] == b"\x89PNG"
    for line in page.splitlines():
        assert not line.startswith("|") or line.count("|") in (10 + 1, 9 + 1)


def test_no_name_is_folded_in_80_columns_or_fewer(digits: Path) -> None:
    found = json.loads((digits / "report.json").read_text())
    found["rows"][-1]["engine"] = "executorch"
    for width in (80, 40):
        out = io.StringIO()
        report.show(found, Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        assert sum(line.startswith("dense ") and "onnxruntime" in line for line in lines) == 2
        assert sum(line.startswith("int8 ") and "executorch" in line for line in lines) == 1
        start = next(i for i, line in enumerate(lines) if line.startswith("variant"))
        assert width < 80 or all(len(line) <= 80 for line in lines[start : start + 24])


def test_without_matplotlib_there_is_a_page_without_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    words = [
        "bench",
        DIGITS,
        *QUICK,
        "--variants",
        "dense",
        "--threads",
        "1",
        "--method",
        "none",
        "--meter",
        "none",
        "-o",
        tmp_path / "o",
    ]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "█" in result.output
    assert "pip install 'maskfleet[bench]'" in result.output
    assert "![" not in (tmp_path / "o" / "report.md").read_text()
    assert not (tmp_path / "o" / "report.png").exists()


def test_model_files_are_measured_side_by_side(tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    source = variants.Source(bundle, random_personal(bundle, 1, 0.5, 1.0), np.zeros((4, 12), np.float32))
    found, _ = variants.made(source, tmp_path, EXACT)
    result = invoke("bench", found[0].file, found[2].file, *QUICK, "--threads", "1", "--meter", "none",
                    "-o", tmp_path / "o")  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "o" / "report.json").read_text())["rows"]
    assert [r["variant"] for r in rows] == ["dense", "compact"]


def test_two_files_of_one_name_are_two_variants_each_with_its_own_size(tmp_path: Path) -> None:
    for name, width in (("old", 64), ("new", 4)):
        (tmp_path / name).mkdir()
        bundle = sequential_bundle(tmp_path / name, (12,), (Linear(width), Act(), Linear(3)))
        write_dense(bundle, random_personal(bundle, 0, 1.0, 1.0), tmp_path / name / "personal.onnx")
    files = [tmp_path / name / "personal.onnx" for name in ("old", "new")]
    result = invoke("bench", *files, *QUICK, "--threads", "1", "--meter", "none", "-o", tmp_path / "o")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o" / "report.json").read_text())
    sizes = {name: about["macs"] for name, about in found["variants"].items()}
    assert sizes == {"old/personal.onnx": 12 * 64 + 64 * 3, "new/personal.onnx": 12 * 4 + 4 * 3}
    assert [r["variant"] for r in found["rows"]] == list(sizes)
    assert "is given twice" in str(invoke("bench", files[0], files[0]).exception)


def test_files_that_take_other_inputs_or_do_not_open_are_named(tmp_path: Path) -> None:
    for width in (12, 5):
        (tmp_path / str(width)).mkdir()
        bundle = sequential_bundle(tmp_path / str(width), (width,), (Linear(4), Act(), Linear(3)))
        write_dense(bundle, random_personal(bundle, 0, 1.0, 1.0), tmp_path / f"{width}.onnx")
    said = str(invoke("bench", tmp_path / "12.onnx", tmp_path / "5.onnx", *QUICK).exception)
    assert "5.onnx takes float32[1, 5] and" in said
    assert "12.onnx float32[1, 12] (a free axis counts as 1)" in said
    (tmp_path / "wrong.onnx").write_bytes(b"wrong")
    assert str(invoke("bench", tmp_path / "wrong.onnx").exception).endswith("such as a personal.onnx")


def test_the_tensors_that_a_model_keeps_in_a_file_beside_it_are_part_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = small(tmp_path / "b")
    ((dense,), _) = variants.made(variants.Source(bundle, None, np.zeros((1, 12), np.float32)), tmp_path, ["dense"])
    file = tmp_path / "own.onnx"
    onnx.save(onnx.load(dense.file), file, save_as_external_data=True, location="own.data", size_threshold=0)
    both = measure.files_of(file)
    assert both == [file, tmp_path / "own.data"]
    dropped: list[Path] = []
    monkeypatch.setattr(child, "drop_from_cache", dropped.append)
    result = invoke("bench", file, *QUICK, "--threads", "1", "--meter", "none", "-o", tmp_path / "o")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o" / "report.json").read_text())
    assert found["variants"]["own"]["bytes"] == sum(f.stat().st_size for f in both) > dense.file.stat().st_size / 2
    assert dropped == both


def _onnx(file: Path, kind: int, shape: list[Any] | None, op: str = "Identity") -> Path:
    """A model of one operator, whose input has the type and shape given."""
    ends = [onnx.helper.make_tensor_value_info(name, kind, shape if name == "x" else None) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, ["x"], ["y"])], "g", ends[:1], ends[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    file.write_bytes(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())
    return file


FLOAT = onnx.TensorProto.FLOAT


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "DOUBLE", "INT64", "INT32", "UINT8", "INT8"])
def test_a_model_may_take_any_of_the_usual_numbers(tmp_path: Path, kind: str) -> None:
    file = _onnx(tmp_path / "m.onnx", getattr(onnx.TensorProto, kind), ["n", 3])
    shape, dtype = engines.sample_of(file)
    assert shape == (1, 3)
    engines.open_model(file, engines.batch(shape, dtype))()


def test_free_axes_have_size_one_and_the_report_says_so_or_the_size_that_is_asked(tmp_path: Path) -> None:
    file = _onnx(tmp_path / "m.onnx", FLOAT, ["n", 3, "h", "w"])
    quick = [*QUICK, "--cold-starts", "0", "--threads", "1", "--meter", "none"]
    said = invoke("bench", file, *quick).output
    assert "m, one sample of [1, 3, 1, 1], onnxruntime" in said
    assert "m: its input's free axes [2, 3] have size 1 here; --shape gives them another" in said
    said = invoke("bench", file, *quick, "--shape", "2,3,8,9").output
    assert "m, a run of [2, 3, 8, 9], onnxruntime" in said
    assert "free axes" not in said


@pytest.mark.parametrize(
    ("shape", "words", "why"),
    [
        ([1, 3], ["--shape", "1,4"], "m.onnx takes [1, 3], which [1, 4] is not; mend --shape"),
        (["n", 3], ["--shape", "3"], "m.onnx takes [n, 3], which [3] is not"),
        (None, [], "m.onnx does not say the shape of its input x"),
        ([1, 10**6, 10**6], [], "more than 1073741824 values a run"),
        (["n", 0], [], "m.onnx does not run on float32[1, 1]"),
    ],
)
def test_an_input_that_cannot_be_made_is_said_in_a_line(
    tmp_path: Path, shape: list[Any] | None, words: list[str], why: str
) -> None:
    said = str(invoke("bench", _onnx(tmp_path / "m.onnx", FLOAT, shape), *QUICK, *words).exception)
    assert why in said
    assert "\n" not in said


def test_what_is_wrong_with_the_words_is_said_before_a_variant_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*given: Any) -> None:
        raise AssertionError("a variant was made")

    monkeypatch.setattr("edge_client.bench.subject.made", made)
    for words in (["--meter", "abacus"], ["--method", "magic"]):
        assert "there is no" in str(invoke("bench", DIGITS, *words).exception)


def test_a_bundle_that_comes_with_the_package_is_measured_by_its_name() -> None:
    words = ["digits", *QUICK, "--cold-starts", "0", "--threads", "1", "--variants", "dense, dense", "--method", "none"]
    result = invoke("bench", *words)
    assert result.exit_code == 0, result.output
    assert "digits, one sample of [1, 64], onnxruntime" in result.output


def test_a_name_is_the_shortest_that_no_other_file_has() -> None:
    given = [Path("x/a.onnx"), Path("x/a.pte"), Path("x/b.onnx"), Path("c/d/e.onnx"), Path("f/d/e.onnx")]
    assert distinct(given) == ["a.onnx", "a.pte", "b", "c/d/e.onnx", "f/d/e.onnx"]
    assert len(set(distinct([Path("a.onnx"), Path("y/a.onnx.onnx"), Path("y/a.onnx")]))) == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["missing.onnx"], "missing.onnx is not there; name model files, a bundle's folder, or one of the bundles"),
        ([__file__.replace(".py", ".pte")], "is not there"),
        ([DIGITS, "--threads", "100000"], "--threads 100000 is more than 4 times the"),
        (["digit"], "digit is not there; name model files, a bundle's folder, or one of the bundles"),
        ([__file__], "is no model; name a bundle's folder, or a file that ends in .onnx or .pte"),
        ([DIGITS, DIGITS], "is a bundle; give it alone"),
        ([DIGITS, "--keep", "0.5", "--personal", "x"], "both say the mask"),
        ([DIGITS, "--threads", "0"], "--threads 0"),
        ([DIGITS, "--meter", "abacus"], "there is no meter 'abacus'"),
        ([DIGITS, "--method", "magic"], "there is no method 'magic'"),
        ([DIGITS, "--variants", "masked"], "digits can be made: masked: needs a mask: give --personal FILE"),
        ([DIGITS, "--adb", "auto"], "a phone needs a runner"),
        ([__file__, "--keep", "0.5"], "go with a bundle's folder"),
        (["digit"], "did you mean 'digits'?"),
        ([DIGITS, "--runner", "x"], "--runner is for a phone; name it with --adb"),
        ([DIGITS, "--shape", "1,64"], "--shape goes with model files"),
        ([__file__, "--shape", "1,x"], "--shape 1,x: give numbers from 1 up"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(words: list[Any], why: str) -> None:
    result = invoke("bench", *words)
    assert result.exit_code != 0
    assert why in f"{result.output} {result.exception}"


def test_help_lists_the_commands_and_meters_lists_the_meters() -> None:
    text = invoke("bench", "--help").output
    assert all(word in text for word in ("run", "compare", "meters"))
    assert "Measure models: latency" in invoke("--help").output
    said = invoke("bench", "meters").output
    assert all(name in said for name in ("rapl", "ina219", "monsoon"))


# --- comparing


def test_two_reports_are_compared_row_by_row(digits: Path, tmp_path: Path) -> None:
    first = compare.read(digits / "report.json")
    second = json.loads((digits / "report.json").read_text())
    second["machine"] |= {"kernel": "other", "board": "another Pi", "memory_mb": 1}
    for row in second["rows"]:
        if row["variant"] == "compact":
            row["wall_ms"]["p50"] /= 1e6
            row["wall_ms"]["p50_interval"] = [v / 1e6 for v in row["wall_ms"]["p50_interval"]]
    del second["rows"][0]
    path = tmp_path / "b.json"
    path.write_text(json.dumps(second))
    found = {(p.variant, p.threads): p for p in compare.pairs(first, compare.read(path))}
    assert len(found) == 9
    assert found["compact", 1].ratio == pytest.approx(1e6, rel=1e-3)
    assert found["compact", 1].verdict == "faster"
    assert found["masked", 1].verdict == "no difference"
    said = compare.cautions(first, second)
    assert all(any(text.startswith(f"{name}: ") for text in said) for name in ("kernel", "board", "memory_mb"))
    result = invoke("bench", "compare", digits / "report.json", path)
    assert result.exit_code == 0, result.output
    assert "caution: kernel" in result.output
    assert "faster" in result.output
    second["rows"][-1]["wall_ms"]["p50_interval"] = None
    assert compare.pairs(first, second)[-1].verdict == "too few runs"
    second["variants"]["compact"]["macs"] += 1
    second["settings"]["runs"] += 1
    assert {p.variant: p.verdict for p in compare.pairs(first, second)}["compact"] == "another model"
    said = compare.cautions(first, second)
    assert any(text.startswith("compact is not the same model in both") for text in said)
    assert "the settings differ: runs 12 and 13" in said
    good = json.loads(path.read_text())
    zero = {**good, "rows": [{**good["rows"][0], "wall_ms": {"p50": 0.0, "p50_interval": [0.0, 0.0]}}]}
    for bad in (
        {**good, "rows": [{}]},
        {"format": good["format"], "rows": []},
        zero,
        {**good, "variants": {"dense": 1}},
    ):
        (tmp_path / "c.json").write_text(json.dumps(bad))
        with pytest.raises(DataError, match="is a damaged report"):
            compare.read(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("[]")
    assert "is no report" in str(invoke("bench", "compare", path, tmp_path / "c.json").exception)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"p50": 9.6}, ("no difference", "no difference", "no difference")),  # as two starts of one model
        ({}, {"p50": 8.0}, ("faster", "no difference", "no difference")),
        ({"p50": 8.0}, {}, ("slower", "no difference", "no difference")),
        ({"interval": [6.0, 12.0]}, {"p50": 8.0}, ("no difference", "no difference", "no difference")),
        ({}, {"joules": 0.5, "model_mb": 40.0}, ("no difference", "2.00x less", "2.00x more")),
        ({"joules_error": 0.3}, {"joules": 0.5}, ("no difference", "no difference", "no difference")),
        ({}, {"joules": -0.1, "model_mb": None}, ("no difference", "-", "-")),
    ],
)
def test_a_difference_is_more_than_two_starts_of_one_model_differ_by(
    first: dict[str, Any], second: dict[str, Any], said: tuple[str, str, str]
) -> None:
    def with_row(changed: dict[str, Any]) -> dict[str, Any]:
        p50 = changed.get("p50", 10.0)
        wall = {"p50": p50, "p50_interval": changed.get("interval", [p50 - 0.01, p50 + 0.01])}
        row = {"variant": "v", "engine": "e", "threads": 1, "wall_ms": wall, "joules": 1.0, "joules_error": 0.01,
               "model_mb": 20.0, **changed}  # fmt: skip
        return {"rows": [row], "variants": {}}

    (pair,) = compare.pairs(with_row(first), with_row(second))
    assert (pair.verdict, pair.joules, pair.memory) == said


# --- a phone


PHONE = """#!/bin/sh
cd "{folder}"
echo "$*" >> calls
case "$*" in
  devices) printf 'List of devices attached\\nPIXEL8\\tdevice\\n';;
  *" push "*) shift 3; for f in "$@"; do [ -f "$f" ] && cp "$f" phone/; done; exit 0;;
  *"executor_runner"*chmod*|*chmod*|*mkdir*) ;;
  *"--model_path=compact.pte"*) printf 'I 00:00 Iteration 1 of 2: 1.500000 ms\\nIteration 2 of 2: 2.500000 ms\\n';;
  *"--model_path=dense.pte"*) printf 'Iteration 1 of 1: 10.000000 ms\\nModel executed successfully\\n';;
  *"--model_path=old.pte"*) printf 'Model executed successfully 4 time(s) in 40.0 ms.\\nOutputs\\n';;
  *"--model_path=broken.pte"*) printf 'Failed to load program\\n';;
  *perf_test*dense.onnx*) printf 'm,0.009,50000000,90,0\\nm,0.011,52000000,90,1\\n' > times.csv;;
  *perf_test*compact.onnx*) printf 'm,3e-03,20000000,90,0\\nm,0.003,20000000,90,1\\n' > times.csv;;
  *times.csv*) cat times.csv;;
  *ro.product.model*) echo "Pixel 8";;
  *ro.soc.model*) echo "Tensor G3";;
  *getprop*) echo "x";;
  *scaling_governor*) printf 'sched_pixel\\nsched_pixel\\n';;
  *_freq*) printf '300000\\n1704000\\n';;
  *meminfo*) echo 'MemTotal:        7700000 kB';;
  *nproc*) echo 9;;
  *loadavg*) echo '0.10 0.2 0.3 1/2 3';;
  *uname*) echo 5.15;;
  *"dumpsys battery"*) printf '  AC powered: false\\n  USB powered: true\\n  temperature: 281\\n';;
  *) exit 1;;
esac
"""


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "phone").mkdir()
    program = tmp_path / "adb"
    program.write_text(PHONE.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("ADB", str(program))
    for name in ("executor_runner", "onnxruntime_perf_test", "libonnxruntime.so"):
        (tmp_path / name).write_bytes(b"\x7fELF")
    return tmp_path


def test_a_phone_runs_pte_files_by_executor_runner(phone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.bench.subject.sample_of", lambda path, asked: ((1, 12), "float32"))
    monkeypatch.setattr("edge_client.bench.subject.free_axes", lambda path: [])
    monkeypatch.setattr("edge_client.bench.android.largest_batch", lambda path: 1 if path.stem == "dense" else 32)
    for name in ("dense.pte", "compact.pte", "broken.pte", "old.pte"):
        (phone / name).write_bytes(bytes(100))
    words = ["--adb", "auto", "--runner", phone / "executor_runner", "--threads", "1,4", "--meter", "none"]
    result = invoke("bench", phone / "dense.pte", phone / "compact.pte", *words, "-o", phone / "o")
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    found = json.loads((phone / "o" / "report.json").read_text())
    assert [(r["variant"], r["threads"], r["wall_ms"]["p50"]) for r in found["rows"]] == [
        ("dense", 1, 10.0), ("compact", 1, 2.0), ("dense", 4, 10.0), ("compact", 4, 2.0),
    ]  # fmt: skip
    assert "note" not in found["variants"]["dense"]  # a run of it is one sample, as the title says
    assert "a run is a batch of 32 samples" in found["variants"]["compact"]["note"]
    assert found["machine"]["board"] == "x Pixel 8"
    assert (found["machine"]["processor"], found["machine"]["cores"]) == ("Tensor G3", 9)
    assert found["before"]["celsius"] == 28.1
    assert any("governor is 'sched_pixel'" in text for text in found["warnings"])
    assert sorted(p.name for p in (phone / "phone").iterdir()) == ["compact.pte", "dense.pte", "executor_runner"]
    calls = (phone / "calls").read_text()
    order = [line.partition("model_path=")[2].split(".")[0] for line in calls.splitlines() if "model_path" in line]
    assert order[:4] == ["dense", "compact", "dense", "compact"]  # in turns
    assert "--cpu_threads=4" in calls
    result = invoke("bench", phone / "broken.pte", *words)
    assert "printed no times of the runs of broken.pte: Failed to load program" in str(result.exception)
    result = invoke("bench", phone / "old.pte", *words)
    assert "no times of the runs of old.pte: it is of an older ExecuTorch" in str(result.exception)


def test_a_phone_runs_onnx_files_by_perf_test_and_gives_its_memory(phone: Path, tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    source = variants.Source(bundle, random_personal(bundle, 1, 0.5, 1.0), np.zeros((4, 12), np.float32))
    found, _ = variants.made(source, tmp_path, EXACT)
    runner = ["--runner", phone / "onnxruntime_perf_test", "--runner", phone / "libonnxruntime.so"]
    words = ["--adb", "PIXEL8", *runner, "--threads", "1", "--meter", "none"]
    result = invoke("bench", found[0].file, found[2].file, *words, "-o", phone / "o")
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    rows = json.loads((phone / "o" / "report.json").read_text())["rows"]
    assert [(r["variant"], r["wall_ms"]["p50"], r["peak_mb"]) for r in rows] == [
        ("dense", 10.0, 52.0),
        ("compact", 3.0, 20.0),
    ]
    assert (phone / "phone" / "libonnxruntime.so").exists()
    assert "ORT_DISABLE_TELEMETRY=1 LD_LIBRARY_PATH=. ./onnxruntime_perf_test" in (phone / "calls").read_text()
    missing = invoke("bench", found[0].file, "--adb", "PIXEL8", "--runner", phone / "nowhere", "--meter", "none")
    assert "is not there; name the runner" in str(missing.exception)


def test_a_phone_that_hides_its_load_reports_none(phone: Path) -> None:
    assert android.state(connect("PIXEL8"))["load"] == 0.1
    program = phone / "adb"
    program.write_text(program.read_text().replace("echo '0.10 0.2 0.3 1/2 3'", "echo 'Permission denied' >&2; exit 1"))
    hidden = android.state(connect("PIXEL8"))
    assert hidden["load"] is None
    assert measure.warnings({"machine": {}, "before": hidden, "after": hidden, "rows": []}) == []


def test_the_tensors_beside_a_model_come_onto_the_phone_with_it(phone: Path, tmp_path: Path) -> None:
    bundle = small(tmp_path / "b")
    source = variants.Source(bundle, random_personal(bundle, 1, 0.5, 1.0), np.zeros((4, 12), np.float32))
    (dense, *_), _ = variants.made(source, tmp_path, EXACT)
    settings = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
    onnx.save_model(onnx.load(dense.file), phone / "m.onnx", **settings)
    android.push(connect("PIXEL8"), [phone / "executor_runner"], [variants.Variant("m", phone / "m.onnx")])
    assert (phone / "phone" / "m.data").read_bytes() == (phone / "m.data").read_bytes()


def test_two_files_of_one_name_are_refused_on_a_phone(phone: Path) -> None:
    twins = [variants.Variant(name, phone / name / "personal.pte") for name in ("old", "new")]
    with pytest.raises(ConfigError, match=r"old/personal\.pte have one name"):
        android.push(connect("PIXEL8"), [phone / "executor_runner"], twins)


def test_a_runner_takes_the_variants_of_its_kind_and_all_threads_are_the_phones(phone: Path) -> None:
    kinds = [variants.Variant("dense", Path("dense.onnx")), variants.Variant("pte", Path("pte.pte"))]
    assert android.of_runner("executor_runner", kinds) == (kinds[1:], {"dense": "executor_runner does not run it"})
    assert android.of_runner("onnxruntime_perf_test", kinds)[0] == kinds[:1]
    assert android.of_runner("mine", kinds[:1]) == (kinds[:1], {})
    with pytest.raises(ConfigError, match="mine: its name holds none of"):
        android.of_runner("mine", kinds)
    assert android.processors(connect("PIXEL8")) == 9


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.bench.cli.find_subject", lambda *given: pytest.fail("it measured"))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "o", "/proc"):
        assert "choose another --output" in str(invoke("bench", DIGITS, "-o", folder).exception)


@pytest.mark.parametrize("part", [(plots, "draw"), (report, "show")])
def test_a_picture_or_table_that_cannot_be_shown_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[Any, str]
) -> None:
    def fail(*given: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(*part, fail)
    words = ["--threads", "1", "--method", "none", "--variants", "dense", "--meter", "none", "-o", tmp_path]
    with pytest.raises(BrokenPipeError):
        invoke("bench", DIGITS, *QUICK, *words)
    assert compare.read(tmp_path)["rows"]
    assert "| dense |" in (tmp_path / "report.md").read_text()


# --- the machine


def test_a_pi_is_described_by_its_files(tmp_path: Path) -> None:
    cpu = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    cpu.mkdir(parents=True)
    for name, value in {
        "scaling_governor": "ondemand",
        "cpuinfo_min_freq": "600000",
        "cpuinfo_max_freq": "1800000",
    }.items():
        (cpu / name).write_text(f"{value}\n")
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(b"Raspberry Pi 4 Model B Rev 1.5\0")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd08\n\nModel\t\t: Raspberry Pi 4 Model B\n")
    found = machine.description(tmp_path)
    assert found["board"] == "Raspberry Pi 4 Model B Rev 1.5"
    assert found["processor"] == "Raspberry Pi 4 Model B"
    assert (found["governor"], found["frequency_mhz"], found["virtual"]) == ("ondemand", [600.0, 1800.0], False)


def test_an_engine_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    for opens in (lambda p: engines.open_model(p, np.zeros(1)), engines.sample_of):
        with pytest.raises(ConfigError, match=r"needs ExecuTorch: .*pip install 'maskfleet\[author\]'"):
            opens(tmp_path / "m.pte")


@pytest.mark.parametrize("fault", [NotImplementedError("can't find current frequency file"), OSError(2, "no file")])
def test_a_clock_that_the_system_does_not_report_is_none(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(machine.psutil, "cpu_freq", fail)
    assert machine.state()["mhz"] is None
